"""Which routed experts stay in GPU memory under a budget of bytes; the others lie in host memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_exl3.pack.stored import ExpertGroup, StoredLinear
from vllm_exl3.plan.partition import block_split

__all__ = ["LayerExperts", "expert_bytes", "resident_experts"]


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """The routed experts of one layer that a rank holds.

    Attributes:
        key: the layer's MLP in the checkpoint, such as ``model.layers.0.mlp``.
        nbytes: bytes of each expert's trellises on this rank, by the expert's number in the whole model.
        scales: bytes of their scales, which always stay on the GPU.
    """

    key: str
    nbytes: Mapping[int, int]
    scales: int = 0

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return sum(self.nbytes.values())


def expert_bytes(
    group: ExpertGroup, linears: Mapping[str, StoredLinear], local: Sequence[int], rank: int, ranks: int
) -> LayerExperts:
    """Bytes of trellises that a rank holds of one layer.

    Args:
        group: the layer's experts.
        linears: the pack's EXL3 linears.
        local: numbers of the experts that are this rank's.
        rank: tensor-parallel rank, among those that divide each expert.
        ranks: how many divide each expert.

    Raises:
        Exl3PackError: an expert has fewer blocks of channels than there are ranks.
    """
    sizes, scales = {}, 0
    for expert in local:
        total = 0
        for role, key in group.members[expert].items():
            linear = linears[key]
            inner = linear.in_features if role == "down" else linear.out_features
            outer = linear.out_features if role == "down" else linear.in_features
            share = block_split(inner, rank, ranks, where=group.key)[1]
            total += share * outer * linear.half_bits // 16
            scales += 2 * (share + outer)
        sizes[expert] = total
    return LayerExperts(group.key, sizes, scales)


def resident_experts(
    layers: Sequence[LayerExperts], budget: int, usage: Mapping[str, Sequence[int]] | None = None
) -> dict[str, frozenset[int]]:
    """The experts that stay on the GPU, by layer.

    Without statistics every layer keeps the same share of its experts, those with the lowest numbers. With statistics,
    those with the most routed slots per byte stay, whichever layer they are of.

    Args:
        layers: what there is to place.
        budget: bytes of trellises that may stay.
        usage: routed slots of each expert, by layer and number in the whole model.
    """
    candidates = []
    for index, layer in enumerate(layers):
        counts = usage.get(layer.key, ()) if usage is not None else ()
        for ordinal, (expert, nbytes) in enumerate(sorted(layer.nbytes.items())):
            used = counts[expert] / nbytes if expert < len(counts) else 0.0
            candidates.append((-used, ordinal / len(layer.nbytes), index, expert, nbytes))
    chosen: dict[str, set[int]] = {layer.key: set() for layer in layers}
    left = budget
    for _, _, index, expert, nbytes in sorted(candidates):
        if nbytes <= left:
            left -= nbytes
            chosen[layers[index].key].add(expert)
    return {key: frozenset(experts) for key, experts in chosen.items()}
