"""`Pack`: one EXL3 checkpoint as its headers describe it.

Opening reads safetensors headers and config.json, never weights. What has been opened once in a
process is kept by the files' names, sizes, times and inodes, so that a draft model's or a second engine's
configuration gets the same object for the price of a directory listing.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack import metadata
from vllm_exl3.pack.assemble import assemble
from vllm_exl3.pack.bfloat16 import from_bfloat16
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.experts import group_experts
from vllm_exl3.pack.files import INDEX, missing_file_fault, no_trellis_fault, sharded_state_fault, weight_files
from vllm_exl3.pack.headers import FileHeader, paused_gc, read_header
from vllm_exl3.pack.source import LocalFolder, Source
from vllm_exl3.pack.stored import (
    ExpertGroup,
    StoredLinear,
    StoredNgramTable,
    StoredRowTable,
    StoredScaledTable,
    StoredTensor,
)

__all__ = ["Pack"]

_THREADS = 8
_KEPT = 4
_opened: "OrderedDict[tuple[object, ...], Pack]" = OrderedDict()
_opened_lock = threading.Lock()

_NUMPY = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "BF16": "<u2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "I64": "<i8",
    "U64": "<u8",
    "F64": "<f8",
}


class Pack:
    """An EXL3 checkpoint, local or on the Hub; made by `Pack.open`.

    Attributes:
        source: the folder or repository id that it was opened from.
        commit: the Hub commit that its files belong to, or None for a plain folder.
        folder: the local folder that holds every file, or None.
        config: config.json.
        files: the headers by file name.
        tensors: every stored tensor by name.
        linears: EXL3 linears by module key.
        embeddings: token embeddings that are row-coded, or integers with scales, by module key.
        ngram_tables: row-coded n-gram tables by module key.
        dense: the ``.weight`` of every module that has no trellis, by module key.
        nbytes: bytes of all tensors.
    """

    def __init__(self, source: str, files: Source, *, reopen: tuple[object, ...]) -> None:
        self.source = source
        self.commit = files.commit
        self.folder = files.folder
        self.remarks = files.remarks
        self._files = files
        self._reopen = reopen
        self.names = files.names()
        names, self.ignored_files = weight_files(self.names)
        self.config: Mapping[str, Any] = self._json("config.json") or {}
        if not names:
            raise no_trellis_fault(files, {}, self.config)
        if (fault := sharded_state_fault(names, files.label)) is not None:
            raise fault
        self.files: Mapping[str, FileHeader] = dict(zip(names, self._headers(names), strict=True))
        with paused_gc():
            self.tensors: Mapping[str, StoredTensor] = self._collect()
            self._assemble()
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    @classmethod
    def open(
        cls,
        source: str | Path,
        revision: str | None = None,
        *,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
    ) -> "Pack":
        """Open a local folder or a Hub repository; headers only.

        Args:
            source: a folder, or a repository id such as ``owner/name``.
            revision: branch, tag or commit of a repository; ignored for a folder.
            token: Hub token; None uses the stored one, False none.
            cache_dir: the Hub cache to look into, by default huggingface_hub's own.

        Raises:
            Exl3PackError: there is no pack, its files are damaged, or tensors that form one linear
                contradict each other.
        """
        files = _source(source, revision, token, cache_dir)
        state = files.state()
        with _opened_lock:
            pack = _opened.get(state)
        if pack is None:
            pack = cls(str(source), files, reopen=(str(source), files.commit or revision, cache_dir))
        with _opened_lock:
            pack = _opened.setdefault(state, pack)  # another thread's, if it was faster
            _opened.move_to_end(state)
            while len(_opened) > _KEPT:
                _opened.popitem(last=False)
        return pack

    def read(self, name: str) -> npt.NDArray[Any]:
        """Read one tensor; BF16 comes as float32. Meant for markers and other small ones.

        Raises:
            Exl3PackError: the pack has no such tensor, or numpy has no such dtype.
        """
        tensor = self.tensors.get(name)
        if tensor is None or tensor.dtype not in _NUMPY:
            raise Exl3PackError(
                found="no such tensor" if tensor is None else f"dtype {tensor.dtype}",
                expected="a stored tensor of a dtype that numpy knows",
                where=f"{name} in {self.source}",
                remedy="`vllm-exl3 inspect` lists what the pack holds.",
            )
        data = self._files.read(tensor.file, tensor.start, tensor.nbytes)
        values = np.frombuffer(data, _NUMPY[tensor.dtype]).reshape(tensor.shape)
        return from_bfloat16(values) if tensor.dtype == "BF16" else values

    def read_many(self, tensors: Sequence[StoredTensor]) -> list[bytes]:
        """The raw bytes of many small tensors, such as all markers."""
        return self._files.read_many([(tensor.file, tensor.start, tensor.nbytes) for tensor in tensors])

    @cached_property
    def quantization(self) -> Mapping[str, Any]:
        """What config.json and quantization_config.json declare, merged, without the tensor ledger."""
        text = self._text(metadata.SIDECAR)
        sidecar = metadata.sidecar_head(text, self._place(metadata.SIDECAR)) if text is not None else {}
        return metadata.merge_blocks(self.config, sidecar)

    @cached_property
    def index(self) -> Mapping[str, str] | None:
        """Tensor name to file name as the index claims, or None without an index."""
        index = self._json(INDEX)
        if index is None:
            return None
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise Exl3PackError(
                found="a weight_map with other values than names" if isinstance(weight_map, dict) else "no weight_map",
                expected="an object that maps tensors to files",
                where=self._place(INDEX),
                remedy="Fetch the index again, or delete it: the headers say where each tensor lies.",
            )
        return weight_map

    @cached_property
    def experts(self) -> Mapping[str, ExpertGroup]:
        """Routed experts by MLP key, whichever naming scheme the pack uses."""
        return group_experts(self.linears)

    def ledger(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Records of ``tensor_storage``: module key and entry, streamed."""
        text = self._text(metadata.SIDECAR)
        if text is not None:
            yield from metadata.ledger_entries(text, self._place(metadata.SIDECAR))

    def _headers(self, names: Sequence[str]) -> list[FileHeader]:
        """The header of each file."""
        if self.folder is not None:  # parsing holds the interpreter lock: threads help only where a network answers
            return [self._header(name) for name in names]
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(self._header, names))

    def _header(self, name: str) -> FileHeader:
        return read_header(name, self._files.size(name), lambda start, length: self._files.read(name, start, length))

    def _collect(self) -> dict[str, StoredTensor]:
        tensors: dict[str, StoredTensor] = {}
        for file, header in self.files.items():
            if tensors and (twice := tensors.keys() & header.tensors.keys()):
                name = min(twice)
                raise Exl3PackError(
                    found=f"the same tensor in {tensors[name].file} and {file} ({len(twice)} such tensors)",
                    expected="each tensor in one file",
                    where=f"{name} in {self.source}",
                    remedy="One of the files is left over from another revision: delete it, or fetch the pack again.",
                )
            tensors.update(header.tensors)
        return tensors

    def _assemble(self) -> None:
        try:
            found = assemble(self.tensors)
        except Exl3PackError:
            # A linear whose parts lie in two files looks broken when one is absent: name the cause.
            if fault := missing_file_fault(self):
                raise fault from None
            raise
        # An integer table alone makes no EXL3 pack: other formats carry one as well.
        coded = any(isinstance(table, StoredRowTable) for table in found.embeddings.values())
        if not (found.linears or coded or found.ngram_tables):
            raise missing_file_fault(self) or no_trellis_fault(self._files, self.tensors, self.config)
        self.linears: Mapping[str, StoredLinear] = found.linears
        self.embeddings: Mapping[str, StoredRowTable | StoredScaledTable] = found.embeddings
        self.ngram_tables: Mapping[str, StoredNgramTable] = found.ngram_tables
        self.dense: Mapping[str, StoredTensor] = found.dense

    def _text(self, name: str) -> str | None:
        if name not in self.names:
            return None
        return self._files.whole(name).decode(errors="replace")

    def _json(self, name: str) -> dict[str, Any] | None:
        text = self._text(name)
        return None if text is None else metadata.parse_object(text.encode(), self._place(name))

    def _place(self, name: str) -> str:
        return f"{name} in {self.source}"

    def __reduce__(self) -> tuple[object, ...]:
        # Headers of a large pack take longer to pickle than to read again; a token must not travel at all.
        return (_open_again, self._reopen)

    def __repr__(self) -> str:
        return f"Pack({self.source!r}, {self.commit}, {len(self.tensors)} tensors, {len(self.linears)} linears)"


def _open_again(source: str, revision: str | None, cache_dir: str | Path | None) -> Pack:
    return Pack.open(source, revision, cache_dir=cache_dir)


def _source(source: str | Path, revision: str | None, token: str | bool | None, cache_dir: str | Path | None) -> Source:
    try:
        path = Path(source).expanduser()
        is_folder = path.is_dir()
    except (OSError, RuntimeError):  # a name too long for a file system; ~ of a user that is not there
        path, is_folder = Path(source), False
    if is_folder or isinstance(source, Path):
        return LocalFolder(path)
    from vllm_exl3.pack.hub import is_repository_id, open_repository  # huggingface_hub takes a while to import

    if not is_repository_id(source):
        return LocalFolder(path)  # which says that there is no such folder
    return open_repository(source, revision, token, cache_dir)
