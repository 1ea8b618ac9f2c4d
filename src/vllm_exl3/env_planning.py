"""Environment variables of the planning helpers, and the one of them that a server follows too."""

import math
from collections.abc import Callable

from vllm_exl3.env_variable import Variable, yes_or_no
from vllm_exl3.plan.speculation import Schedule, schedule_from_text

__all__ = [
    "ADAPTIVE_VERIFICATION",
    "CONTEXT_CHUNK_SIZE",
    "CONTEXT_MEM_UTIL",
    "CONTEXT_MODEL_WEIGHTS_GB",
    "CONTEXT_TOTAL_MEM_GB",
    "PLANNING",
    "SPEC_SCHEDULE",
]


def _schedule_or_none(text: str) -> Schedule | None:
    return schedule_from_text(text) if text else None


def _number(good: Callable[[float], bool], what: str) -> Callable[[str], float | None]:
    """Take a finite number of some domain; empty is None."""

    def parse(text: str) -> float | None:
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"expected {what}") from None
        if not math.isfinite(value) or not good(value):
            raise ValueError(f"expected {what}")
        return value

    return parse


SPEC_SCHEDULE = Variable(
    "VLLM_EXL3_SPEC_SCHEDULE",
    "",
    _schedule_or_none,
    "How many tokens to draft by the number of sequences that decode: least:most:drafts entries, such as 1:4:3,5:8:2; "
    "numbers that no entry covers draft nothing. Needs --speculative-config, and is handed to vLLM as its "
    "num_speculative_tokens_per_batch_size. Empty: what --speculative-config says.",
)

ADAPTIVE_VERIFICATION = Variable(
    "VLLM_EXL3_ADAPTIVE_VERIFICATION",
    "0",
    yes_or_no,
    "What vllm_exl3.is_adaptive_verification_enabled() returns, for programs that filter drafts themselves. A server "
    "does not: vLLM has no hook for it.",
)

CONTEXT_MODEL_WEIGHTS_GB = Variable(
    "VLLM_EXL3_CONTEXT_MODEL_WEIGHTS_GB",
    "",
    _number(lambda value: value >= 0, "a number of GiB"),
    "Weights in GiB for vllm_exl3.validate_context_scaling(). Empty: 95.4.",
    aliases=("VLLM_EXL3_MODEL_WEIGHTS_GB",),
)

CONTEXT_TOTAL_MEM_GB = Variable(
    "VLLM_EXL3_CONTEXT_TOTAL_MEM_GB",
    "",
    _number(lambda value: value > 0, "a positive number of GiB"),
    "Memory in GiB for vllm_exl3.validate_context_scaling(). Empty: 128.",
    aliases=("VLLM_EXL3_TOTAL_MEM_GB",),
)

CONTEXT_MEM_UTIL = Variable(
    "VLLM_EXL3_CONTEXT_MEM_UTIL",
    "",
    _number(lambda value: 0 < value <= 1, "a number above 0, up to 1"),
    "Share of that memory for vllm_exl3.validate_context_scaling(). Empty: 0.9.",
    aliases=("VLLM_EXL3_MEM_UTIL",),
)

CONTEXT_CHUNK_SIZE = Variable(
    "VLLM_EXL3_CONTEXT_CHUNK_SIZE",
    "",
    _number(lambda value: value > 0 and value == int(value), "a positive whole number"),
    "Tokens of a prefill chunk for vllm_exl3.validate_context_scaling(). Empty: 2048.",
    aliases=("VLLM_EXL3_CHUNK_SIZE",),
)

PLANNING = (
    SPEC_SCHEDULE,
    ADAPTIVE_VERIFICATION,
    CONTEXT_MODEL_WEIGHTS_GB,
    CONTEXT_TOTAL_MEM_GB,
    CONTEXT_MEM_UTIL,
    CONTEXT_CHUNK_SIZE,
)
"""All of them, for `env.VARIABLES`."""
