"""Which kernel decodes, that a fall back is said and counted, and bits that do not depend on a request's batch."""

import dataclasses
import logging

import pytest
import torch

from tests.attention.cases import DEVICE, DTYPE, TOLERANCE, Case, build, error
from vllm_exl3.attention import decode, native
from vllm_exl3.attention.dispatch import Int4Attention, Settings, sort_requests
from vllm_exl3.attention.launch import Problem
from vllm_exl3.attention.native_cut import cut_of
from vllm_exl3.attention.notes import say_once
from vllm_exl3.attention.shape import KernelShape, parse_decode_shape
from vllm_exl3.ops import backends
from vllm_exl3.serving.metrics_shared import FALLBACKS

MEASURED = Settings(None, None, True, False)
SMALL = Settings(KernelShape(None, 32, 2, None, 2), KernelShape(16, 32, 2, None, 2), True, False)


def layer_of(case: Case, settings: Settings) -> Int4Attention:
    return Int4Attention(
        case.heads, case.kv_heads, case.head_size, case.head_size**-0.5, case.window, case.soft_cap, settings
    )


def attend(layer: Int4Attention, problem: Problem, counts: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
    """The output of a batch that the host knows, from one full of NaN."""
    problem.output.fill_(torch.nan)
    batch = sort_requests(problem.starts.tolist(), lengths) if max(counts) > 8 else None
    layer(
        problem.query, problem.cache, problem.table, problem.lengths, problem.starts, problem.output, problem.sinks,
        max(counts), batch, None,
    )  # fmt: skip
    return problem.output.clone()


def test_decoding_is_cut_by_what_a_graph_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "multiprocessors", lambda device: 132)
    decoder = Int4Attention(24, 4, 256, 0.1, 0, 0.0, MEASURED).decoder
    device = torch.device("cpu")
    segments = [decoder.config(requests, 1, device).segments for requests in (1, 2, 8, 32, 128, 1024)]
    assert segments == [64, 32, 16, 4, 1, 1]
    asked = dataclasses.replace(decoder, settings=Settings(parse_decode_shape("64,4,32"), None, True, False))
    assert {asked.config(requests, 2, device) for requests in (1, 512)} == {
        decode.Config(64, 4, 32, asked.config(1, 2, device).stages)
    }


