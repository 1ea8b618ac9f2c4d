"""gpt-oss: a generated pack against the same weights in transformers' own class."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file

from tests.serving.conftest import relative_error
from tests.serving.engine import (
    PROMPTS,
    assert_reload_restores,
    engine,
    generate,
    generate_on_two_ranks,
    logits_of,
    model_of,
)
from vllm_exl3.pack import Pack
from vllm_exl3.pack.codec import dense_weight
from vllm_exl3.pack.stored import Codebook, pad_to_block
from vllm_exl3.tools.pack_writer import PackTensor, linear_tensors, write_pack

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD, EXPERTS, TOP_K, VOCAB = 256, 192, 2, 4, 2, 64, 6, 2, 640
"""The experts' inner width is padded to 256."""

CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K,
    "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "attention_bias": True, "tie_word_embeddings": False, "torch_dtype": "float32",
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 1024,
    },
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

PROMPT = [1, 17, 200, 33, 5, 90, 41, 77, 250, 3, 8, 120, 64, 7, 19, 230, 111, 54, 9, 283, 42, 6, 71, 12]
"""Longer than the sliding window."""


def linears() -> dict[str, tuple[int, int]]:
    """(in, out) of every EXL3 linear."""
    found = {"lm_head": (HIDDEN, VOCAB)}
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        found[f"{attention}.q_proj"] = (HIDDEN, HEADS * HEAD)
        found[f"{attention}.k_proj"] = found[f"{attention}.v_proj"] = (HIDDEN, KV_HEADS * HEAD)
        found[f"{attention}.o_proj"] = (HEADS * HEAD, HIDDEN)
        for expert in range(EXPERTS):
            for name in ("gate_proj", "up_proj"):
                found[f"{mlp}.experts.{expert}.{name}"] = (HIDDEN, INTERMEDIATE)
            found[f"{mlp}.experts.{expert}.down_proj"] = (INTERMEDIATE, HIDDEN)
    return found


def write_gpt_oss(folder: Path) -> Path:
    rng = np.random.default_rng(4)
    tensors: list[PackTensor] = []

    def add(name: str, values: npt.NDArray[Any]) -> None:
        code = {"float32": "F32", "float16": "F16"}[str(values.dtype)]
        tensors.append(PackTensor(name, code, values.shape, lambda: values))

    def normal(*shape: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    def signs(width: int, scale: float) -> npt.NDArray[np.float16]:
        values = np.zeros(pad_to_block(width), np.float16)
        values[:width] = rng.choice([-1.0, 1.0], width) * rng.uniform(0.8, 1.2, width) * scale
        return values

    for key, (inputs, outputs) in linears().items():
        rows, columns = pad_to_block(inputs), pad_to_block(outputs)
        leaves = {
            "suh": signs(inputs, inputs**-0.5),
            "svh": signs(outputs, 1.0),
            "trellis": rng.integers(0, 1 << 16, rows * columns * 3 // 16, dtype=np.uint16),
        }
        tensors += linear_tensors(
            key, in_features=rows, out_features=columns, half_bits=6, codebook=Codebook.MUL1, make=leaves.__getitem__
        )
        if key != "lm_head":
            add(f"{key}.bias", signs(outputs, 0.3))
    add("model.embed_tokens.weight", normal(VOCAB, HIDDEN))
    add("model.norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        add(f"{prefix}.input_layernorm.weight", normal(HIDDEN) * 0.1 + 1)
        add(f"{prefix}.post_attention_layernorm.weight", normal(HIDDEN) * 0.1 + 1)
        add(f"{prefix}.self_attn.sinks", normal(HEADS))
        add(f"{prefix}.mlp.router.weight", normal(EXPERTS, HIDDEN, scale=2 * HIDDEN**-0.5))
        add(f"{prefix}.mlp.router.bias", normal(EXPERTS))
    return write_pack(
        folder, config=CONFIG, tensors=tensors,
        quantization={"quant_method": "exl3", "bits": 3.0, "head_bits": 3, "codebook": "mul1"},
    )  # fmt: skip


def reference_logits(pack: Path, ids: list[int]) -> torch.Tensor:
    """What transformers' class computes with the decoded weights."""
    from transformers import GptOssConfig, GptOssForCausalLM

    model = GptOssForCausalLM._from_config(GptOssConfig(**CONFIG), attn_implementation="eager").float().eval()
    stored = load_file(next(pack.glob("*.safetensors")))
    state = {name: values.float() for name, values in stored.items() if values.dtype != torch.int16}
    for key, linear in Pack.open(pack).linears.items():
        inputs, outputs = linears()[key]
        parts = [stored[f"{key}.{leaf}"].numpy() for leaf in ("trellis", "suh", "svh")]
        weight = dense_weight(parts[0], linear.half_bits, linear.codebook, *parts[1:])[:inputs, :outputs]
        state[f"{key}.weight"] = torch.from_numpy(weight.T.copy()).float()
        if f"{key}.bias" in state:
            state[f"{key}.bias"] = state[f"{key}.bias"][:outputs]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts"
        each = [f"{prefix}.{expert}" for expert in range(EXPERTS)]
        gates, ups = ([state[f"{key}.{name}.weight"].T for key in each] for name in ("gate_proj", "up_proj"))
        state[f"{prefix}.gate_up_proj"] = torch.stack(
            [torch.stack(pair, 2).flatten(1) for pair in zip(gates, ups, strict=True)]
        )
        gates, ups = ([state[f"{key}.{name}.bias"] for key in each] for name in ("gate_proj", "up_proj"))
        state[f"{prefix}.gate_up_proj_bias"] = torch.stack(
            [torch.stack(pair, 1).flatten() for pair in zip(gates, ups, strict=True)]
        )
        state[f"{prefix}.down_proj"] = torch.stack([state[f"{key}.down_proj.weight"].T for key in each])
        state[f"{prefix}.down_proj_bias"] = torch.stack([state[f"{key}.down_proj.bias"] for key in each])
    wanted = model.state_dict()
    model.load_state_dict({name: state[name] for name in wanted})
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt_oss(tmp_path_factory.mktemp("gpt_oss") / "pack")


def test_logits_are_transformers(pack: Path) -> None:
    expected = reference_logits(pack, PROMPT)
    with engine(pack) as llm:
        assert relative_error(logits_of(llm, PROMPT), expected.numpy()) < 1e-3
        assert_reload_restores(llm, PROMPT, model_of(llm).model.layers[1].mlp.experts)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"enable_expert_parallel": True}], ids=["tensors", "experts"])
def test_two_ranks_continue_alike(pack: Path, parallel: dict[str, Any]) -> None:
    with engine(pack) as llm:
        alone = generate(llm, PROMPTS, max_tokens=12)
    assert generate_on_two_ranks(pack, tokens=12, **parallel) == alone
