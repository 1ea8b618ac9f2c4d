"""Two builds of the wheel, in other folders, under other umasks, from files of other dates: equal to the byte."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EPOCH = "1700000000"
PARTS = ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "CMakeLists.txt", "src", "csrc", "build_support")

pytestmark = pytest.mark.slow


def build(folder: Path, *, umask: int, moment: int, **environment: str) -> Path:
    """The wheel of a copy of the sources, all of them as old as `moment`."""
    tree = folder / "tree"
    for part in PARTS:
        source, target = ROOT / part, tree / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copyfile(source, target)
    for path in (tree, *tree.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        os.utime(path, (moment, moment))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(folder / "wheels"), str(tree)]
    built = subprocess.run(
        command,
        check=False,
        env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH, **environment},
        umask=umask,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    (wheel,) = (folder / "wheels").glob("*.whl")
    return wheel


def differences(one: Path, other: Path) -> list[str]:
    """Members of two wheels that differ, and in what."""
    found = []
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(other) as second:
        if first.namelist() != second.namelist():
            found.append(f"names: {sorted({*first.namelist()} ^ {*second.namelist()}) or 'their order'}")
        for name in {*first.namelist()} & {*second.namelist()}:
            a, b = first.getinfo(name), second.getinfo(name)
            for what in ("external_attr", "date_time", "CRC", "compress_size", "extra"):
                if getattr(a, what) != getattr(b, what):
                    found.append(f"{name}: {what} {getattr(a, what)} and {getattr(b, what)}")
    return found


@pytest.mark.parametrize("native", [False, True], ids=["pure", "native"])
def test_wheels_of_two_builds_are_equal(native: bool, tmp_path: Path) -> None:
    switch = {} if native else {"VLLM_EXL3_NO_NATIVE": "1"}
    one = build(tmp_path / "a", umask=0o022, moment=1_600_000_000, TZ="UTC", LC_ALL="C", **switch)
    other = build(tmp_path / "a longer name", umask=0o077, moment=1_650_000_001, TZ="Asia/Tokyo", **switch)
    assert one.name == other.name
    assert one.read_bytes() == other.read_bytes(), "\n".join(differences(one, other)[:40])
    for path in (os.fsencode(tmp_path), os.fsencode(ROOT)):
        with zipfile.ZipFile(one) as archive:
            assert not [name for name in archive.namelist() if path in archive.read(name)]
