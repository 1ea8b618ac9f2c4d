"""What `vllm-exl3 inspect` prints of names that are no plain text: as they are, or escaped, never an exception."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_pack import llama


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["tables", "json"])
@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_names_are_neither_markup_nor_bound_to_be_text(tmp_path: Path, form: list[str], locale: str) -> None:
    draft = llama(layers=1)
    draft.tensors["[/nothing:bug:open].weight"] = ("F16", np.ones(8))
    folder = draft.write(tmp_path / "[red]\udcff")
    environment = {**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "200"}
    result = subprocess.run(
        [sys.executable, "-m", "vllm_exl3.cli", "inspect", str(folder), *form],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert b"[red]\\udcff" in result.stdout
    if not form:
        assert b"[/nothing:bug:open]" in result.stdout


def test_an_error_about_such_a_folder_is_printed(tmp_path: Path) -> None:
    folder = tmp_path / "[red]\udcff"
    folder.mkdir()
    command = [sys.executable, "-m", "vllm_exl3.cli", "inspect", str(folder)]
    result = subprocess.run(command, capture_output=True, check=False)
    assert result.returncode == 1 and b"[red]\\udcff\nFound:" in result.stderr


def test_python_runs_the_package_as_the_command() -> None:
    command = [sys.executable, "-m", "vllm_exl3", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stdout.startswith("vllm-exl3 "), result.stderr
