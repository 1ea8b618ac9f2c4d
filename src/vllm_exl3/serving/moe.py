"""EXL3 routed experts in vLLM: parameters, loading, and the call to the op.

Like the linears', parameters are flat and have their real size from construction on: ``w13_*`` holds
gate and up of every local expert, ``w2_*`` down. Loaders (moe_loading.py) only copy into views of them.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

import vllm_exl3.ops.moe  # noqa: F401  registers torch.ops.vllm_exl3.moe
from vllm_exl3.ops.experts import share_input_scales
from vllm_exl3.ops.moe import MoECall
from vllm_exl3.pack.stored import Codebook, ExpertGroup
from vllm_exl3.serving.expert_tiers import Share
from vllm_exl3.serving.expert_usage import RoutingCounter
from vllm_exl3.serving.loading import register_parameter
from vllm_exl3.serving.models.divided_experts import may_be_divided, routed_scale
from vllm_exl3.serving.moe_checks import ActivationCall, activation_call, check_scales, refuse_unserved
from vllm_exl3.serving.moe_host import HostExperts
from vllm_exl3.serving.moe_layout import ExpertLayout
from vllm_exl3.serving.moe_loading import ExpertLoaders
from vllm_exl3.serving.moe_names import expert_loader
from vllm_exl3.serving.moe_share import DividedExperts
from vllm_exl3.serving.offload import validate_exl3_moe_uva_layer
from vllm_exl3.serving.padding import route_padding

if TYPE_CHECKING:
    from vllm_exl3.serving.config import Exl3Config

__all__ = ["Exl3MoEMethod"]

_LAYER_CLASS = "RoutedExperts"
"""What calls of the op are counted under."""


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
        self.loaders: ExpertLoaders
        self.host: HostExperts | None = None
        self.divided: DividedExperts | None = None
        self.counter: RoutingCounter | None = None
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
        numbers = [layer._map_global_expert_id_to_local_expert_id(expert) for expert in range(total)]
        local = sorted((e for e in range(total) if numbers[e] >= 0), key=numbers.__getitem__)
        share = Share(tuple(local), parallel.tp_rank, parallel.tp_size)
        self.layout = layout = ExpertLayout(
            self.where,
            self.group,
            self.config.pack.linears,
            local=local,
            total=total,
            hidden=hidden_size,
            intermediate=intermediate_size_per_partition * parallel.tp_size,
            roles=("gate", "up", "down") if self.activation.gated else ("up", "down"),
            rank=parallel.tp_rank,
            ranks=parallel.tp_size,
            resident=self.config.expert_tiers.resident(self.where, self.group, share) if local else None,
        )
        self.host = HostExperts(layout) if layout.in_host else None
        if self.host is not None and self.config.expert_tiers.computes_on_cpu:
            self.divided = DividedExperts(layout, self.host)
        self.counter = self.config.expert_tiers.counter(self.group, total, self)
        self.loaders = loaders = ExpertLoaders(
            layout,
            numbers,
            adds_bias=parallel.tp_rank == 0,
            trellis_arrived=self.config.trellis_arrived,
            host=self.host.words if self.host is not None else None,
        )
        self._host_table = layout.table
        for name, sizes in layout.sizes.items():
            trellis = torch.empty(sizes.trellis, dtype=torch.int16)
            register_parameter(layer, f"{name}_trellis", trellis, loaders.loader("trellis"))
            # A scale that no tensor overwrites stays NaN, and is refused before the engine serves.
            for leaf, size in (("suh", sizes.suh), ("svh", sizes.svh)):
                scale = torch.full((size,), torch.nan, dtype=torch.float16)
                register_parameter(layer, f"{name}_{leaf}", scale, loaders.loader(leaf))
            if sizes.bias:
                bias = torch.zeros(sizes.bias, dtype=torch.float32)
                register_parameter(layer, f"{name}_bias", bias, loaders.loader("bias"))
            for codebook in (Codebook.MCG, Codebook.MUL1):
                if codebook in layout.markers[name]:
                    # The codebook is known from the headers; the parameter gives hand-written loaders its name. It
                    # holds the markers, since vLLM's prefetching offloader takes no empty parameter.
                    marker = torch.zeros(len(layout.markers[name][codebook]), dtype=torch.int32)
                    register_parameter(layer, f"{name}_{codebook.label}", marker, loaders.loader("marker"))
        # What vLLM reads to learn the device; a plain attribute, or it would count as a parameter.
        object.__setattr__(layer, "w2_weight_packed", layer.w2_trellis)
        # vLLM 0.30 and 0.31 take a 3-D tensor for stacked experts; the runner calls the instance's own method.
        layer.load_weights = expert_loader(layer)
        self.config.report.add_experts(self.where, layer, layout)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Refuse a layer that would serve noise because tensors never came or hold no usable values."""
        if layer.w13_trellis.is_meta:
            return  # vLLM built the layer and left it out
        validate_exl3_moe_uva_layer(layer, self.where)
        self.loaders.loaded.check()
        for name in ("w13", "w2"):
            for leaf in ("suh", "svh"):
                check_scales(self.layout, name, leaf, getattr(layer, f"{name}_{leaf}"))
        self._host_table = share_input_scales(self.layout.table, layer.w13_suh)
        if self.divided is not None:
            self.divided.load(layer, self._host_table)
        with torch.inference_mode():  # as they were made, at the first forward
            for device, table in self._tables.items():
                table.copy_(self._placed_table(device))  # in place: captured graphs read it
        if self.activation.gated and may_be_divided(self.config.pack.config):
            self.scale = routed_scale(self.where, layer.w13_suh, len(self.layout.local))
        self.config.layer_ready(self.where, layer)

    def bytes_beside_parameters(self) -> dict[str, int]:
        """Bytes that the report counts and that no parameter holds, by what they are."""
        return {"trellis in host memory": self.host.nbytes} if self.host is not None else {}

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
        if self.counter is not None:
            self.counter.count(topk_ids)
        if self.scale != 1:
            # In float32 either way: the unscaled result may be too small for float16.
            if layer.apply_router_weight_on_input:
                return (self._call(layer, x.float(), topk_weights, topk_ids) * self.scale).to(x.dtype)
            topk_weights = topk_weights.float() * self.scale
        return self._call(layer, x, topk_weights, topk_ids)

    def _call(
        self, layer: RoutedExperts, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        arguments = self._arguments(layer, x, topk_weights, topk_ids)
        if self.divided is not None:
            tiers, call = self.config.expert_tiers, MoECall(*arguments)
            # Whatever the first forward's size: a later one may be captured.
            self.divided.prepare(tiers.side_stream(x.shape[1], topk_ids.shape[1]), call, x.device)
            if 0 < x.shape[0] <= tiers.cpu_rows:
                return self.divided(x, call, _LAYER_CLASS)
        output: torch.Tensor = torch.ops.vllm_exl3.moe(x, *arguments, _LAYER_CLASS)
        return output

    def _arguments(
        self, layer: RoutedExperts, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[Any, ...]:
        """The op's arguments between ``x`` and the layer's class."""
        call = self.activation
        return (
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
            self._table(layer, x.device),
            self.layout.kinds,
            self.layout.intermediate,
            call.name,
            call.alpha,
            call.beta,
            call.limit,
            layer.apply_router_weight_on_input,
        )

    def _table(self, layer: RoutedExperts, device: torch.device) -> torch.Tensor:
        # Made at the first forward, not while loading: what is allocated then is lost when the engine sleeps.
        table = self._tables.get(device)
        if self.host is not None:
            self.host.check_bases(layer, device)
        if table is None:
            table = self._tables[device] = self._placed_table(device).to(device)
        return table

    def _placed_table(self, device: torch.device) -> torch.Tensor:
        """The table on the CPU, as kernels on a device need it."""
        return self._host_table if self.host is None else self.host.placed(self._host_table, device)
