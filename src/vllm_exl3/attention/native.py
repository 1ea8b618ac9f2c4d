"""Decoding over the int4 KV cache on CUDA kernels of this package: common head sizes on NVIDIA GPUs.

Triton keeps what these do not serve: other heads than `SIZES`, and what `unserved` names.
"""

import ctypes
import functools

import torch

from vllm_exl3.attention.launch import LOG2_E, Problem
from vllm_exl3.attention.layout import content_bytes
from vllm_exl3.attention.native_cut import (
    MERGE_THREADS,
    SIZES,
    THREADS,
    NativeCut,
    cut_of,
    instances_for,
    merge_instance,
    merge_shared_bytes,
)
from vllm_exl3.attention.rotation import device_signs
from vllm_exl3.cuda import runtime
from vllm_exl3.cuda.binding import ELEMENTS
from vllm_exl3.cuda.compiler import compiler_unavailable
from vllm_exl3.cuda.declarations import members

__all__ = [
    "SIZES",
    "KvDecodeArgs",
    "KvMergeArgs",
    "NativeCut",
    "arguments_for",
    "attend",
    "chunk_of",
    "cut_on",
    "merge_arguments_for",
    "prepare",
    "unavailable",
    "unserved",
]


class KvDecodeArgs(ctypes.Structure):
    """``KvDecodeArgs`` of kv/arguments.cuh."""

    _fields_ = members("kv/arguments.cuh", "KvDecodeArgs")


class KvMergeArgs(ctypes.Structure):
    """``KvMergeArgs`` of kv/merge.cuh."""

    _fields_ = members("kv/merge.cuh", "KvMergeArgs", KvDecodeArgs)


@functools.cache
def unavailable(device: torch.device) -> str | None:
    """Why the kernels do not run on a device, in words, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"{device.type} is no NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"compute capability {major}.{minor}; 8.0 is the least"
    return compiler_unavailable()


def unserved(page: int, query: torch.Tensor, output: torch.Tensor, sinks: torch.Tensor | None) -> str | None:
    """Why the kernels do not serve a batch of a layer of `SIZES`, in words, or None.

    Args:
        page: tokens a page.
        query: ``[tokens, heads, D]``.
        output: the same.
        sinks: ``[heads]`` or None.
    """
    if page % 16:
        return f"pages of {page} tokens"
    for name, tensor in (("queries", query), ("outputs", output), ("sinks", sinks)):
        if tensor is not None and tensor.dtype not in ELEMENTS:
            return f"{name} of {tensor.dtype}"
    # 16-bit elements are loaded two at a time.
    if query.data_ptr() % 4 or query.stride(0) % 2:
        return "queries at odd places"
    return None


def cut_on(device: torch.device, group: int, max_query: int, size: int, apart: bool = False) -> NativeCut:
    """`native_cut.cut_of` for a device."""
    return cut_of(group, max_query, size, runtime.device(_index(device)).limits.shared_memory, apart)


def prepare(device: torch.device, size: int, group: int) -> None:
    """Compile and load what a layer may launch, so that no request waits for a compiler."""
    here = runtime.device(_index(device))
    here.prepare(instances_for(size, group, here.limits.shared_memory))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def arguments_for(
    problem: Problem, max_query: int, cut: NativeCut, segments: int, scratch: torch.Tensor
) -> KvDecodeArgs:
    """What one launch takes."""
    cache, query = problem.cache, problem.query
    strides = [cache.stride(axis) for axis in range(3)]
    assert cache.shape[3] == content_bytes(query.shape[2]) and cache.stride(3) == 1
    assert all(stride % 8 == 0 for stride in strides) and cache.data_ptr() % 8 == 0
    page = cache.shape[2]
    programs = cut.programs(problem.requests, problem.kv_heads)
    return KvDecodeArgs(
        cache=cache.data_ptr(),
        query=query.data_ptr(),
        table=problem.table.data_ptr(),
        lengths=problem.lengths.data_ptr(),
        starts=problem.starts.data_ptr(),
        signs=device_signs(query.shape[2], query.device).data_ptr(),
        partial=scratch.data_ptr(),
        stats=scratch.data_ptr() + 4 * programs * segments * cut.rows * cut.size,
        page_stride=strides[0],
        head_stride=strides[1],
        slot_stride=strides[2],
        table_stride=problem.table.stride(0),
        query_stride=query.stride(0),
        page=page,
        page_shift=32 if page & (page - 1) else page.bit_length() - 1,
        segments=segments,
        max_query=max_query,
        block_query=cut.block_query,
        query_blocks=cut.query_blocks,
        group=problem.group,
        kv_heads=problem.kv_heads,
        head_blocks=cut.head_blocks,
        window=problem.window,
        query_type=ELEMENTS[query.dtype],
        scale=problem.scale / query.shape[2] * (1.0 if problem.soft_cap > 0 else LOG2_E),
        soft_cap=problem.soft_cap,
    )


def merge_arguments_for(problem: Problem, decode: KvDecodeArgs, cut: NativeCut) -> KvMergeArgs:
    """What the launch that adds up takes."""
    sinks, output = problem.sinks, problem.output
    return KvMergeArgs(
        decode=decode,
        sinks=0 if sinks is None else sinks.data_ptr(),
        sink_type=0 if sinks is None else ELEMENTS[sinks.dtype],
        output=output.data_ptr(),
        output_stride=output.stride(0),
        output_type=ELEMENTS[output.dtype],
        rows=cut.rows,
    )


def chunk_of(cache: torch.Tensor) -> int:
    """Bytes of a copy: 16 where a page's slots follow each other at multiples of 16, else 8."""
    whole = cache.stride(2) == cache.shape[3] and cache.stride(0) % 16 == cache.stride(1) % 16 == 0
    return 16 if whole and cache.data_ptr() % 16 == 0 else 8


def attend(problem: Problem, max_query: int, cut: NativeCut, segments: int, scratch: torch.Tensor) -> None:
    """Attend requests of at most ``max_query`` query tokens, each split into segments.

    Args:
        problem: the layer, which `unserved` has nothing against; requests of more query tokens are left alone.
        max_query: the same for every replay of a graph.
        cut: of `cut_on`.
        segments: 1 to `native_cut.MOST_SEGMENTS`.
        scratch: float32, at least `NativeCut.scratch_elements`.
    """
    device = runtime.device(_index(problem.query.device))
    decode = arguments_for(problem, max_query, cut, segments, scratch)
    stream = torch.cuda.current_stream(problem.query.device).cuda_stream
    kernel = device.kernel(cut.instance(chunk_of(problem.cache)))
    kernel.allow_shared(cut.shared_bytes)
    blocks = cut.programs(problem.requests, problem.kv_heads) * segments
    dependent = device.limits.dependent_launch
    kernel.launch((blocks, 1), THREADS, cut.shared_bytes, stream, [decode], dependent)
    merge = device.kernel(merge_instance(cut.size))
    rows = problem.requests * max_query * problem.query.shape[1]
    arguments = [merge_arguments_for(problem, decode, cut)]
    shared = merge_shared_bytes(cut.size)
    merge.launch((rows, 1), MERGE_THREADS, shared, stream, arguments, dependent)
