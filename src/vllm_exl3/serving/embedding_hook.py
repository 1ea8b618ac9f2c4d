"""How embeddings and heads get their quantization method from model classes that do not pass one on.

Uses vLLM's out-of-tree replacement of pluggable layers. EXL3 packs: the class gets the quantization
config that most model classes withhold. Other formats (GPTQ, AWQ, none): a table that ``config.json``
declares under ``quantized_embeddings`` gets its method here, whatever the linears' config is, and the
linears keep theirs.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.scaled_rows import SCALE_DTYPE, row_layout
from vllm_exl3.serving.drafts import draft_being_built, draft_quantization
from vllm_exl3.serving.embedding import QuantizedEmbeddingMethod, Table
from vllm_exl3.serving.tied_head import TiedHeadMethod

__all__ = ["declared_tables", "register_embedding_hook"]

_SCALE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


def register_embedding_hook() -> None:
    """Replace both classes at construction.

    Each instance becomes one of vLLM's own class again once built, so exact type checks (LoRA's) still hold.
    """
    for stock in (VocabParallelEmbedding, ParallelLMHead):
        PluggableLayer.register_oot(_configured(stock), name=stock.__name__)


def declared_tables(config: Mapping[str, Any], where: str) -> list[tuple[Table, int]]:
    """The int8 and int4 tables that a ``config.json`` declares, each with its hidden size.

    Args:
        config: its ``quantized_embeddings``: module name to ``{"bits", "rows", "width"}``.
        where: the model, for errors.

    Raises:
        Exl3PackError: an entry is not one of ours.
    """
    return [(_declared(key, entry, where), int(entry["width"])) for key, entry in config.items()]


def _declared(key: str, entry: Any, where: str) -> Table:
    sizes = [entry.get(name) for name in ("bits", "rows", "width")] if isinstance(entry, Mapping) else [None]
    if not all(type(size) is int and size > 0 for size in sizes) or sizes[0] not in SCALE_DTYPE:
        raise Exl3PackError(
            found=f"{entry!r}",
            expected='{"bits": 4 or 8, "rows": …, "width": …}',
            where=f"quantized_embeddings[{key!r}] in config.json of {where}",
            remedy="Make the model anew with vllm-exl3 embed-quant, which writes the entry.",
        )
    bits, rows, width = sizes
    columns, groups = row_layout(width, bits)
    return Table.of_integers(key, rows, bits, columns, groups, _SCALE_DTYPES[SCALE_DTYPE[bits]])


def _configured(stock: type[VocabParallelEmbedding]) -> type[VocabParallelEmbedding]:
    """A class that builds instances of ``stock`` with the quantization config that applies to them."""
    signature = inspect.signature(stock.__init__)

    class Configured(stock):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            passed = bound.arguments["quant_config"]
            bound.arguments["quant_config"] = _config_for(self, bound.arguments, get_current_vllm_config_or_none())
            stock.__init__(*bound.args, **bound.kwargs)
            if hasattr(self, "quant_config") and isinstance(self.quant_config, _OneMethod):
                self.quant_config = passed
            self.__class__ = stock

    # What is built in __init__ may note its layer's class by name.
    Configured.__name__ = stock.__name__
    return Configured


def _config_for(
    layer: VocabParallelEmbedding, arguments: Mapping[str, Any], current: VllmConfig | None
) -> QuantizationConfig | None:
    """The config to build this layer with: the one passed, an EXL3 pack's, or a declared table's.

    A draft's layers get the draft's own config, never that of the model which it drafts for.
    """
    from vllm_exl3.serving.config import Exl3Config

    passed: QuantizationConfig | None = arguments["quant_config"]
    if current is None or current.model_config is None or isinstance(passed, Exl3Config):
        return passed
    draft = draft_being_built(current)
    model = draft or current.model_config
    own = current.quant_config if draft is None else draft_quantization(current, draft)
    if isinstance(own, Exl3Config):
        return own if passed is None else passed
    entries = getattr(model.hf_config, "quantized_embeddings", None) or {}
    rows = arguments["org_num_embeddings"] or arguments["num_embeddings"]
    for table, width in declared_tables(entries, model.model):
        if (rows, arguments["embedding_dim"]) != (table.rows, width):
            continue
        if not isinstance(layer, ParallelLMHead):
            prefix = arguments["prefix"]
            if not prefix or prefix.rpartition(".")[2] == table.key.rpartition(".")[2]:
                return _OneMethod(QuantizedEmbeddingMethod(prefix, table))
        elif getattr(model.hf_text_config, "tie_word_embeddings", False):
            return _OneMethod(TiedHeadMethod())
    return passed


class _OneMethod(QuantizationConfig):
    """A quantization config that hands one method to the one layer that is built with it."""

    def __init__(self, method: QuantizeMethodBase) -> None:
        super().__init__()
        self._method = method

    def get_name(self) -> str:  # type: ignore[override]
        """Named for messages only; it is registered nowhere."""
        return "vllm_exl3_embedding"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Every dtype that the op writes."""
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """No kernel of its own."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Never read from files."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "_OneMethod":
        """Never read from files."""
        raise NotImplementedError

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase:
        """The method."""
        return self._method
