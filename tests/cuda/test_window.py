"""The device code that cuts trellis states out of words, compiled for the host and held against the format."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from vllm_exl3.cuda.compiler import kernel_sources
from vllm_exl3.pack.tile import unpack_states

HALF_BITS = (*range(2, 17, 2), 3, 5, 7)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
@pytest.mark.parametrize("half_bits", HALF_BITS)
def test_every_state_of_random_tiles(half_bits: int, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/window.cuh").write_text(kernel_sources()["base/window.cuh"])
    (tmp_path / "base/types.cuh").write_text("#pragma once\n")
    program = tmp_path / "states"
    source = Path(__file__).parent / "window_host.cpp"
    define = f"-DHALF_BITS_UNDER_TEST={half_bits}"
    subprocess.run(["g++", "-std=c++17", "-O1", define, f"-I{tmp_path}", str(source), "-o", str(program)], check=True)
    rng = np.random.default_rng(half_bits)
    tiles = rng.integers(0, 1 << 16, (50, 8 * half_bits), dtype=np.uint16)
    output = subprocess.run([str(program)], input=tiles.tobytes(), capture_output=True, check=True).stdout
    found = np.frombuffer(output, np.uint16).reshape(50, 256)
    np.testing.assert_array_equal(found, unpack_states(tiles.view(np.int16), half_bits))
