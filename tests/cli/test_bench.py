"""What ``vllm-exl3 bench`` prints of each cell, with stand-ins for the GPU and its clock."""

from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from vllm_exl3.cli import app
from vllm_exl3.pack.stored import Codebook


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_exl3.cuda.backend.unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")


def test_each_linear_stands_beside_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def limit_us(shape: tuple[int, int], half_bits: int, codebook: int, rows: int) -> float:
        asked.append((shape, half_bits, codebook, rows))
        return half_bits + rows / 100

    monkeypatch.setattr("vllm_exl3.cuda.timing.limit_us", limit_us)
    monkeypatch.setattr("vllm_exl3.cuda.timing.linear_us", lambda *cell: 2 * limit_us(*cell))
    monkeypatch.setattr("vllm_exl3.cuda.timing.cublas_us", lambda shape, rows: 10.0 * rows)
    options = ["--shape", "256x512", "--bits", "2.5", "--bits", "4", "--rows", "1", "--rows", "64"]
    found = CliRunner().invoke(app, ["bench", "linear", *options])
    assert found.exit_code == 0, found.output
    title, *lines = found.output.splitlines()
    assert title.startswith("A GPU") and len(lines) == 4
    assert set(asked) == {((256, 512), half_bits, Codebook.MUL1, rows) for half_bits in (5, 8) for rows in (1, 64)}
    assert " ".join(lines[0].split()) == "256x512 mul1 K=2.5 M=1 10.02 limit 5.01 cuBLAS bf16 10.00 1.00×"
    assert " ".join(lines[3].split()) == "256x512 mul1 K=4 M=64 17.28 limit 8.64 cuBLAS bf16 640.00 37.04×"


def test_each_block_of_experts_stands_beside_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer:
        def prepare(self) -> None:
            """There is nothing to compile."""

        def us(self, tokens: int) -> float:
            return 100.0 * tokens

        def limit_us(self, tokens: int) -> float:
            return 30.0 * tokens

    monkeypatch.setattr("vllm_exl3.cuda.moe_timing.random_experts", lambda *_: Layer())
    options = ["--experts", "8", "--top-k", "2", "--hidden", "1000", "--intermediate", "500", "--rows", "3"]
    found = CliRunner().invoke(app, ["bench", "moe", *options])
    assert found.exit_code == 0, found.output
    assert " ".join(found.output.splitlines()[1].split()) == "M=3 300.0 limit 90.0 0.1 TFLOP/s"
