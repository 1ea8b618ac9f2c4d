#!/usr/bin/env python3
"""EXL3 packs through stock vLLM on a GPU: golden logits, graphs against no graphs, batches, memory, and speed.

    python benchmarks/gpu_serve.py golden PACK ...          relative error and KL divergence from exllamav3's logits
    python benchmarks/gpu_serve.py graphs PACK ...          tokens with FULL_AND_PIECEWISE graphs and with none
    python benchmarks/gpu_serve.py batch PACK ...           prompts alone and in a batch, under VLLM_BATCH_INVARIANT=1
    python benchmarks/gpu_serve.py memory {PACK,random}     what stays allocated, and load time beside reading alone
    python benchmarks/gpu_serve.py speed exl3 bf16 [--batches 1 8 32]
    (each with --out FILE: rows are written as they are measured; several packs are served at the same time)

``speed`` serves an 8B-shaped model (32 layers, 4096/14336, 8 KV heads): random trellises of 4 bits with a head of 6,
or random bf16 weights. Tokens per second are those of decoding alone, from the difference between two output lengths;
time to first token is of prompts of 128, 1024 and 8192 tokens. Two kinds start side by side and take turns.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from gpu_serve_memory import memory
from gpu_serve_speed import KINDS, ROW, SHAPE, Row, leave_out_top_k, speed, take_turns

from tests.serving.engine import PROMPTS, generate, logits_of
from vllm_exl3.ops import backends
from vllm_exl3.tools.random_pack import write_random_pack
from vllm_exl3.tools.results import write_results

SMALL: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 28}
"""Options of engines that answer a few short prompts."""


def load(folder: Path | str, **options: Any) -> Any:
    """An engine on the GPU with vLLM's defaults but for size."""
    from vllm import LLM

    leave_out_top_k()
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


def side_by_side(jobs: list[list[str]], **environment: str) -> Iterator[Row]:
    """Run this script once for each list of arguments, all at the same time, and pass on their rows."""
    environment = {**os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stderr", **environment}
    command = [sys.executable, __file__]
    running = [
        subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True, env=environment)
        for arguments in jobs
    ]
    failed = []
    for arguments, job in zip(jobs, running, strict=True):
        lines = [line for line in job.communicate()[0].splitlines() if line.startswith(ROW)]
        yield from (json.loads(line.removeprefix(ROW)) for line in lines)
        if not lines:
            failed.append(" ".join(arguments))
    if failed:
        raise SystemExit(f"no result of {'; '.join(failed)}: the logs of these processes are above")


def golden_of(folder: Path) -> Row:
    """Compare a whole forward pass with exllamav3's own."""
    reference = np.load(folder / "golden.npz")
    theirs = torch.from_numpy(reference["logits"].astype(np.float64))
    dtype = _dtype(folder)
    backends.reset_calls()
    llm = load(folder, **SMALL, dtype=dtype, enforce_eager=True)
    ours = logits_of(llm, [int(token) for token in reference["ids"]])[:, : theirs.shape[1]].double().cpu()
    p, q = torch.log_softmax(theirs, -1), torch.log_softmax(ours, -1)
    return {
        "kernel": "+".join(sorted({backend for _, backend, _ in backends.calls()})),
        "subject": "logits",
        "pack": folder.name,
        "dtype": dtype,
        "error": float((ours - theirs).norm() / theirs.norm()),
        "kl": float((p.exp() * (p - q)).sum(-1).mean()),
    }


def tokens_of(folder: Path, mode: str) -> Row:
    """Greedy tokens with one kind of CUDA graphs."""
    llm = load(folder, **SMALL, dtype=_dtype(folder), compilation_config={"cudagraph_mode": mode})
    return {"pack": folder.name, "mode": mode, "tokens": generate(llm, PROMPTS, 32)}


