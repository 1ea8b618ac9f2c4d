"""Building kernels: what is compiled once, what is said meanwhile, and what decides that a cached one fits."""

import logging
from pathlib import Path

import pytest

from vllm_exl3.cuda import compiler, runtime
from vllm_exl3.cuda.cache import CubinCache
from vllm_exl3.cuda.compiler import CompileError, Cubin, Instance, fingerprint

INSTANCES = [Instance("dequantize.cu", "exl3_dequantize", (("INSTANCE_HALF_BITS", str(bits)),)) for bits in (4, 6, 8)]


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "compiler_version", lambda: "13.0")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def test_what_is_compiled_is_said_before_and_after_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Instance] = []

    def compile_instance(instance: Instance, architecture: str) -> Cubin:
        assert [record.getMessage() for record in caplog.records] == [
            f"EXL3: compiling kernels for {architecture}, to be kept in {tmp_path}"
        ]
        asked.append(instance)
        return Cubin(instance.label.encode(), "")

    monkeypatch.setattr(runtime, "compile_instance", compile_instance)
    with caplog.at_level(logging.INFO, "vllm.exl3"):
        built = runtime.build([*INSTANCES, INSTANCES[0]], "sm_90a", CubinCache(tmp_path))
        assert sorted(asked, key=str) == sorted(INSTANCES, key=str)
        assert built == {instance: instance.label.encode() for instance in INSTANCES}
        assert "compiled 3 of 3 kernels for sm_90a" in caplog.records[-1].getMessage() and len(caplog.records) == 2
        assert runtime.build(INSTANCES, "sm_90a", CubinCache(tmp_path)) == built
        assert len(caplog.records) == 2 and len(asked) == 3


def test_a_kernel_that_does_not_compile_stops_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(instance: Instance, architecture: str) -> Cubin:
        raise CompileError(f"{instance.label} for {architecture}")

    monkeypatch.setattr(runtime, "compile_instance", refuse)
    with pytest.raises(CompileError, match="exl3_dequantize_4 for sm_90a"):
        runtime.build(INSTANCES, "sm_90a", CubinCache(tmp_path))
    assert not list(tmp_path.glob("*.cubin"))


@pytest.mark.parametrize("changed", ["source", "header", "compiler", "options", "nothing", "another kernel"])
def test_a_cached_kernel_fits_its_sources_options_and_compiler_only(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = dict(compiler.kernel_sources())
    before = fingerprint(INSTANCES[0], "sm_90a")
    name = {"source": "dequantize.cu", "header": "hadamard.cuh", "another kernel": "narrow.cu"}.get(changed)
    if name is not None:
        sources[name] += "\n// changed"
        monkeypatch.setattr(compiler, "kernel_sources", lambda: sources)
    if changed == "compiler":
        monkeypatch.setattr(compiler, "compiler_version", lambda: "13.1")
    if changed == "options":
        options = compiler._options
        monkeypatch.setattr(compiler, "_options", lambda architecture: (*options(architecture), "--fmad=true"))
    assert (fingerprint(INSTANCES[0], "sm_90a") == before) == (changed in ("nothing", "another kernel"))
