"""The weights of a model by Hugging Face names, one at a time, whatever format they are stored in.

A name that is not stored as it is may be part of a fused tensor, or the fusion of several stored ones, or a tied head.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack import Exl3PackError, Pack, StoredLinear, StoredRowTable, StoredTensor
from vllm_exl3.pack.bfloat16 import from_bfloat16
from vllm_exl3.pack.codec import decode_embedding, dense_weight, unpack_signs
from vllm_exl3.pack.headers import read_header
from vllm_exl3.pack.source import LocalFolder
from vllm_exl3.pack.spelling import is_head_name

__all__ = ["DenseFolder", "LoadedTensors", "PackWeights", "Weights", "decoded", "find_weight"]

Floats = npt.NDArray[np.float32]

_FLOATS = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8"}

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_SPELLINGS = ((".mlp.", ".block_sparse_moe."),)
"""Names of transformers' modules and those of checkpoints that it renames while loading (Mixtral)."""

_EXPERTS = re.compile(r"^(?P<mlp>.+)\.experts\.(?P<leaf>gate_up_proj|down_proj)$")
_ROLES = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}


class Weights(Protocol):
    """A source of the weights of one model."""

    label: str

    def names(self) -> Collection[str]:
        """The names of all stored tensors, such as ``model.layers.0.mlp.up_proj.weight``, to be looked up in."""

    def read(self, name: str) -> Floats:
        """One tensor as float32; a linear's as ``[out, in]``, where it may be padded with zeros."""


