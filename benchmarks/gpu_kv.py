#!/usr/bin/env python3
"""The int4 KV cache on a GPU: one layer's attention beside vLLM's own and fp8, and whole engines.

    python benchmarks/gpu_kv.py layers --out FILE      decode and prefill of 24 query / 4 KV heads of 256, against fp64
    python benchmarks/gpu_kv.py serve {int4,fp8,stock} --out FILE
                                                       four such layers in vLLM: 131,072 tokens, then decoding
    python benchmarks/gpu_kv.py logits PACK --out FILE  a real pack: logits with int4 caches against a 16-bit cache

``serve`` makes a Llama of random weights; prefill is timed by a request of one new token, decoding by requests that
find all but their last tokens in the prefix cache. ``stock`` is vLLM's own int4 attention.
"""

import argparse
import gc
import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from vllm_exl3.tools.results import write_results

CONTEXTS = (32768, 131072, 262144)
PROMPT = 131072
NEW = 33


def layers(contexts: list[int], stock: bool) -> Iterator[dict[str, Any]]:
    """One row a kernel and shape."""
    from vllm_exl3.serving.kv_bench import Caches, Shape, bandwidth

    shapes = [Shape(context, batch, query) for context in contexts for batch in (1, 8) for query in (1, 2)]
    chunks = [Shape(context, 1, query) for context in contexts[1:] for query in (1024, 8192)]
    caches = Caches(shapes)
    for shape in [*shapes, *chunks]:
        runs: list[tuple[str, Callable[[Any], tuple[float, float]]]] = [
            ("int4", caches.ours),
            ("fp8_fa3", caches.fp8_flash),
        ]
        if shape.query == 1:
            runs.append(("fp8_triton", caches.fp8_triton))
        if stock and shape.batch == 1 and shape.query <= 2:
            runs.append(("stock_int4", caches.stock))
        for kernel, run in runs:
            us, error = run(shape)
            slot = 264 if "int4" in kernel else 512
            row = {
                "kernel": kernel, "subject": "decode" if shape.query <= 2 else "prefill", "context": shape.context,
                "batch": shape.batch, "query": shape.query, "us": round(us, 2), "error": error,
            }  # fmt: skip
            if shape.query <= 2:
                row["byte_us"] = round(shape.nbytes(slot) / bandwidth() * 1e6, 2)
            print(row, flush=True)
            yield row


def serve(kind: str) -> Iterator[dict[str, Any]]:
    """Prefill in chunks of 8192 and 1024, decoding, and decoding with drafts of one token."""
    os.environ["VLLM_EXL3_INT4_KV"] = "0" if kind == "stock" else "1"
    drafts = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    settings: list[tuple[str, dict[str, Any]]] = [
        ("chunks of 8192", {"max_num_batched_tokens": 8192}),
        ("chunks of 1024, drafts", {"max_num_batched_tokens": 1024, "speculative_config": drafts}),
    ]
    if kind == "stock":
        settings = settings[:1]
    with tempfile.TemporaryDirectory() as temporary:
        folder = _llama(Path(temporary))
        for name, options in settings:
            llm = _engine(folder, kind, **options)
            for row in _timed(llm, name):
                yield {"kernel": kind, "subject": "serve", "mode": name, **row}
            _unload(llm)
            del llm


def _timed(llm: Any, name: str) -> Iterator[dict[str, Any]]:
    # Few different tokens, so that drafts from the prompt are always found.
    rng = np.random.default_rng(0)
    warm, prompt = ([int(token) for token in rng.integers(10, 14, length)] for length in (9000, PROMPT))
    _generate(llm, warm, 2)
    prefill = _generate(llm, prompt, 1)
    print(name, f"prefill {PROMPT / prefill:.0f} tokens/s", flush=True)
    yield {"what": "prefill", "tokens": PROMPT, "us": prefill * 1e6, "tokens_per_second": PROMPT / prefill}
    steps = []
    for _ in range(3):
        short, long = (_generate(llm, prompt, count) for count in (1, NEW))
        steps.append((long - short) / (NEW - 1))
    step = statistics.median(steps)
    print(name, f"decode {step * 1e6:.0f} µs a token", flush=True)
    yield {"what": "decode", "tokens": PROMPT, "us": step * 1e6, "tokens_per_second": 1 / step}


