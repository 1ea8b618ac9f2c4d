"""Writes packs with random trellis bits: the shape and format of a real model of any size, in seconds.

Every 16-bit pattern is a valid trellis, so random bits decode to weights of unit scale. For tests of
loading, memory and tensor parallelism, and for benchmarks that need no meaning in the answers.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack.bfloat16 import to_bfloat16
from vllm_exl3.pack.stored import Codebook, pad_to_block
from vllm_exl3.tools.pack_writer import WRITER, PackTensor, linear_tensors, write_pack

__all__ = ["write_random_pack"]

CODEBOOK_RMS = {Codebook.INST3: 1.2437, Codebook.MCG: 1.2441, Codebook.MUL1: 1.0003}
"""Root mean square of a codebook over all 65,536 states."""

_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
_NORMED = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True)
class _Linear:
    key: str
    in_features: int
    out_features: int
    gain: float = 1.0
    bias: bool = False


def write_random_pack(
    folder: str | os.PathLike[str],
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    bits: float | Callable[[str], float] = 4,
    head_bits: float | None = 6,
    codebook: str | Callable[[str], str] = "mul1",
    architecture: str = "LlamaForCausalLM",
    seed: int = 0,
    tie: bool = False,
    dtype: str = "bfloat16",
    experts: int = 0,
    top_k: int = 8,
    max_shard_bytes: int = 8 << 30,
    hollow: bool = False,
) -> Path:
    """Write a decoder-only model with random EXL3 linears, streaming to disk.

    Activations keep about unit scale through the layers, and padded channels are zero, as in a real pack.

    Args:
        folder: where the pack goes; an existing folder is replaced.
        hidden: width of the residual stream; any number, padded to a multiple of 128 in the linears.
        intermediate: width of the MLP, or of each routed expert; padded likewise.
        layers: decoder layers.
        heads: attention heads.
        kv_heads: key-value heads.
        head_dim: channels of a head.
        vocab: vocabulary size.
        bits: K of the body's linears, or a function of the module's key.
        head_bits: K of ``lm_head``; 16 stores it dense, None stores none (the embedding serves as head).
        codebook: ``3inst``, ``mcg`` or ``mul1``, or a function of the module's key.
        architecture: ``LlamaForCausalLM``, ``MistralForCausalLM``, ``Qwen2ForCausalLM`` (biased q, k, v),
            ``Qwen3ForCausalLM`` (q and k norms) or ``Qwen3MoeForCausalLM`` (the same with routed experts).
        seed: of everything random.
        tie: what ``tie_word_embeddings`` says; a stored head serves either way.
        dtype: ``bfloat16``, ``float16`` or ``float32``, of the dense tensors and in ``config.json``.
        experts: routed experts of a layer; 0 but for ``Qwen3MoeForCausalLM``.
        top_k: how many of them serve a token.
        max_shard_bytes: a file that would grow past this is split, with an index.
        hollow: write headers only, for plans: files of full size that take no disk space and hold zeros.

    Returns:
        The folder.

    Raises:
        ValueError: the architecture or the dtype is not one of these, or experts do not go with it, or there is no
            head at all.
    """
    if architecture not in _MODEL_TYPES:
        raise ValueError(f"architecture {architecture}: expected one of {', '.join(_MODEL_TYPES)}")
    if (architecture == "Qwen3MoeForCausalLM") != (experts > 0):
        raise ValueError(
            f"{architecture} with {experts} experts: expected Qwen3MoeForCausalLM with some, others with 0"
        )
    if head_bits is None and not tie:
        raise ValueError("head_bits=None stores no head, which takes tie=True")
    bits_of = bits if callable(bits) else lambda key: bits
    codebook_of = codebook if callable(codebook) else lambda key: codebook
    source = _Random(seed, dtype)

    linears = list(
        _body(
            architecture=architecture,
            hidden=hidden,
            intermediate=intermediate,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            experts=experts,
        )
    )
    head = _Linear("lm_head", hidden, vocab, gain=2.0)
    by_layer: dict[str, list[_Linear]] = {}
    for linear in linears:
        by_layer.setdefault(linear.key.split(".")[2], []).append(linear)

    tensors = [source.dense("model.embed_tokens.weight", (vocab, hidden))]
    for number in range(layers):
        prefix = f"model.layers.{number}"
        tensors.append(source.ones(f"{prefix}.input_layernorm.weight", hidden))
        tensors.append(source.ones(f"{prefix}.post_attention_layernorm.weight", hidden))
        if architecture in _NORMED:
            tensors += [source.ones(f"{prefix}.self_attn.{name}_norm.weight", head_dim) for name in "qk"]
        if experts:
            tensors.append(source.dense(f"{prefix}.mlp.gate.weight", (experts, hidden), scale=2 * hidden**-0.5))
        for linear in by_layer[str(number)]:
            tensors += source.linear(linear, bits_of(linear.key), codebook_of(linear.key))
    tensors.append(source.ones("model.norm.weight", hidden))
    if head_bits == 16:
        tensors.append(source.dense("lm_head.weight", (vocab, hidden), scale=2 * hidden**-0.5))
    elif head_bits is not None:
        tensors += source.linear(head, head_bits, codebook_of("lm_head"))

    weights = sum(linear.in_features * linear.out_features for linear in linears)
    average = sum(bits_of(x.key) * x.in_features * x.out_features for x in linears) / weights
    return write_pack(
        folder,
        config={
            "architectures": [architecture],
            "model_type": _MODEL_TYPES[architecture],
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": tie,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "torch_dtype": dtype,
            **(_expert_config(intermediate, experts, top_k) if experts else {}),
        },
        quantization={
            "quant_method": "exl3",
            "version": WRITER,
            "bits": round(average, 2),
            "head_bits": 16 if head_bits is None else head_bits,
            "calibration": {"rows": 0, "cols": 0},
            "out_scales": "never",
            "codebook": codebook_of(linears[0].key),
        },
        tensors=tensors,
        max_shard_bytes=max_shard_bytes,
        hollow=hollow,
    )


def _expert_config(intermediate: int, experts: int, top_k: int) -> dict[str, Any]:
    return {
        "moe_intermediate_size": intermediate,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _body(
    *,
    architecture: str,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    experts: int,
) -> Iterator[_Linear]:
    """The linears of every layer; those that write to the residual stream are scaled down to keep its size."""
    bias = architecture == "Qwen2ForCausalLM"
    residual = (2 * layers) ** -0.5
    queries, keys = heads * head_dim, kv_heads * head_dim
    for number in range(layers):
        attention, mlp = f"model.layers.{number}.self_attn", f"model.layers.{number}.mlp"
        yield _Linear(f"{attention}.q_proj", hidden, queries, bias=bias)
        yield _Linear(f"{attention}.k_proj", hidden, keys, bias=bias)
        yield _Linear(f"{attention}.v_proj", hidden, keys, bias=bias)
        yield _Linear(f"{attention}.o_proj", queries, hidden, gain=residual)
        for part in [f"{mlp}.experts.{expert}" for expert in range(experts)] or [mlp]:
            yield _Linear(f"{part}.gate_proj", hidden, intermediate)
            yield _Linear(f"{part}.up_proj", hidden, intermediate)
            # silu(gate)·up has a root mean square near 0.6 for unit inputs
            yield _Linear(f"{part}.down_proj", intermediate, hidden, gain=residual / 0.6)


class _Random:
    """Makes the tensors of one pack. Each has a generator of its own, so that none depends on the order."""

    def __init__(self, seed: int, dtype: str) -> None:
        codes = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
        if dtype not in codes:
            raise ValueError(f"dtype {dtype}: expected one of {', '.join(codes)}")
        self.seed = seed
        self.code = codes[dtype]

    def generator(self, name: str) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64([self.seed, *name.encode()]))

    def stored(self, values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        return to_bfloat16(values) if self.code == "BF16" else values.astype({"F16": "f2", "F32": "f4"}[self.code])

    def dense(self, name: str, shape: tuple[int, ...], scale: float = 1.0) -> PackTensor:
        def make() -> npt.NDArray[Any]:
            return self.stored(self.generator(name).standard_normal(shape, np.float32) * np.float32(scale))

        return PackTensor(name, self.code, shape, make)

    def ones(self, name: str, width: int) -> PackTensor:
        return PackTensor(name, self.code, (width,), lambda: self.stored(np.ones(width, np.float32)))

    def linear(self, linear: _Linear, bits: float, codebook: str) -> list[PackTensor]:
        half_bits = round(2 * bits)
        kind = next(kind for kind in Codebook if kind.label == codebook)
        rows, columns = pad_to_block(linear.in_features), pad_to_block(linear.out_features)
        scale = linear.gain / (CODEBOOK_RMS[kind] * linear.in_features**0.5)

        def make(leaf: str) -> npt.NDArray[Any]:
            generator = self.generator(f"{linear.key}.{leaf}")
            if leaf == "suh":
                return _signed_scales(generator, linear.in_features, rows, scale)
            if leaf == "svh":
                return _signed_scales(generator, linear.out_features, columns, 1.0)
            words = rows * columns * half_bits // 32
            return generator.bit_generator.random_raw(-(-words // 4)).view(np.uint16)[:words]

        tensors = linear_tensors(
            linear.key, in_features=rows, out_features=columns, half_bits=half_bits, codebook=kind, make=make
        )
        if linear.bias:
            name = f"{linear.key}.bias"
            # stored at the padded width; the padding is zero like the scales'
            tensors.append(
                PackTensor(name, "F16", (columns,), lambda: make("svh") * np.float16(0.1)),
            )
        return tensors


def _signed_scales(generator: np.random.Generator, width: int, padded: int, scale: float) -> npt.NDArray[np.float16]:
    """``padded`` real-valued scales with random signs near ``scale``; zero from ``width`` on."""
    values = scale * generator.choice([-1.0, 1.0], width) * generator.uniform(0.8, 1.2, width)
    scales = np.zeros(padded, np.float16)
    scales[:width] = values
    return scales
