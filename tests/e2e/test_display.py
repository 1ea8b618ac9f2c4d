"""What the demo shows: the start-up report cut out of a server's log, and progress without a terminal."""

import io

import pytest
from rich.console import Console

from vllm_exl3.demo.display import Display, report_lines

PREFIX = "(Worker pid=7) INFO 11-29 17:25:{:02d} [report.py:52] "
REPORT = [
    "vllm-exl3 0.1.0 serves /packs/x",
    "  quantizer  exllamav3 1.6.5, codebook mul1 (211 tensors)",
    "  linear     native on cpu",
]


@pytest.mark.parametrize("seconds", [(1, 1, 1), (9, 10, 11)])
def test_the_report_loses_its_prefixes(seconds: tuple[int, ...]) -> None:
    noise = PREFIX.format(0) + "Loading weights took 0.4 seconds"
    lines = [PREFIX.format(second) + line for second, line in zip(seconds, REPORT, strict=True)]
    assert report_lines("\n".join([noise, *lines, noise])) == REPORT


def test_a_log_without_a_report_gives_none() -> None:
    assert report_lines("INFO nothing here\n") == []
    assert report_lines("") == []


def test_a_log_file_gets_a_line_every_tenth() -> None:
    text = io.StringIO()
    with Display(Console(file=text, width=100)).progress(1000) as advance:
        for number in range(100):
            advance(f"layer {number} [x]", 10)
    lines = text.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0].strip() == "10 %     0 s left  layer 9 [x]"
    assert lines[-1].strip().startswith("100 %")


def test_what_an_earlier_run_did_counts_as_done_and_not_as_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    text, clock = io.StringIO(), iter([0.0, 6.0, 12.0])
    monkeypatch.setattr("vllm_exl3.demo.display.time.monotonic", lambda: next(clock))
    with Display(Console(file=text, width=100)).progress(1000, 750) as advance:
        advance("a", 100)
        advance("b", 100)
    assert [line.split() for line in text.getvalue().splitlines()] == [
        ["80", "%", "9", "s", "left", "a"],
        ["90", "%", "3", "s", "left", "b"],
    ]
