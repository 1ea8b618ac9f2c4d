"""The pass that puts norms and activations into the EXL3 linears behind them, on graphs of Inductor's."""

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import vllm.ir.ops
from torch import fx
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.config.utils import Range
from vllm.model_executor.layers.activation import SiluAndMul

from vllm_exl3 import env
from vllm_exl3.ops import backends
from vllm_exl3.ops.backends import Backend, FusedLinear
from vllm_exl3.ops.fused_linear import FUSED_ROWS
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.serving.norm_fusion import LinearFusionPass, fuse_into_linears

WIDTH = 128
FUSED, PAIR, ONE = 3, [Shard(8, 2, WIDTH, 128, 0, 128)] * 2, [Shard(8, 2, WIDTH, 128, 0, 128)]
Weights = dict[str, Any]


def weights(shards: list[Shard], seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    words = sum(shard.trellis_words for shard in shards)
    inputs, outputs = (sum(getattr(s, name) for s in shards) for name in ("in_features", "out_features"))
    trellis = torch.randint(-(1 << 15), 1 << 15, (words,), dtype=torch.int16, generator=generator)
    return trellis, torch.rand(inputs, generator=generator).half() + 0.5, torch.full((outputs,), 0.1).half()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A backend that says it has fused kernels, and notes what it was passed; they are the plain ops."""
    from vllm_exl3.ops.fused_linear import add_rms_norm, silu_and_mul

    calls: list[str] = []

    def rms_norm(
        x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float, layer: Any
    ) -> Any:
        calls.append("norm" if residual is None else "add_norm")
        normed, total = add_rms_norm(x, residual, weight, epsilon)
        return layer.apply(normed), None if residual is None else total

    def product(x: torch.Tensor, layer: Any) -> torch.Tensor:
        calls.append("silu")
        return layer.apply(silu_and_mul(x))

    fused = FusedLinear(lambda shards, width, dtype: width % 4 == 0 and dtype != torch.float32, rms_norm, product)
    backend = Backend("linear", "cpu", "fake", linear_reference, lambda: None, fused=fused)
    monkeypatch.setitem(backends._choices, ("linear", "cpu"), backends.Choice(backend))
    yield calls


def linear(x: torch.Tensor, layer: tuple[torch.Tensor, ...], shards: list[Shard]) -> torch.Tensor:
    return torch.ops.vllm_exl3.linear(x.reshape(-1, x.shape[-1]), *layer, None, pack_shards(shards), "L")


def mlp(x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, up: Any, down: Any) -> Any:
    """A layer's second half: both of its linears have something before them."""
    x, residual = vllm.ir.ops.fused_add_rms_norm.torch_op(x, residual, norm, 1e-5)
    x = SiluAndMul.forward_native(linear(x, up, PAIR))
    return linear(x, down, ONE), residual


def first(x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, up: Any, down: Any) -> Any:
    """A model's first norm, which adds nothing."""
    return linear(vllm.ir.ops.rms_norm.torch_op(x, norm, 1e-5), up, PAIR), residual


def shared(x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, up: Any, down: Any) -> Any:
    """The norm is read by a second layer, such as a router."""
    normed, residual = vllm.ir.ops.fused_add_rms_norm.torch_op(x, residual, norm, 1e-5)
    return linear(normed, up, PAIR), residual + normed


def swapped(x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, up: Any, down: Any) -> Any:
    """An activation whose halves are the other way round."""
    y = linear(x, up, PAIR)
    return linear(torch.nn.functional.silu(y[:, WIDTH:]) * y[:, :WIDTH], down, ONE), residual


def run(
    model: Callable[..., Any], rows: int = 20, dtype: torch.dtype = torch.bfloat16, *, with_pass: bool = True
) -> tuple[torch.Tensor, ...]:
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(rows)
    x, residual = (torch.randn(rows, WIDTH, generator=generator).to(dtype) for _ in range(2))
    norm = (torch.rand(WIDTH, generator=generator) + 0.5).to(dtype)
    for tensor in (x, residual):
        torch._dynamo.mark_dynamic(tensor, 0)
    options = {"post_grad_custom_post_pass": LinearFusionPass()} if with_pass else {}
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        return torch.compile(model, options=options)(x, residual, norm, weights(PAIR, 1), weights(ONE, 2))


@pytest.mark.parametrize(
    ("model", "expected"),
    [(mlp, ["add_norm", "silu"]), (first, ["norm"]), (shared, []), (swapped, [])],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_what_only_a_linear_reads_is_fused(counted: list[str], model: Callable[..., Any], expected: list[str]) -> None:
    plain = run(model, with_pass=False)
    assert counted == []
    found = run(model)
    assert counted == expected
    for each, reference in zip(found, plain, strict=True):
        error = (each.float() - reference.float()).norm() / reference.float().norm()
        assert error <= 1e-2  # two roundings to bfloat16 less
        assert each.dtype == reference.dtype and each.stride() == reference.stride()
    if model is mlp:
        assert torch.equal(found[1], plain[1])


def test_other_dtypes_keep_their_norms(counted: list[str]) -> None:
    run(first, dtype=torch.float32)
    assert counted == []


@pytest.mark.parametrize("rows", [FUSED_ROWS.start - 1, FUSED_ROWS.stop])
def test_other_numbers_of_tokens_take_the_plain_ops(counted: list[str], rows: int) -> None:
    """A graph that was fused is right for them, too."""
    found, plain = run(mlp, rows), run(mlp, rows, with_pass=False)
    assert counted == []
    error = (found[0].float() - plain[0].float()).norm() / plain[0].float().norm()
    assert error <= 1e-2


@pytest.mark.parametrize(
    ("first_tokens", "last_tokens", "applies"), [(9, 128, True), (9, 64, True), (1, 8, False), (9, 8192, False)]
)
def test_the_pass_is_for_few_tokens(first_tokens: int, last_tokens: int, applies: bool) -> None:
    assert LinearFusionPass().is_applicable_for_range(Range(first_tokens, last_tokens)) == applies


def config(endpoints: list[int] | None, options: dict[str, Any], mode: CompilationMode) -> Any:
    compilation = types.SimpleNamespace(mode=mode, inductor_compile_config=options, compile_ranges_endpoints=endpoints)
    return types.SimpleNamespace(compilation_config=compilation, device_config=types.SimpleNamespace(device_type="cpu"))


@pytest.mark.parametrize(
    ("endpoints", "expected"), [([8192], [8, 128, 8192]), ([64], [8, 64]), ([8, 512], [8, 128, 512])]
)
def test_ranges_are_added_once(counted: list[str], endpoints: list[int], expected: list[int]) -> None:
    given = config(endpoints, {}, CompilationMode.VLLM_COMPILE)
    for _ in range(2):  # once a layer
        fuse_into_linears(given)
    assert given.compilation_config.compile_ranges_endpoints == expected
    assert isinstance(given.compilation_config.inductor_compile_config["post_grad_custom_post_pass"], LinearFusionPass)


def test_nothing_is_changed_where_nothing_can_be_fused(counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = object()
    compiled, eager = CompilationMode.VLLM_COMPILE, CompilationMode.NONE
    cases = [config([8192], {}, eager), config([8192], {"post_grad_custom_post_pass": mine}, compiled)]
    for given in (*cases, config(None, {}, compiled), config([], {}, compiled)):
        before = dict(given.compilation_config.inductor_compile_config)
        endpoints = given.compilation_config.compile_ranges_endpoints
        fuse_into_linears(given)
        assert given.compilation_config.compile_ranges_endpoints == endpoints
        assert given.compilation_config.inductor_compile_config == before
    monkeypatch.setenv(env.FUSION.name, "0")
    given = config([8192], {}, compiled)
    fuse_into_linears(given)
    assert given.compilation_config.inductor_compile_config == {}


def test_the_key_of_compiled_graphs_has_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_exl3.serving import norm_fusion

    def other(graph: fx.Graph, node: fx.Node, match: Any) -> bool:
        return False

    before = LinearFusionPass().uuid()
    assert before == LinearFusionPass().uuid()
    monkeypatch.setattr(norm_fusion, "_RULES", [(pattern, other) for pattern, _ in norm_fusion._RULES])
    assert LinearFusionPass().uuid() != before
