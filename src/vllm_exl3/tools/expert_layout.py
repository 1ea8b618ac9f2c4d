"""Where the projections of a MoE layer without a pack lie in the op's flat tensors: for tests and benchmarks."""

from collections.abc import Sequence

from vllm_exl3.ops.experts import Projection
from vllm_exl3.pack.stored import pad_to_block

__all__ = ["lay_out_experts"]


def lay_out_experts(
    experts: int,
    hidden: int,
    intermediate: int,
    kinds: Sequence[tuple[float, int]],
    *,
    gated: bool = True,
    bias: bool = False,
) -> tuple[list[list[Projection]], dict[str, tuple[int, int, int, int]]]:
    """Projections of every expert, each of its own kind in turn, and the elements of both groups of flat tensors.

    Args:
        experts: of the layer.
        hidden: channels that enter and leave, before padding.
        intermediate: channels between the projections, before padding.
        kinds: (K, codebook).
        gated: whether there are gates.
        bias: whether projections have biases.

    Returns:
        The rows of the op's table, and for ``w13`` and ``w2`` the sizes of trellis (16-bit words), suh, svh and bias.
    """
    inner, outer = pad_to_block(intermediate), pad_to_block(hidden)
    at = {"w13": [0, 0, 0, 0], "w2": [0, 0, 0, 0]}
    projections: list[list[Projection]] = []
    count = 0
    for _ in range(experts):
        row = []
        for down in (False, False, True) if gated else (False, True):
            name, inputs, outputs = ("w2", inner, outer) if down else ("w13", outer, inner)
            bits, codebook = kinds[count % len(kinds)]
            count += 1
            offsets = at[name]
            part = Projection(*offsets[:3], offsets[3] if bias else -1, round(2 * bits), int(codebook), inputs, outputs)
            row.append(part)
            for position, size in enumerate((part.trellis_words, inputs, outputs, hidden if down else intermediate)):
                offsets[position] += size
        projections.append(row)
    return projections, {name: (sizes[0], sizes[1], sizes[2], sizes[3]) for name, sizes in at.items()}
