"""Engines over two GPUs, or over one to compare with: what the processes that ``gpu_two.py`` starts run.

Each variant is a way to run a pack. What an engine computed goes into a file at once, so that neither a crash nor a
time limit loses what came before.
"""

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["VARIANTS", "data_parallel_rank", "generate_until_killed", "lane", "load", "warm_up"]

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [100, 200, 300, 400, 500, 600, 11]]
TOKENS = 24
_SECONDS = 120
"""An engine that takes longer hangs."""

_TP, _EP = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}
_GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4]},
}
_NCCL = {"disable_custom_all_reduce": True}
_INT4 = {"kv_cache_dtype": "int4_per_token_head"}

VARIANTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": _TP,
    "ep2": _EP,
    "pp2": {"pipeline_parallel_size": 2},
    "tp2-nccl": {**_TP, **_NCCL},
    "tp2-nccl-graphs": {**_TP, **_NCCL, **_GRAPHS},
    "dp2": {"enable_expert_parallel": True},
    "dp2-graphs": {"enable_expert_parallel": True, **_GRAPHS},
    "one-graphs": _GRAPHS,
    "tp2-graphs": {**_TP, **_GRAPHS},
    "ep2-graphs": {**_EP, **_GRAPHS},
    "one-int4": _INT4,
    "tp2-int4": {**_TP, **_INT4},
    "one-int4-graphs": {**_INT4, **_GRAPHS},
    "tp2-int4-graphs": {**_TP, **_INT4, **_GRAPHS},
}
"""Options of vLLM by variant; ``dp2`` is two engines of one GPU each that share the experts."""


def warm_up() -> None:
    """Import what engines need, for processes that are forked from this one."""
    for module in ("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor"):
        importlib.import_module(module)


def load(folder: Path | str, **options: Any) -> Any:
    """An engine that leaves room for others on its GPUs."""
    from vllm import LLM

    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 4,
        "dtype": "float16",
        "seed": 0,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 1 << 28,
        "gpu_memory_utilization": 0.05,
        "worker_extension_cls": "benchmarks.two_probe.Probe",
    }
    return LLM(str(folder), **{**defaults, **options})


def lane(out: Path, steps: list[str], folder: Path, options: dict[str, Any]) -> None:
    """Run steps one after another: ``variant:pack`` each.

    Args:
        out: where ``variant/pack.npz`` goes, or ``variant/pack.failed`` with the reason.
        steps: what to run.
        folder: where the packs are.
        options: further options of every engine.
    """
    for step in steps:
        variant, _, pack = step.partition(":")
        path = out / variant / pack
        path.parent.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGALRM, _time_is_up)
        signal.alarm(_SECONDS)
        try:
            found = _measure(folder / pack, {**VARIANTS[variant], **_dtype(pack), **options})
        except BaseException as error:
            path.with_name(f"{pack}.failed").write_text(f"{type(error).__name__}: {error}"[:2000])
            print(f"STEP {step} failed: {type(error).__name__}: {error}"[:400], flush=True)
            if isinstance(error, KeyboardInterrupt):
                raise
        else:
            _save(path, found)
            print(f"STEP {step} {found['seconds']}", flush=True)
        finally:
            signal.alarm(0)


def _time_is_up(*_: Any) -> None:
    raise TimeoutError(f"no end after {_SECONDS} s")


def _dtype(pack: str) -> dict[str, str]:
    return {"dtype": "bfloat16"} if "gemma2" in pack else {}  # which refuses float16


def _measure(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    golden = folder / "golden.npz"
    ids = [int(token) for token in np.load(golden)["ids"]] if golden.exists() else list(range(3, 63))
    begin = time.perf_counter()
    llm = load(folder, **options)
    started = time.perf_counter()
    try:
        logits = _logits(llm, ids)
        tokens, gaps = _greedy(llm, PROMPTS)
        ranks = llm.collective_rpc("probe_state")
    finally:
        llm.llm_engine.engine_core.shutdown()
    seconds = {"start": round(started - begin, 1), "all": round(time.perf_counter() - begin, 1)}
    return {"logits": logits, "tokens": tokens, "gaps": gaps, "ranks": ranks, "seconds": seconds}


def _save(path: Path, found: dict[str, Any]) -> None:
    """``path.npz``; written beside and renamed, so that whoever waits for it never reads half of one."""
    temporary = path.with_name(f"{path.name}.part.npz")
    logits = {} if found["logits"] is None else {"logits": found.pop("logits")}
    np.savez(temporary, **logits, rest=np.array(json.dumps({k: v for k, v in found.items() if k != "logits"})))
    temporary.rename(path.with_name(f"{path.name}.npz"))


def _logits(llm: Any, ids: list[int]) -> np.ndarray | None:
    """Logits of one prompt by whichever rank has them."""
    from vllm import SamplingParams

    llm.collective_rpc("probe_record")
    parameters = SamplingParams(max_tokens=1, temperature=0, detokenize=False, prompt_logprobs=0)
    llm.generate({"prompt_token_ids": ids}, parameters, use_tqdm=False)
    found = [part for part in llm.collective_rpc("probe_logits", args=(len(ids),)) if part is not None]
    return found[0] if found else None


def _greedy(llm: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens, and at each the distance of the two largest log probabilities."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=TOKENS, temperature=0, detokenize=False, ignore_eos=True, logprobs=2)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
    tokens, gaps = [], []
    for output in outputs:
        tokens.append(list(output.outputs[0].token_ids))
        best = [sorted((entry.logprob for entry in each.values()), reverse=True) for each in output.outputs[0].logprobs]
        gaps.append([values[0] - values[1] for values in best])
    return tokens, gaps


def data_parallel_rank(rank: int, port: int, step: str, out: Path, folder: Path, options: dict[str, Any]) -> None:
    """One of two engines that share a MoE pack's experts; each answers the prompts in another order.

    Args:
        rank: 0 or 1.
        port: where the two meet.
        step: ``variant:pack``.
        out: as `lane`'s.
        folder: as `lane`'s.
        options: as `lane`'s.
    """
    variant, _, pack = step.partition(":")
    os.environ |= {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": "2",
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    begin = time.perf_counter()
    llm = load(folder / pack, **{**VARIANTS[variant], **options})
    started = time.perf_counter()
    order = 1 if rank == 0 else -1
    tokens, gaps = _greedy(llm, PROMPTS[::order])
    ranks = llm.collective_rpc("probe_state")
    seconds = {"start": round(started - begin, 1), "all": round(time.perf_counter() - begin, 1)}
    found = {"logits": None, "tokens": tokens[::order], "gaps": gaps[::order], "ranks": ranks, "seconds": seconds}
    (out / variant).mkdir(parents=True, exist_ok=True)
    _save(out / variant / f"{pack}.{rank}", found)
    print(f"STEP {step}:{rank} {seconds}", flush=True)
    time.sleep(2)  # the other rank may still need this one
    os._exit(0)


def generate_until_killed(pack: Path, options: dict[str, Any]) -> None:
    """Answer one endless request after another on two ranks; `gpu_two` kills one of them meanwhile."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    llm = load(pack, tensor_parallel_size=2, max_model_len=4096, hf_overrides=_LONG, **options)
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=4000, temperature=0, detokenize=False, ignore_eos=True)
    print("GENERATING", flush=True)
    try:
        while True:
            llm.generate({"prompt_token_ids": [1, 2, 3]}, parameters, use_tqdm=False)
    except Exception as error:
        print(f"ENDED {type(error).__name__}: {error}", flush=True)
        sys.exit(3)


_LONG = {"max_position_embeddings": 4096}
