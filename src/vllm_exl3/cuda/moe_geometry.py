"""Launch arguments of the kernels of routed experts, and what of a layer decides which of them serve it.

Without torch or a GPU.
"""

import ctypes
from dataclasses import dataclass

from vllm_exl3.cuda.declarations import enumerators, members
from vllm_exl3.pack.stored import Codebook

__all__ = ["ACTIVATION_KINDS", "NARROW", "Layer", "MoeArgs", "MoeForm", "MoeStage"]

ACTIVATION_KINDS = tuple(name.lower() for name in enumerators("moe/activation.cuh", "ActivationKind"))
"""Activations, each in the place of its number."""

NARROW = 16
"""Rows of a row block that the kernel of mma.sync takes at most."""


class MoeStage(ctypes.Structure):
    """``MoeStage`` of moe/arguments.cuh."""

    __slots__ = ()
    _fields_ = members("moe/arguments.cuh", "MoeStage")


class MoeArgs(ctypes.Structure):
    """``MoeArgs`` of moe/arguments.cuh."""

    __slots__ = ()
    _fields_ = members("moe/arguments.cuh", "MoeArgs", MoeStage)


@dataclass(frozen=True, slots=True)
class MoeForm:
    """How experts are multiplied.

    Attributes:
        identity: use the codebooks' identities instead of decoding to fp16.
        tile_rows: rows of one expert that share one decoding of its weights.
    """

    identity: bool
    tile_rows: int

    @property
    def wide(self) -> bool:
        """True where the warpgroup kernel (sm_90a) serves it."""
        return self.tile_rows > NARROW

    @property
    def cluster(self) -> int:
        """Thread blocks of the warpgroup kernel that share activations: more than one in moe/cluster.cuh."""
        return 2 if self.tile_rows > 64 else 1

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"{'identity' if self.identity else 'wide' if self.wide else 'half'}{self.tile_rows}"


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer, as far as it decides its kernels, without its tensors.

    Attributes:
        kinds: (projection, 2·K, codebook) of everything that occurs.
        experts: on this rank.
        total_experts: that the ids may name.
        top_k: experts a token visits.
        hidden: channels that enter and leave.
        intermediate: channels between the projections, before padding.
        swiglu: whether experts have SwiGLU, and no biases.
    """

    kinds: tuple[tuple[int, int, int], ...]
    experts: int
    total_experts: int
    top_k: int
    hidden: int
    intermediate: int
    swiglu: bool = False

    @property
    def projections(self) -> int:
        """2 or 3: without or with a gate."""
        return max(projection for projection, _, _ in self.kinds) + 1

    @property
    def codes(self) -> tuple[tuple[int, int], ...]:
        """(2·K, codebook) of all projections."""
        return tuple(sorted({(half_bits, codebook) for _, half_bits, codebook in self.kinds}))

    @property
    def mul1(self) -> bool:
        """True where some projection is mul1."""
        return any(codebook == Codebook.MUL1 for _, codebook in self.codes)
