"""EXL3 linear layers in vLLM: parameters, loading, and the call to the op.

A layer holds one flat parameter per checkpoint suffix, at its real size from construction on:
that is what vLLM's offloading, reloading, sleep mode and memory profile count on. Loaders only
copy into views of them.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.linear import LinearMethodBase

from vllm_exl3.ops import backends
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.parts import Part
from vllm_exl3.pack.stored import TILE, Codebook
from vllm_exl3.serving.layout import Layout, Output, Slot, layer_outputs
from vllm_exl3.serving.loading import (
    LoadedParts,
    check_loaded_marker,
    check_loaded_scales,
    check_overwritten,
    check_shape,
    register_parameter,
    unpack_signs_like,
)
from vllm_exl3.serving.models import llama4

if TYPE_CHECKING:
    from vllm_exl3.serving.config import Exl3Config

__all__ = ["Exl3LinearMethod"]

logger = logging.getLogger("vllm.exl3")

ShardId = str | int | tuple[int, ...] | None


class Exl3LinearMethod(LinearMethodBase):
    """One vLLM linear layer whose weights, or some of whose fused weights, are EXL3.

    Weights are served as they are stored, so vLLM's cache of processed weights may hold them.

    Args:
        config: the quantization config; it keeps the report and checks names at the first load.
        where: the layer's vLLM name.
        parts: its stored tensors, in output order.
    """

    supports_pre_processed_weights = True
    requires_device_loading = False  # nothing is computed on them: offloaded parameters stay where they are

    def __init__(self, config: "Exl3Config", where: str, parts: Sequence[Part]) -> None:
        super().__init__()
        self.config = config
        self.where = where
        self.parts = tuple(parts)
        self.layout: Layout
        self.loaded = LoadedParts(where)

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``trellis``, ``suh``, ``svh`` (and marker and 16-bit ``weight``) at their real sizes."""
        outputs = layer_outputs(layer, output_partition_sizes, output_size)
        rank = layer.tp_rank if input_size_per_partition != input_size else 0
        rows = (rank * input_size_per_partition, input_size_per_partition, input_size)
        self.register(layer, outputs, rows, params_dtype)

    def register(
        self, layer: torch.nn.Module, outputs: Sequence[Output], rows: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        """Register the parameters for these outputs and input rows (start, size, total)."""
        self.layout = layout = Layout(self.where, self.parts, outputs, rows)
        self.shards = list(layout.shards)
        self.layer_class = type(layer).__name__
        self.head_sizes = self._reordered_heads()
        sizes = layout.sizes
        register_parameter(layer, "trellis", torch.empty(sizes["trellis"], dtype=torch.int16), self.load_trellis)
        # A scale that no tensor overwrites stays NaN, and is refused before the engine serves.
        register_parameter(layer, "suh", torch.full((sizes["suh"],), torch.nan, dtype=torch.float16), self.load_suh)
        register_parameter(layer, "svh", torch.full((sizes["svh"],), torch.nan, dtype=torch.float16), self.load_svh)
        for codebook in (Codebook.MCG, Codebook.MUL1):
            if count := len(layout.markers(codebook)):
                register_parameter(layer, codebook.label, torch.zeros(count, dtype=torch.int32), self.load_marker)
        if sizes["weight"]:
            weight = torch.empty((sizes["weight"], rows[1]), dtype=dtype)
            register_parameter(layer, "weight", weight, self.load_weight)
        else:
            # What vLLM reads to learn the device (LoRA, MLA); a plain attribute, or it would count as a parameter.
            object.__setattr__(layer, "weight_packed", layer.trellis)
        layer.weight_loader = _bias_loader(layer.weight_loader, self)
        self.config.report.add_layer(self.where, layer, layout)
        if not layer.trellis.is_meta:
            # A kernel that was asked for and cannot run is refused now, not after gigabytes of weights.
            backends.select("linear", layer.trellis.device.type, linear_reference)

    def load_trellis(self, param: Parameter, loaded_weight: torch.Tensor, shard_id: ShardId = None) -> None:
        """Copy this rank's blocks of one stored trellis ``[in/16, out/16, 16·K]``."""
        for slot in self._slots("trellis", loaded_weight, shard_id):
            piece, shard = slot.piece, slot.shard
            target = param.data[slot.trellis : slot.trellis + shard.trellis_words].view(shard.trellis_shape)
            rows = slice(piece.row_start // TILE, (piece.row_start + piece.row_size) // TILE)
            columns = slice(piece.column_start // TILE, (piece.column_start + piece.column_size) // TILE)
            target.copy_(loaded_weight[rows, columns])

    def load_suh(self, param: Parameter, loaded_weight: torch.Tensor, shard_id: ShardId = None) -> None:
        """Copy this rank's range of one stored input scale ``[in]``."""
        for slot in self._slots("suh", loaded_weight, shard_id):
            start, size = slot.piece.row_start, slot.piece.row_size
            values = unpack_signs_like(param, loaded_weight)[start : start + size]
            param.data[slot.suh : slot.suh + size].copy_(values)

    def load_svh(self, param: Parameter, loaded_weight: torch.Tensor, shard_id: ShardId = None) -> None:
        """Copy this rank's range of one stored output scale ``[out]``."""
        for slot in self._slots("svh", loaded_weight, shard_id):
            start, size = slot.piece.column_start, slot.piece.column_size
            values = unpack_signs_like(param, loaded_weight)[start : start + size]
            param.data[slot.svh : slot.svh + size].copy_(values)

    def load_marker(self, param: Parameter, loaded_weight: torch.Tensor, shard_id: ShardId = None) -> None:
        """Keep a codebook's marker and check its value."""
        index = self.layout.part_for(shard_id)
        linear = self.parts[index].linear
        assert linear is not None and linear.marker is not None
        check_loaded_marker(linear.marker, loaded_weight)
        position = self.layout.markers(linear.codebook).index(index)
        param.data[position : position + 1].copy_(loaded_weight.reshape(1))
        self.loaded.add(linear.codebook.label, index)

    def load_weight(self, param: Parameter, loaded_weight: torch.Tensor, shard_id: ShardId = None) -> None:
        """Copy this rank's rows of a 16-bit weight ``[out, in]`` fused with EXL3 ones."""
        self.config.verify_names()
        index = self.layout.part_for(shard_id)
        start, size, _ = self.layout.rows
        for slot in self.layout.dense_slots:
            if slot.part == index:
                source = loaded_weight[slot.start : slot.start + slot.size, start : start + size]
                param.data[slot.row : slot.row + slot.size].copy_(source)
        self.loaded.add("weight", index)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Refuse a layer that would serve noise because tensors of it never came."""
        if layer.trellis.is_meta:
            return  # vLLM built the layer and left it out: a pooling model's head, a tower that is not run
        self.loaded.check(self.parts, bias=getattr(layer, "bias", None) is not None)
        self._check_bias(layer)
        check_overwritten(self.where, suh=layer.suh, svh=layer.svh)
        self.config.layer_ready(self.where, layer)

    def _check_bias(self, layer: torch.nn.Module) -> None:
        stored = [part.key for part in self.parts if part.linear is not None and part.linear.bias is not None]
        if stored and getattr(layer, "bias", None) is None:
            logger.warning("%s.bias is stored, but config.json gives this layer no bias: it is not used", stored[0])
        if any(self.head_sizes) and getattr(layer, "bias", None) is not None:
            raise Exl3PackError(
                found="a bias",
                expected="none: vLLM reorders the rows of q and k for its rotary embedding, but not their biases",
                where=self.where,
                remedy="No published Llama 4 has attention_bias; set it to false in config.json.",
            )

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [..., in]`` times the layer's weights, plus ``bias``, as ``[..., out]`` in the dtype of ``x``."""
        flat = x.reshape(-1, x.shape[-1])
        mixed = bool(self.layout.sizes["weight"])
        # Inputs that begin inside a block of 128 are placed in it; the op zero-extends on the other side itself.
        inputs = torch.nn.functional.pad(flat, (offset, 0)) if (offset := self.layout.row_offset) else flat
        output = torch.ops.vllm_exl3.linear(
            inputs, layer.trellis, layer.suh, layer.svh, None if mixed else bias, self.shards, self.layer_class
        )
        if any(self.head_sizes):
            output = self._reorder(output)
        if mixed:
            output = self._interleave(output, torch.nn.functional.linear(flat, layer.weight))
            if bias is not None:
                output = output + bias
        return output.view(*x.shape[:-1], output.shape[-1])

    def dequantize_weight(self, layer: torch.nn.Module) -> torch.Tensor:
        """The layer's weight ``[out, in]`` in its activation dtype, for vLLM's online requantization."""
        size = self.layout.rows[1]
        identity = torch.eye(size, dtype=torch.float32, device=layer.trellis.device)
        return self.apply(layer, identity).t().contiguous().to(layer.params_dtype)

    def _reordered_heads(self) -> list[int]:
        """Of each EXL3 slot, the size of the heads whose channels vLLM wants in another order, or 0."""
        config, widths = self.config.pack.config, self.layout.logical_width
        heads = [llama4.rotary_heads(config, part.key) for part in self.parts]
        return [widths[slot.part] // heads[slot.part] if heads[slot.part] else 0 for slot in self.layout.exl3_slots]

    def _reorder(self, output: torch.Tensor) -> torch.Tensor:
        columns = output.split([slot.piece.crop_size for slot in self.layout.exl3_slots], dim=1)
        pairs = zip(columns, self.head_sizes, strict=True)
        return torch.cat([llama4.pairs_to_halves(values, size) if size else values for values, size in pairs], dim=1)

    def _interleave(self, exl3: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        columns, taken = [], {True: 0, False: 0}
        for slot in self.layout.slots:
            is_exl3 = isinstance(slot, Slot)
            size = slot.piece.crop_size if isinstance(slot, Slot) else slot.size
            source = exl3 if is_exl3 else dense
            columns.append(source[:, taken[is_exl3] : taken[is_exl3] + size])
            taken[is_exl3] += size
        return torch.cat(columns, dim=1)

    def _slots(self, leaf: str, loaded_weight: torch.Tensor, shard_id: ShardId) -> list[Slot]:
        """The slots that a loaded tensor fills, after checking that it is the one whose header was read."""
        self.config.verify_names()
        index = self.layout.part_for(shard_id)
        linear = self.parts[index].linear
        if linear is None:
            raise Exl3PackError(
                found=f"an EXL3 tensor for output {shard_id!r}",
                expected="a 16-bit weight, as the headers said when the pack was opened",
                where=self.where,
                remedy="The pack changed while it was being loaded; start again.",
            )
        stored = getattr(linear, leaf)
        check_shape(stored, loaded_weight)
        if leaf == "trellis":
            self.config.trellis_arrived(loaded_weight)
        else:
            check_loaded_scales(stored, loaded_weight)
        self.loaded.add(leaf, index)
        return [slot for slot in self.layout.exl3_slots if slot.part == index]


def _bias_loader(original: Callable[..., None], method: Exl3LinearMethod) -> Callable[..., None]:
    """Wrap the layer's own loader, which loads the bias: note that it came, and cut its padding off first."""

    def weight_loader(param: Parameter, loaded_weight: torch.Tensor, *shard_id: Any) -> None:
        layout = method.layout
        index = layout.part_for(shard_id[0] if shard_id else None)
        original(param, loaded_weight[: layout.logical_width[index]], *shard_id)
        method.loaded.add("bias", index)

    return weight_loader
