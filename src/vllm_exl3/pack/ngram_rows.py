"""Rows of an n-gram table, read from the pack's files as they are asked for.

Files are mapped, so a table of any size costs address space. What a process has touched of them counts as its resident
memory until it is given back, which happens here every `_KEPT_BYTES`; the page cache keeps the data meanwhile.
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.row_cache import RowCache
from vllm_exl3.pack.stored import StoredNgramTable, StoredTensor

__all__ = ["NgramRows"]

_KEPT_BYTES = 256 << 20
_FAULT_BYTES = 64 << 10
"""What one touched row may map at most: the kernel maps cached pages around it as well."""

_PAGE = mmap.PAGESIZE
_WORD = 2


@dataclass(frozen=True)
class _Run:
    """Shards that lie back to back in one file.

    Attributes:
        first: the table's row that it begins with.
        rows: how many it holds.
        start: offset of the first byte in the file.
        file: index of the file.
    """

    first: int
    rows: int
    start: int
    file: int


class NgramRows:
    """Random access to the rows of one table.

    Args:
        pack: an opened pack whose files are local.
        table: one of its `ngram_tables`.
        cache_bytes: memory for rows that were read before, at most; 0 keeps none.

    Raises:
        Exl3PackError: the files are not on this machine, or shorter than their headers said.
    """

    def __init__(self, pack: Pack, table: StoredNgramTable, cache_bytes: int = 0) -> None:
        if pack.folder is None:
            raise Exl3PackError(
                found="a pack whose files are not all on this machine",
                expected=f"{table.shards[0].file} in a local folder, since the n-gram table is read from it directly",
                where=f"{table.key} in {pack.source}",
                remedy="Download the whole repository at this revision (hf download), and serve it or that folder.",
            )
        self.rows, self.words = table.rows, table.shards[0].shape[1]
        self.bytes_read = 0
        self._maps: list[mmap.mmap] = []
        self._runs = self._open(pack.folder, table.shards)
        self._views = [self._view(run) for run in self._runs]
        # No more places than the table fills, whatever was asked for.
        self._cache = RowCache(min(cache_bytes, 2 * self.rows * RowCache.place_bytes(self.words)), self.words)
        self._touched = 0

    def gather(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int16]:
        """Some rows. Threads may call it at once.

        Args:
            ids: ``[n]`` from 0 to rows - 1, ascending and distinct: reads follow the file.

        Returns:
            ``[n, words]``, a new array.

        Raises:
            IndexError: an id lies outside the table.
        """
        if len(ids) and (ids[0] < 0 or ids[-1] >= self.rows):
            raise IndexError(f"n-gram rows {ids[0]} to {ids[-1]} were asked for, of a table of {self.rows}")
        found = np.empty((len(ids), self.words), np.int16)
        absent = ~self._cache.get(ids, found)
        wanted = ids[absent]
        if len(wanted):
            read = self._read(wanted)
            found[absent] = read
            self._cache.put(wanted, read)
        return found

    def chunks(self, first: int, last: int, nbytes: int = 32 << 20) -> Iterator[tuple[int, npt.NDArray[np.int16]]]:
        """The rows from ``first`` up to ``last`` in order: pairs of a row's number and ``[n, words]`` from it on.

        A chunk is a view of the file, to be copied before the next one is asked for.
        """
        step = max(1, nbytes // (_WORD * self.words))
        for run, view in zip(self._runs, self._views, strict=True):
            begin, end = max(first, run.first), min(last, run.first + run.rows)
            for row in range(begin, end, step):
                part = view[row - run.first : min(row + step, end) - run.first]
                yield row, part
                self.bytes_read += part.nbytes
                self._touch(part.nbytes)

    def _open(self, folder: Path, shards: tuple[StoredTensor, ...]) -> list[_Run]:
        runs: list[_Run] = []
        files: dict[str, int] = {}
        first = 0
        for shard in shards:
            if shard.file not in files:
                files[shard.file] = self._map(folder / shard.file, shard)
            file, rows = files[shard.file], shard.shape[0]
            if len(self._maps[file]) < shard.start + shard.nbytes:
                reason = f"{len(self._maps[file])} bytes, fewer than when its header was read"
                raise _unreadable(folder / shard.file, shard, reason)
            last = runs[-1] if runs else None
            if last and last.file == file and last.start + last.rows * _WORD * self.words == shard.start:
                runs[-1] = _Run(last.first, last.rows + rows, last.start, file)
            elif rows:
                runs.append(_Run(first, rows, shard.start, file))
            first += rows
        return runs

    def _map(self, path: Path, shard: StoredTensor) -> int:
        try:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise _unreadable(path, shard, str(error)) from error
        mapped.madvise(mmap.MADV_RANDOM)
        self._maps.append(mapped)
        return len(self._maps) - 1

    def _view(self, run: _Run) -> npt.NDArray[np.int16]:
        flat = np.frombuffer(self._maps[run.file], "<i2", count=run.rows * self.words, offset=run.start)
        return flat.reshape(run.rows, self.words)

    def _read(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int16]:
        rows = np.empty((len(ids), self.words), np.int16)
        step = _KEPT_BYTES // _FAULT_BYTES
        for run, view in zip(self._runs, self._views, strict=True):
            begin, end = np.searchsorted(ids, [run.first, run.first + run.rows])
            for at in range(int(begin), int(end), step):
                own = slice(at, min(at + step, int(end)))
                local = ids[own] - run.first
                self._read_ahead(run, local)
                np.take(view, local, axis=0, out=rows[own], mode="clip")  # other modes copy through a buffer
                self._touch(len(local) * _FAULT_BYTES)
        self.bytes_read += rows.nbytes
        return rows

    def _read_ahead(self, run: _Run, local: npt.NDArray[np.int64]) -> None:
        """Let the disk fetch all pages at once; copying alone would wait for one after the other."""
        if len(local) < 2:
            return
        row_bytes = _WORD * self.words
        first = (run.start + local * row_bytes) // _PAGE
        last = (run.start + local * row_bytes + row_bytes - 1) // _PAGE
        begins = np.flatnonzero(np.concatenate([[True], first[1:] > last[:-1] + 1]))
        ends = np.concatenate([begins[1:] - 1, [len(local) - 1]])
        advise = self._maps[run.file].madvise
        for begin, end in zip(first[begins].tolist(), last[ends].tolist(), strict=True):
            advise(mmap.MADV_WILLNEED, begin * _PAGE, (end - begin + 1) * _PAGE)

    def _touch(self, nbytes: int) -> None:
        self._touched += nbytes
        if self._touched >= _KEPT_BYTES:
            self._touched = 0
            for mapped in self._maps:
                mapped.madvise(mmap.MADV_DONTNEED)


def _unreadable(path: Path, shard: StoredTensor, reason: str) -> Exl3PackError:
    return Exl3PackError(
        found=f"a file that cannot be mapped ({reason})",
        expected="a readable file with the rows of the n-gram table",
        where=f"{shard.name} in {path}",
        remedy="Check its permissions, and where a link leads; if it was replaced meanwhile, start again.",
    )
