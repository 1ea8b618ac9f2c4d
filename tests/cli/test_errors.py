"""What users get wrong ends in a sentence that names it, and every text of help fills its lines."""

import errno
import io
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.conftest import DATA
from vllm_exl3.cli import app, main
from vllm_exl3.cuda.compiler import Cubin, compiler_unavailable

PACK = str(DATA / "packs/phi3-5.0-mul1")
COMPILE = ["precompile", PACK, "--arch", "sm_90a"]
BENCHES = (["bench"], ["bench", "linear"], ["bench", "moe"], ["bench", "kv"])
COMMANDS = ([], ["inspect"], ["doctor"], *BENCHES, ["precompile"], ["demo"])


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """Exit status and standard error of a command in this process; an exception of any other kind is the test's."""
    said = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["vllm-exl3", *arguments])
        patch.setattr(sys, "stderr", said)
        with pytest.raises(SystemExit) as end:
            main()
    return int(str(end.value.code)), said.getvalue()


def test_an_error_of_the_system_without_a_path_tells_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vllm_exl3.cli.app", full_disk)
    status, said = _run(monkeypatch)
    assert status == 1 and said.startswith("No space left on device (in full_disk, ") and "test_errors.py" in said


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (lambda file: ["demo", "--cache", f"{file}/x"], "Not a directory"),
        (lambda file: ["embed-quant", PACK, f"{file}/x/y", "--bits", "8"], "Not a directory"),
        (lambda file: ["embed-quant", PACK, f"{file}/x", "--bits", "8"], "File exists"),
    ],
)
def test_a_path_that_the_system_refuses_is_named(
    arguments: Callable[[Path], list[str]], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    code, said = _run(monkeypatch, *arguments(file))
    assert code == 1
    assert said.strip().startswith(str(file)) and said.strip().endswith(reason), said


@pytest.mark.skipif(compiler_unavailable() is not None, reason="nothing can be compiled here")
@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda folder: folder.write_text(""), "expected a folder"),
        (lambda folder: (folder.mkdir(), (folder / "cubins").write_text("")), "cannot be written"),
        (lambda folder: (folder.mkdir(), (folder / "cubins").mkdir(), (folder / "cubins").chmod(0o777)), "others"),
    ],
    ids=["file", "file inside", "writable by all"],
)
def test_nothing_is_compiled_for_a_cache_that_cannot_keep_it(
    prepare: Callable[[Path], object], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    prepare(folder)
    monkeypatch.setenv("VLLM_EXL3_CACHE", str(folder))
    monkeypatch.setattr("vllm_exl3.cuda.runtime.build", lambda *_: pytest.fail("compiled"))
    code, said = _run(monkeypatch, *COMPILE)
    assert code == 1 and "VLLM_EXL3_CACHE" in said and reason in said, said


@pytest.mark.skipif(compiler_unavailable() is not None, reason="nothing can be compiled here")
def test_kernels_that_a_full_disk_did_not_keep_are_not_said_to_be_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []

    def fills_up(descriptor: int) -> None:
        if len(kept) >= 2:
            raise OSError(28, "No space left on device")
        kept.append(descriptor)

    monkeypatch.setenv("VLLM_EXL3_CACHE", str(tmp_path))
    monkeypatch.setattr("vllm_exl3.cuda.runtime.compile_instance", lambda *_: Cubin(b"machine code", ""))
    monkeypatch.setattr("vllm_exl3.cuda.cache.os.fsync", fills_up)
    code, said = _run(monkeypatch, *COMPILE)
    numbers = re.search(r"sm_90a: (\d+) of (\d+) kernels could not be kept in", said)
    assert code == 1 and numbers and int(numbers[1]) == int(numbers[2]) - 2, said
    assert "ready in" not in said


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["precompile", "--arch", "sm_90a", "--revision", "4.0bpw"], "of which pack?"),
        (["demo", "--port", "99999999"], "65535"),
        (["bench", "moe", "--top-k", "9", "--experts", "8"], "9 of 8 experts"),
        (["bench", "moe", "--bits", "2.5", "--codebook", "mcg"], "mcg has no such K, only 1 to 8"),
        (["bench", "moe", "--codebook", "qtip"], "expected one of"),
        (["bench", "moe", "--rows", "0"], "expected at least 1"),
        (["inspect"], "Missing argument"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_a_command_line_that_says_nothing_is_a_usage_error(
    arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = _run(monkeypatch, *arguments)
    assert code == 2 and reason in said, said


@pytest.mark.parametrize("pack", [PACK, "~"])
def test_a_revision_of_a_folder_is_said_to_be_unused(pack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", PACK)
    found = CliRunner().invoke(app, ["inspect", pack, "--revision", "4.0bpw", "--json"])
    assert found.exit_code == 0 and "--revision 4.0bpw is not used" in found.stderr
    assert json.loads(found.stdout)["faults"] == []


def test_a_source_of_the_demo_that_is_not_there_is_named_whatever_the_cache_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm_exl3.demo.run")
    monkeypatch.setattr("vllm_exl3.demo.prepare.Workshop.pack", lambda _: pytest.fail("took the cache's"))
    found = CliRunner().invoke(app, ["demo", "--gguf", str(tmp_path / "none.gguf"), "--cache", str(tmp_path)])
    assert found.exit_code == 1 and "no such file" in found.stderr


@pytest.mark.parametrize("command", [*COMMANDS, ["embed-quant"]], ids=" ".join)
def test_paragraphs_of_help_fill_their_lines(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    lines = re.split(r"^(?:Arguments|Options|Commands):", shown, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    for line, following in itertools.pairwise(lines):
        if line.strip() and following.strip():
            assert len(line.rstrip()) + 1 + len(following.split()[0]) >= 79, line


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("routed experts of 2048 and 99999 channels: found little, expected more"), "99999 channels"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 EiB.\nof which"), "9 EiB. Ask for less"),
    ],
    ids=["experts that do not fit", "a full GPU"],
)
def test_experts_that_a_gpu_cannot_hold_are_refused_in_words(
    error: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TooLarge:
        def prepare(self) -> None:
            raise error

    monkeypatch.setattr("vllm_exl3.cuda.backend.unavailable", lambda: None)
    monkeypatch.setattr("vllm_exl3.cuda.moe_timing.random_experts", lambda *_: TooLarge())
    status, said = _run(monkeypatch, "bench", "moe")
    assert (status, sentence in said, said.count("\n")) == (1, True, 1), said
