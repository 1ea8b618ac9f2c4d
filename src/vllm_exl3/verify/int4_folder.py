"""The weights of an AWQ or GPTQ folder, dequantized one tensor at a time.

transformers loads these formats only beside packages of their own (gptqmodel, optimum), which a machine that judges
packs seldom has, and holds the whole model in memory.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack import Exl3PackError
from vllm_exl3.verify.weights import DenseFolder, Floats

__all__ = ["METHODS", "Int4Folder"]

_Ints = npt.NDArray[np.int32]

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in an int32 word, in nibbles, of each of eight columns in a row."""

_PARTS = ("qweight", "qzeros", "scales")


class Int4Folder:
    """A model whose linears are stored as ``qweight``, ``qzeros`` and ``scales``.

    Args:
        folder: its local folder.
        config: ``quantization_config`` of its ``config.json``.

    Raises:
        Exl3PackError: the folder is damaged, or quantized in a way that this reader does not know.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.label, self._stored = str(folder), DenseFolder(folder)
        method, bits = str(config.get("quant_method")), config.get("bits", config.get("w_bit"))
        version = str(config.get("version", "gemm")).lower()
        known = bits in (2, 4, 8) if method == "gptq" else bits == 4 and version == "gemm"
        if method not in METHODS or not known:
            raise self._refused(f"{method} of {bits} bits" + (f", version {version}" if method == "awq" else ""))
        self._bits, self._unpack = int(bits or 0), METHODS[method]
        # GPTQ's first format stores zero points less one.
        self._offset = int(method == "gptq" and config.get("checkpoint_format", "gptq") == "gptq")
        names = set(self._stored.names())
        self._linears = {name.removesuffix(".qweight") for name in names if name.endswith(".qweight")}
        for key in self._linears:
            if missing := [part for part in _PARTS if f"{key}.{part}" not in names]:
                raise self._refused(f"{key} without {missing[0]}")
        own = {f"{key}.{part}" for key in self._linears for part in (*_PARTS, "g_idx")}
        self._names = (names - own) | {f"{key}.weight" for key in self._linears}

    def names(self) -> Collection[str]:
        """See `vllm_exl3.verify.weights.Weights`."""
        return self._names

    def read(self, name: str) -> Floats:
        """See `vllm_exl3.verify.weights.Weights`.

        Raises:
            Exl3PackError: the parts of a linear do not fit each other.
        """
        key = name.removesuffix(".weight")
        if key not in self._linears:
            return self._stored.read(name)
        scales = self._stored.read(f"{key}.scales")
        words = [self._stored.read_integers(f"{key}.{part}") for part in ("qweight", "qzeros")]
        if any(part.ndim != 2 or not part.size for part in (scales, *words)):
            raise self._refused(f"{key}: scales {scales.shape}, words {words[0].shape} and {words[1].shape}")
        weight, zeros = self._unpack(words[0], words[1], self._bits)
        groups, width = scales.shape
        if zeros.shape != scales.shape or weight.shape[1] != width or weight.shape[0] % groups:
            raise self._refused(f"{key}: weights {weight.shape}, zero points {zeros.shape}, scales {scales.shape}")
        group = np.arange(weight.shape[0]) // (weight.shape[0] // groups)
        if f"{key}.g_idx" in self._stored.names():
            group = self._stored.read_integers(f"{key}.g_idx")
            if group.shape != weight.shape[:1]:
                raise self._refused(f"{key}: g_idx {group.shape} for {weight.shape[0]} input channels")
            if not 0 <= group.min() <= group.max() < groups:
                raise self._refused(f"{key}: g_idx of {group.min()} to {group.max()} for {groups} groups")
        values = (weight - (zeros + self._offset)[group]).astype(np.float32) * scales[group]
        return np.ascontiguousarray(values.T)

    def _refused(self, found: str) -> Exl3PackError:
        return Exl3PackError(
            found=found,
            expected="GPTQ of 2, 4 or 8 bits, or AWQ of 4 bits in its gemm layout, complete",
            where=self.label,
            remedy="Fetch the folder again if it is damaged, or leave it out of --compare.",
        )


def _nibbles(words: _Ints, bits: int) -> _Ints:
    """The values in each word, lowest bits first, on a last axis of their own."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return values.astype(np.int32)


def _along_columns(words: _Ints, bits: int) -> _Ints:
    return _nibbles(words, bits).reshape(words.shape[0], -1)


def _gptq(weight: _Ints, zeros: _Ints, bits: int) -> tuple[_Ints, _Ints]:
    """Weights ``[in, out]``, packed along the input, and zero points ``[groups, out]``, packed along the output."""
    values = _nibbles(weight, bits).transpose(0, 2, 1).reshape(-1, weight.shape[1])
    return values, _along_columns(zeros, bits)


def _awq(weight: _Ints, zeros: _Ints, bits: int) -> tuple[_Ints, _Ints]:
    """Both packed along the output, eight columns a word in an order of their own."""
    return tuple(  # type: ignore[return-value]
        _nibbles(words, bits)[..., _AWQ_ORDER].reshape(words.shape[0], -1) for words in (weight, zeros)
    )


METHODS: dict[str, Callable[[_Ints, _Ints, int], tuple[_Ints, _Ints]]] = {"gptq": _gptq, "awq": _awq}
"""How each ``quant_method`` packs a linear."""
