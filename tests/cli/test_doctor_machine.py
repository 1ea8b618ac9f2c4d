"""What the doctor says of a machine on which vLLM's own kernels cannot be built or kept."""

from pathlib import Path

import pytest

from vllm_exl3.cli import doctor_machine
from vllm_exl3.cli.doctor_machine import check_compiler, check_flashinfer, check_folders

VARIABLES = ("CUDA_CACHE_PATH", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


def test_a_home_that_cannot_be_written_is_named_until_every_variable_chooses_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in its place, since a user who is root may write into any folder."""
    monkeypatch.setattr(doctor_machine, "_installed", lambda module: True)
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for left in range(len(VARIABLES)):
        with pytest.raises(RuntimeError, match="cannot be written") as refusal:
            check_folders()
        assert [name in str(refusal.value) for name in VARIABLES] == [at >= left for at in range(len(VARIABLES))]
        monkeypatch.setenv(VARIABLES[left], str(tmp_path / "new" / str(left)))
    assert check_folders() == ", ".join(str(tmp_path / "new" / str(left)) for left in range(len(VARIABLES)))
    assert not (tmp_path / "new").exists()


def test_a_folder_without_permission_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    check_folders()
    monkeypatch.setattr(doctor_machine.os, "access", lambda path, mode: False)
    with pytest.raises(RuntimeError, match="ComputeCache"):
        check_folders()


@pytest.mark.parametrize(
    ("modules", "nvcc", "said"),
    [
        ([], True, "vLLM serves without it"),
        (["flashinfer", "flashinfer_cubin"], False, "prebuilt kernels of flashinfer-cubin"),
        (["flashinfer"], True, "nvcc compiles what is used"),
        (["flashinfer"], False, "VLLM_USE_FLASHINFER_SAMPLER=0"),
    ],
)
def test_flashinfer_with_and_without_its_kernels(
    modules: list[str], nvcc: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_machine, "_installed", modules.__contains__)
    monkeypatch.setattr(doctor_machine.shutil, "which", lambda name, path=None: "/toolkit/nvcc" if nvcc else None)
    assert said in check_flashinfer()


def test_a_missing_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"a C compiler.* not found: vLLM's Triton"):
        check_compiler()


def test_flashinfers_folder_counts_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "file"))
    monkeypatch.setattr(doctor_machine, "_installed", lambda module: False)
    check_folders()
    monkeypatch.setattr(doctor_machine, "_installed", lambda module: True)
    with pytest.raises(RuntimeError, match="FLASHINFER_WORKSPACE_BASE"):
        check_folders()
