"""Where one kernel or tile hands over to the next as the number of tokens grows, and whether time jumps there.

Used by ``gpu_prefill.py --cliffs``.
"""

import itertools

from vllm_exl3.cuda import gemm, linear, prefill
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.gemm_plan import plan_gemm
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.cuda.prefill_input import input_instances
from vllm_exl3.cuda.prefill_plan import FINISH, PrefillArgs, choose_partition, choose_tile, kernel, plan_prefill
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import Codebook

_CYCLES_A_MICROSECOND = 1500.0
"""Of an H200 under load."""


def used(shard: Shard, rows: int, limits: GpuLimits) -> tuple[str, list[Instance]]:
    """What serves a number of tokens: its name, and its kernels."""
    layer, width = (shard,), shard.in_features
    if (int8 := gemm.choose(layer, rows, limits)) is not None:
        multiplied = plan_gemm(layer, rows, width, limits, int8=int8)
        tokens = PrefillArgs.from_buffer_copy(multiplied.arguments).tile_rows
        return f"gemm{tokens}", [multiplied.transform.instance, multiplied.instance]
    if not prefill.serves(layer, rows, limits):
        form = linear.choose_form(layer, rows, limits)
        return form.name, linear.plan(layer, min(rows, form.tile_rows), width, form, limits).instances
    window, names, instances = prefill.window_rows(layer, rows), [], [*input_instances(limits), FINISH]
    for first in range(0, rows, window):
        plan = plan_prefill(layer, min(rows - first, window), width, limits)
        names.append(f"prefill{PrefillArgs.from_buffer_copy(plan.arguments).tile_rows}")
        instances.append(plan.instance)
    return names[0], instances


def counts_around(shard: Shard, limits: GpuLimits) -> list[int]:
    """1, 2, 4, … 16384 tokens, and those on both sides of every hand-over from one kernel or tile to another."""
    found, before = {2**power for power in range(15)}, ""
    for rows in (*range(1, 1025), *range(1025, 16385, 64)):
        name, _ = used(shard, rows, limits)
        if name != before and before:
            found |= {rows - 1, rows}
        before = name
    return sorted(found)


def cliffs(rows: list[dict[str, object]], limits: GpuLimits) -> list[str]:
    """Neighbours of which the larger batch is faster than the smaller by a tenth, or too slow.

    Too slow is by more than a tenth beyond its size, and by more than the model gives one more row of tiles, nothing
    added.

    Args:
        rows: results of one K and codebook for each shape: ``in``, ``out``, ``m``, ``us``.
        limits: of the GPU that they are from.
    """
    found = []
    cells: dict[tuple[object, ...], dict[int, float]] = {}
    for row in rows:
        if row["kernel"] == "native":
            key = (row["in"], row["out"], row["bits"], row["codebook"])
            cells.setdefault(key, {})[int(str(row["m"]))] = float(str(row["us"]))
    for key, times in cells.items():
        for (m1, t1), (m2, t2) in itertools.pairwise(sorted(times.items())):
            grown = max(1.1 * t1 * m2 / m1, t1 + _tile_step(int(str(key[0])), int(str(key[1])), m2, limits))
            if t2 < 0.9 * t1 or t2 > grown:
                found.append(f"{key}: {m1} → {m2} tokens take {t1:.1f} → {t2:.1f} µs")
    return found


def _tile_step(width: int, height: int, rows: int, limits: GpuLimits) -> float:
    """Microseconds that the model gives one row of the tiles that serve ``rows`` tokens; 0 below the prefill kernel."""
    shard = Shard(8, Codebook.MUL1, width, height, 0, height)
    if gemm.choose((shard,), rows, limits) is not None or not prefill.serves((shard,), rows, limits):
        return 0.0
    tokens, n_tiles = choose_tile(rows, -(-height // 256), width // 64, limits), -(-height // 256)
    used = kernel(tokens, limits)
    return (
        choose_partition(n_tiles, width // 64, tokens, used.clusters(limits), reduces=used.reduces).cost
        / _CYCLES_A_MICROSECOND
    )
