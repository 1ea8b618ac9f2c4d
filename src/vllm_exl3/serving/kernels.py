"""Kernels of a loaded model, made ready before the engine serves: what has to be compiled is compiled now."""

import torch

from vllm_exl3.ops import backends
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.moe import moe_reference
from vllm_exl3.serving.report import Report

__all__ = ["prepare_kernels"]


def prepare_kernels(report: Report, device: torch.device) -> None:
    """Have the chosen backends prepare for every layer that a report knows.

    Args:
        report: of a model whose layers are all built.
        device: where they compute.
    """
    backend = backends.select("linear", device.type, linear_reference).backend
    if backend.prepare is not None:
        layouts = [layout for _, layout in report.layers.values()]
        backend.prepare(dict.fromkeys((layout.shards, layout.input_width) for layout in layouts), device)
    if not report.experts:
        return
    backend = backends.select("moe", device.type, moe_reference).backend
    if backend.prepare is not None:
        backend.prepare(dict.fromkeys(layout.kernel_key for layout in report.experts.values()), device)
