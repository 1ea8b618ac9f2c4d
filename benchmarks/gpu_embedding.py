#!/usr/bin/env python3
"""Quantized embeddings and n-gram tables on the GPU: are rows right to the bit, and how many come a second.

    python benchmarks/gpu_embedding.py --check            against the PyTorch reference, every kind, K and layout
    python benchmarks/gpu_embedding.py --time [--write]   rows a second of tables beyond the L2, and bytes of each row

A timing is one look-up inside a replayed CUDA graph of several with different random ids; the median of several
replays. `gather_bf16` is torch's look-up in a 16-bit table of the same shape, `reference` this package's in PyTorch.
`pinned` rows lie in host memory that the kernel reads.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from vllm_exl3.cuda import embedding as native
from vllm_exl3.cuda import exllamav3_rows
from vllm_exl3.cuda.timing import copy_bandwidth, replayed
from vllm_exl3.ops.embedding import embedding_reference
from vllm_exl3.ops.ngram import ngram_reference
from vllm_exl3.ops.ngram_tables import MemoryTable, PinnedRows
from vllm_exl3.tools.results import need_gpus, write_results

RESULTS = Path(__file__).parent / "results" / "h200" / "embedding.json"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KINDS = ("int8", "int4", *(f"k{bits}" for bits in range(1, 9)))
GRAPH_CALLS = 12
NGRAM_HEADS = 16


def table_of(kind: str, rows: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A random table of one kind and its scales, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def integers(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device="cuda", dtype=dtype)

    def uniform(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device="cuda") * 0.02 + 0.001

    if kind == "int8":
        return integers(-127, 128, (rows, width), torch.int8), uniform((rows, 1))
    if kind == "int4":
        packed = integers(0, 256, (rows, -(-width // 2)), torch.uint8)
        return packed, uniform((rows, -(-width // 128))).bfloat16()
    groups, words = -(-width // 256), 1 + 16 * int(kind[1:])
    table = integers(-(2**15), 2**15, (rows, groups, words), torch.int16)
    table[..., 0] = uniform((rows, groups)).half().view(torch.int16)
    signs = integers(0, 2, (groups, 256), torch.int16).half() * 2 - 1
    return table.view(rows, groups * words), signs


def ngram_table(rows: int, bits: int, *, pinned: bool = False, seed: int = 0) -> tuple[MemoryTable, object]:
    """A random n-gram table of 16 heads, and what keeps its memory."""
    generator = torch.Generator("cuda").manual_seed(seed)
    holder = PinnedRows(rows, 1 + 10 * bits) if pinned else None
    table = holder.tensor if holder else torch.empty((rows, 1 + 10 * bits), dtype=torch.int16, device="cuda")
    for part in table.split(1 << 22):
        code = torch.randint(-(2**15), 2**15, part.shape, generator=generator, device="cuda", dtype=torch.int16)
        code[:, 0] = (torch.rand(len(code), generator=generator, device="cuda") * 0.05).half().view(torch.int16)
        part.copy_(code)
    bias = (torch.rand((NGRAM_HEADS, 160), generator=generator, device="cuda") * 0.04 - 0.02).half()
    offsets = torch.arange(NGRAM_HEADS, device="cuda") * (rows // NGRAM_HEADS)
    return MemoryTable(table, bias, offsets, 0), holder


def checks() -> Iterator[tuple[str, bool]]:
    """Every comparison by name; all are of bits, against the reference on the CPU."""
    generator = torch.Generator("cuda").manual_seed(1)
    for kind, width in itertools.product(KINDS, (1, 127, 128, 256, 576, 1000, 2880, 5120)):
        table, scales = table_of(kind, 300, width)
        ids = torch.randint(0, 300, (41, 3), generator=generator, device="cuda")
        for dtype, narrow in ((DTYPES[0], False), (DTYPES[1], True), (DTYPES[2], False)):
            ours = native.embedding(ids.int() if narrow else ids, table, scales, width, dtype)
            theirs = embedding_reference(ids.cpu(), table.cpu(), scales.cpu(), width, dtype)
            yield f"{kind} {width} {dtype}", torch.equal(ours.cpu(), theirs)
        outside = torch.tensor([-1, 300, 5], device="cuda")
        zeros = native.embedding(outside, table, scales, width, torch.float32)
        yield f"{kind} {width} outside", bool((zeros[:2] == 0).all())
    for bits, pinned in itertools.product(range(1, 9), (False, True)):
        table, _holder = ngram_table(4001, bits, pinned=pinned)
        ids = torch.randint(0, 4001, (57, NGRAM_HEADS), generator=generator, device="cuda")
        ids[0, :4] = torch.tensor([0, 4000, 249, 250])
        host = MemoryTable(table.rows.cpu(), table.bias.cpu(), table.offsets.cpu(), 0)
        for dtype in DTYPES:
            ours = torch.full((*ids.shape, 160), torch.nan, dtype=dtype, device="cuda")
            theirs = torch.empty(ours.shape, dtype=dtype)
            native.ngram(ids, None, table.rows, table, ours)
            ngram_reference(ids.cpu(), None, host.rows, host, theirs)
            yield f"n-gram k{bits} {'pinned' if pinned else 'resident'} {dtype}", torch.equal(ours.cpu(), theirs)
        distinct, index = torch.unique(ids.cpu(), return_inverse=True)
        packed = host.rows[distinct].cuda()
        native.ngram(ids, index.cuda(), packed, table, ours)
        yield f"n-gram k{bits} by index", torch.equal(ours.cpu(), theirs)
        share = MemoryTable(table.rows[1000:], table.bias, table.offsets, 1000)
        native.ngram(ids - 1000, None, share.rows, share, ours)
        owned = (ids >= 1000).cpu()
        same = torch.equal(ours.cpu()[owned], theirs[owned]) and not ours.cpu()[~owned].any()
        yield f"n-gram k{bits} a rank's share", same
        if exllamav3_rows.unavailable() is None and not pinned:
            exllamav3_rows.ngram(ids, None, table.rows, table, ours)
            yield f"n-gram k{bits} exllamav3", torch.equal(ours.cpu(), theirs)
    yield "graph replay", graph_replays()


def graph_replays() -> bool:
    """A captured look-up follows its ids: resident, and pinned."""
    for pinned in (False, True):
        table, _holder = ngram_table(5000, 5, pinned=pinned)
        ids = torch.zeros((8, NGRAM_HEADS), dtype=torch.int64, device="cuda")
        out, eager = (torch.empty((8, NGRAM_HEADS, 160), dtype=torch.bfloat16, device="cuda") for _ in range(2))
        table(ids, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            table(ids, out)
        ids.copy_(torch.randint(0, 5000, ids.shape, device="cuda"))
        graph.replay()
        native.ngram(ids, None, table.rows, table, eager)
        if not torch.equal(out, eager):
            return False
    return True


def timed(call: Callable[[torch.Tensor], object], rows: int, shape: tuple[int, ...]) -> float:
    """Microseconds of one call with random ids of a shape below ``rows``."""
    every = torch.randint(0, rows, (GRAPH_CALLS, *shape), device="cuda")
    return replayed(lambda i: call(every[i]), GRAPH_CALLS)


def token_rows(counts: list[int], bandwidth: float) -> Iterator[dict[str, object]]:
    """Token embeddings of a 151936-word vocabulary."""
    vocabulary = 151936
    for width in (2560, 5120):
        dense = torch.empty((vocabulary, width), dtype=torch.bfloat16, device="cuda").normal_()
        for kind in ("int8", "int4", "k4", "k6"):
            table, scales = table_of(kind, vocabulary, width)
            per_row = table.shape[1] * table.element_size()
            per_row += scales.shape[1] * scales.element_size() if kind.startswith("int") else 0
            for count in counts:
                calls = {
                    "native": lambda ids: native.embedding(ids, table, scales, width, torch.bfloat16),  # noqa: B023
                    "gather_bf16": lambda ids: torch.nn.functional.embedding(ids, dense),  # noqa: B023
                }
                if count <= 128:
                    calls["reference"] = lambda ids: embedding_reference(ids, table, scales, width, torch.bfloat16)  # noqa: B023
                for kernel, call in calls.items():
                    if kernel == "gather_bf16" and kind != "int8":
                        continue  # once a width
                    us = timed(call, vocabulary, (count,))
                    dense_one = kernel == "gather_bf16"
                    read = 2 * width if dense_one else per_row
                    name = "bf16" if dense_one else kind
                    yield row(kernel, name, count, us, read, 2 * width, bandwidth, width=width)


def ngram_rows(counts: list[int], bandwidth: float) -> Iterator[dict[str, object]]:
    """A 5-bit table of 40 million rows, 16 rows a token."""
    rows, bits = 40_000_000, 5
    words = 1 + 10 * bits
    for place in ("resident", "pinned"):
        table, _holder = ngram_table(rows, bits, pinned=place == "pinned")
        kernels = {"native": native.ngram}
        if place == "resident":
            kernels["reference"] = ngram_reference
            if exllamav3_rows.unavailable() is None:
                kernels["exllamav3"] = exllamav3_rows.ngram
        for count in counts:
            out = torch.empty((count, NGRAM_HEADS, 160), dtype=torch.bfloat16, device="cuda")
            for kernel, function in kernels.items():
                if kernel == "reference" and count > 128:
                    continue
                us = timed(lambda ids: function(ids, None, table.rows, table, out), rows, (count, NGRAM_HEADS))  # noqa: B023
                yield row(kernel, f"ngram_k{bits}_{place}", count * NGRAM_HEADS, us, 2 * words, 320, bandwidth,
                          tokens=count)  # fmt: skip


def row(
    kernel: str, kind: str, lookups: int, us: float, read: int, written: int, bandwidth: float, **more: int
) -> dict[str, object]:
    """One measurement; the limit is what the rows' bytes take at the copy bandwidth."""
    limit = lookups * (read + written) / bandwidth * 1e6
    return {
        "kernel": kernel, "table": kind, "lookups": lookups, **more, "us": round(us, 2), "limit_us": round(limit, 2),
        "lookups_per_s": round(lookups / us * 1e6), "bytes_read_per_lookup": read,
        "gbps": round(lookups * (read + written) / us / 1e3, 1),
    }  # fmt: skip


def main() -> int:
    """Check, time, or both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8, 128, 8192])
    parser.add_argument("--write", action="store_true", help=f"keep the rows in {RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    need_gpus()
    failed = 0
    if arguments.check:
        results = list(checks())
        wrong = [name for name, right in results if not right]
        failed = len(wrong)
        print(f"{len(results)} checks, {failed} failed {wrong[:12]}", flush=True)
    if arguments.time:
        bandwidth = copy_bandwidth()
        print(f"copies at {bandwidth / 1e9:.0f} GB/s", flush=True)
        rows: list[dict[str, object]] = []
        for part in (ngram_rows, token_rows):
            for measured in part(arguments.counts, bandwidth):
                rows.append(measured)
                print(
                    f"{measured['kernel']:12s} {measured['table']:20s} {measured.get('width', ''):>5} "
                    f"{measured['lookups']:7d} {measured['us']:9.2f} us, limit {measured['limit_us']:8.2f}, "
                    f"{measured['lookups_per_s'] / 1e6:9.2f} M/s",
                    flush=True,
                )
                if arguments.write:
                    write_results(
                        arguments.out, rows, machine="h200", command="python benchmarks/gpu_embedding.py --time --write"
                    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
