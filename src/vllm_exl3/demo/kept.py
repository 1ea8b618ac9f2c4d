"""Quantized linears of an unfinished pack, each in a file of its own, so that an interrupted quantization goes on.

A file is taken only if it is whole and was made of the same weight at the same rate.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.whole_file import whole_file

__all__ = ["KeptLinear", "KeptLinears"]

Array = npt.NDArray[Any]

_DTYPES = {"suh": np.float16, "svh": np.float16, "trellis": np.int16}


@dataclass(frozen=True)
class KeptLinear:
    """The arrays of one quantized linear, as an encoder returns them."""

    trellis: Array
    suh: Array
    svh: Array


class KeptLinears:
    """A folder of them.

    Args:
        folder: made at the first `keep`. Its name has to tell encoder versions apart.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: str, weight: Array, half_bits: int, codebook: Codebook) -> KeptLinear | None:
        """The linear made of ``weight`` at this rate, or None where there is none or its file is not what was written.

        Args:
            key: the module's name.
            weight: what is quantized, float32.
            half_bits: 2·K.
            codebook: its codebook.
        """
        try:
            facts, _, data = self._file(key).read_bytes().partition(b"\n")
            found = json.loads(facts)
            shapes = {leaf: tuple(found["shapes"][leaf]) for leaf in _DTYPES}
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if found != _facts(weight, half_bits, codebook, shapes, data):
            return None
        arrays, start = {}, 0
        for leaf, shape in shapes.items():
            arrays[leaf] = np.frombuffer(data, _DTYPES[leaf], prod(shape), start).reshape(shape)
            start += arrays[leaf].nbytes
        return KeptLinear(**arrays)

    def keep(self, key: str, weight: Array, half_bits: int, codebook: Codebook, encoded: Mapping[str, Array]) -> None:
        """Write a linear's arrays (``trellis``, ``suh``, ``svh``), complete or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        data = b"".join(np.ascontiguousarray(encoded[leaf]).tobytes() for leaf in _DTYPES)
        shapes = {leaf: encoded[leaf].shape for leaf in _DTYPES}
        with whole_file(self._file(key)) as partial:
            partial.write_bytes(json.dumps(_facts(weight, half_bits, codebook, shapes, data)).encode() + b"\n" + data)

    def discard(self) -> None:
        """Remove the folder: the pack is complete."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.linear"


def _facts(
    weight: Array, half_bits: int, codebook: Codebook, shapes: Mapping[str, tuple[int, ...]], data: bytes
) -> dict[str, Any]:
    return {
        "of": hashlib.sha256(np.ascontiguousarray(weight).data).hexdigest(),
        "half_bits": half_bits,
        "codebook": codebook.label,
        "shapes": {leaf: list(shapes[leaf]) for leaf in _DTYPES},
        "sha256": hashlib.sha256(data).hexdigest(),
    }
