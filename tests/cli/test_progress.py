"""Progress without a terminal, and what an interrupted command says."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.tiny_pack import llama
from vllm_exl3.cli import app
from vllm_exl3.tools import table_writer
from vllm_exl3.tools.progress import phases, progress, units


@pytest.mark.parametrize(("seconds_a_step", "lines"), [(0.01, 0), (1.0, 9)])
def test_lines_come_for_what_lasts(seconds_a_step: float, lines: int) -> None:
    now = [0.0]
    text = io.StringIO()
    with phases(Console(file=text), clock=lambda: now[0]) as show:
        for step in range(1, 11):
            now[0] += seconds_a_step
            show("quantizing", step << 20, 10 << 20)
    said = text.getvalue().splitlines()
    assert len(said) == lines
    if lines:
        assert said[0] == "quantizing: 20 % of 10 MiB, 1 MiB/s, 8 s left"
        assert said[-1] == "quantizing: 100 % of 10 MiB, 1 MiB/s, 0 s left"


def test_a_terminal_gets_a_bar() -> None:
    text = io.StringIO()
    with phases(Console(file=text, force_terminal=True, width=100)) as show:
        show("quantizing", 10 << 20, 10 << 20)
    assert "quantizing" in text.getvalue() and "100 %" in text.getvalue()


def test_slow_steps_get_a_line_every_ten_seconds_and_phases_start_anew() -> None:
    now, text = [0.0], io.StringIO()
    with phases(Console(file=text), clock=lambda: now[0]) as show:
        for step in range(1, 31):
            now[0] += 1.0
            show("reading", step << 20, 1000 << 20)
        now[0] += 3.0
        show("writing", 1 << 20, 2 << 20)
        now[0] += 3.0
        show("writing", 2 << 20, 2 << 20)
    assert [line.split(" of")[0] for line in text.getvalue().splitlines()] == [
        "reading: 1 %",
        "reading: 2 %",
        "reading: 3 %",
        "writing: 50 %",
        "writing: 100 %",
    ]


def test_what_an_earlier_run_did_counts_as_done_and_not_as_speed() -> None:
    text, now = io.StringIO(), [0.0]
    with progress(Console(file=text), "a", 1000, units("w"), done=750, clock=lambda: now[0]) as advance:
        for part in ("[x]", "b"):
            now[0] += 6.0
            advance(100, part)
    assert text.getvalue().splitlines() == [
        "a: 85 % of 1e+03 w, 16.7 w/s, 9 s left  [x]",
        "a: 95 % of 1e+03 w, 16.7 w/s, 3 s left  b",
    ]


def test_an_interrupted_embed_quant_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object) -> float:
        raise KeyboardInterrupt

    source = llama().write(tmp_path / "source")
    monkeypatch.setattr(table_writer._Plan, "verify", interrupted)
    result = CliRunner().invoke(app, ["embed-quant", str(source), str(tmp_path / "target"), "--bits", "8"])
    assert result.exit_code == 130 and "nothing was saved" in result.output
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_an_interrupted_precompile_says_what_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_exl3.cuda.compiler.compiler_unavailable", lambda: None)
    monkeypatch.setattr("vllm_exl3.cuda.runtime.build", interrupted)
    result = CliRunner().invoke(app, ["precompile", "--arch", "sm_90a"], env={"VLLM_EXL3_CACHE": str(tmp_path)})
    assert result.exit_code == 130 and f"are kept in {tmp_path}" in result.output
