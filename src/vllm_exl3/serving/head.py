"""EXL3 output heads, and the embeddings that stand in for a head.

A pack carries its own head even where the model ties it to the embedding. Most model classes build
a ``ParallelLMHead`` for it; some (Gemma 2) multiply by the embedding instead, and then the head's
tensors are attached to the embedding layer.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.parts import Part
from vllm_exl3.pack.stored import BLOCK
from vllm_exl3.serving.decoded_weight import Rows, lend_weight
from vllm_exl3.serving.layout import Output
from vllm_exl3.serving.linear import Exl3LinearMethod

if TYPE_CHECKING:
    from vllm_exl3.serving.config import Exl3Config

__all__ = ["Exl3EmbeddingMethod", "Exl3HeadMethod"]


class Exl3HeadMethod(Exl3LinearMethod):
    """A vocabulary-parallel head: its ranks' edges are multiples of 64, so blocks of 128 are covered and cropped."""

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
        """Register the parameters for this rank's range of the vocabulary.

        Raises:
            Exl3PackError: logits are wanted in another dtype than the model's.
        """
        current = get_current_vllm_config_or_none()
        model = current.model_config if current is not None else None
        if model is not None and model.runner_type == "generate" and model.head_dtype != params_dtype:
            raise Exl3PackError(  # vLLM refuses too, once everything is loaded
                found=f"head_dtype {model.head_dtype} for a model in {params_dtype}",
                expected="the model's own dtype, which an EXL3 head multiplies in",
                where=self.where,
                remedy="Leave head_dtype out of --hf-overrides and config.json, or choose --dtype.",
            )
        self.register_head(layer, params_dtype)
        shape = (layer.num_embeddings_per_partition, layer.embedding_dim)
        lend_weight(layer, self.where, self._weight_rows(weakref.ref(layer), params_dtype), shape, params_dtype)

    def register_head(self, layer: torch.nn.Module, dtype: torch.dtype, holder: torch.nn.Module | None = None) -> None:
        """Register the head's parameters on a ``VocabParallelEmbedding``, or for one on another module."""
        linear = self.parts[0].linear
        assert linear is not None
        indices = layer.shard_indices
        start = indices.padded_org_vocab_start_index
        size = min(indices.num_org_elements_padded, linear.out_features - start)
        if size <= 0:
            raise Exl3PackError(
                found=f"rank {layer.tp_rank} of {layer.tp_size} beyond the head's {linear.out_features} columns",
                expected="columns for every rank",
                where=f"{self.where} ({linear.trellis.file}, {linear.trellis.name})",
                remedy="Use a smaller --tensor-parallel-size.",
            )
        width = layer.embedding_dim
        self.register(holder or layer, [Output(layer.org_vocab_size, start, size)], (0, width, width), dtype)
        self._missing = layer.num_embeddings_per_partition - size

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Logits ``[..., vocabulary of this rank]``; padding columns that the pack does not store are zero."""
        if not self._missing:
            return super().apply(layer, x, bias)
        logits = torch.nn.functional.pad(super().apply(layer, x), (0, self._missing))
        return logits if bias is None else logits + bias

    def _weight_rows(self, held: "weakref.ref[torch.nn.Module]", dtype: torch.dtype) -> Rows:
        """What decodes rows ``[n, width]`` of the head: products with unit vectors, which every backend computes."""

        def rows(ids: torch.Tensor) -> torch.Tensor:
            layer = held()
            assert layer is not None, f"{self.where} is gone"
            device, width = layer.trellis.device, layer.embedding_dim
            weight = torch.empty((len(ids), width), dtype=dtype, device=device)
            wanted = ids.to(device)
            for start in range(0, width, BLOCK):
                size = min(BLOCK, width - start)
                unit = torch.zeros((size, width), dtype=dtype, device=device)
                unit[:, start : start + size].fill_diagonal_(1)
                weight[:, start : start + size] = self.apply(layer, unit)[:, wanted].T
            return weight

        return rows

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """Keep the pack's own head, whatever ``tie_word_embeddings`` says."""
        return layer


class Exl3EmbeddingMethod(UnquantizedEmbeddingMethod):
    """A 16-bit embedding of an EXL3 model, which may have to multiply by the pack's own head.

    Args:
        config: the quantization config.
        has_own_head: the pack stores an EXL3 head, so this table is only ever looked up.
    """

    def __init__(self, config: "Exl3Config", *, has_own_head: bool) -> None:
        super().__init__()
        self.config = config
        self.has_own_head = has_own_head
        self.head: Exl3HeadMethod | None = None

    def attach_head(self, layer: torch.nn.Module, where: str, parts: Sequence[Part]) -> None:
        """Let this layer's products go through an EXL3 head whose parameters are registered beside ``weight``."""
        head = Exl3HeadMethod(self.config, where, parts)
        with layer.weight.device:
            head.register_head(layer, layer.params_dtype)
            record_metadata_for_reloading(layer)  # vLLM noted the layer's parameters when it had built the model
        self.head = head

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Check the attached head; without an own head, prepare the table for products as vLLM does."""
        dtype = str(layer.weight.dtype).removeprefix("torch.")
        where = getattr(layer, "prefix", "") or "embed_tokens"  # vLLM 0.30's layer does not know its name
        self.config.report.embedding_ready(where, f"dense, {dtype}", layer.weight.nbytes)
        if self.head is not None:
            self.head.process_weights_after_loading(layer)
        elif not self.has_own_head:
            # vLLM packs a second copy of the table for its CPU GEMM: wasted where no product uses it.
            super().process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Logits, through the attached head if there is one."""
        if self.head is not None:
            return self.head.apply(layer, x, bias)
        return super().apply(layer, x, bias)
