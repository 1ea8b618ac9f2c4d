#!/usr/bin/env python3
"""EXL3 packs through stock vLLM on a GPU: golden logits, graphs against no graphs, batches, memory, and speed.

    python benchmarks/gpu_serve.py golden PACK ...          relative error and KL divergence from exllamav3's logits
    python benchmarks/gpu_serve.py graphs PACK ...          tokens with FULL_AND_PIECEWISE graphs and with none
    python benchmarks/gpu_serve.py batch PACK ...           prompts alone and in a batch, under VLLM_BATCH_INVARIANT=1
    python benchmarks/gpu_serve.py memory {PACK,random}     what stays allocated (load times: gpu_load.py)
    python benchmarks/gpu_serve.py speed exl3 exl3_fast int4 fp8 bf16 [--batches 1 8 32 64 128]
    (each with --out FILE: rows are written as they are measured)

``speed`` serves an 8B-shaped model (32 layers, 4096/14336, 8 KV heads): random trellises of 4 bits with a head of 6,
in the default arithmetic or the fast one, or random weights in bf16, FP8 (vLLM's own) or int4 (GPTQ, groups of 128,
Marlin). Tokens per second are those of decoding alone, from the difference between two output lengths; time to first
token is of prompts of 128, 1024 and 8192 tokens. Kinds start side by side and take turns.
"""

import argparse
import gc
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from gpu_serve_memory import measure_memory
from gpu_serve_speed import ROW, Row, generate, speed, take_turns

from benchmarks.dense_8b import KINDS, SHAPE
from benchmarks.engine_start import inspect_models_here, leave_out_top_k
from vllm_exl3.ops import backends
from vllm_exl3.tools.random_pack import write_random_pack
from vllm_exl3.tools.results import need_gpus, write_results

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [100, 200, 300, 400, 500, 600, 11]]
"""Of engines that answer a little."""


