#!/usr/bin/env python3
"""EXL3 packs over two GPUs: tensor, expert, pipeline and data parallel against one GPU, speed, a rank that dies.

    python benchmarks/gpu_two.py all [--out benchmarks/results/h200-x2/two.json] [--seconds 230] [--only NAME ...]
    python benchmarks/gpu_two.py all --cpu --out FILE --only ...    the same on two CPU ranks, to try the script itself

Engines start side by side, since starting is most of what it takes; those whose speed is measured begin when the
others are gone, one after another. Rows are written as they come. What single processes do has commands of its own
(``lane``, ``rank``, ``victim``, ``speed``, ``packs``), which ``all`` starts.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# Multicast of NVLink is not needed for two GPUs, and a machine that is shared may forbid it.
os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.two_jobs import SPEEDS, run_all
from vllm_exl3.tools.results import need_gpus

PACKS = Path(__file__).parents[1] / "tests/data/packs"
RESULTS = Path(__file__).parent / "results/h200-x2/two.json"
_TINY = {"hidden": 256, "intermediate": 512, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 640}


def write_packs(folder: Path, shape: dict[str, int]) -> None:
    """The random packs, each with a file ``complete`` when it is: 128 experts a layer, then the one that is timed."""
    from benchmarks.dense_8b import write_bf16_config
    from vllm_exl3.tools.random_pack import write_random_pack

    experts = write_random_pack(
        folder / "random-128-experts",
        hidden=512,
        intermediate=384,
        layers=2,
        heads=8,
        kv_heads=2,
        head_dim=64,
        vocab=1152,  # nine blocks of 128
        bits=3,
        head_bits=4,
        architecture="Qwen3MoeForCausalLM",
        experts=128,
        dtype="float16",
    )
    (experts / "complete").touch()
    write_bf16_config(folder / "bf16", shape)
    (folder / "bf16" / "complete").touch()
    # beside, since writing replaces a folder that is there
    written = write_random_pack(folder / "exl3.part", **shape, bits=4, head_bits=6)
    (written / "complete").touch()
    written.rename(folder / "exl3")


def main(words: list[str] | None = None) -> None:
    """Command line, or these words in its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("all", "lane", "rank", "victim", "speed", "packs"))
    parser.add_argument("values", nargs="*", help="lane: steps; rank: number, port, step; victim: pack; speed: KIND-N")
    parser.add_argument("--out", type=Path, help="the results file")
    parser.add_argument("--work", type=Path, help="folder of packs, logs and what engines computed")
    parser.add_argument("--seconds", type=float, default=230, help="how long all may take")
    parser.add_argument("--only", nargs="+", help="lanes and speeds whose names begin so")
    parser.add_argument("--cpu", action="store_true", help="on CPU ranks, in float32, with tiny shapes")
    arguments = parser.parse_args(words)
    options: dict[str, Any] = {"dtype": "float32"} if arguments.cpu else {}
    from benchmarks.dense_8b import SHAPE

    shape = _TINY if arguments.cpu else SHAPE
    work: Path = arguments.work or Path("/tmp/exl3-two")  # noqa: S108  on a machine lent for the measurement
    if arguments.command == "all":
        if not arguments.cpu:
            need_gpus(2)
        elif arguments.out is None:
            sys.exit("--cpu needs --out FILE: the usual file has what was measured on GPUs.")
        run_all(
            main,
            work=work,
            packs=PACKS,
            out=arguments.out or RESULTS,
            seconds=arguments.seconds,
            only=arguments.only,
            cpu=arguments.cpu,
        )
        return
    if arguments.command == "packs":
        write_packs(work / "packs", shape)
        return
    from benchmarks import two_engines, two_speed

    if arguments.command == "lane":
        two_engines.lane(work, arguments.values, work / "packs", options)
    elif arguments.command == "rank":
        rank, port, step = arguments.values
        two_engines.data_parallel_rank(int(rank), int(port), step, work, work / "packs", options)
    elif arguments.command == "victim":
        two_engines.generate_until_killed(work / "packs" / arguments.values[0], options)
    else:
        kind, ranks = SPEEDS[arguments.values[0]]
        extra: dict[str, Any] = {"load_format": "dummy"} if kind == "bf16" else {}
        if arguments.cpu:
            extra |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28, "max_num_batched_tokens": 2048}
        pack = work / "packs" / kind
        two_speed.speed(kind, ranks, pack, work, shape, {**extra, **options}, profile=not arguments.cpu)
    sys.stdout.flush()
    os._exit(0)  # vLLM's own shutdown can hang for a minute after the last result


if __name__ == "__main__":
    main()
