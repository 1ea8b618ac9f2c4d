"""Which method serves a model's embeddings and heads, and where the pack's own head goes if the model builds none."""

import re
from typing import TYPE_CHECKING, TypeVar

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from vllm_exl3.pack.spelling import is_embedding_name, is_head_name
from vllm_exl3.pack.stored import StoredLinear, StoredRowTable, StoredScaledTable, pad_to_block
from vllm_exl3.serving.drafts import draft_being_built
from vllm_exl3.serving.embedding import QuantizedEmbeddingMethod, Table
from vllm_exl3.serving.head import Exl3EmbeddingMethod, Exl3HeadMethod
from vllm_exl3.serving.methods import why_dense
from vllm_exl3.serving.skipping import is_draft
from vllm_exl3.serving.tied_head import TiedHeadMethod
from vllm_exl3.serving.unloaded import watched

if TYPE_CHECKING:
    from vllm_exl3.serving.config import Exl3Config

__all__ = ["VocabularyMethods"]

Dense = TypeVar("Dense", bound=UnquantizedEmbeddingMethod)


class VocabularyMethods:
    """The embeddings and heads of one model, while it is being built.

    Args:
        config: the model's quantization config, which knows its pack and what has been claimed of it.

    Attributes:
        embeddings: the embeddings that were built, each with its method.
        head_rename: where tensors of the pack's head go once an embedding carries it.
    """

    def __init__(self, config: "Exl3Config") -> None:
        self._config = config
        self.embeddings: list[tuple[VocabParallelEmbedding, Exl3EmbeddingMethod | QuantizedEmbeddingMethod]] = []
        self.head_rename: dict[re.Pattern[str], str] = {}

    def embedding(self, layer: VocabParallelEmbedding, prefix: str) -> QuantizeMethodBase:
        """The method of an embedding: the pack's table for it, or a dense one that the pack's head may join."""
        stored = self._config.names().resolve_embedding(prefix)
        method: Exl3EmbeddingMethod | QuantizedEmbeddingMethod
        method = Exl3EmbeddingMethod(self._config, has_own_head=self._own_head_key() is not None)
        _watch(method, prefix or "embed_tokens")
        if isinstance(stored, (StoredRowTable, StoredScaledTable)):
            table = Table.of(stored)
            # Without a name to go by, a layer of another size is another table, which is dense.
            if prefix or table.fits(layer.org_vocab_size, layer.embedding_dim):
                method = QuantizedEmbeddingMethod(prefix, table, self._config)
                self._config.claimed.add(stored.key)
        self.embeddings.append((layer, method))
        return method

    def head(self, prefix: str) -> QuantizeMethodBase:
        """The method of a head: the pack's EXL3 one, a dense one, or the embedding's table again."""
        config = self._config
        resolution = config.resolve(prefix or "lm_head")
        if resolution is None and config.pack.embeddings:
            return TiedHeadMethod()
        if resolution is None or resolution.parts[0].linear is None:
            if resolution is not None:
                why = why_dense(UnquantizedLinearMethod(), resolution.parts)
                nbytes = sum(part.dense.nbytes for part in resolution.parts if part.dense is not None)
                config.report.add_dense(prefix or "lm_head", f"{why}, {nbytes / 2**20:.1f} MiB in the pack")
            return _watch(UnquantizedEmbeddingMethod(), prefix or "lm_head")
        return Exl3HeadMethod(config, prefix or "lm_head", resolution.parts)

    def attach_head(self) -> None:
        """Where the model class builds no head, let the embedding it multiplies by carry the pack's own."""
        from vllm.distributed import get_pp_group

        config, key = self._config, self._own_head_key()
        if key is None or key in config.claimed:
            return
        if is_draft(config.pack, config.claimed):
            return  # the draft is given the main model's head
        if not get_pp_group().is_last_rank:
            return  # the head is another pipeline stage's
        tables = (*config.pack.embeddings, *config.pack.dense)
        table = next((name for name in tables if is_embedding_name(name)), None)
        carrier = self._head_carrier(config.pack.linears[key])
        if table is None or carrier is None:
            return  # before the head is resolved, which would claim it: a head without a layer is refused
        resolution = config.resolve(config.map_name(f"{key}.trellis").removesuffix(".trellis"))
        if resolution is None:
            return
        layer, method = carrier
        method.attach_head(layer, key, resolution.parts)
        holder = f"{table}.head." if table in config.pack.embeddings else f"{table}."
        self.head_rename = {re.compile(rf"^{re.escape(key)}\.(?=[^.]+$)"): holder}

    def _head_carrier(
        self, head: StoredLinear
    ) -> tuple[VocabParallelEmbedding, Exl3EmbeddingMethod | QuantizedEmbeddingMethod] | None:
        """The one embedding that a model without a head can multiply by, or None where that is not clear."""
        fitting = [
            (layer, method)
            for layer, method in self.embeddings
            if pad_to_block(layer.embedding_dim) == head.in_features
            and pad_to_block(layer.org_vocab_size) == head.out_features
        ]
        if len(fitting) > 1:  # embeddings of each layer's own (Gemma 3n) have other names; vLLM 0.30's have none
            fitting = [pair for pair in fitting if is_embedding_name(getattr(pair[0], "prefix", "") or "embed_tokens")]
        return fitting[0] if len(fitting) == 1 else None

    def _own_head_key(self) -> str | None:
        return next((key for key in self._config.pack.linears if is_head_name(key)), None)


def _watch(method: Dense, where: str) -> Dense:
    """Watch an embedding or a head, but not a draft's: vLLM gives it the target's once it is loaded."""
    return method if draft_being_built(get_current_vllm_config_or_none()) else watched(method, where)
