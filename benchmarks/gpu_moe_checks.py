"""Checks of the GPU's MoE kernels against float64, on fresh random inputs; used by gpu_moe.py and by tests/gpu."""

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence

import gpu_linear_checks
import torch
from gpu_moe_layers import INST3, MCG, MUL1, GpuLayer, Kind, every_kind, random_layer

from vllm_exl3.cuda import moe as kernels
from vllm_exl3.cuda import runtime
from vllm_exl3.cuda.moe_gemm import forms, gemm_instance
from vllm_exl3.cuda.moe_geometry import MoeForm
from vllm_exl3.cuda.moe_plan import COMBINE, COMBINE_ROWS, COUNT, GROUP_ROWS, ROUTE, ROWS, SCHEDULE, SWIGLU_ROWS
from vllm_exl3.cuda.moe_timing import random_routing

BOUND = 1.2e-3
"""Relative Frobenius error of a whole layer, also of a single row: of three linears within 5e-4 each two are multiplied
and one follows, which is 8.7e-4 where errors are independent."""

TOKENS = (1, 2, 8, 64, 300)

MIXED: tuple[Kind, ...] = (
    (2, MUL1), (8, MCG), (3, INST3), (5, INST3), (1.5, MUL1), (4, MCG), (6, INST3), (7, INST3), (3.5, MUL1), (1, MCG),
    (2.5, MUL1),
)  # fmt: skip
"""Every rate; as many kinds as a layer can reasonably mix, with no common divisor with three projections."""


