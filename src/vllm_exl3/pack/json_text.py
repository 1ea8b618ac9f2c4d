"""JSON as packs may hold it: what the standard library lets through and nobody else could use is refused.

Everything that goes wrong is a ValueError, so that a caller turns one kind of error into its message.
"""

import json
import re
from typing import Any

__all__ = ["JsonEntries", "parse_json"]

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LONG_NUMBER = re.compile(r"[0-9]{39}")
_MOST_BITS = 128
"""Of an integer: so few that products of what a configuration holds stay within a float. Some hold 10^30."""


def parse_json(data: bytes, *, constants: bool = True) -> Any:
    """Parse UTF-8 text.

    Args:
        data: the text.
        constants: take ``NaN`` and ``Infinity``, which Python writes into configurations and JSON does not know.

    Raises:
        ValueError: it is no UTF-8, no JSON, nested too deeply, an integer in it is no number of anything, or a string
            in it cannot be printed.
    """
    text = data.decode()
    # A function for every integer would slow down headers of many tensors.
    parse_int = _bounded if _LONG_NUMBER.search(text) else None
    try:
        value = json.loads(text, parse_int=parse_int, parse_constant=None if constants else _refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if _has_surrogates(text):
        _check_printable(value)
    return value


class JsonEntries:
    """Decodes values one by one out of a long text, under the rules of `parse_json`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._decoder = json.JSONDecoder()
        self._surrogates = _has_surrogates(text)

    def decode(self, position: int) -> tuple[Any, int]:
        """The value that begins at ``position``, and where it ends.

        Raises:
            ValueError: as `parse_json`.
        """
        try:
            value, end = self._decoder.raw_decode(self._text, position)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if self._surrogates:
            _check_printable(value)
        return value, end


def _has_surrogates(text: str) -> bool:
    return "\\u" in text and _SURROGATE.search(text) is not None


def _check_printable(value: Any) -> None:
    # Half of a surrogate pair has no UTF-8 form; UnicodeEncodeError is a ValueError.
    json.dumps(value, ensure_ascii=False).encode()


def _bounded(digits: str) -> int:
    # Python itself refuses more than 4,300 digits, with a ValueError.
    if (value := int(digits)).bit_length() > _MOST_BITS:
        raise ValueError(f"it holds an integer of {len(digits)} digits, expected one of at most {_MOST_BITS} bits")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
