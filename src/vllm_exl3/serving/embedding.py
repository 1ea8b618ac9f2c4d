"""Quantized token embeddings in vLLM: EXL3 row codes, int8 and int4 tables.

Rows are decoded as they are gathered. A model that ties its head to such a table gets its logits from
the table itself, a bounded number of rows at a time, unless the pack stores a head of its own.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

from vllm_exl3.ops import backends
from vllm_exl3.ops.embedding import embedding_reference, row_chunk
from vllm_exl3.pack.assemble import RING_GROUP
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.parts import Part
from vllm_exl3.pack.scaled_rows import row_layout
from vllm_exl3.pack.stored import TILE, StoredRowTable, StoredScaledTable
from vllm_exl3.serving.decoded_weight import Rows, lend_weight
from vllm_exl3.serving.head import Exl3HeadMethod
from vllm_exl3.serving.loading import check_overwritten, register_parameter

if TYPE_CHECKING:
    from vllm_exl3.serving.config import Exl3Config

__all__ = ["QuantizedEmbeddingMethod", "Table"]

logger = logging.getLogger("vllm.exl3")

_GPU_CHUNKS = 16
"""Blocks of rows that a GPU decodes at once for a tied head: one is less work than two launches take."""

_SCALE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True)
class Table:
    """A stored table as its layer needs to know it.

    Attributes:
        key: the module's name in the checkpoint.
        rows: its rows, the vocabulary.
        table: leaf name and dtype of the codes, ``[rows, columns]``.
        columns: words or bytes of one row.
        scales: leaf name and dtype of what the codes are multiplied by.
        scale_shape: its stored shape; of a row code, signs that all rows share.
    """

    key: str
    rows: int
    table: tuple[str, torch.dtype]
    columns: int
    scales: tuple[str, torch.dtype]
    scale_shape: tuple[int, int]

    @property
    def is_row_code(self) -> bool:
        """Whether this is EXL3's code, whose signs belong to columns and not to rows."""
        return self.table[1] == torch.int16

    @classmethod
    def of(cls, stored: StoredRowTable | StoredScaledTable) -> "Table":
        """From a pack's headers."""
        if isinstance(stored, StoredRowTable):
            columns, shape = stored.trellis.shape[1], (stored.groups, RING_GROUP)
            return cls(stored.key, stored.rows, ("trellis", torch.int16), columns, ("signs", torch.float16), shape)
        scale_dtype = _SCALE_DTYPES[stored.scales.dtype]
        return cls.of_integers(stored.key, stored.rows, stored.bits, stored.table.shape[1], stored.groups, scale_dtype)

    @classmethod
    def of_integers(
        cls, key: str, rows: int, bits: int, columns: int, groups: int, scale_dtype: torch.dtype
    ) -> "Table":
        """An int8 or int4 table; `columns` are bytes of a row, `groups` scales of a row."""
        dtype = torch.int8 if bits == 8 else torch.uint8
        return cls(key, rows, ("qrows", dtype), columns, ("scales", scale_dtype), (rows, groups))

    @property
    def kind(self) -> str:
        """How it is coded, for the report."""
        if self.is_row_code:
            return f"EXL3 row code, K = {(self.columns // self.scale_shape[0] - 1) // TILE}"
        return "int8, a scale for each row" if self.table[1].is_signed else "int4, a scale for each 128 columns"

    def fits(self, rows: int, width: int) -> bool:
        """Whether a layer of this vocabulary and hidden size can be this table's."""
        if self.is_row_code:
            right_width = self.scale_shape[0] == -(-width // RING_GROUP)
        else:
            right_width = (self.columns, self.scale_shape[1]) == row_layout(width, 8 if self.table[1].is_signed else 4)
        return right_width and self.rows >= rows


class QuantizedEmbeddingMethod(QuantizeMethodBase):
    """The method of one embedding layer whose table is quantized.

    Args:
        where: the layer's vLLM name, or the table's where the model class passes none.
        table: what is stored.
        config: the quantization config of an EXL3 pack, which checks names at the first load and may attach a
            head; None for tables beside another quantization.
    """

    def __init__(self, where: str, table: Table, config: "Exl3Config | None" = None) -> None:
        super().__init__()
        self.where = where or table.key
        self.table = table
        self.config = config
        self.head: Exl3HeadMethod | None = None
        self._seen: set[str] = set()

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
        """Register codes and scales for exactly the vocabulary rows that this rank holds.

        Raises:
            Exl3PackError: the layer's vocabulary or width is not the table's.
        """
        table = self.table
        if layer.num_added_embeddings or not table.fits(layer.org_vocab_size, layer.embedding_dim):
            added = f" and {layer.num_added_embeddings} added rows" if layer.num_added_embeddings else ""
            raise Exl3PackError(
                found=f"a layer of {layer.org_vocab_size} x {layer.embedding_dim}{added}",
                expected=f"one that fits {table.rows} rows of {table.columns} {table.table[1]} "
                f"with {list(table.scale_shape)} {table.scales[0]}",
                where=f"{self.where} ({table.key})",
                remedy="config.json is of another model than the table: fetch the pack again.",
            )
        # A kernel that was asked for and cannot run here is refused before the weights are read.
        backends.select("embedding", torch.empty(0).device.type, embedding_reference)
        indices = layer.shard_indices
        self._start = indices.org_vocab_start_index
        # A rank beyond the vocabulary keeps one row for the ids that vLLM masks to 0.
        rows = max(1, indices.num_org_elements)
        self._start = min(self._start, table.rows - rows)
        codes = torch.zeros((rows, table.columns), dtype=table.table[1])
        shape = table.scale_shape if table.is_row_code else (rows, table.scale_shape[1])
        # Scales that no tensor overwrites stay NaN, and are refused before the engine serves.
        scales = torch.full(shape, torch.nan, dtype=table.scales[1])
        register_parameter(layer, table.table[0], codes, self.load_rows)
        register_parameter(layer, table.scales[0], scales, self.load_signs if table.is_row_code else self.load_scales)
        size = (layer.num_embeddings_per_partition, layer.embedding_dim)
        lend_weight(layer, self.where, self._weight_rows(weakref.ref(layer), params_dtype), size, params_dtype)

    def load_rows(self, param: Parameter, loaded_weight: torch.Tensor) -> None:
        """Copy this rank's rows of the codes ``[rows, columns]``."""
        self._check(self.table.table, (self.table.rows, self.table.columns), loaded_weight)
        param.data.copy_(loaded_weight[self._start : self._start + param.shape[0]])

    def load_scales(self, param: Parameter, loaded_weight: torch.Tensor) -> None:
        """Copy this rank's rows of the scales ``[rows, groups]``."""
        self._check(self.table.scales, self.table.scale_shape, loaded_weight)
        param.data.copy_(loaded_weight[self._start : self._start + param.shape[0]])

    def load_signs(self, param: Parameter, loaded_weight: torch.Tensor) -> None:
        """Copy the signs ``[groups, 256]`` of a row code, which all ranks share."""
        self._check(self.table.scales, self.table.scale_shape, loaded_weight)
        param.data.copy_(loaded_weight)

    def attach_head(self, layer: torch.nn.Module, where: str, parts: Sequence[Part]) -> None:
        """Let this layer's products go through an EXL3 head, whose parameters live in a module ``head`` of it."""
        assert self.config is not None
        head = Exl3HeadMethod(self.config, where, parts)
        with getattr(layer, self.table.table[0]).device:
            holder = _AttachedHead(layer.weight_loader)
            head.register_head(layer, layer.params_dtype, holder)
            layer.head = holder
            record_metadata_for_reloading(layer)  # vLLM noted the layer's modules when it had built the model
        self.head = head

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Refuse a table that would serve noise because tensors of it never came.

        Raises:
            Exl3PackError: codes or scales were not loaded, or a scale is NaN or infinite.
        """
        names = (self.table.table[0], self.table.scales[0])
        if self._seen and (missing := [name for name in names if name not in self._seen]):
            raise Exl3PackError(
                found=f"no data for {self.table.key}.{missing[0]}",
                expected=" and ".join(f".{name}" for name in names),
                where=self.where,
                remedy="A shard was skipped while loading: compare model.safetensors.index.json with the files.",
            )
        self._seen.clear()
        check_overwritten(self.where, **{names[1]: getattr(layer, names[1])})
        # The first look-up compiles a GPU's kernel: now, and not while a CUDA graph is captured.
        codes = getattr(layer, names[0])
        self._rows(layer, torch.zeros(1, dtype=torch.int64, device=codes.device), layer.params_dtype)
        if self.config is not None:
            nbytes = sum(getattr(layer, name).nbytes for name in names)
            self.config.report.embedding_ready(self.where, self.table.kind, nbytes)
        else:
            logger.info("vllm-exl3 serves the embedding %s: %s", self.where, self.table.kind)
        if self.head is not None:
            self.head.process_weights_after_loading(layer.head)

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """Rows ``[*input_.shape, width]`` of this rank's part of the table, in the model's dtype."""
        return self._rows(layer, input_, layer.params_dtype)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Logits ``[..., vocabulary of this rank]``, of the attached head or the table; vLLM's padding is zero."""
        if self.head is not None:
            return self.head.apply(layer.head, x, bias)
        flat = x.reshape(-1, x.shape[-1])
        # Without the row that a rank beyond the vocabulary keeps.
        rows, step = layer.shard_indices.num_org_elements, row_chunk(layer.embedding_dim)
        if x.device.type == "cuda":
            step *= _GPU_CHUNKS
        logits = flat.new_zeros((flat.shape[0], layer.num_embeddings_per_partition))
        for start in range(0, rows, step):
            ids = torch.arange(start, min(start + step, rows), device=x.device)
            weight = self._rows(layer, ids, x.dtype)
            logits[:, start : start + len(ids)] = torch.nn.functional.linear(flat, weight)
        if bias is not None:
            logits = logits + bias
        return logits.view(*x.shape[:-1], -1)

    def _weight_rows(self, held: "weakref.ref[torch.nn.Module]", dtype: torch.dtype) -> Rows:
        """What decodes rows ``[n, width]`` as a weight in 16 bits has them: vLLM's padding is zero."""

        def rows(ids: torch.Tensor) -> torch.Tensor:
            layer = held()
            assert layer is not None, f"{self.where} is gone"
            last = layer.shard_indices.num_org_elements - 1
            ids = ids.to(getattr(layer, self.table.table[0]).device)
            return self._rows(layer, ids.clamp(0, max(0, last)), dtype) * (ids <= last).unsqueeze(-1)

        return rows

    def _rows(self, layer: torch.nn.Module, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        codes, scales = getattr(layer, self.table.table[0]), getattr(layer, self.table.scales[0])
        rows: torch.Tensor = torch.ops.vllm_exl3.embedding(ids, codes, scales, layer.embedding_dim, dtype)
        return rows

    def _check(self, leaf: tuple[str, torch.dtype], shape: tuple[int, ...], loaded: torch.Tensor) -> None:
        """Refuse a tensor that is not the one that was described when the layer was built."""
        if self.config is not None:
            self.config.verify_names()
        name, dtype = leaf
        if tuple(loaded.shape) != shape or loaded.dtype != dtype:
            raise Exl3PackError(
                found=f"{loaded.dtype} {list(loaded.shape)}",
                expected=f"{dtype} {list(shape)}, as described when the model was built",
                where=f"{self.table.key}.{name}",
                remedy="The files changed since, or another revision was downloaded; start again, with --revision.",
            )
        if not loaded.is_meta and dtype.is_floating_point and not torch.isfinite(loaded).all():
            raise Exl3PackError(
                found="NaN or infinity",
                expected="finite values",
                where=f"{self.table.key}.{name}",
                remedy="The file is damaged: fetch the pack again.",
            )
        self._seen.add(name)


class _AttachedHead(torch.nn.Module):
    """Holds the parameters of a head beside those of an embedding, both of which may be called ``trellis``."""

    def __init__(self, weight_loader: Callable[..., None]) -> None:
        super().__init__()
        self.weight_loader = weight_loader
