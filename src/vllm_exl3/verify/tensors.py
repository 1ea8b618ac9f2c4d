"""One streaming pass over every byte of a pack, in numpy: what is certainly wrong without the source model.

Finds: NaN and infinity, scales that are zero or absurd, trellis tiles of zeros (a copy that was cut and filled up), two
tensors with the same bytes, and bytes that are no trellis of their K and codebook (see `vllm_exl3.verify.trellis`).

Cannot find: signs of ``suh`` or ``svh`` that were flipped, and intact tensors of one shape and K in each other's place.
Every such pack is as regular as the right one; `vllm_exl3.verify.against` finds them with the 16-bit model.
"""

import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack import Exl3PackError, Pack, StoredLinear, StoredTensor
from vllm_exl3.pack.spelling import is_head_name
from vllm_exl3.verify.finding import Finding
from vllm_exl3.verify.trellis import STRIP, STRIPS, Place, diagnose

__all__ = ["Scan", "scan_tensors"]

_CHUNK = 16 << 20
_LEAST_DUPLICATE = 4096
"""Bytes below which two equal tensors may be chance or design."""

_LARGEST_RATIO = 1000.0
"""Largest scale over the median one; 7 is the largest in the packs that were looked at."""

_SCALE_RANGE = 1e-7, 1e3
"""Plausible products of the typical suh and the typical svh, which is the typical size of a weight."""

