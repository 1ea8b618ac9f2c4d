"""How many tokens to draft for how many sequences, and which drafted tokens to keep.

The helpers have the contract of an earlier plugin, where nothing called them. Here ``VLLM_EXL3_SPEC_SCHEDULE`` is also
served: `serving.speculation` passes it to vLLM, whose scheduler looks the number up for every step.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = [
    "DEFAULT_SCHEDULE",
    "Schedule",
    "filter_speculative_candidates",
    "get_speculative_draft_tokens",
    "is_adaptive_verification_enabled",
    "parse_speculative_schedule",
    "schedule_from_text",
]

Schedule = list[tuple[int, int, int]]
"""Entries (least sequences, most sequences, drafted tokens), both ends included."""

DEFAULT_SCHEDULE: tuple[tuple[int, int, int], ...] = ((1, 4, 3), (5, 8, 2), (9, 16, 1))


def schedule_from_text(text: str) -> Schedule:
    """Read ``least:most:drafts`` entries with commas between them, such as ``1:4:3,5:8:2``.

    Raises:
        ValueError: an entry is not three whole numbers, a range is empty or begins below 1, or ranges overlap.
    """
    entries = []
    for part in text.split(","):
        numbers = part.strip().split(":")
        if len(numbers) != 3 or not all(number.strip().isdecimal() for number in numbers):
            raise ValueError(f"expected least:most:drafts entries such as 1:4:3,5:8:2, and found {part.strip()!r}")
        least, most, drafts = (int(number) for number in numbers)
        entries.append((least, most, drafts))
    return _checked(entries)


def parse_speculative_schedule(text: str | None = None) -> Schedule:
    """A schedule from text; the default one where the text is empty or no schedule.

    Args:
        text: as `schedule_from_text` reads it; None for ``VLLM_EXL3_SPEC_SCHEDULE``.

    Raises:
        VariableError: the variable is set to what is no schedule. (The earlier plugin then took its default.)
    """
    if text is None:
        from vllm_exl3.env_planning import SPEC_SCHEDULE

        return SPEC_SCHEDULE.get() or list(DEFAULT_SCHEDULE)
    try:
        return schedule_from_text(text)
    except ValueError:
        return list(DEFAULT_SCHEDULE)


def get_speculative_draft_tokens(batch_size: int, schedule: Sequence[tuple[int, int, int]] | None = None) -> int:
    """How many tokens to draft for each of so many sequences; 0 where no entry covers that number.

    Args:
        batch_size: sequences that decode together.
        schedule: entries (least, most, drafts); None for ``VLLM_EXL3_SPEC_SCHEDULE`` or the default.

    Raises:
        TypeError: the batch size or an entry holds something other than whole numbers (bools are none).
        ValueError: ranges are empty or overlap, or a number is negative.
    """
    _whole(batch_size, "batch_size")
    entries = parse_speculative_schedule() if schedule is None else _checked([_entry(entry) for entry in schedule])
    return next((drafts for least, most, drafts in entries if least <= batch_size <= most), 0)


def is_adaptive_verification_enabled() -> bool:
    """True if ``VLLM_EXL3_ADAPTIVE_VERIFICATION`` is on.

    vLLM has no hook that drops drafted tokens by their probability: programs that do so themselves read this.
    """
    from vllm_exl3.env_planning import ADAPTIVE_VERIFICATION

    return ADAPTIVE_VERIFICATION.get()


def filter_speculative_candidates(probs: Any, threshold: float = 0.5, return_tensor: bool = False) -> tuple[Any, Any]:
    """Keep drafted tokens up to the first whose probability is below a threshold.

    Args:
        probs: probabilities ``[..., drafts]``: a torch tensor, a numpy array or nested sequences.
        threshold: from 0 to 1; a token at it is kept.
        return_tensor: give the count of one sequence as an array too, not as an int.

    Returns:
        A bool mask of the shape of ``probs``, and how many are kept along the last dimension: an int for one sequence.
        Both are torch tensors where ``probs`` is one, else numpy arrays.

    Raises:
        ValueError: the threshold is not finite or not in [0, 1], or there is no dimension.
    """
    if isinstance(threshold, bool) or not math.isfinite(threshold) or not 0 <= threshold <= 1:
        raise ValueError(f"threshold {threshold}: expected a finite number from 0 to 1")
    tensor = probs if hasattr(probs, "cumprod") and hasattr(probs, "device") else np.asarray(probs)
    if tensor.ndim == 0:
        raise ValueError("probabilities without a dimension: expected one value for each drafted token")
    above = tensor >= threshold
    if isinstance(above, np.ndarray):
        mask = np.logical_and.accumulate(above, axis=-1)
        kept = mask.sum(-1)
    else:
        mask = above.int().cumprod(-1).bool()
        kept = mask.sum(-1)
    return mask, int(kept) if tensor.ndim == 1 and not return_tensor else kept


def _entry(entry: Sequence[int]) -> tuple[int, int, int]:
    if len(entry) != 3:
        raise ValueError(f"schedule entry {entry!r}: expected (least, most, drafts)")
    for number in entry:
        _whole(number, "a schedule's number")
    return entry[0], entry[1], entry[2]


def _checked(entries: Schedule) -> Schedule:
    """Entries in order.

    Raises:
        ValueError: there are none, or a range is empty, begins below 1 or overlaps another.
    """
    if not entries:
        raise ValueError("expected at least one entry")
    ordered, before = sorted(entries), 0
    for least, most, drafts in ordered:
        if least < 1 or most < least or drafts < 0:
            raise ValueError(f"entry {least}:{most}:{drafts}: expected 1 <= least <= most, and no negative drafts")
        if least <= before:
            raise ValueError(f"entry {least}:{most}:{drafts} overlaps the one before it")
        before = most
    return ordered


def _whole(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} {value!r}: expected a whole number")
