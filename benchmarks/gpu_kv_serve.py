#!/usr/bin/env python3
"""Whole engines over the int4 KV cache on a GPU: four layers of 24/4 heads of 256 over 131,072 tokens, and a real pack.

    python benchmarks/gpu_kv_serve.py speed int4 fp8 [stock] --out FILE
    python benchmarks/gpu_kv_serve.py logits PACK --out FILE   logits, and what a needle in the context gives, with
                                                               int4 caches and with a 16-bit cache

``speed`` makes a Mistral of random weights (a Llama's heads would have to divide its width), and an engine a process
for every kind of cache and mode; they start at the same time, and then are timed one after the other. Prefill is timed
by a request of one new token, decoding by requests that find all but their last tokens in the prefix cache. ``stock``
is vLLM's own int4 attention, ``fp8`` vLLM's FlashAttention.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from vllm_exl3.tools.results import need_gpus, write_results

PROMPT = 131072
NEW = 129
REPEATS = 3
DRAFTS = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
MODES: dict[str, dict[str, Any]] = {
    "chunks of 8192": {"max_num_batched_tokens": 8192},
    "chunks of 1024, drafts": {"max_num_batched_tokens": 1024, "speculative_config": DRAFTS},
}
KINDS = ("int4", "fp8", "stock", "bf16")
Row = dict[str, Any]


def speed(kinds: list[str], modes: list[str], logs: Path) -> Iterator[Row]:
    """Start an engine for each kind and mode, then time one after the other; vLLM's own int4 in the first mode only."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = _layers_of_24_heads(Path(temporary))
        jobs = []
        for kind in kinds:
            for mode in modes[: 1 if kind == "stock" else None]:
                job = Path(temporary) / f"{kind}-{len(jobs)}"
                log = (logs / f"{job.name}.txt").open("w", encoding="utf-8")
                command = [sys.executable, __file__, "one", kind, mode, str(folder), str(job)]
                jobs.append((job, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)))
        for job, process in jobs:
            _wait_for(job.with_suffix(".ready"), process)
        for job, process in jobs:
            job.with_suffix(".go").touch()
            _wait_for(job.with_suffix(".done"), process)
            done = job.with_suffix(".done")
            if not done.exists():
                print(f"{job.name} ended with {process.wait()} and no result", flush=True)
                continue
            for row in json.loads(done.read_text(encoding="utf-8")):
                print(row, flush=True)
                yield row


def _wait_for(path: Path, process: "subprocess.Popen[bytes]") -> None:
    while not path.exists() and process.poll() is None:
        time.sleep(0.1)


def one(kind: str, mode: str, folder: Path, job: Path) -> None:
    """One engine of `speed`: builds it, says so, waits for its turn, and leaves its rows."""
    os.environ["VLLM_EXL3_INT4_KV"] = "0" if kind == "stock" else "1"
    llm = _engine(folder, kind, load_format="dummy", **MODES[mode])
    _always_say_zero(llm)
    _generate(llm, _prompt(9000, 99), 8)
    job.with_suffix(".ready").touch()
    while not job.with_suffix(".go").exists():
        time.sleep(0.05)
    common = {"kernel": kind, "subject": "serve", "mode": mode}
    rows = [{**common, **row} for row in _timed(llm, 1 if kind == "stock" else REPEATS)]
    written = job.with_suffix(".writing")
    written.write_text(json.dumps(rows), encoding="utf-8")
    written.rename(job.with_suffix(".done"))
    sys.stdout.flush()
    os._exit(0)  # vLLM's own shutdown can hang for a minute after the last result


def _timed(llm: Any, repeats: int) -> Iterator[Row]:
    prompts = [_prompt(PROMPT, seed) for seed in range(repeats)]
    prefills = [_generate(llm, prompt, 1) for prompt in prompts]
    yield _row("prefill", statistics.median(prefills) / PROMPT, prefills=[round(x, 4) for x in prefills])
    steps = []
    for _ in range(3):
        short, long = (_generate(llm, prompts[-1], count) for count in (1, NEW))
        steps.append((long - short) / (NEW - 1))
    yield _row("decode", statistics.median(steps), steps=[round(x, 6) for x in steps])


def _row(what: str, seconds: float, **more: Any) -> Row:
    return {"what": what, "tokens": PROMPT, "us": seconds * 1e6, "tokens_per_second": 1 / seconds, **more}


def _prompt(length: int, seed: int) -> list[int]:
    """Random tokens, then zeros: the answer begins with more of them, so that every draft is found and accepted."""
    return [*(int(token) for token in np.random.default_rng(seed).integers(10, 1000, length - 8)), *[0] * 8]


def _always_say_zero(llm: Any) -> None:
    from tests.serving.engine import model_of

    model = model_of(llm)
    compute = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        found = compute(*args, **kwargs)
        found[:, 0] = 1e4
        return found

    model.compute_logits = compute_logits


