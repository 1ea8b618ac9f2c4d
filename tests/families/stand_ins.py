"""Empty modules in place of packages that vLLM's classes import and, as a row is served, never call."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

__all__ = ["stand_in"]


def stand_in(packages: Iterable[str]) -> None:
    """Let these packages be imported in this process where they are not installed.

    Args:
        packages: names such as ``torchvision``, without which a model that is asked for no image computes the same.
    """
    sys.meta_path.append(_Empty(packages))


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Iterable[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_one = name.partition(".")[0] in self._packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_one else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return MagicMock(name=spec.name, __spec__=spec, __path__=[])

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""
