"""Decoding over the int4 KV cache: which kernel serves a layer, how a batch is cut for it, and its scratch.

Where a request's bits must not depend on its batch, neither may the cut. A program takes one query token then, always
in as many segments of what that token sees: its bits are the same alone, beside other requests of any number of query
tokens, and beside other drafts of its own request. Batches are served a few requests at a time then, so that scratch
stays bounded though segments do not become fewer as requests become more.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_exl3.attention import native
from vllm_exl3.attention.launch import Config, Problem, attend_segments, partial_elements, rows_of
from vllm_exl3.attention.notes import say_once
from vllm_exl3.attention.settings import Settings
from vllm_exl3.attention.shape import measured_decode_shape
from vllm_exl3.ops.backends import count_call

__all__ = ["ALONE_QUERY", "AS_ASKED", "DECODE_QUERY", "Decoder", "multiprocessors"]

DECODE_QUERY = 8
"""Most query tokens of a request that decodes."""

ALONE_QUERY = 64
"""Most query tokens of a request that is served as if it decoded, alone."""

AS_ASKED = "as the settings ask"
"""Why the Triton kernel decodes, where that is no loss."""

_INVARIANT_SEGMENTS = 4
_INVARIANT_SCRATCH = 256 << 20
"""Bytes."""
_MOST_SEGMENTS = 128
_WARPS_A_MULTIPROCESSOR = 8
"""As many as run at once, at 255 registers a thread."""


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a device; one where it is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@dataclass(frozen=True)
class Decoder:
    """One layer's decoding.

    Attributes:
        group: query heads that share a KV head.
        kv_heads: KV heads of this rank.
        head_size: D.
        settings: what the user set.
    """

    group: int
    kv_heads: int
    head_size: int
    settings: Settings

    def triton_decodes(self, device: torch.device) -> str | None:
        """Why the Triton kernel decodes this layer rather than the CUDA kernels, in words, or None."""
        if self.settings.decode is not None or not self.settings.native:
            return AS_ASKED
        if self.head_size not in native.SIZES:
            return f"heads of {self.head_size}"
        return native.unavailable(device)

    def prepare(self, device: torch.device) -> None:
        """Compile what may decode this layer, so that no request waits for a compiler."""
        if self.triton_decodes(device) is None:
            native.prepare(device, self.head_size, self.group)

    def config(self, requests: int, max_query: int, device: torch.device) -> Config:
        """How the Triton kernel is cut; depends on nothing that changes between replays of a graph."""
        invariant = self.settings.batch_invariant
        rows, block_query, head_blocks = rows_of(self.group, 1 if invariant else max_query)
        programs = requests * -(-max_query // block_query) * self.kv_heads * head_blocks
        shape = self.settings.decode or measured_decode_shape(rows, self.head_size, 0 if invariant else programs)
        if shape.segments is not None:
            segments = shape.segments
        elif invariant:
            segments = _INVARIANT_SEGMENTS
        else:
            wanted = multiprocessors(device) * _WARPS_A_MULTIPROCESSOR / (shape.warps * programs)
            segments = 1
            while segments < _MOST_SEGMENTS and 2 * segments <= wanted:
                segments *= 2
        return Config(shape.tile, shape.warps, segments, shape.stages, apart=invariant)

    def native_cut(self, requests: int, max_query: int, device: torch.device) -> tuple[native.NativeCut, int]:
        """How the CUDA kernels are cut, and their segments; depends on nothing that changes between replays either."""
        invariant = self.settings.batch_invariant
        cut = native.cut_on(device, self.group, max_query, self.head_size, apart=invariant)
        if invariant:
            return cut, _INVARIANT_SEGMENTS
        return cut, cut.segments(requests, self.kv_heads, multiprocessors(device))

    def scratch_elements(self, most_requests: int, device: torch.device) -> int:
        """float32 elements that any batch of up to so many requests may need, or one of up to `ALONE_QUERY` tokens."""
        return _scratch_elements(self, most_requests, device)

    def elements(self, requests: int, max_query: int, device: torch.device) -> int:
        """float32 elements of scratch that a batch takes."""
        config = self.config(requests, max_query, device)
        elements = partial_elements(requests, self.kv_heads, self.group, self.head_size, max_query, config)
        if self.triton_decodes(device) is None:
            cut, segments = self.native_cut(requests, max_query, device)
            elements = max(elements, cut.scratch_elements(requests, self.kv_heads, segments))
        return elements

    def requests_at_once(self, device: torch.device) -> int:
        """Requests of a batch that are served at a time, where bits must not depend on it."""
        # In fours, so that slices of the tensors that tell of requests are as aligned as the whole: Triton compiles
        # other kernels for those that are not.
        return max(1, _INVARIANT_SCRATCH // (16 * _elements_of_one(self, device))) * 4

    def attend(self, problem: Problem, max_query: int) -> None:
        """Attend the requests of at most ``max_query`` query tokens.

        Args:
            problem: the layer's batch; requests of more query tokens are left alone.
            max_query: the same for every replay of a graph.
        """
        device = problem.query.device
        reason = self.triton_decodes(device)
        if reason is None:
            reason = native.unserved(problem.cache.shape[2], problem.query, problem.output, problem.sinks)
            if reason is not None:
                say_once(f"the Triton kernel decodes a batch over the int4 KV cache, not the CUDA kernels: {reason}")
        count_call("int4_attention", "native" if reason is None else "triton", "Attention")
        for part in self._parts(problem):
            if reason is None:
                self._attend_native(part, max_query)
            else:
                self._attend_triton(part, max_query)

    def _parts(self, problem: Problem) -> Iterator[Problem]:
        if not self.settings.batch_invariant:
            yield problem
            return
        step = self.requests_at_once(problem.query.device)
        for first in range(0, problem.requests, step):
            yield problem.of_requests(first, min(first + step, problem.requests))

    def _attend_native(self, problem: Problem, max_query: int) -> None:
        device = problem.query.device
        cut, segments = self.native_cut(problem.requests, max_query, device)
        elements = cut.scratch_elements(problem.requests, self.kv_heads, segments)
        native.attend(problem, max_query, cut, segments, torch.empty(elements, dtype=torch.float32, device=device))

    def _attend_triton(self, problem: Problem, max_query: int) -> None:
        device = problem.query.device
        config = self.config(problem.requests, max_query, device)
        scratch = None
        if config.segments > 1:
            elements = partial_elements(problem.requests, self.kv_heads, self.group, self.head_size, max_query, config)
            scratch = torch.empty(elements, dtype=torch.float32, device=device)
        attend_segments(problem, max_query, config, scratch)


@functools.cache  # asked for by every call where bits must not depend on the batch
def _elements_of_one(decoder: Decoder, device: torch.device) -> int:
    return decoder.elements(1, DECODE_QUERY, device)


@functools.cache  # layers that are alike are many, and so are batches
def _scratch_elements(decoder: Decoder, most_requests: int, device: torch.device) -> int:
    batches = [] if decoder.settings.batch_invariant else [(1, 2**power) for power in range(ALONE_QUERY.bit_length())]
    if decoder.settings.batch_invariant:
        most_requests = min(most_requests, decoder.requests_at_once(device))
    batches += [(count, query) for count in range(1, most_requests + 1) for query in range(1, DECODE_QUERY + 1)]
    return max(decoder.elements(*batch, device) for batch in batches)
