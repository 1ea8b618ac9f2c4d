"""What a call of the linear op launches, on a device that only takes notes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from vllm_exl3.cuda import linear, runtime
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.geometry import Form, GpuLimits
from vllm_exl3.ops.shards import Shard, pack_shards

SHARDS = (Shard(8, 2, 256, 512, 0, 512), Shard(8, 2, 256, 256, 0, 200))
WIDTH = 712


@dataclass
class Noted:
    """One launch: its kernel, the rows it was told of and where the first of them lies."""

    kernel: str
    rows: int
    x: int
    out: int


@dataclass
class NotingDevice:
    """Stands in for `runtime.Device`, and for its kernels."""

    limits: GpuLimits = field(default_factory=lambda: GpuLimits("sm_90a", 132, 232448))
    launches: list[Noted] = field(default_factory=list)
    label: str = ""

    def counters(self, stream: int, count: int) -> int:
        return 4096

    def kernel(self, instance: Instance) -> "NotingDevice":
        self.label = instance.label
        return self

    def allow_shared(self, size: int) -> None:
        """Nothing to raise."""

    def launch(self, grid: Any, threads: int, shared: int, stream: int, arguments: list[Any], *_: Any) -> None:
        (told,) = arguments
        self.launches.append(Noted(self.label, told.rows, told.x, told.out))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[NotingDevice]:
    device = NotingDevice()
    monkeypatch.setattr(runtime, "device", lambda index: device)
    monkeypatch.setattr(runtime, "current_stream", lambda index: 7)
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_EXL3_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    linear._way_to_serve.cache_clear()
    yield device
    linear._way_to_serve.cache_clear()


def call(
    rows: int, form: Form | None = None, bias: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros(rows, 300, dtype=dtype)[:, :256]
    trellis = torch.zeros(sum(shard.trellis_words for shard in SHARDS), dtype=torch.int16)
    suh, svh = torch.zeros(512, dtype=torch.float16), torch.zeros(768, dtype=torch.float16)
    return x, linear.linear(x, trellis, suh, svh, bias, pack_shards(SHARDS), form=form, rotated=False)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_few_rows_are_one_launch_of_all(device: NotingDevice, rows: int) -> None:
    x, out = call(rows)
    (launch,) = device.launches
    assert (launch.rows, launch.x, launch.out) == (rows, x.data_ptr(), out.data_ptr())
    assert out.shape == (rows, WIDTH)


def test_no_rows_launch_nothing(device: NotingDevice) -> None:
    _, out = call(0)
    assert out.shape == (0, WIDTH) and not device.launches


@pytest.mark.parametrize(
    "bias",
    [
        torch.zeros(WIDTH - 1),
        torch.zeros(WIDTH + 1),
        torch.zeros(2 * WIDTH)[::2],
        torch.zeros(WIDTH, dtype=torch.float64),
        torch.zeros(WIDTH, dtype=torch.int32),
    ],
    ids=["short", "long", "strided", "float64", "integers"],
)
@pytest.mark.parametrize("rows", [1, 40])
def test_a_bias_that_kernels_would_misread_is_refused(device: NotingDevice, rows: int, bias: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=rf"bias: found .* expected {WIDTH} contiguous"):
        call(rows, bias=bias)
    assert not device.launches
    call(rows, bias=torch.zeros(WIDTH, dtype=torch.float16))
    assert device.launches


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_a_dtype_that_no_kernel_reads_is_named(device: NotingDevice, rows: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"found {dtype}, expected torch.float16, torch.bfloat16, torch.float32"):
        call(rows, dtype=dtype)
    assert not device.launches


@pytest.mark.parametrize("rows", [16, 17, 47, 48])
def test_windows_follow_one_another(device: NotingDevice, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(linear, "_WINDOW_BYTES", 1)  # one tile each
    x, out = call(rows, Form(False, 16))
    assert [launch.rows for launch in device.launches] == [16] * (rows // 16) + [rows % 16] * (rows % 16 > 0)
    for index, launch in enumerate(device.launches):
        assert (launch.x, launch.out) == (x[16 * index].data_ptr(), out[16 * index].data_ptr())


def test_a_launch_without_scratch_has_no_more_row_tiles_than_a_grid_takes() -> None:
    shards, limits = (Shard(8, 2, 4096, 4096, 0, 4096),), GpuLimits("sm_100a", 148, 232448, ((2, 74), (4, 36), (8, 16)))
    assert linear.plan(shards, 16, 4096, Form(False, 16), limits).scratch == 0  # a cluster's sums stay in its memory
    (whole, _), (rest, launch) = linear._way_to_serve(
        shards, 1 << 20, 4096, limits, (True, "default"), Form(False, 16), None, None
    )
    assert (whole.start, whole.stop, rest.start) == (0, 65535 * 16, 65535 * 16)
    assert launch.grid[1] == 1


def test_a_call_like_an_earlier_one_decides_nothing_again(
    device: NotingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(3)

    def forbidden(*_: Any) -> None:
        raise AssertionError("decided a second time")

    for name in ("plan", "choose_form", "_window_rows"):
        monkeypatch.setattr(linear, name, forbidden)
    call(3)
    first, second = device.launches
    assert first.kernel == second.kernel
    with pytest.raises(AssertionError, match="a second time"):
        call(2)


@pytest.mark.parametrize(
    ("rows", "name", "value"), [(4, "VLLM_BATCH_INVARIANT", "1"), (6, "VLLM_EXL3_PRECISION", "fast")]
)
def test_the_environment_counts_at_every_call(
    device: NotingDevice, monkeypatch: pytest.MonkeyPatch, rows: int, name: str, value: str
) -> None:
    call(rows)
    usual = len(device.launches)
    monkeypatch.setenv(name, value)
    call(rows)
    monkeypatch.delenv(name)
    call(rows)
    kernels = [launch.kernel for launch in device.launches]
    assert kernels[:usual] == kernels[-usual:]
    assert kernels[usual:-usual] and set(kernels[usual:-usual]).isdisjoint(kernels[:usual])


def test_prompts_go_to_their_own_kernel(device: NotingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[int] = []
    monkeypatch.setattr(linear.prefill, "prefill", lambda x, *_: served.append(x.shape[0]))
    call(300)
    assert served == [300] and not device.launches
