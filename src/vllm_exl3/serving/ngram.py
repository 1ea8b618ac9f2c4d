"""N-gram (PLE) tables in vLLM: where the rows lie, how they are filled, and when a graph cannot look them up.

The table never passes through vLLM's weights: its file may be listed by no index, and 30 GiB of it would go through
the loader for nothing. It is read from the pack's files, a rank's share only.
"""

import json
import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from vllm_exl3 import env
from vllm_exl3.ops import backends
from vllm_exl3.ops.ngram import LOOKUP_OP, Lookup, ngram_reference, register_table, set_running_model
from vllm_exl3.ops.ngram_tables import DiskTable, MemoryTable, PinnedRows, fill
from vllm_exl3.pack import Pack, StoredNgramTable
from vllm_exl3.pack.assemble import RING_NGRAM
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.ngram import NgramHeads, read_heads
from vllm_exl3.pack.ngram_rows import NgramRows

if TYPE_CHECKING:
    from vllm_exl3.serving.config import Exl3Config

__all__ = ["NgramEmbeddingMethod", "check_graphs", "choose_place"]

logger = logging.getLogger("vllm.exl3")

_CACHE_UPDATES = ["vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update"]
"""What vLLM adds to its own list of splitting ops; a list that is passed replaces all of it."""

_LEFT_FREE = 0.85
"""Share of a device's memory that weights may take before a table is kept on the host: the KV cache needs the rest."""