def logits(pack: Path) -> Iterator[dict[str, Any]]:
    """KL divergence from the same pack with a 16-bit cache, and how many greedy tokens are equal."""
    from tests.serving.engine import generate, logits_of
    from vllm_exl3.serving.kv_register import register_attention

    limit = json.loads((pack / "config.json").read_text())["max_position_embeddings"]
    ids = [int(token) for token in np.random.default_rng(1).integers(5, 500, limit - 40)]
    reference = None
    for kind in ("bf16", "int4", "stock"):
        os.environ["VLLM_EXL3_INT4_KV"] = "0" if kind == "stock" else "1"
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        AttentionBackendEnum.TRITON_ATTN.clear_override()
        register_attention()
        llm = _engine(pack, kind, max_num_batched_tokens=limit, max_model_len=limit, enforce_eager=True)
        found, tokens = logits_of(llm, ids).double().cpu(), generate(llm, [ids[:100], ids[:300]], 24)
        _unload(llm)
        del llm
        if reference is None:
            reference = found, tokens
            continue
        p, q = torch.log_softmax(reference[0], -1), torch.log_softmax(found, -1)
        row = {
            "kernel": kind, "subject": "logits", "pack": pack.name, "tokens": len(ids),
            "kl": float((p.exp() * (p - q)).sum(-1).mean()),
            "error": float((found - reference[0]).norm() / reference[0].norm()),
            "equal_tokens": int((np.array(tokens) == np.array(reference[1])).sum()),
            "all_tokens": int(np.array(tokens).size),
        }  # fmt: skip
        print(row, flush=True)
        yield row


def _engine(folder: Path, kind: str, **options: Any) -> Any:
    from vllm import LLM

    backend = "FLASH_ATTN" if kind in ("fp8", "bf16") else "TRITON_ATTN"
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": PROMPT + 256,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.5,
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
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()


def _generate(llm: Any, prompt: list[int], count: int) -> float:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    output = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
    assert len(output[0].outputs[0].token_ids) == count
    return time.perf_counter() - begin


def _llama(folder: Path) -> Path:
    """Four layers of 24 query and 4 KV heads of 256; vLLM makes the weights up."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 5120, "intermediate_size": 17408,
        "num_hidden_layers": 4, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        "vocab_size": 1024, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e7,
        "max_position_embeddings": 2 * PROMPT, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=("layers", "serve", "logits"))
    parser.add_argument("value", nargs="?", help="int4, fp8 or stock for serve; a pack's folder for logits")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--stock", action="store_true", help="layers: vLLM's own int4 attention too (slow)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing after this long")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        sys.exit("vLLM is not installed")
    started = time.perf_counter()
    rows: Iterator[dict[str, Any]]
    if arguments.subject == "layers":
        rows = layers(arguments.contexts, arguments.stock)
    elif arguments.subject == "serve":
        rows = _load_and_serve(arguments.value)
    else:
        rows = logits(Path(arguments.value))
    done: list[dict[str, Any]] = []
    for row in rows:
        done.append(row)
        if arguments.out:
            _write(arguments.out, done)
        if time.perf_counter() - started > arguments.seconds:
            print("out of time")
            break
    sys.stdout.flush()
    os._exit(0)  # vLLM's own shutdown can hang for a minute after the last result


def _load_and_serve(kind: str) -> Iterator[dict[str, Any]]:
    if kind not in ("int4", "fp8", "stock"):
        sys.exit(f"serve {kind}: expected int4, fp8 or stock")
    return serve(kind)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    keys = {
        (row["subject"], row["kernel"], row.get("mode"), row.get("context"), row.get("batch"), row.get("query"))
        for row in rows
    }
    write_results(
        path,
        rows,
        machine="h200",
        command="python benchmarks/gpu_kv.py " + " ".join(sys.argv[1:]),
        replaces=lambda row: (
            row["subject"], row["kernel"], row.get("mode"), row.get("context"), row.get("batch"), row.get("query"),
        ) in keys,
        facts={"cuda": torch.version.cuda},
    )  # fmt: skip


if __name__ == "__main__":
    main()
