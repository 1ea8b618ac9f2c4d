"""EXL3 output heads, and the embeddings that stand in for a head.

A pack carries its own head even where the model ties it to the embedding. Most model classes build
a ``ParallelLMHead`` for it; some (Gemma 2) multiply by the embedding instead, and then the head's
tensors are attached to the embedding layer.
"""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.names import Part
from vllm_exl3.serving.layout import Output
from vllm_exl3.serving.linear import Exl3LinearMethod

if TYPE_CHECKING:
    from vllm_exl3.serving.config import Exl3Config

__all__ = ["Exl3EmbeddingMethod", "Exl3HeadMethod", "register_embedding_hook"]


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
        """Register the parameters for this rank's range of the vocabulary."""
        self.register_head(layer, params_dtype)

    def register_head(self, layer: torch.nn.Module, dtype: torch.dtype) -> None:
        """Register the head's parameters on a ``VocabParallelEmbedding``."""
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
        self.register(layer, [Output(layer.org_vocab_size, start, size)], (0, width, width), dtype)
        self._missing = layer.num_embeddings_per_partition - size

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Logits ``[..., vocabulary of this rank]``; padding columns that the pack does not store are zero."""
        if not self._missing:
            return super().apply(layer, x, bias)
        logits = torch.nn.functional.pad(super().apply(layer, x), (0, self._missing))
        return logits if bias is None else logits + bias

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
        self.head = head

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Check the attached head; without an own head, prepare the table for products as vLLM does."""
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


def register_embedding_hook() -> None:
    """Give embeddings the quantization config that most vLLM model classes do not pass on.

    Uses vLLM's out-of-tree replacement of pluggable layers. The instance becomes an ordinary
    ``VocabParallelEmbedding`` again once built, so exact type checks (LoRA's) still hold.
    """
    signature = inspect.signature(VocabParallelEmbedding.__init__)

    class ConfiguredVocabParallelEmbedding(VocabParallelEmbedding):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            from vllm_exl3.serving.config import Exl3Config

            bound = signature.bind(self, *args, **kwargs)
            current = get_current_vllm_config_or_none()
            config = current.quant_config if current is not None else None
            if bound.arguments.get("quant_config") is None and isinstance(config, Exl3Config):
                bound.arguments["quant_config"] = config
            VocabParallelEmbedding.__init__(*bound.args, **bound.kwargs)
            self.__class__ = VocabParallelEmbedding

    PluggableLayer.register_oot(ConfiguredVocabParallelEmbedding, name="VocabParallelEmbedding")
