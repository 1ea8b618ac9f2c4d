"""Rows of fused layers that no checkpoint fills: they are neither decoded nor missed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from tests.serving.dense_twin import dense_weight_of
from tests.tiny_pack import Draft, linear
from vllm_exl3.pack.names import NameResolver
from vllm_exl3.pack.pack import Pack
from vllm_exl3.serving.decoding import DecodedModules
from vllm_exl3.serving.fused import padding_outputs

FUSED = "input_mix_weight_down_block_inject"


def _model(sizes: list[int]) -> torch.nn.Module:
    """A hyper-connection as Qwen3.8-Flash-Next's class builds it, in a model of nothing else."""
    model = torch.nn.Module()
    layer = MergedColumnParallelLinear(
        128, sizes, bias=False, disable_tp=True, prefix=FUSED, return_bias=False, params_dtype=torch.float32
    )
    model.add_module(FUSED, layer)
    return model


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