class DenseFolder:
    """A 16-bit model in safetensors files.

    Args:
        folder: its local folder.

    Raises:
        Exl3PackError: the folder has no safetensors file, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self.label, self._folder = str(folder), folder
        files = LocalFolder(folder)
        found = [name for name in files.names() if name.endswith(".safetensors") and "consolidated" not in name]
        if not found:
            raise Exl3PackError(
                found="no *.safetensors",
                expected="the 16-bit model that the pack was made from, in the Hugging Face layout",
                where=str(folder),
                remedy="Give its folder, or its repository id to download it.",
            )
        self._tensors: dict[str, StoredTensor] = {}
        for name in found:
            header = _header(files, name)
            if twice := self._tensors.keys() & header.keys():
                raise Exl3PackError(
                    found=f"{min(twice)} in {self._tensors[min(twice)].file} and in {name}",
                    expected="each tensor in one file",
                    where=str(folder),
                    remedy="One of the files is left over from another revision: delete it, or fetch the model again.",
                )
            self._tensors.update(header)

    def names(self) -> Collection[str]:
        """See `Weights`."""
        return self._tensors.keys()

    def read(self, name: str) -> Floats:
        """See `Weights`.

        Raises:
            Exl3PackError: the tensor is not of a floating-point type.
        """
        return self.read_rows(name, 0, None)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return self._tensors[name].shape

    def read_rows(self, name: str, first: int, count: int | None) -> Floats:
        """Entries of one tensor along its first axis, as float32; nothing else of it is read.

        Args:
            name: the tensor.
            first: the first entry.
            count: how many; None for all that follow.

        Raises:
            Exl3PackError: the tensor is not of a floating-point type.
            OSError: the file ends before the tensor does.
        """
        tensor = self._tensors[name]
        if tensor.dtype not in _FLOATS:
            raise Exl3PackError(
                found=f"dtype {tensor.dtype}",
                expected="the unquantized model, in F16, BF16 or F32",
                where=f"{name} in {self.label}",
                remedy="Give the model that the pack was made from.",
            )
        values = self._values(tensor, _FLOATS[tensor.dtype], first, count)
        return np.asarray(from_bfloat16(values) if tensor.dtype == "BF16" else values, np.float32)

    def read_integers(self, name: str) -> npt.NDArray[np.int32]:
        """One tensor of 32-bit integers, as quantized formats store them.

        Raises:
            Exl3PackError: the tensor is of another type.
        """
        tensor = self._tensors[name]
        if tensor.dtype not in ("I32", "U32"):
            raise Exl3PackError(
                found=f"dtype {tensor.dtype}",
                expected="packed words in I32",
                where=f"{name} in {self.label}",
                remedy="Fetch the folder again.",
            )
        return np.asarray(self._values(tensor, "<i4"), np.int32)

    def _values(self, tensor: StoredTensor, dtype: str, first: int = 0, count: int | None = None) -> npt.NDArray[Any]:
        shape = tensor.shape
        if shape:
            first, last, _ = slice(first, None if count is None else first + count).indices(shape[0])
            shape = (max(last - first, 0), *shape[1:])
        start = tensor.start + first * math.prod(shape[1:]) * np.dtype(dtype).itemsize
        values = np.fromfile(self._folder / tensor.file, dtype, math.prod(shape), offset=start)
        if values.size < math.prod(shape):
            raise OSError(f"{tensor.name}: {self._folder / tensor.file} ended while it was read")
        return values.reshape(shape)


def _header(files: LocalFolder, name: str) -> Mapping[str, StoredTensor]:
    """The tensors of one file; an error says in which folder it lies, since several are read beside each other."""
    try:
        return read_header(name, files.size(name), lambda start, length: files.read(name, start, length)).tensors
    except Exl3PackError as error:
        where = f"{error.where} in {files.label}"
        raise Exl3PackError(found=error.found, expected=error.expected, where=where, remedy=error.remedy) from error


class LoadedTensors:
    """A model whose weights are in memory.

    Args:
        label: what messages call it.
        tensors: its weights by name, linears' as ``[out, in]``.
    """

    def __init__(self, label: str, tensors: Mapping[str, Floats]) -> None:
        self.label, self.tensors = label, tensors

    def names(self) -> Collection[str]:
        """See `Weights`."""
        return self.tensors.keys()

    def read(self, name: str) -> Floats:
        """See `Weights`."""
        return self.tensors[name]


class PackWeights:
    """An EXL3 pack, its linears decoded when they are read."""

    def __init__(self, pack: Pack) -> None:
        self.label, self.pack = pack.source, pack
        self._linears = {f"{key}.weight": linear for key, linear in pack.linears.items()}
        self._tables = {f"{key}.weight": table for key, table in pack.embeddings.items()}
        self._names = {*self._linears, *self._tables, *pack.tensors}

    def names(self) -> Collection[str]:
        """See `Weights`."""
        return self._names

    def read(self, name: str) -> Floats:
        """See `Weights`.

        Raises:
            Exl3PackError: the tensor is stored in a way that this reader does not know.
        """
        if (linear := self._linears.get(name)) is not None:
            return decoded(self.pack, linear).T
        table = self._tables.get(name)
        if isinstance(table, StoredRowTable):
            words, signs = self.pack.read(table.trellis.name), self.pack.read(table.signs.name)
            width = min(words.shape[1], table.groups * 256)
            return decode_embedding(words, signs, table.bits, width).astype(np.float32)
        if table is not None:
            raise Exl3PackError(
                found="an embedding table of integers",
                expected="a 16-bit or row-coded embedding",
                where=f"{name} in {self.label}",
                remedy="Judge the pack that `embed-quant` read; benchmarks/embedding_kl.py measures the table.",
            )
        return np.asarray(self.pack.read(name), np.float32)


def decoded(pack: Pack, linear: StoredLinear) -> Floats:
    """The weight ``[in, out]`` of one linear, with its padding, by the CPU library or else in numpy."""
    trellis = pack.read(linear.trellis.name)
    scales = [pack.read(scale.name) for scale in (linear.suh, linear.svh)]
    suh, svh = (unpack_signs(scale) if scale.dtype.kind in "iu" else scale.astype(np.float16) for scale in scales)
    try:
        import torch

        from vllm_exl3.cpu.library import unavailable
    except ImportError:
        native = False
    else:
        native = unavailable() is None
    if not native:
        return dense_weight(trellis, linear.half_bits, linear.codebook, suh, svh).astype(np.float32)
    from vllm_exl3.cpu.backend import dequantize
    from vllm_exl3.verify.decoders import dequantized

    layer = trellis, linear.half_bits, linear.codebook, suh, svh
    return np.asarray(dequantized(dequantize, *layer, rotated=False, dtype=torch.float32), np.float32)


def find_weight(weights: Weights, name: str, sizes: Callable[[str], int | None]) -> Floats | None:
    """A weight by name, assembled from what is stored.

    Args:
        weights: the model.
        name: a parameter's name, such as ``model.layers.0.self_attn.q_proj.weight``.
        sizes: rows that a linear of that name has in the model, to cut it out of a fused tensor; None if unknown.

    Returns:
        The tensor as float32, or None when nothing stored fits the name.
    """
    known = weights.names()
    for mine, theirs in _SPELLINGS:
        if mine in name and (found := _find(weights, known, name.replace(mine, theirs), sizes)) is not None:
            return found
    return _find(weights, known, name, sizes)


def _find(weights: Weights, known: Collection[str], name: str, sizes: Callable[[str], int | None]) -> Floats | None:
    if name in known:
        return weights.read(name)
    if name.endswith(".weight") and is_head_name(name.removesuffix(".weight")):
        tied = [other for other in known if other.endswith(("embed_tokens.weight", "wte.weight"))]
        return weights.read(tied[0]) if len(tied) == 1 else None
    if (match := _EXPERTS.match(name)) is not None:
        return _stacked_experts(weights, known, match["mlp"], match["leaf"])
    parent, _, leaf = name.removesuffix(".weight").rpartition(".")
    if leaf in _FUSED:
        parts = [f"{parent}.{part}.weight" for part in _FUSED[leaf]]
        if all(part in known for part in parts):
            rows = [_cropped(weights.read(part), sizes(part)) for part in parts]
            return np.concatenate(rows)
    return _part_of_fused(weights, known, parent, leaf, sizes)


def _cropped(weight: Floats, rows: int | None) -> Floats:
    return weight if rows is None else weight[:rows]


def _part_of_fused(
    weights: Weights, known: Collection[str], parent: str, leaf: str, sizes: Callable[[str], int | None]
) -> Floats | None:
    for fused, parts in _FUSED.items():
        if leaf in parts and f"{parent}.{fused}.weight" in known:
            rows = [sizes(f"{parent}.{part}.weight") for part in parts]
            if None in rows:
                return None
            at = parts.index(leaf)
            first = sum(filter(None, rows[:at]))
            return _rows(weights, f"{parent}.{fused}.weight", first, rows[at])
    # one expert out of the stacked tensors of a layer
    match = re.match(r"^(?P<experts>.+\.experts)\.(?P<index>\d+)$", parent)
    for stacked, spellings in _ROLES.items():
        for roles in spellings:
            if match and leaf in roles and f"{match['experts']}.{stacked}" in known:
                whole = _rows(weights, f"{match['experts']}.{stacked}", int(match["index"]), 1)
                if not len(whole):
                    return None  # an expert that the source does not have
                whole = whole[0]
                return np.array_split(whole, len(roles))[roles.index(leaf)]
    return None


def _rows(weights: Weights, name: str, first: int, count: int | None) -> Floats:
    """Entries of a tensor along its first axis, without reading the others where that is possible."""
    if isinstance(weights, DenseFolder):
        return weights.read_rows(name, first, count)
    return weights.read(name)[first : None if count is None else first + count]


def _stacked_experts(weights: Weights, known: Collection[str], mlp: str, leaf: str) -> Floats | None:
    experts = list(_expert_numbers(known, mlp))
    for roles in _ROLES[leaf]:
        if experts and f"{mlp}.experts.{experts[0]}.{roles[0]}.weight" in known:
            return np.stack(
                [
                    np.concatenate([weights.read(f"{mlp}.experts.{expert}.{role}.weight") for role in roles])
                    for expert in experts
                ]
            )
    return None


def _expert_numbers(known: Collection[str], mlp: str) -> Iterator[Any]:
    pattern = re.compile(re.escape(mlp) + r"\.experts\.(\d+)\.")
    yield from sorted({int(match[1]) for name in known if (match := pattern.match(name))})
