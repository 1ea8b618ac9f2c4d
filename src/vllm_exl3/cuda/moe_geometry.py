"""Launch arguments of the kernels of routed experts, and what of a layer decides which of them serve it.

Without torch or a GPU; `MoeStage` and `MoeArgs` mirror ``kernels/moe_problem.cuh`` field by field.
"""

import ctypes
from dataclasses import dataclass

from vllm_exl3.cuda.geometry import fields
from vllm_exl3.pack.stored import Codebook

__all__ = ["ACTIVATION_KINDS", "NARROW", "Layer", "MoeArgs", "MoeForm", "MoeStage"]

ACTIVATION_KINDS = (
    "swiglu",
    "swiglu_step",
    "situ",
    "gelu",
    "gelu_tanh",
    "silu_ungated",
    "gelu_ungated",
    "gelu_tanh_ungated",
    "relu2_ungated",
)
"""The order of ``ActivationKind`` in moe_activation.cuh."""

NARROW = 16
"""Rows of a row block that the kernel of mma.sync takes at most."""


class MoeStage(ctypes.Structure):
    """``MoeStage`` of moe_problem.cuh."""

    __slots__ = ()
    _fields_ = (
        *fields(ctypes.c_uint64, "trellis", "suh", "svh", "bias", "rows", "descale", "sums", "out", "schedule"),
        *fields(ctypes.c_uint32, "first", "projections", "in_width", "in_features", "out_width", "out_features"),
    )


class MoeArgs(ctypes.Structure):
    """``MoeArgs`` of moe_problem.cuh."""

    __slots__ = ()
    _fields_ = (
        ("stages", MoeStage * 2),
        *fields(
            ctypes.c_uint64,
            "table",
            "x",
            "out",
            "weights",
            "ids",
            "expert_map",
            "sorted_slots",
            "slot_positions",
            "blocks",
        ),
        *fields(ctypes.c_uint64, "chunks", "list_sizes", "totals", "row_largest"),
        *fields(ctypes.c_uint64, "scale_largest", "starts"),
        *fields(ctypes.c_int64, "x_stride", "out_stride"),
        *fields(ctypes.c_uint32, "stage", "tokens", "top_k", "slots", "experts", "mapped", "projections", "wide_ids"),
        *fields(ctypes.c_uint32, "x_type", "out_type", "tile_rows", "thin_rows", "fat_rows"),
        *fields(ctypes.c_uint32, "row_padding", "padded_rows", "identity", "grouped", "keep_hidden", "pipeline_stages"),
        *fields(ctypes.c_uint32, "stage_stride", "weight_pitch", "activation_stride", "weight_on_input"),
        *fields(ctypes.c_uint32, "activation"),
        *fields(ctypes.c_float, "alpha", "beta", "limit"),
    )


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
        """Whether the warpgroup kernel (sm_90a) serves it."""
        return self.tile_rows > NARROW

    @property
    def cluster(self) -> int:
        """Thread blocks of the warpgroup kernel that share activations: more than one in moe_cluster.cuh."""
        return 2 if self.tile_rows > 64 else 1

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{'identity' if self.identity else 'wide' if self.wide else 'half'}{self.tile_rows}"


@dataclass(frozen=True, slots=True)
class Layer:
    """What of a layer decides its kernels, without its tensors.

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
        """Whether some projection is mul1."""
        return any(codebook == Codebook.MUL1 for _, codebook in self.codes)
