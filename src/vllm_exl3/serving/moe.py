"""EXL3 routed experts in vLLM: parameters, loading, and the call to the op.

Like the linears', parameters are flat and have their real size from construction on: ``w13_*`` holds
gate and up of every local expert, ``w2_*`` down. Loaders only copy into views of them.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.utils import set_weight_attrs

import vllm_exl3.ops.moe  # noqa: F401  registers torch.ops.vllm_exl3.moe
from vllm_exl3.ops.experts import share_input_scales
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.stored import TILE, Codebook, ExpertGroup, StoredLinear
from vllm_exl3.serving.loading import check_loaded_marker, check_shape, unpack_signs_like
from vllm_exl3.serving.models.laguna import is_laguna, routed_scale
from vllm_exl3.serving.moe_checks import (
    ActivationCall,
    LoadedExperts,
    activation_call,
    check_scales,
    refuse_unserved,
)
from vllm_exl3.serving.moe_layout import ExpertLayout, ExpertSlot
from vllm_exl3.serving.offload import validate_exl3_moe_uva_layer
from vllm_exl3.serving.padding import route_padding

if TYPE_CHECKING:
    from vllm_exl3.serving.config import Exl3Config

__all__ = ["Exl3MoEMethod"]

_ROLES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_SHARD_IDS = {"gate": "w1", "up": "w3", "down": "w2"}


class Exl3MoEMethod(FusedMoEMethodBase):
    """The routed experts of one MoE layer.

    Args:
        config: the quantization config; it keeps the report and the pack.
        where: the layer's vLLM name.
        layer: the layer that is being built.
        group: its experts in the pack.

    Raises:
        Exl3PackError: the layer is to run in a way that is not served.
    """

    requires_device_loading = False  # nothing is computed on them: offloaded parameters stay where they are

    def __init__(self, config: "Exl3Config", where: str, layer: RoutedExperts, group: ExpertGroup) -> None:
        super().__init__(layer.moe_config)
        self.config = config
        self.where = where
        self.group = group
        refuse_unserved(where, layer)
        if layer.moe_config.moe_parallel_config.dp_size > 1:
            route_padding()
        self.activation: ActivationCall = activation_call(where, layer)
        self.scale = 1.0
        self.layout: ExpertLayout
        self.loaded: LoadedExperts
        self._local: list[int]
        self._tables: dict[torch.device, torch.Tensor] = {}

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``w13_*`` and ``w2_*`` at their real sizes, and take over the layer's loading."""
        parallel = layer.moe_config.moe_parallel_config
        total = layer.global_num_experts
        self._local = [layer._map_global_expert_id_to_local_expert_id(expert) for expert in range(total)]
        self.layout = layout = ExpertLayout(
            self.where,
            self.group,
            self.config.pack.linears,
            local=sorted((e for e in range(total) if self._local[e] >= 0), key=self._local.__getitem__),
            total=total,
            hidden=hidden_size,
            intermediate=intermediate_size_per_partition * parallel.tp_size,
            roles=("gate", "up", "down") if self.activation.gated else ("up", "down"),
            rank=parallel.tp_rank,
            ranks=parallel.tp_size,
        )
        self._first_rank = parallel.tp_rank == 0
        self.loaded = LoadedExperts(layout)
        self._host_table = layout.table
        for name, sizes in layout.sizes.items():
            _register(layer, f"{name}_trellis", torch.empty(sizes.trellis, dtype=torch.int16), self.load_trellis)
            # A scale that no tensor overwrites stays NaN, and is refused before the engine serves.
            for leaf, size, load in (("suh", sizes.suh, self.load_suh), ("svh", sizes.svh, self.load_svh)):
                scale = torch.full((size,), torch.nan, dtype=torch.float16)
                _register(layer, f"{name}_{leaf}", scale, load)
            if sizes.bias:
                _register(layer, f"{name}_bias", torch.zeros(sizes.bias, dtype=torch.float32), self.load_bias)
            for codebook in (Codebook.MCG, Codebook.MUL1):
                if codebook in layout.markers[name]:
                    # The codebook is known from the headers; the parameter gives hand-written loaders its name. It
                    # holds the markers, since vLLM's prefetching offloader takes no empty parameter.
                    marker = torch.zeros(len(layout.markers[name][codebook]), dtype=torch.int32)
                    _register(layer, f"{name}_{codebook.label}", marker, self.load_marker)
        # What vLLM reads to learn the device; a plain attribute, or it would count as a parameter.
        object.__setattr__(layer, "w2_weight_packed", layer.w2_trellis)
        # vLLM 0.30 and 0.31 take a 3-D tensor for stacked experts; the runner calls the instance's own method.
        layer.load_weights = _expert_loader(layer)
        self.config.report.add_experts(self.where, layer, layout)

    def load_trellis(
        self,
        param: Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Copy this rank's blocks of one stored trellis ``[in/16, out/16, 16·K]``; False for foreign experts."""
        slot = self._slot("trellis", loaded_weight, shard_id, expert_id)
        if slot is not None:
            (row, rows), (column, columns), at = slot.rows, slot.columns, slot.projection
            target = param.data[at.trellis : at.trellis + at.trellis_words].view(at.trellis_shape)
            target.copy_(loaded_weight[row // TILE : (row + rows) // TILE, column // TILE : (column + columns) // TILE])
        return slot is not None if return_success else None

    def load_suh(
        self,
        param: Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Copy this rank's range of one stored input scale ``[in]``; False for foreign experts."""
        slot = self._slot("suh", loaded_weight, shard_id, expert_id)
        if slot is not None:
            (start, size), at = slot.rows, slot.projection.suh
            param.data[at : at + size].copy_(unpack_signs_like(param, loaded_weight)[start : start + size])
        return slot is not None if return_success else None

    def load_svh(
        self,
        param: Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Copy this rank's range of one stored output scale ``[out]``; False for foreign experts."""
        slot = self._slot("svh", loaded_weight, shard_id, expert_id)
        if slot is not None:
            (start, size), at = slot.columns, slot.projection.svh
            param.data[at : at + size].copy_(unpack_signs_like(param, loaded_weight)[start : start + size])
        return slot is not None if return_success else None

    def load_bias(
        self,
        param: Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Copy this rank's range of one stored bias ``[out]``; down's counts on the first rank only."""
        slot = self._slot("bias", loaded_weight, shard_id, expert_id)
        if slot is not None:
            down, at = shard_id == "w2", slot.projection.bias
            size = self.layout.hidden if down else self.layout.intermediate
            start = slot.columns[0]
            target = param.data[at : at + size]
            # The ranks' results are added up, so only one may add the bias.
            values = loaded_weight[start : start + size] if self._first_rank or not down else torch.zeros_like(target)
            target.copy_(values)
        return slot is not None if return_success else None

    def load_marker(
        self,
        param: Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Keep a codebook's marker and check its value. False for foreign experts."""
        linear = self._linear(shard_id, expert_id)
        if linear is not None and linear.marker is not None:
            check_loaded_marker(linear.marker, loaded_weight)
            places = self.layout.markers["w2" if shard_id == "w2" else "w13"][linear.codebook]
            param.data[places[linear.marker.name]].copy_(loaded_weight.reshape(()))
        return linear is not None if return_success else None

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Refuse a layer that would serve noise because tensors never came or hold no usable values."""
        if layer.w13_trellis.is_meta:
            return  # vLLM built the layer and left it out
        validate_exl3_moe_uva_layer(layer, self.where)
        self.loaded.check()
        for name in ("w13", "w2"):
            for leaf in ("suh", "svh"):
                check_scales(self.layout, name, leaf, getattr(layer, f"{name}_{leaf}"))
        self._host_table = share_input_scales(self.layout.table, layer.w13_suh)
        with torch.inference_mode():  # as they were made, at the first forward
            for table in self._tables.values():
                table.copy_(self._host_table)  # in place: captured graphs read it
        if is_laguna(self.config.pack.config):
            self.scale = routed_scale(self.where, layer.w13_suh, len(self.layout.local))
        self.config.layer_ready(self.where, layer)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """None: vLLM's own expert kernels are not used."""

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x [M, hidden]`` through its experts; this rank's part of the sum, in the dtype of ``x``."""
        if self.scale != 1:
            # In float32 either way: the unscaled result may be too small for float16.
            if layer.apply_router_weight_on_input:
                return (self._call(layer, x.float(), topk_weights, topk_ids) * self.scale).to(x.dtype)
            topk_weights = topk_weights.float() * self.scale
        return self._call(layer, x, topk_weights, topk_ids)

    def _call(
        self, layer: RoutedExperts, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        call = self.activation
        output: torch.Tensor = torch.ops.vllm_exl3.moe(
            x,
            topk_weights,
            topk_ids,
            layer.expert_map,
            layer.w13_trellis,
            layer.w13_suh,
            layer.w13_svh,
            getattr(layer, "w13_bias", None),
            layer.w2_trellis,
            layer.w2_suh,
            layer.w2_svh,
            getattr(layer, "w2_bias", None),
            self._table(x.device),
            self.layout.kinds,
            self.layout.intermediate,
            call.name,
            call.alpha,
            call.beta,
            call.limit,
            layer.apply_router_weight_on_input,
            "RoutedExperts",
        )
        return output

    def _table(self, device: torch.device) -> torch.Tensor:
        # Made at the first forward, not while loading: what is allocated then is lost when the engine sleeps.
        table = self._tables.get(device)
        if table is None:
            table = self._tables[device] = self._host_table.to(device)
        return table

    def _slot(self, leaf: str, loaded_weight: torch.Tensor, shard_id: str, expert_id: int) -> ExpertSlot | None:
        """Where a loaded tensor goes, after checking that it is the one whose header was read."""
        if leaf == "trellis":
            self.config.trellis_arrived(loaded_weight)
        local = self._local[expert_id]
        if local < 0:
            return None
        index = self._projection(shard_id)
        slot = self.layout.slots[local][index]
        check_shape(getattr(slot.linear, leaf), loaded_weight)
        self.loaded.add(leaf, local, index)
        return slot

    def _linear(self, shard_id: str, expert_id: int) -> StoredLinear | None:
        """The stored tensor of a projection that this rank holds, or None for a foreign expert's."""
        local = self._local[expert_id]
        return None if local < 0 else self.layout.slots[local][self._projection(shard_id)].linear

    def _projection(self, shard_id: str) -> int:
        """Index of a projection among an expert's, from the shard id that vLLM's loader passes."""
        if shard_id == "w2":
            return len(self.layout.roles) - 1
        # vLLM hands the only first projection of un-gated experts over as w1
        return 1 if shard_id == "w3" and self.activation.gated else 0


def _register(layer: torch.nn.Module, name: str, data: torch.Tensor, loader: Callable[..., bool | None]) -> None:
    param = Parameter(data, requires_grad=False)
    set_weight_attrs(param, {"weight_loader": loader})
    layer.register_parameter(name, param)


def _expert_loader(layer: RoutedExperts) -> Callable[[Iterable[tuple[str, torch.Tensor]]], Iterator[str]]:
    """The layer's ``load_weights``: takes ``<expert>.<projection>.<leaf>``, whichever way projections are called."""

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
        for full_name, loaded_weight in weights:
            name = full_name.removeprefix("routed_experts.")
            expert, _, rest = name.partition(".")
            projection, _, leaf = rest.partition(".")
            role = _ROLES.get(projection)
            if role is None or not expert.isdecimal():
                yield _load_other(layer, name, loaded_weight)
                continue
            target = f"{'w2' if role == 'down' else 'w13'}_{leaf}"
            param = getattr(layer, target, None)
            if param is None:
                raise _unknown(layer, name, f"{role} has no parameter {target}")
            if param.weight_loader(param, loaded_weight, name, _SHARD_IDS[role], int(expert), return_success=True):
                yield target

    return load_weights


def _load_other(layer: RoutedExperts, name: str, loaded_weight: torch.Tensor) -> str:
    """Load a parameter of the layer that is no expert's, such as the router's correction bias."""
    param = dict(layer.named_parameters(recurse=False)).get(name)
    if param is None:
        raise _unknown(layer, name, "no expert's tensor and no parameter of the layer")
    getattr(param, "weight_loader", default_weight_loader)(param, loaded_weight)
    return name


def _unknown(layer: RoutedExperts, name: str, found: str) -> Exl3PackError:
    return Exl3PackError(
        found=f"{name}: {found}",
        expected="<expert>.<projection>.<leaf> with gate_proj, up_proj, down_proj or w1, w3, w2",
        where=layer.layer_name,
        remedy="The pack stores its experts in a way that this version does not know: please report it with the "
        "output of `vllm-exl3 inspect`.",
    )
