"""What gpu_prefill_cliffs.py takes for a cliff, and what it says serves a number of tokens."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from gpu_prefill_cliffs import _tile_step, cliffs, counts_around, used

from vllm_exl3.cuda import gemm, linear, prefill
from vllm_exl3.cuda.gemm_plan import GEMM_TILES
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.cuda.narrow import NARROW_32
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import Codebook

H200 = GpuLimits("sm_90a", 132, 232448, ((2, 66), (4, 32), (8, 15)))
SHAPE = (4096, 14336)


def _row(tokens: int, us: float, kernel: str = "native") -> dict[str, object]:
    return {"kernel": kernel, "in": SHAPE[0], "out": SHAPE[1], "bits": 4.0, "codebook": "mul1", "m": tokens, "us": us}


STEP = _tile_step(*SHAPE, 1024, H200)


@pytest.mark.parametrize(
    ("few", "many", "times", "found"),
    [
        (512, 1024, (100, 89.9), True),
        (512, 1024, (100, 90.1), False),
        (512, 1024, (100, 219), False),
        (512, 1024, (100, 221), True),
        (1023, 1024, (200, 1.1 * 200 * 1024 / 1023 - 0.1), False),
        (1023, 1024, (200, 200 + STEP - 0.1), False),
        (1023, 1024, (200, 200 + STEP + 0.1), True),  # a tile's step, and not a twentieth beside it
        (8, 16, (100, 221), True),  # below the prefill kernel there are no tiles whose step would count
    ],
)
def test_a_cliff_is_a_tenth_less_or_more_than_tokens_and_a_tile_explain(
    few: int, many: int, times: tuple[float, float], found: bool
) -> None:
    rows = [_row(few, times[0]), _row(many, times[1]), _row(many, 9e9, "cublas_bf16")]
    assert STEP > 0.1 * 200
    assert bool(cliffs(rows, H200)) == found


@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 14336), (8192, 28672)])
def test_every_number_of_tokens_is_named_for_the_kernel_that_serves_it(shape: tuple[int, int]) -> None:
    shard = Shard(8, Codebook.MUL1, *shape, 0, shape[1])
    for rows in (1, 4, 5, 16, 17, 24, 32, 33, 64):
        name, kernels = used(shard, rows, H200)
        if gemm.choose((shard,), rows, H200) is not None:
            assert name == f"gemm{min(tile for tile in GEMM_TILES if tile >= rows)}"
            assert set(kernels) <= set(gemm.instances((shard,), H200))
        elif not prefill.serves((shard,), rows, H200):
            form = linear.choose_form((shard,), rows, H200)
            assert name == form.name
            assert kernels == linear.plan((shard,), rows, shape[0], form, H200).instances
    assert (used(shard, 20, H200)[0] == NARROW_32.name) == (shape == (4096, 4096))
    assert {16, 17} <= set(counts_around(shard, H200))
