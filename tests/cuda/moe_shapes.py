"""Layers of routed experts without tensors, whose launches tests look at."""

from vllm_exl3.cuda.moe_geometry import Layer
from vllm_exl3.cuda.survey import typical_limits
from vllm_exl3.pack.stored import Codebook

MUL1, MCG = int(Codebook.MUL1), int(Codebook.MCG)
H200 = typical_limits("sm_90a")
UNIFORM = tuple((projection, 8, MUL1) for projection in range(3))


def layer(kinds: tuple[tuple[int, int, int], ...] = UNIFORM, experts: int = 128, total: int = 128) -> Layer:
    return Layer(kinds, experts, total, 8, 2048, 768)


LAYERS = {
    "mul1": layer(),
    "mcg": layer(tuple((projection, 6, MCG) for projection in range(3))),
    "mixed": layer(((0, 4, MUL1), (1, 16, MUL1), (2, 6, MCG))),
    "no gate": layer(((0, 6, MUL1), (1, 5, MUL1))),
    "expert parallel": layer(experts=16),
    "few experts": Layer(UNIFORM, 2, 2, 1, 200, 320),
}
