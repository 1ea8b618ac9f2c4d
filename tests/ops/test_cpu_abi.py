"""Arguments that no layer has, straight at the C interface: each is refused before a byte is read.

`tests/fuzz/abi.cpp` makes such calls by the million, in a library built with sanitizers.
"""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fuzz.abi import build, build_against, run, run_guided
from tests.ops.cpu_cases import needs_library
from vllm_exl3.cpu.library import LinearCall, RowCall, ShardStruct, library

pytestmark = needs_library

GOOD = {"half_bits": 8, "codebook": 2, "in_features": 128, "out_features": 128, "crop_start": 0, "crop_size": 128}
BAD_SHARDS: list[dict[str, int]] = [
    *({"half_bits": value} for value in (0, 1, 9, 17, -8, (1 << 32) + 8, 1 << 63)),
    *({"codebook": value} for value in (-1, 3, (1 << 32) + 2)),
    *({"in_features": value} for value in (0, -128, 100)),
    *({"crop_start": value} for value in (-1, 1, (1 << 63) - 1)),
    *({"crop_size": value} for value in (-1, 129, (1 << 63) - 1)),
    {"crop_start": 64, "crop_size": (1 << 63) - 1},
]


def shards(*changes: dict[str, int]) -> ctypes.Array[ShardStruct]:
    return (ShardStruct * len(changes))(*(ShardStruct(**{**GOOD, **change}) for change in changes))


def text(code: int) -> str:
    return library().exl3_error_text(code).decode()


@pytest.mark.parametrize("bad", BAD_SHARDS, ids=str)
def test_a_shard_that_is_none_is_refused(bad: dict[str, int]) -> None:
    """With null pointers throughout: a refusal reads nothing."""
    for layout in (shards(bad), shards({}, bad)):
        call = LinearCall(shards=ctypes.addressof(layout), shard_count=len(layout), rows=1, columns=128)
        assert "not those of an EXL3 linear" in text(library().exl3_linear(call))
        code = library().exl3_dequantize(ctypes.addressof(layout), len(layout), *(None,) * 3, 0, 0, None, 128, 1)
        assert "not those of an EXL3 linear" in text(code)


def test_shards_side_by_side_have_one_input_width() -> None:
    layout = shards({}, {"in_features": 256})
    code = library().exl3_dequantize(ctypes.addressof(layout), 2, *(None,) * 3, 0, 0, None, 256, 1)
    assert "not those of an EXL3 linear" in text(code)


@pytest.mark.parametrize("bad", [{"rows": -1}, {"columns": -1}], ids=str)
def test_negative_sizes_are_refused(bad: dict[str, int]) -> None:
    layout = shards({})
    call = LinearCall(**{"shards": ctypes.addressof(layout), "shard_count": 1, "rows": 1, "columns": 128, **bad})
    assert "negative" in text(library().exl3_linear(call))
    assert "negative" in text(library().exl3_hadamard(None, -1, 1))


def row_call(kind: int, /, **changes: Any) -> RowCall:
    """A sound call of each kind that reads row 1 of a table of two."""
    width = {0: 300, 1: 300, 2: 300, 3: 160}[kind]
    groups = {0: 1, 1: 3, 2: 2, 3: 1}[kind]
    zeros = np.zeros(1 << 14, np.uint8)
    ids, offsets, out = np.ones(1, np.int64), np.zeros(4, np.int64), np.zeros(width, np.float32)
    call = RowCall(count=1, rows=2, width=width, groups=groups, kind=kind, bits=4, threads=1)
    call.table = call.scales = zeros.ctypes.data
    call.ids, call.offsets, call.out = ids.ctypes.data, offsets.ctypes.data, out.ctypes.data
    call.held = zeros, ids, offsets, out
    for name, value in changes.items():
        setattr(call, name, call.ids if value is Ellipsis else value)
    return call


@pytest.mark.parametrize("kind", range(4))
def test_a_row_call_that_fits_no_table_is_refused(kind: int) -> None:
    assert library().exl3_gather_rows(row_call(kind)) == 0
    bad: list[dict[str, Any]] = [{"width": 0}, {"width": -1}, {"groups": 0}, {"count": -1}, {"kind": 4}, {"kind": -1}]
    if kind < 2:
        bad += [{"groups": 4}, {"groups": 2 if kind else 0}]
    if kind < 3:
        bad += [{"index": ...}]  # these kinds take rows by their ids, which nothing would have checked then
    else:
        bad += [{"first_row": -1}, {"first_row": (1 << 63) - 1}]
    for change in bad:
        assert "not those of the row codec" in text(library().exl3_gather_rows(row_call(kind, **change))), change


