"""Rows of fused layers that no checkpoint fills: they are neither decoded nor missed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import _KimiGDNMergedColumnParallelLinear

from tests.serving.dense_twin import dense_weight_of
from tests.tiny_pack import Draft, linear
from vllm_exl3.pack.names import NameResolver
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.parts import Part
from vllm_exl3.serving.decoding import DecodedModules, _filled_rows, _sizes
from vllm_exl3.serving.fused import built_parts, padding_outputs

FUSED = "input_mix_weight_down_block_inject"


def _model(sizes: list[int]) -> torch.nn.Module:
    """A hyper-connection as Qwen3.8-Flash-Next's class builds it, in a model of nothing else."""
    model = torch.nn.Module()
    layer = MergedColumnParallelLinear(
        128, sizes, bias=False, disable_tp=True, prefix=FUSED, return_bias=False, params_dtype=torch.float32
    )
    model.add_module(FUSED, layer)
    return model


@pytest.mark.parametrize(("heads", "padding"), [(16, 0), (12, 1)])
def test_kimi_k3_fills_its_fused_projection_up(heads: int, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its class builds it: q, k, v, g, f_a, b, and what is missing to a multiple of 16 rows on a rank."""
    for path in ("vllm.model_executor.layers.linear", "vllm.model_executor.parameter"):
        monkeypatch.setattr(f"{path}.get_tensor_model_parallel_rank", lambda: 1)
        monkeypatch.setattr(f"{path}.get_tensor_model_parallel_world_size", lambda: 2)
    totals = [2 * heads * 16] * 4 + [48, 2 * heads]
    fill = -(4 * heads * 16 + 48 + heads) % 16
    layer = _KimiGDNMergedColumnParallelLinear(
        64, [*totals, *([2 * fill] if fill else [])], 4, 2, bias=False, params_dtype=torch.float32
    )
    assert padding_outputs(layer) == padding
    assert _sizes(layer) == (totals, 64)
    assert _filled_rows(layer) == layer.weight.shape[0] - fill


def test_q_k_and_v_are_built_alone_before_the_indexer_joins_them() -> None:
    """As Qwen3.8-Flash-Next's class does, under one name."""
    parts = [Part(f"layers.0.self_attn.{name}", None, None) for name in (*"qkv", "indexer.index_qk_proj")]
    alone, joined = object.__new__(QKVParallelLinear), object.__new__(MergedColumnParallelLinear)
    assert built_parts(alone, parts) == tuple(parts[:3])
    assert built_parts(joined, parts) == tuple(parts)
    assert built_parts(alone, parts[:3]) == tuple(parts[:3])


def _stored(code: str, values: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, {"I16": np.int16, "F16": np.float16, "I32": np.int32}[code]))


@pytest.mark.parametrize("sizes", [[64, 4, 12], [64, 16]], ids=["filled up to 16 rows", "16 rows by itself"])
def test_rows_that_only_align_others_are_left_alone(
    sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("vllm.model_executor.layers.linear", "vllm.model_executor.parameter"):
        monkeypatch.setattr(f"{path}.get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(f"{path}.get_tensor_model_parallel_world_size", lambda: 1)
    parts = {"input_mix_weight_down": 64, "block_inject_weight": sizes[1]}
    tensors = {name: spec for key in parts for name, spec in linear(key, 128, 128).items()}
    pack = Pack.open(Draft(tensors, {"model_type": "qwen4_exp"}).write(tmp_path))
    names = NameResolver(pack, packed_modules={FUSED: [*parts, "_input_mix_padding"]})
    config: Any = SimpleNamespace(
        names=lambda: names, claimed=set(), source="pack", report=SimpleNamespace(add_decoded=lambda *_: None)
    )
    model = _model(sizes)
    layer = model.get_submodule(FUSED)
    layer.weight.data.zero_()
    assert padding_outputs(layer) == len(sizes) - 2
    decoded = DecodedModules(config, model)
    decoded.mark()
    for name, weight in decoded.stream((name, _stored(*spec)) for name, spec in tensors.items()):
        key = name.removesuffix(".weight")
        assert weight.shape == (parts[key], 128)
        expected = torch.from_numpy(dense_weight_of(tensors, key)[: parts[key]])
        torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-3)
        layer.weight_loader(layer.weight, weight, list(parts).index(key))
    decoded.check_loaded()
    assert not layer.weight[sum(parts.values()) :].any()
