"""The GPU's routed experts: are they right, and how fast are whole MoE blocks.

    python benchmarks/gpu_moe.py --check            against float64
    python benchmarks/gpu_moe.py --time --out FILE  whole blocks, by the forms that dispatch chooses
    python benchmarks/gpu_moe.py --tune --out FILE  every form that may win at a batch size
    python benchmarks/gpu_moe.py --vllm --out FILE  vLLM's bf16 fused MoE, where vLLM is installed
    python benchmarks/gpu_moe.py --peer --out FILE  exllamav3's block of experts, where that package is installed

A timing is one whole block (sorting, transforms, both GEMMs, activation, weighted sum) in a replayed CUDA graph that
goes round over different inputs and routings; the median of several replays. Routings are uniform. Beside the rows of
--time the file tells what gpu_moe_summary.py finds in them.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_moe_checks import ALL, FORMS, SHAPES, Checks, every_form
from gpu_moe_layers import GpuLayer, random_layer
from gpu_moe_peer import peer_us
from gpu_moe_summary import summaries, table

from vllm_exl3.cuda import moe as kernels
from vllm_exl3.cuda.moe_geometry import MoeForm
from vllm_exl3.cuda.moe_timing import copies_for, random_routing
from vllm_exl3.cuda.timing import replayed
from vllm_exl3.ops.experts import projection_kinds
from vllm_exl3.tools.expert_layout import lay_out_experts
from vllm_exl3.tools.results import need_gpus, write_results

TOKENS = (1, 2, 4, 8, 16, 64, 512, 2048, 8192)

_NARROW_ROWS = 8.0
"""Up to how many tokens an expert, on average, the decode path is timed with --tune."""


def check(seed: int, names: list[str]) -> bool:
    """The checks of these names, or all; prints the worst errors and every failure."""
    checks = Checks()
    for function in ALL:
        if not names or function.__name__.removeprefix("check_") in names:
            torch.manual_seed(seed)
            function(checks, seed)
            print(f"{function.__name__}: {checks.done} checks, {len(checks.failed)} failed", flush=True)
    return checks.report(seed)


def block_us(layer: GpuLayer, top_k: int, tokens: int, form: MoeForm | None) -> float:
    """Microseconds of one block."""
    copies = copies_for(tokens)
    x = torch.randn(tokens, layer.hidden, device="cuda", dtype=torch.bfloat16)
    calls = [layer.arguments(*random_routing(tokens, len(layer.projections), top_k, seed)) for seed in range(copies)]
    return replayed(lambda i: kernels.moe(x, *calls[i], form=form), copies, repeats=5)


def vllm_us(experts: int, top_k: int, hidden: int, intermediate: int) -> Callable[[int], dict[str, float]]:
    """A function of the number of tokens: microseconds of vLLM's fused MoE (Triton) in bfloat16."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02)

    w1, w2 = weights(experts, 2 * intermediate, hidden), weights(experts, hidden, intermediate)

    def us(tokens: int) -> dict[str, float]:
        copies = copies_for(tokens)
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        routes = [random_routing(tokens, experts, top_k, seed) for seed in range(copies)]
        return {"us": replayed(lambda i: fused_experts(x, w1, w2, *routes[i]), copies, repeats=5)}

    return us


def forms_for(arguments: argparse.Namespace, experts: int, top_k: int, tokens: int) -> list[MoeForm | None]:
    """What is timed at a number of tokens: what dispatch chooses, or with --tune every form that may win there."""
    if not arguments.tune:
        return [None]
    rows = tokens * top_k / experts  # an expert, on average
    least = {"wide32": 1.0, "wide64": 8.0, "wide128": 24.0, "wide256": 24.0}
    most = {"wide32": 64.0, "wide64": 128.0, "wide128": 256.0}
    return [
        form
        for form in every_form()
        if least.get(form.name, 0.0) <= rows <= most.get(form.name, math.inf) and (form.wide or rows <= _NARROW_ROWS)
    ]


