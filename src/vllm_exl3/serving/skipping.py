"""Tensors that are left out of the weight stream on purpose, under the rules that `inspect` shows."""

from collections.abc import Set

from vllm_exl3.pack import Pack
from vllm_exl3.pack.skip import Skipper

__all__ = ["SkippedTensors", "is_draft"]


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

    def search(self, name: str) -> bool:
        """Whether this stored tensor is skipped; names that a model class has already changed are not."""
        return name in self._known and self._skipper.rule_for_tensor(name, draft=self._draft) is not None
