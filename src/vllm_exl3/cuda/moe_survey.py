"""Which kernels the routed experts of a pack, or of any pack, need on which GPU: for ``vllm-exl3 precompile``."""

from collections.abc import Iterable

from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.geometry import Codes, GpuLimits
from vllm_exl3.cuda.moe import instances
from vllm_exl3.cuda.moe_geometry import Layer
from vllm_exl3.cuda.survey import codes_of
from vllm_exl3.pack.pack import Pack

__all__ = ["expert_codes", "expert_instances"]


def expert_codes(pack: Pack) -> list[Codes]:
    """The (half_bits, codebook) that occur together in some MoE layer of a pack, from its headers."""
    return sorted(
        {
            codes_of(pack.linears[key] for members in group.members.values() for key in members.values())
            for group in pack.experts.values()
        }
    )


def expert_instances(codes: Iterable[Codes], limits: GpuLimits) -> list[Instance]:
    """The kernels that layers of these codes use on a GPU, for any batch size."""
    found = []
    for kinds in codes:
        layer = Layer(tuple((2, *kind) for kind in kinds), 8, 8, 1, 1024, 1024)
        found += instances(layer, limits)
    return list(dict.fromkeys(found))
