"""Rebuilds the Hugging Face tokenizer of a GGUF file whose pre-tokenizer is ``smollm``.

GGUF keeps vocabulary, merges, special tokens and the chat template, but only the name of the
pre-tokenizer: ``smollm`` stands for single digits followed by GPT-2's byte-level rule.
"""

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["tokenizer_files"]

CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The tokenizer's files, name → text.

    Args:
        metadata: the GGUF file's key-value pairs.

    Raises:
        ValueError: the tokenizer is of another kind, or the vocabulary does not survive the rebuild.
    """
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"GGUF tokenizer {kind[0]} with pre-tokenizer {kind[1]}: expected gpt2 with smollm")
    tokens = metadata["tokenizer.ggml.tokens"]
    special = [i for i, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == CONTROL_TOKEN]
    names = {key: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for key in ("bos", "eos", "padding", "unknown")}
    special_tokens = {
        "bos_token": names["bos"],
        "eos_token": names["eos"],
        "pad_token": names["padding"],
        "unk_token": names["unknown"],
    }
    config = {
        **special_tokens,
        "added_tokens_decoder": {str(i): _added_token(tokens[i]) for i in special},
        "add_prefix_space": False,
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        # GPT2Tokenizer may build a pre-tokenizer of its own instead of taking the file's
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {
        "tokenizer.json": _byte_level_bpe(tokens, metadata["tokenizer.ggml.merges"], special),
        "tokenizer_config.json": _json(config),
        "special_tokens_map.json": _json(special_tokens),
        "chat_template.jinja": metadata["tokenizer.chat_template"],
    }


def _byte_level_bpe(tokens: list[str], merges: list[str], special: list[int]) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    tokenizer.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in special])
    if tokenizer.get_vocab_size() != len(tokens):
        raise ValueError(f"tokenizer: rebuilt with {tokenizer.get_vocab_size()} tokens, expected {len(tokens)}")
    return str(tokenizer.to_str())


def _added_token(text: str) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": text, **flags}


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
