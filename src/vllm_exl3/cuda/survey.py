"""Which kernels a pack, or any pack, needs on which GPU: for ``vllm-exl3 precompile``, the doctor and the tests."""

from collections.abc import Iterable

from vllm_exl3.cuda import dispatch, narrow, prefill
from vllm_exl3.cuda.compiler import ARCHITECTURES, Instance
from vllm_exl3.cuda.geometry import Form, GpuLimits
from vllm_exl3.cuda.linear import choose_form, plan
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import BLOCK, Codebook

__all__ = ["every_kind", "instances_for", "local_gpus", "pack_kinds", "typical_limits"]

_SHARED_MEMORY = {"sm_80": 166912, "sm_90a": 232448, "sm_100a": 232448, "sm_103a": 232448}
"""Bytes of shared memory that a block may use; 101376 on the architectures that are not listed."""

_TYPICAL_SHAPES = ((4096, 4096), (4096, 14336), (8192, 28672), (8192, 128256))
"""Between them they choose every wide kernel of a kind: whether k is split."""


def typical_limits(architecture: str) -> GpuLimits:
    """What kernel choice needs to know of an architecture, without a GPU.

    Raises:
        ValueError: no kernel is known to compile for it.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{architecture}: expected one of {', '.join(ARCHITECTURES)}")
    return GpuLimits(architecture, 132, _SHARED_MEMORY.get(architecture, 101376))


def local_gpus() -> list[GpuLimits]:
    """The GPUs that torch sees, one of each architecture."""
    import torch

    from vllm_exl3.cuda import runtime

    if not torch.cuda.is_available():
        return []
    found = [runtime.device(index).limits for index in range(torch.cuda.device_count())]
    return list({limits.architecture: limits for limits in found}.values())


def every_kind() -> list[tuple[int, int]]:
    """(half_bits, codebook) of every trellis that the format has."""
    return [
        (half_bits, int(codebook))
        for codebook in Codebook
        for half_bits in (*range(2, 17, 2), 3, 5, 7)
        if half_bits % 2 == 0 or codebook == Codebook.MUL1
    ]


def pack_kinds(pack: str, revision: str | None = None) -> list[tuple[int, int]]:
    """(half_bits, codebook) of every linear of a pack, from its headers."""
    from vllm_exl3.pack.pack import Pack

    linears = Pack.open(pack, revision).linears.values()
    return sorted({(linear.half_bits, int(linear.codebook)) for linear in linears})


def instances_for(kinds: Iterable[tuple[int, int]], limits: GpuLimits) -> list[Instance]:
    """The kernels that unfused layers of these kinds use on a GPU, for any batch size."""
    found = []
    for half_bits, codebook in kinds:
        macros = (("INSTANCE_HALF_BITS", str(half_bits)), ("INSTANCE_CODEBOOK", str(codebook)))
        found.append(Instance("dequantize.cu", "exl3_dequantize", macros))
        some = (Shard(half_bits, codebook, BLOCK, BLOCK, 0, BLOCK),)
        asked = (choose_form(some, dispatch.FAST_TOKENS, limits),)  # in fast mode it has a kernel of its own
        for form in dict.fromkeys((*forms(codebook, limits.architecture), *asked)):
            if not form.wide:
                found += narrow.instances_of([(half_bits, codebook)], form, limits)
                continue
            for width, height in _TYPICAL_SHAPES:
                shard = Shard(half_bits, codebook, width, height, 0, height)
                found += plan((shard,), form.tile_rows, width, form, limits).instances
        found += prefill.instances((Shard(half_bits, codebook, *_TYPICAL_SHAPES[0], 0, _TYPICAL_SHAPES[0][1]),), limits)
    return list(dict.fromkeys(found))


def forms(codebook: int, architecture: str) -> list[Form]:
    """The forms that some batch size chooses for a codebook."""
    return list(
        dict.fromkeys(
            dispatch.choose_form(frozenset({codebook}), rows, architecture) for rows in (1, 4, 5, 8, 9, 17, 33, 65)
        )
    )
