"""Decoding over the int4 KV cache as the GPU's threads would run it, compiled for the host, against float64.

Barriers, copies that land only when they are waited for, products and shared memory's limits are those of host/.
"""

import ctypes
import dataclasses
import shutil

import pytest
import torch

from tests.attention.cases import Case, build, error
from tests.cuda import host_kernels
from tests.cuda.host_kernels import HostKernels
from vllm_exl3.attention import native
from vllm_exl3.attention.launch import Problem
from vllm_exl3.attention.native_cut import NativeCut, cut_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")

PLAIN = Case((70, 333, 1), (1, 1, 1), 6, 1, 64, 16)
STAGES = (3, 2, 3, 3, 2, 3, 2)
"""Of the kernels, as host/kv.cpp numbers them."""

CASES = [
    (0, 8, 16, PLAIN),
    (1, 24, 8, dataclasses.replace(PLAIN, lengths=(200, 64, 0), counts=(3, 2, 0), window=90,
                               heads_inside=True, kv_heads=2, heads=12)),
    (2, 16, 16, dataclasses.replace(PLAIN, lengths=(150,), counts=(2,), head_size=128, page=48, soft_cap=2.0,
                                sinks=True)),
    (3, 8, 16, dataclasses.replace(PLAIN, lengths=(700, 64), counts=(1, 1), head_size=256, page=528, sinks=True)),
    (4, 32, 8, dataclasses.replace(PLAIN, lengths=(100,), counts=(5,), head_size=256, padding=72)),
    (5, 8, 16, dataclasses.replace(PLAIN, lengths=(130,), counts=(4,), head_size=512, heads=4, kv_heads=2, page=32)),
    (6, 16, 8, dataclasses.replace(PLAIN, lengths=(40,), counts=(1,), head_size=512, heads=20, padding=4096,
                               heads_inside=True)),
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return host_kernels.build("kv", tmp_path_factory.mktemp("kv"))


def run(kernels: HostKernels, kernel: int, chunk: int, problem: Problem, cut: NativeCut, segments: int) -> None:
    """Both launches, with scratch full of NaN."""
    assert chunk in (native.chunk_of(problem.cache), 8)
    max_query = int((problem.starts[1:] - problem.starts[:-1]).max())
    scratch = torch.full((cut.scratch_elements(problem.requests, problem.kv_heads, segments),), torch.nan)
    decode = native.arguments_for(problem, max_query, cut, segments, scratch)
    kernels.run_kv(ctypes.byref(decode), kernel, cut.programs(problem.requests, problem.kv_heads) * segments)
    merge = native.merge_arguments_for(problem, decode, cut)
    kernels.run_kv_merge(ctypes.byref(merge), cut.size, problem.requests * max_query * problem.query.shape[1])


@pytest.mark.parametrize(("kernel", "rows", "chunk", "case"), CASES, ids=str)
def test_decoding(kernels: HostKernels, kernel: int, rows: int, chunk: int, case: Case) -> None:
    problem, expected = build(case, "cpu", torch.float32)
    cut = cut_of(problem.group, max(case.counts), case.head_size, (227 if STAGES[kernel] == 3 else 99) << 10)
    assert (cut.rows, cut.stages) == (rows, STAGES[kernel])
    for segments in (1, 4):
        problem.output.fill_(torch.nan)
        run(kernels, kernel, chunk, problem, cut, segments)
        assert error(problem.output[: expected.shape[0]], expected) <= 1e-3


def test_bits_of_a_token_depend_on_it_alone(kernels: HostKernels) -> None:
    """In batches that are cut so: not on other requests, the longest query, or the drafts beside it."""
    case = dataclasses.replace(PLAIN, lengths=(66, 200, 9), counts=(3, 5, 1), window=150, sinks=True)
    problem, expected = build(case, "cpu", torch.float32)
    problem.query[::2] *= 1e5  # their neighbours would be subnormal, if they had a unit in common
    run(kernels, 0, 16, problem, cut_of(6, 5, 64, 227 << 10, apart=True), 4)
    together = problem.output.clone()
    assert not together[: expected.shape[0]].isnan().any()
    starts = problem.starts.tolist()
    for row, (length, count) in enumerate(zip(case.lengths, case.counts, strict=True)):
        for first, last in ((0, count), (0, 1), (count - 1, count)):
            part = dataclasses.replace(
                problem.of_request(row),
                starts=torch.tensor([starts[row] + first, starts[row] + last], dtype=torch.int32),
                lengths=torch.tensor([length - count + last], dtype=torch.int32),
            )
            run(kernels, 0, 16, part, cut_of(6, last - first, 64, 227 << 10, apart=True), 4)
            tokens = slice(starts[row] + first, starts[row] + last)
            assert torch.equal(problem.output[tokens], together[tokens]), (row, first, last)
