"""Every implementation of trellis decoding that runs on this machine, behind one signature.

All of them are exact: a decoded weight is an entry of a table of 65,536 float16 values, so that no two may differ.
"""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_exl3.env import CPU_ISAS
from vllm_exl3.ops import backends, trellis
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack import Codebook, codec
from vllm_exl3.pack.stored import TILE

__all__ = ["Decoder", "decoders", "dequantized"]

Halves = npt.NDArray[np.float16]
Decoder = Callable[[npt.NDArray[np.int16], int, Codebook], Halves]
"""Takes a trellis int16 ``[in/16, out/16, 16·K]``, 2·K and the codebook; returns float16 ``[in, out]``, rotated."""


def decoders() -> tuple[dict[str, Decoder], dict[str, str]]:
    """The decoders by name, the specification in numpy first, and why others cannot run here, by name."""
    found: dict[str, Decoder] = {"numpy": codec.decode, "torch on cpu": _reference("cpu")}
    absent: dict[str, str] = {}
    importlib.import_module("vllm_exl3.cpu.backend")  # registers its function
    native = backends.find("dequantize", "cpu", "native")
    if native is None or (reason := native.unavailable()) is not None:
        absent["native on cpu"] = "not registered" if native is None else str(reason)
    else:
        found |= {f"native on cpu ({isa})": _on_isa(isa, native) for isa in _usable_isas()}
    if not torch.cuda.is_available():
        absent["cuda"] = "torch sees no CUDA device"
        return found, absent
    importlib.import_module("vllm_exl3.cuda.backend")
    native = backends.find("dequantize", "cuda", "native")
    reason = "not registered" if native is None else native.unavailable()
    for index in range(torch.cuda.device_count()):
        device = f"cuda:{index}"
        found[f"torch on {device}"] = _reference(device)
        if native is None or reason is not None:
            absent[f"native on {device}"] = str(reason)
        else:
            found[f"native on {device}"] = _native(native, device)
    return found, absent


def _reference(device: str) -> Decoder:
    def decode(words: npt.NDArray[np.int16], half_bits: int, codebook: Codebook) -> Halves:
        values = trellis.decode(torch.from_numpy(np.array(words)).to(device), half_bits, int(codebook))
        return np.asarray(values.cpu().numpy(), np.float16)

    return decode


def _native(backend: backends.Backend, device: str) -> Decoder:
    def decode(words: npt.NDArray[np.int16], half_bits: int, codebook: Codebook) -> Halves:
        ones = [np.ones(tiles * TILE, np.float16) for tiles in words.shape[:2]]
        values = dequantized(
            backend.function, words, half_bits, codebook, *ones, rotated=True, dtype=torch.float16, device=device
        )
        return np.asarray(values, np.float16)

    return decode


def dequantized(
    function: Callable[..., torch.Tensor],
    words: npt.NDArray[np.int16],
    half_bits: int,
    codebook: Codebook,
    suh: Halves,
    svh: Halves,
    *,
    rotated: bool,
    dtype: torch.dtype,
    device: str = "cpu",
) -> npt.NDArray[Any]:
    """The weight ``[in, out]`` of one linear, by a backend of the op ``dequantize``.

    Args:
        function: the backend's, such as `vllm_exl3.cpu.backend.dequantize`.
        words: the trellis ``[in/16, out/16, 16·K]``.
        half_bits: 2·K.
        codebook: its codebook.
        suh: ``[in]``.
        svh: ``[out]``.
        rotated: the decoded trellis itself, rather than the matrix that multiplies the layer's input.
        dtype: of the result.
        device: where the function works.
    """
    rows, columns = (tiles * TILE for tiles in words.shape[:2])
    shards = tuple(pack_shards([Shard(half_bits, int(codebook), rows, columns, 0, columns)]))
    # Copies: arrays of files cannot be written to, which torch warns of.
    flat = [torch.from_numpy(np.array(part).reshape(-1)).to(device) for part in (words, suh, svh)]
    return np.asarray(function(*flat, shards, rotated=rotated, dtype=dtype).cpu().numpy())


def _usable_isas() -> list[str]:
    from vllm_exl3.cpu.library import library

    before = library().exl3_isa()
    usable = [isa for isa in CPU_ISAS if library().exl3_select_isa(isa.encode()) == 0]
    library().exl3_select_isa(before)
    return usable


def _on_isa(isa: str, backend: backends.Backend) -> Decoder:
    from vllm_exl3.cpu.library import check, library

    native = _native(backend, "cpu")

    def decode(words: npt.NDArray[np.int16], half_bits: int, codebook: Codebook) -> Halves:
        before = library().exl3_isa()
        check(library().exl3_select_isa(isa.encode()))
        try:
            return native(words, half_bits, codebook)
        finally:
            library().exl3_select_isa(before)

    return decode
