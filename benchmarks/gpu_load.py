#!/usr/bin/env python3
"""How long vLLM takes to load an EXL3 pack, beside a bf16 model of as many bytes and beside reading those bytes alone.

    python benchmarks/gpu_load.py [--layers 32] [--passes 2] [--folder /dev/shm] [--out FILE]

Models are built and loaded in this process by vLLM's own loader, without an engine around them; small ones first, so
that everything is imported. Files are in the page cache, and kernels are not compiled, since nothing runs. Passes over
the kinds take turns, and medians are given of

* host: the files' bytes read into host memory that exists already, once, by one thread;
* read: every tensor as vLLM's iterator hands it over, copied to memory of the device that exists already. This is
  what "reading the bytes" means in ratios: what any loader of vLLM's does that copies tensor by tensor;
* weights: vLLM's ``load_weights``, which does the same and all that belongs to a model's layers;
* check, build, finish: opening and checking the pack, making the layers, and what they do after loading;
* load: vLLM's whole ``load_model``, and checking the pack. vLLM's own share, such as collecting garbage over and over,
  is in that of bf16 too.

Runs on a CPU as well, where the device's memory is the host's; only a GPU's numbers are written.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from benchmarks.dense_8b import KINDS, SHAPE, write_bf16_config
from benchmarks.engine_start import inspect_models_here
from vllm_exl3.tools.pack_writer import PackTensor, write_safetensors
from vllm_exl3.tools.random_pack import write_random_pack
from vllm_exl3.tools.results import need_gpus, write_results

COMMAND = "python benchmarks/gpu_load.py"
SMALL = {"hidden": 256, "intermediate": 512, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 128, "vocab": 512}
OF_EQUAL_BYTES = {**SHAPE, "hidden": 2048, "intermediate": 8192, "heads": 16}
"""A bf16 model of as many layers and, within a hundredth, as many bytes as the 8B shape in 4 bits with a head of 6."""


def write_exl3(folder: Path, shape: dict[str, int]) -> Path:
    """A random pack of a shape in 4 bits."""
    return write_random_pack(folder, **shape, bits=4, head_bits=6)


def write_bf16(folder: Path, shape: dict[str, int]) -> Path:
    """A model of a shape in 16 bits, of random bits."""
    write_bf16_config(folder, shape)
    raw = np.random.SFC64(0).random_raw
    hidden, queries, keys = shape["hidden"], shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]

    def tensor(name: str, *size: int) -> PackTensor:
        return PackTensor(f"{name}.weight", "BF16", size, lambda: raw(int(np.prod(size)) // 4).view(np.uint16))

    tensors = [tensor("model.embed_tokens", shape["vocab"], hidden), tensor("model.norm", hidden)]
    for layer in range(shape["layers"]):
        prefix = f"model.layers.{layer}"
        tensors += [tensor(f"{prefix}.{name}_layernorm", hidden) for name in ("input", "post_attention")]
        tensors += [
            tensor(f"{prefix}.self_attn.{name}_proj", width, hidden)
            for name, width in (("q", queries), ("k", keys), ("v", keys))
        ]
        tensors.append(tensor(f"{prefix}.self_attn.o_proj", hidden, queries))
        tensors += [tensor(f"{prefix}.mlp.{name}_proj", shape["intermediate"], hidden) for name in ("gate", "up")]
        tensors.append(tensor(f"{prefix}.mlp.down_proj", hidden, shape["intermediate"]))
    write_safetensors(folder / "model.safetensors", [*tensors, tensor("lm_head", shape["vocab"], hidden)])
    return folder


WRITERS: dict[str, Callable[[Path, dict[str, int]], Path]] = {"exl3": write_exl3, "bf16": write_bf16}


class Stages:
    """Seconds of stages while they are watched; those inside others are counted twice."""

    def __init__(self) -> None:
        from vllm.model_executor.model_loader import base_loader, default_loader

        from vllm_exl3.serving import config

        self.seconds: Counter[str] = Counter()
        self._watch(base_loader, "initialize_model", "build")
        self._watch(base_loader, "process_weights_after_loading", "finish")
        self._watch(default_loader.DefaultModelLoader, "load_weights", "weights")
        self._watch(config.Exl3Config, "maybe_update_config", "check")
        config.prepare_kernels = lambda report, device: None

    def _watch(self, holder: Any, name: str, stage: str) -> None:
        original = getattr(holder, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.timed(stage):
                return original(*args, **kwargs)

        setattr(holder, name, call)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Count what runs inside, to the end of the device's work."""
        begin = time.perf_counter()
        yield
        synchronize()
        self.seconds[stage] += time.perf_counter() - begin


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def load(folder: Path, stages: Stages) -> dict[str, float]:
    """Load a model with vLLM and drop it again; seconds by stage."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.utils.network_utils import get_open_port

    stages.seconds.clear()
    config = EngineArgs(
        model=str(folder), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, max_model_len=1024
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with stages.timed("load_model"):
            model = get_model(vllm_config=config)
    found = {stage: stages.seconds[stage] for stage in ("check", "build", "weights", "finish")}
    found["load"] = stages.seconds["load_model"] + found["check"]
    del model, config
    gc.collect()
    return found


def read_to_host(files: list[Path]) -> float:
    """Seconds to read the files into memory that exists."""
    memory = memoryview(bytearray(b"x") * (64 << 20))  # written to, so that its pages exist
    begin = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(memory):
                pass
    return time.perf_counter() - begin


def read_to_device(files: list[Path], device: str) -> float:
    """Seconds to copy every tensor to memory of the device that exists."""
    import torch
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    names = [str(path) for path in files]
    places = [torch.zeros_like(value, device=device) for _, value in safetensors_weights_iterator(names, False)]
    synchronize()
    begin = time.perf_counter()
    for place, (_, value) in zip(places, safetensors_weights_iterator(names, False), strict=True):
        place.copy_(value)
    synchronize()
    return time.perf_counter() - begin


def measure(folders: dict[str, Path], small: dict[str, Path], passes: int) -> Iterator[list[dict[str, Any]]]:
    """After each pass a row a kind: medians so far."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        import vllm.v1.worker.cpu.shm  # noqa: F401  vLLM's loader empties a cache that CPUs lack, but for this
    inspect_models_here()
    stages = Stages()
    for folder in small.values():
        load(folder, stages)
    files = {kind: sorted(folder.glob("*.safetensors")) for kind, folder in folders.items()}
    host = {kind: read_to_host(paths) for kind, paths in files.items()}
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in folders}
    for _ in range(passes):
        for kind, folder in folders.items():
            found[kind].append({"read": read_to_device(files[kind], device), **load(folder, stages)})
            print(kind, {stage: round(seconds, 3) for stage, seconds in found[kind][-1].items()}, flush=True)
        yield [
            {
                "kernel": KINDS[kind],
                "subject": "load",
                "pack": folders[kind].name,
                "bytes": sum(path.stat().st_size for path in files[kind]),
                "passes": len(runs),
                "host_s": host[kind],
                **{f"{stage}_s": statistics.median(one[stage] for one in runs) for stage in runs[0]},
                "weights_over_read": statistics.median(one["weights"] / one["read"] for one in runs),
            }
            for kind, runs in found.items()
        ]


def _is_load(row: Mapping[str, Any]) -> bool:
    return row["subject"] == "load"


def main() -> None:
    """Write the models, measure, print, and write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=SHAPE["layers"])
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the models are written for the while; 10 GB")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    need_gpus()
    shapes = {"exl3": SHAPE, "bf16": OF_EQUAL_BYTES}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        root = Path(temporary)
        with ProcessPoolExecutor(2) as pool:  # beside importing vLLM, which takes as long
            written = {
                kind: pool.submit(WRITERS[kind], root / f"random-{kind}", shape | {"layers": arguments.layers})
                for kind, shape in shapes.items()
            }
            import vllm  # noqa: F401

            folders = {kind: future.result() for kind, future in written.items()}
        rows: list[dict[str, Any]] = []
        small = {kind: writer(root / f"small-{kind}", SMALL) for kind, writer in WRITERS.items()}
        for rows in measure(folders, small, arguments.passes):
            if arguments.out:
                write_results(arguments.out, rows, machine="h200", command=COMMAND, replaces=_is_load)
    for row in rows:
        print("ROW " + json.dumps(row), flush=True)
    sys.stdout.flush()
    os._exit(0)  # vLLM's own shutdown takes seconds and has nothing left to do


if __name__ == "__main__":
    main()
