"""Fused layers' prefill kernels hold all of their kinds, and the rotation fits; others are compiled elsewhere."""

import pytest

from vllm_exl3.cuda.compiler import compile_instance, compiler_unavailable
from vllm_exl3.cuda.prefill import instances
from vllm_exl3.cuda.prefill_input import ROTATE
from vllm_exl3.cuda.survey import typical_limits
from vllm_exl3.ops.shards import Shard

pytestmark = pytest.mark.skipif(compiler_unavailable() is not None, reason=str(compiler_unavailable()))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_fused_layers_compile(architecture: str) -> None:
    layer = tuple(Shard(h, c, 4096, 1024, 0, 1024) for h, c in ((8, 2), (10, 2), (6, 1)))
    largest = instances(layer, typical_limits(architecture))[-1]
    assert dict(largest.macros)["INSTANCE_KINDS"] == "PrefillKind<6, 1>, PrefillKind<8, 2>, PrefillKind<10, 2>"
    cubin = compile_instance(largest, architecture)
    assert cubin.spill_bytes <= 160 and not cubin.serialised


@pytest.mark.parametrize("warps", ROTATE)
def test_rotation_stays_in_registers(warps: int) -> None:
    cubin = compile_instance(ROTATE[warps], "sm_90a")
    assert cubin.spill_bytes == 0 and cubin.registers * 32 * 16 <= 65536  # 16 warps a multiprocessor in both forms
