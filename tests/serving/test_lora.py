"""LoRA adapters on EXL3 layers, in a model whose head is EXL3 too."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.serving.conftest import PACKS
from tests.serving.engine import engine, generate

PACK = PACKS / "llama_odd-4.0-mul1"
PROMPT = [1, 2, 3, 4, 5]


def adapter(folder: Path, scale: float) -> str:
    """An adapter on every o_proj and down_proj, of rank 4; at scale 0 it changes nothing."""
    folder.mkdir()
    config = json.loads((PACK / "config.json").read_text())
    hidden, tensors = config["hidden_size"], {}
    heads = config["num_attention_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(0)
    for layer in range(config["num_hidden_layers"]):
        for name, inputs in (("self_attn.o_proj", heads), ("mlp.down_proj", config["intermediate_size"])):
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn((4, inputs), generator=generator)
            tensors[f"{key}.lora_B.weight"] = torch.randn((hidden, 4), generator=generator) * scale
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["o_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def test_adapters_work_beside_an_exl3_head(tmp_path: Path) -> None:
    with engine(PACK) as llm:
        plain = generate(llm, [PROMPT])[0]
    with engine(PACK, enable_lora=True, max_lora_rank=8) as llm:
        assert generate(llm, [PROMPT])[0] == plain

        def with_adapter(number: int, scale: float) -> list[int]:
            request = LoRARequest(str(number), number, adapter(tmp_path / str(number), scale))
            sampling = SamplingParams(max_tokens=16, temperature=0, detokenize=False, ignore_eos=True)
            prompt = {"prompt_token_ids": PROMPT}
            return list(llm.generate(prompt, sampling, lora_request=request, use_tqdm=False)[0].outputs[0].token_ids)

        assert with_adapter(1, 0.0) == plain
        assert with_adapter(2, 1.0) != plain
