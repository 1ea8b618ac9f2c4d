"""Run a stock vLLM engine in this process, and see the logits it computes.

Engines are started with what makes them quick on two cores; nothing here is specific to EXL3.
"""

import contextlib
import fcntl
import functools
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
# Engines of test processes side by side would all be bound to the same processors.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_open_port

__all__ = [
    "PROMPTS",
    "Prompt",
    "assert_reload_restores",
    "engine",
    "generate",
    "generate_each_on_two_ranks",
    "generate_on_two_ranks",
    "logits_of",
    "model_of",
    "run_on_two_ranks",
]

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [100, 200, 300, 400, 500, 600, 11]]
"""What the ranks of `generate_on_two_ranks` continue."""

Prompt = list[int] | dict[str, Any]
"""Token ids, or what vLLM takes of a prompt with an image."""

_SET_NUM_THREADS = torch.set_num_threads
"""vLLM's workers for CPUs put a function in its place that does nothing."""


@contextlib.contextmanager
def _young_heap() -> Iterator[None]:
    """Spare the garbage collector what was there before.

    vLLM collects nine times as an engine starts and ends; each time it would go through all that torch, vLLM and pytest
    have imported, which takes longer than the rest of the start.
    """
    unfreeze = gc.unfreeze
    with mock.patch("vllm.v1.engine.core.freeze_gc_heap", create=True), mock.patch.object(gc, "unfreeze"):
        gc.freeze()
        try:
            yield
        finally:
            gc.collect()
            unfreeze()


@functools.cache
def _register_kernels_once() -> None:
    """Let the first engine of this process speak for all: each goes through every module of vLLM for it."""
    platform = type(current_platform)
    if hasattr(platform, "register_triton_kernel_overrides"):  # 0.30 has none
        register = functools.cache(platform.register_triton_kernel_overrides)
        platform.register_triton_kernel_overrides = lambda *_: register()


def _blocks(options: dict[str, Any]) -> int:
    """Enough blocks of the KV cache for every request: to fill a GiB with zeros takes as long as to load a model."""
    return 64 + options["max_num_seqs"] * options["max_model_len"] // 16


@contextlib.contextmanager
def engine(pack: Path | str, **options: Any) -> Iterator[LLM]:
    """An in-process engine for ``pack``, gone again afterwards."""
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 4,
        "dtype": "float32",
        "seed": 0,
        "distributed_executor_backend": "uni",
        "enable_prefix_caching": False,
        **options,
    }
    defaults.setdefault("num_gpu_blocks_override", _blocks(defaults))
    from vllm.distributed import cleanup_dist_env_and_memory

    def clean_up() -> None:
        cleanup_dist_env_and_memory()
        torch.set_num_threads = _SET_NUM_THREADS

    _register_kernels_once()
    with _young_heap():
        try:
            llm = LLM(str(pack), **defaults)
        except BaseException:
            clean_up()  # or the next engine of this process finds half of this one
            raise
        try:
            yield llm
        finally:
            # The caller's name still refers to the engine, so it has to be told to let go of the process groups.
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            clean_up()


def model_of(llm: LLM) -> torch.nn.Module:
    """The built model of an in-process engine."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def logits_of(llm: LLM, prompt: Prompt) -> torch.Tensor:
    """Logits ``[positions, vocabulary]`` of one prompt, as the model's own ``compute_logits`` returns them."""
    model = model_of(llm)
    captured: list[torch.Tensor] = []
    original = model.compute_logits

    def record(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = original(hidden_states, *args, **kwargs)
        captured.append(logits.detach().float().clone())
        return logits

    model.compute_logits = record
    try:
        (output,) = llm.generate(
            _request(prompt),
            SamplingParams(max_tokens=1, temperature=0, detokenize=False, prompt_logprobs=0),
            use_tqdm=False,
        )
    finally:
        model.compute_logits = original
    return in_order_of_positions(captured, len(output.prompt_token_ids))


def _request(prompt: Prompt) -> dict[str, Any]:
    return prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt}


def in_order_of_positions(parts: list[torch.Tensor], positions: int) -> torch.Tensor:
    """What a prompt's step computed, in order: the last position comes on its own and first, to be sampled from; then
    all of them for ``prompt_logprobs``, at once or in pieces, of which the last may be a single position too.
    """
    sampled = next(index for index, part in enumerate(parts) if part.shape[0] == 1)
    prompt = torch.cat([part for index, part in enumerate(parts) if index != sampled])
    assert prompt.shape[0] >= positions - 1, f"{prompt.shape[0]} logits for a prompt of {positions}"
    return torch.cat([prompt[: positions - 1], parts[sampled]])


def generate(llm: LLM, prompts: Sequence[Prompt], max_tokens: int = 16) -> list[list[int]]:
    """Greedy continuations of some prompts."""
    outputs = llm.generate(
        [_request(prompt) for prompt in prompts],
        SamplingParams(max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def generate_on_two_ranks(pack: Path | str, tokens: int = 24, **options: Any) -> list[list[int]]:
    """Greedy continuations of `PROMPTS` by an engine over two processes."""
    (found,) = generate_each_on_two_ranks([(pack, tokens, options)])
    return found


def generate_each_on_two_ranks(jobs: list[tuple[Path | str, int, dict[str, Any]]]) -> list[list[list[int]]]:
    """The same for several engines, one after another in the same two processes, whose start takes longer than theirs.

    Args:
        jobs: pack, number of tokens and options of each engine.
    """
    script = Path(__file__).with_name("rank.py")
    stated = json.dumps([(get_open_port(), str(pack), tokens, options) for pack, tokens, options in jobs])
    output = run_on_two_ranks([str(script), stated], {"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    found = [json.loads(tokens) for tokens in re.findall(r"TOKENS (\[\[[\d\[\], ]*\]\])", output.stdout)]
    assert len(found) == len(jobs), output.stdout[-2000:] + output.stderr[-4000:]
    return found


def run_on_two_ranks(arguments: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program as two ranks of one thread each, while no other tests of this user do.

    Their segments of shared memory have the same names in every run: what a run that was killed has left is removed.
    """
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    with (Path(tempfile.gettempdir()) / f"vllm-exl3-two-ranks-{os.getuid()}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in Path("/dev/shm").glob("*-cpushm_*"):
            left.unlink()
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        return subprocess.run(
            [*command, "--master-port", str(get_open_port()), *arguments],
            env={**environment, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


def assert_reload_restores(llm: LLM, ids: list[int], module: torch.nn.Module) -> None:
    """Spoil a module's trellises: reloading must give the same logits to the bit, in the same memory."""
    before = logits_of(llm, ids)
    addresses = {name: param.data_ptr() for name, param in module.named_parameters()}
    for param in module.parameters():
        if param.dtype == torch.int16:
            param.data.zero_()
    spoiled = logits_of(llm, ids)
    assert torch.linalg.norm(spoiled.double() - before.double()) > 0.1 * torch.linalg.norm(before.double())
    llm.collective_rpc("reload_weights")
    torch.testing.assert_close(logits_of(llm, ids), before, rtol=0, atol=0)
    assert {name: param.data_ptr() for name, param in module.named_parameters()} == addresses
