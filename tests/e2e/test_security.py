"""What SECURITY.md says of the code as a whole: nothing of a pack can be executed, and ruff's rules hold that."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))

_EXECUTES = {
    *("eval", "exec", "compile", "__import__", "pickle.load", "pickle.loads", "marshal.load", "marshal.loads"),
    *("torch.load", "os.system", "os.popen", "yaml.load", "shelve.open", "runpy.run_path"),
}


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_executed_that_was_read(path: Path) -> None:
    for name, call in calls(path):
        assert name not in _EXECUTES, f"{path}:{call.lineno}"
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert keywords.get("shell") in (None, "False"), f"{path}:{call.lineno}"
        assert keywords.get("trust_remote_code") in (None, "False"), f"{path}:{call.lineno}"
        assert keywords.get("allow_pickle") in (None, "False"), f"{path}:{call.lineno}"


@pytest.mark.parametrize("code", ["eval('1')", "import pickle\npickle.loads(b'')", "subprocess.run('x', shell=True)"])
def test_the_search_finds_what_it_looks_for(code: str, tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(code)
    with pytest.raises(AssertionError):
        test_nothing_is_executed_that_was_read(file)


def test_the_rules_of_bandit_are_on_and_what_is_let_pass_says_why() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "S" in lint["select"]
    assert {rule for rule in lint["ignore"] if re.fullmatch(r"S\d+", rule)} == {"S101", "S603"}
    assert not any(
        rule.startswith("S") for glob, rules in lint["per-file-ignores"].items() if glob != "tests/**" for rule in rules
    )


def test_files_that_security_md_names_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) >= 5 and all((ROOT / name).exists() for name in named)
