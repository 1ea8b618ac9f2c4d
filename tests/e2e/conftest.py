"""A tiny GGUF-like model for the demo's tests: metadata and tensors as `gguf` would read them."""

from typing import Any

import numpy as np
import pytest

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, LAYERS = 6, 3, 8, 48, 80, 2


@pytest.fixture(scope="session")
def metadata() -> dict[str, Any]:
    """Metadata of a llama model with a byte-level tokenizer of 256 bytes, one merge chain and 4 special tokens."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
    merged = ["he", "hel", "hell", "hello", "\u0120w", "12"]
    merges = ["h e", "he l", "hel l", "hell o", "\u0120 w", "1 2"]
    tokens = [*special, *letters, *merged]
    return {
        "general.architecture": "llama",
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": MLP,
        "llama.block_count": LAYERS,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.context_length": 512,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "llama.rope.freq_base": 100000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(special) + [1] * (len(tokens) - len(special)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


@pytest.fixture(scope="session")
def stored(metadata: dict[str, Any]) -> dict[str, np.ndarray]:
    """The model's tensors under GGUF names, ``[out, in]``."""
    random = np.random.default_rng(0)
    shapes = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (MLP, HIDDEN),
        "ffn_up": (MLP, HIDDEN),
        "ffn_down": (HIDDEN, MLP),
    }
    vocab = len(metadata["tokenizer.ggml.tokens"])
    tensors = {
        "token_embd.weight": random.standard_normal((vocab, HIDDEN), np.float32),
        "output_norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        for part, shape in shapes.items():
            tensors[f"blk.{layer}.{part}.weight"] = random.standard_normal(shape, np.float32)
    return tensors
