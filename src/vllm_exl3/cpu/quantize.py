"""The project's own EXL3 quantizer: scales and rotations in numpy, the trellis search in the library.

For tests and the demo. Weights are rounded to the nearest trellis without a Hessian, so at equal bits
a pack calibrated by exllamav3 is somewhat better.

Source of the scheme: the EXL3 format as written by exllamav3 1.6.5, with one addition: the variance
that zero padding takes from a 128-channel block is given back by scaling the block.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_exl3.cpu.library import ShardStruct, check, library, use_openmp
from vllm_exl3.pack.stored import BLOCK, TILE, Codebook
from vllm_exl3.processors import allowed

__all__ = ["ENCODER_VERSION", "EncodedLinear", "encode", "quantize_linear"]

ENCODER_VERSION = "vllm-exl3 viterbi 1"
"""Changes whenever the bits that `quantize_linear` makes change."""

Floats = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]

_MARKERS = {Codebook.MUL1: 0x83DCD12D, Codebook.MCG: 0xCBAC1FED}
_ROOT_MEAN_SQUARE = {Codebook.INST3: 1.243711, Codebook.MCG: 1.244112, Codebook.MUL1: 1.000312}

_BEST_SCALE = {
    Codebook.MUL1: (1.05, 1.0, 0.95, 0.9, 0.88, 0.84, 0.8, 0.77),
    Codebook.MCG: (1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.76, 0.72),
    Codebook.INST3: (1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.76, 0.72),
}
"""Scale of Gaussian weights over the codebook's at which the relative error is least, for K = 1 … 8 (measured)."""

_DEAD = 1e-30
"""Root mean square below which a channel counts as zero; its scale is 0, so that it decodes to exactly 0."""

_TILES_AT_ONCE = 1 << 13
"""Tiles between two calls of a progress function."""


@dataclass(frozen=True)
class EncodedLinear:
    """One quantized linear.

    Attributes:
        trellis: int16 ``[in/16, out/16, 16·K]``.
        suh: float16 ``[in]``.
        svh: float16 ``[out]``.
        marker: value of the marker tensor, signed as stored, or None for 3INST.
        error: squared error of the decoded weight over the squared weight.
    """

    trellis: npt.NDArray[np.int16]
    suh: npt.NDArray[np.float16]
    svh: npt.NDArray[np.float16]
    marker: int | None
    error: float


def quantize_linear(
    weight: Floats,
    half_bits: int,
    codebook: Codebook,
    *,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
) -> EncodedLinear:
    """Quantize a linear's weight.

    Args:
        weight: ``[in, out]`` (y = x·weight), both multiples of 128; pad with zeros.
        half_bits: 2·K.
        codebook: 3INST, mcg or mul1.
        seed: of the random signs. Equal arguments give equal bits, whatever the threads.
        threads: at most so many; by default one for each processor that the process may use.
        progress: called with the tiles done and all tiles.

    Raises:
        ValueError: a size is no multiple of 128, a weight is not finite, or the rate does not exist.
        RuntimeError: the C++ library is not available.
    """
    weight = np.ascontiguousarray(weight, dtype=np.float32)
    rows, columns = weight.shape
    if rows % BLOCK or columns % BLOCK or not weight.size:
        raise ValueError(f"weight: found shape {weight.shape}, expected multiples of {BLOCK}")
    if not np.isfinite(weight).all():
        raise ValueError("weight: found NaN or infinity, expected finite values")
    threads = threads or allowed()
    rotated, suh, svh = _regularise(weight, _target_scale(half_bits, codebook), seed, threads)
    trellis = encode(rotated, half_bits, codebook, threads=threads, progress=progress)
    decoded = _decode_unscaled(trellis, half_bits, codebook, threads)
    suh16, svh16, error = _refit(weight, decoded, suh, svh)
    marker = _MARKERS.get(codebook)
    return EncodedLinear(trellis, suh16, svh16, marker - (1 << 32) if marker is not None else None, error)


