"""Builds the wheel with the C++ library and the one without, and checks their tags and contents.

The library has a plain C interface, so one wheel serves every Python and every torch of a platform. With --aarch64,
builds that platform's wheel alone, with Debian's cross compiler; without the compiler that is skipped, and said.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CROSS_COMPILER = "aarch64-linux-gnu-g++"
CROSS = {
    "CMAKE_TOOLCHAIN_FILE": str(ROOT / "build_support" / "aarch64-linux-gnu.cmake"),
    "_PYTHON_HOST_PLATFORM": "linux-aarch64",
}
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
"""The e_machine of a library for each platform."""

NEEDED = ("vllm_exl3/__init__.py", "vllm_exl3/py.typed", "vllm_exl3/pack/pack.py", "vllm_exl3/serving/config.py")


def build(folder: Path, environment: dict[str, str]) -> Path:
    """Build one wheel into ``folder`` and return its path."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, env={**os.environ, **environment})
    (wheel,) = folder.glob("*.whl")
    return wheel


def faults(wheel: Path, *, machine: str | None) -> list[str]:
    """Faults of a wheel, a sentence each; its machine is one such as "aarch64", or None without the library."""
    native = machine is not None
    python, abi, tag = wheel.stem.split("-")[-3:]
    found = []
    if (python, abi) != ("py3", "none"):
        found.append(f"{wheel.name}: tagged {python}-{abi}, expected py3-none")
    if not tag.endswith(machine or "any"):
        found.append(f"{wheel.name}: tagged for platform {tag}, expected {machine or 'any'}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        headers = {name: archive.read(name)[:20] for name in names if name.endswith(".so")}
    for name, header in headers.items():
        code = int.from_bytes(header[18:20], "little")
        if machine in ELF_MACHINES and code != ELF_MACHINES[machine]:
            found.append(f"{wheel.name}: {name} is for ELF machine {code}, expected {ELF_MACHINES[machine]}")
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
    """Build and check the wheels; the exit status is the number of faults."""
    parser = argparse.ArgumentParser(description="Build both kinds of wheel and check their tags and contents.")
    parser.add_argument("--aarch64", action="store_true", help="cross-compile that platform's wheel instead")
    arguments = parser.parse_args()
    # An empty PATH is a machine without compilers.
    wheels: list[tuple[str | None, dict[str, str]]] = [
        (platform.machine(), {}),
        (None, {"VLLM_EXL3_NO_NATIVE": "1"}),
        (None, {"PATH": "", "CXX": ""}),
    ]
    if arguments.aarch64:
        if shutil.which(CROSS_COMPILER) is None:
            print(f"skipped: the wheel for aarch64, for lack of {CROSS_COMPILER} (Debian's g++-aarch64-linux-gnu)")
            return 0
        wheels = [("aarch64", CROSS)]
    found = []
    for machine, environment in wheels:
        with tempfile.TemporaryDirectory() as folder:
            wheel = build(Path(folder), environment)
            found += faults(wheel, machine=machine)
            print(f"{wheel.name}: {wheel.stat().st_size / 1e3:.0f} kB")
    for fault in found:
        print(fault, file=sys.stderr)
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
