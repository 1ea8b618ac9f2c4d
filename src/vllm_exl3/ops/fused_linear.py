"""Linears that take in the RMS norm or the activation before them, as compiled models call them.

``torch.ops.vllm_exl3.rms_norm_linear``, ``add_rms_norm_linear`` and ``silu_and_mul_linear``

No model calls them: a pass over compiled graphs (serving/norm_fusion.py) puts them in the place of a norm or activation
and the linear behind it. Here they are defined, in plain terms of the linear op; a backend may have a kernel for them.
"""

from dataclasses import dataclass

import torch

from vllm_exl3.ops import backends
from vllm_exl3.ops.linear import linear, linear_reference
from vllm_exl3.ops.shards import cached_shards

__all__ = ["FUSED_ROWS", "Layer", "add_rms_norm", "silu_and_mul"]

FUSED_ROWS = range(9, 129)
"""Tokens of the calls that the pass makes: of fewer, linears rotate their own input; of more, the saving is small."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The tensors of a linear, as `vllm_exl3.ops.linear.linear` has them."""

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    bias: torch.Tensor | None
    shards: tuple[int, ...]
    layer_class: str

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """The linear of x alone."""
        return linear(x, self.trellis, self.suh, self.svh, self.bias, list(self.shards), self.layer_class)


_LAYER = "Tensor trellis, Tensor suh, Tensor svh, Tensor? bias, int[] shards, str layer_class"
_library = torch.library.Library("vllm_exl3", "FRAGMENT")
_library.define(f"rms_norm_linear(Tensor x, Tensor norm_weight, float epsilon, {_LAYER}) -> Tensor")
_library.define(
    f"add_rms_norm_linear(Tensor x, Tensor residual, Tensor norm_weight, float epsilon, {_LAYER}) -> (Tensor, Tensor)"
)
_library.define(f"silu_and_mul_linear(Tensor x, {_LAYER}) -> Tensor")


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, norm_weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The RMS norm of ``x + residual`` times ``norm_weight``, and that sum, as vLLM defines them.

    Args:
        x: ``[M, width]``.
        residual: the same, or None.
        norm_weight: ``[width]``.
        epsilon: added to the mean of squares.
    """
    total = x.float() if residual is None else x.float() + residual.float()
    normed = total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + epsilon)
    return (normed.to(norm_weight.dtype) * norm_weight).to(x.dtype), total.to(x.dtype)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate)·up`` of ``[M, 2·width]``, gate before up."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _fused(layer: Layer, x: torch.Tensor, width: int) -> backends.FusedLinear | None:
    """The kernel for a call, counted, or None where the linear follows in a launch of its own."""
    backend = backends.select("linear", x.device.type, linear_reference).backend
    if backend.fused is None or x.shape[0] not in FUSED_ROWS:
        return None
    if not backend.fused.serves(layer.shards, width, x.dtype):
        return None
    backends.count_call("linear", backend.name, layer.layer_class)
    return backend.fused


def _rms_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: list[int],
    layer_class: str,
) -> torch.Tensor:
    layer = Layer(trellis, suh, svh, bias, tuple(shards), layer_class)
    if (fused := _fused(layer, x, x.shape[1])) is not None and norm_weight.dtype == x.dtype:
        output: torch.Tensor = fused.rms_norm(x, None, norm_weight, epsilon, layer)[0]
        return output
    return layer.apply(add_rms_norm(x, None, norm_weight, epsilon)[0])


def _add_rms_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: list[int],
    layer_class: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    layer = Layer(trellis, suh, svh, bias, tuple(shards), layer_class)
    if (fused := _fused(layer, x, x.shape[1])) is not None and norm_weight.dtype == x.dtype:
        both: tuple[torch.Tensor, torch.Tensor] = fused.rms_norm(x, residual, norm_weight, epsilon, layer)
        return both
    normed, total = add_rms_norm(x, residual, norm_weight, epsilon)
    return layer.apply(normed), total


def _silu_and_mul_linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: list[int],
    layer_class: str,
) -> torch.Tensor:
    layer = Layer(trellis, suh, svh, bias, tuple(shards), layer_class)
    if (fused := _fused(layer, x, x.shape[1] // 2)) is not None:
        output: torch.Tensor = fused.silu_and_mul(x, layer)
        return output
    return layer.apply(silu_and_mul(x))


def _columns(x: torch.Tensor, shards: list[int]) -> torch.Tensor:
    return x.new_empty((x.shape[0], sum(shard.crop_size for shard in cached_shards(tuple(shards)))))


@torch.library.register_fake("vllm_exl3::rms_norm_linear", lib=_library)
def _rms_norm_linear_fake(x: torch.Tensor, *arguments: object) -> torch.Tensor:
    shards = arguments[-2]
    assert isinstance(shards, list)
    return _columns(x, shards)


@torch.library.register_fake("vllm_exl3::add_rms_norm_linear", lib=_library)
def _add_rms_norm_linear_fake(
    x: torch.Tensor, residual: torch.Tensor, *arguments: object
) -> tuple[torch.Tensor, torch.Tensor]:
    shards = arguments[-2]
    assert isinstance(shards, list)
    return _columns(x, shards), residual.new_empty(residual.shape)


@torch.library.register_fake("vllm_exl3::silu_and_mul_linear", lib=_library)
def _silu_and_mul_linear_fake(x: torch.Tensor, *arguments: object) -> torch.Tensor:
    shards = arguments[-2]
    assert isinstance(shards, list)
    return _columns(x, shards)


_library.impl("rms_norm_linear", _rms_norm_linear, "CompositeExplicitAutograd")
_library.impl("add_rms_norm_linear", _add_rms_norm_linear, "CompositeExplicitAutograd")
_library.impl("silu_and_mul_linear", _silu_and_mul_linear, "CompositeExplicitAutograd")
