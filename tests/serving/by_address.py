"""A stand-in for a GPU on this machine: a MoE backend that finds trellises by address, as the CUDA kernels do."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import vllm_exl3.cpu.moe
import vllm_exl3.cuda.backend  # noqa: F401  backends that register later would undo the choices made here
from vllm_exl3.ops import backends
from vllm_exl3.ops.experts import pack_table, unpack_expert
from vllm_exl3.ops.moe import MoECall, moe_reference
from vllm_exl3.serving import expert_tiers

__all__ = ["moe_by_address", "pretend_gpu", "words_at"]

GPU_BYTES = 1 << 34


def words_at(address: int, count: int) -> torch.Tensor:
    """A copy of int16 words of this process."""
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_int16 * count).from_address(address)).copy())


def moe_by_address(x: torch.Tensor, *arguments: Any, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """The op in plain PyTorch, on trellises that are fetched from wherever the table's offsets lead."""
    call = MoECall(*arguments)
    bases = (call.w13_trellis.data_ptr(), call.w2_trellis.data_ptr())
    flat: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    taken, experts = [0, 0], []
    for row in call.table.tolist():
        parts = unpack_expert(row)
        placed = []
        for index, part in enumerate(parts):
            down = int(index == len(parts) - 1)
            flat[down].append(words_at(bases[down] + 2 * part.trellis, part.trellis_words))
            values = {name: getattr(part, name) for name in part.__dataclass_fields__}
            placed.append(type(part)(**{**values, "trellis": taken[down]}))
            taken[down] += part.trellis_words
        experts.append(placed)
    changed = call._replace(w13_trellis=torch.cat(flat[0]), w2_trellis=torch.cat(flat[1]), table=pack_table(experts))
    if out_dtype is not None:  # the CUDA kernels round once, where they store
        return moe_reference(x.float(), *changed).to(out_dtype)
    return moe_reference(x, *changed)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, kernel: str = "native") -> None:
    """Let experts be placed as on a GPU, and run by `moe_by_address`."""
    monkeypatch.setattr(expert_tiers, "current_platform", SimpleNamespace(device_type="cuda"))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda *_: (GPU_BYTES // 2, GPU_BYTES))
    for device, name in (("cuda", kernel), ("cpu", "by_address")):
        backend = backends.Backend("moe", device, name, moe_by_address, lambda: None)
        monkeypatch.setitem(backends._choices, ("moe", device), backends.Choice(backend))
