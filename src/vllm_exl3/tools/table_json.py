"""The JSON files of a model that speak of its token embedding, read before anything is written, and rewritten."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.files import INDEX, no_config_fault
from vllm_exl3.pack.metadata import SIDECAR, parse_object
from vllm_exl3.pack.source import LocalFolder
from vllm_exl3.pack.stored import StoredTensor
from vllm_exl3.tools.pack_writer import write_json
from vllm_exl3.tools.safetensors_layout import ledger_record, nbytes

__all__ = ["TableDescriptions"]

_CONFIG = "config.json"
_TABLES, _MAP, _LEDGER = "quantized_embeddings", "weight_map", "tensor_storage"


class TableDescriptions:
    """What a model's ``config.json``, index and ledger say of its tensors.

    Args:
        source: the model's folder.

    Raises:
        Exl3PackError: there is no ``config.json``, one of the files is no JSON, or what it should map tensors or
            modules with is no object.
    """

    files = (_CONFIG, INDEX, SIDECAR)

    def __init__(self, source: LocalFolder) -> None:
        self._source = source
        config = self._read(_CONFIG, _TABLES)
        if config is None:
            raise no_config_fault(source.label)
        self._config = config
        self._index = self._read(INDEX, _MAP)
        self._ledger = self._read(SIDECAR, _LEDGER)

    def _read(self, name: str, member: str) -> dict[str, Any] | None:
        if name not in self._source.names():
            return None
        where = f"{name} in {self._source.label}"
        content = parse_object(self._source.whole(name), where)
        if not isinstance(content.get(member, {}), dict):
            raise Exl3PackError(
                found=f"a {member} that is a JSON {type(content[member]).__name__}",
                expected="an object",
                where=where,
                remedy="The file is damaged: fetch it again.",
            )
        return content

    def write(
        self, folder: Path, table: StoredTensor, new: Mapping[str, tuple[str, Sequence[int]]], entry: Mapping[str, int]
    ) -> None:
        """Write the files anew.

        Args:
            folder: where to.
            table: the tensor that was replaced.
            new: name → dtype code and shape of those that replace it.
            entry: what ``config.json`` says of the new table.
        """
        key = table.name.removesuffix(".weight")
        write_json(folder / _CONFIG, {**self._config, _TABLES: {**self._config.get(_TABLES, {}), key: dict(entry)}})
        if self._index is not None:
            kept = {name: file for name, file in self._index.get(_MAP, {}).items() if name != table.name}
            added = sum(nbytes(*spec) for spec in new.values()) - table.nbytes
            total = _grown(self._index.get("metadata"), added)
            write_json(folder / INDEX, {**self._index, **total, _MAP: kept | dict.fromkeys(new, table.file)})
        if self._ledger is not None:
            storage = dict(self._ledger.get(_LEDGER, {}))
            if key in storage:
                storage[key] = {"stored_tensors": {name: ledger_record(*spec) for name, spec in new.items()}}
            write_json(folder / SIDECAR, {**self._ledger, _LEDGER: storage} if storage else self._ledger)


def _grown(metadata: object, nbytes_added: int) -> dict[str, Any]:
    """The index's ``metadata`` with its total made true, if it states one."""
    if not isinstance(metadata, dict) or type(metadata.get("total_size")) is not int:
        return {}
    return {"metadata": {**metadata, "total_size": metadata["total_size"] + nbytes_added}}
