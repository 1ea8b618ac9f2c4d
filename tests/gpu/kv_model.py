"""A small 16-bit Llama of random weights, and what it gives in float64 where keys and values are kept as int4."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_exl3.attention.layout import decode_slots, encode_rows, rotate, unrotate

__all__ = ["CONFIG", "simulated_logits", "write_llama"]

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 384, "intermediate_size": 512,
    "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 640,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def write_llama(folder: Path, sharpness: float = 1.0, **changes: int) -> Path:
    """Weights that keep activations near one, and logits a few apart.

    Args:
        folder: where to.
        sharpness: what queries are multiplied by: from 3 on, a few of many thousand keys take most of the weight.
        changes: to `CONFIG`; not of sizes.
    """
    config = {**CONFIG, **changes}
    generator = torch.Generator().manual_seed(0)
    hidden, mlp, head = (int(CONFIG[key]) for key in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = (int(CONFIG[key]) * head for key in ("num_attention_heads", "num_key_value_heads"))
    tensors = {
        "model.embed_tokens.weight": torch.randn(640, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": torch.randn(640, hidden, generator=generator) * 3 * hidden**-0.5,
    }
    for layer in range(int(config["num_hidden_layers"])):
        for name, shape in {
            "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv_heads, hidden),
            "self_attn.v_proj": (kv_heads, hidden), "self_attn.o_proj": (hidden, heads),
            "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp),
        }.items():  # fmt: skip
            weight = torch.randn(shape, generator=generator) * 1.4 * shape[1] ** -0.5
            weight *= sharpness if name == "self_attn.q_proj" else 1.0
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.bfloat16() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def simulated_logits(
    folder: Path, ids: list[int], int4: bool, device: str = "cpu", last: int | None = None
) -> torch.Tensor:
    """float64 ``[len(ids), vocabulary]`` of a causal forward pass.

    Args:
        folder: of `write_llama`.
        ids: the tokens.
        int4: whether keys and values go through the int4 format.
        device: where to compute.
        last: only the last so many rows, of a model of one layer.
    """
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert last is None or layers == 1
    rows = slice(-last if last else None, None)
    weights = {name: value.to(device).double() for name, value in load_file(folder / "model.safetensors").items()}
    head, eps = int(CONFIG["head_dim"]), float(CONFIG["rms_norm_eps"])
    x = weights["model.embed_tokens.weight"][torch.tensor(ids, device=device)]

    def norm(values: torch.Tensor) -> torch.Tensor:
        return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)

    def kept(values: torch.Tensor) -> torch.Tensor:
        if not int4:
            return values
        rows = encode_rows(rotate(values).float())
        return unrotate(decode_slots(torch.cat((rows, rows), -1))[0])

    frequency = float(CONFIG["rope_theta"]) ** (-torch.arange(0, head, 2, device=device).double() / head)
    angle = torch.arange(len(ids), device=device).double()[:, None, None] * frequency
    cos, sin = angle.cos(), angle.sin()

    def turned(values: torch.Tensor) -> torch.Tensor:
        a, b = values.chunk(2, -1)
        c, s = cos[-values.shape[0] :], sin[-values.shape[0] :]
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    position = torch.arange(len(ids), device=device)
    hidden_later = position > position[rows, None]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."

        def linear(values: torch.Tensor, name: str, prefix: str = prefix) -> torch.Tensor:
            return values @ weights[f"{prefix}{name}.weight"].T

        h = norm(x)
        x = x[rows]
        q, k, v = (
            linear(h[rows] if name == "q" else h, f"self_attn.{name}_proj").unflatten(-1, (-1, head)) for name in "qkv"
        )
        q, k, v = turned(q), kept(turned(k)), kept(v)
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (-1, group)), k) * head**-0.5
        p = scores.masked_fill(hidden_later, -torch.inf).softmax(-1)
        x = x + linear(torch.einsum("hgqk,khd->qhgd", p, v).flatten(1), "self_attn.o_proj")
        h = norm(x)
        gate = torch.nn.functional.silu(linear(h, "mlp.gate_proj"))
        x = x + linear(gate * linear(h, "mlp.up_proj"), "mlp.down_proj")
    return norm(x) @ weights["lm_head.weight"].T