class NgramEmbeddingMethod(QuantizeMethodBase):
    """The method of one n-gram embedding layer whose table is EXL3.

    Args:
        config: the pack's quantization config.
        prefix: the layer's vLLM name.
        stored: the table.
    """

    requires_device_loading = False
    """The table is filled where it lies; a pinned one must not be moved to the device for that."""

    def __init__(self, config: "Exl3Config", prefix: str, stored: StoredNgramTable) -> None:
        super().__init__()
        self.config = config
        self.prefix = prefix
        self.stored = stored
        self.name = f"exl3_ngram:{prefix}"
        self.place = ""

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Make room for this rank's rows, and for the heads' biases and offsets.

        Raises:
            Exl3PackError: the layer's width or rows are not the table's.
            RuntimeError: the table is to stay on disk, and vLLM would look it up inside a CUDA graph.
        """
        current = get_current_vllm_config()
        self._model = id(current.compilation_config.static_forward_context)
        self._check_layer(layer, input_size_per_partition)
        first, last = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
        # A rank beyond the table keeps its last row for the ids that vLLM masks to 0.
        self.first_row = min(first, self.stored.rows - 1)
        rows = max(1, min(last, self.stored.rows) - self.first_row)
        words, heads = self.stored.shards[0].shape[1], self.stored.head_bias.shape[0]
        device = torch.empty(0).device  # vLLM builds models under the device that they run on
        self.place = choose_place(self.config.pack, layer.tp_size, device, current)
        # A kernel that was asked for and cannot run here is refused before the weights are read.
        backends.select("ngram", device.type, ngram_reference)
        if self.place == "disk":
            check_graphs(current.compilation_config, breakable=_breakable())
        # Buffers, the rows too: nothing of this comes through vLLM's loader, which would wait for parameters to be
        # loaded, and sleep keeps a model's buffers where it discards everything else.
        layer.register_buffer("head_bias", torch.zeros((heads, RING_NGRAM), dtype=torch.float16), persistent=False)
        layer.register_buffer("head_offsets", torch.zeros(heads, dtype=torch.int64), persistent=False)
        if self.place == "resident":
            layer.register_buffer("trellis", torch.zeros((rows, words), dtype=torch.int16), persistent=False)
            weight = layer.trellis
        elif self.place == "pinned":
            self._pinned = PinnedRows(rows, words)
            weight = self._pinned.tensor
        else:
            weight = torch.empty((0, words), dtype=torch.int16, device="cpu")
        # vLLM's class logs the dtype and device of its weight; as an attribute it is no second parameter.
        object.__setattr__(layer, "weight", weight)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Read the table, give the model's hash the pack's own numbers, and let the op find the rows.

        Raises:
            Exl3PackError: the files are not here, contradict themselves, or the model hashes to other rows.
        """
        pack = Pack.open(self.config.pack.source, self.config.revision)  # by now its files are on this machine
        stored = pack.ngram_tables[self.stored.key]
        heads = read_heads(pack, stored)
        self._check_ids(layer, heads)
        self._give_hash(heads)
        layer.head_bias.copy_(torch.from_numpy(heads.bias))
        layer.head_offsets.copy_(torch.from_numpy(heads.offsets))
        cache = env.NGRAM_CACHE_MIB.get() << 20 if self.place == "disk" else 0
        reader = NgramRows(pack, stored, cache)
        lookup: Lookup
        if self.place == "disk":
            lookup = _outside_graphs(DiskTable(reader, layer.head_bias, layer.head_offsets, self.first_row))
        else:
            rows = layer.trellis if self.place == "resident" else self._pinned.tensor
            fill(rows, reader, self.first_row)
            lookup = MemoryTable(rows, layer.head_bias, layer.head_offsets, self.first_row)
        self._lookup = lookup
        register_table(self.name, lookup, self._model)
        # The first look-up compiles a GPU's kernel: now, and not while a CUDA graph is captured.
        self.embedding(layer, torch.zeros(1, dtype=torch.int64, device=layer.head_bias.device))
        kind = f"n-gram rows, K = {stored.bits}, {self.place}"
        self.config.report.embedding_ready(self.prefix, kind, layer.weight.nbytes)
        logger.info("vllm-exl3 serves %s: %s, %.2f GiB", self.prefix, kind, layer.weight.nbytes / 2**30)

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """Rows ``[*input_.shape, 160]`` of this rank's share, in the model's dtype; ids count from its first row."""
        rows = torch.empty((*input_.shape, RING_NGRAM), dtype=layer.params_dtype, device=input_.device)
        torch.ops.vllm.exl3_ngram_lookup_out(input_, rows, self.name)
        return rows

    def dequantize(self, layer: torch.nn.Module, embeddings: torch.Tensor, output_dtype: torch.dtype) -> torch.Tensor:
        """Looked-up rows in the activations' dtype; they are decoded already."""
        return embeddings.to(output_dtype)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """An n-gram table multiplies nothing.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"{self.prefix}: an n-gram table is only looked up")

    def _check_layer(self, layer: torch.nn.Module, width: int) -> None:
        if width != RING_NGRAM:
            raise Exl3PackError(
                found=f"a layer of {width} columns",
                expected=f"{RING_NGRAM}, which every EXL3 n-gram row has",
                where=f"{self.prefix} ({self.stored.key})",
                remedy="config.json is of another model than the table (ple_embed_dim over the heads): fetch it again.",
            )

    def _check_ids(self, layer: torch.nn.Module, heads: NgramHeads) -> None:
        if heads.rows > layer.org_vocab_size:
            raise Exl3PackError(
                found=f"a layer of {layer.org_vocab_size} rows",
                expected=f"{heads.rows}, which the table's heads reach",
                where=f"{self.prefix} ({self.stored.key})",
                remedy="config.json is of another model than the table (ngram_vocab_size_base): fetch the pack again.",
            )

    def _give_hash(self, heads: NgramHeads) -> None:
        """vLLM computes the hash's numbers from config.json; those that the pack stores are the ones it was made with.

        Raises:
            Exl3PackError: the model has another number of heads or tokens.
        """
        owner = get_current_vllm_config().compilation_config.static_forward_context.get(self.prefix.rsplit(".", 2)[0])
        module = getattr(owner, "ple_embedding", None)
        if module is None:
            logger.warning("%s: vLLM's hash was not compared with the pack's: the layer is not found", self.prefix)
            return
        for name, values in (
            ("ngram_heads_offsets", heads.offsets),
            ("ngram_heads_vocab_sizes", heads.sizes),
            ("layer_multipliers", heads.multipliers),
        ):
            buffer = getattr(module, name)
            if values is None:
                continue
            if tuple(buffer.shape) != values.shape:
                raise Exl3PackError(
                    found=f"{len(values)} values for {name}",
                    expected=f"{len(buffer)}, as config.json says (ngram_size, heads_per_ngram)",
                    where=f"{self.stored.key} in {self.config.source}",
                    remedy="config.json is of another model than the table: fetch the pack again.",
                )
            buffer.copy_(torch.from_numpy(values))


def choose_place(pack: Pack, ranks: int, device: torch.device, config: VllmConfig) -> str:
    """Where this process keeps its share of the tables: resident, pinned or disk.

    Args:
        pack: for the size of all weights.
        ranks: over which they are divided.
        device: that the model runs on.
        config: vLLM's, which says how much of the device's memory is its own.
    """
    wanted = env.NGRAM_TABLE.get()
    if wanted != "auto":
        return wanted
    if device.type != "cuda":
        return "resident"
    usable = torch.cuda.get_device_properties(device).total_memory * config.cache_config.gpu_memory_utilization
    return "resident" if pack.nbytes / ranks <= _LEFT_FREE * usable else "pinned"


def check_graphs(compilation: CompilationConfig, *, breakable: bool) -> None:
    """Refuse a table on disk where a CUDA graph would be captured over its look-ups.

    Args:
        compilation: vLLM's.
        breakable: whether graphs are broken at run time instead of being split ahead of it.

    Raises:
        RuntimeError: with the complete flag to pass.
    """
    mode = compilation.cudagraph_mode or CUDAGraphMode.NONE
    given = compilation.splitting_ops or []
    if mode == CUDAGraphMode.NONE or (mode == CUDAGraphMode.PIECEWISE and (breakable or LOOKUP_OP in given)):
        return
    others = given or [*CompilationConfig._attention_ops, *_CACHE_UPDATES]
    flag = {"cudagraph_mode": "PIECEWISE", "splitting_ops": [*(op for op in others if op != LOOKUP_OP), LOOKUP_OP]}
    raise RuntimeError(
        f"VLLM_EXL3_NGRAM_TABLE=disk with cudagraph_mode {mode.name}"
        + ("" if LOOKUP_OP in given else f" and {LOOKUP_OP} not among the splitting ops")
        + ": a CUDA graph cannot read files. Pass this (the list replaces vLLM's own, hence its length), or "
        "--enforce-eager, or set VLLM_EXL3_NGRAM_TABLE=pinned:\n"
        f"--compilation-config '{json.dumps(flag)}'"
    )


def _running_model() -> int | None:
    """The model whose forward pass this is, as its layers know it: vLLM keeps one such mapping an engine."""
    return id(get_forward_context().no_compile_layers) if is_forward_context_available() else None


set_running_model(_running_model)


def _breakable() -> bool:
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled

    return is_breakable_cudagraph_enabled()


def _outside_graphs(lookup: Lookup) -> Lookup:
    """A look-up that ends the CUDA graph being captured, runs by itself and starts the next one."""
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    def run(ids: torch.Tensor, out: torch.Tensor) -> None:
        lookup(ids, out)

    wrapped: Lookup = eager_break_during_capture(run)
    return wrapped
