"""N-gram tables in vLLM's own embedding: every place of the table, tensor parallelism, graphs, and every refusal."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import CompilationConfig, CUDAGraphMode, get_current_vllm_config
from vllm.forward_context import set_forward_context

from tests.serving import ngram_model as model
from tests.serving.engine import run_on_two_ranks
from vllm_exl3.ops.ngram import LOOKUP_OP
from vllm_exl3.pack import Pack
from vllm_exl3.pack.codec import decode_ngram
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.ngram import read_heads
from vllm_exl3.pack.ngram_rows import NgramRows
from vllm_exl3.serving.config import Exl3Config
from vllm_exl3.serving.models import qwen4_exp
from vllm_exl3.serving.ngram import NgramEmbeddingMethod, check_graphs, choose_place
from vllm_exl3.serving.skipping import SkippedTensors


@pytest.fixture
def alone() -> Iterator[None]:
    with model.ranks():
        yield


@pytest.mark.parametrize("place", ["auto", "resident", "pinned", "disk"])
@pytest.mark.parametrize("shards", [0, 4])
def test_every_place_gives_the_specification_s_rows(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, shards: int
) -> None:
    monkeypatch.setenv("VLLM_EXL3_NGRAM_TABLE", place)
    folder = model.write_pack(tmp_path, shards=shards)
    module = model.build(folder, pinned=place != "resident")
    assert type(module.ngram_embedding).__name__ == "Qwen4ExpPLEDeviceEmbedding"
    assert not dict(module.ngram_embedding.named_parameters()), "vLLM's loader would wait for them"
    held = {"head_bias", "head_offsets"} | ({"trellis"} if place in ("auto", "resident") else set())
    assert set(dict(module.ngram_embedding.named_buffers())) == held, "what sleep keeps"
    assert torch.equal(model.look_up(module, model.TOKENS), model.wanted(folder, model.TOKENS).float())
    rows = module.ngram_embedding(torch.tensor([[0, 101, 204, 311]]))
    assert module.ngram_embedding.dequantize(rows, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("place", ["resident", "pinned", "disk"])
def test_a_rank_beyond_the_table_looks_a_row_of_it_up(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("VLLM_EXL3_NGRAM_TABLE", place)
    config = Exl3Config({})
    config.maybe_update_config(str(model.write_pack(tmp_path)))
    method = NgramEmbeddingMethod(config, "beyond", config.pack.ngram_tables[model.KEY])
    layer = torch.nn.Module()
    layer.shard_indices = SimpleNamespace(org_vocab_start_index=model.ROWS, org_vocab_end_index=model.ROWS)
    layer.tp_size, layer.org_vocab_size, layer.params_dtype = 8, model.ROWS, torch.float32
    method.create_weights(layer, 160, [1], 160, 1, torch.float32)
    method.process_weights_after_loading(layer)
    row = torch.full((160,), torch.nan)
    torch.ops.vllm.exl3_ngram_lookup_out(torch.tensor([0]), row.view(1, 160), method.name)
    code = NgramRows(config.pack, method.stored).gather(np.array([model.ROWS - 1]))
    heads = read_heads(config.pack, method.stored)
    assert np.array_equal(row.numpy(), decode_ngram(code, method.stored.bits, heads.bias[-1:])[0].astype(np.float32))


def test_two_engines_keep_their_tables_apart_whatever_their_layers_are_called(alone: None, tmp_path: Path) -> None:
    """A forward pass tells whose it is, as it tells attention layers."""
    current = get_current_vllm_config()
    built = []
    for seed in (1, 2):
        folder = model.write_pack(tmp_path / str(seed), seed=seed)
        current.compilation_config.static_forward_context = layers = {}
        built.append((model.build(folder), layers, model.wanted(folder, model.TOKENS).float()))
    assert not torch.equal(built[0][2], built[1][2])
    for module, layers, wanted in built:
        current.compilation_config.static_forward_context = layers
        with set_forward_context(None, current):
            assert torch.equal(model.look_up(module, model.TOKENS), wanted)


def test_the_hash_is_the_pack_s_and_not_the_one_vllm_derives(alone: None, tmp_path: Path) -> None:
    module = model.build(model.write_pack(tmp_path))
    assert module.layer_multipliers.tolist() == list(model.MULTIPLIERS)
    assert module.ngram_heads_vocab_sizes.tolist() == list(model.SIZES)


def test_two_ranks_share_the_rows_and_give_one_rank_s(tmp_path: Path) -> None:
    folder = model.write_pack(tmp_path)
    # vLLM's workers set the variable: shared memory is called by it.
    output = run_on_two_ranks(["-m", "tests.serving.ngram_model", str(folder)], {"VLLM_DIST_IDENT": "ngram"})
    # The ranks' lines can run together: what is sought does not rely on where they end.
    found = re.findall(r"RANK (\d) (\d+) ([0-9a-f]{64})", output.stdout)
    assert len(found) == 2, output.stdout[-1000:] + output.stderr[-3000:]
    digest = hashlib.sha256(model.wanted(folder, model.TOKENS).float().numpy().tobytes()).hexdigest()
    assert {(rows, value) for _, rows, value in found} == {(str(model.ROWS // 2), digest)}


def test_the_table_is_dropped_from_vllm_s_weights(tmp_path: Path) -> None:
    pack = Pack.open(model.write_pack(tmp_path))
    skipped = SkippedTensors(pack, set())
    dropped = [name for name in pack.tensors if skipped.search(name)]
    assert sorted(dropped) == sorted(name for name in pack.tensors if model.KEY in name)
    assert len(dropped) == 4 + 4


def test_a_table_that_no_layer_asks_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Exl3Config({})
    config.maybe_update_config(str(model.write_pack(tmp_path)))
    monkeypatch.setattr(
        "vllm.distributed.get_pp_group", lambda: SimpleNamespace(world_size=1, rank_in_group=0, is_last_rank=True)
    )
    monkeypatch.setattr(config._vocabulary, "attach_head", lambda: None)
    for key in config.pack.linears:
        config.resolve(key)
    with pytest.raises(Exl3PackError, match="n-gram table of 448 rows"):
        config.verify_names()


def test_a_table_of_another_model_is_refused(alone: None, tmp_path: Path) -> None:
    with pytest.raises(Exl3PackError, match="heads_per_ngram"):
        model.build(model.write_pack(tmp_path / "fewer", sizes=(101, 103)))
    folder = model.write_pack(tmp_path / "more")
    module = model.build(folder)
    module.ngram_embedding.org_vocab_size = 400
    with pytest.raises(Exl3PackError, match="a layer of 400 rows"):
        module.ngram_embedding.quant_method.process_weights_after_loading(module.ngram_embedding)


def test_other_configs_still_go_to_vllm(alone: None, tmp_path: Path) -> None:
    """A table in 16 bits, FP8 by config.json, no quantization at all, and one that vLLM refuses."""
    folder = model.write_pack(tmp_path)
    config = Exl3Config({})
    config.maybe_update_config(str(folder))
    choose = qwen4_exp._find().Qwen4ExpPLEEmbeddingMethod.from_quant_config
    other = "model.layers.0.ple.ple_embedding.ngram_embedding"
    assert type(choose(config, model.KEY)).__name__ == "NgramEmbeddingMethod"
    assert type(choose(config, other)).__name__ == "Qwen4ExpPLEUnquantizedEmbeddingMethod"
    assert type(choose(config, other, "float8_e4m3fn")).__name__ == "Qwen4ExpPLEFp8EmbeddingMethod"
    assert type(choose(None, other)).__name__ == "Qwen4ExpPLEUnquantizedEmbeddingMethod"
    assert outcome(choose) == outcome(choose.__wrapped__)


def outcome(choose: Callable[..., object]) -> str:
    """What becomes of a config that nobody knows: up to 0.32 vLLM refuses it, 0.33 takes the table for a plain one."""
    try:
        return type(choose(SimpleNamespace(), "model.layers.0.ple.ple_embedding.ngram_embedding")).__name__
    except NotImplementedError as error:
        return str(error)


GRAPHS = [
    (CUDAGraphMode.NONE, None, False, True),
    (CUDAGraphMode.PIECEWISE, [LOOKUP_OP], False, True),
    (CUDAGraphMode.PIECEWISE, None, True, True),
    (CUDAGraphMode.PIECEWISE, None, False, False),
    (CUDAGraphMode.PIECEWISE, ["vllm::mamba_mixer"], False, False),
    (CUDAGraphMode.FULL, [LOOKUP_OP], False, False),
    (CUDAGraphMode.FULL, None, True, False),
    (CUDAGraphMode.FULL_AND_PIECEWISE, [LOOKUP_OP], True, False),
    (CUDAGraphMode.FULL_DECODE_ONLY, [LOOKUP_OP], False, False),
]


@pytest.mark.parametrize(("mode", "splitting", "breakable", "served"), GRAPHS)
def test_a_table_on_disk_and_graphs(
    mode: CUDAGraphMode, splitting: list[str] | None, breakable: bool, served: bool
) -> None:
    compilation = CompilationConfig()
    compilation.cudagraph_mode, compilation.splitting_ops = mode, splitting
    if served:
        check_graphs(compilation, breakable=breakable)
        return
    with pytest.raises(RuntimeError, match="cannot read files") as refusal:
        check_graphs(compilation, breakable=breakable)
    found = re.search(r"--compilation-config '(.*)'$", str(refusal.value))
    assert found is not None
    passed = CompilationConfig(**json.loads(found[1]))
    assert passed.splitting_ops is not None and passed.splitting_ops[-1] == LOOKUP_OP
    assert set(splitting or CompilationConfig._attention_ops) <= set(passed.splitting_ops)
    check_graphs(passed, breakable=False)


def test_auto_takes_the_host_where_the_device_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(cache_config=SimpleNamespace(gpu_memory_utilization=0.9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100 << 30))
    cuda = torch.device("cuda")
    for size, ranks, place in ((76, 1, "resident"), (78, 1, "pinned"), (78, 2, "resident")):
        assert choose_place(SimpleNamespace(nbytes=size << 30), ranks, cuda, config) == place
    assert choose_place(SimpleNamespace(nbytes=1 << 60), 1, torch.device("cpu"), config) == "resident"


class Kernel:
    """Stands for vLLM's Triton kernel: copies rows as it would, and notes what it was given."""

    def __init__(self, names: list[str]) -> None:
        self.arg_names, self.given = names, []

    def __getitem__(self, grid: tuple[int]) -> "Kernel":
        return self

    def __call__(self, table, ids, output, width, start, end, BLOCK_D) -> None:
        self.given.append((table.dtype, output.dtype, width, BLOCK_D))
        for row, number in enumerate(ids.tolist()):
            target = output.view(len(ids), -1)[row]
            target.copy_(table[number - start]) if start <= number < end else target.zero_()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_vllm_0_30_looks_fp8_tables_up_as_bytes(dtype: torch.dtype) -> None:
    kernel = Kernel(["weight_ptr", "ids_ptr", "output_ptr", "embedding_dim"])
    module = SimpleNamespace(_lookup_ple_embedding_from_pinned_kernel=kernel)
    assert qwen4_exp._needs_bytes(module)
    table = torch.randn(20, 160).to(dtype)
    layer = SimpleNamespace(
        embedding_dim=160, weight=table, _uva_weight=table,
        shard_indices=SimpleNamespace(org_vocab_start_index=100, org_vocab_end_index=120),
    )  # fmt: skip
    ids = torch.tensor([[100, 119], [99, 120]])
    rows = qwen4_exp._lookup_bytes(layer, module, ids)
    assert rows.dtype == dtype and rows.shape == (2, 2, 160)
    wanted = torch.stack([table[0], table[19], torch.zeros(160, dtype=dtype), torch.zeros(160, dtype=dtype)])
    assert torch.equal(rows.view(4, 160).float(), wanted.float())
    size = table.element_size()
    assert kernel.given == [(torch.uint8, torch.uint8, 160 * size, 256 * size)]
    with pytest.raises(ValueError, match="output: found"):
        qwen4_exp._lookup_bytes(layer, module, ids, torch.empty(2, 2, 160, dtype=torch.float64))


def test_vllm_0_32_is_left_alone() -> None:
    kernel = Kernel(["weight_ptr", "ids_ptr", "output_ptr", "row_bytes"])
    assert not qwen4_exp._needs_bytes(SimpleNamespace(_lookup_ple_embedding_from_pinned_kernel=kernel))
