"""The fast mode of prefill on a GPU with wgmma; skipped elsewhere."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_prefill_int8_checks as checks_module
from gpu_linear_checks import Checks


@pytest.mark.parametrize("check", checks_module.CHECKS, ids=lambda check: check.__name__)
def test_prefill_int8(check: Callable[[Checks, int], None]) -> None:
    seed = int.from_bytes(os.urandom(3), "little")
    torch.manual_seed(seed)
    checks = Checks()
    check(checks, seed)
    assert checks.done
    assert not checks.failed, f"seed {seed}: " + "\n".join(checks.failed[:20])


def test_the_op_takes_it_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_exl3.cuda import linear, prefill_int8
    from vllm_exl3.ops.shards import pack_shards

    shards = checks_module.SINGLE[-1]
    weights, layout = checks_module.weights_of(shards, 1), pack_shards(shards)
    x = torch.randn(prefill_int8.LEAST_ROWS, 1280, device="cuda")
    default = linear.linear(x, *weights, None, layout)
    monkeypatch.setenv("VLLM_EXL3_PRECISION", "fast")
    assert torch.equal(linear.linear(x, *weights, None, layout), checks_module.run(x, weights, None, shards))
    few = linear.linear(x[:-1], *weights, None, layout)
    monkeypatch.setenv("VLLM_EXL3_PRECISION", "default")
    assert torch.equal(few, linear.linear(x[:-1], *weights, None, layout))
    assert torch.equal(default, linear.linear(x, *weights, None, layout))
