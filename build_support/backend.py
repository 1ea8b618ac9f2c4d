"""The build backend: scikit-build-core, without CMake where there is no C++ compiler.

With a compiler the wheel holds the CPU kernels and is tagged for the platform; without one, or with
``VLLM_EXL3_NO_NATIVE=1``, it is pure Python and tagged for any. A compiler that is there but fails is
an error, never a pure wheel: the user meant to have the kernels.
"""

import os
import shutil
import sys

from scikit_build_core import build as scikit

_SWITCH = "VLLM_EXL3_NO_NATIVE"
_COMPILERS = ("c++", "g++", "clang++", "cl")

build_sdist = scikit.build_sdist
get_requires_for_build_sdist = scikit.get_requires_for_build_sdist

Settings = dict[str, list[str] | str] | None


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """PEP 517 hook."""
    _decide()
    return str(scikit.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """PEP 660 hook."""
    _decide()
    return str(scikit.build_editable(wheel_directory, config_settings, metadata_directory))


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """PEP 517 hook: CMake and Ninja, where they are not installed and will be used."""
    _decide()
    return list(scikit.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """PEP 660 hook."""
    _decide()
    return list(scikit.get_requires_for_build_editable(config_settings))


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    """PEP 517 hook; the metadata names the tag, so it is decided here too."""
    _decide()
    return str(scikit.prepare_metadata_for_build_wheel(metadata_directory, config_settings))


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    """PEP 660 hook."""
    _decide()
    return str(scikit.prepare_metadata_for_build_editable(metadata_directory, config_settings))


def _decide() -> None:
    """Set the switch that pyproject.toml's override reads, when there is nothing to compile with."""
    if _SWITCH in os.environ:
        return
    named = os.environ.get("CXX", "").split()
    if not any(shutil.which(compiler) for compiler in (*named[:1], *_COMPILERS)):
        os.environ[_SWITCH] = "1"
        print(
            "vllm-exl3: no C++ compiler found (set CXX, or install g++ or clang); installing without the CPU kernels.",
            file=sys.stderr,
        )
