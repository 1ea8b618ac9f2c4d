"""What the demo shows: the start-up report cut out of a server's log."""

import pytest

from vllm_exl3.demo.display import report_lines

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
