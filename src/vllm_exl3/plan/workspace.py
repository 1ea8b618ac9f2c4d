"""GPU memory that a server takes besides weights and KV cache, term by term.

Activations and logits follow from shapes; what the driver and CUDA graphs take is a stated allowance. All of it is an
estimate: ``benchmarks/gpu_plan.py`` holds it against what vLLM allocates.
"""

from collections.abc import Mapping
from typing import Any

from vllm_exl3.pack.metadata import text_config
from vllm_exl3.plan.shapes import expert_top_k, head_dim, number
from vllm_exl3.plan.sizes import GIB, MIB

__all__ = ["batch_defaults", "max_length", "workspace"]


BUFFERS = 64 * MIB
"""vLLM's input buffers and this package's counters; tests/gpu/test_memory.py holds them to it."""
DRIVER = 192 * MIB
"""Code of kernels and libraries that is loaded after vLLM has looked at free memory. An allowance."""
GRAPHS = 256 * MIB
"""CUDA graphs, which vLLM estimates and subtracts. An allowance."""

_LOGIT_BYTES = 14
"""Bytes of one token's logit in vLLM's trial run of the sampler: 16 bits, float32, probabilities, random numbers."""
_EXPERT_WINDOW = 8192
"""Tokens that the grouped prefill of experts handles at once, unless VLLM_EXL3_GROUPED_PREFILL_MAX_ROWS says less."""


def batch_defaults(gpu_bytes: float, gpu_name: str = "") -> tuple[int, int]:
    """``--max-num-batched-tokens`` and ``--max-num-seqs`` that ``vllm serve`` (0.32) takes on a GPU of this size."""
    if gpu_bytes >= 160 * GIB:
        return 16384, 1024
    if gpu_bytes >= 70 * GIB and "a100" not in gpu_name.lower():
        return 8192, 1024
    return 2048, 256


def max_length(config: Mapping[str, Any]) -> int:
    """The context that config.json allows: ``--max-model-len`` where none is given; 0 if it says nothing."""
    return number(text_config(config), "max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def workspace(config: Mapping[str, Any], *, chunk: int, seqs: int, ranks: int, length: int) -> dict[str, int]:
    """Bytes by purpose on one rank.

    Args:
        config: config.json.
        chunk: ``--max-num-batched-tokens``.
        seqs: ``--max-num-seqs``.
        ranks: tensor-parallel ranks.
        length: ``--max-model-len``, over which rotary tables reach.
    """
    text = text_config(config)
    hidden = number(text, "hidden_size")
    inner = -(-number(text, "intermediate_size", "moe_intermediate_size") // ranks)
    heads = number(text, "num_attention_heads")
    width = head_dim(text)
    attention = heads * width * 3 // ranks
    wide = max(3 * inner, attention)
    terms = {
        "activations": 2 * chunk * (3 * hidden + wide + max(hidden, inner)),
        "logits": _LOGIT_BYTES * min(seqs, chunk) * number(text, "vocab_size"),
        "rotary tables": 2 * width * length,
        "buffers": BUFFERS,
        "driver": DRIVER,
        "CUDA graphs": GRAPHS,
    }
    if top_k := expert_top_k(config):
        slots = min(chunk, _EXPERT_WINDOW) * top_k
        width = number(text, "moe_intermediate_size", "intermediate_size")
        terms["experts"] = 2 * slots * (2 * hidden + 3 * -(-width // ranks))
    return terms
