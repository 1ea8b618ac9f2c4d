"""What vLLM 0.30 leaves out on CPUs: kernels that make and judge drafts, without which no model has any there."""

from typing import Any

from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode import utils

__all__ = ["lend_kernels"]

_STEP = "eagle_step_slot_mapping_metadata_kernel"


def lend_kernels() -> None:
    """Give 0.30's launchers its own kernels for CPUs; it replaces names that the launchers have read already.

    Later releases have no such kernels to replace, and nothing is changed there or beside a GPU.
    """
    if not current_platform.is_cpu():
        return
    for launcher in (*vars(rejection_sampler).values(), *vars(utils).values()):
        name = getattr(getattr(launcher, "kernel", None), "__name__", "")
        if replacement := getattr(cpu_triton_utils, name, None):
            launcher.kernel = replacement if name != _STEP else type(replacement)(_step)


def _step(
    positions: Any,
    block_table: Any,
    block_table_stride: int,
    seq_lens: Any,
    out_clamped_positions: Any,
    out_slot_mapping: Any,
    block_size: int,
    max_model_len: int,
    n_blocks_per_req: int,
    PAD_ID: int,
) -> None:
    """The one that calls a parameter otherwise than its launcher, which goes by names."""
    own = getattr(cpu_triton_utils, _STEP).func
    outputs = (out_clamped_positions, out_slot_mapping)
    own(
        positions,
        block_table,
        block_table_stride,
        seq_lens,
        *outputs,
        block_size,
        max_model_len,
        n_blocks_per_req,
        PAD_ID,
    )
