"""Every kernel compiles for every architecture, without a GPU, spills in loops of products or serialised wgmma."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cuda.sass import spills_beside_products
from vllm_exl3.cuda import compiler, narrow, narrow_memory
from vllm_exl3.cuda.compiler import (
    ARCHITECTURES,
    CompileError,
    Instance,
    compile_instance,
    compiler_unavailable,
    fingerprint,
)
from vllm_exl3.cuda.geometry import Arithmetic, Form
from vllm_exl3.cuda.linear import plan
from vllm_exl3.cuda.runtime import own_instances
from vllm_exl3.cuda.survey import every_kind, instances_for, typical_limits
from vllm_exl3.ops.shards import Shard

pytestmark = pytest.mark.skipif(compiler_unavailable() is not None, reason=str(compiler_unavailable()))


def test_a_log_of_one_byte_is_not_written_over_an_object_that_python_shares() -> None:
    """``b" "`` is one object in the whole process; the library once turned it into a zero byte."""

    def copy(_: object, buffer: bytearray) -> tuple[int]:
        buffer[:] = b"\0" * len(buffer)
        return (0,)

    assert compiler._fetch(lambda _: (0, 1), copy, None) == b"\0"


SAMPLE = dict(zip(ARCHITECTURES, ((2, 0), (3, 2), (8, 1), (8, 2), (10, 2), (7, 2), (12, 1), (16, 2)), strict=True))
"""(half_bits, codebook) of which every kernel is compiled, one an architecture."""

QUICK = ("sm_80", "sm_90a", "sm_120a")
"""One architecture of each kind of tensor core that kernels differ by."""


def _tolerated(instance: Instance) -> int:
    """Bytes of spills that cost nothing outside loops of products: the prefill kernels have theirs at a tile's end."""
    return 160 if instance.entry.startswith(("exl3_prefill", "exl3_gemm")) else 16


def _compile(instances: list[Instance], architecture: str) -> None:
    instances = [
        instance for instance in instances if instance.source != "gemm/gemm.cu"
    ]  # test_gemm_compile.py has these
    with ThreadPoolExecutor(2) as pool:
        cubins = list(pool.map(lambda instance: compile_instance(instance, architecture), instances))
    for instance, cubin in zip(instances, cubins, strict=True):
        assert cubin.image.startswith(b"\x7fELF"), instance
        assert cubin.registers > 0, cubin.log
        assert cubin.spill_bytes <= _tolerated(instance), (instance, architecture, cubin.log)
        assert not cubin.spill_bytes or not spills_beside_products(cubin.image), (instance, architecture)
        assert cubin.stack_bytes == 0 or cubin.spill_bytes, (instance, architecture, cubin.log)
        assert not cubin.serialised, (instance, architecture, cubin.serialised)


def _mixed(architecture: str) -> list[Instance]:
    """A fused layer of two bit rates."""
    shards = (Shard(8, 2, 4096, 4096, 0, 4096), Shard(10, 2, 4096, 1024, 0, 1024))
    limits = typical_limits(architecture)
    return [
        instance
        for form in (Form(True, 4), Form(False, 16), *((narrow.NARROW_32,) if limits.warpgroups else ()))
        for instance in plan(shards, form.tile_rows, 4096, form, limits, rotated=True).instances
    ]


@pytest.mark.parametrize(
    "architecture", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in ARCHITECTURES]
)
def test_kernels_compile(architecture: str) -> None:
    limits = typical_limits(architecture)
    _compile(
        [*instances_for([(SAMPLE[architecture],)], limits), *_mixed(architecture)[:1], *own_instances(limits)],
        architecture,
    )


