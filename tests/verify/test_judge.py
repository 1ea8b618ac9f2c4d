"""Streaming layers gives what transformers gives with the whole model; the statistics are those of the definition."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.verify import damage
from vllm_exl3.pack import Pack
from vllm_exl3.verify.judge import FinalStates, compare, final_states
from vllm_exl3.verify.statistics import bootstrap_mean
from vllm_exl3.verify.weights import DenseFolder, PackWeights, find_weight

IDS = torch.randint(0, 640, (4, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "name",
    [
        "llama_odd-4.0-mul1",
        "mixtral-4.0-3inst",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("phi3-5.0-mul1", "gemma2-6.0-mcg")),
    ],
)
def test_streamed_layers_are_the_whole_model(name: str) -> None:
    pack = Pack.open(damage.DATA / "packs" / name)
    weights, layers = PackWeights(pack), []
    states = final_states(weights, pack.config, IDS, layers.append)
    assert sum(layers) == pack.config["num_hidden_layers"]
    config = {key: value for key, value in pack.config.items() if key != "quantization_config"}
    config["tie_word_embeddings"] = False
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    sizes = {key: value.shape[0] for key, value in model.named_parameters()}
    state = {}
    for key, value in model.named_parameters():
        found = find_weight(weights, key, sizes.get)
        assert found is not None
        state[key] = torch.from_numpy(np.array(found[tuple(slice(size) for size in value.shape)]))
    model.load_state_dict(state, strict=False)
    with torch.inference_mode():
        expected = torch.log_softmax(model(IDS).logits.float(), -1)
    assert torch.allclose(states.log_probabilities(states.hidden), expected, atol=1e-4)


def _less_sure(states: FinalStates) -> FinalStates:
    return dataclasses.replace(states, head=states.head / 64)


def test_divergence_grows_with_damage(tmp_path: Path) -> None:
    intact = damage.DATA / "packs" / "llama_tied-3.0-mul1"
    source = damage.source_of(intact, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    reference = final_states(DenseFolder(source), config, IDS)
    damaged = damage.copy_of("llama_tied-3.0-mul1", tmp_path)
    damage.flip_signs(damaged)
    # These random models are sure of every token: a smaller head leaves them in doubt.
    reference = _less_sure(reference)
    results = []
    for folder in (intact, damaged):
        pack = Pack.open(folder)
        results.append(compare(reference, _less_sure(final_states(PackWeights(pack), pack.config, IDS)), IDS))
    kl = [result.estimates()["kl"] for result in results]
    assert 0 < kl[0].low < kl[0].mean < kl[0].high
    assert kl[1].mean > kl[0].mean
    same = compare(reference, reference, IDS)
    assert same.agrees.all() and np.abs(same.kl).max() < 1e-5
    assert np.array_equal(same.loss, same.reference_loss)


def test_interval_covers_the_mean_of_correlated_tokens() -> None:
    """About 95 % of 95 % intervals cover the true mean, although all tokens of a sequence share an offset."""
    random, covered = np.random.default_rng(1), 0
    for _ in range(100):
        values = random.standard_normal((40, 1)) + random.standard_normal((40, 16))
        estimate = bootstrap_mean(values)
        covered += estimate.low <= 0 <= estimate.high
    assert 88 <= covered <= 100
