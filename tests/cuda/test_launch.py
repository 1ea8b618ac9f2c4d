"""Programs of the C++ library: what they pass to the driver, which functions of this test stand in for."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from vllm_exl3.cpu import library
from vllm_exl3.cuda import launch, linear
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.driver import DriverError
from vllm_exl3.cuda.geometry import Form, GpuLimits
from vllm_exl3.cuda.launch import Step
from vllm_exl3.cuda.prefill_arguments import PrefillArgs
from vllm_exl3.ops.shards import Shard, cached_shards, pack_shards

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))

H200 = GpuLimits("sm_90a", 132, 232448, ((2, 66), (4, 30), (8, 14)))
CONTEXT, OTHER, STREAM = 0x1000, 0x2000, 7
SHARDS = cached_shards(tuple(pack_shards([Shard(8, 2, 4096, 6144, 0, 6144), Shard(8, 2, 4096, 2048, 0, 2000)])))


class _Config(ctypes.Structure):
    """``CUlaunchConfig`` of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(ctypes.c_byte)),
        ("attribute_count", ctypes.c_uint),
    )


@dataclass
class Launched:
    """What the driver was passed for one kernel."""

    function: int
    grid: tuple[int, ...]
    threads: int
    shared: int
    stream: int
    attributes: list[tuple[int, tuple[int, ...]]]
    arguments: bytes


@dataclass
class FakeDriver:
    """The four functions of the driver that the library calls."""

    context: int = CONTEXT
    status: int = 0
    launched: list[Launched] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)
    argument_bytes: int = ctypes.sizeof(PrefillArgs)

    def install(self, loaded: ctypes.CDLL) -> None:
        pointer = ctypes.c_void_p

        def launch_kernel(config: Any, function: int, parameters: Any, _: int) -> int:
            c, attributes = config.contents, []
            for index in range(c.attribute_count):
                at = ctypes.addressof(c.attributes.contents) + 72 * index
                values = (ctypes.c_uint * 3).from_address(at + 8)
                attributes.append((ctypes.c_int.from_address(at).value, tuple(values)))
            arguments = ctypes.string_at(parameters[0], self.argument_bytes)
            self.launched.append(
                Launched(function, tuple(c.grid), c.block[0], c.shared, c.stream or 0, attributes, arguments)
            )
            return self.status

        def get_context(into: Any) -> int:
            into[0] = self.context
            return 0

        def push(context: int) -> int:
            self.stack.append(f"push {context:#x}")
            return 0

        def pop(into: Any) -> int:
            self.stack.append("pop")
            return 0

        kinds = (
            (launch_kernel, [ctypes.POINTER(_Config), pointer, ctypes.POINTER(pointer), pointer]),
            (get_context, [ctypes.POINTER(pointer)]),
            (push, [pointer]),
            (pop, [ctypes.POINTER(pointer)]),
        )
        self._alive = [ctypes.CFUNCTYPE(ctypes.c_int, *takes)(function) for function, takes in kinds]
        loaded.exl3_set_driver(*(ctypes.cast(function, pointer) for function in self._alive))


class Kernel:
    """A loaded kernel, and what `launch_kernels` passes it."""

    def __init__(self, number: int) -> None:
        self.function, self.context_address, self.launched = number, CONTEXT, []

    def allow_shared(self, size: int) -> None:
        """Nothing to raise."""

    def launch(self, grid: Any, threads: int, shared: int, stream: int, arguments: list[Any], *rest: Any) -> None:
        self.launched.append((grid, threads, shared, stream, bytes(arguments[0]), *rest))


class Device:
    """Stands in for `runtime.Device`."""

    def __init__(self, launcher: ctypes.CDLL | None) -> None:
        self.limits, self.index, self.launcher = H200, 0, launcher
        self.kernels: dict[Instance, Kernel] = {}

    def kernel(self, instance: Instance) -> Kernel:
        return self.kernels.setdefault(instance, Kernel(0x100 + len(self.kernels)))

    def counters(self, stream: int, count: int) -> int:
        return 0x8000


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    fake = FakeDriver()
    fake.install(library.library())
    yield fake
    library.library().exl3_set_driver(None, None, None, None)


def _tensors(rows: int, dtype: torch.dtype, bias: torch.dtype | None) -> tuple[Any, ...]:
    words = sum(shard.trellis_words for shard in SHARDS)
    return (
        torch.empty(rows, 4096, dtype=dtype),
        torch.empty(words, dtype=torch.int16),
        torch.empty(2 * 4096, dtype=torch.float16),
        torch.empty(8192, dtype=torch.float16),
        None if bias is None else torch.empty(8144, dtype=bias),
        torch.empty(rows, 8144, dtype=dtype),
    )


