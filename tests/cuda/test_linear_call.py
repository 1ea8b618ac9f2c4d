"""What a call of the linear op launches, on a device that only takes notes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from vllm_exl3.cuda import linear
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.geometry import Form, GpuLimits
from vllm_exl3.ops.shards import Shard, pack_shards

SHARDS = (Shard(8, 2, 256, 512, 0, 512), Shard(8, 2, 256, 256, 0, 200))
WIDTH = 712


@dataclass
class Noted:
    """One launch: its kernel, the rows it was told of, where the first of them lies, and all that it was told."""

    kernel: str
    rows: int
    x: int
    out: int
    told: Any


@dataclass
class NotingDevice:
    """Stands in for `runtime.Device`, and for its kernels."""

    limits: GpuLimits = field(default_factory=lambda: GpuLimits("sm_90a", 132, 232448))
    launches: list[Noted] = field(default_factory=list)
    label: str = ""
    launcher: None = None  # so that what a launch is passed can be noted

    def counters(self, stream: int, count: int) -> int:
        return 4096

    def kernel(self, instance: Instance) -> "NotingDevice":
        self.label = instance.label
        return self

    def allow_shared(self, size: int) -> None:
        """Nothing to raise."""

    def launch(self, grid: Any, threads: int, shared: int, stream: int, arguments: list[Any], *_: Any) -> None:
        (told,) = arguments
        copy = type(told).from_buffer_copy(told)
        self.launches.append(Noted(self.label, told.rows, told.x, told.out, copy))


@pytest.fixture
def device(
    monkeypatch: pytest.MonkeyPatch, in_place_of_the_device: Callable[[NotingDevice], NotingDevice]
) -> Iterator[NotingDevice]:
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_EXL3_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    linear._steps.cache_clear()
    yield in_place_of_the_device(NotingDevice())
    linear._steps.cache_clear()


def call(
    rows: int,
    form: Form | None = None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    stride: int = 300,
) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros(rows, stride, dtype=dtype)[:, :256]
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
    settings = (True, "default")
    whole, rest = linear._steps(shards, 1 << 20, 4096, limits, settings, Form(False, 16), None, None)
    assert (whole.rows, rest.rows) == (slice(0, 65535 * 16), slice(65535 * 16, 2 * 65535 * 16))
    assert rest.plan.grid == (rest.plan.grid[0], 1)


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


def test_prompts_go_to_their_own_kernel(device: NotingDevice) -> None:
    call(300)
    assert [launch.rows for launch in device.launches] == [300, 300]
    assert all("prefill" in launch.kernel for launch in device.launches)


@pytest.mark.parametrize(
    ("dtype", "stride", "precision", "kernels"),
    [
        (torch.bfloat16, 304, "default", ["rotate", ""]),
        (torch.float16, 256, "default", ["rotate", ""]),
        (torch.bfloat16, 300, "default", ["transform", ""]),  # rows that begin between vectors of 16 bytes
        (torch.float32, 304, "default", ["transform", ""]),
        (torch.bfloat16, 304, "fast", ["quantize", "int8"]),
        (torch.float32, 300, "fast", ["quantize", "int8"]),
    ],
)
def test_prompts_are_rotated_by_the_kernel_that_can_load_them(
    device: NotingDevice,
    dtype: torch.dtype,
    stride: int,
    precision: str,
    kernels: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_EXL3_PRECISION", precision)
    x, out = call(300, dtype=dtype, stride=stride)
    names = [launch.kernel.removeprefix("exl3_prefill").strip("_").partition("_")[0] for launch in device.launches]
    assert [name if name.isalpha() or name == "int8" else "" for name in names[:2]] == kernels
    assert names[2:] in ([], ["finish"])
    assert {(launch.rows, launch.x, launch.out) for launch in device.launches} == {(300, x.data_ptr(), out.data_ptr())}


def test_long_prompts_are_served_in_even_windows(device: NotingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear.prefill, "_WINDOW_BYTES", 512 * 2 * 512)  # of two shards of 256 inputs: 512 rows
    linear.prefill.window_rows.cache_clear()
    try:
        x, out = call(1300)
    finally:
        linear.prefill.window_rows.cache_clear()
    told = list(dict.fromkeys((launch.rows, launch.x, launch.out) for launch in device.launches))
    assert told == [
        (rows, x[first].data_ptr(), out[first].data_ptr()) for first, rows in ((0, 512), (512, 512), (1024, 276))
    ]


@pytest.mark.parametrize("rows", [1, 24, 300])
def test_more_shards_than_a_launch_takes_are_served_in_groups(device: NotingDevice, rows: int) -> None:
    shards = [Shard(8 - 2 * (index % 2), 2, 256, 128 * (1 + index), 5, 100 + index) for index in range(11)]
    words, inputs, outputs, width = (
        sum(counts)
        for counts in zip(*((s.trellis_words, s.in_features, s.out_features, s.crop_size) for s in shards), strict=True)
    )
    trellis = torch.zeros(words, dtype=torch.int16)
    suh, svh = torch.zeros(inputs, dtype=torch.float16), torch.zeros(outputs, dtype=torch.float16)
    bias, x = torch.zeros(width, dtype=torch.bfloat16), torch.zeros(rows, 256, dtype=torch.bfloat16)
    out = linear.linear(x, trellis, suh, svh, bias, pack_shards(shards))
    assert out.shape == (rows, width)
    first, second = ([launch for launch in device.launches if launch.told.shard_count == count] for count in (8, 3))
    assert first and second and len(first) + len(second) == len(device.launches)
    for launches, at in ((first, 0), (second, 8)):
        before = shards[:at]
        column = sum(shard.crop_size for shard in before)
        for launch in launches:
            told = launch.told
            assert (launch.x, launch.out) == (x.data_ptr(), out[:, column:].data_ptr())
            assert told.out_stride == width and told.bias == bias[column:].data_ptr()
            for index, shard in enumerate(shards[at : at + 8]):
                held, ahead = told.shards[index], shards[: at + index]
                assert held.trellis == trellis[sum(s.trellis_words for s in ahead) :].data_ptr()
                assert held.suh == suh[sum(s.in_features for s in ahead) :].data_ptr()
                assert held.svh == svh[sum(s.out_features for s in ahead) :].data_ptr()
                assert (held.crop_start, held.crop_size) == (5, shard.crop_size)
                assert held.out_column == sum(s.crop_size for s in shards[at : at + index])