def load(folder: Path | str, **options: Any) -> Any:
    """An engine on the GPU with vLLM's defaults but for size."""
    from vllm import LLM

    leave_out_top_k()
    inspect_models_here()
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "gpu_memory_utilization": 0.3,
        "enable_prefix_caching": False,
        "attention_config": {"backend": "FLASH_ATTN"},
        "seed": 0,
    }
    return LLM(str(folder), **{**defaults, **options})


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[Any]:
    """A small engine, gone again afterwards, so that the next one of this process finds the GPU free."""
    from vllm.distributed import cleanup_dist_env_and_memory

    # Gemma 2 refuses float16.
    dtype = "bfloat16" if "gemma2" in folder.name else "float16"
    small = {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 28, "dtype": dtype}
    small |= {"gpu_memory_utilization": 0.05}  # since others may use the GPU as well
    llm = load(folder, **{**small, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def golden(folder: Path) -> Row:
    """Compare a whole forward pass with exllamav3's own."""
    reference = np.load(folder / "golden.npz")
    theirs = torch.from_numpy(reference["logits"].astype(np.float64))

    def ours(**options: Any) -> torch.Tensor:
        with serving(folder, enforce_eager=True, **options) as llm:
            from tests.serving.engine import logits_of

            return logits_of(llm, [int(token) for token in reference["ids"]])[:, : theirs.shape[1]].double().cpu()

    backends.reset_calls()
    # Gemma 2 refuses float16: float32, which only Triton attends in, shows what is exact, and bfloat16 what is served.
    refuses = "gemma2" in folder.name
    exact = {"dtype": "float32", "attention_config": {"backend": "TRITON_ATTN"}} if refuses else {}
    found = ours(**exact)
    p, q = torch.log_softmax(theirs, -1), torch.log_softmax(found, -1)
    row = {
        "kernel": "+".join(sorted({backend for _, backend, _ in backends.calls()})),
        "subject": "logits",
        "pack": folder.name,
        "dtype": exact.get("dtype", "float16"),
        "error": _error(found, theirs),
        "kl": float((p.exp() * (p - q)).sum(-1).mean()),
    }
    return row | ({"bfloat16_error": _error(ours(), theirs)} if refuses else {})


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def graphs(folder: Path) -> Row:
    """Compare greedy tokens with and without CUDA graphs, at one compilation mode."""
    tokens = []
    for mode in ("NONE", "FULL_AND_PIECEWISE"):
        with serving(folder, compilation_config={"cudagraph_mode": mode}) as llm:
            tokens.append(generate(llm, PROMPTS, 32))
    return {"kernel": "native", "subject": "graphs", "pack": folder.name, "equal": tokens[0] == tokens[1]}


def batch(folder: Path) -> Row:
    """Compare tokens and their log-probabilities of some prompts, each alone and all in one batch."""
    from vllm import SamplingParams

    rng = np.random.default_rng(0)
    prompts = [
        {"prompt_token_ids": [int(token) for token in rng.integers(1, 250, length)]}
        for length in (3, 1, 40, 17, 129, 8, 64, 5) * 6
    ]
    options = SamplingParams(max_tokens=24, temperature=0, detokenize=False, ignore_eos=True, logprobs=0)

    def answers(wanted: list[dict[str, Any]]) -> list[list[tuple[int, float]]]:
        outputs = [output.outputs[0] for output in llm.generate(wanted, options, use_tqdm=False)]
        return [
            [(token, step[token].logprob) for token, step in zip(each.token_ids, each.logprobs, strict=True)]
            for each in outputs
        ]

    with serving(folder, max_num_seqs=64, enforce_eager=True) as llm:
        together = answers(prompts)
        alone = [answers([prompt])[0] for prompt in prompts[:8]]
    tokens = [[[token for token, _ in answer] for answer in answers] for answers in (together[:8], alone)]
    return {
        "kernel": "native",
        "subject": "batch_invariance",
        "pack": folder.name,
        "prompts": len(prompts),
        "equal": together[:8] == alone,
        "tokens_equal": tokens[0] == tokens[1],
    }


def memory(folder: Path) -> Row:
    """One pack, or the random 8B-shaped one."""

    def engine(pack: Path) -> Any:
        return load(pack, dtype="bfloat16", enforce_eager=True, kv_cache_memory_bytes=1 << 30)

    with tempfile.TemporaryDirectory() as temporary:
        if str(folder) == "random":
            folder = write_random_pack(Path(temporary) / "random-8b-4.0", **SHAPE, bits=4, head_bits=6)
        return measure_memory(engine, folder, lambda llm: [generate(llm, PROMPTS[:n], 8) for n in (1, 3)])[1]


def _write(out: Path, row: Row) -> None:
    """Put one row into the results file, in the place of what it measures anew."""
    identity = [key for key in ("subject", "kernel", "pack", "m") if key in row]
    write_results(
        out,
        [row],
        machine="h200",
        command="python benchmarks/gpu_serve.py",
        replaces=lambda old: all(old.get(key) == row[key] for key in identity),
    )


SUBJECTS: dict[str, Callable[[Path], Row]] = {"golden": golden, "graphs": graphs, "batch": batch, "memory": memory}


def one_by_one(subject: str, folders: list[Path]) -> Iterator[Row]:
    """A row a pack; what fails is told at the end."""
    failed = []
    for folder in folders:
        try:
            yield SUBJECTS[subject](folder)
        except Exception:
            traceback.print_exc()
            failed.append(folder.name)
    if failed:
        raise SystemExit(f"no result of {', '.join(failed)}: see above")


def rows_of(subject: str, values: list[str], batches: list[int], wait: bool) -> Iterator[Row]:
    """What the command line asks for."""
    if subject != "speed":
        if subject == "batch":
            os.environ["VLLM_BATCH_INVARIANT"] = "1"  # before vLLM is imported, which reads it then
        return one_by_one(subject, [Path(value) for value in values])
    if unknown := set(values) - set(KINDS):
        sys.exit(f"speed of {', '.join(sorted(unknown))}: expected {' and '.join(KINDS)}")
    return take_turns(values, batches) if len(values) > 1 else speed(load, values[0], batches, wait=wait)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=(*SUBJECTS, "speed"))
    parser.add_argument("values", nargs="+", help="pack folders; random for memory; kinds for speed")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--wait", action="store_true", help="of speed: say READY, and begin when a line comes in")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    need_gpus()
    if importlib.util.find_spec("vllm") is None:
        sys.exit("vLLM is not installed")
    for row in rows_of(arguments.subject, arguments.values, arguments.batches, arguments.wait):
        print(ROW + json.dumps(row), flush=True)
        if arguments.out:
            _write(arguments.out, row)
    sys.stderr.flush()
    os._exit(0)  # vLLM's own shutdown can hang for a minute after the last result


if __name__ == "__main__":
    main()
