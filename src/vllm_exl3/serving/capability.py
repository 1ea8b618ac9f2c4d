"""The refusal of GPUs that the kernels do not run on, by name, before a weight is read.

vLLM's own check (`QuantizationConfig.get_min_capability`) looks at the first device only and does not say which it was.
"""

import torch
from vllm.platforms import current_platform

__all__ = ["LEAST_CAPABILITY", "refuse_old_gpus"]

LEAST_CAPABILITY = 80
"""Ampere: the kernels need ``mma.sync.m16n8k16`` and ``cp.async``."""


def refuse_old_gpus() -> None:
    """Refuse visible GPUs below Ampere; other platforms pass.

    Raises:
        RuntimeError: naming the device and its compute capability.
    """
    if not current_platform.is_cuda():
        return
    for index in range(torch.cuda.device_count()):
        capability = current_platform.get_device_capability(index)
        if capability is not None and capability.to_int() < LEAST_CAPABILITY:
            raise RuntimeError(
                f"EXL3 packs: found cuda:{index} {current_platform.get_device_name(index)} of compute capability "
                f"{capability.as_version_str()}, expected {LEAST_CAPABILITY // 10}.{LEAST_CAPABILITY % 10} or later. "
                "Serve on newer GPUs; CUDA_VISIBLE_DEVICES leaves this one out."
            )
