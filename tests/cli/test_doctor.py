"""What the commands around kernels say on a machine that serves on its CPU."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
import typer

from vllm_exl3.cli.doctor import _ROWS, _compared, _layers, doctor
from vllm_exl3.cli.doctor_experts import compare_experts
from vllm_exl3.cuda.linear import EVERY_FORM, choose_form
from vllm_exl3.cuda.survey import typical_limits
from vllm_exl3.ops import backends
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.moe import moe_reference
from vllm_exl3.ops.shards import Shard

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One `vllm-exl3` command, in a shell that sets none of the plugin's variables but these."""
    command = [sys.executable, "-m", "vllm_exl3.cli", *arguments]
    # A test before this one may have loaded the plugin, which names its folder of counters in this environment.
    inherited = {name: value for name, value in os.environ.items() if "EXL3_" not in name}
    settings = {**inherited, "COLUMNS": "200", **environment}
    return subprocess.run(command, env=settings, capture_output=True, text=True, check=False)


def test_a_cpu_that_serves_is_no_failure() -> None:
    found = run("doctor", VLLM_EXL3_PRECISION="fast")
    assert found.returncode == 0, found.stdout
    assert "environment variables: VLLM_EXL3_PRECISION=fast\n" in found.stdout
    assert "27 kinds" in found.stdout and "FAIL" not in found.stdout
    assert "a tested release; all" in found.stdout
    assert "experts against the reference: 3 codebooks" in found.stdout


def test_experts_that_are_off_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    backends.select("moe", "cpu", moe_reference)
    native = backends.find("moe", "cpu", "native")
    assert native is not None
    wrong = dataclasses.replace(native, function=lambda *arguments: 1.05 * native.function(*arguments))
    find = backends.find
    monkeypatch.setattr(backends, "find", lambda op, *rest: wrong if op == "moe" else find(op, *rest))
    with pytest.raises(RuntimeError, match=r"codebook 3inst, 1 tokens: error [45]\."):
        compare_experts(torch.device("cpu"))


@pytest.mark.parametrize(("precision", "good", "bad"), [("default", 1.0009, 1.0011), ("fast", 1.012, 1.021)])
def test_fast_mode_may_err_by_what_it_costs(
    precision: str, good: float, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXL3_PRECISION", precision)
    layers = [Shard(8, 2, 256, 256, 0, 256)]
    said = _compared(lambda *call: good * linear_reference(*call), layers, torch.device("cpu"))
    assert said.startswith("1 kinds")
    with pytest.raises(RuntimeError, match="K=4 codebook 2 M=1: error"):
        _compared(lambda *call: bad * linear_reference(*call), layers, torch.device("cpu"))


def test_mistyped_variables_fail_without_a_traceback() -> None:
    found = run("doctor", VLLM_EXL3_LINEAR_KERNEL="natvie", VLLM_EXL3_CPU_ISA="avx1024")
    assert found.returncode == 1
    assert ": VLLM_EXL3_LINEAR_KERNEL='natvie'" in found.stdout and ": VLLM_EXL3_CPU_ISA='avx1024'" in found.stdout
    assert "Error" not in found.stdout  # the sentence says enough
    assert "Traceback" not in found.stderr


def test_a_mistyped_variable_alone_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_EXL3_LINEAR_KERNEL", "natvie")
    monkeypatch.setitem(doctor.__globals__, "_checks", lambda: iter(()))  # the module has the name of its function
    with pytest.raises(typer.Exit) as end:
        doctor()
    assert end.value.exit_code == 1
    assert capsys.readouterr().out.startswith("FAIL  environment variables: VLLM_EXL3_LINEAR_KERNEL='natvie': expected")


def test_an_architecture_that_does_not_exist_is_a_usage_error() -> None:
    found = run("precompile", "--arch", "sm_999")
    assert found.returncode == 2 and "sm_90a" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("linear", "--codebook", "qtip"), "--codebook"),
        (("kv", "--contexts", "many"), "--contexts"),
        (("kv", "--decode", "64,4"), "--decode"),
    ],
)
def test_a_bench_names_the_option_that_is_wrong(arguments: tuple[str, ...], option: str) -> None:
    found = run("bench", *arguments)
    assert found.returncode == 2 and f"Invalid value for {option}: {arguments[-1]}" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("architecture", ["sm_86", "sm_90a"])
def test_linears_of_few_tokens_are_compared_on_every_kernel(architecture: str) -> None:
    limits = typical_limits(architecture)
    for shard in _layers():
        narrow = {form for rows in EVERY_FORM if not (form := choose_form((shard,), rows, limits)).wide}
        assert narrow <= {choose_form((shard,), rows, limits) for rows in _ROWS}
