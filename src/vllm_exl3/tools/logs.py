"""Reads logs of vLLM's processes."""

import re

__all__ = ["exceptions_in"]

_EXCEPTION = re.compile(r"\b[\w.]*(?:Error|Exception): .+")


def exceptions_in(log: str) -> list[str]:
    """The exceptions that a log names, each once, the first one first."""
    return list(dict.fromkeys(match.group() for match in _EXCEPTION.finditer(log)))
