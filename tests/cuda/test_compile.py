"""Every kernel compiles for every architecture, without a GPU, without spills and without serialised wgmma."""

from concurrent.futures import ThreadPoolExecutor

import pytest

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
from vllm_exl3.cuda.survey import every_kind, instances_for, typical_limits
from vllm_exl3.ops.shards import Shard

pytestmark = pytest.mark.skipif(compiler_unavailable() is not None, reason=str(compiler_unavailable()))


def test_a_log_of_one_byte_is_not_written_over_an_object_that_python_shares() -> None:
    """``b" "`` is one object in the whole process; the library once turned it into a zero byte."""

    def copy(_: object, buffer: bytearray) -> tuple[int]:
        buffer[:] = b"\0" * len(buffer)
        return (0,)

    assert compiler._fetch(lambda _: (0, 1), copy, None) == b"\0"


QUICK = ((2, 0), (3, 2), (8, 1), (8, 2), (10, 2), (7, 2), (12, 1), (16, 2))
"""(half_bits, codebook) of the quick test, one an architecture."""


def _tolerated(instance: Instance) -> int:
    """Bytes of spills that are known: the prefill kernels spill at the end of a tile, not in the loop."""
    return 160 if instance.entry.startswith("exl3_prefill") else 0


def _compile(instances: list[Instance], architecture: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        cubins = list(pool.map(lambda instance: compile_instance(instance, architecture), instances))
    for instance, cubin in zip(instances, cubins, strict=True):
        assert cubin.image.startswith(b"\x7fELF"), instance
        assert cubin.registers > 0, cubin.log
        assert cubin.spill_bytes <= _tolerated(instance), (instance, architecture, cubin.log)
        assert cubin.stack_bytes == 0 or cubin.spill_bytes, (instance, architecture, cubin.log)
        assert not cubin.serialised, (instance, architecture, cubin.serialised)


def _mixed(architecture: str) -> list[Instance]:
    """A fused layer of two bit rates."""
    shards = (Shard(8, 2, 4096, 4096, 0, 4096), Shard(10, 2, 4096, 1024, 0, 1024))
    limits = typical_limits(architecture)
    return [
        instance
        for form in (Form(True, 4), Form(False, 16))
        for instance in plan(shards, form.tile_rows, 4096, form, limits, rotated=True).instances
    ]


@pytest.mark.parametrize(("architecture", "kind"), list(zip(ARCHITECTURES, QUICK, strict=True)), ids=str)
def test_kernels_compile(architecture: str, kind: tuple[int, int]) -> None:
    _compile(instances_for([kind], typical_limits(architecture)) + _mixed(architecture)[:1], architecture)


def test_mixed_layers_compile() -> None:
    _compile(_mixed("sm_90a"), "sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("kind", every_kind(), ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles(architecture: str, kind: tuple[int, int]) -> None:
    _compile(instances_for([kind], typical_limits(architecture)), architecture)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_sizes_mirror_the_device(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """What the host reckons with of shared memory and scratch is what the kernels take."""
    limits = typical_limits(architecture)
    lines = ['#include "narrow.cuh"', f"static_assert(sizeof(SharedStrip[2]) <= {narrow_memory._STATIC_BYTES});"]
    lines.append(f"static_assert(WARPS == {narrow._WARPS} && THREADS == {narrow._THREADS});")
    lines.append(f"static_assert(ROTATE_THREADS == {narrow._ROTATE_THREADS});")
    for form in (Form(True, 4), Form(True, 8), Form(False, 8), Form(False, 16), Form(True, 8, fast=True)):
        for half_bits, codebook in every_kind():
            arithmetic, rows = form.arithmetic(codebook), form.tile_rows
            record = narrow_memory.record_bytes(arithmetic, rows, rows, limits)
            lines.append(f"static_assert(Record<{int(arithmetic)}, {rows}>::bytes >= {record});")
            if rows >= 8 or arithmetic is Arithmetic.INTEGER:
                lines.append(f"static_assert(Record<{int(arithmetic)}, {rows}>::bytes == {record});")
            for columns in (1, 2):
                kinds = f"Kinds<Kind<{half_bits}, {codebook}, {int(arithmetic)}, {rows}>>"
                slot = narrow_memory.slot_bytes(half_bits, columns)
                lines.append(f"static_assert({kinds}::slot_bytes({columns}) == {slot});")
    sources = {**compiler.kernel_sources(), "sizes.cu": "\n".join(lines)}
    monkeypatch.setattr(compiler, "kernel_sources", lambda: sources)
    compile_instance(Instance("sizes.cu", ""), architecture)
    sources["sizes.cu"] += f"\nstatic_assert({kinds}::slot_bytes(2) != {slot});"
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_instance(Instance("sizes.cu", ""), architecture)


def test_errors_carry_the_log() -> None:
    with pytest.raises(CompileError, match="INSTANCE_KINDS"):
        compile_instance(Instance("narrow.cu", "exl3_narrow", (("INSTANCE_COLUMNS", "1"),)), "sm_80")


def test_fingerprints_tell_what_decides_the_code() -> None:
    one = Instance("dequantize.cu", "exl3_dequantize", (("INSTANCE_HALF_BITS", "8"), ("INSTANCE_CODEBOOK", "2")))
    other = Instance("dequantize.cu", "exl3_dequantize", (("INSTANCE_HALF_BITS", "8"), ("INSTANCE_CODEBOOK", "1")))
    prints = {fingerprint(instance, arch) for instance in (one, other) for arch in ("sm_90a", "sm_80")}
    assert len(prints) == 4
    assert fingerprint(one, "sm_90a") == fingerprint(one, "sm_90a")


def test_spills_and_serialisation_are_seen() -> None:
    from vllm_exl3.cuda.compiler import Cubin

    log = "info : 8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\ninfo : Used 128 registers\n"
    cubin = Cubin(
        b"", log + "info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    )
    assert (cubin.registers, cubin.spill_bytes, len(cubin.serialised)) == (128, 16, 1)
