"""What a pack stores, as read from safetensors headers: tensors and the EXL3 linears they form.

Sources: the safetensors format; the EXL3 format as written by exllamav3 1.6.5.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "BLOCK",
    "HALF_BITS",
    "TILE",
    "Codebook",
    "ExpertGroup",
    "StoredLinear",
    "StoredNgramTable",
    "StoredRowTable",
    "StoredScaledTable",
    "StoredTensor",
    "pad_to_block",
]

TILE = 16
"""Rows and columns of one trellis tile."""

BLOCK = 128
"""Channels that one Hadamard transform mixes; every stored width is a multiple of it."""

HALF_BITS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
"""Every 2·K that the format knows; the odd ones (K = 1.5, 2.5, 3.5) exist with mul1 only."""


def pad_to_block(channels: int) -> int:
    """The stored width of an axis with so many channels: the next multiple of `BLOCK`."""
    return -(-channels // BLOCK) * BLOCK


class Codebook(enum.IntEnum):
    """How a 16-bit trellis state becomes a weight; the values are the C ABI's and the kernels'."""

    INST3 = 0
    MCG = 1
    MUL1 = 2

    @property
    def label(self) -> str:
        """The name that exllamav3's ``quantization_config`` uses."""
        return ("3inst", "mcg", "mul1")[self]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file.

    Attributes:
        name: its full name in the checkpoint.
        dtype: the safetensors dtype code, such as ``"I16"`` or ``"BF16"``.
        shape: its shape.
        file: the file's name, relative to the pack.
        start: offset of its first byte from the start of the file.
        nbytes: its size in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """One EXL3 linear of a pack: y = ((x·suh) H W H)·svh + bias, W trellis-coded.

    Attributes:
        key: the module's name in the checkpoint, such as ``model.layers.0.self_attn.q_proj``.
        half_bits: 2·K, the bits a weight takes times two, so that 1.5, 2.5 and 3.5 are integers.
        codebook: from the marker tensor, or its absence.
        in_features: stored (padded) input channels, a multiple of 128.
        out_features: stored (padded) output channels, a multiple of 128.
        trellis: I16 ``[in/16, out/16, 16·K]``.
        suh: F16 ``[in]``, or the packed signs I16 ``[in/16]`` of a legacy pack's ``.su``.
        svh: F16 ``[out]``, or the packed signs I16 ``[out/16]`` of a legacy pack's ``.sv``.
        bias: F16 or F32 ``[out]``, or None.
        marker: the I32 scalar that names the codebook, or None for 3INST.
    """

    key: str
    half_bits: int
    codebook: Codebook
    in_features: int
    out_features: int
    trellis: StoredTensor
    suh: StoredTensor
    svh: StoredTensor
    bias: StoredTensor | None
    marker: StoredTensor | None

    @property
    def bits(self) -> float:
        """K, the trellis bits per weight."""
        return self.half_bits / 2

    @property
    def nbytes(self) -> int:
        """Bytes of everything this linear stores."""
        tensors = (self.trellis, self.suh, self.svh, self.bias, self.marker)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass(frozen=True, slots=True)
class StoredRowTable:
    """A token embedding coded row by row: one ring of 256 weights per (row, group).

    Attributes:
        key: the module's name in the checkpoint, such as ``model.embed_tokens``.
        bits: K, an integer from 1 to 8; the codebook is always mul1.
        rows: rows of the table (the vocabulary).
        groups: rings per row; a row decodes to 256·groups values, cut to the hidden size.
        trellis: I16 ``[rows, groups·(1 + 16·K)]``.
        signs: F16 ``[groups, 256]``, ±1.
    """

    key: str
    bits: int
    rows: int
    groups: int
    trellis: StoredTensor
    signs: StoredTensor

    @property
    def nbytes(self) -> int:
        """Bytes of everything this table stores."""
        return self.trellis.nbytes + self.signs.nbytes


@dataclass(frozen=True, slots=True)
class StoredScaledTable:
    """A token embedding of plain integers with scales: int8 rows, or int4 in groups of 128 columns.

    Attributes:
        key: the module's name in the checkpoint, such as ``model.embed_tokens``.
        bits: 8 or 4.
        rows: rows of the table (the vocabulary).
        groups: scales per row: 1 of int8, one for each 128 columns begun of int4.
        table: I8 ``[rows, hidden]``, or U8 ``[rows, ceil(hidden/2)]`` with the even column in the low half.
        scales: F16, BF16 or F32 ``[rows, groups]``.
    """

    key: str
    bits: int
    rows: int
    groups: int
    table: StoredTensor
    scales: StoredTensor

    @property
    def nbytes(self) -> int:
        """Bytes of everything this table stores."""
        return self.table.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class StoredNgramTable:
    """An n-gram embedding table coded row by row: one ring of 160 weights per row.

    Attributes:
        key: the module's name in the checkpoint.
        bits: K, an integer from 1 to 8; the codebook is always mul1.
        rows: rows over all shards.
        shards: I16 ``[rows of the shard, 1 + 10·K]`` each, in order.
        head_bias: F16 ``[heads, 160]``.
        extra: the integer tensors beside it by leaf name: ``head_offsets``, ``head_vocab_sizes``,
            ``layer_multipliers``.
    """

    key: str
    bits: int
    rows: int
    shards: tuple[StoredTensor, ...]
    head_bias: StoredTensor
    extra: Mapping[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        """Bytes of everything this table stores."""
        return sum(tensor.nbytes for tensor in (*self.shards, self.head_bias, *self.extra.values()))


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The routed experts of one MLP, whichever of the two naming schemes the pack uses.

    Attributes:
        key: the MLP's name in the checkpoint, such as ``model.layers.0.mlp``.
        roles: what each expert holds, in the order gate, up, down; no gate in un-gated models.
        members: expert index to role to the key of its linear.
    """

    key: str
    roles: tuple[str, ...]
    members: Mapping[int, Mapping[str, str]]

    @property
    def experts(self) -> tuple[int, ...]:
        """Indices of the experts that are present, ascending."""
        return tuple(sorted(self.members))
