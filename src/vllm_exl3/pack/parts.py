"""What fills one vLLM module: the stored modules that its name leads to."""

from dataclasses import dataclass
from typing import Literal

from vllm_exl3.pack.stored import StoredLinear, StoredTensor

__all__ = ["Part", "Resolution"]


@dataclass(frozen=True, slots=True)
class Part:
    """One stored module: an EXL3 linear, a dense weight, or the slices of one wide linear.

    Attributes:
        key: the module's key in the checkpoint.
        linear: its EXL3 form, or None.
        dense: its plain ``.weight``, or None.
        slices: the EXL3 linears ``key.slice.0`` …, in order; empty for an unsliced module.
        slice_axis: whether the slices follow each other along the outputs (gate, up) or the inputs (down).
    """

    key: str
    linear: StoredLinear | None
    dense: StoredTensor | None
    slices: tuple[StoredLinear, ...] = ()
    slice_axis: Literal["in", "out"] | None = None

    @property
    def linears(self) -> tuple[StoredLinear, ...]:
        """Its EXL3 linears: one, none, or one of each slice."""
        return self.slices or ((self.linear,) if self.linear is not None else ())


@dataclass(frozen=True, slots=True)
class Resolution:
    """The stored modules that fill one vLLM module, in the order of its output columns."""

    prefix: str
    parts: tuple[Part, ...]

    @property
    def linears(self) -> tuple[StoredLinear, ...]:
        """The EXL3 linears among the parts."""
        return tuple(linear for part in self.parts for linear in part.linears)
