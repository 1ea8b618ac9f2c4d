"""``vllm-exl3 bench kv`` on a machine without a GPU: what it takes, and what it says."""

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
