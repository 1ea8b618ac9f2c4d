"""exllamav3's own kernels as a backend of the linear op, where that package is installed: an oracle and a comparison.

Only its public layer class is used. It works in float16; other dtypes are converted on the way in and out.
"""

import functools
from typing import Any

import torch

from vllm_exl3.ops.linear import split_shards
from vllm_exl3.ops.shards import Shard
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
        except ImportError:
            return "exllamav3 is not installed"
    if found not in VERSIONS:
        return f"exllamav3 {found} is installed, {' or '.join(VERSIONS)} is needed"
    try:
        import exllamav3.modules.quant.exl3  # noqa: F401
    except Exception as error:
        return f"exllamav3 cannot be imported ({type(error).__name__}: {error})"
    return None


@functools.lru_cache(maxsize=4096)
def _layer(shard: Shard, trellis: int, suh: int, svh: int, device: torch.device) -> dict[str, Any]:
    """A place for the layer that serves a shard at these addresses; weights that move get a new one."""
    return {}


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: tuple[int, ...],
) -> torch.Tensor:
    """The linear op by exllamav3; arguments as `vllm_exl3.ops.linear.linear`."""
    from exllamav3.modules.quant.exl3 import LinearEXL3

    outputs = []
    for shard, flat, suh_part, svh_part in split_shards(trellis, suh, svh, tuple(shards)):
        words = flat.view(shard.trellis_shape)
        place = _layer(shard, words.data_ptr(), suh_part.data_ptr(), svh_part.data_ptr(), x.device)
        if "layer" not in place:
            marker = torch.zeros((), dtype=torch.int32, device=x.device)
            markers = {Codebook.MUL1: {"mul1": marker}, Codebook.MCG: {"mcg": marker}}
            place["layer"] = LinearEXL3(
                None, shard.in_features, shard.out_features, suh=suh_part, svh=svh_part, trellis=words,
                **markers.get(Codebook(shard.codebook), {}),
            )  # fmt: skip
        wide = x.half()
        if x.shape[1] < shard.in_features:
            wide = torch.nn.functional.pad(wide, (0, shard.in_features - x.shape[1]))
        y = place["layer"].forward(wide.contiguous(), {})
        outputs.append(y[:, shard.crop_start : shard.crop_start + shard.crop_size])
    output = torch.cat(outputs, dim=1)
    if bias is not None:
        output = output + bias
    return output.to(x.dtype)