@pytest.mark.parametrize(
    ("rows", "form", "bias"),
    [
        (1, None, None),  # narrow: one kernel, with counters or a cluster
        (12, Form(False, 16), torch.float32),
        (32, None, torch.bfloat16),  # a rotation, and the GEMM
        (200, None, None),  # prefill
        (40, Form(False, 64), torch.float16),  # wide
    ],
)
def test_a_program_passes_what_python_passes(
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    in_place_of_the_device: Callable[[Device], Device],
    rows: int,
    form: Form | None,
    bias: torch.dtype | None,
) -> None:
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_EXL3_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    linear._steps.cache_clear()
    scratch, tensors = torch.empty(1 << 26, dtype=torch.uint8), _tensors(rows, torch.bfloat16, bias)
    with monkeypatch.context() as patched:
        patched.setattr(launch.torch, "empty", lambda *_, **__: scratch)  # both ways get the same
        in_place_of_the_device(plain := Device(None))
        (step,) = linear._steps(SHARDS, rows, 4096, H200, (False, "default"), form, None, None)
        step.launch(plain, *tensors)  # type: ignore[arg-type]
        fast = Device(library.library())
        for _ in range(2):  # the second finds its program
            driver.launched.clear()
            driver.argument_bytes = len(next(iter(plain.kernels.values())).launched[0][4])
            step.launch(fast, *tensors)  # type: ignore[arg-type]
    assert list(plain.kernels) == list(fast.kernels) and len(driver.launched) == len(plain.kernels)
    for kernel, found in zip(plain.kernels.values(), driver.launched, strict=True):
        ((grid, threads, shared, stream, arguments, dependent, *rest),) = kernel.launched
        cluster = rest[0] if rest else 1
        expected = [(6, (1, 0, 0))] * dependent + [(4, (cluster, 1, 1))] * (cluster > 1)
        assert (found.grid, found.threads, found.shared) == ((*grid, 1), threads, shared)
        assert (found.function, found.stream, found.attributes) == (kernel.function, stream, expected)
        assert found.arguments == arguments
    assert driver.stack == []


def test_another_context_is_made_the_current_one(
    driver: FakeDriver, in_place_of_the_device: Callable[[Device], Device]
) -> None:
    device, driver.context = in_place_of_the_device(Device(library.library())), OTHER
    (step,) = linear._steps(SHARDS, 32, 4096, H200, (False, "default"), None, None, None)
    Step(None, step.plan).launch(device, *_tensors(32, torch.float16, None))  # type: ignore[arg-type]
    assert driver.stack == [f"push {CONTEXT:#x}", "pop"]


def test_a_refused_launch_is_an_error_and_the_last(
    driver: FakeDriver, in_place_of_the_device: Callable[[Device], Device]
) -> None:
    device, driver.status = in_place_of_the_device(Device(library.library())), 700
    (step,) = linear._steps(SHARDS, 32, 4096, H200, (False, "default"), None, None, None)
    with pytest.raises(DriverError, match=r"exl3_gemm.*status is 700"):
        Step(None, step.plan).launch(device, *_tensors(32, torch.float16, None))  # type: ignore[arg-type]
    assert len(driver.launched) == 1


def test_without_a_driver_nothing_is_launched(
    driver: FakeDriver, in_place_of_the_device: Callable[[Device], Device]
) -> None:
    device = in_place_of_the_device(Device(library.library()))
    library.library().exl3_set_driver(None, None, None, None)
    (step,) = linear._steps(SHARDS, 32, 4096, H200, (False, "default"), None, None, None)
    with pytest.raises(DriverError, match=r"exl3_gemm.*no driver"):
        Step(None, step.plan).launch(device, *_tensors(32, torch.float16, None))  # type: ignore[arg-type]
    assert not driver.launched


def test_arguments_fit_the_library(driver: FakeDriver) -> None:
    """``EXL3_ARGUMENT_BYTES`` of abi.h, of all structures that linears pass."""
    for rows, form in ((1, None), (32, None), (200, None), (40, Form(False, 64))):
        (step,) = linear._steps(SHARDS, rows, 4096, H200, (False, "default"), form, None, None)
        assert len(step.plan.arguments) <= 4096


@pytest.mark.parametrize(
    ("at", "value", "size"),
    [(0, 10, 64), (57, 0, 64), (2**32 - 1, 0, 64), (0, 0, 4104), (0, 0, 2**32 - 1)],
    ids=["no such value", "beyond the arguments", "far beyond", "too many arguments", "far too many"],
)
def test_a_program_that_would_write_elsewhere_is_refused(driver: FakeDriver, at: int, value: int, size: int) -> None:
    arguments, patches = (ctypes.c_byte * 8192)(), (launch._Patch * 1)((at, value, 0))
    program = launch._ProgramStruct(
        ctypes.addressof(arguments), ctypes.addressof(patches), None, CONTEXT, size, 1, 0, 0
    )
    assert library.library().exl3_launch(ctypes.addressof(program), *[0] * 10, STREAM) == -1
    assert not driver.launched


@pytest.mark.parametrize("missing", ["arguments", "patches", "kernels", "function"])
def test_a_program_without_an_address_is_refused(driver: FakeDriver, missing: str) -> None:
    arguments, patches, kernels = (ctypes.c_byte * 64)(), (launch._Patch * 1)((0, 0, 0)), (launch._Kernel * 1)()
    kernels[0].function = None if missing == "function" else 8
    addresses = {"arguments": arguments, "patches": patches, "kernels": kernels}
    first = [0 if name == missing else ctypes.addressof(values) for name, values in addresses.items()]
    program = launch._ProgramStruct(*first, CONTEXT, 64, 1, 1, 0)
    assert library.library().exl3_launch(ctypes.addressof(program), *[0] * 10, STREAM) == -1
    assert not driver.launched
