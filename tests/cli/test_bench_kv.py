"""``vllm-exl3 bench kv`` on a machine without a GPU: what it takes, and what it says."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from vllm_exl3.cli.bench import bench


def test_it_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(bench, ["kv", "--contexts", "1024", "--decode", "64,4,16:64,4,32"])
    assert result.exit_code == 1 and "no CUDA GPU" in result.output


@pytest.mark.parametrize(
    "options",
    [
        ["--decode", "64,4,8"],
        ["--decode", "64,4,16:x"],
        ["--contexts", "1k"],
        ["--contexts", "0"],
        ["--contexts", "-5,1024"],
        ["--batch", "0"],
        ["--mtp", "-1"],
        ["--q-heads", "24", "--kv-heads", "5"],
        ["--head-size", "100"],
        ["--block-size", "0"],
    ],
)
def test_it_refuses_what_it_does_not_take(options: list[str]) -> None:
    result = CliRunner().invoke(bench, ["kv", *options])
    assert result.exit_code == 2, result.output


@dataclasses.dataclass
class Shape:
    context: int
    batch: int
    query: int
    heads: int
    kv_heads: int
    head_size: int
    page: int

    def nbytes(self, slot: int) -> int:
        return self.batch * self.context * self.kv_heads * slot


class Caches:
    """Times that say which shape and setting they are of; vLLM's own kernel does not run here."""

    def __init__(self, shapes: list[Shape]) -> None:
        self.layer = shapes[0]

    def ours(self, shape: Shape, cut: object = None, flash: bool = True) -> tuple[float, float]:
        assert 0 < shape.query <= shape.context
        return shape.context + (100 if cut is None else cut.segments) + (0 if flash else 500), 1e-3

    def stock(self, shape: Shape) -> tuple[float, float]:
        raise NotImplementedError("not for these heads\nand more")

    fp8_flash = fp8_triton = ours


def test_each_kernel_is_timed_and_a_setting_named(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = SimpleNamespace(Caches=Caches, Shape=Shape)
    monkeypatch.setattr("vllm_exl3.cuda.timing.copy_bandwidth", lambda: 4e12)
    monkeypatch.setitem(sys.modules, "vllm_exl3.serving.kv_bench", measuring)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    options = ["--contexts", "300,5000", "--decode", "64,4,32:64,4,16", "--mtp", "1", "--batch", "8", "--q-heads", "12"]
    result = CliRunner().invoke(bench, ["kv", *options])
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "4.00 TB/s" in lines[0] and "12 query and 4 KV heads of 256; batch 8" in lines[0]
    for context, chunk in ((300, 300), (5000, 1024)):
        at = lines.index(f"context {context}: decoding 2 token(s); int4's bytes take {context * 0.002112:.1f} µs")
        assert lines[at + 1 : at + 3] == [
            f"int4, 64,4,32 {context + 32}.0 µs error 1.0e-03", f"int4, 64,4,16 {context + 16}.0 µs error 1.0e-03",
        ]  # fmt: skip
        assert lines[at + 3] == "int4, vLLM's own not here: NotImplementedError: not for these heads"
        assert lines[at + 4].startswith("fp8, FlashAttention 3 ") and lines[at + 5].startswith("fp8, Triton ")
        assert lines[at + 6] == "use VLLM_EXL3_INT4_DECODE=64,4,16"
        assert lines[at + 7] == f"context {context}: prefill of its last {chunk} tokens"
        assert lines[at + 11] == "use VLLM_EXL3_INT4_FA_PREFILL=1"


@pytest.mark.parametrize(
    "options",
    [
        ["--shape", "4096x"],
        ["--shape", "4096x100"],
        ["--shape", "0x4096"],
        ["--bits", "nan"],
        ["--bits", "4.5"],
        ["--bits", "2.5", "--codebook", "mcg"],
        ["--bits", "0"],
        ["--rows", "0"],
        ["--codebook", "none"],
    ],
)
def test_linears_that_do_not_exist_are_not_timed(options: list[str]) -> None:
    result = CliRunner().invoke(bench, ["linear", *options])
    assert result.exit_code == 2, result.output
