"""The documents: generated pages are current, links lead somewhere, quoted result files exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_exl3 import env

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


MADE = ("environment_page.py", "readme_tables.py", "models_page.py", "plan_rates.py", "reliability_page.py")


@pytest.mark.parametrize("script", MADE)
def test_made_pages_are_current(script: str) -> None:
    command = [sys.executable, ROOT / "scripts" / script, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_planned_pages_are_current() -> None:
    """Makes headers of six large models, which takes a quarter of a minute."""
    command = [sys.executable, ROOT / "scripts" / "plan_pages.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_script_tells_how_it_is_used() -> None:
    scripts = [path for path in sorted((ROOT / "scripts").glob("*.py")) if "__main__" in path.read_text()]
    assert len(scripts) >= 4
    for script in scripts:
        for option, status in (("--help", 0), ("--no-such-option", 2)):
            done = subprocess.run([sys.executable, script, option], capture_output=True, text=True, check=False)
            said = done.stdout + done.stderr
            assert done.returncode == status and f"usage: {script.name}" in said, said


def test_the_environment_page_names_every_variable() -> None:
    text = (ROOT / "docs" / "environment.md").read_text()
    assert all(f"`{variable.name}`" in text for variable in env.VARIABLES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_quoted_results_exist(page: Path) -> None:
    text = page.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    results = re.findall(r"benchmarks/results/[\w/-]+\.json", text)
    missing = [link for link in links if link and not (page.parent / link).exists()]
    missing += [name for name in results if not (ROOT / name).exists()]
    assert not missing


def test_every_command_that_the_readme_names_exists() -> None:
    from typer.main import get_command

    from vllm_exl3.cli import app

    named = set(re.findall(r"vllm-exl3 ([a-z-]+) ?", (ROOT / "README.md").read_text()))
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert named & commands == commands, "a command is missing from the README"
    assert {name for name in named if f"vllm-exl3 {name}" in _code(ROOT / "README.md")} <= commands


def _code(page: Path) -> str:
    text = page.read_text()
    return "\n".join(re.findall(r"`[^`\n]+`", text))
