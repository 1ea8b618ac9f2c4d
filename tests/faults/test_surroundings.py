"""Packs under paths, locales and interpreter flags of all kinds, through the command that reads them as vLLM does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_pack import llama
from vllm_exl3.pack import Exl3PackError, Pack
from vllm_exl3.pack.check import check

FLAGS = [("-O",), ("-OO",), ("-W", "error"), ("-X", "dev"), ("-X", "utf8=0"), ("-I",), ("-B", "-u")]


def inspect(folder: str | bytes, *flags: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """``vllm-exl3 inspect --json`` in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    command = [sys.executable, *flags, "-m", "vllm_exl3", "inspect", "--json", folder]
    return subprocess.run(command, env={**kept, **environment}, capture_output=True, timeout=120, check=False)


def found(result: subprocess.CompletedProcess[bytes]) -> dict[str, object]:
    assert result.returncode == 0, result.stderr.decode(errors="replace")[-1500:]
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "with spaces and 'quotes\"",
            "line\nbreak",
            "-leading",
            "ünïcode 包",
            "[markup] [/red]",
            "%s %d {x}",
            "a" * 200,
        ),
        pytest.param(os.fsdecode(b"not \xff\xfe utf-8"), id="bytes"),
    ],
)
def test_any_name_of_a_folder_is_opened_or_refused_in_words(name: str, tmp_path: Path) -> None:
    folder = llama().write(tmp_path / name)
    assert not Pack.open(folder).tensors.keys() - llama().tensors.keys()
    (folder / "config.json").unlink()
    with pytest.raises(Exl3PackError) as error:
        check(Pack.open(folder))
    error.value.report().encode()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["with spaces", "line\nbreak", "ünïcode", os.fsdecode(b"not \xff utf-8")], ids=ascii)
@pytest.mark.parametrize(
    "locale", [{"LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}, {"LANG": "xx_YY.none"}], ids=str
)
def test_the_command_prints_any_path_in_any_locale(name: str, locale: dict[str, str], tmp_path: Path) -> None:
    folder = llama().write(tmp_path / name)
    assert found(inspect(os.fsencode(folder), **locale))["faults"] == []


@pytest.mark.slow
@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_the_command_runs_under_flags_of_the_interpreter(flags: tuple[str, ...], tmp_path: Path) -> None:
    assert found(inspect(str(llama().write(tmp_path / "pack")), *flags))["faults"] == []


def test_a_hub_cache_of_links_is_read_through_them(tmp_path: Path) -> None:
    """Snapshots hold links to blobs, relative ones, and the cache itself may be a link to another disk."""
    disk = tmp_path / "disk"
    blobs, snapshot = disk / "models--a--b" / "blobs", disk / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(llama().write(tmp_path / "pack").iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / str(number), snapshot))
    (tmp_path / "cache").symlink_to(disk)
    pack = Pack.open(tmp_path / "cache" / snapshot.relative_to(disk))
    assert pack.tensors.keys() == llama().tensors.keys() and pack.read("lm_head.mul1").size == 1


def test_a_folder_in_a_file_s_place_is_named(tmp_path: Path) -> None:
    folder = llama().write(tmp_path / "pack")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(Exl3PackError):
        Pack.open(folder)
