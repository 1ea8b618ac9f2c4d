"""What one environment variable is, and the kinds of value that variables take.

A value that does not parse is an error naming the variable, its value and what it takes: a typo must not silently
change how a model is served. The variables themselves stand in ``env.py``.
"""

import importlib.util
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = [
    "Variable",
    "VariableError",
    "choice",
    "existing_or_new_folder",
    "file_in_a_folder",
    "gibibytes_or_auto",
    "mebibytes_or_unlimited",
    "ngram_kernel",
    "rows_or_auto",
    "threads_or_auto",
    "whole",
    "yes_or_no",
]

logger = logging.getLogger("vllm.exl3")

T = TypeVar("T")

_MOST = 2**31 - 1
"""Of numbers of rows, which kernels take as 32-bit integers."""
_GIBIBYTES, _MOST_GIBIBYTES = re.compile(r"\d{1,6}(?:\.\d{1,9})?"), 1 << 16
_SHOWN = 80
"""Characters of a wrong value that a message repeats."""


class VariableError(ValueError):
    """A variable is set to something it does not take; the message names it, its value and what it takes."""


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable.

    Attributes:
        name: ``VLLM_EXL3_…``.
        default: the text that an unset variable stands for.
        parse: turns the text into a value; raises ValueError saying what it takes.
        help: one sentence for ``vllm-exl3 doctor`` and ``docs/environment.md``.
        aliases: older names for the same setting; the new name wins where both are set.
    """

    name: str
    default: str
    parse: Callable[[str], T]
    help: str
    aliases: tuple[str, ...] = ()

    def get(self) -> T:
        """The current value.

        Raises:
            VariableError: the variable is set to something it does not take.
        """
        # Not by way of `given`: calls of kernels read variables, which lists would slow down.
        for name in (self.name, *self.aliases):
            if text := os.environ.get(name, "").strip():
                return self._parse(name, text)
        return self._parse(self.name, self.default)

    def given(self) -> list[tuple[str, str]]:
        """The names that it is set under, and what they hold; the first one counts."""
        texts = [(name, os.environ.get(name, "").strip()) for name in (self.name, *self.aliases)]
        return [(name, text) for name, text in texts if text]

    def _parse(self, name: str, text: str) -> T:
        try:
            return self.parse(text)
        except ValueError as error:
            shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
            raise VariableError(f"{name}={shown!r}: {error}") from None


def choice(*values: str) -> Callable[[str], str]:
    """Take one of some words, in any case."""

    def parse(text: str) -> str:
        if text.lower() not in values:
            raise ValueError(f"expected one of {', '.join(values)}")
        return text.lower()

    return parse


def ngram_kernel(text: str) -> str:
    """Take kernels of n-gram tables, also by the names that earlier plugins used."""
    name = choice("auto", "native", "torch", "exllamav3", "ext")(text)
    if name == "ext":
        name = "exllamav3" if importlib.util.find_spec("exllamav3") else "native"
        logger.info("VLLM_EXL3_NGRAM_KERNEL=ext means %s here", name)
    return "reference" if name == "torch" else name


def whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    """Take a whole number of this range."""

    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > len(str(most)) or not least <= int(text) <= most:
            raise ValueError(f"expected a whole number from {least} to {most}")
        return int(text)

    return parse


def existing_or_new_folder(text: str) -> str:
    """Take a folder that exists or can be made; empty for the default one."""
    if not text:
        return text
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ValueError("expected a path; there is no such user")
    existing = os.path.abspath(path)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise ValueError(f"expected a folder, or a path where one can be made; {existing} is no folder")
    return path


def file_in_a_folder(text: str) -> str:
    """Take a file that exists or can be made in a folder that does; empty for none."""
    if not text:
        return text
    path = os.path.abspath(os.path.expanduser(text))
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(path)):
        raise ValueError("expected a file in a folder that exists")
    return path


def gibibytes_or_auto(text: str) -> int | None:
    """Take a size in GiB, which is given in bytes, or ``auto``, which is None."""
    if text.lower() == "auto":
        return None
    if not _GIBIBYTES.fullmatch(text) or float(text) > _MOST_GIBIBYTES:
        raise ValueError(f"expected auto or a number of GiB from 0 to {_MOST_GIBIBYTES}, such as 12.5")
    return int(float(text) * (1 << 30))


def rows_or_auto(text: str) -> int | None:
    """Take a number of rows, or ``auto``, which is None."""
    return None if text.lower() == "auto" else whole(0)(text)


def threads_or_auto(text: str) -> int | None:
    """Take a number of threads, or ``auto``, which is None."""
    return None if text.lower() == "auto" else whole(1, 1024)(text)


def mebibytes_or_unlimited(text: str) -> int | None:
    """Take a size in MiB, or ``unlimited``, which is None."""
    return None if text.lower() == "unlimited" else whole(0, 1 << 24)(text)


def yes_or_no(text: str) -> bool:
    """Take any of the usual spellings of yes and no."""
    values = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in values:
        raise ValueError(f"expected one of {', '.join(values)}")
    return values[text.lower()]