def test_an_id_outside_the_table_is_refused() -> None:
    for kind in range(4):
        for wrong in (-1, 2, (1 << 63) - 1, -(1 << 63)):
            call = row_call(kind)
            call.held[1][0] = wrong
            assert "outside the table" in text(library().exl3_gather_rows(call))


def test_weights_that_are_no_numbers_are_encoded_as_zeros() -> None:
    """Their error says so; the conversion of such a number to an integer is undefined in C++."""
    trellises, errors = [], []
    for value in (np.nan, 0):
        weights, trellis, error = (
            np.full((128, 128), value, np.float32),
            np.zeros(1 << 13, np.uint16),
            ctypes.c_double(),
        )
        code = library().exl3_encode(
            weights.ctypes.data, 128, 128, 128, 4, 2, trellis.ctypes.data, ctypes.addressof(error), 1
        )
        assert code == 0
        trellises.append(trellis)
        errors.append(error.value)
    assert (trellises[0] == trellises[1]).all() and np.isnan(errors[0]) and errors[1] >= 0


THREADS = """
import ctypes, resource
import numpy as np
from vllm_exl3.cpu.library import library
code = library()
values = np.random.default_rng(0).standard_normal(128 * 4096).astype(np.float32)
once, again = values.copy(), values.copy()
assert code.exl3_hadamard(once.ctypes.data, 4096, 1) == 0
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), used + (1 << 20)))
status = code.exl3_hadamard(again.ctypes.data, 4096, 4)
print(status, bool((once == again).all()))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_where_no_thread_can_be_started_the_caller_does_the_work() -> None:
    result = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["0", "True"], result.stderr[-500:]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The caller of the installed library."""
    return build_against(Path(library()._name), tmp_path_factory.mktemp("abi"))


def test_a_share_of_the_calls_in_the_installed_library(caller: Path) -> None:
    """Between pages that may not be touched, beside guard bytes, and for a sample beside the scalar instruction set."""
    done = run(caller, inputs=20_000, seed=2)
    assert done.report is None, done.report
    functions = {"linear", "dequantize", "hadamard", "gather_rows", "moe", "launch"}
    assert done.inputs == 20_000 and all(done.computed[name] and done.refused[name] for name in functions)
    assert done.compared["linear"] and done.compared["gather_rows"] and done.compared["moe"]
    assert run(caller, inputs=500, seed=2).computed == run(caller, inputs=500, seed=2).computed


FAULTS = {
    "accepts": "exl3_gather_rows",
    "refuses": "exl3_gather_rows",
    "writes beyond": "a signal|a byte beside a buffer",
    "writes before": "a signal|a byte beside a buffer",
    "reads beyond": "a signal",
    "depends on what was there": "exl3_gather_rows",
    "writes between rows": "exl3_linear",
    "differs by instruction set": "scalar code differs",
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that does wrong before the installed one."""
    made = tmp_path_factory.mktemp("abi") / "faulty.so"
    source = Path(__file__).parents[1] / "fuzz" / "abi_faults.cpp"
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(made), "-ldl"], check=True)
    return made


@pytest.mark.parametrize("fault", FAULTS)
def test_calls_that_do_wrong_are_found(fault: str, caller: Path, faulty: Path) -> None:
    done = run(caller, inputs=20_000, FAULT=fault, LD_PRELOAD=str(faulty))
    assert re.search(f"FOUND: ({FAULTS[fault]})", done.report or ""), done.report
    assert done.found_by is not None
    again = run(caller, inputs=1, first=done.found_by, FAULT=fault, LD_PRELOAD=str(faulty))
    assert again.found_by == done.found_by, "an input does the same whatever was called before it"


@pytest.mark.slow
def test_a_share_of_the_calls_under_sanitizers() -> None:
    done = run(build(Path(".cache/fuzz/abi")), inputs=200_000, seed=4)
    assert done.report is None, done.report
    assert done.calls > 200_000


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang")
def test_a_share_of_the_calls_that_libfuzzer_chooses(tmp_path: Path) -> None:
    done = run_guided(build(Path(".cache/fuzz/abi"), guided=True), tmp_path, inputs=100_000)
    assert done.report is None, done.report
    assert done.inputs == 100_000
