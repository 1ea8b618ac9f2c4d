#!/usr/bin/env python3
"""Routed experts on the CPU in one call of the library, beside one linear after another, which they were before.

    python benchmarks/cpu_moe.py [--tokens 1 8 32 128] [--shape 2048x768] [--experts 128] [--top-k 8] [--write]

Both ways take turns, with another routing at every turn; the layer exceeds the caches. One thread is measured in CPU
time, which other work on the machine changes little: the least of some turns. All threads are measured in wall time:
one token as the least of hundreds of turns, among which some had the processors to themselves, more tokens only where
others kept at most a quarter of a processor busy. Results are written kind by kind, each in place of its earlier rows.
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_exl3.cpu import backend
from vllm_exl3.cpu.context import Context
from vllm_exl3.cpu.library import library
from vllm_exl3.cpu.moe import moe_struct, run_struct
from vllm_exl3.ops.experts import pack_table, projection_kinds
from vllm_exl3.ops.moe import MoECall
from vllm_exl3.ops.moe_by_expert import grouped_experts
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.processors import allowed, busy_by_others, measure_others
from vllm_exl3.tools.expert_layout import lay_out_experts
from vllm_exl3.tools.results import write_results

RESULTS = Path(__file__).parent / "results" / "cpu" / "cpu_moe.json"
KINDS = [*((bits, Codebook.MUL1) for bits in (2, 3, 4, 6)), (4, Codebook.MCG), (4, Codebook.INST3)]
ROUTINGS = 16
TURNS = {1: 300, 8: 40, 32: 16}
"""Turns by the most tokens that have as many; others have 6."""

IDLE = 0.25
"""Processors that others may keep busy beside all threads and several tokens."""

Clock = Callable[[], float]


class Layer:
    """Random experts of one kind, and calls of them with several routings."""

    def __init__(self, bits: float, codebook: Codebook, shape: tuple[int, int], experts: int, top_k: int) -> None:
        self.hidden, self.intermediate = shape
        self.experts, self.top_k = experts, top_k
        projections, sizes = lay_out_experts(experts, *shape, [(bits, codebook)])
        rng = np.random.default_rng(0)
        self.tensors: list[torch.Tensor | None] = []
        for words, suh, svh, _ in (sizes["w13"], sizes["w2"]):
            trellis = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, words, dtype=np.int16))
            self.tensors += [trellis, torch.ones(suh).half(), torch.full((svh,), 0.02).half(), None]
        self.table, self.kinds = pack_table(projections), projection_kinds(projections)

    def calls(self, tokens: int) -> list[MoECall]:
        """Each with a routing of its own, in which every token has ``top_k`` different experts."""
        generator = torch.Generator().manual_seed(tokens)
        found = []
        for _ in range(ROUTINGS):
            chosen = torch.rand((tokens, self.experts), generator=generator).topk(self.top_k)
            weights = chosen.values / chosen.values.sum(dim=1, keepdim=True)
            routing = (weights, chosen.indices.int(), None)
            activation = ("swiglu", 1.0, 0.0, math.inf, False)
            found.append(MoECall(*routing, *self.tensors, self.table, self.kinds, self.intermediate, *activation))
        return found

    def weights(self, call: MoECall) -> int:
        """Weights of the experts that a call uses, each counted once."""
        return int(call.topk_ids.unique().numel()) * 3 * self.hidden * self.intermediate


def compare(layer: Layer, tokens: int, threads: int) -> list[dict[str, Any]]:
    """A row of each way."""
    clock: Clock = time.process_time if threads == 1 else time.perf_counter
    torch.set_num_threads(threads)
    x = torch.randn(tokens, layer.hidden).bfloat16()
    calls, out = layer.calls(tokens), torch.empty_like(x)
    turns = next((count for most, count in TURNS.items() if tokens <= most), 6)
    with Context(threads) as context:
        made = [moe_struct(x, call, out, context) for call in calls]
        ways: dict[str, Callable[[int], object]] = {
            "native": lambda turn: run_struct(made[turn][0]),
            "by_expert": lambda turn: grouped_experts(backend.linear, x, calls[turn]),
        }
        least = dict.fromkeys(ways, math.inf)
        rate = dict.fromkeys(ways, 0.0)
        start, before = time.monotonic(), busy_by_others()
        for turn in range(-1, turns):
            for name, way in ways.items():
                begin = clock()
                way(turn % ROUTINGS)
                took = clock() - begin
                if turn >= 0:
                    least[name] = min(least[name], took)
                    rate[name] = max(rate[name], layer.weights(calls[turn % ROUTINGS]) / took)
        after = busy_by_others()
    others = None if before is None or after is None else (after - before) / (time.monotonic() - start)
    return [
        {"kernel": name, "m": tokens, "threads": threads, "us": round(least[name] * 1e6, 1)}
        | {"gweights": round(rate[name] / 1e9, 2), "over_by_expert": round(least["by_expert"] / least[name], 3)}
        | {"others": None if others is None else round(max(others, 0), 2)}
        for name in ways
    ]


def main() -> None:
    """Measure, print, and write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--shape", default="2048x768", help="channels that enter and leave, and those between")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/cpu/cpu_moe.json")
    arguments = parser.parse_args()
    hidden, intermediate = map(int, arguments.shape.split("x"))
    shape = {"experts": arguments.experts, "top_k": arguments.top_k, "hidden": hidden, "intermediate": intermediate}
    for bits, codebook in KINDS:
        layer = Layer(bits, codebook, (hidden, intermediate), arguments.experts, arguments.top_k)
        kind = {**shape, "bits": bits, "codebook": codebook.label}
        rows: list[dict[str, Any]] = []
        for tokens in arguments.tokens:
            for threads in sorted({1, allowed()}):
                if threads > 1 and tokens > 1 and (measure_others() or 0) > IDLE:
                    continue
                rows += [{**kind, **row} for row in compare(layer, tokens, threads)]
        for row in rows:
            print(
                f"{codebook.label:5s} K={bits} M={row['m']:<4d}{row['threads']} threads {row['kernel']:10s}"
                f"{row['us']:9.0f} us, {row['gweights']:6.2f} G weights/s, "
                f"{row['over_by_expert']:.2f} x by expert, others {row['others']}",
                flush=True,
            )
        if arguments.write:
            write_results(
                RESULTS,
                rows,
                machine="cpu",
                command="python benchmarks/cpu_moe.py --write",
                replaces=lambda row, kind=kind: kind.items() <= row.items(),
                facts={
                    "isa": library().exl3_isa().decode(),
                    "time": "one thread: least CPU time; more: least wall time",
                },
            )


if __name__ == "__main__":
    main()
