"""Windows of a grouped prefill of routed experts, and where it applies, by the contract of an earlier plugin.

There, nothing executed the plan. Here, `cuda.moe` serves a grouped prefill for every K, codebook and width;
``executed`` says so, and ``eligible`` and ``reason`` answer by the published rules.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["GroupedPrefillPlan", "grouped_prefill_scratch_bytes", "plan_grouped_prefill"]

MAX_ROWS, TILE_ROWS, FAT_THRESHOLD, SUPPORTED_BITS = 8192, 64, 256, (2, 3)


@dataclass(frozen=True)
class GroupedPrefillPlan:
    """One layer's answer.

    Attributes:
        requested: whether ``VLLM_EXL3_GROUPED_PREFILL`` (or the caller) asks for it.
        eligible: whether the published rules let it apply.
        reason: ``eligible``, or the first rule that does not.
        bits: K.
        codebook: its name.
        routed_rows: (token, expert) pairs.
        fat_threshold: rows up to which it does not apply.
        tile_rows: rows of a tile.
        window_rows: rows of a window, whole tiles.
        windows: how many windows.
        scratch_bytes: scratch memory of a window.
        executed: whether this package serves such a layer by a grouped prefill on a GPU.
    """

    requested: bool
    eligible: bool
    reason: str
    bits: int
    codebook: str
    routed_rows: int
    fat_threshold: int
    tile_rows: int
    window_rows: int
    windows: int
    scratch_bytes: int
    executed: bool = True

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def grouped_prefill_scratch_bytes(rows: int, hidden_size: int, intermediate_size: int, dtype_bytes: int = 2) -> int:
    """Bytes for gathered inputs, gate and up, and the activated product of so many rows.

    Raises:
        TypeError: an argument is no whole number.
        ValueError: one is not positive.
    """
    for name, value in (("rows", rows), ("hidden_size", hidden_size), ("intermediate_size", intermediate_size),
                        ("dtype_bytes", dtype_bytes)):  # fmt: skip
        _positive(name, value, 1 if name != "rows" else 0)
    return rows * (hidden_size + 3 * intermediate_size) * dtype_bytes


def plan_grouped_prefill(
    *,
    bits: int,
    codebook: str,
    routed_rows: int,
    hidden_size: int,
    intermediate_size: int,
    requested: bool | None = None,
    max_rows: int | None = None,
    fat_threshold: int = FAT_THRESHOLD,
    tile_rows: int = TILE_ROWS,
    supported_bits: Sequence[int] = SUPPORTED_BITS,
) -> GroupedPrefillPlan:
    """Plan one layer.

    Args:
        bits: K.
        codebook: ``mcg`` is the one of the published rules.
        routed_rows: (token, expert) pairs.
        hidden_size: width of a token.
        intermediate_size: width of an expert.
        requested: None for ``VLLM_EXL3_GROUPED_PREFILL``.
        max_rows: rows of a window at most; None for ``VLLM_EXL3_GROUPED_PREFILL_MAX_ROWS``.
        fat_threshold: rows up to which it does not apply.
        tile_rows: rows of a tile.
        supported_bits: K's of the published rules.

    Raises:
        TypeError: a number is no whole number.
        ValueError: a number is out of its domain.
    """
    if requested is None or max_rows is None:
        from vllm_exl3 import env

        requested = env.GROUPED_PREFILL.get() if requested is None else requested
        max_rows = env.GROUPED_PREFILL_MAX_ROWS.get() if max_rows is None else max_rows
    for name, value, least in (
        ("bits", bits, 1), ("routed_rows", routed_rows, 0), ("hidden_size", hidden_size, 1),
        ("intermediate_size", intermediate_size, 1), ("max_rows", max_rows, 1), ("fat_threshold", fat_threshold, 0),
        ("tile_rows", tile_rows, 1),
    ):  # fmt: skip
        _positive(name, value, least)
    limit = max(max_rows // tile_rows * tile_rows, tile_rows)
    window = min(limit, -(-routed_rows // tile_rows) * tile_rows)
    rules = (
        ("disabled", not requested),
        (f"unsupported_bits:{bits}", bits not in supported_bits),
        ("mul1_not_supported", codebook == "mul1"),
        (f"unsupported_codebook:{codebook}", codebook != "mcg"),
        ("hidden_not_multiple_of_256", hidden_size % 256 != 0),
        ("intermediate_not_multiple_of_128", intermediate_size % 128 != 0),
        ("below_fat_threshold", routed_rows <= fat_threshold),
    )
    reason = next((name for name, holds in rules if holds), "eligible")
    return GroupedPrefillPlan(
        requested=requested,
        eligible=reason == "eligible",
        reason=reason,
        bits=bits,
        codebook=codebook,
        routed_rows=routed_rows,
        fat_threshold=fat_threshold,
        tile_rows=tile_rows,
        window_rows=window,
        windows=-(-routed_rows // window) if window else 0,
        scratch_bytes=grouped_prefill_scratch_bytes(window, hidden_size, intermediate_size),
    )


def _positive(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} {value!r}: expected a whole number")
    if value < least:
        raise ValueError(f"{name} {value}: expected at least {least}")