def test_an_invariant_cut_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the batch: neither its requests nor its longest query choose rows, tiles or segments."""
    monkeypatch.setattr(decode, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(native, "cut_on", lambda device, *rest, apart: cut_of(*rest, 227 << 10, apart))
    device = torch.device("cpu")
    batches = [(requests, query) for requests in (1, 8, 512) for query in (1, 2, 5, 8)]
    for heads, size in ((24, 256), (4, 64), (80, 96), (128, 512)):
        invariant = dataclasses.replace(MEASURED, batch_invariant=True)
        decoder = Int4Attention(heads, 4, size, 0.1, 0, 0.0, invariant).decoder
        assert len({decoder.config(*batch, device) for batch in batches}) == 1
        cuts = {decoder.native_cut(*batch, device) for batch in batches}
        assert len({(dataclasses.replace(cut, query_blocks=1), segments) for cut, segments in cuts}) == 1
        assert {cut.block_query for cut, _ in cuts} == {1}


LAYERS = [(24, 4, 256), (32, 32, 128), (64, 8, 512), (4, 1, 96)]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), LAYERS)
@pytest.mark.parametrize("settings", [MEASURED, SMALL, Settings(parse_decode_shape("64,4,128"), None, True, False)])
def test_what_is_reserved_is_enough(
    heads: int, kv_heads: int, size: int, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(native, "unavailable", lambda device: None)
    monkeypatch.setattr(native, "cut_on", lambda device, *rest, apart: cut_of(*rest, 227 << 10, apart))
    decoder = Int4Attention(heads, kv_heads, size, 0.1, 0, 0.0, settings).decoder
    device = torch.device("cpu")
    for most in (1, 3, 40):
        reserved = decoder.scratch_elements(most, device)
        batches = [(requests, query) for requests in range(1, most + 1) for query in range(1, 9)]
        assert max(decoder.elements(*batch, device) for batch in [*batches, (1, 16), (1, 32), (1, 64)]) == reserved


@pytest.mark.parametrize(("heads", "kv_heads", "size"), LAYERS)
def test_invariant_scratch_is_bounded(heads: int, kv_heads: int, size: int) -> None:
    """And of a batch that is served in parts, no part needs more than was reserved."""
    decoder = Int4Attention(
        heads, kv_heads, size, 0.1, 0, 0.0, dataclasses.replace(SMALL, batch_invariant=True)
    ).decoder
    device = torch.device("cpu")
    most = decoder.scratch_elements(4096, device)
    assert 4 * most <= 256 << 20
    assert decoder.scratch_elements(2, device) < most
    requests = torch.zeros(4097, dtype=torch.int32)
    problem = Problem(
        torch.zeros(1, heads, size), torch.zeros(1, kv_heads, 16, size + 8), requests[1:, None], requests[1:], requests,
        torch.zeros(0), 1.0,
    )  # fmt: skip
    parts = list(decoder._parts(problem))
    assert sum(part.requests for part in parts) == 4096
    assert max(decoder.elements(part.requests, query, device) for part in parts for query in (1, 8)) <= most
    assert all(part.starts.shape[0] == part.requests + 1 for part in parts)


def test_what_keeps_the_cuda_kernels_from_decoding_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, device = Int4Attention(6, 2, 64, 0.125, 0, 0.0, MEASURED), torch.device("cpu")
    assert layer.decoder.triton_decodes(device) == "cpu is no NVIDIA GPU"
    assert dataclasses.replace(layer, settings=SMALL).decoder.triton_decodes(device) == decode.AS_ASKED
    assert dataclasses.replace(layer, head_size=96).decoder.triton_decodes(device) == "heads of 96"
    monkeypatch.setattr(native, "unavailable", lambda device: None)
    assert layer.decoder.triton_decodes(device) is None
    query, odd = torch.zeros(4, 6, 64), torch.zeros(1 + 4 * 6 * 64, dtype=torch.float16)[1:].view(4, 6, 64)
    assert native.unserved(16, query, query, None) is None and native.unserved(528, query, query, None) is None
    assert native.unserved(24, query, query, None) == "pages of 24 tokens"
    assert native.unserved(16, query.double(), query, None) == "queries of torch.float64"
    assert native.unserved(16, odd, query, None) == "queries at odd places"


def test_batches_that_fall_back_are_said_once_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = []
    monkeypatch.setattr(native, "unavailable", lambda device: None)
    monkeypatch.setattr(native, "cut_on", lambda device, *rest, apart: cut_of(*rest, 227 << 10, apart))
    monkeypatch.setattr(native, "attend", lambda *arguments: served.append(arguments))
    backends.reset_calls()
    say_once.cache_clear()
    case = Case((20, 9), (1, 1), 2, 1, 64, 16)
    problem, expected = build(case, DEVICE, DTYPE)
    pages, reference = build(dataclasses.replace(case, page=24), DEVICE, DTYPE)
    layer = layer_of(case, MEASURED)
    with caplog.at_level(logging.WARNING, "vllm.exl3"):
        attend(layer, problem, case.counts, case.lengths)
        assert len(served) == 1 and not caplog.records
        for _ in range(2):
            assert error(attend(layer, pages, case.counts, case.lengths), reference) <= TOLERANCE
        assert [record.getMessage() for record in caplog.records] == [
            "vllm-exl3: the Triton kernel decodes a batch over the int4 KV cache, not the CUDA kernels: "
            "pages of 24 tokens"
        ]
        query = torch.zeros(problem.query.numel() + 1, dtype=torch.float32, device=DEVICE)[1:].view_as(problem.query)
        monkeypatch.setattr(native, "unserved", lambda page, query, *rest: "queries at odd places")
        odd = dataclasses.replace(problem, query=query.copy_(problem.query))
        assert error(attend(layer, odd, case.counts, case.lengths), expected) <= TOLERANCE
        assert len(caplog.records) == 2 and caplog.records[1].getMessage().endswith("queries at odd places")
    assert len(served) == 1
    assert backends.calls() == {
        ("int4_attention", "native", "Attention"): 1,
        ("int4_attention", "triton", "Attention"): 3,
    }
    assert "triton" in FALLBACKS and "native" not in FALLBACKS


INVARIANT = Case((66, 9, 40, 5, 1), (3, 1, 2, 5, 1), 2, 1, 64, 16)


@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(INVARIANT, soft_cap=300.0, sinks=True),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                dataclasses.replace(INVARIANT, window=40, head_size=96, page=48, heads_inside=True, padding=64),
                dataclasses.replace(INVARIANT, heads=12, kv_heads=2, lengths=(130, 65, 33), counts=(3, 8, 1)),
                dataclasses.replace(INVARIANT, heads=35, lengths=(70, 40), counts=(2, 3)),
            )
        ),
    ],
)
def test_bits_of_a_request_do_not_depend_on_its_batch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do those of a token on the drafts beside it."""
    problem, _ = build(case, DEVICE, DTYPE)
    # Rows of one query token that would make those of the next subnormal, if they had a unit in common.
    problem.query[::2] *= 1000.0
    layer = layer_of(case, dataclasses.replace(SMALL, batch_invariant=True))
    together = attend(layer, problem, case.counts, case.lengths)
    assert not together.isnan().any()
    starts = problem.starts.tolist()
    for row, (length, count) in enumerate(zip(case.lengths, case.counts, strict=True)):
        rows = slice(starts[row], starts[row + 1])
        alone = attend(layer, problem.of_request(row), (count,), (length,))
        assert torch.equal(alone[rows], together[rows]), (row, "alone")
        # Each as if those after it were not drafted, and those before it were decoded before.
        for token in range(count if row == 0 else 0):
            start = starts[row] + token
            part = dataclasses.replace(
                problem.of_request(row),
                starts=torch.tensor([start, start + 1], dtype=torch.int32, device=DEVICE),
                lengths=torch.tensor([length - count + token + 1], dtype=torch.int32, device=DEVICE),
            )
            single = attend(layer, part, (1,), (length - count + token + 1,))
            assert torch.equal(single[start], together[start]), (row, token, "a token alone")
    monkeypatch.setattr(decode, "_INVARIANT_SCRATCH", 1)
    assert torch.equal(attend(layer, problem, case.counts, case.lengths), together)


def test_bits_do_not_depend_on_a_prompt_in_the_batch() -> None:
    case = Case((40, 30), (2, 9), 2, 1, 64, 16)
    problem, expected = build(case, DEVICE, DTYPE)
    layer = layer_of(case, dataclasses.replace(SMALL, batch_invariant=True))
    together = attend(layer, problem, case.counts, case.lengths)
    assert error(together, expected) <= TOLERANCE
    for row, rows in enumerate((slice(0, 2), slice(2, 11))):
        alone = attend(layer, problem.of_request(row), case.counts[row : row + 1], case.lengths[row : row + 1])
        assert torch.equal(alone[rows], together[rows])
