"""Which kernel attends which request, and what users may set."""

import dataclasses

import pytest
import torch

from tests.attention.cases import DEVICE, DTYPE, UNPACKED_TOLERANCE, Case, build, error
from tests.attention.test_prefill import flash_attention
from vllm_exl3 import env
from vllm_exl3.attention import decode, dispatch
from vllm_exl3.attention.dispatch import HostBatch, Int4Attention, Settings, sort_requests
from vllm_exl3.attention.shape import KernelShape, parse_decode_shape, parse_prefill_shape

SETTINGS = Settings(KernelShape(None, 32, 2, None, 2), KernelShape(16, 32, 2, None, 2), True, False)
LAYER = Int4Attention(6, 2, 64, 0.125, 0, 0.0, SETTINGS)


def test_requests_are_sorted() -> None:
    starts = [0, 1, 9, 18, 82, 182, 190, 190, 253, 317]
    lengths = [300000, 8, 9000, 8192, 5000, 100000, 0, 20000, 8191]
    assert sort_requests(starts, lengths) == HostBatch(
        8, [(2, 9, 18, 9000), (7, 190, 253, 20000)], [(3, 18, 82, 8192)], True
    )
    assert sort_requests([0, 1024], [512 + 1024]) == HostBatch(0, [], [(0, 0, 1024, 1536)], False)
    assert sort_requests([0, 60], [8251]) == HostBatch(0, [], [], True)
    assert sort_requests([0, 2, 3], [5, 100]) == HostBatch(2, [], [], False)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long means 32 earlier tokens, or 64 query tokens times 80."""
    monkeypatch.setattr(dispatch, "_MIDDLE_CONTEXT", 32)
    monkeypatch.setattr(dispatch, "_LONG_WORK", 64.0 * 80)
    for module in (decode, dispatch):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 8)


MIXED = Case((70, 90, 60, 25, 130), (1, 66, 11, 18, 3), 3, 1, 64, 16)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("known", "flash", "invariant", "window"),
    [
        (True, True, False, 0),
        (True, False, False, 0),
        (False, True, False, 0),
        pytest.param(True, True, True, 0, marks=pytest.mark.slow),
        pytest.param(True, True, False, 40, marks=pytest.mark.slow),
    ],
)
def test_a_mixed_batch(known: bool, flash: bool, invariant: bool, window: int) -> None:
    case = dataclasses.replace(MIXED, window=window)
    problem, expected = build(case, DEVICE, DTYPE)
    starts = [0, 1, 67, 78, 96, 99]
    batch = sort_requests(starts, case.lengths) if known else None
    assert batch is None or (batch.decode_query, len(batch.middle), len(batch.long), batch.others) == (3, 1, 1, True)
    layer = dataclasses.replace(
        LAYER, heads=3, kv_heads=1, window=window, settings=dataclasses.replace(SETTINGS, batch_invariant=invariant)
    )
    layer(
        problem.query, problem.cache, problem.table, problem.lengths, problem.starts, problem.output, None,
        66, batch, flash_attention if flash else None,
    )  # fmt: skip
    assert error(problem.output, expected) <= UNPACKED_TOLERANCE


def test_flash_attention_is_for_whole_contexts_and_heads_to_256() -> None:
    output = torch.empty(1, dtype=torch.bfloat16)
    assert LAYER.flash_plan(output) is not None
    assert dataclasses.replace(LAYER, window=128).flash_plan(output) is None
    assert dataclasses.replace(LAYER, head_size=512).flash_plan(output) is None
    for settings in (
        dataclasses.replace(SETTINGS, flash_prefill=False),
        dataclasses.replace(SETTINGS, batch_invariant=True),
    ):
        assert dataclasses.replace(LAYER, settings=settings).flash_plan(output) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_memory_profile_counts_the_scratch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Int4Attention(24, 4, 256, 0.1, 0, 0.0, Settings(None, None, True, False))
    output, sizes = torch.empty(1, dtype=dtype), []
    monkeypatch.setattr(torch, "empty", lambda size, **_: sizes.append(size))
    for requests in (1, 4096):
        layer.reserve(requests, output)
    plan = layer.flash_plan(output)
    assert plan is not None and sizes[0] == plan.nbytes <= 128 << 20
    assert sizes[1] == 4 * layer.decoder.scratch_elements(4096, output.device) > sizes[0]


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("auto", None),
        ("64,4,auto", (64, 4, None)),
        ("128, 8, 16", (128, 8, 16)),
        ("32,1,128", (32, 1, 128)),
    ],
)
def test_decode_shapes(text: str, shape: tuple[int, int, int | None] | None) -> None:
    parsed = parse_decode_shape(text)
    assert (parsed and (parsed.tile, parsed.warps, parsed.segments)) == shape


@pytest.mark.parametrize("text", ["64,4", "64,4,8", "64,4,256", "64,4,48", "60,4,16", "64,3,16", "x", "64,4,16,2", ""])
def test_other_decode_shapes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_decode_shape(text)


def test_prefill_shapes() -> None:
    assert parse_prefill_shape("auto") is None
    assert parse_prefill_shape("64,64,8,2") == KernelShape(64, 64, 8, None, 2)
    for text in ("64,64,8", "8,64,8,2", "64,64,8,0", "64,64,8,9", "48,64,8,2"):
        with pytest.raises(ValueError, match="expected"):
            parse_prefill_shape(text)


def test_the_variables_and_their_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_QUANTPACK_INT4_DECODE", "128,8,32")
    monkeypatch.setenv("VLLM_QUANTPACK_INT4_TILES", "32,64,4,2")
    monkeypatch.setenv("VLLM_QUANTPACK_INT4_FA_PREFILL", "0")
    settings = Settings.from_environment(False)
    assert settings == Settings(parse_decode_shape("128,8,32"), parse_prefill_shape("32,64,4,2"), False, False)
    monkeypatch.setenv("VLLM_EXL3_INT4_DECODE", "64,4,24")
    with pytest.raises(ValueError, match="VLLM_EXL3_INT4_DECODE='64,4,24': segments is '24'"):
        Settings.from_environment(False)
    assert env.INT4_KV.get()
    monkeypatch.setenv("VLLM_QUANTPACK_INT4_KV", "0")
    assert not env.INT4_KV.get()
    monkeypatch.setenv("VLLM_EXL3_INT4_KV", "maybe")
    with pytest.raises(ValueError, match="VLLM_EXL3_INT4_KV"):
        env.INT4_KV.get()
