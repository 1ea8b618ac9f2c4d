"""Progress without a terminal, and what an interrupted command says."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.tiny_pack import llama
from vllm_exl3.cli import app
from vllm_exl3.cli.progress import bytes_progress
from vllm_exl3.tools import table_writer


@pytest.mark.parametrize(("seconds_a_step", "lines"), [(0.01, 0), (1.0, 9)])
def test_lines_come_for_what_lasts(seconds_a_step: float, lines: int) -> None:
    now = [0.0]
    text = io.StringIO()
    with bytes_progress(Console(file=text), clock=lambda: now[0]) as show:
        for step in range(1, 11):
            now[0] += seconds_a_step
            show("quantizing", step << 20, 10 << 20)
    said = text.getvalue().splitlines()
    assert len(said) == lines
    if lines:
        assert said[0] == "quantizing: 20 % of 10 MiB, 8 s left"
        assert said[-1] == "quantizing: 100 % of 10 MiB, 0 s left"


def test_a_terminal_gets_a_bar() -> None:
    text = io.StringIO()
    with bytes_progress(Console(file=text, force_terminal=True, width=100)) as show:
        show("quantizing", 10 << 20, 10 << 20)
    assert "10.0/10.0 MiB" in text.getvalue()


def test_an_interrupted_embed_quant_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object) -> float:
        raise KeyboardInterrupt

    source = llama().write(tmp_path / "source")
    monkeypatch.setattr(table_writer._Plan, "verify", interrupted)
    result = CliRunner().invoke(app, ["embed-quant", str(source), str(tmp_path / "target"), "--bits", "8"])
    assert result.exit_code == 130 and "nothing was saved" in result.output
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]