class Checks(gpu_linear_checks.Checks):
    """The checks of linears with the bound of a layer of experts, and conditions."""

    def compare(
        self, name: str, group: str, found: torch.Tensor, expected: torch.Tensor, bound: float = BOUND
    ) -> float:
        """Relative Frobenius error, NaN counting as failure."""
        self.done += 1
        error = float((found.double() - expected).norm() / expected.norm().clamp(min=1e-300))
        self.worst[group] = max(self.worst.get(group, 0.0), error)
        if not error <= bound:
            self.failed.append(f"{name}: relative error {error:.3e}, at most {bound:.1e} allowed")
        return error

    def expect(self, name: str, holds: bool) -> None:
        """A condition."""
        self.done += 1
        if not holds:
            self.failed.append(name)

    def same(self, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Bit for bit."""
        differ = int((found != expected).sum())
        self.expect(f"{name}: {differ} of {found.numel()} values differ", differ == 0)


FORMS: list[str] = []
"""Names of the forms that are looked at; all where it is empty."""


def every_form() -> list[MoeForm]:
    """Every way that this GPU can multiply experts, of those asked for."""
    every = forms(runtime.device(torch.cuda.current_device()).limits)
    return [form for form in every if not FORMS or form.name in FORMS]


def prepare(layers: Iterable[Iterable[Kind]]) -> None:
    """Compile and load, in parallel, the kernels of layers of these kinds in every form."""
    device = runtime.device(torch.cuda.current_device())
    started = time.perf_counter()
    codes = [tuple(sorted({(round(2 * bits), codebook) for bits, codebook in kinds})) for kinds in layers]
    wanted = [gemm_instance(code, form) for code in codes for form in every_form()]
    device.prepare([ROWS, *GROUP_ROWS, SWIGLU_ROWS, COUNT, ROUTE, SCHEDULE, COMBINE, COMBINE_ROWS, *wanted])
    print(f"{len(set(wanted))} kernels ready after {time.perf_counter() - started:.1f} s", flush=True)


def run(layer: GpuLayer, x: torch.Tensor, route: tuple[torch.Tensor, torch.Tensor], form: MoeForm | None = None,
        expert_map: torch.Tensor | None = None, on_input: bool = False) -> torch.Tensor:  # fmt: skip
    """The op by the native kernels, with poisoned memory around."""
    poison = torch.full((1 << 22,), math.nan, device="cuda")
    del poison
    return kernels.moe(x, *layer.arguments(*route, expert_map, on_input), form=form)


def check_kinds(checks: Checks, seed: int) -> None:
    """`check_every_kind` of a sample."""
    sample = gpu_linear_checks.sample_of_kinds(seed)
    check_every_kind(checks, seed, [(half_bits / 2, int(codebook)) for half_bits, codebook in sample])


def check_every_kind(checks: Checks, seed: int, kinds: Sequence[Kind] = every_kind()) -> None:
    """Each rate and codebook by itself, in every form, with all experts different."""
    prepare([[kind] for kind in kinds])
    for bits, codebook in kinds:
        layer = random_layer(5, 384, 256, [(bits, codebook)], seed=seed)
        x, route = torch.randn(21, 384, device="cuda"), random_routing(21, 5, 2, seed)
        expected = layer.oracle(x, *route)
        for form in every_form():
            name = f"K={bits} codebook {codebook} {form.name}"
            for rows in (1, 21):
                part = (route[0][:rows], route[1][:rows])
                checks.compare(f"{name} M={rows}", form.name, run(layer, x[:rows], part, form), expected[:rows])


def check_mixed(checks: Checks, seed: int) -> None:
    """Every rate in one launch; biases, padding, ids of no expert, and that a wrong route is seen."""
    prepare([MIXED])
    for experts, hidden, intermediate, bias in ((11, 256, 256, False), (7, 200, 320, True), (16, 1152, 640, False)):
        layer = random_layer(experts, hidden, intermediate, MIXED, bias=bias, seed=seed)
        for tokens in TOKENS:
            x, route = torch.randn(tokens, hidden, device="cuda"), random_routing(tokens, experts, 3, seed)
            if tokens > 2:
                route[1][1, 1] = -1
                route[1][2] = -1
            expected = layer.oracle(x, *route)
            for form in [*every_form(), None]:
                name = f"mixed {experts}×{hidden}×{intermediate} M={tokens} {form.name if form else 'chosen'}"
                found = run(layer, x, route, form)
                checks.compare(name, "mixed", found, expected)
                checks.same(f"{name} twice", run(layer, x, route, form), found)
                wide_ids = (route[0], route[1].long())
                checks.same(f"{name} int64 ids", run(layer, x, wide_ids, form), found)
                if tokens == 8:
                    wrong = (route[0], route[1].roll(1, 0))
                    error = float((run(layer, x, wrong, form).double() - expected).norm() / expected.norm())
                    checks.expect(f"{name}: a wrong route is not seen", error > 20 * BOUND)


def check_activations(checks: Checks, seed: int) -> None:
    """Every activation, limits that clip, routing weights on the input, dtypes."""
    calls = [
        ("swiglu", 1.0, 0.0, math.inf), ("swiglu", 1.702, 1.0, 7.0), ("swiglu", 1.0, 0.0, 1.0),
        ("swiglu_step", 1.0, 0.0, 0.7),
        ("situ", 2.0, 1.5, math.inf), ("situ", 2.0, 0.0, math.inf), ("gelu", 1.0, 0.0, math.inf),
        ("gelu_tanh", 1.0, 0.0, math.inf), ("silu_ungated", 1.0, 0.0, math.inf), ("gelu_ungated", 1.0, 0.0, math.inf),
        ("gelu_tanh_ungated", 1.0, 0.0, math.inf), ("relu2_ungated", 1.0, 0.0, math.inf),
    ]  # fmt: skip
    for call in calls:
        gated = not call[0].endswith("ungated")
        layer = random_layer(6, 256, 384, [(4, MUL1), (3, MCG)], gated=gated, activation=call, bias=True, seed=seed)
        for dtype, bound in ((torch.float32, BOUND), (torch.float16, BOUND), (torch.bfloat16, 3e-3)):
            x = (3 * torch.randn(33, 256, device="cuda")).to(dtype)
            route = random_routing(33, 6, 2, seed)
            expected = layer.oracle(x, *route)
            for form in every_form():
                name = f"{call} {dtype} {form.name}"
                found = run(layer, x, route, form)
                checks.compare(name, "activations", found, expected, bound)
                checks.expect(f"{name}: dtype {found.dtype}", found.dtype == dtype)
        one = random_routing(33, 6, 1, seed)
        one = (one[0] * 0.3, one[1])
        x = torch.randn(33, 256, device="cuda")
        expected = layer.oracle(x, *one, on_input=True)
        for form in every_form():
            found = run(layer, x, one, form, on_input=True)
            checks.compare(f"{call} on input {form.name}", "on input", found, expected)


def check_clipping(checks: Checks, seed: int) -> None:
    """A limit that the values really exceed, at the shapes that DeepSeek-like models have."""
    for intermediate in (1024, 2048):
        for bits in (2, 3, 4):
            # Large enough to clip; much more, and the values that are left between the limits decide the error.
            for limit, scale in ((math.inf, 2), (1.0, 0.75), (10.0, 12)):
                call = ("swiglu", 1.0, 0.0, limit)
                layer = random_layer(4, 4096, intermediate, [(bits, MCG)], activation=call, seed=seed)
                x, route = scale * torch.randn(5, 4096, device="cuda"), random_routing(5, 4, 2, seed)
                expected = layer.oracle(x, *route)
                layer.activation = ("swiglu", 1.0, 0.0, math.inf)
                free = layer.oracle(x, *route)
                layer.activation = call
                clipped = float((expected - free).norm() / free.norm())
                checks.expect(f"limit {limit} clips nothing", (clipped > 1e-2) == (limit < math.inf))
                for form in every_form():
                    found = run(layer, x, route, form)
                    checks.compare(f"4096×{intermediate} K={bits} limit {limit} {form.name}", "limits", found, expected)


def check_ranks(checks: Checks, seed: int) -> None:
    """Expert-parallel shares add up; shared input scales give the same result as equal ones."""
    layer = random_layer(8, 256, 256, MIXED, seed=seed)
    x, route = torch.randn(40, 256, device="cuda"), random_routing(40, 8, 3, seed)
    expected = layer.oracle(x, *route)
    for form in every_form():
        total = torch.zeros_like(x)
        for here in ([0, 3, 4, 6], [1, 2, 5, 7]):
            expert_map = torch.full((8,), -1, dtype=torch.int32, device="cuda")
            expert_map[here] = torch.arange(4, dtype=torch.int32, device="cuda")
            local = [layer.projections[e] for e in here]
            part = GpuLayer(256, 256, local, layer.tensors, layer.activation, layer.table[here].contiguous())
            total += run(part, x, route, form, expert_map)
        checks.compare(f"two ranks {form.name}", "ranks", total, expected)
    for kinds in ([(4.0, MUL1)], [(4.0, MUL1), (3.0, MCG)]):
        shared = random_layer(8, 256, 256, kinds, seed=seed)
        suh = shared.tensors["w13_suh"]
        assert suh is not None
        for gate, up, _ in shared.projections:
            suh[up.suh : up.suh + 256] = suh[gate.suh : gate.suh + 256]
        for form in every_form():
            apart = run(shared, x, route, form)
            projections, table = list(shared.projections), shared.table
            shared.share_scales()
            checks.same(f"shared suh {form.name}", run(shared, x, route, form), apart)
            shared.projections, shared.table = projections, table


def check_determinism(checks: Checks, seed: int) -> None:
    """Alone or in a batch; eager or replayed, with other inputs and another routing; no host synchronisation."""
    layer = random_layer(16, 1024, 384, [(4, MUL1), (3, MCG), (2.5, MUL1)], seed=seed)
    x, route = torch.randn(100, 1024, device="cuda").half(), random_routing(100, 16, 4, seed)
    grouped = [run(layer, x, route, form) for form in every_form() if form.wide]
    for index, found in enumerate(grouped[1:]):
        checks.same(f"grouped form {index + 1} and the first", found, grouped[0])
    for form in every_form():
        x, route = torch.randn(48, 1024, device="cuda").half(), random_routing(48, 16, 4, seed)
        whole = run(layer, x, route, form)
        for rows in (1, 2, 7, 31):
            for start in (0, 48 - rows):
                part = slice(start, start + rows)
                alone = run(layer, x[part], (route[0][part], route[1][part]), form)
                checks.same(f"{form.name} rows {start}+{rows} alone", alone, whole[part])
        for tokens in (1, 3, 48):
            inputs, weights, ids = x[:tokens].clone(), route[0][:tokens].clone(), route[1][:tokens].clone()
            call = functools.partial(kernels.moe, inputs, *layer.arguments(weights, ids), form=form)
            call()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = call()
            for round_ in range(3):
                other = random_routing(tokens, 16, 4, seed + round_)
                inputs.copy_(torch.randn_like(inputs)), weights.copy_(other[0]), ids.copy_(other[1])
                graph.replay()
                checks.same(f"{form.name} M={tokens} replay {round_}", captured, run(layer, inputs, other, form))


def check_magnitudes(checks: Checks, seed: int) -> None:
    """Inputs of any magnitude and with outliers; rows of zeros and NaNs stay in their row."""
    layer = random_layer(
        4, 512, 256, [(4, MUL1), (4, MCG)], seed=seed, activation=("relu2_ungated", 1.0, 0.0, math.inf), gated=False
    )
    route = random_routing(6, 4, 2, seed)
    for magnitude in (1e-6, 1.0, 1e6):
        x = torch.randn(6, 512, device="cuda") * magnitude
        x[0, 17] *= 3000
        expected = layer.oracle(x, *route)
        for form in every_form():
            found = run(layer, x, route, form)
            for row in range(6):
                name = f"magnitude {magnitude} {form.name} row {row}"
                checks.compare(name, "magnitudes", found[row], expected[row], 2e-3)
    x = torch.randn(6, 512, device="cuda")
    x[1], x[2, 5] = 0, math.nan
    for form in every_form():
        found = run(layer, x, route, form)
        right = bool((found[1] == 0).all() and found[2].isnan().all() and not found[[0, 3, 4, 5]].isnan().any())
        checks.expect(f"{form.name}: zero and NaN rows", right)


SHAPES: dict[str, tuple[int, int, int, int, list[Kind], dict[str, object]]] = {
    "128 experts 2048×768 K4": (128, 8, 2048, 768, [(4, MUL1)], {}),
    "512 experts 2560×640 K3": (512, 10, 2560, 640, [(3, MUL1)], {}),
    "288 experts 4096×2048 K2": (288, 8, 4096, 2048, [(2, MUL1)], {}),
    "384 experts 5120×2304 K2..K8": (384, 6, 5120, 2304, [(bits, MUL1) for bits in range(2, 9)], {}),
    "288 experts 4096×2048 K3 mcg": (288, 8, 4096, 2048, [(3, MCG)], {}),
    "288 experts 4096×2048 K4 3INST": (288, 8, 4096, 2048, [(4, INST3)], {}),
    "128 experts 2688×1856 ReLU²": (128, 6, 2688, 1856, [(3, MUL1)],
        {"gated": False, "activation": ("relu2_ungated", 1.0, 0.0, math.inf)}),
    "32 experts 2880×2880 SwiGLU-OAI, biases": (32, 4, 2880, 2880, [(4, MCG), (5, MCG)],
        {"bias": True, "activation": ("swiglu", 1.702, 1.0, 7.0)}),
    "384 experts 5120×2304 K5": (384, 6, 5120, 2304, [(5, MUL1)], {}),
}  # fmt: skip
"""Real models: experts, top-k, hidden, intermediate, kinds, further arguments of `random_layer`."""


def check_shapes(checks: Checks, seed: int, names: Iterable[str] = tuple(SHAPES)) -> None:
    """Whole layers of real models' sizes."""
    for name in names:
        experts, top_k, hidden, intermediate, kinds, options = SHAPES[name]
        layer = random_layer(experts, hidden, intermediate, kinds, seed=seed, **options)  # type: ignore[arg-type]
        for tokens in (1, 8, 40):
            x, route = torch.randn(tokens, hidden, device="cuda").half(), random_routing(tokens, experts, top_k, seed)
            expected = layer.oracle(x, *route)
            for form in [None] if tokens > 1 else every_form():
                label = f"{name} M={tokens} {form.name if form else 'chosen'}"
                checks.compare(label, "shapes", run(layer, x, route, form), expected)
        del layer
        torch.cuda.empty_cache()


ALL: tuple[Callable[[Checks, int], None], ...] = (
    check_every_kind, check_mixed, check_activations, check_clipping, check_ranks, check_determinism, check_magnitudes,
    check_shapes,
)  # fmt: skip


def check_all(checks: Checks, seed: int) -> None:
    """Everything, on inputs of this seed."""
    for check in ALL:
        torch.manual_seed(seed)
        check(checks, seed)
