"""Drafts of every class that vLLM knows beside packs: a draft is what its own checkpoint says, whatever its target is.

Draft models, MTP layers and n-grams are in test_speculation.py.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.compilation.backends import set_model_tag
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from tests.serving.conftest import PACKS
from tests.serving.dense_twin import write_dense_twin
from tests.serving.draft_checkpoints import VOCABULARY, write_draft
from tests.serving.engine import PROMPTS, engine, generate, model_of
from tests.serving.sampling import lend_kernels
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.serving.drafts import draft_being_built
from vllm_exl3.tools.table_writer import quantize_embedding

ODD, ROW_CODED = PACKS / "llama_odd-4.0-mul1", PACKS / "qwen3-2.25-mul1-emb4"
TOKENS = 12

lend_kernels()


def slow(*values: Any) -> Any:
    """A case that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def target(kind: str, folder: Path) -> Path:
    """A pack with an EXL3 head and a table in 16 bits, or with one of them otherwise."""
    if kind == "exl3 head":
        return ODD
    if kind == "row-coded table":
        return ROW_CODED
    if kind == "int8 table":
        quantize_embedding(ODD, folder, 8)
        return folder
    assert kind == "dense head"
    twin = write_dense_twin(ODD, folder.with_name("twin"))
    tensors = load_file(ODD / "model.safetensors")
    tensors = {name: values for name, values in tensors.items() if not name.startswith("lm_head.")}
    folder.mkdir()
    tensors["lm_head.weight"] = load_file(twin / "model.safetensors")["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((ODD / "config.json").read_text())
    return folder


@pytest.mark.parametrize(
    ("kind", "method", "options"),
    [
        ("exl3 head", "eagle3", {}),
        ("int8 table", "eagle3", {"vocabulary": 320}),
        slow("exl3 head", "eagle3", {"vocabulary": 320}),
        slow("exl3 head", "eagle3", {"own_embedding": True}),
        slow("dense head", "eagle3", {}),
        slow("dense head", "eagle", {}),
        slow("row-coded table", "eagle3", {}),
        slow("row-coded table", "eagle3", {"own_embedding": True}),
        slow("int8 table", "eagle3", {"own_embedding": True}),
        slow("int8 table", "eagle", {}),
        slow("int8 table", "eagle", {"own_embedding": True}),
        slow("exl3 head", "eagle", {}),
        slow("exl3 head", "eagle", {"own_embedding": True}),
        slow("exl3 head", "dflash", {}),
        slow("row-coded table", "dflash", {}),
        slow("exl3 head", "medusa", {}),
        slow("int8 table", "medusa", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)) or "shared",
)
def test_a_draft_changes_no_token(kind: str, method: str, options: dict[str, Any], tmp_path: Path) -> None:
    if method == "medusa":
        pytest.importorskip("vllm.v1.spec_decode.medusa", reason="vLLM 0.33 has dropped it")
    pack = target(kind, tmp_path / "pack")
    draft = write_draft(tmp_path / "draft", method, **options)
    with engine(pack) as llm:
        expected = generate(llm, PROMPTS, TOKENS)
    speculation = {"model": str(draft), "method": method, "num_speculative_tokens": 2}
    with engine(pack, speculative_config=speculation, disable_log_stats=False) as llm:
        assert generate(llm, PROMPTS, TOKENS) == expected
        drafter = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter.model
        counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        assert counters["vllm:spec_decode_num_draft_tokens"]
        if method == "eagle3":
            assert type(drafter.lm_head.quant_method) is UnquantizedEmbeddingMethod
            assert drafter.lm_head.weight.shape[0] == options.get("vocabulary", VOCABULARY)
        if method != "medusa":  # which has no embedding; others keep theirs, or are given the target's
            in_16_bits = "own_embedding" in options or kind in ("exl3 head", "dense head")
            assert ("weight" in drafter.model.embed_tokens._parameters) == in_16_bits


@pytest.mark.slow
def test_mlp_speculators_are_refused_by_vllm_itself(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", "mlp_speculator")
    speculation = {"model": str(draft), "method": "mlp_speculator", "num_speculative_tokens": 2}
    with (
        pytest.raises(Exception, match=r"SpeculativeConfig|mlp_speculator|MLPSpeculator"),
        engine(ODD, speculative_config=speculation),
    ):
        pass


def test_a_pack_as_an_eagle_draft_is_refused_by_name(tmp_path: Path) -> None:
    """Its layers have other names in vLLM than in any checkpoint, and each makes a configuration of its own."""
    draft = write_draft(tmp_path / "draft", "eagle3")
    config = json.loads((draft / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "exl3", "bits": 4.0}
    (draft / "config.json").write_text(json.dumps(config))
    save_file(load_file(ODD / "model.safetensors"), draft / "model.safetensors", {"format": "pt"})
    speculation = {"model": str(draft), "method": "eagle3", "num_speculative_tokens": 2}
    with (
        pytest.raises(Exl3PackError, match=r"EXL3 pack as a draft of method eagle3"),
        engine(ODD, speculative_config=speculation),
    ):
        pass


class Model:
    """Stands for a model's configuration, which is compared by identity."""


def test_what_is_being_built_is_told_by_its_configuration_and_by_vllm_s_tag() -> None:
    """vLLM builds drafts under the target's configuration or under their own."""

    def config(target: Model, own: Model, draft: Model | None) -> SimpleNamespace:
        speculation = SimpleNamespace(target_model_config=target, draft_model_config=draft)
        return SimpleNamespace(speculative_config=speculation, model_config=own)

    served, draft = Model(), Model()
    assert draft_being_built(None) is None
    assert draft_being_built(SimpleNamespace(speculative_config=None)) is None
    assert draft_being_built(config(served, draft, draft)) is draft
    for tag, expected in (
        ("self_decoder", None),  # Gemma's halves of the model that is served
        *((tag, draft) for tag in ("eagle_head", "medusa_head", "dflash_head", "dspark_head", "draft_model")),
    ):
        with set_model_tag(tag):
            assert draft_being_built(config(served, served, draft)) is expected
            for none in (served, None):  # n-gram speculation has no draft model
                assert draft_being_built(config(served, served, none)) is None
    assert draft_being_built(config(served, served, draft)) is None


@pytest.mark.parametrize("own", [False, True])
def test_the_second_runner_shares_heads_and_tables_without_a_16_bit_weight(
    own: bool,
) -> None:
    """vLLM's runner for GPUs reads ``target.weight`` unguarded where a draft has a head of its own."""
    utils = pytest.importorskip("vllm.v1.worker.gpu.spec_decode.eagle.utils")
    with engine(ODD) as llm:
        head = model_of(llm).lm_head
        assert isinstance(head, ParallelLMHead)
        eagle = SimpleNamespace(has_own_lm_head=own)
        same = SimpleNamespace(weight=head.weight[torch.arange(VOCABULARY)])
        other = SimpleNamespace(weight=same.weight + 1)
        assert utils._should_share(eagle, "has_own_lm_head", other, head) == (not own)
        assert utils._should_share(eagle, "has_own_lm_head", same, head)
        assert utils._should_share(eagle, "has_own_lm_head", head, SimpleNamespace(weight=other.weight)) == (not own)
        assert utils._should_share(eagle, "has_own_lm_head", head, head)
