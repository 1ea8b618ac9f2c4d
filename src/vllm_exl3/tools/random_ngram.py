"""Writes a random n-gram table into a pack folder, for tests and benchmarks; a sparse one of any size in a moment.

Rows that are not filled are holes of the file: they take no disk, and decode to their head's bias. The layout is the
one exllamav3 1.6.5 writes.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack.assemble import RING_NGRAM
from vllm_exl3.pack.stored import TILE
from vllm_exl3.tools.safetensors_layout import lay_out

__all__ = ["random_rows", "write_ngram_table"]


def random_rows(rows: int, bits: int, rng: np.random.Generator) -> npt.NDArray[np.int16]:
    """Rows ``[rows, 1 + 10·bits]`` of random code with scales like those of real tables."""
    words = rng.integers(-(2**15), 2**15, (rows, 1 + RING_NGRAM // TILE * bits), np.int16)
    words[:, 0] = rng.uniform(0.005, 0.05, rows).astype(np.float16).view(np.int16)
    return words


def write_ngram_table(
    path: Path,
    key: str,
    *,
    rows: int,
    bits: int,
    head_sizes: Sequence[int],
    multipliers: Sequence[int],
    shards: int = 0,
    filled: Sequence[int] | None = None,
    seed: int = 0,
) -> dict[int, npt.NDArray[np.int16]]:
    """Write one safetensors file with the table and what belongs to it.

    Args:
        path: the file.
        key: the table's module name.
        rows: rows of the table, at least the sum of ``head_sizes``.
        bits: K.
        head_sizes: rows that each head owns.
        multipliers: of the hash.
        shards: how many ``.shard_<i>`` tensors; 0 writes one ``.trellis``.
        filled: rows that get random code, the others are holes; None fills all.
        seed: of everything random.

    Returns:
        The code of every filled row, by number.
    """
    rng = np.random.default_rng(seed)
    words = 1 + RING_NGRAM // TILE * bits
    sizes = np.array(head_sizes, np.int64)
    small = {
        "head_bias": ("F16", rng.uniform(-0.02, 0.02, (len(sizes), RING_NGRAM)).astype(np.float16)),
        "head_offsets": ("I64", np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)),
        "head_vocab_sizes": ("I64", sizes),
        "layer_multipliers": ("I64", np.array(multipliers, np.int64)),
    }
    of_shard = -(-rows // max(1, shards))
    parts = [min(of_shard, rows - first) for first in range(0, rows, of_shard)]
    names = [f"{key}.shard_{index}.trellis" if shards else f"{key}.trellis" for index in range(len(parts))]
    layout = lay_out(
        [
            *((name, "I16", (count, words)) for name, count in zip(names, parts, strict=True)),
            *((f"{key}.{leaf}", dtype, values.shape) for leaf, (dtype, values) in small.items()),
        ],
        {"format": "exl3_ngram_trellis", "version": "1", "K": str(bits)},
    )
    numbers = np.arange(rows) if filled is None else np.unique(np.asarray(filled, np.int64))
    code = random_rows(len(numbers), bits, rng)
    with open(path, "wb") as file:
        file.write(layout.header)
        file.truncate(layout.nbytes)
        if filled is None:
            file.write(code.tobytes())
        else:
            for number, row in zip(numbers.tolist(), code, strict=True):
                os.pwrite(file.fileno(), row.tobytes(), layout.starts[names[0]] + number * row.nbytes)
        for leaf, (_, values) in small.items():
            file.seek(layout.starts[f"{key}.{leaf}"])
            file.write(values.tobytes())
    return dict(zip(numbers.tolist(), code, strict=True))