def prepare_all(names: list[str]) -> None:
    """Compile, in parallel, what layers of these shapes need."""
    layers = []
    for name in names:
        experts, _, hidden, intermediate, kinds, options = SHAPES[name]
        gated = bool(options.get("gated", True))
        projections, _ = lay_out_experts(experts, hidden, intermediate, kinds, gated=gated)
        layers.append((tuple(projection_kinds(projections)), experts, experts, hidden, intermediate))
    kernels.prepare(layers, torch.device("cuda", torch.cuda.current_device()))


def measure(arguments: argparse.Namespace) -> None:
    """One row per shape, number of tokens and form; written as they come."""
    rows: list[dict[str, object]] = []
    prepare_all(arguments.shapes)
    for name in arguments.shapes:
        experts, top_k, hidden, intermediate, kinds, options = SHAPES[name]
        layer = random_layer(experts, hidden, intermediate, kinds, **options)  # type: ignore[arg-type]
        for tokens in arguments.tokens:
            for form in forms_for(arguments, experts, top_k, tokens):
                us = block_us(layer, top_k, tokens, form)
                rows.append(_row("native", name, tokens, us, form.name if form else None))
                print(f"{name} m={tokens:<5d} {form.name if form else '':10s} {us:9.1f} µs", flush=True)
        write(arguments, rows if arguments.tune else [*rows, *summaries(rows)])
        del layer
        torch.cuda.empty_cache()


def measure_other(arguments: argparse.Namespace, kernel: str) -> None:
    """The same for another implementation."""
    rows: list[dict[str, object]] = []
    for name in arguments.shapes:
        experts, top_k, hidden, intermediate, kinds, _ = SHAPES[name]
        if kernel == "vllm_bf16":
            us_of = vllm_us(experts, top_k, hidden, intermediate)
        elif len(kinds) == 1:
            us_of = peer_us((experts, top_k, hidden, intermediate, int(kinds[0][0])), copies_for)
        else:
            continue  # its kernels take one K for all experts
        for tokens in arguments.tokens:
            times = {key: round(us, 2) for key, us in us_of(tokens).items()}
            rows.append(_row(kernel, name, tokens, times["us"], None) | times)
            print(f"{name} m={tokens:<5d} {kernel} {times}", flush=True)
        write(arguments, rows)
        del us_of
        torch.cuda.empty_cache()


def _row(kernel: str, name: str, tokens: int, us: float, form: str | None) -> dict[str, object]:
    experts, top_k, hidden, intermediate, kinds, options = SHAPES[name]
    operations = 2 * tokens * top_k * hidden * intermediate * (3 if options.get("gated", True) else 2)
    bits = 16 if kernel == "vllm_bf16" else [bits for bits, _ in kinds]
    return {
        "kernel": kernel, "shape": name, "experts": experts, "top_k": top_k, "in": hidden, "out": intermediate,
        "m": tokens, "bits": bits, "mode": form, "us": round(us, 2), "tflops": round(operations / us / 1e6, 2),
    }  # fmt: skip


def write(arguments: argparse.Namespace, rows: list[dict[str, object]]) -> None:
    """Write what was measured so far, beside the other kernels' rows in the file."""
    if arguments.out:
        kernels_measured = {row["kernel"] for row in rows}
        write_results(
            Path(arguments.out),
            rows,
            machine="h200",
            command="python benchmarks/gpu_moe.py " + " ".join(sys.argv[1:]),
            replaces=lambda row: row["kernel"] in kernels_measured,
        )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], help="names of checks")
    parser.add_argument("--forms", nargs="*", default=[], help="names of forms, such as identity4 wide128")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--tune", action="store_true", help="every form")
    parser.add_argument("--vllm", action="store_true", help="vLLM's bf16 fused MoE instead of the native kernels")
    parser.add_argument("--peer", action="store_true", help="exllamav3's block instead of the native kernels")
    parser.add_argument("--table", action="store_true", help="print what a results file says, FILE of --out")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES)[:4])
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    need_gpus()
    FORMS[:] = arguments.forms
    right = check(arguments.seed, arguments.only) if arguments.check else True
    if arguments.vllm or arguments.peer:
        measure_other(arguments, "vllm_bf16" if arguments.vllm else "exllamav3")
    elif arguments.time or arguments.tune:
        measure(arguments)
    if arguments.table:
        print("\n".join(table(json.loads(Path(arguments.out).read_text(encoding="utf-8"))["rows"])))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
