"""The n-gram op: rows of an n-gram (PLE) table, decoded as they are gathered, their head's bias added.

``torch.ops.vllm.exl3_ngram_lookup_out(ids, out, layer_name)``

The op takes its table by the layer's name, since it may be on no device at all (`ngram_tables`). Its own name is the
one that published command lines give to ``splitting_ops``. Source: the EXL3 format as written by exllamav3 1.6.5.
"""

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from vllm_exl3.ops import backends
from vllm_exl3.ops.rings import ring_values
from vllm_exl3.pack.assemble import RING_NGRAM

__all__ = ["LOOKUP_OP", "Lookup", "NgramTable", "ngram_reference", "ngram_rows", "register_table", "set_running_model"]

LOOKUP_OP = "vllm::exl3_ngram_lookup_out"

_DECODED_ROWS = 1 << 13
"""Rows decoded at a time, so that scratch does not grow with the prompt."""

_library = torch.library.Library("vllm", "FRAGMENT")
_library.define("exl3_ngram_lookup_out(Tensor ids, Tensor(a!) out, str layer_name) -> ()")


class Lookup(Protocol):
    """A table's look-up: writes rows ``ids`` to ``out`` ``[*ids.shape, 160]``."""

    def __call__(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Write the rows."""


class NgramTable:
    """What decoding needs beside the rows.

    Args:
        bias: float16 ``[heads, 160]``.
        offsets: int64 ``[heads]``, the first row of each head.
        first_row: the table's row that id 0 stands for: this rank's share begins there.
    """

    def __init__(self, bias: torch.Tensor, offsets: torch.Tensor, first_row: int) -> None:
        self.bias, self.offsets, self.first_row = bias, offsets, first_row


_tables: weakref.WeakValueDictionary[tuple[Hashable, str], Lookup] = weakref.WeakValueDictionary()
"""By model and layer name. Weak, since a table may hold tens of GiB: it goes with the model that it belongs to."""
_lock = threading.Lock()


def _no_model() -> Hashable:
    return None


_running_model: Callable[[], Hashable] = _no_model


def set_running_model(which: Callable[[], Hashable]) -> None:
    """How the op tells apart layers of equal names when a process runs several models.

    Args:
        which: gives the ``model`` that `register_table` got, of the model that is running; None while none is.
    """
    global _running_model  # noqa: PLW0603  one runtime a process
    _running_model = which


def register_table(layer_name: str, lookup: Lookup, model: Hashable = None) -> None:
    """Let the op find a layer's table.

    Args:
        layer_name: what the op is called with.
        lookup: must be kept by the layer; nothing here keeps it.
        model: whose layer it is. Outside of any model's forward pass, the op takes the table that came last.
    """
    with _lock:
        _tables[None, layer_name] = _tables[model, layer_name] = lookup


def _lookup_out(ids: torch.Tensor, out: torch.Tensor, layer_name: str) -> None:
    model = _running_model()
    lookup = _tables.get((model, layer_name))
    if lookup is None:
        known = ", ".join(sorted({name for owner, name in _tables if owner == model})) or "none"
        raise RuntimeError(
            f"{LOOKUP_OP}: found no table of layer {layer_name!r} of model {model!r}, expected one of: {known}. A "
            "table is registered while its layer is loaded and goes with it: keep the layer while the op is called."
        )
    lookup(ids, out)


def ngram_rows(
    ids: torch.Tensor, index: torch.Tensor | None, rows: torch.Tensor, table: NgramTable, out: torch.Tensor
) -> None:
    """Decode rows, with the fastest backend for the device.

    Args:
        ids: int64, any shape, counted from ``table.first_row``: they tell the heads.
        index: int64 of that shape: where in ``rows`` each id lies; None where that is the id.
        rows: int16 ``[n, 1 + 10·K]``, on the device or in host memory that it can read.
        table: heads and biases, on the device.
        out: ``[*ids.shape, 160]`` float16, bfloat16 or float32, contiguous, which is written. Values are rounded to
            float16 first, as the format defines them.
    """
    backend = backends.select("ngram", ids.device.type, ngram_reference).backend
    backends.count_call("ngram", backend.name, "NgramEmbedding")
    backend.function(ids, index, rows, table, out)


def ngram_reference(
    ids: torch.Tensor, index: torch.Tensor | None, rows: torch.Tensor, table: NgramTable, out: torch.Tensor
) -> None:
    """The op in plain PyTorch, a bounded number of rows at a time."""
    flat, target = ids.reshape(-1), out.view(-1, RING_NGRAM)
    places = flat if index is None else index.reshape(-1)
    for start in range(0, len(flat), _DECODED_ROWS):
        part = slice(start, start + _DECODED_ROWS)
        rings = rows.index_select(0, places[part].to(rows.device)).to(ids.device)
        head = torch.searchsorted(table.offsets, flat[part] + table.first_row, right=True) - 1
        values = ring_values(rings, RING_NGRAM) + table.bias.index_select(0, head).float()
        target[part] = values.half().to(out.dtype)


@torch.library.register_fake(LOOKUP_OP, lib=_library)
def _lookup_fake(ids: torch.Tensor, out: torch.Tensor, layer_name: str) -> None:
    return None


# Autograd and Dynamo never look inside, as with the linears.
_library.impl("exl3_ngram_lookup_out", _lookup_out, "CompositeExplicitAutograd")
