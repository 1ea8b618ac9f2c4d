"""Every command that a page shows: `vllm-exl3` ones run on golden packs or parse, options of `vllm serve` exist."""

import functools
import json
import re
from typing import Any

import click
import pytest
from typer.main import get_command
from typer.testing import CliRunner

import vllm_exl3
from tests.conftest import DATA
from tests.docs.commands import PAGES, ROOT, Command, commands_of
from vllm_exl3 import env
from vllm_exl3.cli import app

COMMANDS = [command for page in PAGES for command in commands_of(page)]
OWN = [command for command in COMMANDS if command.words[0] == "vllm-exl3"]
SERVE = [command for command in COMMANDS if command.words[:2] == ("vllm", "serve")]
DENSE, MOE = DATA / "packs/phi3-5.0-mul1", DATA / "packs/qwen3_moe-3.0-mul1"

RUN = {"inspect": (), "plan": ()}
"""Commands that need nothing but a pack, and finish in a moment."""


def test_pages_show_commands() -> None:
    assert len(OWN) >= 20 and len(SERVE) >= 20
    assert {command.words[1] for command in OWN} >= {"inspect", "plan", "doctor", "bench", "embed-quant"}


@pytest.mark.parametrize("command", OWN, ids=str)
def test_own_commands(command: Command) -> None:
    _parse(command.words[1:])
    name = command.words[1]
    if name in RUN and "--help" not in command.words:
        words = [_stand_in(word) for word in command.words[1:]]
        if name == "plan" and len(words) == 2:
            return  # names the command, not a use of it
        result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
        assert result.exit_code in (0, 1) and not isinstance(result.exception, (ValueError, KeyError)), result.output


def _stand_in(word: str) -> str:
    """A golden pack in place of a pack that a page names."""
    if word.startswith("<") or word in ("PACK", "SOURCE", "./my-pack") or "/" in word:
        return str(MOE if "MoE" in word else DENSE)
    return word


def _parse(words: tuple[str, ...]) -> None:
    """Fail on an option or a sub-command that does not exist."""
    found: Any = get_command(app)
    left = list(words)
    while isinstance(found, click.Group) and left and not left[0].startswith("-"):
        assert left[0] in found.commands, f"no command {left[0]}"
        found = found.commands[left.pop(0)]
    if "--help" not in left:
        found.make_parser(click.Context(found)).parse_args(left)


@functools.cache
def _serve_options() -> dict[str, Any]:
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    return {option: action for action in parser._actions for option in action.option_strings}


@pytest.mark.parametrize("command", SERVE, ids=str)
def test_options_of_vllm_serve(command: Command) -> None:
    known = _serve_options()
    for position, word in enumerate(command.words):
        if not word.startswith("--") or word == "--...":
            continue
        option, _, value = word.partition("=")
        assert option in known, f"vllm serve has no {option}"
        value = value or (command.words[position + 1] if position + 1 < len(command.words) else "")
        if value.startswith("{"):
            json.loads(value)
        choices = known[option].choices
        if choices and not value.startswith(("-", "<", "{", "[")):
            assert value in choices, f"{option} takes {', '.join(map(str, choices))}"


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.variables], ids=str)
def test_variables_before_commands(command: Command) -> None:
    own = {name for variable in env.VARIABLES for name in (variable.name, *variable.aliases)}
    for name, _ in command.variables:
        if name.startswith("VLLM_EXL3_"):
            assert name in own, f"no variable {name}"
        elif name.startswith("VLLM_"):
            pytest.importorskip("vllm")
            from vllm.envs import environment_variables

            assert name in environment_variables, f"vLLM has no variable {name}"


NEW = ("memory.md", "recipes.md", "migrating.md", "qualification.md", "pack-contract.md", "new-vllm.md",
       "add-a-kernel.md", "add-a-model-family.md", "life-of-a-token.md", "README.md")  # fmt: skip


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.page.removeprefix("docs/") in NEW and c.words[0] == "vllm"
                                     and c.page.startswith("docs/")], ids=str)  # fmt: skip
def test_a_server_of_a_real_model_names_its_hardware(command: Command) -> None:
    assert command.needs, "say what it needs in a comment of its block: # needs: one 24 GB GPU"


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "docs" and page.name in NEW],
                         ids=lambda page: page.name)  # fmt: skip
def test_options_that_a_page_names_exist(page: Any) -> None:
    """Also outside of commands: in tables and sentences."""
    text = page.read_text()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))
    sources = [path.read_text() for path in (ROOT / "scripts").glob("*.py")]
    scripts = {option for source in sources for option in re.findall(r'"(--[a-z-]+)"', source)}
    unknown = {option for option in named if option not in _serve_options() and option not in _own_options() | scripts}
    assert not unknown


@functools.cache
def _own_options() -> set[str]:
    found: set[str] = {"--help"}

    def walk(command: Any) -> None:
        found.update(option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts))
        for child in getattr(command, "commands", {}).values():
            walk(child)

    walk(get_command(app))
    return found


def test_variables_of_the_migration_page_are_told_right() -> None:
    """A row that says "same" names a variable that exists, one that says "nothing" none."""
    own = {name for variable in env.VARIABLES for name in (variable.name, *variable.aliases)}
    lines = (ROOT / "docs/migrating.md").read_text().splitlines()
    rows = [line.removeprefix("| ").split(" | ") for line in lines if line.startswith("| ") and "`VLLM_" in line]
    kept = [name for first, second in (row[:2] for row in rows) if second.startswith("same")
            for name in re.findall(r"`(VLLM_(?:EXL3|QUANTPACK)_\w+)`", first)]  # fmt: skip
    gone = [name for first, second in (row[:2] for row in rows) if second.startswith("nothing")
            for name in re.findall(r"`(VLLM_EXL3_\w+)`", first)]  # fmt: skip
    assert len(kept) >= 14 and set(kept) <= own
    assert len(gone) >= 10 and not set(gone) & own


@pytest.mark.parametrize("name", sorted(set(vllm_exl3.__all__) - {"__version__", "plan_grouped_prefill"}))
def test_every_public_name_is_in_the_migration_page(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs/migrating.md").read_text()


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert not [name for name in sorted(pages) if f"]({name})" not in index]


PUBLISHED = (ROOT / "tests/docs/published.txt").read_text().split()
"""Commands, variables, functions, files and keys that earlier plugins and TabbyAPI document."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_migration_page_has_a_row_for_it(name: str) -> None:
    rows = [line.split(" | ")[0] for line in (ROOT / "docs/migrating.md").read_text().splitlines() if line[:2] == "| "]
    assert any(re.search(rf"(?<![\w.]){re.escape(name)}(?![\w])", row) for row in rows)
