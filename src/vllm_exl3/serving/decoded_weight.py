"""The ``weight`` of an embedding or a head that is stored in another form, decoded when something reads it.

Features of vLLM read ``lm_head.weight`` or ``embed_tokens.weight`` themselves: rerankers take two rows of the head,
speculation compares a draft's weights with the target's, LoRA asks for dtype and device. They find a tensor of the
usual shape here, which holds no memory: rows are decoded as they are asked for, the whole weight only for a reader
that wants all of it, and the log says so.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vllm_exl3.pack.errors import Exl3PackError

__all__ = ["DecodedWeight", "lend_weight"]

logger = logging.getLogger("vllm.exl3")

_aten = torch.ops.aten
_CHUNK = 4096
"""Rows that are compared at once: two different weights differ in the first of them."""

Rows = Callable[[torch.Tensor], torch.Tensor]
"""Row numbers ``[n]`` to rows ``[n, width]``."""


def lend_weight(layer: torch.nn.Module, where: str, rows: Rows, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Give a layer a ``weight`` that is decoded when it is read.

    It is a plain attribute: a parameter would be counted, moved and reloaded by vLLM.

    Args:
        layer: an embedding or a head.
        where: its name, for the log.
        rows: decodes rows. It must not keep the layer alive.
        shape: rows and width, as the layer's weight in 16 bits would have them on this rank.
        dtype: of the values.
    """
    device = torch.empty(0).device  # that of the parameters which are being registered
    object.__setattr__(layer, "weight", DecodedWeight(where, rows, shape, dtype, device))


class DecodedWeight(torch.Tensor):
    """A weight ``[rows, width]`` without memory.

    Args:
        where: the layer's name, for the log.
        rows: decodes rows, in any dtype and on any device.
        shape: rows and width.
        dtype: what the values are given as.
        device: where they are given.
    """

    _where: str
    _rows: Rows

    @staticmethod
    def __new__(
        cls, where: str, rows: Rows, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> "DecodedWeight":
        """A tensor that has these properties and no storage."""
        weight: DecodedWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        weight._where, weight._rows = where, rows
        return weight

    def __init__(self, *_: Any) -> None: ...

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DecodedWeight({self._where}, {list(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Decode what ``func`` reads.

        Raises:
            Exl3PackError: it writes.
        """
        kwargs = dict(kwargs or {})
        if func._schema.is_mutable:
            _refuse_writing(func, args, kwargs)
        # Rows are tensors of their own and no views: in inference mode autograd would take them for views.
        with torch.inference_mode(False):
            partly = _PARTLY.get(func.overloadpacket, func.decompose)  # an op that is made of others asks again
            result = partly(*args, **kwargs)
            return result if result is not NotImplemented else _on_all_of_it(func, args, kwargs)

    def __setitem__(self, *_: Any) -> None:
        """Refuse: it would write to a decoded row.

        Raises:
            Exl3PackError: always.
        """
        raise _written("an assignment", self)

    def like(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> "DecodedWeight":
        """The same weight in another dtype or for another device; nothing is decoded."""
        shape = (self.shape[0], self.shape[1])
        target = self.device if device is None else torch.device(device)
        return DecodedWeight(self._where, self._rows, shape, dtype or self.dtype, target)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``[*ids.shape, width]``; negative numbers count from the end."""
        count = self.shape[0]
        if ids.numel() and not (-count <= int(ids.min()) and int(ids.max()) < count):
            raise IndexError(f"row {int(ids.max())} of {self._where}.weight, which has {count}")
        flat = torch.where(ids < 0, ids + count, ids).flatten()
        return self._rows(flat).to(self.device, self.dtype).view(*ids.shape, self.shape[1])

    def range(self, start: int, stop: int, step: int = 1) -> torch.Tensor:
        """Rows ``start`` to ``stop``."""
        return self.rows(torch.arange(start, stop, step, device="cpu"))


def _refuse_writing(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if isinstance(value, DecodedWeight) and argument.alias_info is not None and argument.alias_info.is_write:
            raise _written(str(func), value)


def _written(what: str, weight: DecodedWeight) -> Exl3PackError:
    return Exl3PackError(
        found=f"{what} that would write to the decoded weight",
        expected="readers only: the stored form is what is served",
        where=f"{weight._where}.weight",
        remedy="Use a pack that stores this layer in 16 bits, or leave out the feature that changes it.",
    )


def _on_all_of_it(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    def whole(value: Any) -> Any:
        if not isinstance(value, DecodedWeight):
            return value
        size = value.numel() * value.element_size() / 2**20
        logger.warning("EXL3: %s reads all of %s.weight: decoded for it, %.1f MiB", func, value._where, size)
        return value.range(0, value.shape[0])

    return func(*map(whole, args), **{name: whole(value) for name, value in kwargs.items()})


def _same(weight: Any, *_: Any, **__: Any) -> Any:
    return weight.like()


def _to_copy(weight: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return weight.like(dtype, device)


def _equal(one: Any, other: Any) -> Any:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    steps = range(0, one.shape[0], _CHUNK)
    return all(torch.equal(_piece(one, start), _piece(other, start).to(one.device)) for start in steps)


def _piece(weight: torch.Tensor, start: int) -> torch.Tensor:
    stop = min(start + _CHUNK, weight.shape[0])
    return weight.range(start, stop) if isinstance(weight, DecodedWeight) else weight[start:stop]


def _index(weight: Any, indices: Sequence[torch.Tensor | None]) -> Any:
    first, *others = indices
    if not isinstance(weight, DecodedWeight) or first is None or any(index is not None for index in others):
        return NotImplemented
    if first.dtype in (torch.bool, torch.uint8):
        return NotImplemented if first.dim() != 1 else weight.rows(first.nonzero().flatten())
    return weight.rows(first)


def _index_select(weight: Any, dim: int, ids: torch.Tensor) -> Any:
    rows = isinstance(weight, DecodedWeight) and dim % 2 == 0
    return weight.rows(ids) if rows else NotImplemented


def _embedding(weight: Any, ids: torch.Tensor, *_: Any, **__: Any) -> Any:
    return weight.rows(ids) if isinstance(weight, DecodedWeight) else NotImplemented


def _select(weight: Any, dim: int, number: int) -> Any:
    return weight.rows(torch.tensor([number]))[0] if dim % 2 == 0 else NotImplemented


def _slice(weight: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    if dim % 2:
        return NotImplemented
    begin, stop, _ = slice(start, end).indices(weight.shape[0])
    return weight.like() if (begin, stop, step) == (0, weight.shape[0], 1) else weight.range(begin, stop, step)


_PARTLY: dict[Any, Callable[..., Any]] = {
    _aten.detach: _same,
    _aten.alias: _same,
    _aten._to_copy: _to_copy,
    _aten.equal: _equal,
    _aten.index: _index,
    _aten.index_select: _index_select,
    _aten.embedding: _embedding,
    _aten.select: _select,
    _aten.slice: _slice,
}
"""Operations that need not decode all of it; each may say NotImplemented."""
