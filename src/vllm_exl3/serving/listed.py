"""Which modules a source model's quantization_config leaves in 16 bits, as its writers name them.

Names are of the checkpoint or of another class' modules, with or without the dot at the end; some are patterns. vLLM
compares most of them with whole names, after its own renaming, and then quantizes what was listed.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from vllm.model_executor.models.utils import WeightsMapper

__all__ = ["is_listed"]

_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
"""What formats call the list."""

_REGEX = "re:"


def is_listed(spec: Mapping[str, Any], names: Sequence[str], mappers: Iterable[WeightsMapper]) -> bool:
    """Whether a configuration lists a module, or one that it lies in.

    Args:
        spec: the quantization_config.
        names: what the module is called in vLLM and in the checkpoint.
        mappers: how the model class renames checkpoint modules.
    """
    patterns = [str(pattern) for key in _LISTS for pattern in spec.get(key) or ()]
    known = {*names, *(renamed for name in names for renamed in _renamed(name, mappers))}
    return any(_matches(pattern, name) for pattern in patterns for name in known)


def _renamed(name: str, mappers: Iterable[WeightsMapper]) -> Iterator[str]:
    """A checkpoint name as each of the model's classes calls it."""
    for mapper in mappers:
        rename = getattr(mapper, "map_name", None) or mapper._map_name
        name = (rename(f"{name}.weight") or f"{name}.weight").removesuffix(".weight")
        yield name


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith(_REGEX):
        try:
            return re.match(pattern.removeprefix(_REGEX), name) is not None
        except re.error:
            return False  # the format's own configuration says what is wrong with it
    pattern = pattern.rstrip(".")
    if "*" in pattern:
        return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
    return bool(pattern) and f".{pattern}." in f".{name}."
