"""What this process leaves out on purpose: tensors under the rules that `inspect` shows, n-gram tables, which are read
past vLLM's weights, and other pipeline stages. What none of these rules leaves out has to find its layer."""

from collections.abc import Set

from vllm_exl3.pack import Exl3PackError, Pack
from vllm_exl3.pack.skip import MAIN_LAYER, Skipper, main_layers
from vllm_exl3.pack.spelling import is_head_name
from vllm_exl3.pack.stored import StoredNgramTable

__all__ = ["OtherStages", "SkippedTensors", "check_tables_claimed", "is_draft"]


def is_draft(pack: Pack, claimed: Set[str]) -> bool:
    """Whether the model that asked for these modules is the pack's own MTP draft."""
    skipper = Skipper(pack)
    return any(skipper.is_mtp(key) for key in claimed)


class SkippedTensors:
    """Stands where a `WeightsMapper` takes a regular expression: found in the names of skipped tensors.

    A pattern that lists them would be megabytes long for a pack with a mixture-of-experts draft.

    Args:
        pack: the pack that is being loaded.
        claimed: modules that the model asked for.
    """

    def __init__(self, pack: Pack, claimed: Set[str]) -> None:
        self._skipper = Skipper(pack)
        self._draft = is_draft(pack, claimed)
        self._known = pack.tensors.keys()
        self._ngram = pack.ngram_tables.keys()

    def search(self, name: str) -> bool:
        """Whether this stored tensor is skipped; names that a model class has already changed are not."""
        if name not in self._known:
            return False
        return self._reads_itself(name) or self._skipper.rule_for_tensor(name, draft=self._draft) is not None

    def _reads_itself(self, name: str) -> bool:
        """Whether this is of an n-gram table, which its layer reads from the files."""
        key = name.rpartition(".")[0]
        return key in self._ngram or key.rpartition(".shard_")[0] in self._ngram


class OtherStages:
    """Modules that another pipeline stage builds.

    Decoder layers and the head are known to the layer. Of the rest (towers, projectors) model classes decide for
    themselves which stage has it, so with more than one stage none of it is missed.

    Args:
        pack: the pack that is being loaded.

    Attributes:
        layers: decoder layers of this stage.
    """

    def __init__(self, pack: Pack) -> None:
        from vllm.distributed import get_pp_group
        from vllm.distributed.utils import get_pp_indices

        group = get_pp_group()
        self._alone = group.world_size == 1
        self._last = group.is_last_rank
        layers = main_layers(pack.config)
        self.layers = range(*get_pp_indices(layers, group.rank_in_group, group.world_size))

    def reason(self, key: str) -> str | None:
        """Why this process need not build a module, or None where it must."""
        match = MAIN_LAYER.match(f"{key}.")
        mine = int(match[1]) in self.layers if match else self._last and is_head_name(key)
        return None if self._alone or mine else "another pipeline stage"


def check_tables_claimed(pack: Pack, claimed: Set[str], elsewhere: OtherStages) -> None:
    """Refuse a model without a layer for one of the pack's quantized embeddings.

    Args:
        pack: the pack that is being loaded.
        claimed: modules that the model asked for.
        elsewhere: knows what other pipeline stages build.

    Raises:
        Exl3PackError: naming the table.
    """
    for key, table in (*pack.embeddings.items(), *pack.ngram_tables.items()):
        if key not in claimed and elsewhere.reason(key) is None:
            ngram = isinstance(table, StoredNgramTable)
            raise Exl3PackError(
                found=f"{'an n-gram table' if ngram else 'a quantized embedding'} of {table.rows} rows that no "
                "layer of the model asks for",
                expected="a Qwen4Exp model, whose n-gram embeddings are known"
                if ngram
                else "a VocabParallelEmbedding of that vocabulary and the table's width",
                where=f"{key} in {pack.source}",
                remedy="vLLM's class for this model builds its embedding in another way: use a pack whose "
                "embedding is in 16 bits.",
            )
