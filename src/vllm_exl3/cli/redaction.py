"""Removes identifying data from a report: folders of a user, names of users and machines, tokens."""

import getpass
import re
import socket
from collections.abc import Iterator
from pathlib import Path

__all__ = ["redacted"]

_TOKENS = re.compile(r"\b(hf_|sk-|ghp_|gho_|glpat-)[A-Za-z0-9_-]{8,}|(?<=[:/])[^\s:/@]+:[^\s:/@]+(?=@)")
"""Tokens by their customary beginnings, and passwords in URLs."""

_FOLDERS = re.compile(r"(?<![\w.:/~-])/(?!(?:usr|opt|proc|sys|dev|etc|lib|lib64|bin)/)(?:[^\s/:;,()'\"]+/)+")
"""Folders outside those that every machine has; the last name of a path stays."""


def redacted(text: str) -> str:
    """A text without folders of a user, tokens, and the names of user and machine.

    Args:
        text: what a check has found.
    """
    text = _TOKENS.sub("<token>", text)
    text = text.replace(f"{Path.home()}/", "~/") if len(Path.home().parts) > 1 else text
    text = _FOLDERS.sub("<folder>/", text)
    for name in _names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text)
    return text


def _names() -> Iterator[str]:
    """Names of this user and machine, unless as common as root or localhost."""
    try:
        names = {getpass.getuser(), socket.gethostname()}
    except (OSError, KeyError, ImportError):  # a user without an entry in the password database
        names = {socket.gethostname()}
    yield from sorted(name for name in names if len(name) > 2 and name not in ("root", "localhost", "user", "vllm"))