def logits(pack: Path) -> Iterator[Row]:
    """KL divergence from the same pack with a 16-bit cache, and greedy tokens that are equal; a needle's too."""
    from tests.serving.engine import generate, logits_of
    from vllm_exl3.serving.kv_register import register_attention

    limit = json.loads((pack / "config.json").read_text())["max_position_embeddings"]
    ids, needles = _text(pack, limit)
    reference = None
    for kind in ("bf16", "int4", "stock"):
        os.environ["VLLM_EXL3_INT4_KV"] = "0" if kind == "stock" else "1"
        from vllm.v1.attention.backends.registry import AttentionBackendEnum
        from vllm.v1.attention.selector import _cached_get_attn_backend

        AttentionBackendEnum.TRITON_ATTN.clear_override()
        _cached_get_attn_backend.cache_clear()
        register_attention()
        options = {"max_num_batched_tokens": limit, "max_model_len": limit, "enforce_eager": True}
        llm = _engine(pack, kind, **options, enable_prefix_caching=False)
        found = logits_of(llm, ids)
        tokens = np.array(generate(llm, [ids[:100], ids[:1000], ids[: limit - 40]], 32))
        needle = np.array(generate(llm, needles, 6))
        _unload(llm)
        del llm
        if reference is None:
            reference = found, tokens, needle
            print("16-bit cache, needles:", needle.tolist(), flush=True)
            continue
        kl, error = _compare(reference[0], found)
        yield {
            "kernel": kind, "subject": "logits", "pack": pack.name, "tokens": len(ids), "kl": kl, "error": error,
            "equal_tokens": int((tokens == reference[1]).sum()), "all_tokens": int(tokens.size),
            "equal_needles": int((needle == reference[2]).all(1).sum()), "all_needles": len(needles),
        }  # fmt: skip


def _compare(wanted: torch.Tensor, found: torch.Tensor) -> tuple[float, float]:
    """KL divergence and relative error, of as many positions at a time as fit in float64."""
    kl = difference = norm = 0.0
    for p, q in zip(wanted.split(512), found.split(512), strict=True):
        x, y = p.double(), q.double()
        difference, norm = difference + float((x - y).square().sum()), norm + float(x.square().sum())
        x, y = torch.log_softmax(x, -1), torch.log_softmax(y, -1)
        kl += float((x.exp() * (x - y)).sum())
    return kl / wanted.shape[0], (difference / norm) ** 0.5


def _text(pack: Path, limit: int) -> tuple[list[int], list[list[int]]]:
    """Tokens to compare logits of, and prompts with a needle; random ones for a pack without a tokenizer."""
    if not (pack / "tokenizer.json").exists():
        ids = [int(token) for token in np.random.default_rng(1).integers(5, 500, limit - 40)]
        return ids, [ids[: limit // 2]]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pack / "tokenizer.json"))
    pages = sorted(Path(__file__).parents[1].glob("src/vllm_exl3/pack/*.py"))
    filler = tokenizer.encode("\n".join(page.read_text(encoding="utf-8") for page in pages)).ids
    needles = []
    for index, share in enumerate((0.02, 0.25, 0.5, 0.75, 0.97)):
        number = 4271 + 1111 * index
        fact = tokenizer.encode(f"\n\nThe secret number of the castle is {number}.\n\n").ids
        question = tokenizer.encode(
            "\n\nWhat is the secret number of the castle? The secret number of the castle is"
        ).ids
        text = filler[: limit - 40 - len(fact) - len(question)]
        at = int(len(text) * share)
        needles.append([*text[:at], *fact, *text[at:], *question])
    return filler[-(limit - 40) :], needles


def _engine(folder: Path, kind: str, **options: Any) -> Any:
    from vllm import LLM

    backend = "FLASH_ATTN" if kind in ("fp8", "bf16") else "TRITON_ATTN"
    defaults: Row = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": PROMPT + 256,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.15,
        "kv_cache_memory_bytes": 6 << 30,  # engines that start together must not measure each other
        "enable_prefix_caching": True,
        "attention_config": {"backend": backend},
        "kv_cache_dtype": {"fp8": "fp8", "bf16": "auto"}.get(kind, "int4_per_token_head"),
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8],
        },
        "seed": 0,
    }
    return LLM(str(folder), **{**defaults, **options})


def _unload(llm: Any) -> None:
    import gc

    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()


def _generate(llm: Any, prompt: list[int], count: int) -> float:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    output = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
    elapsed = time.perf_counter() - begin
    assert len(output[0].outputs[0].token_ids) == count
    return elapsed


def _layers_of_24_heads(folder: Path) -> Path:
    """Four layers of 24 query and 4 KV heads of 256; vLLM makes the weights up."""
    config = {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 5120,
        "intermediate_size": 17408, "num_hidden_layers": 4, "num_attention_heads": 24, "num_key_value_heads": 4,
        "head_dim": 256, "vocab_size": 1024, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e7,
        "max_position_embeddings": 2 * PROMPT, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "sliding_window": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    """Command line."""
    if sys.argv[1:2] == ["one"]:
        kind, mode, folder, job = sys.argv[2:6]
        one(kind, mode, Path(folder), Path(job))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=("speed", "logits"))
    parser.add_argument("values", nargs="+", help="kinds of cache for speed; a pack's folder for logits")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="of speed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="where the engines' logs go")
    arguments = parser.parse_args()
    need_gpus()
    if arguments.subject == "speed" and (unknown := set(arguments.values) - set(KINDS)):
        sys.exit(f"speed {' '.join(sorted(unknown))}: expected {', '.join(KINDS)}")
    speeds = arguments.subject == "speed"
    rows = speed(arguments.values, arguments.modes, arguments.logs) if speeds else logits(Path(arguments.values[0]))
    done: list[Row] = []
    for row in rows:
        done.append(row)
        if not speeds:
            print(row, flush=True)
        if arguments.out:
            _write(arguments.out, done)
    sys.stdout.flush()
    os._exit(0)  # vLLM's own shutdown can hang for a minute after the last result


def _key(row: Row) -> tuple[Any, ...]:
    return row["subject"], row["kernel"], row.get("mode"), row.get("what"), row.get("pack")


def _write(path: Path, rows: list[Row]) -> None:
    keys = {_key(row) for row in rows}
    write_results(
        path,
        rows,
        machine="h200",
        command="python benchmarks/gpu_kv.py layers --stock; python benchmarks/gpu_kv_serve.py speed int4 fp8 stock",
        replaces=lambda row: _key(row) in keys,
        facts={"cuda": torch.version.cuda},
    )


if __name__ == "__main__":
    main()