_EXPONENTS = {"F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80), "F32": ("<u4", 0x7F800000), "F64": ("<u8", 0x7FF << 52)}

Progress = Callable[[int], None]


@dataclass
class Scan:
    """Findings and speed of the pass.

    Attributes:
        findings: the faults.
        nbytes: bytes read.
        seconds: wall time of the pass.
        tensors: tensors read.
        undecided: linears whose K leaves their statistics without power.
    """

    findings: list[Finding] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0
    tensors: int = 0
    undecided: int = 0


@dataclass
class _Contents:
    """Statistics of the bytes of one tensor that were read so far."""

    crc: int = 0
    last: bytes = b""
    """The last piece that was read: all of it, if it is a vector."""
    all_zero: bool = True
    constant: bool = True
    not_finite: int = 0
    zero_tiles: int = 0
    first_zero_tile: int = -1
    sample: list[Place] = field(default_factory=list)


def scan_tensors(pack: Pack, progress: Progress = lambda nbytes: None) -> Scan:
    """Read every tensor once, in the order of the files.

    Args:
        pack: an opened pack in a local folder.
        progress: called with the number of bytes that were read since the last call.

    Raises:
        Exl3PackError: the pack is not in a local folder.
        OSError: a file cannot be read.
    """
    folder = _local(pack)
    scan, start = Scan(), time.monotonic()
    trellises = {linear.trellis.name: linear for linear in pack.linears.values()}
    scales = {scale.name for linear in pack.linears.values() for scale in (linear.suh, linear.svh)}
    medians: dict[str, float] = {}
    seen: dict[tuple[int, int], list[StoredTensor]] = {}
    for file, header in pack.files.items():
        with (folder / file).open("rb") as stream:
            for tensor in sorted(header.tensors.values(), key=lambda tensor: tensor.start):
                contents = _read(stream, tensor, trellises.get(tensor.name), progress)
                scan.nbytes, scan.tensors = scan.nbytes + tensor.nbytes, scan.tensors + 1
                scan.findings += _faults(tensor, contents, trellises.get(tensor.name))
                if tensor.name in scales and tensor.dtype == "F16" and not contents.not_finite:
                    finding, medians[tensor.name] = _scale_fault(tensor, contents.last)
                    scan.findings += finding
                if _may_be_duplicate(tensor, contents):
                    seen.setdefault((contents.crc, tensor.nbytes), []).append(tensor)
    scan.findings += _absurd_products(pack, medians)
    scan.findings += _duplicates(folder, seen.values())
    scan.undecided = sum(linear.half_bits < 3 for linear in pack.linears.values())
    scan.seconds = time.monotonic() - start
    return scan


def _local(pack: Pack) -> Path:
    if pack.folder is None:
        raise Exl3PackError(
            found="a repository whose files are not all on this machine",
            expected="a local copy, since every byte is read",
            where=pack.source,
            remedy=f"Download it first (`hf download {pack.source}`) and give the folder.",
        )
    return pack.folder


def _read(stream: BinaryIO, tensor: StoredTensor, linear: StoredLinear | None, progress: Progress) -> _Contents:
    contents = _Contents()
    tile_bytes = linear.half_bits * 16 if linear else 16
    starts, length = _strips(tensor.nbytes // tile_bytes) if linear else ([], 0)
    step = max(1, _CHUNK // tile_bytes) * tile_bytes
    stream.seek(tensor.start)
    first: bytes | None = None
    for offset in range(0, tensor.nbytes, step):
        data = stream.read(min(step, tensor.nbytes - offset))
        if len(data) < min(step, tensor.nbytes - offset):
            raise OSError(f"{tensor.name}: {tensor.file} ended while it was read; it is still being written or was cut")
        progress(len(data))
        contents.last = data
        contents.crc = zlib.crc32(data, contents.crc)
        first = data[:2] if first is None else first
        _add_plain(contents, data, tensor.dtype, first)
        if linear is not None:
            tiles = np.frombuffer(data, "<u8").reshape(-1, tile_bytes // 8)
            _add_tiles(contents, tiles, offset // tile_bytes, starts, length)
    return contents


def _add_plain(contents: _Contents, data: bytes, dtype: str, first: bytes) -> None:
    octets = np.frombuffer(data, np.uint8)
    contents.all_zero = contents.all_zero and not octets.any()
    if contents.constant:
        contents.constant = len(data) % 2 == 0 and bool((octets.reshape(-1, 2) == np.frombuffer(first, np.uint8)).all())
    if dtype in _EXPONENTS:
        code, mask = _EXPONENTS[dtype]
        words = np.frombuffer(data, code)
        largest = words.dtype.type(mask)
        contents.not_finite += int(((words & largest) == largest).sum())


def _strips(tiles: int) -> tuple[list[int], int]:
    """First tile of each sampled place, from the first to the last of the tensor, and how many tiles each has."""
    length = min(STRIP, max(1, tiles // STRIPS))
    return sorted({place * (tiles - length) // (STRIPS - 1) for place in range(STRIPS)}), length


def _add_tiles(
    contents: _Contents, tiles: npt.NDArray[np.uint64], first_tile: int, starts: list[int], length: int
) -> None:
    zero = np.flatnonzero(np.bitwise_or.reduce(tiles, axis=1) == 0)
    if zero.size:
        contents.zero_tiles += zero.size
        if contents.first_zero_tile < 0:
            contents.first_zero_tile = first_tile + int(zero[0])
    for start in starts:
        if first_tile <= start < first_tile + len(tiles):
            # A place that would reach into the next piece of the file is moved back.
            begin = max(0, min(start - first_tile, len(tiles) - length))
            contents.sample.append((first_tile + begin, tiles[begin : begin + length].copy().view(np.uint16)))


def _faults(tensor: StoredTensor, contents: _Contents, linear: StoredLinear | None) -> Iterator[Finding]:
    if contents.not_finite:
        yield Finding("not finite", tensor.name, f"{contents.not_finite} values that are NaN or infinite", "numbers")
    if linear is None:
        if contents.all_zero and len(tensor.shape) == 2 and tensor.name.endswith(".weight"):
            yield Finding("zeros", tensor.name, "zeros only", "weights")
        return
    if contents.zero_tiles:
        # No encoder writes one: state 0 decodes to a large weight, 256 times.
        count = tensor.nbytes // (linear.half_bits * 16)
        yield Finding(
            "zeros",
            tensor.name,
            f"{contents.zero_tiles} of {count} tiles that are all zeros, from tile {contents.first_zero_tile} on",
            "an encoded trellis; a copy that was cut and filled up looks like this",
        )
        return
    if reason := diagnose(contents.sample, linear.half_bits, linear.codebook):
        expected = f"a trellis at K = {linear.bits:g} with codebook {linear.codebook.label}"
        yield Finding("statistics", tensor.name, reason, expected)


def _scale_fault(tensor: StoredTensor, data: bytes) -> tuple[list[Finding], float]:
    """Faults of one scale vector, and the median magnitude of what is not zero in it."""
    scale = np.abs(np.frombuffer(data, "<f2").astype(np.float64))
    used = scale[scale > 0]
    if used.size <= scale.size // 4:
        found = f"{scale.size - used.size} zeros of {scale.size}"
        return [Finding("scales", tensor.name, found, "a scale other than zero for most channels")], 0.0
    middle = float(np.median(used))
    if used.max() > _LARGEST_RATIO * middle:
        found = f"a scale of {used.max():.3g} where the typical one is {middle:.3g}"
        return [Finding("scales", tensor.name, found, f"none above {_LARGEST_RATIO:.0f} times the typical one")], middle
    return [], middle


def _absurd_products(pack: Pack, medians: dict[str, float]) -> Iterator[Finding]:
    for linear in pack.linears.values():
        product = medians.get(linear.suh.name, 0.0) * medians.get(linear.svh.name, 0.0)
        if product and not _SCALE_RANGE[0] < product < _SCALE_RANGE[1]:
            found = f"weights of a typical size of {product:.2g}"
            yield Finding("scales", linear.key, found, f"between {_SCALE_RANGE[0]:g} and {_SCALE_RANGE[1]:g}")


def _may_be_duplicate(tensor: StoredTensor, contents: _Contents) -> bool:
    matrix = len(tensor.shape) >= 2 and tensor.nbytes >= _LEAST_DUPLICATE
    return matrix and not contents.constant


def _duplicates(folder: Path, groups: Any) -> Iterator[Finding]:
    for group in groups:
        for number, tensor in enumerate(group[1:], 1):
            twin = next((other for other in group[:number] if _equal(folder, tensor, other)), None)
            if twin is not None and not _tied(tensor, twin):
                yield Finding("duplicate", tensor.name, f"the same bytes as {twin.name}", "contents of its own")


def _tied(one: StoredTensor, other: StoredTensor) -> bool:
    """A 16-bit head beside the embedding that it is tied to."""
    return any(is_head_name(tensor.name.removesuffix(".weight")) for tensor in (one, other))


def _equal(folder: Path, one: StoredTensor, other: StoredTensor) -> bool:
    with (folder / one.file).open("rb") as left, (folder / other.file).open("rb") as right:
        left.seek(one.start)
        right.seek(other.start)
        for offset in range(0, one.nbytes, _CHUNK):
            size = min(_CHUNK, one.nbytes - offset)
            if left.read(size) != right.read(size):
                return False
    return True
