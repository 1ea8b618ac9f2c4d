"""Writes the index of a pack anew, from what its files hold: the repair of an index of another revision."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.files import INDEX, absent_file_fault
from vllm_exl3.pack.pack import Pack

__all__ = ["REPAIRED", "Reindexed", "write_index"]

REPAIRED = f"{INDEX}.new"
"""Name of the file that is written where an index exists already."""


@dataclass(frozen=True)
class Reindexed:
    """A written index, compared with the one that was there.

    Attributes:
        path: the new file.
        tensors: tensors that it lists.
        added: tensors that the old index lacked.
        removed: tensors that the old index listed and no file holds: the pack lacks them, whatever an index says.
        moved: tensors that the old index placed in another file.
    """

    path: Path
    tensors: int
    added: tuple[str, ...]
    removed: tuple[str, ...]
    moved: tuple[str, ...]


def write_index(folder: Path) -> Reindexed:
    """Write an index of every tensor in the files of a folder; an index that is there stays as it is.

    Args:
        folder: a pack.

    Returns:
        Where the new index lies, and how it differs from the old one.

    Raises:
        Exl3PackError: the folder is no pack, a file is missing or damaged, or an earlier repair is still there.
    """
    pack = Pack.open(folder)
    old = _entries(folder / INDEX)
    if fault := absent_file_fault(pack, old.values()):
        raise fault  # an index without the missing file's tensors would hide that they are missing
    target = folder / (REPAIRED if (folder / INDEX).exists() else INDEX)
    new = {name: tensor.file for name, tensor in sorted(pack.tensors.items())}
    content = {"metadata": {"total_size": pack.nbytes}, "weight_map": new}
    _write_new(target, json.dumps(content, indent=2) + "\n")
    return Reindexed(
        path=target,
        tensors=len(new),
        added=tuple(name for name in new if name not in old) if old else (),
        removed=tuple(name for name in old if name not in new),
        moved=tuple(name for name in new if name in old and old[name] != new[name]),
    )


def _entries(path: Path) -> dict[str, str]:
    """The weight map of the old index, as far as it can be read."""
    try:
        content = json.loads(path.read_text(errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    entries = content.get("weight_map") if isinstance(content, dict) else None
    return {name: file for name, file in entries.items() if isinstance(file, str)} if isinstance(entries, dict) else {}


def _write_new(target: Path, text: str) -> None:
    """Write a file that does not exist yet; it appears complete or not at all."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        unfinished.write_text(text)
        os.link(unfinished, target)  # unlike a rename, it never replaces a file
    except FileExistsError:
        raise Exl3PackError(
            found=f"{target.name}, from an earlier repair",
            expected="no such file: nothing is overwritten",
            where=str(target.parent),
            remedy=f"Put it in place ({_command(target)}), or delete it, then start again.",
        ) from None
    finally:
        unfinished.unlink(missing_ok=True)


def _command(target: Path) -> str:
    return f"mv {target.name} {INDEX}"
