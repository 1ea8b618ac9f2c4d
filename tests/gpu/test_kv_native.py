"""The CUDA kernels that decode over the int4 KV cache, against float64 over random batches."""

import dataclasses
import random

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from tests.attention.cases import Case, build, error, random_case
from vllm_exl3.attention import native
from vllm_exl3.attention.launch import Problem
from vllm_exl3.attention.reference import attention_reference

# The bfloat16 output alone costs 1.6e-3.
TOLERANCE = 3e-3


def attend(problem: Problem, max_query: int, segments: int) -> None:
    """Both launches, with scratch and output full of NaN."""
    problem.output.fill_(torch.nan)
    cut = native.cut_on(problem.query.device, problem.group, max_query, problem.query.shape[2])
    elements = cut.scratch_elements(problem.requests, problem.kv_heads, segments)
    native.attend(problem, max_query, cut, segments, torch.full((elements,), torch.nan, device="cuda"))


def native_case(seed: int, longest: int) -> Case:
    """A random batch that these kernels serve."""
    rng = random.Random(seed + 1000)
    case = random_case(seed, longest)
    return dataclasses.replace(case, head_size=rng.choice(native.SIZES))


@pytest.mark.parametrize("seed", range(60))
def test_random_batches(seed: int) -> None:
    case = native_case(seed, 3000)
    dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    problem, expected = build(case, "cuda", dtype)
    assert native.unserved(case.page, problem.query, problem.output, problem.sinks) is None
    tolerance = TOLERANCE if dtype == torch.bfloat16 else 1e-3
    for segments in (1, 7, 128):
        attend(problem, max(case.counts), segments)
        assert error(problem.output[: expected.shape[0]], expected) <= tolerance, (segments, case)


@pytest.mark.parametrize("seed", range(6))
def test_long_batches(seed: int) -> None:
    case = dataclasses.replace(native_case(seed, 40000), kv_heads=1, heads=6, head_size=native.SIZES[seed % 4])
    problem, expected = build(case, "cuda", torch.float16)
    attend(problem, max(case.counts), 64)
    assert error(problem.output[: expected.shape[0]], expected) <= 1e-3


@pytest.mark.parametrize("segments", [1, 16])
def test_many_equal_weights_do_not_drift(segments: int) -> None:
    """Tensor cores truncate when they add: 262,144 terms that are not centred would be off by a hundredth."""
    problem, _ = build(Case((262144,), (1,), 6, 1, 64, 256), "cuda", torch.float32)
    problem.query.mul_(1e-3)
    expected = attention_reference(problem.query, problem.cache, problem.table, [262144], [0, 1], problem.scale)
    attend(problem, 1, segments)
    assert error(problem.output, expected.cpu()) <= 1e-3


def test_other_requests_are_left_alone() -> None:
    case = Case((300, 200, 140), (1, 9, 2), 6, 1, 256, 16)
    problem, expected = build(case, "cuda", torch.bfloat16)
    attend(problem, 8, 4)
    assert problem.output[1:10].isnan().all()
    kept = [0, 10, 11]
    assert error(problem.output[kept], expected[kept]) <= TOLERANCE


@pytest.mark.parametrize(("query_scale", "octaves"), [(0.0, 0), (1e-20, 20), (300.0, 20)])
def test_magnitudes(query_scale: float, octaves: int) -> None:
    case = Case((700,), (2,), 6, 1, 256, 16)
    problem, _ = build(case, "cuda", torch.float32)
    shifts = torch.randint(-octaves, octaves + 1, problem.cache.shape[:3], device="cuda")
    words = problem.cache[..., -4:].view(torch.int32)[..., 0]
    scales = (words & -16).view(torch.float32)
    usual = (scales > 1e-3) & (scales < 10)  # slots that no request uses hold random bits
    words.copy_(torch.where(usual, words + shifts.to(words) * (1 << 23), words))
    problem.query.mul_(query_scale)
    expected = attention_reference(
        problem.query.cpu(), problem.cache.cpu(), problem.table.cpu(), [700], [0, 2], problem.scale
    )
    for segments in (1, 4):
        attend(problem, 2, segments)
        assert error(problem.output, expected) <= 1e-3


def test_equal_inputs_give_equal_bits() -> None:
    problem, _ = build(Case((3000, 500), (2, 1), 12, 2, 256, 16, seed=5), "cuda", torch.bfloat16)
    attend(problem, 2, 16)
    first = problem.output.clone()
    for _ in range(5):
        attend(problem, 2, 16)
        assert torch.equal(problem.output, first)


def test_calls_that_follow_each_other_share_scratch() -> None:
    """Each starts before the one ahead has ended, and waits for it: it is of other lengths, over the same scratch."""
    cases = [Case((300, 4000), (2, 2), 6, 1, 256, 16), Case((9000, 20), (2, 2), 6, 1, 256, 16, seed=1)]
    problems = [build(case, "cuda", torch.bfloat16)[0] for case in cases]
    cut = native.cut_on(problems[0].query.device, 6, 2, 256)
    scratch = torch.full((cut.scratch_elements(2, 1, 8),), torch.nan, device="cuda")

    def answers(rounds: int) -> list[torch.Tensor]:
        """Launched without a pause between them, once a replay has begun."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = []
            for turn in range(rounds):
                problem = problems[turn % 2]
                problem = dataclasses.replace(problem, output=torch.empty_like(problem.output))
                native.attend(problem, 2, cut, 8, scratch)
                found.append(problem.output)
        for output in found:
            output.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        return found

    alone = []
    for problem in problems:
        native.attend(problem, 2, cut, 8, scratch)
        torch.cuda.synchronize()
        alone.append(problem.output.clone())
    assert all(output.isfinite().all() for output in alone)
    for turn, output in enumerate(answers(40)):
        assert torch.equal(output, alone[turn % 2]), turn
