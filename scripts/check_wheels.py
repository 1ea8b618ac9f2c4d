"""Builds the wheel with the C++ library and the one without, and checks their tags and contents.

The library has a plain C interface, so one wheel serves every Python and every torch of a platform.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("vllm_exl3/__init__.py", "vllm_exl3/py.typed", "vllm_exl3/pack/pack.py", "vllm_exl3/serving/config.py")


def build(folder: Path, environment: dict[str, str]) -> Path:
    """Build one wheel into ``folder`` and return its path."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, env={**os.environ, **environment})
    (wheel,) = folder.glob("*.whl")
    return wheel


def faults(wheel: Path, *, native: bool) -> list[str]:
    """What is wrong with a wheel, one sentence each."""
    python, abi, platform = wheel.stem.split("-")[-3:]
    found = []
    if (python, abi) != ("py3", "none"):
        found.append(f"{wheel.name}: tagged {python}-{abi}, expected py3-none")
    if (platform == "any") == native:
        found.append(f"{wheel.name}: tagged for platform {platform} {'with' if native else 'without'} the library")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    found += [f"{wheel.name}: lacks {name}" for name in NEEDED if name not in names]
    libraries = [name for name in names if name.endswith((".so", ".dylib", ".dll"))]
    if bool(libraries) != native:
        found.append(f"{wheel.name}: holds {libraries or 'no library'}")
    for leaf in ("LICENSE", "NOTICE", "entry_points.txt"):
        if not any(name.rpartition("/")[2] == leaf for name in names):
            found.append(f"{wheel.name}: lacks {leaf}")
    found += [f"{wheel.name}: holds {name}" for name in names if name.startswith(("tests/", "csrc/", "benchmarks/"))]
    return found


def main() -> int:
    """Build and check both; the exit status is the number of faults."""
    argparse.ArgumentParser(description="Build both kinds of wheel and check their tags and contents.").parse_args()
    found = []
    # An empty PATH is a machine without compilers.
    machines = ((True, {}), (False, {"VLLM_EXL3_NO_NATIVE": "1"}), (False, {"PATH": "", "CXX": ""}))
    for native, environment in machines:
        with tempfile.TemporaryDirectory() as folder:
            wheel = build(Path(folder), environment)
            found += faults(wheel, native=native)
            print(f"{wheel.name}: {wheel.stat().st_size / 1e3:.0f} kB")
    for fault in found:
        print(fault, file=sys.stderr)
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
