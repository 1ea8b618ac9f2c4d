"""What the tests of the CPU library share: every instance, the instruction sets that run here, references."""

import numpy as np
import pytest
import torch

from vllm_exl3.cpu.library import library, unavailable
from vllm_exl3.env import CPU_ISAS
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack import codec
from vllm_exl3.pack.stored import Codebook

INTEGER_RATES = (2, 4, 6, 8, 10, 12, 14, 16)
EVERY_KIND = [
    *((codebook, half_bits) for codebook in Codebook for half_bits in INTEGER_RATES),
    *((Codebook.MUL1, half_bits) for half_bits in (3, 5, 7)),
]
needs_library = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")


def instruction_sets() -> list[str]:
    """Those that this CPU runs, the best first; none without the library."""
    if unavailable() is not None:
        return []
    usable = [name for name in reversed(CPU_ISAS) if library().exl3_select_isa(name.encode()) == 0]
    library().exl3_select_isa(b"auto")
    return usable


ISAS = instruction_sets() or [pytest.param("none", marks=needs_library)]
"""What tests are parametrized by."""


class Layer:
    """A fused layer of random trellises, with its float64 mathematics."""

    def __init__(self, *shards: Shard, seed: int = 0, bias: torch.dtype | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.shards = shards
        self.layout = tuple(pack_shards(shards))
        self.trellises = [rng.integers(-(1 << 15), 1 << 15, shard.trellis_shape, np.int16) for shard in shards]
        self.suhs = [rng.standard_normal(shard.in_features).astype(np.float16) for shard in shards]
        self.svhs = [rng.standard_normal(shard.out_features).astype(np.float16) for shard in shards]
        columns = sum(shard.crop_size for shard in shards)
        self.bias = None if bias is None else torch.from_numpy(rng.standard_normal(columns)).to(bias)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Trellis, suh and svh, flat, as an op takes them."""
        flat = [np.concatenate([part.ravel() for part in parts]) for parts in (self.trellises, self.suhs, self.svhs)]
        trellis, suh, svh = (torch.from_numpy(part) for part in flat)
        return trellis, suh, svh

    def expected(self, x: torch.Tensor) -> np.ndarray:
        """``x`` times the decoded weights in float64."""
        outputs = []
        for shard, trellis, suh, svh in zip(self.shards, self.trellises, self.suhs, self.svhs, strict=True):
            weight = codec.dense_weight(trellis, shard.half_bits, Codebook(shard.codebook), suh, svh)
            columns = slice(shard.crop_start, shard.crop_start + shard.crop_size)
            outputs.append(x.double().numpy() @ weight[: x.shape[1], columns])
        y = np.concatenate(outputs, axis=1)
        return y if self.bias is None else y + self.bias.double().numpy()


def whole(codebook: Codebook, half_bits: int, in_features: int, out_features: int) -> Shard:
    """A shard that returns all its columns."""
    return Shard(half_bits, codebook, in_features, out_features, 0, out_features)


def relative_error(y: torch.Tensor, expected: np.ndarray) -> float:
    """Frobenius norm of the difference over that of the expectation."""
    return float(np.linalg.norm(y.double().numpy() - expected) / np.linalg.norm(expected))
