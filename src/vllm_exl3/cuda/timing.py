"""Timing of whole linears the way they run when served: replayed CUDA graphs over more weights than the L2 holds."""

import functools
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm_exl3.cuda import linear, prefill_int8, runtime
from vllm_exl3.cuda.geometry import Form
from vllm_exl3.cuda.narrow_partition import NarrowPartition
from vllm_exl3.ops.shards import Shard, pack_shards

__all__ = [
    "Rotation",
    "bound_us",
    "copy_bandwidth",
    "cublas_us",
    "dense_weights",
    "limit_us",
    "linear_us",
    "random_trellis",
    "random_weights",
    "replayed",
    "replayed_in_turns",
    "rotated_copies",
]

_ROTATED_BYTES, _MOST_COPIES = 320e6, 1024
"""Bytes of weights that a graph goes round over, and the most calls that it has for it."""

_INSTRUCTIONS_A_WEIGHT = 3.0

_OPERATIONS_A_CYCLE = {80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 103: 8192, 120: 1024, 121: 1024}
"""Rate of a multiprocessor's tensor cores, in dense products of fp16 with sums in fp32, by compute capability: what
NVIDIA's architecture papers give for the fastest card of each."""

_CLOCK_KHZ = 1_980_000
"""Clock of an H200's multiprocessors, where torch does not tell a GPU's."""


def random_trellis(words: int) -> torch.Tensor:
    """int16 words: random bits are a valid trellis."""
    return torch.randint(-(2**15), 2**15, (words,), device="cuda", dtype=torch.int16)


