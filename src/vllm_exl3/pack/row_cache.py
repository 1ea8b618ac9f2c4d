"""A bounded cache of table rows: arrays of a fixed size, one place a row can lie in.

n-grams follow Zipf's law, so few rows serve most look-ups. The page cache would keep a page of 4 KiB for each of
them; this keeps the row alone.
"""

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["RowCache"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class RowCache:
    """Rows by id. A row has one place, and replaces what was there. Threads may share it.

    Args:
        nbytes: an upper bound of its memory; 0 keeps nothing. Memory is taken as places fill.
        words: 16-bit words of one row.
    """

    def __init__(self, nbytes: int, words: int) -> None:
        places = nbytes // self.place_bytes(words)
        # A power of two, so that the place of an id is the upper bits of a product.
        self._bits = max(0, places.bit_length() - 1)
        self.places = (1 << self._bits) if places else 0
        self._rows = np.zeros((self.places, words), np.int16)
        # Zero pages cost nothing until they are written: ids are kept plus one.
        self._ids = np.zeros(self.places, np.int64)
        # A place's id and row change in two steps: between them another thread would take the wrong row.
        self._lock = threading.Lock()

    @staticmethod
    def place_bytes(words: int) -> int:
        """Memory of one place: a row and its id."""
        return 2 * words + 8

    def get(self, ids: npt.NDArray[np.int64], out: npt.NDArray[np.int16]) -> npt.NDArray[np.bool_]:
        """Copy the rows that are here.

        Args:
            ids: ``[n]``, not negative.
            out: ``[n, words]``; rows that are not here are left as they are.

        Returns:
            Which rows were copied, ``[n]``.
        """
        if not self.places:
            return np.zeros(len(ids), np.bool_)
        place = self._place(ids)
        with self._lock:
            found: npt.NDArray[np.bool_] = self._ids[place] == ids + 1
            out[found] = self._rows[place[found]]
        return found

    def put(self, ids: npt.NDArray[np.int64], rows: npt.NDArray[np.int16]) -> None:
        """Keep ``rows`` ``[n, words]`` for later; of ids that share a place the first stays."""
        if not self.places:
            return
        place, first = np.unique(self._place(ids), return_index=True)
        with self._lock:
            self._ids[place] = ids[first] + 1
            self._rows[place] = rows[first]

    def _place(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        if not self._bits:
            return np.zeros(len(ids), np.int64)
        return ((ids.astype(np.uint64) * _GOLDEN) >> np.uint64(64 - self._bits)).astype(np.int64)
