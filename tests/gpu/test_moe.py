"""Routed experts on a GPU, against float64; skipped where torch sees none."""

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_moe_checks as checks_module
from gpu_moe_checks import Checks
from gpu_moe_layers import MUL1, random_layer

from vllm_exl3.cuda import moe
from vllm_exl3.cuda.moe_timing import random_routing

FEW = ("128 experts 2048×768 K4", "384 experts 5120×2304 K2..K8", "288 experts 4096×2048 K4 3INST")
FEW += ("128 experts 2688×1856 ReLU²", "32 experts 2880×2880 SwiGLU-OAI, biases")
"""Of the sizes of real models, those that every run looks at: all codebooks, a mix of rates, both other activations."""


def checks() -> Iterator[object]:
    """Every check, real models' sizes one by one; whole sweeps are slow."""
    for check in (checks_module.check_kinds, *checks_module.ALL):
        if check is not checks_module.check_shapes:
            slow = [pytest.mark.slow] if check is checks_module.check_every_kind else []
            yield pytest.param(check, id=check.__name__, marks=slow)
            continue
        for name in checks_module.SHAPES:
            shape = re.sub(r"[^0-9A-Za-z.]+", "-", name)
            marks = [] if name in FEW else [pytest.mark.slow]
            yield pytest.param(functools.partial(check, names=[name]), id=f"check_shapes {shape}", marks=marks)


@pytest.mark.parametrize("check", list(checks()))
def test_moe(check: Callable[[Checks, int], None]) -> None:
    seed = int.from_bytes(os.urandom(3), "little")
    torch.manual_seed(seed)
    found = Checks()
    check(found, seed)
    assert found.done
    assert not found.failed, f"seed {seed}: " + "\n".join(found.failed[:20])


@pytest.mark.parametrize(
    ("variable", "value", "tokens"),
    [("GROUPED_PREFILL_MAX_ROWS", "256", 2048), ("FUSED_TEMP_ROWS", "128", 1024)],
)
def test_windows_bound_what_is_allocated(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, tokens: int
) -> None:
    if variable == "FUSED_TEMP_ROWS":
        monkeypatch.setenv("VLLM_EXL3_GROUPED_PREFILL", "0")
    layer = random_layer(8, 1024, 512, [(4, MUL1)])
    x, route = torch.randn(tokens, 1024, device="cuda").half(), random_routing(tokens, 8, 2)

    def peak() -> tuple[torch.Tensor, int]:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = moe.moe(x, *layer.arguments(*route))
        return result, torch.cuda.max_memory_allocated() - before - result.nbytes

    whole, most = peak()
    monkeypatch.setenv(f"VLLM_EXL3_{variable}", value)
    parts, less = peak()
    assert less < 0.5 * most
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)


def test_no_tokens_give_no_rows() -> None:
    layer = random_layer(4, 256, 256, [(4, MUL1)])
    assert moe.moe(torch.empty(0, 256, device="cuda"), *layer.arguments(*random_routing(0, 4, 2))).shape == (0, 256)