def graphs(folders: list[Path]) -> Iterator[Row]:
    """Compare greedy tokens with and without CUDA graphs, at one compilation mode."""
    modes = ("NONE", "FULL_AND_PIECEWISE")
    jobs = [["graphs", str(folder), "--mode", mode] for folder in folders for mode in modes]
    found: dict[str, list[Row]] = {}
    for row in side_by_side(jobs):
        found.setdefault(row["pack"], []).append(row["tokens"])
    for pack, tokens in found.items():
        yield {"kernel": "native", "subject": "graphs", "pack": pack, "equal": tokens[0] == tokens[1]}


def batch_of(folder: Path) -> Row:
    """Tokens and their log-probabilities of some prompts, each alone and all in one batch."""
    from vllm import SamplingParams

    llm = load(folder, **{**SMALL, "max_num_seqs": 64}, dtype=_dtype(folder), enforce_eager=True)
    rng = np.random.default_rng(0)
    prompts = [
        {"prompt_token_ids": [int(token) for token in rng.integers(1, 250, length)]}
        for length in (3, 1, 40, 17, 129, 8, 64, 5) * 6
    ]
    options = SamplingParams(max_tokens=24, temperature=0, detokenize=False, ignore_eos=True, logprobs=0)

    def answers(wanted: list[dict[str, Any]]) -> list[Any]:
        outputs = [output.outputs[0] for output in llm.generate(wanted, options, use_tqdm=False)]
        return [
            [(token, step[token].logprob) for token, step in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs
        ]

    together = answers(prompts)
    alone = [answers([prompt])[0] for prompt in prompts[:8]]
    return {
        "kernel": "native",
        "subject": "batch_invariance",
        "pack": folder.name,
        "prompts": len(prompts),
        "equal": together[:8] == alone,
        "tokens_equal": [[t for t, _ in a] for a in alone] == [[t for t, _ in a] for a in together[:8]],
    }


def memory_of(folder: Path) -> Row:
    """One pack, or the random 8B-shaped one."""
    with tempfile.TemporaryDirectory() as temporary:
        if str(folder) == "random":
            folder = write_random_pack(Path(temporary) / "random-8b-4.0", **SHAPE, bits=4, head_bits=6)

        def engine(pack: Path) -> Any:
            return load(pack, dtype="bfloat16", enforce_eager=True, kv_cache_memory_bytes=1 << 30)

        return memory(engine, folder, lambda llm: [generate(llm, PROMPTS[:n], 8) for n in (1, 3)])[1]


def _dtype(folder: Path) -> str:
    """Gemma 2 refuses float16."""
    return "bfloat16" if "gemma2" in folder.name else "float16"


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


OF_ONE = {"golden": golden_of, "batch": batch_of, "memory": memory_of}


def rows_of(arguments: argparse.Namespace) -> Iterator[Row]:
    """What the command line asks for."""
    subject, values = arguments.subject, arguments.values
    if subject == "speed":
        if unknown := set(values) - set(KINDS):
            sys.exit(f"speed of {', '.join(sorted(unknown))}: expected {' and '.join(KINDS)}")
        if len(values) > 1:
            return take_turns(values, arguments.batches)
        return speed(load, values[0], arguments.batches, wait=arguments.wait)
    folders = [Path(value) for value in values]
    if subject == "graphs":
        return iter([tokens_of(folders[0], arguments.mode)]) if arguments.mode else graphs(folders)
    if subject == "batch" and os.environ.get("VLLM_BATCH_INVARIANT") != "1":
        return side_by_side([[subject, value] for value in values], VLLM_BATCH_INVARIANT="1")
    if len(values) > 1:
        return side_by_side([[subject, value] for value in values])
    return iter([OF_ONE[subject](folders[0])])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=(*OF_ONE, "graphs", "speed"))
    parser.add_argument("values", nargs="+", help="pack folders; random for memory; exl3 or bf16 for speed")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--wait", action="store_true", help="of speed: say READY, and begin when a line comes in")
    parser.add_argument("--mode", help="of graphs: this mode's tokens alone")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        sys.exit("vLLM is not installed")
    for row in rows_of(arguments):
        print(ROW + json.dumps(row), flush=True)
        if arguments.out:
            _write(arguments.out, row)
    sys.stderr.flush()
    os._exit(0)  # vLLM's own shutdown can hang for a minute after the last result


if __name__ == "__main__":
    main()
