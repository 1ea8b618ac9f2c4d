"""Which rows of an n-gram table a token looks up: its heads, and the hash of the tokens before it.

Source: the EXL3 format as written by exllamav3 1.6.5. The rows themselves are read in `ngram_rows`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.stored import StoredNgramTable

__all__ = ["NgramHeads", "ngram_ids", "read_heads"]

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class NgramHeads:
    """How an n-gram table is divided: every head owns a range of rows and adds a bias of its own.

    Attributes:
        bias: float16 ``[heads, 160]``.
        offsets: int64 ``[heads]``, each head's first row; the ranges follow each other without a gap.
        sizes: int64 ``[heads]``, rows of each head.
        multipliers: int64 ``[n]`` of the hash, the newest token's first; None where the pack leaves them to the model.
    """

    bias: npt.NDArray[np.float16]
    offsets: Integers
    sizes: Integers
    multipliers: Integers | None

    @property
    def rows(self) -> int:
        """Rows that ids can reach; what a table stores beyond them is padding."""
        return int(self.offsets[-1] + self.sizes[-1])

    def head_of(self, ids: npt.NDArray[Any]) -> Integers:
        """The head that each row belongs to; padding counts to the last."""
        return np.asarray(np.searchsorted(self.offsets, ids, side="right") - 1, np.int64)


def read_heads(pack: Pack, table: StoredNgramTable) -> NgramHeads:
    """Read and check the small tensors beside a table.

    Raises:
        Exl3PackError: one is missing or has another shape, the ranges overlap or leave the table, a bias is no number.
    """
    missing = [leaf for leaf in ("head_offsets", "head_vocab_sizes") if leaf not in table.extra]
    if missing:
        raise _fault(
            table, f"no .{missing[0]}", "one beside .head_bias, since it says which rows a head owns", "is missing"
        )
    bias = np.array(pack.read(table.head_bias.name))
    extra = {leaf: np.array(pack.read(tensor.name)) for leaf, tensor in table.extra.items()}
    offsets, sizes, multipliers = (
        extra.get(leaf) for leaf in ("head_offsets", "head_vocab_sizes", "layer_multipliers")
    )
    assert offsets is not None and sizes is not None
    heads = len(bias)
    if not heads:
        raise _fault(table, "no heads", "a row of .head_bias for each", "is damaged")
    for leaf, values in extra.items():
        wanted = None if leaf == "layer_multipliers" else (heads,)
        if values.dtype != np.int64 or values.ndim != 1 or (wanted is not None and values.shape != wanted):
            raise _fault(
                table, f".{leaf} {values.dtype} {list(values.shape)}", f"int64 [{heads}], one a head", "is damaged"
            )
    ends = offsets + sizes
    # A size beyond the table would let the sums wrap around.
    own = ((sizes > 0) & (sizes <= table.rows)).all()
    if not own or offsets[0] != 0 or (offsets[1:] != ends[:-1]).any() or ends[-1] > table.rows:
        raise _fault(
            table,
            f"heads of {sizes[:4].tolist()} … rows from {offsets[:4].tolist()} …, {int(ends[-1])} in all",
            f"ranges that follow each other from row 0 and end within the {table.rows} stored rows",
            "is of another table",
        )
    if multipliers is not None and (len(multipliers) < 2 or heads % (len(multipliers) - 1)):
        raise _fault(
            table,
            f"{len(multipliers)} layer_multipliers beside {heads} heads",
            "n of them, and as many heads for each n-gram from 2 to n",
            "is of another table",
        )
    if not np.isfinite(bias).all():
        raise _fault(table, "a head_bias with NaN or infinity", "finite values", "is damaged")
    return NgramHeads(bias, offsets, sizes, multipliers)


def ngram_ids(tokens: Sequence[int] | npt.NDArray[Any], heads: NgramHeads, end_of_text: int) -> Integers:
    """Rows that every position of one sequence looks up.

    Head h of the n-grams of m tokens takes ``(t0·k0 ^ t1·k1 ^ … ^ t(m-1)·k(m-1)) mod size[h] + offset[h]``, t0 the
    token itself and t1 the one before it, in wrapping int64. What lies before the start, or before the last end of
    text ahead of the position, counts as end of text.

    Args:
        tokens: ids of the whole sequence, from its start.
        heads: with multipliers.
        end_of_text: the token that separates texts.

    Returns:
        int64 ``[len(tokens), heads]``.
    """
    assert heads.multipliers is not None
    current = np.asarray(tokens, np.int64)
    positions = np.arange(len(current))
    ends = np.maximum.accumulate(np.where(current == end_of_text, positions, -1))
    last_end = np.concatenate([[-1], ends[:-1]])
    per_ngram = len(heads.sizes) // (len(heads.multipliers) - 1)
    ids = np.empty((len(current), len(heads.sizes)), np.int64)
    mixed = current * heads.multipliers[0]
    for back, multiplier in enumerate(heads.multipliers[1:], start=1):
        source = positions - back
        earlier = np.where(source > last_end, current[np.maximum(source, 0)], end_of_text)
        mixed = mixed ^ (earlier * multiplier)
        own = slice((back - 1) * per_ngram, back * per_ngram)
        ids[:, own] = mixed[:, None] % heads.sizes[own] + heads.offsets[own]
    return ids


def _fault(table: StoredNgramTable, found: str, expected: str, what: str) -> Exl3PackError:
    return Exl3PackError(
        found=found,
        expected=expected,
        where=f"{table.key} in {table.head_bias.file}",
        remedy=f"A file of the n-gram table {what}: fetch the pack again.",
    )
