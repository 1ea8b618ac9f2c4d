"""Splits that a pack's routed experts do not allow, refused while vLLM makes its configuration.

That is once, and before workers start, each of which would refuse on its own after half a minute.
"""

import inspect

from vllm.config import VllmConfig

from vllm_exl3.pack import Pack
from vllm_exl3.plan.parallel import refuse_expert_split

__all__ = ["refuse_degrees"]

_FRAMES = 8
"""Callers that are looked at: vLLM's configuration is three up."""


def refuse_degrees(pack: Pack) -> None:
    """Refuse the parallelism of the configuration that is being made, if any of the callers makes one.

    vLLM hands a quantization config the model's name and not the parallelism. Where no caller has it (a draft's
    configuration, another vLLM), each layer of experts refuses when it is built.

    Raises:
        Exl3PackError: there are more ranks than experts, or than blocks of an expert.
    """
    config = _being_made()
    if config is None or not pack.experts:
        return
    parallel = config.parallel_config
    context = getattr(parallel, "prefill_context_parallel_size", 1)
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size * context
    refuse_expert_split(pack, ranks, whole=bool(parallel.enable_expert_parallel))


def _being_made() -> VllmConfig | None:
    frame = inspect.currentframe()
    for _ in range(_FRAMES):
        frame = frame.f_back if frame is not None else None
        found = frame.f_locals.get("self") if frame is not None else None
        if isinstance(found, VllmConfig):
            return found
    return None
