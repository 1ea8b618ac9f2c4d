"""Replaces a model's 16-bit token embedding by an int8 or int4 table, in a new folder.

Streams: a block of rows at a time is read, quantized, written, and afterwards read back and compared with
its source. The folder appears under its name only once it is complete and verified.
"""

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.headers import ITEM_BITS, FileHeader, read_header
from vllm_exl3.pack.pack import INDEX
from vllm_exl3.pack.scaled_rows import (
    SCALE_DTYPE,
    dequantize_rows,
    from_bfloat16,
    quantize_rows,
    row_layout,
    to_bfloat16,
)
from vllm_exl3.pack.spelling import is_embedding_name
from vllm_exl3.pack.stored import StoredTensor

__all__ = ["Result", "quantize_embedding"]

Array = npt.NDArray[Any]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done and the bytes in all."""

_BLOCK_BYTES = 8 << 20
"""Source bytes of the rows that are in memory at a time; their float32 temporaries are about ten times that."""

_SOURCE_DTYPES = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class Result:
    """What was written.

    Attributes:
        module: the embedding's name.
        shape: rows and width of the table.
        source_bytes: bytes of the table that was replaced.
        table_bytes: bytes of the new one, scales included.
        relative_error: Frobenius norm of the difference over that of the source, read back from the new file.
    """

    module: str
    shape: tuple[int, int]
    source_bytes: int
    table_bytes: int
    relative_error: float


def quantize_embedding(
    source: Path,
    target: Path,
    bits: int,
    *,
    module: str | None = None,
    copy: bool = False,
    progress: Progress = lambda phase, done, total: None,
) -> Result:
    """Write ``target``: ``source`` with its token embedding as int8 or int4 rows.

    Args:
        source: a Hugging Face model folder, of any format.
        target: a folder that does not exist yet.
        bits: 8 or 4.
        module: the embedding's module name, where it is not recognised.
        copy: copy the other files even where they could be hard-linked.
        progress: called while rows are written and verified.

    Raises:
        Exl3PackError: ``target`` exists or lies inside ``source``, which may also have no 16-bit table.
        ValueError: the table holds NaN or infinity.
    """
    if target.exists() or target.is_symlink():
        raise _fault("an existing folder or file", "a name that is free", str(target), "Choose another, or remove it.")
    if target.resolve().is_relative_to(source.resolve()):
        raise _fault("a folder inside the source", "one beside it", str(target), "Choose a folder elsewhere.")
    headers = _headers(source)
    table = _find_table(headers, source, module)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.embed-quant-", dir=target.parent))
    try:
        plan = _Plan(source, temporary, headers[table.file], table, bits)
        plan.write(progress)
        relative_error = plan.verify(progress)
        rewritten = {table.file, "config.json", INDEX, "quantization_config.json"}
        _bring_the_rest(source, temporary, rewritten, copy)
        _write_json_files(source, temporary, plan)
        temporary.chmod(0o755)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Result(table.name.rpartition(".")[0], plan.shape, table.nbytes, plan.table_bytes, relative_error)


def _headers(source: Path) -> dict[str, FileHeader]:
    headers = {}
    for path in sorted(filter(Path.is_file, source.glob("*.safetensors"))):
        with path.open("rb") as file:
            headers[path.name] = read_header(path.name, path.stat().st_size, partial(_read_range, file))
    if not headers:
        raise _fault("no *.safetensors", "a Hugging Face model folder", str(source), "Give the model's folder.")
    return headers


def _read_range(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)


def _find_table(headers: Mapping[str, FileHeader], source: Path, module: str | None) -> StoredTensor:
    """The one dense token embedding, by name."""
    tensors = {name: tensor for header in headers.values() for name, tensor in header.tensors.items()}
    if module is not None:
        names = [name for name in (f"{module}.weight",) if name in tensors]
    else:
        names = [
            name
            for name, tensor in tensors.items()
            if name.endswith(".weight") and is_embedding_name(name.removesuffix(".weight")) and len(tensor.shape) == 2
        ]
    if not names and (quantized := _quantized_table(tensors, module)) is not None:
        raise _fault(
            f"{quantized}, which is quantized already",
            "a 16-bit table",
            str(source),
            "Start from the model that this folder was made from: quantizing a second time would only add error.",
        )
    if len(names) != 1:
        stored = [name for name in tensors if "embed" in name]
        raise _fault(
            f"{len(names)} token embeddings ({', '.join(names or stored[:4]) or 'nothing similar'})",
            "one 16-bit .weight to replace",
            str(source),
            "Name the module with --module, such as model.embed_tokens.",
        )
    table = tensors[names[0]]
    if table.dtype not in _SOURCE_DTYPES or len(table.shape) != 2 or not min(table.shape):
        raise _fault(
            f"{table.dtype} {list(table.shape)}",
            f"{', '.join(_SOURCE_DTYPES)} of rank 2",
            f"{table.name} in {table.file}",
            "Start from the 16-bit model.",
        )
    return table


def _quantized_table(tensors: Mapping[str, StoredTensor], module: str | None) -> str | None:
    """The name and kind of a token embedding that is stored as codes, or None."""
    for name, tensor in tensors.items():
        key, _, leaf = name.rpartition(".")
        if leaf in ("qrows", "signs") and (is_embedding_name(key) if module is None else key == module):
            kind = {"I8": "int8", "U8": "int4"}.get(tensor.dtype) if leaf == "qrows" else "EXL3-coded"
            return f"{key} as {kind} rows" if kind else key
    return None


class _Plan:
    """The file that holds the table, and its replacement.

    Args:
        source: the model's folder.
        folder: where the replacement is written.
        header: of the file that holds the table.
        table: the table.
        bits: 8 or 4.
    """

    def __init__(self, source: Path, folder: Path, header: FileHeader, table: StoredTensor, bits: int) -> None:
        self.table, self.bits, self.header = table, bits, header
        self.key = table.name.removesuffix(".weight")
        rows, width = table.shape
        self.shape = (rows, width)
        columns, groups = row_layout(width, bits)
        self.new = {
            f"{self.key}.scales": (SCALE_DTYPE[bits], (rows, groups)),
            f"{self.key}.qrows": ("I8" if bits == 8 else "U8", (rows, columns)),
        }
        self.table_bytes = sum(_nbytes(dtype, shape) for dtype, shape in self.new.values())
        self._from, self._to = source / table.file, folder / table.file

    def write(self, progress: Progress) -> None:
        """Write the replacement: every other tensor as it was, the table quantized."""
        others = [tensor for tensor in self.header.tensors.values() if tensor is not self.table]
        sizes = {tensor.name: (tensor.dtype, tensor.shape) for tensor in others} | self.new
        # The widest elements first, so that each tensor begins at a multiple of its element size.
        order = sorted(sizes, key=lambda name: -ITEM_BITS[sizes[name][0]])
        header: dict[str, Any] = {"__metadata__": dict(self.header.metadata)} if self.header.metadata else {}
        end = 0
        for name in order:
            start, end = end, end + _nbytes(*sizes[name])
            dtype, shape = sizes[name]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with self._from.open("rb") as source, self._to.open("xb") as target:
            target.write(struct.pack("<Q", len(text)) + text)
            first = target.tell()
            for tensor in others:
                target.seek(first + header[tensor.name]["data_offsets"][0])
                _copy_range(source, target, tensor)
            starts = [first + header[f"{self.key}.{leaf}"]["data_offsets"][0] for leaf in ("qrows", "scales")]
            for start, values in self._source_blocks(source, "quantizing", progress):
                for position, data in zip(starts, self._encode(values, start), strict=True):
                    target.seek(position + start * data[0].nbytes)
                    target.write(data.data)
            target.truncate(first + end)
            target.flush()
            os.fsync(target.fileno())

    def verify(self, progress: Progress) -> float:
        """Read the replacement back and compare it with the source.

        Returns:
            The relative error.

        Raises:
            Exl3PackError: a tensor has not arrived as it was meant to be.
        """
        with self._from.open("rb") as source, self._to.open("rb") as target:
            size = self._to.stat().st_size
            written = read_header(self.table.file, size, partial(_read_range, target)).tensors
            for tensor in self.header.tensors.values():
                if tensor is not self.table:
                    _compare_range(source, target, tensor, written[tensor.name])
            difference = norm = 0.0
            for start, values in self._source_blocks(source, "verifying", progress):
                codes, scales = (
                    self._stored_rows(target, written[f"{self.key}.{leaf}"], start, len(values))
                    for leaf in ("qrows", "scales")
                )
                wanted_codes, wanted_scales = quantize_rows(values, self.bits)
                wrong = (codes != wanted_codes).any(1) | (scales != wanted_scales).any(1)
                if wrong.any():
                    raise _fault(
                        f"other bytes than were written, in row {start + int(wrong.argmax())}",
                        "the quantized row",
                        f"{self.key}.qrows in {self._to.name}, read back",
                        "Check the disk, then run the command again.",
                    )
                error = dequantize_rows(codes, scales, values.shape[1]) - values
                difference += float(np.square(error, dtype=np.float64).sum())
                norm += float(np.square(values, dtype=np.float64).sum())
        return (difference / norm) ** 0.5 if norm else 0.0

    def entry(self) -> dict[str, int]:
        """What ``quantized_embeddings`` of config.json says of the table."""
        return {"bits": self.bits, "rows": self.shape[0], "width": self.shape[1]}

    def _source_blocks(
        self, source: BinaryIO, phase: str, progress: Progress
    ) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        rows = self.shape[0]
        row_bytes = self.table.nbytes // rows
        step = max(1, _BLOCK_BYTES // row_bytes)
        for start in range(0, rows, step):
            yield start, self._stored_rows(source, self.table, start, min(step, rows - start))
            progress(phase, min(start + step, rows) * row_bytes, self.table.nbytes)

    def _stored_rows(self, file: BinaryIO, tensor: StoredTensor, start: int, count: int) -> Array:
        """Some rows of a stored tensor; floats come as float32."""
        row_bytes = tensor.nbytes // tensor.shape[0]
        data = _read_range(file, tensor.start + start * row_bytes, count * row_bytes)
        dtype = {"I8": "i1", "U8": "u1", "F16": "<f2", "BF16": "<u2", "F32": "<f4"}[tensor.dtype]
        values = np.frombuffer(data, dtype).reshape(count, -1)
        if tensor.dtype == "BF16":
            return from_bfloat16(values)
        return values.astype(np.float32) if tensor.dtype.startswith("F") else values

    def _encode(self, values: npt.NDArray[np.float32], start: int) -> tuple[Array, Array]:
        try:
            codes, scales = quantize_rows(values, self.bits)
        except ValueError as error:
            raise ValueError(f"{self.table.name} in {self.table.file}, rows from {start}: {error}") from None
        return np.ascontiguousarray(codes), to_bfloat16(scales) if SCALE_DTYPE[self.bits] == "BF16" else scales


def _bring_the_rest(source: Path, folder: Path, rewritten: set[str], copy: bool) -> None:
    """Hard-link every other file, or copy it where the file system cannot."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if path.is_dir():
            (folder / name).mkdir(exist_ok=True)
        elif path.is_file() and str(name) not in rewritten:
            _link_or_copy(path.resolve(), folder / name, copy)


