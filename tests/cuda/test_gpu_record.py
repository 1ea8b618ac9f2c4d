"""The record of tests on a GPU: what it counts, and that it is known when kernels have changed since."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import record
from vllm_exl3.cuda import compiler, tested

ROWS = [
    {"test": "tests/gpu/test_b.py::test_1", "outcome": "passed", "seconds": 1.5},
    {"test": "tests/gpu/test_a.py", "outcome": "skipped", "seconds": 0.0, "reason": "needs two GPUs"},
    {"test": "tests/gpu/test_b.py::test_2", "outcome": "not run", "seconds": 0.0},
]

FACTS = {"commit": "0123456789abcdef", "vllm": "not installed", "seconds": 300, "left out as slow": 12}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "tests.json"
    record.write_record(path, ROWS, command="x", facts=FACTS)
    return path


def test_what_did_not_run_is_no_pass(written: Path) -> None:
    content: dict[str, Any] = json.loads(written.read_text())
    assert content["meta"]["counts"] == {"passed": 1, "failed": 0, "skipped": 1, "not run": 1}
    assert content["meta"]["vllm"] == "not installed" and content["meta"]["commit"] == "0123456789abcdef"
    assert [row["test"] for row in content["rows"]] == sorted(row["test"] for row in ROWS)


def test_a_run_replaces_the_one_before(written: Path) -> None:
    record.write_record(written, ROWS[:1], command="x", facts={})
    assert json.loads(written.read_text())["rows"] == ROWS[:1]


@pytest.mark.parametrize(
    ("name", "change"),
    [("narrow/narrow.cuh", "// other\n"), ("prefill/prefill.cu", ""), ("another.cuh", "new")],
)
def test_changed_kernels_are_noticed(written: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: str) -> None:
    assert record.kernels_moved(written) is None
    sources = dict(compiler.kernel_sources())
    sources[name] = sources.get(name, "")[:-20] + change
    monkeypatch.setattr(compiler, "kernel_sources", lambda: sources)
    said = record.kernels_moved(written)
    assert said is not None and "commit 0123456789ab)" in said and "python -m tests.gpu.run" in said


def test_changed_options_and_triton_kernels_are_noticed(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_options", lambda architecture: ("--fmad=true",))
        assert record.kernels_moved(written) is not None
    assert record.kernels_moved(written) is None
    given: list[dict[str, str]] = []
    monkeypatch.setattr(tested, "sources_fingerprint", lambda others: given.append(others) or "other")
    assert record.kernels_moved(written) is not None
    assert "accumulate.py" in given[0] and all("@triton.jit" in text for text in given[0].values())


def test_no_record_is_told(tmp_path: Path) -> None:
    assert "no run of tests/gpu is recorded" in str(record.kernels_moved(tmp_path / "none.json"))


def test_the_page_tells_what_did_not_run(written: Path) -> None:
    sys.path.insert(0, str(record.ROOT / "scripts"))
    try:
        from gpu_tests_table import gpu_tests
    finally:
        sys.path.remove(str(record.ROOT / "scripts"))
    page = gpu_tests(written)
    said = " ".join(page.split())
    assert "1 passed, 0 failed, 1 skipped and 1 did not run" in said and "at commit `0123456789ab`" in said
    assert "vLLM not installed" in said or "vllm" in json.loads(written.read_text())["meta"]["versions"]
    assert "* skipped: `test_a.py` (needs two GPUs)" in page
    assert "| `tests/gpu/test_b.py` | 1 |  |  | 1 |" in page
    assert gpu_tests(written.parent / "none.json") == "No run is recorded.\n"


def test_messages_name_no_folder_of_the_machine_that_they_are_from() -> None:
    text = f'File "{record.ROOT}/tests/gpu/run.py", line 3; File "/usr/lib/python3/a-b.py"; https://a.org/b/c a/b/c 1/2'
    assert record.without_folders(text) == (
        'File "tests/gpu/run.py", line 3; File "a-b.py"; https://a.org/b/c a/b/c 1/2'
    )


def test_doctor_s_sentence_is_of_the_latest_run_of_that_model() -> None:
    meta = {"gpu": "GPU A", "date": "2026-01-02", "commit": "abc", "kernels": tested.kernels_fingerprint()}
    one = tested.with_run("[]", {**meta, "counts": {"passed": 7, "failed": 1, "skipped": 3}})
    assert tested.tested_on("GPU A", one) == "7 of 8 tests passed on GPU A, 2026-01-02"
    assert tested.tested_on("GPU B", one) == "never tested on this model, GPU B (tested on: GPU A)"
    moved = tested.with_run(one, {**meta, "kernels": "other", "counts": {"passed": 9, "failed": 0}})
    assert len(json.loads(moved)) == 1
    assert tested.tested_on("GPU A", moved).endswith(
        "9 of 9 tests passed on GPU A, 2026-01-02, but with an earlier version of the kernels"
    )


def test_the_package_s_record_is_that_of_the_recorded_run() -> None:
    meta = json.loads(record.RESULTS.read_text())["meta"]
    shipped = (record.ROOT / "src" / "vllm_exl3" / "cuda" / tested.RECORD).read_text()
    assert tested.with_run(shipped, meta) == shipped
