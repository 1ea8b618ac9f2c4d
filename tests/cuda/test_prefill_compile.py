"""Kernels that single layers in default arithmetic do not ask for: fused layers' prefill, fast mode, the rotation."""

import pytest

from tests.cuda.sass import spills_beside_products
from vllm_exl3.cuda import narrow, prefill_int8
from vllm_exl3.cuda.compiler import compile_instance, compiler_unavailable
from vllm_exl3.cuda.geometry import Form
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
    assert not spills_beside_products(cubin.image)


@pytest.mark.parametrize("half_bits", [4, *(pytest.param(bits, marks=pytest.mark.slow) for bits in (2, 3, 5, 6, 7, 8))])
def test_fast_mode_compiles_for_hopper(half_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_PRECISION", "fast")
    limits = typical_limits("sm_90a")
    wanted = prefill_int8.instances((Shard(half_bits, 2, 4096, 1024, 0, 1024),), limits)
    assert {instance.source for instance in wanted} == {"prefill/quantize.cu", "prefill/int8.cu", "prefill/reduce.cu"}
    for instance in wanted:
        cubin = compile_instance(instance, "sm_90a")
        assert cubin.spill_bytes == cubin.stack_bytes == 0, (instance, cubin.log)
        assert not cubin.serialised, (instance, cubin.serialised)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", pytest.param("sm_120a", marks=pytest.mark.slow)])
def test_fast_mode_of_few_tokens_compiles(architecture: str) -> None:
    """Which the kernels that default arithmetic asks for leave out."""
    for instance in narrow.instances_of(((8, 2),), Form(True, 8, fast=True), typical_limits(architecture)):
        cubin = compile_instance(instance, architecture)
        assert cubin.spill_bytes == cubin.stack_bytes == 0, (instance, cubin.log)


@pytest.mark.parametrize("warps", ROTATE)
def test_rotation_stays_in_registers(warps: int) -> None:
    cubin = compile_instance(ROTATE[warps], "sm_90a")
    assert cubin.spill_bytes == 0 and cubin.registers * 32 * 16 <= 65536  # 16 warps a multiprocessor in both forms