def encode(
    weights: Floats,
    half_bits: int,
    codebook: Codebook,
    *,
    threads: int = 1,
    progress: Progress | None = None,
) -> npt.NDArray[np.int16]:
    """Find the trellis whose decoded values are nearest, by a Viterbi search over all states.

    Args:
        weights: ``[in, out]``, multiples of 128, already rotated and scaled for the codebook.
        half_bits: 2·K.
        codebook: 3INST, mcg or mul1.
        threads: at most so many.
        progress: called with the tiles done and all tiles.

    Returns:
        int16 ``[in/16, out/16, 16·K]``.

    Raises:
        RuntimeError: the sizes or the rate are not those of an EXL3 linear, or there is no library.
    """
    use_openmp()
    weights = np.ascontiguousarray(weights, dtype=np.float32)
    rows, columns = weights.shape
    trellis = np.empty((rows // TILE, columns // TILE, 8 * half_bits), np.int16)
    step = max(1, _TILES_AT_ONCE // (BLOCK // TILE * (columns // TILE))) * BLOCK
    error = ctypes.c_double()
    for first in range(0, rows, step):
        part = weights[first : first + step]
        into = trellis[first // TILE :]
        check(
            library().exl3_encode(
                part.ctypes.data,
                columns,
                len(part),
                columns,
                half_bits,
                int(codebook),
                into.ctypes.data,
                ctypes.byref(error),
                threads,
            )
        )
        if progress is not None:
            progress((first + len(part)) // TILE * trellis.shape[1], trellis.shape[0] * trellis.shape[1])
    return trellis


def _target_scale(half_bits: int, codebook: Codebook) -> float:
    """Root mean square that rotated weights should have for this rate and codebook."""
    scales = _BEST_SCALE[codebook]
    bits = half_bits / 2
    if not 1 <= bits <= len(scales):
        raise ValueError(f"half_bits: found {half_bits}, expected 2 to {2 * len(scales)}")
    return float(np.interp(bits, range(1, len(scales) + 1), scales)) * _ROOT_MEAN_SQUARE[codebook]


def _regularise(weight: Floats, target: float, seed: int, threads: int) -> tuple[Floats, Floats, Floats]:
    """Scale and rotate to Gaussian entries: weight ≈ diag(suh)·H·rotated·H·diag(svh)."""
    random = np.random.default_rng(seed)
    signs = [random.choice(np.array([-1, 1], np.float32), size) for size in (weight.shape[1], weight.shape[0])]
    svh = _root_mean_square(weight, 0)
    svh = signs[0] * svh / _typical(svh)
    rotated = _rotate(weight * _inverse(svh), threads)
    suh = signs[1] * _root_mean_square(rotated, 1)
    rotated = np.ascontiguousarray(_rotate(np.ascontiguousarray((rotated * _inverse(suh)[:, None]).T), threads).T)
    # A block with dead channels has less variance than the others.
    by_row = np.repeat(_root_mean_square(rotated.reshape(-1, BLOCK * weight.shape[1]), 1) / target, BLOCK)
    rotated *= _inverse(by_row)[:, None]
    blocks = rotated.reshape(weight.shape[0], -1, BLOCK)
    by_column = np.repeat(_root_mean_square(blocks.swapaxes(0, 1).reshape(blocks.shape[1], -1), 1) / target, BLOCK)
    rotated *= _inverse(by_column)
    return rotated, (suh * by_row).astype(np.float32), (svh * by_column).astype(np.float32)


def _refit(
    weight: Floats, decoded: Floats, suh: Floats, svh: Floats
) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.float16], float]:
    """The scales that minimise the squared error, in turn, then as float16; overwrites ``decoded``."""
    product, square = weight * decoded, np.square(decoded)

    def best(numerator: Floats, denominator: Floats, dead: npt.NDArray[np.bool_]) -> Floats:
        usable = (denominator > 0) & ~dead
        return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=usable)

    dead_rows, dead_columns = suh == 0, svh == 0
    for _ in range(2):
        suh = best(product @ svh, square @ np.square(svh), dead_rows)
        svh = best(suh @ product, np.square(suh) @ square, dead_columns)
    # Only the products count: share the magnitude, so that neither comes near float16's ends.
    balance = np.sqrt(_typical(svh) / _typical(suh))
    suh16 = (suh * balance).astype(np.float16)
    suh = suh16.astype(np.float32)
    svh16 = best(suh @ product, np.square(suh) @ square, dead_columns).astype(np.float16)
    svh = svh16.astype(np.float32)
    decoded *= suh[:, None]
    decoded *= svh
    decoded -= weight
    energy = float(np.square(weight, dtype=np.float64).sum())
    residue = float(np.square(decoded, dtype=np.float64).sum())
    return suh16, svh16, residue / energy if energy else 0.0


def _typical(scales: Floats) -> float:
    used = np.abs(scales[scales != 0])
    return float(used.mean()) if used.size else 1.0


def _root_mean_square(values: Floats, axis: int) -> Floats:
    """Along an axis; 0 for dead channels."""
    # In float64, because squares of small weights leave float32's range.
    result = np.sqrt(np.square(values, dtype=np.float64).mean(axis))
    return np.where(result < _DEAD, 0, result).astype(np.float32)


def _inverse(scales: Floats) -> Floats:
    return np.divide(1.0, scales, out=np.zeros_like(scales), where=scales != 0).astype(np.float32)


def _rotate(values: Floats, threads: int) -> Floats:
    """Apply H128/√128 to every 128 consecutive values of the last dimension, in place."""
    check(library().exl3_hadamard(values.ctypes.data, values.size // BLOCK, threads))
    return values


def _decode_unscaled(trellis: npt.NDArray[np.int16], half_bits: int, codebook: Codebook, threads: int) -> Floats:
    """H·decoded·H: the weight that this trellis stands for, but for suh and svh."""
    rows, columns = trellis.shape[0] * TILE, trellis.shape[1] * TILE
    shard = ShardStruct(half_bits, int(codebook), rows, columns, 0, columns)
    ones = np.ones(max(rows, columns), np.float16)
    out = np.empty((rows, columns), np.float32)
    check(
        library().exl3_dequantize(
            ctypes.addressof(shard),
            1,
            trellis.ctypes.data,
            ones.ctypes.data,
            ones.ctypes.data,
            0,
            0,
            out.ctypes.data,
            columns,
            threads,
        )
    )
    return out
