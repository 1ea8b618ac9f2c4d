"""Tells an encoded trellis from other bytes by the distribution of its states, without the source model.

Any bit string is a valid trellis, and of random bits every 16-bit state is equally likely. An encoder shrinks the
weights below the codebook's own variance, because that lowers the error, and it chooses states whose values follow
the weights' bell: read at the right K and with the right codebook, the decoded values have less variance than the
codebook, and their histogram over the codebook's quantiles is not flat. Read wrongly (another K or codebook, bytes of
another tensor type, random bytes) the hash of the state makes both disappear. Measured on exllamav3's packs, the root
mean square is 0.49 to 0.98 of the codebook's from K = 1.5 on, against 0.99 to 1.01 for as many misread weights.

Two readings can both show an encoder's work, where their states share places of the ring (K = 6 read at 3 has right
states in every second place). The right one is the one that stands out most: of all K, it has the most right states.

What this cannot find: a trellis of the same K and codebook from another linear, and anything at K = 1, whose
two choices for each weight leave the states almost uniform.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack.codec import codebook_table
from vllm_exl3.pack.stored import HALF_BITS, Codebook
from vllm_exl3.pack.tile import unpack_states

__all__ = ["STRIP", "STRIPS", "Place", "Reading", "diagnose", "read_sample"]

STRIPS = 8
"""Places of a trellis that are sampled, evenly spread."""

STRIP = 64
"""Tiles sampled at each place."""

_BINS = 32
_FEWEST_BITS = 1.5
_SIGMAS = 4.0
_CHI_SIGMAS = 8.0
_MOST_BIAS = 0.1
"""How far from one half the share of ones at one place of the 16-bit words may be; intact ones stay below 0.02."""

_MORE = 1.2
"""How many times as many standard deviations make another reading the right one; at K and 2·K it is √2."""

_COMPARED = 1 << 16
"""Weights with which readings at other K are compared."""

Place = tuple[int, npt.NDArray[np.uint16]]
"""A sampled place: the index of its first tile, and its tiles' words ``[tiles, 16·K]``."""


@dataclass(frozen=True)
class Reading:
    """How a sample decodes at one K and codebook.

    Attributes:
        energy: mean square of the values over the codebook's mean square.
        sigmas: how many standard deviations ``energy`` is above 1, the expectation for uniform states.
        chi_sigmas: the same for the χ² of the histogram over the codebook's quantiles.
        places: both of each sampled place.
    """

    energy: float
    sigmas: float
    chi_sigmas: float
    places: tuple[tuple[float, float], ...]

    @property
    def uniform(self) -> bool:
        """Nothing tells these states from those of random bits."""
        return abs(self.sigmas) <= _SIGMAS and self.chi_sigmas <= _CHI_SIGMAS


def read_sample(sample: list[Place], half_bits: int, codebook: Codebook) -> Reading:
    """Decode sampled tiles and compare their states with uniform ones.

    Args:
        sample: the sampled places, their words those of tiles at this K.
        half_bits: 2·K.
        codebook: the codebook to read with.
    """
    energies, quantile, deviation = _moments(codebook)
    counts, places, total, size = np.zeros(_BINS), [], 0.0, 0
    for _, tiles in sample:
        states = unpack_states(tiles, half_bits).reshape(-1)
        count = np.bincount(quantile[states], minlength=_BINS)
        energy = float(energies[states].mean(dtype=np.float64))
        places.append(((energy - 1) / deviation * states.size**0.5, _chi_sigmas(count)))
        counts, total, size = counts + count, total + energy * states.size, size + states.size
    energy = total / size
    return Reading(energy, (energy - 1) / deviation * size**0.5, _chi_sigmas(counts), tuple(places))


def _chi_sigmas(counts: npt.NDArray[Any]) -> float:
    expected = float(counts.sum()) / _BINS
    chi = float((np.square(counts - expected) / expected).sum())
    return (chi - (_BINS - 1)) / float((2 * (_BINS - 1)) ** 0.5)


