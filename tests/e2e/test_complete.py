"""What ``make`` installs is here: tests that need it are skipped where it is not, which nobody would notice."""

import importlib.util
import shutil

import pytest

from vllm_exl3.cpu import library
from vllm_exl3.cuda.compiler import compiler_unavailable

MODULES = ("cuda.bindings", "gguf", "openai", "psutil", "runai_model_streamer", "tokenizers")
MODULES += ("torchvision.transforms.v2", "vllm")  # a submodule imports its parents


@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_installed(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


def test_kernels_can_be_built_and_the_library_loads() -> None:
    assert shutil.which("g++") is not None
    assert compiler_unavailable() is None
    assert library.unavailable() is None
