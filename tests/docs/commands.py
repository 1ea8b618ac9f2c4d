"""The shell commands of every page: found in fenced and indented blocks, joined over continued lines, split into words.

A block says what it needs in a comment of its own, ``# needs: one NVIDIA GPU``; what says nothing must run, or at least
parse, on a machine without a GPU.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Command", "commands_of"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4}\S.*\n(?:^ {4}.*\n)*)", re.MULTILINE)
_VARIABLE = re.compile(r"^([A-Z][A-Z0-9_]*)=(.*)$", re.DOTALL)
_SHELLS = ("", "sh", "shell", "bash", "console")
_NEEDS = re.compile(r"#\s*needs:\s*(.+)")
_PROGRAMS = ("vllm", "vllm-exl3")


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        page: the page, relative to the repository.
        variables: set before it.
        words: the program and its arguments.
        needs: the hardware that its block names, or nothing.
    """

    page: str
    variables: tuple[tuple[str, str], ...]
    words: tuple[str, ...]
    needs: str

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def commands_of(page: Path) -> list[Command]:
    """Every command of a page that starts ``vllm`` or ``vllm-exl3``."""
    return [command for block in _blocks(page.read_text(encoding="utf-8")) for command in _commands(page, block)]


def _blocks(text: str) -> Iterator[str]:
    for language, block in _FENCE.findall(text):
        if language in _SHELLS:
            yield block
    for block in _INDENTED.findall(_FENCE.sub("", text)):
        yield "\n".join(line[4:] for line in block.splitlines())


def _commands(page: Path, block: str) -> Iterator[Command]:
    needs = ", ".join(_NEEDS.findall(block))
    for line in block.replace("\\\n", " ").splitlines():
        if not re.match(r"(?:[A-Z][A-Z0-9_]*=\S+ +)*(?:\S*/)?(?:vllm|vllm-exl3|python -m vllm_exl3)\b", line.strip()):
            continue
        words = shlex.split(line.strip().removeprefix("$ ").split(" | ")[0], comments=True)
        variables = []
        while words and (match := _VARIABLE.match(words[0])):
            variables.append((match[1], match[2]))
            words = words[1:]
        program = words[0].rpartition("/")[2]
        if program in _PROGRAMS and len(words) > 1:
            yield Command(str(page.relative_to(ROOT)), tuple(variables), (program, *words[1:]), needs)
