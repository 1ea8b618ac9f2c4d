"""Missing parts of a checkout of the repository, and the commands that make them."""

import importlib.util
import os
import sys
from pathlib import Path

__all__ = ["check_checkout", "checkout"]


def checkout(package: Path | None = None) -> Path | None:
    """The repository that this package runs from, or that is the current folder; None elsewhere.

    Args:
        package: the package's folder.
    """
    package = package or Path(__file__).parents[1]
    for root in (package.parents[1], Path(os.getcwd())):
        project = root / "pyproject.toml"
        if project.is_file() and (root / "src" / "vllm_exl3").is_dir() and 'name = "vllm-exl3"' in project.read_text():
            return root
    return None


def check_checkout(root: Path, package: Path | None = None) -> str:
    """Compare a checkout with what is installed.

    Args:
        root: the repository.
        package: the folder of the package that runs.

    Raises:
        RuntimeError: something is missing; it names the command that makes it.
    """
    package = package or Path(__file__).parents[1]
    environment, missing = root / ".venv", []
    if not (environment / "bin" / "python").exists():
        missing.append("no .venv: `make setup` makes one, with vLLM for the CPU")
    elif Path(sys.prefix).resolve() != environment.resolve() and importlib.util.find_spec("vllm") is None:
        missing.append(f"this Python ({sys.prefix}) has no vLLM: use {environment / 'bin' / 'vllm-exl3'}")
    if not any((package / "cpu").glob("libvllm_exl3_cpu.*")):
        missing.append("the CPU library is not built: `make setup`, or `pip install .`, builds and installs it")
    changed = _changed(root / "src" / "vllm_exl3", package)
    if changed:
        missing.append(f"{changed} differs from the installed one: `make setup` installs this checkout")
    if missing:
        raise RuntimeError("; ".join(missing))
    return f"{root}, installed as it is; GPU kernels are compiled at first use, or by `vllm-exl3 precompile`"


def _changed(source: Path, package: Path) -> str | None:
    """The first file of the checkout that the installed package has otherwise or not at all."""
    if source.resolve() == package.resolve():
        return None
    for file in sorted(source.rglob("*")):
        if file.suffix in (".py", ".cu", ".cuh", ".json"):
            name = file.relative_to(source)
            installed = package / name
            if not installed.is_file() or installed.read_bytes() != file.read_bytes():
                return str(Path("src") / "vllm_exl3" / name)
    return None
