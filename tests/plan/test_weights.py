"""Weights by rank, held against what vLLM allocated on GPUs and against every golden pack."""

import json
from pathlib import Path

import pytest

from tests.plan.shapes import EXPERTS, LLAMA_8B, hollow
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.pack import Pack
from vllm_exl3.plan.placement import place, split_layers
from vllm_exl3.plan.weights import rank_weights

GIB = 1 << 30
TWO = Path(__file__).resolve().parents[2] / "benchmarks/results/h200-x2/two.json"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return hollow(tmp_path_factory.mktemp("llama") / "pack", **LLAMA_8B)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return hollow(tmp_path_factory.mktemp("experts") / "pack", **EXPERTS)


def test_one_rank_holds_every_byte_of_a_golden_pack(golden_pack: Path) -> None:
    pack = Pack.open(golden_pack)
    found = rank_weights(pack)
    assert found.total + found.skipped == pack.nbytes
    assert bool(found.experts) == bool(pack.experts)
    weights = sum(layer.weights + layer.expert_weights for layer in found.layers) + found.head_weights
    quantized = sum(linear.in_features * linear.out_features for linear in pack.linears.values())
    dense_head = pack.dense.get("lm_head")
    assert weights == quantized + (dense_head.nbytes // 2 if dense_head else 0)


def test_ranks_hold_what_vllm_allocated(llama: Pack) -> None:
    """To the byte: `weight_bytes` is the sum of the model's parameters on each GPU."""
    measured = [row for row in json.loads(TWO.read_text())["rows"]
                if row["subject"] == "start" and row["kernel"] == "native"]  # fmt: skip
    assert {row["ranks"] for row in measured} == {1, 2}
    for row in measured:
        ranks = row["ranks"]
        assert [rank_weights(llama, ranks, rank).total for rank in range(ranks)] == row["weight_bytes"]


def test_the_whole_is_held_once_or_more(llama: Pack, experts: Pack) -> None:
    for pack in (llama, experts):
        for ranks in (2, 4):
            parts = [rank_weights(pack, ranks, rank).total for rank in range(ranks)]
            assert pack.nbytes <= sum(parts) <= 1.05 * pack.nbytes


def test_experts_are_divided_whole_or_in_blocks(experts: Pack) -> None:
    whole = rank_weights(experts)
    assert {layer.experts for layer in whole.layers} == {128}
    by_expert = [rank_weights(experts, 3, rank, whole_experts=True) for rank in range(3)]
    assert [part.layers[0].experts for part in by_expert] == [43, 43, 42]
    assert sum(part.experts for part in by_expert) == whole.experts
    by_block = [rank_weights(experts, 4, rank) for rank in range(4)]  # six blocks over four ranks: 2, 2, 1, 1
    assert [part.layers[0].expert_weights // 128 for part in by_block] == [
        3 * 2048 * 128 * blocks for blocks in (2, 2, 1, 1)
    ]
    with pytest.raises(Exl3PackError, match="6 blocks"):
        rank_weights(experts, 8)


def test_latent_attention_has_a_dense_copy(tmp_path: Path) -> None:
    pack = hollow(tmp_path / "pack", **{**LLAMA_8B, "layers": 2, "vocab": 1024})
    before = rank_weights(pack).total
    pack.config |= {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}  # type: ignore[operator]
    assert rank_weights(pack).total - before == 2 * 2 * 512 * 32 * 256


@pytest.mark.parametrize("missing", [0, 1, GIB // 8, GIB, 3 * GIB])
def test_what_lacks_room_goes_to_host_memory(llama: Pack, missing: int) -> None:
    weights = rank_weights(llama)
    found = place(weights, weights.total - missing, 64 * GIB)
    assert found.gpu + found.host == weights.total and found.short == 0
    assert found.gpu <= weights.total - missing
    assert found.host <= found.offload_gib * GIB + max(layer.nbytes for layer in weights.layers)
    assert found.pinned >= found.host and (found.pinned == 0) == (missing == 0)
    assert not found.experts_only and found.share.experts == 0


def test_experts_go_first_and_alone(experts: Pack) -> None:
    weights = rank_weights(experts)
    found = place(weights, weights.total - weights.experts // 2, 64 * GIB)
    assert found.experts_only and found.share.dense == 0 and 0.5 <= found.share.experts < 0.9
    all_of_them = place(weights, weights.total - weights.experts - 1000, 64 * GIB)
    assert not all_of_them.experts_only and all_of_them.short == 0


def test_without_a_place_bytes_are_counted(llama: Pack) -> None:
    weights = rank_weights(llama)
    assert place(weights, weights.total - GIB, None).short == GIB
    assert place(weights, weights.total - GIB, GIB // 2).short > 0
    assert place(weights, 0, 64 * GIB).short == weights.outside  # an embedding and a head cannot leave


@pytest.mark.parametrize(("rooms", "layers"), [([24, 24], [16, 16]), ([24, 12], [21, 11]), ([8, 8, 8], [11, 11, 10])])
def test_layers_follow_the_room_of_their_gpu(llama: Pack, rooms: list[int], layers: list[int]) -> None:
    found = split_layers(rank_weights(llama), [room * GIB for room in rooms])
    assert sum(found) == 32 and all(abs(a - b) <= 2 for a, b in zip(found, layers, strict=True))
