"""Parts of `vllm-exl3 doctor` that need neither a GPU nor vLLM."""

import getpass
import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_exl3.cli import app
from vllm_exl3.cli.doctor import doctor
from vllm_exl3.cli.doctor_checkout import check_checkout, checkout
from vllm_exl3.cli.redaction import redacted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{Path.home()}/models/x.safetensors", "~/models/x.safetensors"),
        ("/data/alice/packs/llama: 3 kernels", "<folder>/llama: 3 kernels"),
        ("VLLM_EXL3_CACHE=/mnt/disk/cache", "VLLM_EXL3_CACHE=<folder>/cache"),
        ("/usr/bin/cc, /usr/include/python3.11/Python.h", "/usr/bin/cc, /usr/include/python3.11/Python.h"),
        ("HF_TOKEN=hf_AbCdEfGhIjKlMn", "HF_TOKEN=<token>"),
        ("http://alice:secret@mirror/x", "http://<token>@mirror/x"),
        ("3 of 4 kinds, 9 rows/s", "3 of 4 kinds, 9 rows/s"),
    ],
)
def test_what_could_identify_someone_is_taken_out(text: str, expected: str) -> None:
    assert redacted(text) == expected


def test_names_of_user_and_machine_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(socket, "gethostname", lambda: "alices-box")
    assert redacted("alice on alices-box, malice") == "<name> on <name>, malice"


def test_json_says_the_same_without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise RuntimeError("cannot be written: /data/alice/cache")

    checks = (("one", lambda: "in /data/alice/cache"), ("other", broken))
    monkeypatch.setitem(doctor.__globals__, "_checks", lambda: iter(checks))
    monkeypatch.setitem(doctor.__globals__, "_variables", lambda: "none")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.output)
    assert result.exit_code == 1 and found["ok"] is False
    assert [(row["check"], row["ok"], row["note"]) for row in found["checks"]] == [
        ("one", True, "in <folder>/cache"),
        ("other", False, "cannot be written: <folder>/cache"),
        ("environment variables", True, "none"),
    ]


def test_a_checkout_that_lacks_something_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "src" / "vllm_exl3"
    (source / "cpu").mkdir(parents=True)
    (source / "a.py").write_text("1")
    monkeypatch.chdir(tmp_path)
    assert checkout(source) is None
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "vllm-exl3"\n')
    assert checkout(source) == checkout(Path("/usr/lib/python3")) == tmp_path
    with pytest.raises(RuntimeError, match=r"no \.venv: `make setup`.*; the CPU library is not built: `make setup`"):
        check_checkout(tmp_path, source)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path / ".venv"))
    (source / "cpu" / "libvllm_exl3_cpu.so").touch()
    assert "installed as it is" in check_checkout(tmp_path, source)
    installed = tmp_path / "site-packages" / "vllm_exl3"
    (installed / "cpu").mkdir(parents=True)
    (installed / "cpu" / "libvllm_exl3_cpu.so").touch()
    with pytest.raises(RuntimeError, match=r"src/vllm_exl3/a\.py differs from the installed one: `make setup`"):
        check_checkout(tmp_path, installed)
