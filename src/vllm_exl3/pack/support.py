"""What this version does not serve yet, refused by name before anything is loaded."""

from collections.abc import Iterator

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.pack import Pack

__all__ = ["unserved"]


def unserved(pack: Pack) -> Iterator[Exl3PackError]:
    """Parts of a sound pack that this version cannot serve."""
    for key in [key for key in pack.linears if ".slice." in key and ".experts." in key][:1]:
        yield _refusal(pack, f"a routed expert stored in slices ({key})", "sliced experts")


def _refusal(pack: Pack, found: str, what: str) -> Exl3PackError:
    return Exl3PackError(
        found=found,
        expected=f"a pack without {what}, which this version of vllm-exl3 does not serve yet",
        where=pack.source,
        remedy="Serve it with exllamav3, or choose a pack without them.",
    )
