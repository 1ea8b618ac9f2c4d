"""Writes EXL3 pack folders: safetensors files streamed tensor by tensor, and the two configuration files.

Needs numpy only. Tensors are described first and made while they are written, so that a pack of any
size takes the memory of its largest tensor. The layout is the one exllamav3 1.6.5 writes.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from vllm_exl3 import __version__
from vllm_exl3.pack.assemble import MARKERS
from vllm_exl3.pack.files import INDEX
from vllm_exl3.pack.metadata import SIDECAR
from vllm_exl3.pack.stored import TILE, Codebook
from vllm_exl3.tools.safetensors_layout import lay_out, ledger_record, nbytes

__all__ = ["WRITER", "PackTensor", "linear_tensors", "write_json", "write_pack", "write_safetensors"]

Array = npt.NDArray[Any]

WRITER = f"vllm-exl3 {__version__}"
"""What ``version`` of a quantization config says of packs written here."""


@dataclass(frozen=True)
class PackTensor:
    """One tensor to be written.

    Attributes:
        name: its name in the checkpoint.
        dtype: the safetensors dtype code.
        shape: its shape.
        make: returns its values when they are due; called once. BF16 values come as uint16 bit patterns.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Array]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return nbytes(self.dtype, self.shape)


def linear_tensors(
    key: str,
    *,
    in_features: int,
    out_features: int,
    half_bits: int,
    codebook: Codebook,
    make: Callable[[str], Array],
) -> list[PackTensor]:
    """The tensors of one EXL3 linear, in the order exllamav3 stores them.

    Args:
        key: the module's name, such as ``model.layers.0.mlp.up_proj``.
        in_features: stored input channels, a multiple of 128.
        out_features: stored output channels, a multiple of 128.
        half_bits: 2·K.
        codebook: which marker is stored.
        make: returns the values of the leaf ``suh``, ``svh`` (float16) or ``trellis`` (16-bit integers).
    """
    tiles = (in_features // TILE, out_features // TILE, half_bits * 8)
    tensors = [
        PackTensor(f"{key}.suh", "F16", (in_features,), lambda: make("suh")),
        PackTensor(f"{key}.svh", "F16", (out_features,), lambda: make("svh")),
    ]
    if codebook.label in MARKERS:
        value = MARKERS[codebook.label][1]
        tensors.append(PackTensor(f"{key}.{codebook.label}", "I32", (), lambda: np.array(value, np.uint32)))
    tensors.append(PackTensor(f"{key}.trellis", "I16", tiles, lambda: make("trellis")))
    return tensors


def write_safetensors(
    path: Path,
    tensors: Sequence[PackTensor],
    written: Callable[[PackTensor], None] = lambda tensor: None,
    *,
    hollow: bool = False,
) -> None:
    """Write one safetensors file, making one tensor at a time.

    Args:
        path: the file.
        tensors: what it holds, in this order.
        written: called after each tensor, for progress.
        hollow: leave a hole in the file for all but scalars, which takes no disk space and reads as zeros.

    Raises:
        ValueError: a tensor's values have another size than its description.
    """
    layout = lay_out(((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors), {"format": "pt"})
    with path.open("wb") as file:
        file.write(layout.header)
        for tensor in tensors:
            if hollow and tensor.shape:
                file.seek(tensor.nbytes, os.SEEK_CUR)
            else:
                _write_values(file, tensor)
            written(tensor)
        file.truncate()


def _write_values(file: BinaryIO, tensor: PackTensor) -> None:
    values = np.ascontiguousarray(tensor.make())
    if values.nbytes != tensor.nbytes or values.size != prod(tensor.shape):
        raise ValueError(
            f"{tensor.name}: made {values.size} values in {values.nbytes} bytes, "
            f"described as {tensor.dtype} {list(tensor.shape)}"
        )
    file.write(values.reshape(-1).data)


def write_pack(
    folder: str | os.PathLike[str],
    *,
    config: Mapping[str, Any],
    quantization: Mapping[str, Any],
    tensors: Iterable[PackTensor],
    extra_files: Mapping[str, str] | None = None,
    max_shard_bytes: int = 8 << 30,
    written: Callable[[PackTensor], None] = lambda tensor: None,
    hollow: bool = False,
) -> Path:
    """Write a whole pack and rename it into place, so that a folder of this name is always complete.

    Args:
        folder: where the pack goes; an existing folder is replaced.
        config: the model's ``config.json`` without ``quantization_config``.
        quantization: the ``quantization_config``; ``quantization_config.json`` gets it with ``tensor_storage``.
        tensors: every tensor of the pack, those of one module next to each other.
        extra_files: name → text of further files, such as the tokenizer's.
        max_shard_bytes: a file that would grow past this is split, with an index.
        written: called after each tensor, for progress.
        hollow: write headers and scalars only, as `write_safetensors` does.

    Returns:
        The folder.
    """
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    planned = list(tensors)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_shards(temporary, planned, max_shard_bytes, written, hollow)
        write_json(temporary / "config.json", {**config, "quantization_config": dict(quantization)})
        write_json(temporary / SIDECAR, {**quantization, "tensor_storage": tensor_storage(planned)})
        for name, text in (extra_files or {}).items():
            (temporary / name).write_text(text, encoding="utf-8")
        temporary.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _write_shards(
    folder: Path,
    tensors: Sequence[PackTensor],
    max_bytes: int,
    written: Callable[[PackTensor], None],
    hollow: bool,
) -> None:
    shards: list[list[PackTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", shards[0], written, hollow=hollow)
        return
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, written, hollow=hollow)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
        "weight_map": {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    write_json(folder / INDEX, index)


def tensor_storage(tensors: Iterable[PackTensor]) -> dict[str, dict[str, Any]]:
    """The ``tensor_storage`` of ``quantization_config.json``: module → its stored tensors and EXL3 facts."""
    modules: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        key, _, leaf = tensor.name.rpartition(".")
        module = modules.setdefault(key, {"stored_tensors": {}})
        module["stored_tensors"][tensor.name] = ledger_record(tensor.dtype, tensor.shape)
        if leaf == "trellis":
            bits = tensor.shape[-1] / TILE
            module |= {"quant_format": "exl3", "bits_per_weight": int(bits) if bits.is_integer() else bits}
        if leaf in MARKERS:
            module[f"{leaf}_multiplier"] = MARKERS[leaf][1]
    return modules


def write_json(path: Path, value: Any) -> None:
    """Write a configuration file of a model."""
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False) + "\n", encoding="utf-8")
