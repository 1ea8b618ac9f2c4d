"""A MoE layer of vLLM's without an engine: its experts as a pack stores them, and a stand-in that takes them."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.ops.moe_layers import MoELayer
from tests.tiny_pack import MARKER_VALUES, Draft
from vllm_exl3.pack import Pack
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.serving import moe_checks
from vllm_exl3.serving.moe import Exl3MoEMethod
from vllm_exl3.serving.report import Report

MLP = "model.layers.0.mlp"
GATED = ("gate_proj", "up_proj", "down_proj")
MIXED = [(2, Codebook.MUL1), (5, Codebook.MCG), (3, Codebook.INST3), (1.5, Codebook.MUL1)]

Tensors = dict[str, tuple[str, np.ndarray]]


def stored(layer: MoELayer, names: tuple[str, ...] = GATED, padded_bias: bool = False) -> Tensors:
    """A layer's experts under their checkpoint names."""
    tensors: Tensors = {}
    for expert, projections in enumerate(layer.projections):
        for index, (part, name) in enumerate(zip(projections, names, strict=True)):
            down = index == len(names) - 1
            flat, key = "w2" if down else "w13", f"{MLP}.experts.{expert}.{name}"
            for leaf, dtype, start, shape in (
                ("trellis", "I16", part.trellis, part.trellis_shape),
                ("suh", "F16", part.suh, (part.in_features,)),
                ("svh", "F16", part.svh, (part.out_features,)),
            ):
                values = layer.tensors[f"{flat}_{leaf}"][start : start + math.prod(shape)]
                tensors[f"{key}.{leaf}"] = (dtype, values.view(shape).numpy())
            codebook = Codebook(part.codebook)
            if codebook is not Codebook.INST3:
                tensors[f"{key}.{codebook.label}"] = ("I32", np.array(MARKER_VALUES[codebook.label]))
            if part.bias >= 0:
                width = layer.hidden if down else layer.intermediate
                values = layer.tensors[f"{flat}_bias"][part.bias : part.bias + width].numpy()
                if padded_bias:
                    values = np.pad(values, (0, part.out_features - width))
                tensors[f"{key}.bias"] = ("F32", values)
    return tensors


def open_pack(folder: Path, tensors: Tensors, **config: Any) -> Pack:
    config = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 1, **config}
    return Pack.open(Draft(dict(tensors), config).write(folder))


def build(
    pack: Pack,
    layer: MoELayer,
    *,
    activation: str = "silu",
    rank: int = 0,
    ranks: int = 1,
    here: list[int] | None = None,
    eplb: bool = False,
    lora: SimpleNamespace | None = None,
    resident: frozenset[int] | None = None,
    side: Callable[[int, int], Any] | None = None,
    **options: Any,
) -> torch.nn.Module:
    """A built, unloaded stand-in for vLLM's RoutedExperts on one rank."""
    total = len(layer.projections)
    local = list(range(total)) if here is None else here
    module = torch.nn.Module()
    module.layer_name = f"{MLP}.experts"
    module.global_num_experts = total
    module.expert_map = None
    if here is not None:
        module.expert_map = torch.full((total,), -1, dtype=torch.int32)
        module.expert_map[here] = torch.arange(len(here), dtype=torch.int32)
    module._map_global_expert_id_to_local_expert_id = lambda e: local.index(e) if e in local else -1
    module.activation = SimpleNamespace(value=activation)
    module.swiglu_limit = module.swiglu_alpha = module.swiglu_beta = None
    module.apply_router_weight_on_input = False
    module.moe_config = SimpleNamespace(
        moe_parallel_config=SimpleNamespace(tp_rank=rank, tp_size=ranks, dp_size=1, enable_eplb=eplb),
        activation_situ_beta=None,
        activation_situ_linear_beta=None,
    )
    for name, value in options.items():
        setattr(module, name, value)
    report = Report()
    config = SimpleNamespace(
        pack=pack,
        report=report,
        layer_ready=lambda where, layer: report.layer_ready(where, layer, pack),
        trellis_arrived=lambda trellis: None,
        expert_tiers=SimpleNamespace(
            resident=lambda where, group, share: resident,
            counter=lambda group, experts, owner: None,
            computes_on_cpu=side is not None,
            cpu_rows=8,
            side_stream=side,
        ),
    )
    with mock.patch.object(moe_checks, "get_current_vllm_config", lambda: SimpleNamespace(lora_config=lora)):
        module.quant_method = Exl3MoEMethod(config, f"{MLP}.experts", module, pack.experts[MLP])
    module.quant_method.create_weights(
        module, len(local), layer.hidden, -(-layer.intermediate // ranks), torch.float32, weight_loader=None
    )
    return module


def load(module: torch.nn.Module, tensors: Tensors) -> list[str]:
    """Load through the layer's own method, as the runner does; the buffer of each tensor is reused afterwards."""

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, (dtype, values) in tensors.items():
            kind = {"I16": np.int16, "F16": np.float16, "I32": np.int32, "F32": np.float32}[dtype]
            buffer = torch.from_numpy(np.array(values, kind))
            yield name.removeprefix(f"{MLP}.experts."), buffer
            buffer.fill_(77)

    names = list(module.load_weights(stream()))
    module.quant_method.process_weights_after_loading(module)
    return names


def run(module: torch.nn.Module, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return module.quant_method.apply(module, x, weights, ids, None, None)


def error(ours: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.linalg.norm(ours.double().numpy() - expected) / np.linalg.norm(expected))


def inputs(tokens: int, hidden: int) -> torch.Tensor:
    return torch.randn((tokens, hidden), generator=torch.Generator().manual_seed(3))


def divide_up(tensors: Tensors, divisor: float) -> None:
    """As packs of Laguna's: up's input scales are that much smaller."""
    for name, (dtype, values) in tensors.items():
        if name.endswith("up_proj.suh"):
            tensors[name] = (dtype, (values / divisor).astype(np.float16))
