"""A pass over vLLM's compiled graphs that puts norms and activations into the EXL3 linears behind them.

A linear's input is rotated by a small kernel. An RMS norm, or the product of SiLU, of the same few rows is another one
between two GEMMs. One kernel that does both saves a launch and a pass over the rows. vLLM runs the pass on a graph for
each range of numbers of tokens; ours are `FUSED_ROWS`, so the other ranges keep what Inductor makes of norms.
"""

import logging
import operator
from collections.abc import Callable
from typing import Any

import torch
import vllm.ir.ops
from torch import fx
from torch._inductor.pattern_matcher import MULTIPLE, CallFunction, Ignored, KeywordArg, Match
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.config import CompilationMode, VllmConfig

from vllm_exl3 import __version__, env
from vllm_exl3.ops import backends
from vllm_exl3.ops.fused_linear import FUSED_ROWS
from vllm_exl3.ops.linear import linear_reference

__all__ = ["LinearFusionPass", "fuse_into_linears"]

logger = logging.getLogger("vllm.exl3")

_HOOK = "post_grad_custom_post_pass"

_LAYER = ("trellis", "suh", "svh", "bias", "shards", "layer_class")
"""What is passed to a linear beside its input, in the order of the op."""


def fuse_into_linears(config: VllmConfig | None) -> None:
    """Add the pass while the model is built, before vLLM makes the compiler of its graphs; what the user set stays.

    Args:
        config: of the model that is being built.
    """
    if config is None or env.FUSION.get() == "0":
        return
    compilation = config.compilation_config
    options = compilation.inductor_compile_config
    if isinstance(options.get(_HOOK), LinearFusionPass) or not _can_fuse(config):
        return
    if _HOOK in options:
        logger.info("norms are not fused with EXL3 linears: the compilation config has a pass of its own")
        return
    endpoints = compilation.compile_ranges_endpoints
    if not endpoints:  # one graph for all numbers of tokens: ours would leave some without a graph
        return
    options[_HOOK] = LinearFusionPass()
    new = [end for end in (FUSED_ROWS.start - 1, FUSED_ROWS.stop - 1) if end < max(endpoints)]
    compilation.compile_ranges_endpoints = sorted({*endpoints, *new})


def _can_fuse(config: VllmConfig) -> bool:
    """True where vLLM compiles graphs, for a device whose backend of linears has such kernels."""
    if config.compilation_config.mode != CompilationMode.VLLM_COMPILE:
        return False
    return backends.select("linear", config.device_config.device_type, linear_reference).backend.fused is not None


class LinearFusionPass(InductorPass):  # type: ignore[misc]
    """Replaces norms and activations that one EXL3 linear alone reads by an op of `vllm_exl3.ops.fused_linear`."""

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        """True for the graphs of numbers of tokens that all lie in `FUSED_ROWS`."""
        return compile_range.start in FUSED_ROWS and compile_range.end in FUSED_ROWS

    def uuid(self) -> str:
        """The key of graphs in vLLM's and Inductor's caches."""
        return f"vllm-exl3 {__version__} {self.hash_source(self, *(rule for _, rule in _RULES))}"

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a functional graph in place."""
        fused = 0
        for node in list(graph.find_nodes(op="call_function", target=torch.ops.vllm_exl3.linear.default)):
            for pattern, replace in _RULES:
                match = pattern.match(node)
                if isinstance(match, Match) and replace(graph, node, match):
                    fused += 1
                    break
        if fused:
            graph.eliminate_dead_code()
            logger.info("%d norms and activations are part of the EXL3 linears behind them in a graph", fused)


def _serves(match: Match, width: int) -> bool:
    """True where the backend has a kernel for the matched linear behind x."""
    x = match.kwargs["x"].meta["val"]
    fused = backends.select("linear", x.device.type, linear_reference).backend.fused
    return fused is not None and fused.serves(tuple(match.kwargs["shards"]), width, x.dtype)


def _layer(match: Match) -> tuple[Any, ...]:
    return tuple(match.kwargs[name] for name in _LAYER)


def _call(graph: fx.Graph, op: Any, arguments: tuple[Any, ...], value: Any) -> fx.Node:
    node = graph.call_function(op, arguments)
    node.meta["val"] = value
    return node


def _replace_norm(graph: fx.Graph, linear: fx.Node, match: Match) -> bool:
    x, weight = match.kwargs["x"], match.kwargs["weight"]
    width = x.meta["val"].shape[-1]
    if not _is_norm_of(match, x) or not _serves(match, width):
        return False
    op = torch.ops.vllm_exl3.rms_norm_linear.default
    with graph.inserting_before(linear):
        arguments = (x, weight, match.kwargs["epsilon"], *_layer(match))
        linear.replace_all_uses_with(_call(graph, op, arguments, linear.meta["val"]))
    return True


def _replace_add_norm(graph: fx.Graph, linear: fx.Node, match: Match) -> bool:
    x, residual, weight = (match.kwargs[name] for name in ("x", "residual", "weight"))
    width = x.meta["val"].shape[-1]
    if not _is_norm_of(match, x, residual) or not _serves(match, width):
        return False
    norm = linear.args[0].args[0]  # type: ignore[union-attr]
    assert isinstance(norm, fx.Node)
    op = torch.ops.vllm_exl3.add_rms_norm_linear.default
    with graph.inserting_before(norm):  # the sum is read before the linear, too
        values = (linear.meta["val"], residual.meta["val"])
        both = _call(graph, op, (x, residual, weight, match.kwargs["epsilon"], *_layer(match)), values)
        output, total = (_call(graph, operator.getitem, (both, index), value) for index, value in enumerate(values))
    linear.replace_all_uses_with(output)
    for user in list(norm.users):
        if user.args[1] == 1:
            user.replace_all_uses_with(total)
    return True


def _is_norm_of(match: Match, *inputs: fx.Node) -> bool:
    """True where the norm's weight and inputs are of one dtype and two dimensions, as the kernels have them."""
    weight = match.kwargs["weight"]
    if not isinstance(weight, fx.Node):
        return False
    values = [node.meta["val"] for node in inputs]
    return all(value.dim() == 2 and value.dtype == weight.meta["val"].dtype for value in values)


