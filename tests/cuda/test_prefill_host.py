"""The prefill kernels' input side and ends of tiles, compiled for the host and held against the mathematics."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from vllm_exl3.cuda.compiler import kernel_sources
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.cuda.prefill_plan import PrefillArgs, plan_prefill
from vllm_exl3.ops.shards import Shard

GPU = GpuLimits("sm_90a", 12, 232448, ((2, 6),))

ASSEMBLY = {
    "cvt.f32.f16 ": "value = half_value(bits)",
    "cvt.rn.f16.f32": "bits = half_bits(value)",
    "cvt.rn.bf16.f32": "abort()",
    "cvt.rn.bf16x2": "abort()",
    "st.shared.f32": "memcpy(shared_base + address + 4 * OFFSET, &value, 4)",
    "cp.async.wait_all": "(void)0",
    "max.NaN.f32": "result = std::isnan(most) || std::isnan(value) ? NAN : max(most, fabsf(value))",
}
"""What stands for an instruction on the host; the packed conversion, which two places use, is matched by operands."""


def _host(text: str) -> str:
    def replace(match: re.Match[str]) -> str:
        statement = match[0]
        operands = re.findall(r'"=?[rfl]"\(((?:[^()]|\([^()]*\))*)\)', statement)
        if copied := re.search(r"cp\.async\.c[ag]\.shared\.global \[%0\], \[%1\], (\d+)", statement):
            return f"memcpy(shared_base + {operands[0]}, {operands[1]}, {copied[1]});"
        if "cvt.rn.f16x2.f32" in statement:
            return f"{operands[0]} = half_bits({operands[2]}) | u32(half_bits({operands[1]})) << 16;"
        known = [host for name, host in ASSEMBLY.items() if name in statement]
        return (known[0] if known else "abort()") + ";"

    text = re.sub(r"(extern )?__shared__ __align__.*? u8 .*?;", "", text)
    return re.sub(r"asm(?: volatile)?\s*\((?:[^;\"]|\"[^\"]*\")*\);", replace, text.replace("#pragma once", ""))


def _inlined(name: str, seen: set[str]) -> str:
    """A source with its headers in place, each once in the whole program."""

    def include(match: re.Match[str]) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        return _inlined(match[1], seen)

    return re.sub(r'#include "(.*?)"', include, _host(kernel_sources()[name]))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefill")
    seen: set[str] = set()
    (folder / "transform.h").write_text(_inlined("prefill/transform.cu", seen))
    (folder / "finish.h").write_text(_inlined("prefill/reduce.cu", seen))
    source, target = Path(__file__).parent / "prefill_host.cpp", folder / "prefill"
    subprocess.run(
        [
            "g++",
            "-std=c++17",
            "-O1",
            "-w",
            "-DINSTANCE_PARTIALS=HalfPartials",
            f"-I{folder}",
            str(source),
            "-o",
            str(target),
        ],
        check=True,
    )
    return target


def _hadamard(values: np.ndarray) -> np.ndarray:
    h = np.array([[1.0]])
    for _ in range(7):
        h = np.block([[h, h], [h, -h]])
    return (values.reshape(len(values), -1, 128) @ h / np.sqrt(128)).reshape(values.shape)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
@pytest.mark.parametrize(
    ("tokens", "rows", "ranges", "magnitude"),
    [(64, 70, 11, 1.0), (64, 5, 0, 1e-4), (256, 70, 5, 30.0), (256, 300, None, 1.0)],
)
def test_a_fused_layer(program: Path, tokens: int, rows: int, ranges: int | None, magnitude: float) -> None:
    shards = (Shard(8, 2, 1280, 384, 0, 384), Shard(6, 2, 1280, 256, 30, 200))
    rng = np.random.default_rng(rows + tokens)
    width = 1208  # the rest of 1280 counts as zero
    x = (rng.standard_normal((rows, width)) * magnitude).astype(np.float16)
    suh = [(rng.uniform(0.5, 1.5, 1280) * rng.choice([-1, 1], 1280)).astype(np.float16) for _ in shards]
    svh = [rng.uniform(0.5, 1.5, shard.out_features).astype(np.float16) for shard in shards]
    bias = rng.standard_normal(584).astype(np.float32)
    dense = rng.standard_normal((1280, 640)).astype(np.float32)
    plan = plan_prefill(shards, rows, width, GPU, tokens, ranges)
    arguments = PrefillArgs.from_buffer_copy(plan.arguments)
    transform = [plan.transform.grid[0], plan.transform.threads, plan.transform.shared]
    cut_tiles = arguments.n_tiles * arguments.row_tiles - arguments.whole_tiles
    finish = (cut_tiles * arguments.n_blocks, -(-tokens // 64)) if arguments.ranges else (0, 0)
    numbers = [tokens, plan.grid // plan.cluster, rows, *transform, *finish]
    data = [bytes(arguments), np.array(numbers, np.uint32), x, *suh, *svh, bias, dense]
    output = subprocess.run(
        [str(program)], input=b"".join(bytes(part) for part in data), capture_output=True, check=True
    )
    found = np.frombuffer(output.stdout, np.float32).reshape(rows, 584)

    expected, column = [], 0
    for shard, scales_in, scales_out in zip(shards, suh, svh, strict=True):
        wide = np.zeros((rows, 1280))
        wide[:, :width] = x.astype(np.float64) * scales_in[:width]
        y = _hadamard(_hadamard(wide) @ dense[:, column : column + shard.out_features]) * scales_out
        expected.append(y[:, shard.crop_start : shard.crop_start + shard.crop_size])
        column += shard.out_features
    exact = np.concatenate(expected, axis=1) + bias
    assert np.linalg.norm(found - exact) <= 5e-4 * np.linalg.norm(exact)