def random_weights(shard: Shard, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A trellis, and channel scales of both signs that are no powers of two."""
    generator = torch.Generator("cuda").manual_seed(seed)
    trellis = torch.randint(
        -(2**15), 2**15, (shard.trellis_words,), generator=generator, device="cuda", dtype=torch.int16
    )

    def scale(size: int) -> torch.Tensor:
        sign = torch.randint(0, 2, (size,), generator=generator, device="cuda") * 2 - 1
        return (sign * (0.5 + torch.rand(size, generator=generator, device="cuda"))).half()

    return trellis, scale(shard.in_features), scale(shard.out_features)


def replayed(call: Callable[[int], object], copies: int, repeats: int = 7) -> float:
    """Median microseconds of one call in a graph of ``copies`` calls."""
    return replayed_in_turns({"": (call, copies)}, repeats)[""]


def replayed_in_turns(calls: Mapping[str, tuple[Callable[[int], object], int]], repeats: int = 7) -> dict[str, float]:
    """Median microseconds of one of several calls each, in replays that take turns: all of them see the same clocks.

    Args:
        calls: by name, a call and how many of it make a graph.
        repeats: replays of each.
    """
    graphs = {name: _captured(call, copies) for name, (call, copies) in calls.items()}
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, graph in graphs.items():
            events[0].record()
            graph.replay()
            events[1].record()
            torch.cuda.synchronize()
            if repeat >= 2:
                times[name].append(events[0].elapsed_time(events[1]) * 1e3 / calls[name][1])
    return {name: statistics.median(values) for name, values in times.items()}


def _captured(call: Callable[[int], object], copies: int) -> torch.cuda.CUDAGraph:
    with torch.cuda.stream(torch.cuda.Stream()):
        for index in range(2):
            call(index % copies)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(copies):
            call(index)
    return graph


def rotated_copies(nbytes: int) -> int:
    """How many copies of weights a graph goes round over: more than the L2 holds, but of layers below 50 kB."""
    return max(3, min(_MOST_COPIES, math.ceil(_ROTATED_BYTES / nbytes)))


class Rotation:
    """Weight copies of one shape, cut from one buffer that is larger than the L2 several times over.

    Args:
        shape: in and out features.
        half_bits: 2·K.
        codebook: a `Codebook` value.
        buffer: int16, at least one copy long.
    """

    def __init__(self, shape: tuple[int, int], half_bits: int, codebook: int, buffer: torch.Tensor) -> None:
        self.shard = Shard(half_bits, codebook, *shape, 0, shape[1])
        words = self.shard.trellis_words
        self.copies = rotated_copies(2 * words)
        step = min(words, (buffer.numel() - words) // self.copies // 1024 * 1024)
        self.trellis = [buffer[index * step : index * step + words] for index in range(self.copies)]
        _, self.suh, self.svh = random_weights(Shard(2, codebook, *shape, 0, shape[1]), 1)
        self.layout = tuple(pack_shards([self.shard]))

    def time(
        self,
        x: torch.Tensor,
        form: Form | None = None,
        partition: NarrowPartition | None = None,
        rotated: bool | None = None,
    ) -> float:
        """Microseconds of one linear."""
        return replayed(
            lambda i: linear.linear(
                x,
                self.trellis[i],
                self.suh,
                self.svh,
                None,
                self.layout,
                form=form,
                partition=partition,
                rotated=rotated,
            ),
            self.copies,
        )


def linear_us(shape: tuple[int, int], half_bits: int, codebook: int, rows: int) -> float:
    """Microseconds of one linear of the native kernels on float16 input."""
    words = shape[0] * shape[1] * half_bits // 32
    rotation = Rotation(shape, half_bits, codebook, random_trellis(max(4 * words, int(_ROTATED_BYTES / 2) + words)))
    return rotation.time(torch.randn(rows, shape[0], device="cuda", dtype=torch.float16))


def dense_weights(shape: tuple[int, int]) -> list[torch.Tensor]:
    """bfloat16 weights ``[out, in]`` of an (in, out) shape, as many copies as the L2 cannot hold."""
    copies = max(3, math.ceil(_ROTATED_BYTES / (2 * shape[0] * shape[1])))
    return [torch.randn(shape[1], shape[0], device="cuda", dtype=torch.bfloat16) for _ in range(copies)]


def cublas_us(shape: tuple[int, int], rows: int) -> float:
    """Microseconds of torch's bf16 linear of the same shape."""
    dense, x = dense_weights(shape), torch.randn(rows, shape[0], device="cuda", dtype=torch.bfloat16)
    return replayed(lambda i: torch.nn.functional.linear(x, dense[i]), len(dense))


@functools.cache
def copy_bandwidth() -> float:
    """Bytes a second that large copies read and write; in a graph they would take the slower copy engine."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rates = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        rates.append(20 * source.numel() / (begin.elapsed_time(end) * 1e-3))
    return statistics.median(rates)


def bound_us(nbytes: float, weights: float, operations: float, *, int8: bool = False) -> float:
    """Microseconds below which the current GPU cannot stay, whatever kernel runs.

    The largest of three times: to read ``nbytes``; to issue three instructions for each of ``weights``; and to do
    ``operations`` (two a product) on the tensor cores, by the rates that the GPU states.

    Args:
        nbytes: bytes that must come from memory.
        weights: weights that must be decoded.
        operations: multiplications and additions.
        int8: whether products are of int8, of which there are twice as many a second.
    """
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    cycles = properties.multi_processor_count * 1e3 * (getattr(properties, "clock_rate", 0) or _CLOCK_KHZ)
    capability = 10 * properties.major + properties.minor
    rate = _OPERATIONS_A_CYCLE.get(capability, max(_OPERATIONS_A_CYCLE.values())) * (2 if int8 else 1)
    decoding = weights * _INSTRUCTIONS_A_WEIGHT / (4 * 32 * cycles)
    return 1e6 * max(nbytes / _read_bandwidth(properties), decoding, operations / (rate * cycles))


def _read_bandwidth(properties: Any) -> float:
    """Bytes a second that the memory can deliver; where a GPU does not state it, what a copy moves, which is less."""
    clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2 * clock * 1e3 * width / 8 or copy_bandwidth()


def limit_us(shape: tuple[int, int], half_bits: int, codebook: int, rows: int) -> float:
    """`bound_us` of one linear as `linear_us` times it."""
    count = shape[0] * shape[1]
    shards = (Shard(half_bits, codebook, *shape, 0, shape[1]),)
    int8 = prefill_int8.serves(shards, rows, runtime.device(torch.cuda.current_device()).limits)
    return bound_us(count * half_bits / 16, count, 2 * count * rows, int8=int8)
