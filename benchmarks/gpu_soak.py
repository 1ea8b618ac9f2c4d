"""Four servers on one GPU under clients of every kind: a dense pack, one with experts, an int4 KV cache, and adapters.

    python benchmarks/gpu_soak.py --seconds 300

Clients, bursts and canaries are soak.py's, and so is what counts as wrong. Servers start as `vllm serve` does by
default, compiled and with CUDA graphs, each with clients in a process of its own, and load the GPU together; all but
the one with adapters run under VLLM_BATCH_INVARIANT=1, so that their canaries must be equal to the bit. Memory is that
of the server's processes, and what is used of the GPU by all of them. Exits with 1 where soak.py would.
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import soak
from soak import ADAPTERS, LENGTH, PACK, adapter

from vllm_exl3.demo.server import Server, choose_port, vllm_command
from vllm_exl3.tools.random_pack import write_random_pack
from vllm_exl3.tools.results import need_gpus, write_results

RESULTS = soak.ROOT / "benchmarks" / "results" / "h200" / "soak.json"

SHAPE = {"hidden": 1024, "intermediate": 2816, "layers": 4, "heads": 8, "kv_heads": 4, "head_dim": 128, "vocab": 640}
"""Of the packs, but for that of adapters, which `soak.adapter` is made for."""

SERVERS: dict[str, list[str]] = {
    "dense": [],
    "experts": [],
    "int4 KV cache": ["--kv-cache-dtype", "int4_per_token_head"],
    "adapters": ["--dtype", "float16", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules"],
}
"""Each kind's own options of ``vllm serve``."""


def pack(folder: Path, kind: str) -> Path:
    """A pack of a kind, with a tokenizer of its vocabulary."""
    if kind == "adapters":
        return Path(shutil.copytree(PACK, folder))
    experts = {"experts": 32, "intermediate": 768, "architecture": "Qwen3MoeForCausalLM"} if kind == "experts" else {}
    write_random_pack(folder, **{**SHAPE, **experts})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PACK / name, folder / name)
    return folder


def serve(place: Path, kind: str) -> Server:
    """The server of a kind, starting."""
    folder, port = pack(place / "pack", kind), choose_port()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_BATCH_INVARIANT": str(int(kind != "adapters")),
    }
    command = [*vllm_command(), "serve", str(folder), "--served-model-name", "base", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--max-model-len", str(LENGTH), "--max-num-seqs", "128"]
    command += ["--max-num-batched-tokens", "2048", "--disable-uvicorn-access-log"]
    command += ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(1 << 30)]
    command += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    command += SERVERS[kind]
    if kind == "adapters":
        command += [f"{name}={adapter(place / name, seed)}" for seed, name in enumerate(ADAPTERS)]
    return Server(command, port=port, log=place / "log", environment=environment)


class WithoutAdapters(soak.Soak):
    """soak.py's clients, of a server that has no adapters."""

    async def _adapter(self) -> None:
        await self._post(self._body(model=self._chance.choice(ADAPTERS)), 404)


def load(kind: str, place: Path, seconds: float, clients: int, burst: int) -> dict[str, Any]:
    """Serve a kind and keep its clients at it; its row."""
    behaviour = soak.Soak if kind == "adapters" else WithoutAdapters
    with serve(place, kind) as server:
        server.wait_healthy(300)
        used, over = [], threading.Event()
        watch = threading.Thread(target=_watch_gpu, args=(used, over))
        watch.start()
        try:
            done, samples = asyncio.run(soak.soak(server.port, server.pid, seconds, clients, burst, behaviour))
        finally:
            over.set()
            watch.join()
        tracebacks = server.log_text().count("Traceback")
    tokens = {tuple(ids) for ids, _ in done.canary}
    return {
        "subject": kind,
        "seconds": round(samples[-1][0]),
        "requests": done.ends.total() - done.ends["bursts"] + sum(done.wrong.values()) + len(done.canary),
        "by_kind": dict(sorted(done.ends.items())),
        "wrong": dict(done.wrong),
        "stuck": sum(count for what, count in done.wrong.items() if what.endswith("stuck")),
        "canaries": len(done.canary),
        "canary_answers": len(tokens),
        "canary_bits": len({str(answer) for answer in done.canary}),
        "canary_spread": soak.spread(done.canary),
        "tracebacks_in_log": tracebacks,
        "memory_mib": [round(samples[0][1] / 2**20), round(samples[-1][1] / 2**20)],
        "memory_drift": round(soak.drift(samples), 5),
        "gpu_memory_mib": [round(used[0][1] / 2**20), round(used[-1][1] / 2**20)] if used else None,
        "gpu_memory_drift": round(soak.drift(used), 5) if used else None,
        "first_token_p50_s": round(statistics.median(done.first_token), 3),
        "first_token_p99_s": round(statistics.quantiles(done.first_token, n=100)[98], 3),
    }


def _watch_gpu(used: list[tuple[float, int]], over: threading.Event) -> None:
    """Note every few seconds how many bytes of the GPU are used."""
    begin = time.monotonic()
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    while not over.wait(3):
        with contextlib.suppress(OSError, subprocess.CalledProcessError, ValueError):
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            used.append((time.monotonic() - begin, int(text) << 20))


def sound(row: dict[str, Any]) -> bool:
    """True where nothing was wrong, and the canary was one: to the bit, or in its tokens where adapters are."""
    one = row["canary_bits"] if row["subject"] != "adapters" else row["canary_answers"]
    return not row["wrong"] and one == 1


def main() -> int:
    """All kinds at once, each in a process of its own, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--burst", type=int, default=1024, help="requests at once, every minute")
    parser.add_argument("--kinds", nargs="+", default=list(SERVERS), choices=SERVERS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    need_gpus()
    rows = []
    with tempfile.TemporaryDirectory() as place, concurrent.futures.ProcessPoolExecutor(len(arguments.kinds)) as pool:
        asked = {}
        for kind in arguments.kinds:
            (folder := Path(place) / kind.replace(" ", "-")).mkdir()
            job = pool.submit(load, kind, folder, arguments.seconds, arguments.clients, arguments.burst)
            asked[job] = (kind, folder)
        for job in concurrent.futures.as_completed(asked):
            kind, folder = asked[job]
            try:
                rows.append(job.result())
                print(json.dumps(rows[-1]), flush=True)
            except Exception as error:  # the others go on
                print(f"{kind}: {''.join(traceback.format_exception(error))}", flush=True)
                if (log := folder / "log").exists():
                    print(log.read_text()[-3000:], flush=True)
    command = f"python benchmarks/gpu_soak.py --seconds {arguments.seconds:g}"
    write_results(arguments.out, rows, machine="h200", command=command)
    return 0 if len(rows) == len(arguments.kinds) and all(map(sound, rows)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
