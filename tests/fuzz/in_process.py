"""Load packs with vLLM and compute logits, in this process and without an engine: a hundredth of a second each.

What vLLM's CPU worker does is done here in its order: the engine's configuration, the model class, its weights, what
follows loading, one forward pass. Attention alone is computed by PyTorch, since vLLM's wants a scheduler and a cache.
"""

import gc
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model
from vllm.transformers_utils import repo_utils
from vllm.utils.network_utils import get_distributed_init_method, get_open_port

import vllm_exl3
from vllm_exl3.serving import report

__all__ = ["TOKENS", "Loader"]

TOKENS = [1, 5, 9, 200, 17, 3, 250, 64]
"""The prompt; its ids are below the vocabulary of every model here."""


class Loader:
    """Loads one pack after the other."""

    def __init__(self) -> None:
        vllm_exl3.register()
        logging.getLogger("vllm").setLevel(logging.ERROR)
        logging.getLogger("vllm.exl3").setLevel(logging.ERROR)
        # A load collects garbage twice, and looks for 0.3 s whether other programs keep the processors busy.
        report.measure_others = lambda *_, **__: None
        # A configuration that does not parse is parsed again two seconds later.
        repo_utils.time = SimpleNamespace(sleep=lambda _: None)
        self._started = self._frozen = False

    def logits(self, folder: Path) -> torch.Tensor:
        """Logits ``[tokens, vocabulary]`` float32 of `TOKENS`, from a pack that is loaded and let go again.

        Raises:
            Exception: whatever vLLM or this package says of the pack.
        """
        config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            max_num_batched_tokens=64,
            max_num_seqs=4,
            dtype="float32",
            seed=0,
        ).create_engine_config()
        with set_current_vllm_config(config):
            if not self._started:
                address = get_distributed_init_method("127.0.0.1", get_open_port())
                init_distributed_environment(1, 0, address, 0, "gloo")
                ensure_model_parallel_initialized(1, 1)
                self._started = True
            attention, empty_cache = Attention.forward, torch.accelerator.empty_cache
            try:
                Attention.forward = _attend
                torch.accelerator.empty_cache = lambda: None  # as the CPU worker has it
                model = get_model(vllm_config=config)
                with torch.inference_mode(), set_forward_context(None, config):
                    hidden = model(torch.tensor(TOKENS), torch.arange(len(TOKENS)))
                    logits = model.compute_logits(hidden)
            finally:
                Attention.forward, torch.accelerator.empty_cache = attention, empty_cache
        if not self._frozen:
            self._frozen = True
            gc.collect()
            gc.freeze()  # what is here now stays, and need not be looked through again
        assert isinstance(logits, torch.Tensor)
        report._reports.clear()  # which are kept for a server's lifetime
        return logits.float()


def _attend(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Causal attention over one prompt."""
    tokens = query.shape[0]
    q, k, v = (
        part.reshape(tokens, heads, -1).transpose(0, 1)
        for part, heads in ((query, self.num_heads), (key, self.num_kv_heads), (value, self.num_kv_heads))
    )
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=self.impl.scale, enable_gqa=self.num_heads != self.num_kv_heads
    )
    return out.transpose(0, 1).reshape(tokens, -1)
