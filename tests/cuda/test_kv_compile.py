"""The kernels that decode over the int4 KV cache compile for every architecture, and how batches are cut for them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from vllm_exl3.attention.native_cut import MOST_SEGMENTS, SIZES, cut_of, every_instance, instances_for
from vllm_exl3.cli.precompile import precompile
from vllm_exl3.cuda import compiler
from vllm_exl3.cuda.compiler import ARCHITECTURES, Instance, compile_instance, compiler_unavailable

needs_compiler = pytest.mark.skipif(compiler_unavailable() is not None, reason=str(compiler_unavailable()))
SHARED = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90a": 227,
    "sm_100a": 227,
    "sm_103a": 227,
    "sm_120a": 99,
    "sm_121a": 99,
}
"""KiB that a block may use."""


def _compile(instances: list[Instance], architecture: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        cubins = list(pool.map(lambda instance: compile_instance(instance, architecture), instances))
    for instance, cubin in zip(instances, cubins, strict=True):
        assert cubin.image.startswith(b"\x7fELF"), instance
        assert cubin.registers and not cubin.spill_bytes and not cubin.stack_bytes, (instance, cubin.log)


@needs_compiler
def test_a_model_of_heads_of_256_compiles() -> None:
    _compile(instances_for(256, 6, SHARED["sm_90a"] << 10)[:3], "sm_90a")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles(architecture: str) -> None:
    _compile(every_instance(SHARED[architecture] << 10), architecture)


@needs_compiler
def test_sizes_mirror_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host reckons with of shared memory and arguments is what the kernels take."""
    lines = ['#include "kv/decode.cuh"', '#include "kv/merge.cuh"']
    for size in SIZES:
        for count in (1, 2, 4, 5):
            for shared in (99 << 10, 227 << 10):
                cut = cut_of(6, count, size, shared)
                held = "true" if cut.held else "false"
                shape = f"KvShape<{size}, {cut.rows // 8}, {cut.stages}, 16, {held}>"
                lines.append(f"static_assert(kv_shared_bytes<{shape}>() == {cut.shared_bytes});")
                assert cut.shared_bytes <= shared
    sources = {**compiler.kernel_sources(), "sizes.cu": "\n".join(lines)}
    monkeypatch.setattr(compiler, "kernel_sources", lambda: sources)
    compile_instance(Instance("sizes.cu", ""), "sm_80")


@needs_compiler
def test_precompiling_takes_them_when_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm_exl3.cuda import runtime

    wanted: list[Instance] = []
    monkeypatch.setenv("VLLM_EXL3_CACHE", str(tmp_path))
    monkeypatch.setattr(runtime, "build", lambda instances, architecture, cache, say: wanted.extend(instances))
    for options, some in (([], False), (["--int4-kv"], True)):
        wanted.clear()
        app = typer.Typer()
        app.command()(precompile)
        result = CliRunner().invoke(app, ["--arch", "sm_90a", *options])
        assert result.exit_code == 0, result.output
        assert wanted and any(instance.source == "kv/decode.cu" for instance in wanted) is some


@pytest.mark.parametrize(
    ("group", "query", "size", "cut"),
    [
        (6, 1, 256, (8, 1, 1, 1)),
        (6, 2, 256, (16, 2, 1, 1)),
        (6, 3, 256, (24, 3, 1, 1)),
        (6, 8, 256, (24, 4, 2, 1)),
        (8, 8, 128, (32, 4, 2, 1)),
        (1, 1, 64, (8, 1, 1, 1)),
        (71, 2, 64, (32, 1, 2, 3)),
        (6, 4, 512, (16, 2, 2, 1)),
        (16, 1, 512, (16, 1, 1, 1)),
        (32, 2, 512, (16, 1, 2, 2)),
    ],
)
def test_batches_are_cut(group: int, query: int, size: int, cut: tuple[int, int, int, int]) -> None:
    made = cut_of(group, query, size, 227 << 10)
    assert (made.rows, made.block_query, made.query_blocks, made.head_blocks) == cut
    assert made.rows * made.head_blocks >= group * made.block_query and made.block_query * made.query_blocks >= query


def test_segments_fill_the_multiprocessors_once() -> None:
    cut = cut_of(6, 1, 256, 227 << 10)
    assert [cut.segments(requests, 4, 132) for requests in (1, 2, 8, 32, 1024)] == [MOST_SEGMENTS, 66, 16, 4, 1]