def diagnose(sample: list[Place], half_bits: int, codebook: Codebook) -> str | None:
    """Say why a sample is no trellis of this K and codebook, or None where nothing speaks against it.

    Args:
        sample: the sampled places, without tiles of zeros.
        half_bits: 2·K.
        codebook: the codebook that the markers name.
    """
    if reason := _biased_bit(sample):
        return reason
    reading = read_sample(sample, half_bits, codebook)
    if reading.sigmas > 2 * _SIGMAS:
        return (
            f"decoded variance {reading.energy:.3f} of the codebook's ({reading.sigmas:.0f} standard deviations above)"
        )
    if half_bits / 2 < _FEWEST_BITS:
        return None
    better = _better_reading(sample, half_bits, codebook, tuple(Codebook) if reading.uniform else (codebook,))
    if reading.uniform:
        also = f"; read at {better} they are an encoded trellis" if better else ""
        return f"states as uniform as those of random bits (variance {reading.energy:.3f} of the codebook's){also}"
    return f"a trellis at {better}" if better else _uniform_places(reading)


def _biased_bit(sample: list[Place]) -> str | None:
    """A bit of the words that is mostly 0 or mostly 1, such as an exponent's."""
    words = np.concatenate([tiles.reshape(-1) for _, tiles in sample])
    ones = np.array([float((words >> np.uint16(bit) & np.uint16(1)).mean()) for bit in range(16)])
    worst = int(np.abs(ones - 0.5).argmax())
    if abs(ones[worst] - 0.5) <= _MOST_BIAS + 6 / (2 * words.size**0.5):
        return None
    return f"bit {worst} of the 16-bit words set in {ones[worst]:.0%} of them: bytes of another data type"


def _uniform_places(reading: Reading) -> str | None:
    """A quarter or more of the sample that looks random although the rest does not.

    A single place may: one scale holds for a whole matrix, and a part with larger weights fills the codebook.
    """
    if np.median([sigmas for sigmas, _ in reading.places]) > -3 * _SIGMAS:
        return None  # a place has too few weights to tell
    bad = [place for place, (sigmas, chi) in enumerate(reading.places) if -1.5 < sigmas < _SIGMAS and chi < _SIGMAS / 2]
    if len(bad) < 2:
        return None
    places = len(reading.places)
    return (
        f"states of random bits about {bad[0] / places:.0%} into the tensor, in {len(bad)} of {places} sampled places"
    )


def _better_reading(
    sample: list[Place], half_bits: int, codebook: Codebook, codebooks: tuple[Codebook, ...]
) -> str | None:
    """The K and codebook at which the same bytes stand out more than as they are declared."""
    enough = -(-_COMPARED // max(1, sample[0][1].size * 2 // half_bits))
    part = sample[:: max(1, len(sample) // enough)] if enough else sample
    least = min(-3 * _SIGMAS, _MORE * read_sample(part, half_bits, codebook).sigmas)
    best = None
    for other in HALF_BITS:
        cut = _recut(part, half_bits, other)
        for book in codebooks:
            if (other, book) == (half_bits, codebook) or (other % 2 and book is not Codebook.MUL1) or not cut:
                continue
            if (sigmas := read_sample(cut, other, book).sigmas) < least:
                least, best = sigmas, f"K = {other / 2:g} with codebook {book.label}"
    return best


def _recut(sample: list[Place], half_bits: int, other: int) -> list[Place]:
    """The same bytes as tiles of another K, from the first whole tile of it in every place."""
    words, found = 8 * other, []
    for start, tiles in sample:
        skipped = -start * 8 * half_bits % words
        flat = tiles.reshape(-1)[skipped:]
        if flat.size >= words:
            found.append((start, flat[: flat.size // words * words].reshape(-1, words)))
    return found


@lru_cache
def _moments(codebook: Codebook) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8], float]:
    """Relative energy and quantile bin of each state, and the standard deviation of the energy."""
    table: npt.NDArray[Any] = codebook_table(codebook).astype(np.float64)
    rank = np.empty(table.size, np.int64)
    rank[np.argsort(table, kind="stable")] = np.arange(table.size)
    energies = np.square(table) / np.square(table).mean()
    return energies.astype(np.float32), (rank * _BINS // table.size).astype(np.uint8), float(energies.std())
