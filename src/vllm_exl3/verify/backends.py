"""Decodes a sample of linears with every backend of this machine and compares the bits.

The rotated weight, which is what the trellis stands for, has one right value in every bit. The numpy codec, the plain
PyTorch reference and the CPU library decode it; with a GPU the PyTorch reference runs there too. Kernels that never
write the decoded weight are compared by `tests/gpu`, which knows each kernel's own arithmetic.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_exl3.ops import trellis as reference
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack import Pack, StoredLinear
from vllm_exl3.pack.codec import decode, unpack_signs
from vllm_exl3.verify.finding import Finding

__all__ = ["Decoder", "compare_backends", "decoders", "sample_linears"]

_SAMPLES = 6
_MOST_WEIGHTS = 1 << 24


@dataclass(frozen=True)
class Decoder:
    """One way to decode.

    Attributes:
        name: what it is called in the report.
        decode: trellis ``[in/16, out/16, 16·K]``, suh, svh and the linear to float16 ``[in, out]``.
    """

    name: str
    decode: Callable[[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], StoredLinear], npt.NDArray[np.float16]]


def decoders() -> tuple[list[Decoder], dict[str, str]]:
    """Every decoder that runs here beside the numpy codec, and why the others do not."""
    from vllm_exl3.cpu.library import unavailable

    found, declined = [Decoder("reference on cpu", _torch("cpu"))], {}
    if torch.cuda.is_available():
        found.append(Decoder("reference on cuda", _torch("cuda")))
    else:
        declined["reference on cuda"] = "no CUDA device"
    if (reason := unavailable()) is None:
        found.append(Decoder("native on cpu", _native))
    else:
        declined["native on cpu"] = reason
    return found, declined


def sample_linears(pack: Pack) -> list[StoredLinear]:
    """A few linears, at least one of every K and codebook, none so large that decoding it takes long."""
    small = [linear for linear in pack.linears.values() if linear.in_features * linear.out_features <= _MOST_WEIGHTS]
    kinds = {(linear.half_bits, linear.codebook): linear for linear in small}
    spread = [small[place * (len(small) - 1) // (_SAMPLES - 1)] for place in range(_SAMPLES)] if small else []
    return list({linear.key: linear for linear in (*kinds.values(), *spread)}.values())


def compare_backends(pack: Pack, linears: Sequence[StoredLinear], found: Sequence[Decoder]) -> Iterator[Finding]:
    """Decode each linear by each decoder and compare it with the numpy codec, bit for bit."""
    for linear in linears:
        words = pack.read(linear.trellis.name)
        scales = [pack.read(scale.name) for scale in (linear.suh, linear.svh)]
        suh, svh = (unpack_signs(scale) if scale.dtype.kind in "iu" else scale for scale in scales)
        expected = decode(words, linear.half_bits, linear.codebook).view(np.uint16)
        for decoder in found:
            values = decoder.decode(words, suh, svh, linear).view(np.uint16)
            if wrong := int((values != expected).sum()):
                where = f"{linear.key}, decoded by {decoder.name}"
                yield Finding("backends", where, f"{wrong} of {expected.size} weights differ", "the numpy codec's bits")


def _torch(device: str) -> Callable[..., npt.NDArray[np.float16]]:
    def run(words: npt.NDArray[Any], _: Any, __: Any, linear: StoredLinear) -> npt.NDArray[np.float16]:
        values = reference.decode(torch.from_numpy(words.copy()).to(device), linear.half_bits, linear.codebook)
        return np.ascontiguousarray(values.cpu().numpy(), np.float16)

    return run


def _native(
    words: npt.NDArray[Any], suh: npt.NDArray[Any], svh: npt.NDArray[Any], linear: StoredLinear
) -> npt.NDArray[np.float16]:
    from vllm_exl3.cpu.backend import dequantize

    shard = Shard(linear.half_bits, linear.codebook, linear.in_features, linear.out_features, 0, linear.out_features)
    flat, left, right = (torch.from_numpy(part.reshape(-1).copy()) for part in (words, suh, svh))
    values = dequantize(flat, left, right, tuple(pack_shards([shard])), rotated=True, dtype=torch.float16)
    return np.ascontiguousarray(values.numpy(), np.float16)
