"""exllamav3's own kernels as a backend of the linear op, where that package is installed: an oracle and a comparison.

Only its public layer class is used. It works in float16; other dtypes are converted on the way in and out.
"""

import weakref
from typing import Any

import torch

from vllm_exl3.ops.linear import split_shards
from vllm_exl3.ops.shards import cached_shards
from vllm_exl3.pack.stored import Codebook

__all__ = ["VERSIONS", "linear", "unavailable"]

VERSIONS = ("1.6.5",)
"""Versions of exllamav3 whose layer class this was tried with."""


def unavailable() -> str | None:
    """Why exllamav3 cannot serve layers in this process, or None."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("exllamav3")
    except PackageNotFoundError:
        try:
            from exllamav3.version import __version__ as found  # type: ignore[import-not-found, no-redef]
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "exllamav3":
                return "exllamav3 is not installed"
            return f"exllamav3 cannot be imported ({type(error).__name__}: {error})"
        except Exception as error:  # its package loads its extension, which fails in many ways
            return f"exllamav3 cannot be imported ({type(error).__name__}: {error})"
    if found.partition("+")[0] not in VERSIONS:  # its wheels name CUDA and torch behind a plus
        return f"exllamav3 {found} is installed, {' or '.join(VERSIONS)} is needed"
    try:
        import exllamav3.modules.quant.exl3  # noqa: F401
    except Exception as error:
        return f"exllamav3 cannot be imported ({type(error).__name__}: {error})"
    return None


_layers: dict[int, tuple[weakref.ref[torch.Tensor], tuple[object, ...], list[Any]]] = {}
"""By the identity of a layer's trellis: the tensor, what the layers below were made from, and exllamav3's layers."""

_MARKERS = {
    Codebook.MUL1: ("mul1", -2082680531),
    Codebook.MCG: ("mcg", -877912083),
}
"""The tensor by which exllamav3 tells a codebook, and its value: the multiplier as int32."""


def _layers_of(trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, shards: tuple[int, ...]) -> list[Any]:
    """exllamav3's layers over a fused layer's tensors: made once, again when the tensors moved, gone when they go."""
    made_from = (trellis.data_ptr(), suh.data_ptr(), svh.data_ptr(), shards)
    key = id(trellis)
    known = _layers.get(key)
    if known is None or known[0]() is not trellis or known[1] != made_from:
        from exllamav3.modules.quant.exl3 import LinearEXL3

        layers = []
        for shard, flat, suh_part, svh_part in split_shards(trellis.detach(), suh, svh, shards):
            name, value = _MARKERS.get(Codebook(shard.codebook), ("", 0))
            marker = {name: torch.tensor(value, dtype=torch.int32, device=trellis.device)} if name else {}
            layers.append(
                LinearEXL3(
                    None, shard.in_features, shard.out_features,
                    suh=suh_part, svh=svh_part, trellis=flat.view(shard.trellis_shape), **marker,
                )
            )  # fmt: skip
        known = _layers[key] = (weakref.ref(trellis, lambda _: _layers.pop(key, None)), made_from, layers)
    return known[2]


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: tuple[int, ...],
) -> torch.Tensor:
    """The linear op by exllamav3; arguments as `vllm_exl3.ops.linear.linear`."""
    if x.shape[0] == 0:
        return x.new_empty((0, sum(shard.crop_size for shard in cached_shards(tuple(shards)))))
    outputs = []
    wide = x.half().contiguous()
    for shard, layer in zip(cached_shards(tuple(shards)), _layers_of(trellis, suh, svh, tuple(shards)), strict=True):
        missing = shard.in_features - x.shape[1]
        y = layer.forward(torch.nn.functional.pad(wide, (0, missing)) if missing else wide, {})
        outputs.append(y[:, shard.crop_start : shard.crop_start + shard.crop_size])
    output = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0].contiguous()
    if bias is not None:
        output = output + bias
    return output.to(x.dtype)
