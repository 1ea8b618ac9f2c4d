#!/usr/bin/env python3
"""Memory of a served pack on the CPU: resident weights, the peak while loading, and the linears' scratch.

    python benchmarks/memory.py PACK ... [--generate-gib 4] [--write]

* resident: bytes of the model's parameters and buffers over the pack's bytes;
* loading: the highest anonymous memory (RssAnon; mapped files do not count) while vLLM loads the model,
  above what the engine held before, over the pack's bytes: 2 would mean a second copy;
* scratch: anonymous memory that one call of the linear op needs beyond its output, by layer size.
"""

import argparse
import multiprocessing
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack import Pack
from vllm_exl3.tools.random_pack import write_random_pack
from vllm_exl3.tools.results import write_results

RESULTS = Path(__file__).parent / "results" / "cpu" / "memory.json"
SCRATCH_SHAPES = ((4096, 4096), (4096, 14336), (8192, 28672))
SCRATCH_ROWS = (1, 128)


def anonymous_bytes() -> int:
    """RssAnon of this process: memory that belongs to no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no RssAnon")


@contextmanager
def peak_anonymous() -> Iterator[Callable[[], int]]:
    """Sample RssAnon from another thread; the yielded function gives the highest value so far."""
    seen = [anonymous_bytes()]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            seen[0] = max(seen[0], anonymous_bytes())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield lambda: max(seen[0], anonymous_bytes())
    finally:
        done.set()
        thread.join()


def load(folder: str) -> dict[str, Any]:
    """Serve one pack in this process and measure; meant for a process of its own."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    from tests.serving.engine import engine, generate, model_of

    original = BaseModelLoader.load_model
    measured: dict[str, int] = {}

    def load_model(self: BaseModelLoader, *args: Any, **kwargs: Any) -> Any:
        before = anonymous_bytes()
        with peak_anonymous() as peak:
            model = original(self, *args, **kwargs)
            measured["peak"] = peak() - before
        measured["after"] = anonymous_bytes() - before
        return model

    BaseModelLoader.load_model = load_model  # type: ignore[method-assign]
    with engine(folder, dtype="bfloat16") as llm:
        model = model_of(llm)
        tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
        generate(llm, [[1, 2, 3]], 4)
    stored = Pack.open(folder).nbytes
    return {
        "kernel": "native",
        "subject": "load",
        "pack": Path(folder).name,
        "pack_bytes": stored,
        "resident_bytes": sum(tensors.values()),
        "resident_over_pack": sum(tensors.values()) / stored,
        "peak_anonymous_bytes": measured["peak"],
        "peak_over_pack": measured["peak"] / stored,
        "after_over_pack": measured["after"] / stored,
    }


def scratch(shape: tuple[int, int], rows: int) -> dict[str, Any]:
    """Anonymous memory that one call of the linear op needs; meant for a process of its own."""
    import torch

    import vllm_exl3.ops.linear  # noqa: F401  registers the op

    width, height = shape
    shard = Shard(8, 2, width, height, 0, height)
    trellis = torch.randint(-(1 << 15), 1 << 15, (shard.trellis_words,), dtype=torch.int16)
    suh, svh = torch.randn(width).half(), torch.randn(height).half()
    x = torch.randn(rows, width).bfloat16()
    call = torch.ops.vllm_exl3.linear
    call(x[:1, :128], trellis[: 128 * 128 * 4 // 16], suh[:128], svh[:128], None, [8, 2, 128, 128, 0, 128], "warm-up")
    before = anonymous_bytes()
    with peak_anonymous() as peak:
        for _ in range(20):
            output = call(x, trellis, suh, svh, None, pack_shards([shard]), "scratch")
        grown = peak() - before
    return {
        "kernel": "native",
        "subject": "scratch",
        "in": width,
        "out": height,
        "m": rows,
        "output_bytes": output.nbytes,
        "scratch_bytes": max(0, grown - 2 * output.nbytes),
    }


def main() -> None:
    """Measure, print, and write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", nargs="*", type=Path)
    parser.add_argument("--generate-gib", type=float, default=0, help="also a generated 8B-shaped pack of this size")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS}")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        packs = [str(pack) for pack in arguments.packs]
        if arguments.generate_gib:
            packs.append(str(generate(Path(temporary), arguments.generate_gib)))
        for pack in packs:
            rows.append(in_a_fresh_process(load, pack))
            row = rows[-1]
            print(
                f"{row['pack']}: {row['pack_bytes'] / 2**20:.0f} MiB stored, "
                f"resident {row['resident_over_pack']:.3f}, peak while loading {row['peak_over_pack']:.3f} of it"
            )
    for shape in SCRATCH_SHAPES:
        for count in SCRATCH_ROWS:
            rows.append(in_a_fresh_process(scratch, shape, count))
            print(f"{shape[0]}x{shape[1]}, {count} rows: scratch {rows[-1]['scratch_bytes'] / 2**20:.1f} MiB")
    if arguments.write:
        packs = " ".join(pack.name for pack in arguments.packs)
        command = f"python benchmarks/memory.py {packs} --generate-gib {arguments.generate_gib:g} --write"
        write_results(RESULTS, rows, machine="cpu", command=command)


def generate(folder: Path, gibibytes: float) -> Path:
    """A Llama-3-8B-shaped pack at 4 bits with as many layers as make up the size."""
    layer_bytes = (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336) // 2
    return write_random_pack(
        folder / f"random-{gibibytes:g}-gib",
        hidden=4096,
        intermediate=14336,
        layers=max(1, int(gibibytes * 2**30 / layer_bytes)),
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=32000,
    )


def in_a_fresh_process(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Run a measurement where nothing else has allocated before."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


if __name__ == "__main__":
    main()
