"""Help names only variables that exist: whoever sets another one changes nothing, and nothing says so."""

import re

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from vllm_exl3 import env
from vllm_exl3.cli import app

NAMES = {name for variable in env.VARIABLES for name in (variable.name, *variable.aliases)}


def _commands() -> list[tuple[str, ...]]:
    """Every command and group of commands, by the words that call it."""
    found: list[tuple[str, ...]] = []
    left = [((), get_command(app))]
    while left:
        words, command = left.pop()
        found.append(words)
        left += [((*words, name), inner) for name, inner in getattr(command, "commands", {}).items()]
    return sorted(found)


def test_every_command_is_found() -> None:
    assert {(), ("precompile",), ("bench",), ("bench", "kv")} <= set(_commands())


@pytest.mark.parametrize("words", _commands(), ids=" ".join)
def test_variables_in_help_exist(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "100", "TERM": "dumb"}).output
    unknown = set(re.findall(r"VLLM_(?:EXL3|QUANTPACK)_\w+", shown)) - NAMES
    assert not unknown, f"no such variable: {', '.join(sorted(unknown))}"
