"""From loose tensors to EXL3 objects: linears, quantized embeddings, n-gram tables.

A trellis decides: rank 3 is a linear, rank 2 with signs an embedding, rank 2 with a head bias an
n-gram table. Everything is read off shapes, dtypes and names; metadata is not consulted.
Source: the EXL3 format as written by exllamav3 1.6.5.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.stored import (
    BLOCK,
    HALF_BITS,
    TILE,
    Codebook,
    StoredLinear,
    StoredNgramTable,
    StoredRowTable,
    StoredScaledTable,
    StoredTensor,
)

__all__ = [
    "LINEAR_LEAVES",
    "MARKERS",
    "NGRAM_EXTRA",
    "RING_GROUP",
    "RING_NGRAM",
    "SCALE_GROUP",
    "Assembly",
    "assemble",
    "assemble_linear",
]

Tensors = Mapping[str, StoredTensor]
Parts = Mapping[str, StoredTensor]
"""The tensors of one module by leaf name, such as ``trellis`` or ``suh``."""

MARKERS: Mapping[str, tuple[Codebook, int]] = {
    "mcg": (Codebook.MCG, 0xCBAC1FED),
    "mul1": (Codebook.MUL1, 0x83DCD12D),
}
"""Marker leaf to the codebook it names and the value that it must hold, as uint32."""

LINEAR_LEAVES = ("trellis", "suh", "su", "svh", "sv", "mcg", "mul1", "bias")
"""Every leaf name that a linear may have."""

RING_GROUP = 256
"""Values of one embedding ring."""

RING_NGRAM = 160
"""Values of one n-gram ring."""

SCALE_GROUP = 128
"""Columns of an int4 embedding that share a scale."""

NGRAM_EXTRA = ("head_offsets", "head_vocab_sizes", "layer_multipliers")

_NGRAM_SHARD = re.compile(r"^(?P<key>.+)\.shard_(?P<index>\d+)$")


@dataclass
class Assembly:
    """The modules of a pack, each mapping by key in the order of the headers.

    Attributes:
        linears: EXL3 linears.
        embeddings: token embeddings that are row-coded, or integers with scales.
        ngram_tables: row-coded n-gram tables.
        dense: the ``.weight`` of every module without a trellis.
    """

    linears: dict[str, StoredLinear] = field(default_factory=dict)
    embeddings: dict[str, StoredRowTable | StoredScaledTable] = field(default_factory=dict)
    ngram_tables: dict[str, StoredNgramTable] = field(default_factory=dict)
    dense: dict[str, StoredTensor] = field(default_factory=dict)


def assemble(tensors: Tensors) -> Assembly:
    """Sort every tensor of a pack into modules.

    Raises:
        Exl3PackError: a trellis lacks what belongs to it, or its tensors contradict each other.
    """
    modules: defaultdict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        key, _, leaf = name.rpartition(".")
        modules[key][leaf] = tensor
    found = Assembly()
    shards: defaultdict[str, dict[int, StoredTensor]] = defaultdict(dict)
    for key, parts in modules.items():
        trellis = parts.get("trellis")
        if trellis is None:
            if "qrows" in parts:
                found.embeddings[key] = _scaled_table(key, parts)
            elif "weight" in parts:
                found.dense[key] = parts["weight"]
        elif len(trellis.shape) == 3:
            found.linears[key] = assemble_linear(key, parts)
        elif len(trellis.shape) == 2 and "signs" in parts:
            found.embeddings[key] = _row_table(key, parts)
        elif len(trellis.shape) == 2 and (match := _NGRAM_SHARD.match(key)):
            shards[match["key"]][int(match["index"])] = trellis
        elif len(trellis.shape) == 2 and "head_bias" in parts:
            shards[key][0] = trellis
        else:
            raise _shape(trellis, "[in/16, out/16, 16·K], or [rows, words] beside .signs (embedding) or .head_bias")
    for key, numbered in shards.items():
        found.ngram_tables[key] = _ngram_table(key, numbered, modules.get(key, {}))
    return found


def assemble_linear(key: str, parts: Parts) -> StoredLinear:
    """Build the linear ``key`` from its tensors.

    Raises:
        Exl3PackError: a part is missing, has another shape or dtype than the trellis demands, or
            names a second codebook.
    """
    trellis = parts["trellis"]
    _expect_dtype(trellis, "I16")
    rows, columns, width = trellis.shape
    half_bits, rest = divmod(width, TILE // 2)
    if rest or half_bits not in HALF_BITS:
        raise _shape(trellis, "a last dimension of 16·K with K in 1..8, 1.5, 2.5 or 3.5")
    in_features, out_features = rows * TILE, columns * TILE
    if not rows or not columns or in_features % BLOCK or out_features % BLOCK:
        raise _shape(trellis, f"{in_features} inputs and {out_features} outputs to be positive multiples of {BLOCK}")
    codebook, marker = _codebook(key, parts)
    if half_bits % 2 and codebook is not Codebook.MUL1:
        raise Exl3PackError(
            found=f"K = {half_bits / 2} with the {codebook.label} codebook",
            expected="a half-integer K only with mul1",
            where=_place(trellis),
            remedy="The marker tensor is missing or the file is damaged: fetch the pack again or quantize it anew.",
        )
    if "scale" in parts:
        raise Exl3PackError(
            found="a .scale beside a trellis",
            expected="suh and svh only; a scale tensor belongs to no EXL3 version that can be decoded",
            where=_place(parts["scale"]),
            remedy="Quantize the model again with a current exllamav3.",
        )
    return StoredLinear(
        key=key,
        half_bits=half_bits,
        codebook=codebook,
        in_features=in_features,
        out_features=out_features,
        trellis=trellis,
        suh=_scales(trellis, "su", in_features, parts),
        svh=_scales(trellis, "sv", out_features, parts),
        bias=_bias(out_features, parts),
        marker=marker,
    )


def _codebook(key: str, parts: Parts) -> tuple[Codebook, StoredTensor | None]:
    mcg, mul1 = parts.get("mcg"), parts.get("mul1")
    if mcg is not None and mul1 is not None:
        raise Exl3PackError(
            found="both .mcg and .mul1",
            expected="at most one codebook marker",
            where=f"{key} in {mcg.file}",
            remedy="Only the writer of the pack knows which codebook it used: quantize the model again.",
        )
    marker = mcg or mul1
    if marker is None:
        return Codebook.INST3, None
    _expect_dtype(marker, "I32")
    if marker.shape not in ((), (1,)):
        raise _shape(marker, "a scalar")
    return (Codebook.MCG if mcg is not None else Codebook.MUL1), marker


def _scales(trellis: StoredTensor, leaf: str, features: int, parts: Parts) -> StoredTensor:
    """``suh`` or ``svh``, or the packed signs ``su`` or ``sv`` of a pack from before exllamav3 0.0.2."""
    real, signs = parts.get(f"{leaf}h"), parts.get(leaf)
    if (real is None) == (signs is None):
        raise Exl3PackError(
            found=f"both .{leaf}h and .{leaf}" if real else f"neither .{leaf}h nor .{leaf}",
            expected="exactly one of them beside a trellis",
            where=_place(trellis),
            remedy="A file of the pack is missing or of another revision: fetch the pack again.",
        )
    tensor, dtype, length = (real, "F16", features) if real else (signs, "I16", features // TILE)
    assert tensor is not None  # one of the two is there, see above
    _expect_dtype(tensor, dtype)
    if tensor.shape != (length,):
        raise _shape(tensor, f"[{length}] to match {list(trellis.shape)} of {trellis.name}")
    return tensor


def _bias(out_features: int, parts: Parts) -> StoredTensor | None:
    bias = parts.get("bias")
    if bias is None:
        return None
    _expect_dtype(bias, "F16", "BF16", "F32")
    # Writers store it padded or as long as the model's own output, which ends in the last block.
    if len(bias.shape) != 1 or not out_features - BLOCK < bias.shape[0] <= out_features:
        raise _shape(bias, f"[{out_features}], or the unpadded width that rounds up to it")
    return bias


def _row_table(key: str, parts: Parts) -> StoredRowTable:
    trellis, signs = parts["trellis"], parts["signs"]
    _expect_dtype(trellis, "I16")
    _expect_dtype(signs, "F16")
    if len(signs.shape) != 2 or signs.shape[1] != RING_GROUP or not signs.shape[0]:
        raise _shape(signs, f"[groups, {RING_GROUP}]")
    rows, words = trellis.shape
    groups = signs.shape[0]
    bits = _ring_bits(trellis, words, groups, RING_GROUP)
    return StoredRowTable(key, bits, rows, groups, trellis, signs)


def _scaled_table(key: str, parts: Parts) -> StoredScaledTable:
    table, scales = parts["qrows"], parts.get("scales")
    if scales is None:
        raise Exl3PackError(
            found="no .scales",
            expected="one beside .qrows",
            where=_place(table),
            remedy="A file of the pack is missing: fetch the pack again, or make it anew with vllm-exl3 embed-quant.",
        )
    _expect_dtype(table, "I8", "U8")
    _expect_dtype(scales, "F16", "BF16", "F32")
    if len(table.shape) != 2 or not table.shape[0] or not table.shape[1]:
        raise _shape(table, "[rows, columns]")
    rows, columns = table.shape
    bits = 8 if table.dtype == "I8" else 4
    groups = 1 if bits == 8 else -(-2 * columns // SCALE_GROUP)
    if scales.shape != (rows, groups):
        raise _shape(scales, f"[{rows}, {groups}] to match {list(table.shape)} of {table.name}")
    return StoredScaledTable(key, bits, rows, groups, table, scales)


def _ngram_table(key: str, numbered: Mapping[int, StoredTensor], parts: Parts) -> StoredNgramTable:
    shards = tuple(numbered[index] for index in sorted(numbered))
    head_bias = parts.get("head_bias")
    if head_bias is None or sorted(numbered) != list(range(len(numbered))):
        found = "no .head_bias" if head_bias is None else f"shards {sorted(numbered)[:8]}"
        raise Exl3PackError(
            found=found,
            expected="a .head_bias and shards numbered from 0 without a gap",
            where=f"{key} in {shards[0].file}",
            remedy="A file of the n-gram table is missing: fetch the pack again.",
        )
    if len(head_bias.shape) != 2 or head_bias.shape[1] != RING_NGRAM:
        raise _shape(head_bias, f"[heads, {RING_NGRAM}]")
    _expect_dtype(head_bias, "F16")
    for shard in shards:
        _expect_dtype(shard, "I16")
        rows, words = shards[0].shape
        if shard.shape[1] != words:
            raise _shape(shard, f"{words} words a row as in {shards[0].name}")
        # A row's shard is its number divided by the rows of a shard, so only the last may be short.
        if shard.shape[0] > rows or (shard.shape[0] < rows and shard is not shards[-1]):
            raise _shape(shard, f"{rows} rows as in {shards[0].name}, fewer in the last shard only")
    bits = _ring_bits(shards[0], shards[0].shape[1], 1, RING_NGRAM)
    extra = {leaf: parts[leaf] for leaf in NGRAM_EXTRA if leaf in parts}
    return StoredNgramTable(key, bits, sum(shard.shape[0] for shard in shards), shards, head_bias, extra)


def _ring_bits(trellis: StoredTensor, words: int, groups: int, width: int) -> int:
    """K of rings of one scale word and ``width``·K/16 code words each."""
    bits, rest = divmod(words - groups, groups * width // TILE)
    if rest or not 1 <= bits <= 8:
        raise _shape(trellis, f"{groups} ring(s) of 1 + {width // TILE}·K words a row with K in 1..8")
    return bits


def _expect_dtype(tensor: StoredTensor, *dtypes: str) -> None:
    if tensor.dtype not in dtypes:
        raise Exl3PackError(
            found=f"dtype {tensor.dtype}",
            expected=" or ".join(dtypes),
            where=_place(tensor),
            remedy="The tensor was converted after quantization: fetch the original pack.",
        )


def _shape(tensor: StoredTensor, expected: str) -> Exl3PackError:
    return Exl3PackError(
        found=f"shape {list(tensor.shape)}",
        expected=expected,
        where=_place(tensor),
        remedy="The file is damaged, or of another revision than the rest: fetch the pack again.",
    )


def _place(tensor: StoredTensor) -> str:
    return f"{tensor.name} in {tensor.file}"
