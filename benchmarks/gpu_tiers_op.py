"""One layer of routed experts divided over tiers, timed on a GPU: what ``gpu_tiers.py`` runs as its job ``op``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from vllm_exl3.cuda import moe
from vllm_exl3.cuda.moe_timing import ExpertShape, RandomExperts, copies_for, random_experts
from vllm_exl3.cuda.share import CpuShare, SideStream
from vllm_exl3.cuda.timing import replayed
from vllm_exl3.ops.experts import shift_trellises
from vllm_exl3.ops.moe import MoECall
from vllm_exl3.ops.pinned import PinnedWords
from vllm_exl3.processors import allowed

__all__ = ["op_rows"]

Row = dict[str, Any]
Route = tuple[torch.Tensor, torch.Tensor]

K4_MUL1 = (4, 2)
THREADS = max(1, allowed() - 1)


class Divided:
    """A layer whose trellises lie in GPU memory and, again, in pinned host memory."""

    def __init__(self, layer: RandomExperts, rows: int) -> None:
        self.layer, self.experts = layer, layer.shape.experts
        words = (layer.weights[0], layer.weights[4])
        self.pinned = [PinnedWords(len(part), "a layer", "Free host memory.") for part in words]
        for memory, part in zip(self.pinned, words, strict=True):
            memory.words.copy_(part)
        self.shifts = [
            (memory.device_address - part.data_ptr()) // 2 for memory, part in zip(self.pinned, words, strict=True)
        ]
        self.table = layer.table.cpu()
        self.side = SideStream(THREADS, None, rows, layer.shape.hidden, layer.shape.top_k)

    def bus_gbps(self) -> float:
        """Bandwidth of a plain copy to the GPU."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        target, source = torch.empty_like(self.layer.weights[0]), self.pinned[0].words
        for _ in range(2):
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
        return source.nbytes / begin.elapsed_time(end) / 1e6

    def host_us(self, x: torch.Tensor, routes: Sequence[Route], kept: int) -> float:
        """With the first ``kept`` experts in GPU memory, and the others read over the bus."""
        calls = [self.layer.arguments(route) for route in routes]
        self.layer.table.copy_(shift_trellises(self.table, range(kept, self.experts), *self.shifts))
        us = replayed(lambda index: moe.moe(x, *calls[index]), len(calls))
        self.layer.table.copy_(self.table)
        return us

    def cpu_us(self, x: torch.Tensor, routes: Sequence[Route], kept: int) -> float:
        """The same, with the others computed on the CPU."""
        share, own = self._share(kept), torch.arange(self.experts, dtype=torch.int32)
        own[kept:] = -1
        own = own.cuda()
        calls = [MoECall(*self.layer.arguments(route))._replace(expert_map=own) for route in routes]

        def call(index: int) -> torch.Tensor:
            stream = torch.cuda.current_stream().cuda_stream
            reply = share.enqueue(x, calls[index].topk_weights, calls[index].topk_ids, stream)
            if kept == 0:
                share.join(stream)
                return reply.to(x.dtype)
            result = moe.moe(x, *calls[index], out_dtype=torch.float32)
            share.join(stream)
            return result.add_(reply).to(x.dtype)

        return replayed(call, len(calls))

    def _share(self, kept: int) -> CpuShare:
        weights = [None if part is None else part.cpu() for part in self.layer.weights]
        weights[0], weights[4] = (memory.words for memory in self.pinned)
        none = torch.zeros((1, self.layer.shape.top_k))
        arguments = list(self.layer.arguments((none, none.int())))
        call = MoECall(*arguments[:3], *weights, *arguments[11:])._replace(table=self.table[kept:].contiguous())
        local = torch.arange(self.experts, dtype=torch.int32) - kept
        return CpuShare(self.side, call, local.clamp(min=-1))


def op_rows(shape: Mapping[str, Any], batches: Sequence[int], shares: Sequence[float]) -> Iterator[Row]:
    """Microseconds of one layer by routing, tokens, tier and share of experts in GPU memory."""
    sizes = ExpertShape(shape["experts"], shape["top_k"], shape["hidden"], shape["intermediate"])
    layer = random_experts(sizes, [K4_MUL1])
    layer.prepare()
    divided = Divided(layer, max(batches))
    bus, each = divided.bus_gbps(), layer.nbytes // sizes.experts
    yield {"kernel": "copy", "subject": "bus", "gbps": bus}
    for routing in ("uniform", "zipf"):
        for tokens in batches:
            x = torch.randn(tokens, sizes.hidden, device="cuda", dtype=torch.bfloat16)
            routes = [_route(routing, tokens, sizes, seed) for seed in range(copies_for(tokens))]
            for share in shares:
                kept = round(share * sizes.experts)
                away = sum(int((ids.unique() >= kept).sum()) for _, ids in routes) / len(routes) * each
                row = {"kernel": "native", "subject": "op", "routing": routing, "m": tokens, "resident": share}
                row |= {"host_bytes": away}
                us = divided.host_us(x, routes, kept)
                yield {**row, "tier": "host", "us": us, "gbps": away / us / 1e3, "limit_us": away / bus / 1e3}
                if kept < sizes.experts:
                    us = divided.cpu_us(x, routes, kept)
                    yield {**row, "tier": "cpu", "threads": THREADS, "us": us, "gbps": away / us / 1e3}


def _route(routing: str, tokens: int, shape: ExpertShape, seed: int) -> Route:
    """Weights and experts of some tokens; the lower an expert's number, the more it is used under Zipf's law."""
    generator = torch.Generator("cuda").manual_seed(seed)
    noise = -torch.log(-torch.log(torch.rand((tokens, shape.experts), generator=generator, device="cuda")))
    law = torch.log(torch.arange(1, shape.experts + 1, device="cuda").double()).float()
    ids = (noise - (law if routing == "zipf" else 0)).topk(shape.top_k).indices.int()
    return torch.full(ids.shape, 1 / shape.top_k, device="cuda"), ids
