"""The linear op: y = ((x·suh) H W H)·svh + bias for every trellis that a vLLM layer fuses.

``torch.ops.vllm_exl3.linear(x, trellis, suh, svh, bias, shards, layer_class)``

Source of the mathematics: the EXL3 format as written by exllamav3 1.6.5; H is the 128-point
Sylvester-Hadamard matrix over √128, applied to each block of 128 channels.
"""

from collections.abc import Iterator

import torch

from vllm_exl3.ops import backends
from vllm_exl3.ops.shards import Shard, cached_shards
from vllm_exl3.ops.trellis import decode, hadamard
from vllm_exl3.pack.stored import TILE

__all__ = ["linear", "linear_reference", "split_shards"]

_DECODED_AT_ONCE = 1 << 22
"""Weights that the reference decodes at once, so that its scratch does not grow with the layer."""

_library = torch.library.Library("vllm_exl3", "FRAGMENT")
_library.define(
    "linear(Tensor x, Tensor trellis, Tensor suh, Tensor svh, Tensor? bias, int[] shards, str layer_class) -> Tensor"
)


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: list[int],
    layer_class: str,
) -> torch.Tensor:
    """Multiply by the trellises of one layer, with the fastest backend for the device.

    Args:
        x: ``[M, in]`` float16, bfloat16 or float32; ``in`` at most the shards' ``in_features``, zero-extended to it.
        trellis: int16, every shard's ``[in/16, out/16, 16·K]`` back to back.
        suh: float16, every shard's ``[in]`` back to back.
        svh: float16, every shard's ``[out]`` back to back.
        bias: ``[N]`` or None, N the sum of the shards' ``crop_size``.
        shards: the layout, from `pack_shards`.
        layer_class: what the call counter files this call under.

    Returns:
        ``[M, N]`` in the dtype of ``x``: the shards' crops side by side.
    """
    layout = tuple(shards)
    backend = backends.select("linear", x.device.type, linear_reference).backend
    backends.count_call("linear", backend.name, layer_class)
    output: torch.Tensor = backend.function(x, trellis, suh, svh, bias, layout)
    return output


def linear_reference(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: tuple[int, ...],
) -> torch.Tensor:
    """The op in plain PyTorch, in float32: what every backend is compared with, and the last resort."""
    outputs = []
    for shard, words, suh_part, svh_part in split_shards(trellis, suh, svh, shards):
        rotated = x.new_zeros((x.shape[0], shard.in_features), dtype=torch.float32)
        rotated[:, : x.shape[1]] = x
        rotated = hadamard(rotated * suh_part.float())
        y = hadamard(_multiply(rotated, words, shard)) * svh_part.float()
        outputs.append(y[:, shard.crop_start : shard.crop_start + shard.crop_size])
    output = torch.cat(outputs, dim=1)
    if bias is not None:
        output = output + bias.float()
    return output.to(x.dtype)


def _multiply(x: torch.Tensor, words: torch.Tensor, shard: Shard) -> torch.Tensor:
    """``x @ W`` in the rotated basis, decoding a bounded number of columns at a time."""
    trellis = words.view(shard.trellis_shape)
    step = max(1, _DECODED_AT_ONCE // (shard.in_features * TILE))
    backends.count_reconstructed(shard.in_features * shard.out_features * torch.float16.itemsize)
    return torch.cat(
        [x @ decode(columns, shard.half_bits, shard.codebook).float() for columns in trellis.split(step, dim=1)], dim=1
    )


def split_shards(
    trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, shards: tuple[int, ...]
) -> Iterator[tuple[Shard, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each shard with its part of the flat ``trellis``, ``suh`` and ``svh``, as views."""
    layout = cached_shards(shards)
    words = trellis.split([shard.trellis_words for shard in layout])
    suhs = suh.split([shard.in_features for shard in layout])
    svhs = svh.split([shard.out_features for shard in layout])
    return zip(layout, words, suhs, svhs, strict=True)


@torch.library.register_fake("vllm_exl3::linear", lib=_library)
def _linear_fake(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: list[int],
    layer_class: str,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], sum(shard.crop_size for shard in cached_shards(tuple(shards)))))


# Autograd and Dynamo never look inside: one Python implementation serves every device and picks the backend.
_library.impl("linear", linear, "CompositeExplicitAutograd")
