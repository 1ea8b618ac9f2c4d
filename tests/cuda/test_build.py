"""Building kernels: what is compiled once, what is said meanwhile, and what decides that a cached one fits."""

import contextlib
import itertools
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_exl3.cuda import compiler, runtime
from vllm_exl3.cuda.cache import CubinCache
from vllm_exl3.cuda.compiler import CompileError, Cubin, Instance, compiler_unavailable, fingerprint
from vllm_exl3.cuda.driver import Kernel

INSTANCES = [
    Instance("decode/dequantize.cu", "exl3_dequantize", (("INSTANCE_HALF_BITS", str(bits)),)) for bits in (4, 6, 8)
]


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "compiler_version", lambda: "13.0")


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


def test_how_far_compiling_is_is_said_every_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 4.0)  # seconds: twice this is too soon
    monkeypatch.setattr(runtime.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(runtime, "allowed", lambda: 1)
    monkeypatch.setattr(runtime, "compile_instance", lambda instance, _: Cubin(b"code", ""))
    kernels = [
        Instance("decode/dequantize.cu", "exl3_dequantize", (("INSTANCE_HALF_BITS", str(n)),)) for n in range(2, 14)
    ]
    for compiled in (True, False):
        said: list[str] = []
        runtime.build(kernels, "sm_80", CubinCache(tmp_path), say=said.append)
        between = [line for line in said if " are ready, about " in line]
        assert said == ([said[0], *between, said[-1]] if compiled else [])
        if compiled:
            assert 1 < len(between) < 12 and between[0].startswith("EXL3: 3 of 12 kernels for sm_80 are ready, about ")


def test_a_kernel_that_does_not_compile_stops_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(instance: Instance, architecture: str) -> Cubin:
        raise CompileError(f"{instance.label} for {architecture}")

    monkeypatch.setattr(runtime, "compile_instance", refuse)
    with pytest.raises(CompileError, match="exl3_dequantize_4 for sm_90a"):
        runtime.build(INSTANCES, "sm_90a", CubinCache(tmp_path))
    assert not list(tmp_path.glob("*.cubin"))


@pytest.mark.skipif(compiler_unavailable() is not None, reason=str(compiler_unavailable()))
def test_an_architecture_that_the_compiler_is_too_old_for_is_said_to_be_one() -> None:
    """In the words of the compiler that is installed."""
    with pytest.raises(CompileError, match=r"^NVRTC 13\.0 does not know sm_999a.*: install a newer one"):
        compiler.compile_instance(INSTANCES[0], "sm_999a")


@pytest.mark.parametrize(
    "changed", ["source", "header", "compiler", "options", "nothing", "another kernel", "another header"]
)
def test_a_cached_kernel_fits_its_sources_options_and_compiler_only(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = dict(compiler.kernel_sources())
    before = fingerprint(INSTANCES[0], "sm_90a")
    files = {
        "source": "decode/dequantize.cu",
        "header": "base/hadamard.cuh",
        "another kernel": "narrow/narrow.cu",
        "another header": "kv/nibbles.cuh",
    }
    if (name := files.get(changed)) is not None:
        sources[name] += "\n// changed"
        monkeypatch.setattr(compiler, "kernel_sources", lambda: sources)
    if changed == "compiler":
        monkeypatch.setattr(compiler, "compiler_version", lambda: "13.1")
    if changed == "options":
        options = compiler._options
        monkeypatch.setattr(compiler, "_options", lambda architecture: (*options(architecture), "--fmad=true"))
    assert (fingerprint(INSTANCES[0], "sm_90a") == before) == (changed == "nothing" or changed.startswith("another"))


class _Driver:
    """Stands in for torch's device functions and the loading of kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int]) -> None:
        self.built: list[Instance] = []
        properties = type(
            "Properties", (), dict(zip(("major", "minor"), capability, strict=True))
            | {"name": "GPU", "multi_processor_count": 132, "shared_memory_per_block_optin": 232448},
        )()  # fmt: skip
        monkeypatch.setenv("VLLM_EXL3_CACHE", str(tmp_path))
        monkeypatch.setattr(runtime.torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(runtime.torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(runtime.torch.cuda, "current_stream", lambda: None)
        monkeypatch.setattr(runtime.torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(runtime, "zeroed_memory", lambda _: 4096)
        monkeypatch.setattr(runtime, "load_kernel", lambda *_: Kernel(None, None, 0, "kernel"))
        monkeypatch.setattr(Kernel, "active_clusters", lambda *_: 66)
        monkeypatch.setattr(runtime, "compile_instance", self._compile)
        monkeypatch.setattr(runtime, "_devices", {})

    def _compile(self, instance: Instance, architecture: str) -> Cubin:
        self.built.append(instance)
        time.sleep(0.05)  # for other threads to ask meanwhile
        return Cubin(b"code", "")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_device_compiles_nothing_itself_that_is_not_named_to_be_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    driver = _Driver(monkeypatch, tmp_path, capability)
    limits = runtime.device(0).limits
    assert driver.built == runtime.own_instances(limits)
    assert (limits.clusters != ()) == limits.dependent_launch == (capability >= (9, 0))


def test_threads_that_ask_at_once_share_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver(monkeypatch, tmp_path, (9, 0))
    barrier = threading.Barrier(4)

    def ask(index: int) -> runtime.Device:
        barrier.wait()
        return runtime.device(index)

    with ThreadPoolExecutor(4) as pool:
        first, second, third, other = pool.map(ask, (0, 0, 0, 1))
    assert first is second is third is not other
    assert len(driver.built) == 1  # the second device finds it in the cache


def test_counters_are_a_streams_own_and_a_captured_launch_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Driver(monkeypatch, tmp_path, (9, 0))
    device = runtime.Device(0)
    taken = {stream: device.counters(stream, 10) for stream in (1, 2)}
    assert abs(taken[1] - taken[2]) >= 40 and device.counters(1, 7) == taken[1] and device.counters(2, 10) == taken[2]
    monkeypatch.setattr(runtime.torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = [device.counters(1, 10) for _ in range(3)]
    assert len({*captured, *taken.values()}) == 5
    monkeypatch.setattr(runtime.torch.cuda, "is_current_stream_capturing", lambda: False)
    grown = device.counters(1, 11)
    assert grown not in {*captured, *taken.values()} and device.counters(1, 10) == grown
    with pytest.raises(RuntimeError, match="capture fewer batch sizes"):
        device.counters(3, runtime._COUNTERS)


def test_nothing_is_compiled_while_a_graph_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver(monkeypatch, tmp_path, (8, 0))
    device = runtime.Device(0)
    device.prepare(INSTANCES[:1])
    monkeypatch.setattr(runtime.torch.cuda, "is_current_stream_capturing", lambda: True)
    assert device.kernel(INSTANCES[0])
    with pytest.raises(RuntimeError, match="exl3_dequantize_6 was not prepared before a CUDA graph capture"):
        device.kernel(INSTANCES[1])
    assert driver.built == INSTANCES[:1]
