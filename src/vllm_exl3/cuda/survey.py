"""Which kernels a pack, or any pack, needs on which GPU: for ``vllm-exl3 precompile``, the doctor and the tests."""

from collections.abc import Iterable
from dataclasses import replace

from vllm_exl3.cuda import fused_linear, gemm, narrow, prefill, prefill_int8
from vllm_exl3.cuda.compiler import ARCHITECTURES, Instance
from vllm_exl3.cuda.dequantize import dequantize_instance
from vllm_exl3.cuda.geometry import Codes, GpuLimits
from vllm_exl3.cuda.linear import EVERY_FORM, choose_form, plan
from vllm_exl3.cuda.prefill_input import MOST_FEW_IN, ROTATE_FEW, ROTATE_FUSED
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.spelling import SPLITS
from vllm_exl3.pack.stored import BLOCK, Codebook, StoredLinear

__all__ = ["codes_of", "every_kind", "instances_for", "local_gpus", "pack_codes", "typical_limits"]

_SHARED_MEMORY = {"sm_80": 166912, "sm_90a": 232448, "sm_100a": 232448, "sm_103a": 232448}
"""Bytes of shared memory that a block may use; 101376 on the architectures that are not listed."""

_SHAPES = ((1024, 1024), (8192, 128256))
"""Between them they choose every form, and every wide kernel of a layer: whether k is split."""


def typical_limits(architecture: str) -> GpuLimits:
    """A typical GPU of an architecture, as far as the choice of kernels depends on it.

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


def pack_codes(pack: Pack) -> list[Codes]:
    """The kinds of the layers of a pack, from its headers: each linear by itself, and those that vLLM may fuse.

    Routed experts are left out, since they have kernels of their own.
    """
    routed = {key for group in pack.experts.values() for members in group.members.values() for key in members.values()}
    linears = {key: linear for key, linear in pack.linears.items() if key not in routed}
    found = {codes_of([linear]) for linear in linears.values()}
    fused = {names for spellings in SPLITS.values() for names in spellings}
    for parent in {key.rpartition(".")[0] for key in linears}:
        here = [names for names in fused if all(f"{parent}.{name}" in linears for name in names)]
        for names in here:
            if not any(set(names) < set(others) for others in here):
                found.add(codes_of([linears[f"{parent}.{name}"] for name in names]))
    return sorted(found)


def codes_of(linears: Iterable[StoredLinear]) -> Codes:
    """The (half_bits, codebook) of linears, sorted, each once."""
    return tuple(sorted({(linear.half_bits, int(linear.codebook)) for linear in linears}))


def instances_for(layers: Iterable[Codes], limits: GpuLimits) -> list[Instance]:
    """The kernels that layers of these codes use on a GPU, whatever their shapes, for any batch size.

    As the environment asks for: in fast mode its kernels are among them.
    """
    found = []
    for codes in layers:
        small, large = (
            tuple(Shard(half_bits, codebook, width, height, 0, height) for half_bits, codebook in codes)
            for width, height in _SHAPES
        )
        found += [dequantize_instance(shard) for shard in small]
        for form in dict.fromkeys(choose_form(some, rows, limits) for some in (small, large) for rows in EVERY_FORM):
            if not form.wide:
                found += narrow.instances_of(codes, form, limits)
                continue
            for shards in (small, large):
                found += plan(shards, form.tile_rows, shards[0].in_features, form, limits).instances
        if multiplied := gemm.instances(large, limits):
            rounded = {int8 for (_, int8), instance in ROTATE_FEW.items() if instance in multiplied}
            # Which of them rotates depends on the input's width, and on what is before the linear in a model.
            rotations = ROTATE_FEW | (ROTATE_FUSED if fused_linear.instances(large, limits) else {})
            found += [*multiplied, *(instance for key, instance in rotations.items() if key[1] in rounded)]
            found += fused_linear.instances(large, limits)
        # Inputs that are too wide for int8 are multiplied as fp16, also in fast mode.
        found += gemm.instances(tuple(replace(shard, in_features=MOST_FEW_IN + BLOCK) for shard in large), limits)
        found += prefill.instances(small, limits)
        found += prefill_int8.instances(small, limits)
    return list(dict.fromkeys(found))