def test_mixed_layers_compile() -> None:
    _compile(_mixed("sm_90a"), "sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("kind", every_kind(), ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles(architecture: str, kind: tuple[int, int]) -> None:
    _compile(instances_for([(kind,)], typical_limits(architecture)), architecture)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_sizes_mirror_the_device(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """What the host reckons with of shared memory and scratch is what the kernels take."""
    limits = typical_limits(architecture)
    lines = ['#include "narrow/narrow.cuh"', f"static_assert(sizeof(SharedTile[2]) <= {narrow_memory._STATIC_BYTES});"]
    many = (narrow.NARROW_32,) if limits.warpgroups else ()
    for form in (Form(True, 4), Form(True, 8), Form(False, 8), Form(False, 16), Form(True, 8, fast=True), *many):
        for half_bits, codebook in every_kind():
            arithmetic, rows = form.arithmetic(codebook), form.tile_rows
            record = narrow_memory.record_bytes(arithmetic, rows, rows, limits)
            lines.append(f"static_assert(Record<{int(arithmetic)}, {rows}>::bytes >= {record});")
            if rows >= 8 or arithmetic is Arithmetic.INTEGER:
                lines.append(f"static_assert(Record<{int(arithmetic)}, {rows}>::bytes == {record});")
            for columns in (1, 2):
                kinds = f"Kinds<Kind<{half_bits}, {codebook}, {int(arithmetic)}, {rows}>>"
                slot = narrow_memory.stage_bytes(half_bits, columns)
                lines.append(f"static_assert({kinds}::stage_bytes({columns}) == {slot});")
    sources = {**compiler.kernel_sources(), "sizes.cu": "\n".join(lines)}
    monkeypatch.setattr(compiler, "kernel_sources", lambda: sources)
    compile_instance(Instance("sizes.cu", ""), architecture)
    sources["sizes.cu"] += f"\nstatic_assert({kinds}::stage_bytes(2) != {slot});"
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_instance(Instance("sizes.cu", ""), architecture)


def test_errors_carry_the_log() -> None:
    with pytest.raises(CompileError, match="INSTANCE_KINDS"):
        compile_instance(Instance("narrow/narrow.cu", "exl3_narrow", (("INSTANCE_COLUMNS", "1"),)), "sm_80")


def test_fingerprints_tell_what_decides_the_code() -> None:
    one = Instance("decode/dequantize.cu", "exl3_dequantize", (("INSTANCE_HALF_BITS", "8"), ("INSTANCE_CODEBOOK", "2")))
    other = Instance(
        "decode/dequantize.cu", "exl3_dequantize", (("INSTANCE_HALF_BITS", "8"), ("INSTANCE_CODEBOOK", "1"))
    )
    prints = {fingerprint(instance, arch) for instance in (one, other) for arch in ("sm_90a", "sm_80")}
    assert len(prints) == 4
    assert fingerprint(one, "sm_90a") == fingerprint(one, "sm_90a")


SPILLS = """
extern "C" __global__ void __launch_bounds__(1024) spills(float* out) {
    float v[160];
#pragma unroll
    for (int i = 0; i < 160; ++i) v[i] = out[32 * i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 160; ++i) out[32 * i + 1] = v[i] * v[159 - i];
}
"""
SERIALISED = """
extern "C" __global__ void serialised(float* out, unsigned long long a, unsigned long long b) {
    float d[4] = {out[0], out[1], out[2], out[3]};
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
    out[5] = d[0] + 1.0f;  // read before it is there
    asm volatile("wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 4; ++i) out[i] = d[i];
}
"""


def test_spills_and_serialisation_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of the compiler that is installed."""
    sources = {**compiler.kernel_sources(), "spills.cu": SPILLS, "serialised.cu": SERIALISED}
    monkeypatch.setattr(compiler, "kernel_sources", lambda: sources)
    spills = compile_instance(Instance("spills.cu", "spills"), "sm_90a")
    assert spills.spill_bytes > 0 and spills.stack_bytes > 0 and not spills.serialised
    serialised = compile_instance(Instance("serialised.cu", "serialised"), "sm_90a")
    assert serialised.serialised and serialised.spill_bytes == 0 and serialised.stack_bytes == 0
