"""What a pack says about itself in JSON: the quantization block, the tensor ledger, the index.

None of it decides how a tensor is decoded; it is shown, and compared with the headers. The ledger
(``tensor_storage``) takes a kilobyte per linear, so it is streamed entry by entry and never held.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.json_text import JsonEntries, parse_json

__all__ = [
    "SIDECAR",
    "architectures",
    "declared_blocks",
    "ledger_entries",
    "merge_blocks",
    "parse_object",
    "sidecar_head",
    "text_config",
    "text_configs",
]

SIDECAR = "quantization_config.json"
NESTED = ("text_config", "llm_config", "language_config")
"""Sub-configs of multimodal models that may describe the language model instead of the root."""

_LEDGER = re.compile(r'"tensor_storage"\s*:\s*')
_SPACE = re.compile(r"[\s,:]*")


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON file that must hold an object.

    Raises:
        Exl3PackError: it does not.
    """
    try:
        value = parse_json(text)
    except ValueError as error:
        raise _no_json(where, str(error)) from error
    if not isinstance(value, dict):
        raise _no_json(where, f"a JSON {type(value).__name__}")
    return value


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The names under ``architectures`` in config.json; whatever else stands there is left to vLLM to refuse."""
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def text_configs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts of config.json that may describe the language model: what is nested first, the root last."""
    return [part for part in (*(config.get(name) for name in NESTED), config) if isinstance(part, Mapping)]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that does describe the language model: the first with a width, else the root."""
    return next((part for part in text_configs(config) if "hidden_size" in part), config)


def declared_blocks(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The quantization blocks of a config.json with the place of each, root first."""
    blocks = []
    for place, holder in [("", config), *((f"{name}.", config.get(name)) for name in NESTED)]:
        block = holder.get("quantization_config") if isinstance(holder, Mapping) else None
        if isinstance(block, Mapping):
            blocks.append((f"{place}quantization_config", dict(block)))
    return blocks


def merge_blocks(config: Mapping[str, Any], sidecar: Mapping[str, Any]) -> dict[str, Any]:
    """One view of all quantization blocks: what config.json says first, for vLLM reads that one."""
    merged = dict(sidecar)
    for _, block in reversed(declared_blocks(config)):
        merged.update(block)
    merged.pop("tensor_storage", None)
    return merged


def sidecar_head(text: str, where: str) -> dict[str, Any]:
    """Every key of quantization_config.json but the ledger."""
    match = _LEDGER.search(text)
    if match is None:
        return parse_object(text.encode(), where)
    end = max((position for _, _, position in _members(text, match.end(), where)), default=match.end())
    close = text.find("}", end) + 1
    return parse_object((text[: match.end()] + "null" + text[close:]).encode(), where)


def ledger_entries(text: str, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Module key and entry of each record of ``tensor_storage``."""
    match = _LEDGER.search(text)
    if match is not None:
        for key, value, _ in _members(text, match.end(), where):
            if isinstance(value, dict):
                yield key, value


def _members(text: str, start: int, where: str) -> Iterator[tuple[str, Any, int]]:
    """Members of the JSON object at ``start``: key, value and where the value ends."""
    entries = JsonEntries(text)
    if not text.startswith("{", start):
        raise _no_json(where, "a tensor_storage that is no object")
    position = _skip(text, start + 1)
    try:
        while not text.startswith("}", position):
            key, position = entries.decode(position)
            value, position = entries.decode(_skip(text, position))
            yield key, value, position
            position = _skip(text, position)
    except ValueError as error:
        raise _no_json(where, str(error)) from error


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _no_json(where: str, found: str) -> Exl3PackError:
    return Exl3PackError(
        found=found,
        expected="a JSON object",
        where=where,
        remedy="The file is cut or damaged: fetch it again.",
    )
