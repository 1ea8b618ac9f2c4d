"""The limits that ``vllm-exl3 bench`` states beside its times: what the GPU's own rates allow, and no kernel beats."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from vllm_exl3.cuda import runtime, timing
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.pack.stored import Codebook

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200"
BOOKS = {book.label: book for book in Codebook}


@dataclasses.dataclass
class Properties:
    """What torch says of an H200."""

    multi_processor_count: int = 132
    clock_rate: int = 1_980_000
    memory_clock_rate: int = 3_201_000
    memory_bus_width: int = 6144
    major: int = 9
    minor: int = 0


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Properties:
    properties = Properties()
    device = type("Device", (), {"limits": GpuLimits("sm_90a", 132, 232448)})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(runtime, "device", lambda _: device)
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_EXL3_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    return properties


def test_the_slowest_of_reading_decoding_and_multiplying_binds(gpu: Properties) -> None:
    cycles = 132 * 1.98e9
    assert timing.bound_us(1e9, 0, 0) == pytest.approx(1e15 / (2 * 3.201e9 * 768))
    assert timing.bound_us(0, 1e9, 0) == pytest.approx(3e15 / (128 * cycles))
    assert timing.bound_us(0, 0, 1e12) == pytest.approx(1e18 / (4096 * cycles))
    assert timing.bound_us(0, 0, 1e12, int8=True) == pytest.approx(1e18 / (8192 * cycles))
    assert timing.bound_us(1e9, 1e9, 1e12) == timing.bound_us(0, 0, 1e12)
    gpu.major, gpu.minor = 8, 6
    assert timing.bound_us(0, 0, 1e12) == pytest.approx(1e18 / (1024 * cycles))
    gpu.major, gpu.minor = 13, 7  # one that nobody has heard of: no faster is known
    assert timing.bound_us(0, 0, 1e12) == pytest.approx(1e18 / (8192 * cycles))


def test_a_gpu_that_does_not_state_its_memory_is_taken_for_what_it_copies(
    gpu: Properties, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1e12)
    gpu.memory_clock_rate = 0
    assert timing.bound_us(1e9, 0, 0) == pytest.approx(1000)


def test_fast_mode_multiplies_at_twice_the_rate_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(codebook: Codebook, rows: int) -> float:
        return timing.limit_us((8192, 28672), 8, codebook, rows)

    usual = {(book, rows): limit(book, rows) for book in (Codebook.MUL1, Codebook.MCG) for rows in (64, 128, 2048)}
    monkeypatch.setenv("VLLM_EXL3_PRECISION", "fast")
    fast = {cell: limit(*cell) for cell in usual}
    assert {cell for cell in usual if fast[cell] != usual[cell]} == {(Codebook.MUL1, 2048)}
    assert fast[Codebook.MUL1, 2048] == pytest.approx(usual[Codebook.MUL1, 2048] / 2)


@pytest.mark.parametrize("file", ["linear", "prefill", "prefill-fast"])
def test_nothing_that_was_timed_is_below_its_limit(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPU whose properties these are."""
    monkeypatch.setenv("VLLM_EXL3_PRECISION", "fast" if file == "prefill-fast" else "default")
    rows = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["rows"]
    timed = [row for row in rows if row.get("codebook") in BOOKS]
    assert len(timed) > 100
    for row in timed:
        shape, code = (row["in"], row["out"]), BOOKS[row["codebook"]]
        assert timing.limit_us(shape, round(2 * row["bits"]), code, row["m"]) < row["us"], row


def test_weights_go_round_beyond_the_l2() -> None:
    for nbytes in (50_000, 500_000, 8 << 20, 117_440_512, 10**9):
        copies = timing.rotated_copies(nbytes)
        assert 3 <= copies <= 1024 and copies * nbytes > 50e6
        assert copies == 3 or (copies - 1) * nbytes < 320e6
