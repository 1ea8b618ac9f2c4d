"""How the Triton kernels over the int4 KV cache are cut: what was measured, and the text forms that users may set."""

from dataclasses import dataclass

__all__ = [
    "KernelShape",
    "measured_decode_shape",
    "measured_prefill_shape",
    "parse_decode_shape",
    "parse_prefill_shape",
]

_FEW_PROGRAMS = 16


@dataclass(frozen=True)
class KernelShape:
    """How an attention kernel over the int4 KV cache is cut.

    Attributes:
        rows: query rows (query tokens times the heads that share a KV head) of a program; None lets them follow.
        tile: cached tokens an inner step.
        warps: of a program.
        segments: parts of the context that are attended separately; None follows the batch and the GPU.
        stages: of the software pipeline.
    """

    rows: int | None
    tile: int
    warps: int
    segments: int | None
    stages: int


def _power_of_two(name: str, text: str, least: int, most: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= most or int(text) & (int(text) - 1):
        raise ValueError(f"{name} is {text!r}, expected a power of two from {least} to {most}")
    return int(text)


def parse_decode_shape(text: str) -> KernelShape | None:
    """``tile,warps,segments`` of decoding, or None for ``auto``.

    Raises:
        ValueError: anything else, saying what is expected.
    """
    if text == "auto":
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3:
        raise ValueError("expected auto, or tile,warps,segments such as 64,4,auto")
    segments = None if parts[2] == "auto" else _power_of_two("segments", parts[2], 16, 128)
    return KernelShape(
        None, _power_of_two("tile", parts[0], 16, 256), _power_of_two("warps", parts[1], 1, 16), segments, 4
    )


def parse_prefill_shape(text: str) -> KernelShape | None:
    """``rows,tile,warps,stages`` of prefill, or None for ``auto``.

    Raises:
        ValueError: anything else, saying what is expected.
    """
    if text == "auto":
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 4 or not parts[3].isdecimal() or not 1 <= int(parts[3]) <= 8:
        raise ValueError("expected auto, or rows,tile,warps,stages such as 64,64,8,2 (stages from 1 to 8)")
    return KernelShape(
        _power_of_two("rows", parts[0], 16, 128),
        _power_of_two("tile", parts[1], 16, 128),
        _power_of_two("warps", parts[2], 1, 16),
        None,
        int(parts[3]),
    )


def measured_decode_shape(rows: int, head_size: int, programs: int) -> KernelShape:
    """The cut of decoding: the fastest on an H200 for heads of 256, and elsewhere what leaves registers unspilled.

    Args:
        rows: of a program.
        head_size: D.
        programs: of a segment.
    """
    if head_size > 256:
        return KernelShape(None, 64, 8, None, 4)
    if rows > 16:
        return KernelShape(None, 64, 4, None, 4)
    if rows == 8 and programs >= _FEW_PROGRAMS:
        return KernelShape(None, 64, 2, None, 6)
    return KernelShape(None, 128, 4, None, 4)


def measured_prefill_shape(head_size: int) -> KernelShape:
    """The cut of Triton prefill: the fastest on an H200 for heads of 256; for larger ones what spills few registers."""
    return KernelShape(32, 64, 4 if head_size <= 256 else 8, None, 2)