def _link_or_copy(path: Path, target: Path, copy: bool) -> None:
    if not copy:
        with suppress(OSError):
            os.link(path, target)
            return
    shutil.copy2(path, target)


def _write_json_files(source: Path, folder: Path, plan: _Plan) -> None:
    config = _json(source / "config.json") or {}
    config.setdefault("quantized_embeddings", {})[plan.key] = plan.entry()
    _write_json(folder / "config.json", config)
    if (index := _json(source / INDEX)) is not None:
        weight_map = {name: file for name, file in index["weight_map"].items() if name != plan.table.name}
        index["weight_map"] = weight_map | dict.fromkeys(plan.new, plan.table.file)
        if "total_size" in index.get("metadata", {}):
            index["metadata"]["total_size"] += plan.table_bytes - plan.table.nbytes
        _write_json(folder / INDEX, index)
    if (ledger := _json(source / "quantization_config.json")) is not None:
        if plan.key in ledger.get("tensor_storage", {}):
            ledger["tensor_storage"][plan.key] = {"stored_tensors": _ledger_entry(plan.new)}
        _write_json(folder / "quantization_config.json", ledger)


def _ledger_entry(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, Any]:
    names = {"F32": "torch.float32", "BF16": "torch.bfloat16", "I8": "torch.int8", "U8": "torch.uint8"}
    return {
        name: {"shape": list(shape), "n_bytes": _nbytes(dtype, shape), "dtype": names[dtype]}
        for name, (dtype, shape) in tensors.items()
    }


def _json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy_range(source: BinaryIO, target: BinaryIO, tensor: StoredTensor) -> None:
    for start in range(0, tensor.nbytes, _BLOCK_BYTES):
        target.write(_read_range(source, tensor.start + start, min(_BLOCK_BYTES, tensor.nbytes - start)))


def _compare_range(source: BinaryIO, target: BinaryIO, before: StoredTensor, after: StoredTensor) -> None:
    for start in range(0, before.nbytes, _BLOCK_BYTES):
        length = min(_BLOCK_BYTES, before.nbytes - start)
        if _read_range(source, before.start + start, length) != _read_range(target, after.start + start, length):
            raise _fault(
                "other bytes than in the source",
                "a plain copy",
                f"{after.name} in {after.file}, read back",
                "Check the disk, then run the command again.",
            )


def _nbytes(dtype: str, shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * ITEM_BITS[dtype] // 8


def _fault(found: str, expected: str, where: str, remedy: str) -> Exl3PackError:
    return Exl3PackError(found=found, expected=expected, where=where, remedy=remedy)
