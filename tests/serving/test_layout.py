"""Where stored tensors go in fused layers: tables, and a contract test against vLLM's own loaders."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.parts import Part
from vllm_exl3.pack.stored import BLOCK, Codebook, StoredLinear, StoredTensor
from vllm_exl3.serving.layout import DenseSlot, Layout, Output, Slot, layer_outputs


def stored(name: str, *shape: int, dtype: str = "I16") -> StoredTensor:
    return StoredTensor(name, dtype, shape, "model.safetensors", 0, 2)


def exl3_part(key: str, rows: int, columns: int, half_bits: int = 8, codebook: Codebook = Codebook.MUL1) -> Part:
    rows, columns = (-(-size // BLOCK) * BLOCK for size in (rows, columns))
    made = StoredLinear(
        key,
        half_bits,
        codebook,
        rows,
        columns,
        stored(f"{key}.trellis", rows // 16, columns // 16, half_bits * 8),
        stored(f"{key}.suh", rows, dtype="F16"),
        stored(f"{key}.svh", columns, dtype="F16"),
        None,
        stored(f"{key}.mul1", dtype="I32"),
    )
    return Part(key, made, None)


def dense_part(key: str, rows: int, columns: int) -> Part:
    return Part(key, None, stored(f"{key}.weight", columns, rows, dtype="BF16"))


@pytest.fixture
def on_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Make vLLM's layers believe they are built on one rank of several."""

    def pretend(rank: int, ranks: int) -> None:
        for path in ("vllm.model_executor.layers.linear", "vllm.model_executor.parameter"):
            monkeypatch.setattr(f"{path}.get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(f"{path}.get_tensor_model_parallel_world_size", lambda: ranks)

    return pretend


def kda_of_kimi(*args: Any, **options: Any) -> torch.nn.Module:
    from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import _KimiGDNMergedColumnParallelLinear

    return _KimiGDNMergedColumnParallelLinear(*args, **options)


def kda_of_glm(*args: Any) -> torch.nn.Module:
    from vllm.models.glm5next.common.kda import _Glm5NextMergedColumnParallelLinear

    return _Glm5NextMergedColumnParallelLinear(*args, bias=False)


def indexer_of_qwen(*args: Any) -> torch.nn.Module:
    from vllm.models.qwen4_exp.nvidia import model, qsa  # the first imports the other

    assert model
    return qsa.Qwen4ExpQSAQKVIndexerLinear(*args)


LAYERS: dict[str, tuple[Callable[[], Any], list[tuple[Any, int]]]] = {
    "column": (lambda: ColumnParallelLinear(64, 384, bias=False), [(None, 384)]),
    "row": (lambda: RowParallelLinear(384, 192, bias=False), [(None, 192)]),
    "replicated": (lambda: ReplicatedLinear(64, 192, bias=False), [(None, 192)]),
    "merged": (lambda: MergedColumnParallelLinear(64, [256, 128, 512], bias=False), [(0, 256), (1, 128), (2, 512)]),
    "qkv": (lambda: QKVParallelLinear(64, 16, 8, 4, bias=False), [("q", 128), ("k", 64), ("v", 64)]),
    "one kv head": (lambda: QKVParallelLinear(64, 16, 8, 1, bias=False), [("q", 128), ("k", 16), ("v", 16)]),
    "two kv heads": (lambda: QKVParallelLinear(64, 16, 8, 2, bias=False), [("q", 128), ("k", 32), ("v", 32)]),
    "wide values": (
        lambda: QKVParallelLinear(64, 16, 8, 4, bias=False, v_head_size=32),
        [("q", 128), ("k", 64), ("v", 128)],
    ),
    "KDA of Kimi": (
        lambda: kda_of_kimi(64, [64, 64, 64, 8, 48], 4, linear.get_tensor_model_parallel_world_size(), bias=False),
        [(0, 64), (1, 64), (2, 64), (3, 8), (4, 48)],
    ),
    "KDA of GLM-5.3": (
        lambda: kda_of_glm(64, [64, 64, 64, 8, 48, 16], (4, 5), linear.get_tensor_model_parallel_world_size()),
        [(0, 64), (1, 64), (2, 64), (3, 8), (4, 48), (5, 16)],
    ),
    "indexer of Qwen3.8": (
        lambda: indexer_of_qwen(QKVParallelLinear(64, 16, 8, 2, bias=False), 48, None),
        [(0, 128), (1, 32), (2, 32), (3, 48)],
    ),
    "indexer of MiniMax-M3": (
        lambda: linear.MinimaxM3QKVParallelLinearWithIndexer(64, 16, 8, 2, 2, 16),
        [("q", 128), ("k", 32), ("v", 32), ("index_q", 32), ("index_k", 16)],
    ),
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", LAYERS)
def test_outputs_are_the_rows_that_vllms_own_loaders_take(
    on_rank: Callable[[int, int], None], kind: str, ranks: int
) -> None:
    make, disk = LAYERS[kind]
    for rank in range(ranks):
        on_rank(rank, ranks)
        layer = make()
        # The layer's own 16-bit weight, loaded with row numbers, shows which rows this rank takes.
        for shard, size in disk:
            numbered = torch.arange(size, dtype=torch.float32).view(size, 1).expand(size, layer.input_size).clone()
            layer.weight.weight_loader(
                *((layer.weight, numbered) if shard is None else (layer.weight, numbered, shard))
            )
        sizes = getattr(layer, "output_partition_sizes", [layer.output_size])
        ours = layer_outputs(layer, sizes, layer.output_size)
        rows = [torch.arange(output.start, output.start + output.size, dtype=torch.float32) for output in ours]
        torch.testing.assert_close(layer.weight.data[:, 0], torch.cat(rows))
        assert [output.total for output in ours] == [size for _, size in disk]


def outputs(*totals: int, rank: int = 0, ranks: int = 1) -> list[Output]:
    return [Output(total, total // ranks * rank, total // ranks) for total in totals]


def test_shards_of_different_width_and_codebook_lie_back_to_back() -> None:
    parts = [exl3_part("q", 256, 256, 8), exl3_part("k", 256, 128, 10, Codebook.MCG), exl3_part("v", 256, 128, 5)]
    layout = Layout("qkv_proj", parts, outputs(256, 128, 128), (0, 256, 256))
    assert layout.sizes == {
        "trellis": 256 * 256 * 4 // 16 + 256 * 128 * 5 // 16 + 256 * 128 * 5 // 32,
        "suh": 3 * 256,
        "svh": 512,
        "weight": 0,
    }
    assert [slot.trellis for slot in layout.exl3_slots] == [0, 16384, 16384 + 10240]
    assert [slot.shard.half_bits for slot in layout.exl3_slots] == [8, 10, 5]
    assert [layout.part_for(shard) for shard in ("q", "k", "v")] == [0, 1, 2]
    assert layout.markers(Codebook.MUL1) == [0, 2] and layout.markers(Codebook.MCG) == [1]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_tensor_for_three_outputs_is_three_slices_under_tensor_parallelism(rank: int) -> None:
    """Qwen3.5's in_proj_qkvz: disk holds qkv (keys, keys, values) and z; each rank takes a slice of each."""
    parts = [exl3_part("in_proj_qkv", 256, 1024), exl3_part("in_proj_z", 256, 512)]
    layout = Layout("in_proj_qkvz", parts, outputs(256, 256, 512, 512, rank=rank, ranks=2), (0, 256, 256))
    columns = [(slot.part, slot.piece.column_start, slot.piece.crop_size) for slot in layout.exl3_slots]
    assert columns == [
        (0, 128 * rank, 128),
        (0, 256 + 128 * rank, 128),
        (0, 512 + 256 * rank, 256),
        (1, 256 * rank, 256),
    ]
    assert [layout.part_for(shard) for shard in ((0, 1, 2), 3)] == [0, 1]
    whole = Layout("in_proj_qkvz", parts, outputs(256, 256, 512, 512), (0, 256, 256))
    assert [slot.piece.crop_size for slot in whole.exl3_slots] == [1024, 512]


def test_a_tensor_fused_on_disk_fills_every_output() -> None:
    layout = Layout("gate_up_proj", [exl3_part("gate_up_proj", 128, 512)], outputs(256, 256), (0, 128, 128))
    assert len(layout.exl3_slots) == 1 and layout.part_for(None) == 0


def test_sixteen_bit_shards_sit_beside_exl3_ones() -> None:
    parts = [exl3_part("gate_proj", 128, 256), dense_part("up_proj", 128, 256)]
    layout = Layout("gate_up_proj", parts, outputs(256, 256, rank=1, ranks=2), (0, 128, 128))
    assert [type(slot) for slot in layout.slots] == [Slot, DenseSlot]
    assert layout.dense_slots == [DenseSlot(1, 128, 128, 0)]
    assert layout.sizes["weight"] == 128


def test_padding_is_held_but_not_returned() -> None:
    layout = Layout("down_proj", [exl3_part("down_proj", 320, 576)], outputs(576), (0, 320, 320))
    (slot,) = layout.exl3_slots
    assert (slot.piece.row_size, slot.piece.column_size, slot.piece.crop_size) == (384, 640, 576)
    assert layout.logical_width == [576]


@pytest.mark.parametrize(
    ("parts", "widths", "rows"),
    [
        ([exl3_part("q", 256, 256)], (384,), 256),
        ([exl3_part("q", 256, 256)], (256,), 384),
        ([exl3_part("gate", 128, 256), dense_part("up", 128, 200)], (256, 256), 128),
    ],
    ids=["outputs", "inputs", "dense rows"],
)
def test_sizes_that_do_not_fit_the_layer_are_refused_by_name(
    parts: list[Part], widths: tuple[int, ...], rows: int
) -> None:
    with pytest.raises(Exl3PackError, match=r"model\.layers\.7\.some_proj") as error:
        Layout("model.layers.7.some_proj", parts, outputs(*widths), (0, rows, rows))
    assert error.value.found and error.value.expected and error.value.remedy


def test_an_unknown_shard_id_is_refused() -> None:
    layout = Layout("qkv_proj", [exl3_part("q", 128, 128), exl3_part("k", 128, 128)], outputs(128, 128), (0, 128, 128))
    for shard in ("x", 2, None):
        with pytest.raises(Exl3PackError, match="qkv_proj"):
            layout.part_for(shard)
