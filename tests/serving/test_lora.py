"""LoRA adapters on EXL3 layers: beside an EXL3 head, several in one batch, against the same on dense layers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from tests.serving.conftest import PACKS
from tests.serving.dense_twin import write_dense_twin
from tests.serving.engine import engine, generate
from tests.serving.test_embedding import sixteen_bit_twin
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.tools.table_writer import quantize_embedding

PACK = PACKS / "llama_odd-4.0-mul1"
PROMPT = [1, 2, 3, 4, 5]
EVERY_LAYER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter(folder: Path, scale: float, targets: tuple[str, ...] = ("o_proj", "down_proj"), seed: int = 0) -> str:
    """An adapter of rank 4 on some linears of every layer; at scale 0 it changes nothing."""
    folder.mkdir()
    config = json.loads((PACK / "config.json").read_text())
    hidden, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    sizes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, mlp),
        "mlp.up_proj": (hidden, mlp),
        "mlp.down_proj": (mlp, hidden),
    }
    tensors = {}
    generator = torch.Generator().manual_seed(seed)
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            if name.rpartition(".")[2] in targets:
                key = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{key}.lora_A.weight"] = torch.randn((4, inputs), generator=generator)
                tensors[f"{key}.lora_B.weight"] = torch.randn((outputs, 4), generator=generator) * scale
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def with_adapters(llm: LLM, requests: list[LoRARequest | None]) -> list[list[int]]:
    """Continuations of the prompt, in one batch."""
    sampling = SamplingParams(max_tokens=16, temperature=0, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": PROMPT} for _ in requests]
    outputs = llm.generate(prompts, sampling, lora_request=requests, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_adapters_work_beside_an_exl3_head(tmp_path: Path) -> None:
    with engine(PACK) as llm:
        plain = generate(llm, [PROMPT])[0]
    with engine(PACK, enable_lora=True, max_lora_rank=8) as llm:
        assert generate(llm, [PROMPT])[0] == plain
        first, second = (
            LoRARequest(str(number), number, adapter(tmp_path / str(number), scale))
            for number, scale in ((1, 0.0), (2, 1.0))
        )
        assert with_adapters(llm, [first]) == [plain]
        assert with_adapters(llm, [second]) != [plain]


@pytest.mark.parametrize("adapters", [1, 2], ids=["one slot", "two slots"])
def test_requests_of_the_base_model_are_not_those_of_an_adapter_beside_them(adapters: int, tmp_path: Path) -> None:
    """vLLM's CPU kernels take index -1, no adapter, for the last one: in prompts and in single tokens."""
    requests: list[LoRARequest | None] = [
        LoRARequest(str(number), number, adapter(tmp_path / str(number), 1.0, EVERY_LAYER, seed=number))
        for number in range(1, adapters + 1)
    ]
    with engine(PACK, enable_lora=True, max_lora_rank=8, max_loras=adapters) as llm:
        (plain,) = with_adapters(llm, [None])
        alone = [with_adapters(llm, [request])[0] for request in requests]
        assert with_adapters(llm, [None, *requests, None]) == [plain, *alone, plain]
    assert plain not in alone


@pytest.mark.slow
def test_several_adapters_in_one_batch_are_those_of_the_dense_model(tmp_path: Path) -> None:
    """On every linear, fused ones and padded ones too; the oracle is the model that the pack decodes to."""
    requests: list[LoRARequest | None] = [
        LoRARequest(f"a{number}", number, adapter(tmp_path / str(number), scale, EVERY_LAYER, seed=number))
        for number, scale in ((1, 0.05), (2, 0.3))
    ]
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with engine(PACK, **options) as llm:
        alone = [with_adapters(llm, [request])[0] for request in requests]
        together = with_adapters(llm, requests)
    with engine(write_dense_twin(PACK, tmp_path / "dense"), **options) as llm:
        expected = with_adapters(llm, requests)
        plain = with_adapters(llm, [None])
    assert together == alone == expected
    assert len({tuple(tokens) for tokens in together + plain}) == len(requests) + 1


def test_adapters_on_routed_experts_are_refused_with_what_to_name_instead() -> None:
    pack = PACKS / "qwen3_moe-3.0-mul1"
    with (
        pytest.raises(Exl3PackError, match=r"LoRA adapters on routed experts.*--lora-target-modules q_proj"),
        engine(pack, enable_lora=True, max_lora_rank=8),
    ):
        pass


@pytest.mark.slow
def test_adapters_on_the_attention_of_a_pack_with_experts_are_served(tmp_path: Path) -> None:
    pack = PACKS / "qwen3_moe-3.0-mul1"
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    with engine(pack) as llm:
        plain = generate(llm, [PROMPT])[0]
    with engine(pack, enable_lora=True, max_lora_rank=8, lora_target_modules=targets) as llm:
        assert with_adapters(llm, [None]) == [plain]


def vocabulary_adapter(folder: Path, module: str) -> str:
    """An adapter of rank 4 on the head or on the token embedding, which changes what is said."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(2)
    hidden, rows = 256, 640
    if module == "lm_head":
        shapes = {"lm_head.lora_A.weight": (4, hidden), "lm_head.lora_B.weight": (rows, 4)}
    else:
        key = "model.embed_tokens.lora_embedding"
        shapes = {f"{key}_A": (4, rows), f"{key}_B": (hidden, 4)}
    tensors = {f"base_model.model.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": [module]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "module"), [(16, "lm_head"), (16, "embed_tokens"), (8, "embed_tokens"), (8, "lm_head")]
)
def test_heads_and_tables_take_adapters(table: int, module: str, tmp_path: Path) -> None:
    """The same tokens as from the model's dense layers."""
    pack, twin = PACK, write_dense_twin(PACK, tmp_path / "twin")
    if table == 8:
        pack = tmp_path / "int8"
        quantize_embedding(PACK, pack, 8)
        twin = sixteen_bit_twin(pack, tmp_path / "16", 256)
    request = LoRARequest("vocabulary", 1, vocabulary_adapter(tmp_path / "adapter", module))
    found = []
    for model in (pack, twin):
        with engine(model, enable_lora=True, max_lora_rank=8, max_loras=2) as llm:
            found.append(with_adapters(llm, [request, None]))
    assert found[0] == found[1] and found[0][0] != found[0][1]
