"""The head of a model that ties it to a quantized token embedding."""

from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from vllm_exl3.pack.errors import Exl3PackError

__all__ = ["TiedHeadMethod"]


class TiedHeadMethod(QuantizeMethodBase):
    """The head of a model that ties it to a quantized table: it stores nothing, the table computes the logits."""

    def __init__(self) -> None:
        super().__init__()
        self._embedding: torch.nn.Module | None = None

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """A tied head has no weights."""

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """Remember the embedding whose table this head multiplies by."""
        self._embedding = embed_tokens
        if hasattr(embed_tokens, "weight"):  # for readers; nothing of it is stored twice
            object.__setattr__(layer, "weight", embed_tokens.weight)
        return layer

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Refuse a head that its model class has not tied.

        Raises:
            Exl3PackError: there is nothing to compute logits from.
        """
        if self._embedding is None:
            raise Exl3PackError(
                found="a head that the model class does not tie to the embedding",
                expected="a stored lm_head, since tie_word_embeddings does not reach this class",
                where=getattr(layer, "prefix", "") or "lm_head",  # vLLM 0.30's layer does not know its name
                remedy="Keep this model's embedding in 16 bits.",
            )

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Logits ``[..., vocabulary of this rank]`` from the embedding's table."""
        assert self._embedding is not None
        logits: torch.Tensor = self._embedding.quant_method.apply(self._embedding, x, bias)
        return logits
