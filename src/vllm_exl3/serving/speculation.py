"""``VLLM_EXL3_SPEC_SCHEDULE``: a number of drafted tokens that follows the number of sequences.

vLLM 0.30 to 0.33 have this as ``num_speculative_tokens_per_batch_size`` of ``--speculative-config``: its scheduler
looks the number up for every step. No interface lets a plugin set it, so the method that makes the configuration is
wrapped. What it returns changes only where the target is an EXL3 pack and the variable is set.
"""

import functools
import logging
from typing import Any

from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_exl3.env_planning import SPEC_SCHEDULE
from vllm_exl3.env_variable import VariableError
from vllm_exl3.plan.speculation import Schedule

__all__ = ["METHODS", "register_schedule", "vllm_schedule"]

logger = logging.getLogger("vllm.exl3")

METHODS = ("ngram", "eagle", "eagle3", "mtp", "draft_model", "dflash")
"""Methods whose proposers take the number of a step; vLLM 0.33 has the same list, earlier releases check nothing."""

_FIELD = "num_speculative_tokens_per_batch_size"
_END = 1 << 30
"""More sequences than any server has: the last range of a schedule, since vLLM would go on with the number before."""
_MARK = "_vllm_exl3_schedule"


def register_schedule() -> None:
    """Wrap the method that makes vLLM's configuration of drafts. Idempotent."""
    original = EngineArgs.create_speculative_config
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def create(
        self: EngineArgs,
        target_model_config: ModelConfig,
        target_parallel_config: ParallelConfig,
        *more: Any,
        **named: Any,
    ) -> SpeculativeConfig | None:
        config = original(self, target_model_config, target_parallel_config, *more, **named)
        if target_model_config.quantization == "exl3":
            _follow(config, target_parallel_config)
        return config

    setattr(create, _MARK, True)
    EngineArgs.create_speculative_config = create


def _follow(config: SpeculativeConfig | None, parallel: ParallelConfig) -> None:
    """Put the schedule of the variable into vLLM's configuration.

    Raises:
        VariableError: the schedule cannot be followed, with the reason.
    """
    schedule = SPEC_SCHEDULE.get()
    if schedule is None:
        return
    name = SPEC_SCHEDULE.name
    if config is None:
        logger.warning("EXL3: %s has no effect: nothing is drafted without --speculative-config", name)
        return
    wanted = vllm_schedule(schedule)
    given, most = getattr(config, _FIELD), max(drafts for _, _, drafts in schedule)
    if given is not None and [tuple(entry) for entry in given] != wanted:
        raise VariableError(f"{name} and {_FIELD} of --speculative-config both give a schedule: leave one of them out")
    if parallel.data_parallel_size > 1:
        raise VariableError(
            f"{name} is not served with --data-parallel-size {parallel.data_parallel_size}: ranks would draft "
            "different numbers of tokens and wait for each other; unset it"
        )
    if config.method not in METHODS:
        raise VariableError(
            f"{name} is not served with drafts of method {config.method}, which decides by itself how many there are: "
            f"unset it, or use one of {', '.join(METHODS)}"
        )
    if most > config.num_speculative_tokens:
        raise VariableError(
            f"{name} asks for {most} tokens, --speculative-config for at most {config.num_speculative_tokens}: "
            f'give "num_speculative_tokens": {most} there'
        )
    setattr(config, _FIELD, wanted)
    logger.info("EXL3: drafts follow %s: %s", name, wanted)


def vllm_schedule(schedule: Schedule) -> list[tuple[int, int, int]]:
    """A schedule in vLLM's form, from one sequence on and without gaps: what no entry covers drafts nothing."""
    entries, begin = [], 1
    for least, most, drafts in schedule:
        if least > begin:
            entries.append((begin, least - 1, 0))
        entries.append((least, most, drafts))
        begin = most + 1
    return [*entries, (begin, max(begin, _END), 0)]
