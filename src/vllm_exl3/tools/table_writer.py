"""Replaces a model's 16-bit token embedding by an int8 or int4 table, in a new folder.

Streams: a block of rows at a time is read, quantized, written, and afterwards read back and compared with
its source. The folder appears under its name only once it is complete and verified.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack.bfloat16 import from_bfloat16, to_bfloat16
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.headers import ITEM_BITS, FileHeader
from vllm_exl3.pack.scaled_rows import SCALE_DTYPE, dequantize_rows, quantize_rows, row_layout
from vllm_exl3.pack.source import LocalFolder
from vllm_exl3.pack.stored import StoredTensor
from vllm_exl3.tools.safetensors_layout import lay_out, nbytes
from vllm_exl3.tools.table_json import TableDescriptions
from vllm_exl3.tools.table_source import find_table, open_model, read_headers

__all__ = ["Result", "quantize_embedding"]

Array = npt.NDArray[Any]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done and the bytes in all."""

_BLOCK_BYTES = 8 << 20
"""Source bytes of the rows that are in memory at a time; their float32 temporaries are about ten times that."""


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
        Exl3PackError: ``target`` exists or lies inside ``source``, which may also have no 16-bit table, or one that
            holds NaN or infinity.
        OSError: the system refuses to write ``target``.
    """
    if target.exists() or target.is_symlink():
        raise _fault("an existing folder or file", "a name that is free", str(target), "Choose another, or remove it.")
    if target.resolve().is_relative_to(source.resolve()):
        raise _fault("a folder inside the source", "one beside it", str(target), "Choose a folder elsewhere.")
    model = open_model(source)
    headers = read_headers(model)
    table = find_table(headers, model.label, module)
    descriptions = TableDescriptions(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.embed-quant-", dir=target.parent))
    try:
        plan = _Plan(model, temporary, headers[table.file], table, bits)
        plan.write(progress)
        relative_error = plan.verify(progress)
        _bring_the_rest(source, temporary, {table.file, *descriptions.files}, copy)
        descriptions.write(temporary, table, plan.new, {"bits": bits, "rows": plan.shape[0], "width": plan.shape[1]})
        temporary.chmod(0o755)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Result(table.name.rpartition(".")[0], plan.shape, table.nbytes, plan.table_bytes, relative_error)


class _Plan:
    """The file that holds the table, and its replacement.

    Args:
        source: the model's folder.
        folder: where the replacement is written.
        header: of the file that holds the table.
        table: the table.
        bits: 8 or 4.
    """

    def __init__(self, source: LocalFolder, folder: Path, header: FileHeader, table: StoredTensor, bits: int) -> None:
        self.source, self.folder, self.header, self.table, self.bits = source, folder, header, table, bits
        self.key = table.name.removesuffix(".weight")
        rows, width = table.shape
        self.shape = (rows, width)
        columns, groups = row_layout(width, bits)
        self.new = {
            f"{self.key}.scales": (SCALE_DTYPE[bits], (rows, groups)),
            f"{self.key}.qrows": ("I8" if bits == 8 else "U8", (rows, columns)),
        }
        self.table_bytes = sum(nbytes(dtype, shape) for dtype, shape in self.new.values())

    def write(self, progress: Progress) -> None:
        """Write the replacement: every other tensor as it was, the table quantized."""
        others = [tensor for tensor in self.header.tensors.values() if tensor is not self.table]
        sizes = {tensor.name: (tensor.dtype, tensor.shape) for tensor in others} | self.new
        # The widest elements first, so that each tensor begins at a multiple of its element size.
        order = sorted(sizes, key=lambda name: -ITEM_BITS[sizes[name][0]])
        layout = lay_out(((name, *sizes[name]) for name in order), self.header.metadata)
        with (self.folder / self.table.file).open("xb") as target:
            target.write(layout.header)
            for tensor in others:
                target.seek(layout.starts[tensor.name])
                for data in _pieces(self.source, tensor):
                    target.write(data)
            starts = [layout.starts[f"{self.key}.{leaf}"] for leaf in ("qrows", "scales")]
            for start, values in self._source_blocks("quantizing", progress):
                for position, rows in zip(starts, self._encode(values, start), strict=True):
                    target.seek(position + start * rows[0].nbytes)
                    target.write(rows.data)
            target.truncate(layout.nbytes)
            target.flush()
            os.fsync(target.fileno())

    def verify(self, progress: Progress) -> float:
        """Read the replacement back and compare it with the source.

        Returns:
            The relative error.

        Raises:
            Exl3PackError: a tensor has not arrived as it was meant to be.
        """
        target = LocalFolder(self.folder)
        written = read_headers(target)[self.table.file].tensors
        for tensor in self.header.tensors.values():
            if tensor is not self.table:
                pairs = zip(_pieces(self.source, tensor), _pieces(target, written[tensor.name]), strict=True)
                if any(before != after for before, after in pairs):
                    raise self._changed("other bytes than in the source", "a plain copy", tensor.name)
        difference = norm = 0.0
        for start, values in self._source_blocks("verifying", progress):
            codes, scales = (
                _rows(target, written[f"{self.key}.{leaf}"], start, len(values)) for leaf in ("qrows", "scales")
            )
            wanted_codes, wanted_scales = quantize_rows(values, self.bits)
            wrong = (codes != wanted_codes).any(1) | (scales != wanted_scales).any(1)
            if wrong.any():
                found = f"other bytes than were written, in row {start + int(wrong.argmax())}"
                raise self._changed(found, "the quantized row", f"{self.key}.qrows")
            error = dequantize_rows(codes, scales, values.shape[1]) - values
            difference += float(np.square(error, dtype=np.float64).sum())
            norm += float(np.square(values, dtype=np.float64).sum())
        return (difference / norm) ** 0.5 if norm else 0.0

    def _changed(self, found: str, expected: str, name: str) -> Exl3PackError:
        where = f"{name} in {self.table.file}, read back"
        return _fault(found, expected, where, "Check the disk, then run the command again.")

    def _source_blocks(self, phase: str, progress: Progress) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        rows = self.shape[0]
        row_bytes = self.table.nbytes // rows
        step = max(1, _BLOCK_BYTES // row_bytes)
        for start in range(0, rows, step):
            yield start, _rows(self.source, self.table, start, min(step, rows - start))
            progress(phase, min(start + step, rows) * row_bytes, self.table.nbytes)

    def _encode(self, values: npt.NDArray[np.float32], start: int) -> tuple[Array, Array]:
        try:
            codes, scales = quantize_rows(values, self.bits)
        except ValueError as error:
            raise _fault(
                f"rows from {start}: {error}",
                "finite values",
                f"{self.table.name} in {self.table.file}",
                "The file is damaged, or the model was never sound: fetch it again.",
            ) from None
        return np.ascontiguousarray(codes), to_bfloat16(scales) if SCALE_DTYPE[self.bits] == "BF16" else scales


def _rows(folder: LocalFolder, tensor: StoredTensor, start: int, count: int) -> Array:
    """Some rows of a stored tensor; floats come as float32."""
    row_bytes = tensor.nbytes // tensor.shape[0]
    data = folder.read(tensor.file, tensor.start + start * row_bytes, count * row_bytes)
    dtype = {"I8": "i1", "U8": "u1", "F16": "<f2", "BF16": "<u2", "F32": "<f4"}[tensor.dtype]
    values = np.frombuffer(data, dtype).reshape(count, -1)
    if tensor.dtype == "BF16":
        return from_bfloat16(values)
    return values.astype(np.float32) if tensor.dtype.startswith("F") else values


def _pieces(folder: LocalFolder, tensor: StoredTensor) -> Iterator[bytes]:
    """All bytes of a stored tensor, a block at a time."""
    for start in range(0, tensor.nbytes, _BLOCK_BYTES):
        yield folder.read(tensor.file, tensor.start + start, min(_BLOCK_BYTES, tensor.nbytes - start))


def _bring_the_rest(source: Path, folder: Path, rewritten: Collection[str], copy: bool) -> None:
    """Hard-link every other file, or copy it where the file system cannot; a link that leads nowhere stays one."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if path.is_dir():
            (folder / name).mkdir(exist_ok=True)
        elif path.is_file() and str(name) not in rewritten:
            _link_or_copy(path.resolve(), folder / name, copy)
        elif path.is_symlink() and not path.exists():
            (folder / name).symlink_to(path.readlink())


def _link_or_copy(path: Path, target: Path, copy: bool) -> None:
    if not copy:
        with suppress(OSError):
            os.link(path, target)
            return
    shutil.copy2(path, target)


def _fault(found: str, expected: str, where: str, remedy: str) -> Exl3PackError:
    return Exl3PackError(found=found, expected=expected, where=where, remedy=remedy)