def _replace_activation(graph: fx.Graph, linear: fx.Node, match: Match) -> bool:
    x, width = match.kwargs["x"], match.kwargs["width"]
    value = x.meta["val"]
    halves = value.dim() == 2 and value.shape[1] == 2 * width and match.kwargs["start"] == width
    if not halves or match.kwargs["dtype"] != value.dtype or not _serves(match, width):
        return False
    op = torch.ops.vllm_exl3.silu_and_mul_linear.default
    with graph.inserting_before(linear):
        linear.replace_all_uses_with(_call(graph, op, (x, *_layer(match)), linear.meta["val"]))
    return True


def _linear_of(source: CallFunction) -> CallFunction:
    return CallFunction(torch.ops.vllm_exl3.linear.default, source, *map(KeywordArg, _LAYER), _users=MULTIPLE)


def _silu_and_mul() -> CallFunction:
    """Inductor's decomposition of ``silu(x[:, :width])·x[:, width:]`` in 16 bits."""
    aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type.default
    gate = CallFunction(aten.slice.Tensor, KeywordArg("x"), 1, 0, KeywordArg("width"))
    gate = CallFunction(convert, gate, torch.float32, _users=2)
    growth = CallFunction(aten.exp.default, CallFunction(aten.neg.default, gate))
    silu = CallFunction(aten.div.Tensor, gate, CallFunction(aten.add.Tensor, growth, 1))
    up = CallFunction(aten.slice.Tensor, KeywordArg("x"), 1, KeywordArg("start"), Ignored())
    return CallFunction(aten.mul.Tensor, CallFunction(convert, silu, KeywordArg("dtype")), up)


def _rms_norm() -> CallFunction:
    """A norm that nothing but the linear reads."""
    return CallFunction(vllm.ir.ops.rms_norm.torch_op, KeywordArg("x"), KeywordArg("weight"), KeywordArg("epsilon"))


def _add_rms_norm() -> CallFunction:
    """A norm of a sum, which others may read."""
    arguments = map(KeywordArg, ("x", "residual", "weight", "epsilon"))
    both = CallFunction(vllm.ir.ops.fused_add_rms_norm.torch_op, *arguments, _users=MULTIPLE)
    return CallFunction(operator.getitem, both, 0)


_RULES: list[tuple[CallFunction, Callable[[fx.Graph, fx.Node, Match], bool]]] = [
    (_linear_of(_add_rms_norm()), _replace_add_norm),
    (_linear_of(_silu_and_mul()), _replace_activation),
    (_linear_of(_rms_norm()), _replace_norm),
]
"""What is replaced, and by which function."""
