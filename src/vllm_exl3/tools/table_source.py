"""Finds the 16-bit token embedding of a model folder of any format, or says what stands in its place."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.headers import FileHeader, read_header
from vllm_exl3.pack.source import LocalFolder
from vllm_exl3.pack.spelling import is_embedding_name
from vllm_exl3.pack.stored import StoredTensor

__all__ = ["find_table", "open_model", "read_headers"]

_DTYPES = ("F16", "BF16", "F32")


def open_model(folder: Path) -> LocalFolder:
    """A model's folder, for reading.

    Raises:
        Exl3PackError: there is no such folder.
    """
    if not folder.is_dir():
        raise Exl3PackError(
            found="a file" if folder.exists() else "no such folder",
            expected="a Hugging Face model folder",
            where=str(folder),
            remedy="Give the model's folder; a model on the Hub has to be downloaded first.",
        )
    return LocalFolder(folder)


def read_headers(source: LocalFolder) -> dict[str, FileHeader]:
    """The headers of a model's safetensors files by file name.

    Raises:
        Exl3PackError: there is none, or one that cannot be read.
    """
    names = [name for name in source.names() if name.endswith(".safetensors") and not name.startswith(".")]
    if not names:
        raise Exl3PackError(
            found="no *.safetensors",
            expected="a Hugging Face model folder",
            where=source.label,
            remedy="Give the folder that holds the model's weights.",
        )
    return {name: read_header(name, source.size(name), partial(source.read, name)) for name in names}


def find_table(headers: Mapping[str, FileHeader], where: str, module: str | None) -> StoredTensor:
    """The one dense token embedding.

    Args:
        headers: of all files.
        where: the folder, for messages.
        module: its module name, where it is not recognised by it.

    Raises:
        Exl3PackError: there is none or more than one, or it is quantized already.
    """
    tensors = {name: tensor for header in headers.values() for name, tensor in header.tensors.items()}
    names = [name for name in tensors if _is_table(name, tensors[name], module)]
    if not names and (quantized := _quantized_table(tensors, module)) is not None:
        raise Exl3PackError(
            found=f"{quantized}, which is quantized already",
            expected="a 16-bit table",
            where=where,
            remedy="Start from the model that this folder was made from: quantizing a second time would only add "
            "error.",
        )
    if len(names) != 1:
        raise _no_single_table(names, tensors, where, module)
    table = tensors[names[0]]
    if table.dtype not in _DTYPES or len(table.shape) != 2 or not min(table.shape):
        raise Exl3PackError(
            found=f"{table.dtype} {list(table.shape)}",
            expected=f"{', '.join(_DTYPES)} of rank 2",
            where=f"{table.name} in {table.file}",
            remedy="Start from the 16-bit model.",
        )
    return table


def _is_table(name: str, tensor: StoredTensor, module: str | None) -> bool:
    key, _, leaf = name.rpartition(".")
    if leaf != "weight":
        return False
    return is_embedding_name(key) and len(tensor.shape) == 2 if module is None else key == module


def _no_single_table(
    names: list[str], tensors: Mapping[str, StoredTensor], where: str, module: str | None
) -> Exl3PackError:
    if module is not None:
        found = f"no tensor {module}.weight"
    else:
        found = f"{len(names)} token embeddings" + (f" ({', '.join(names)})" if names else "")
    similar = [name for name in tensors if "embed" in name and name.endswith(".weight")][:4]
    return Exl3PackError(
        found=found,
        expected="one 16-bit .weight to replace",
        where=where,
        remedy="Name its module with --module, such as model.embed_tokens."
        + (f" The model has {', '.join(similar)}." if similar and not names else ""),
    )


def _quantized_table(tensors: Mapping[str, StoredTensor], module: str | None) -> str | None:
    """The name and kind of a token embedding that is stored as codes, or None."""
    for name, tensor in tensors.items():
        key, _, leaf = name.rpartition(".")
        if leaf in ("qrows", "signs") and (is_embedding_name(key) if module is None else key == module):
            kind = {"I8": "int8", "U8": "int4"}.get(tensor.dtype) if leaf == "qrows" else "EXL3-coded"
            return f"{key} as {kind} rows" if kind else key
    return None
