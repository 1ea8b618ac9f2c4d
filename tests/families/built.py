"""Builds vLLM's class for NVIDIA GPUs on a CPU, loads a family's pack and its twin into it, and compares both.

Only the kernels of such a class need a GPU. What decides whether a pack is served right is all before them: which
stored tensors its modules ask for, and what the loaders make of them. So the platform is made to say that it is a
Hopper GPU whose memory is the CPU's, vLLM's own loader loads both models, and every linear, expert, head and parameter
of the pack's model is compared with the twin's.

Run in a process of its own, since vLLM settles its platform once: ``python -m tests.families.built [NAME ...]``.
"""

import importlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import tests.families.interpreted  # noqa: F401  # isort: skip, ahead of vllm: its classes define Triton's kernels

import torch
from vllm import platforms
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability, PlatformEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from benchmarks.engine_start import inspect_models_here
from tests.families.family import Family, write
from tests.families.stand_ins import stand_in

__all__ = ["build", "differences", "one"]

_BOUND = 1e-2
"""Of a matrix' relative error: the twin's weights are rounded to 16 bits, and so are activations of experts."""


class Hopper(CpuPlatform):
    """A GPU to whoever asks which classes and methods to take, a CPU to whoever allocates."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def current_device(cls) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        if selected_backend is AttentionBackendEnum.FLASHINFER:
            module: Any = importlib.import_module("vllm.v1.attention.backends.flashinfer")
            module._get_multi_ctas_kv_counter_buffer = lambda *_: None  # it lies on a GPU
            return selected_backend.get_path()
        if attn_selector_config.use_sparse:
            return AttentionBackendEnum.FLASHMLA_SPARSE.get_path()
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)

    @classmethod
    def get_cuda_runtime_major(cls) -> int:
        return 13


def build(folder: Path, options: dict[str, Any]) -> torch.nn.Module:
    """The loaded model of a folder, as vLLM's loader gives it to a worker."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.utils.network_utils import get_open_port
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.workspace import init_workspace_manager

    config = EngineArgs(
        str(folder), skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=4, **options
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, backend="gloo")
            initialize_model_parallel(1)
            init_workspace_manager(torch.device("cpu"))
        loader = get_model_loader(config.load_config)
        with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
            model: torch.nn.Module = loader.create_model(config, config.model_config)
            loader.load_weights(model, config.model_config)
            for module in model.modules():  # those of vLLM would lay weights out for kernels
                method = getattr(module, "quant_method", None)
                if type(method).__module__.startswith("vllm_exl3."):
                    method.process_weights_after_loading(module)
    return model


def differences(pack: torch.nn.Module, twin: torch.nn.Module, family: Family) -> dict[str, Any]:
    """What the two models hold.

    Args:
        pack: built from the pack.
        twin: built from its decoded twin.
        family: the row that both were made from.

    Returns:
        How many ``exl3`` layers, layers of ``experts`` and other ``parameters`` were compared; where they ``differ``.
    """
    ours = dict(pack.named_modules())
    counts = {"exl3": 0, "experts": 0, "parameters": 0}
    differ: list[str] = []
    for path, theirs in twin.named_modules():
        mine = ours.get(path)
        if path.endswith(".quant_method"):
            continue  # vLLM's methods for experts are modules
        if mine is None:
            differ.append(f"{path}: only the twin has it")
        elif hasattr(mine, "w13_trellis"):
            counts["experts"] += 1
            differ += _unlike(path, _experts_error(mine, theirs))
        else:
            if is_exl3 := hasattr(mine, "trellis"):
                counts["exl3"] += 1
                differ += _unlike(path, _matrix_error(mine, theirs, family.factor(path)))
            names = [name for name, _ in theirs.named_parameters(recurse=False) if not (is_exl3 and name == "weight")]
            counts["parameters"] += len(names)
            for name in names:
                differ += _unlike(f"{path}.{name}", _parameter_error(name, mine, theirs))
    return {**counts, "differ": differ}


def _unlike(where: str, error: float) -> list[str]:
    return [] if error < _BOUND else [f"{where}: error {error:.2g}"]


def _matrix_error(mine: Any, theirs: Any, factor: float) -> float:
    weight = getattr(theirs, "weight", None)
    if weight is None:
        return float("inf")
    return _error(mine.quant_method.dequantize_weight(mine).float(), weight.float() * factor)


def _parameter_error(name: str, mine: Any, theirs: Any) -> float:
    from vllm_exl3.serving.fused import padding_outputs

    found, wanted = getattr(mine, name, None), getattr(theirs, name)
    if found is None:
        return float("inf")
    if name == "weight" and (padding := padding_outputs(theirs)):
        rows = sum(theirs.output_partition_sizes[:-padding])  # no checkpoint has the others
        found, wanted = found[:rows], wanted[:rows]
    if found.is_meta and wanted.is_meta:
        return 0.0  # built and left out, such as a tower that no request may use
    return 0.0 if torch.equal(found, wanted) else _error(found.float(), wanted.float())


def _error(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    return float(torch.linalg.norm(one - other) / torch.linalg.norm(other))


def _experts_error(mine: Any, theirs: Any) -> float:
    """Of what each expert makes of two tokens, in float32; the largest."""
    from vllm_exl3.ops.activation import activate

    method, worst = mine.quant_method, 0.0
    call = method.activation
    x = torch.randn(2, theirs.w13_weight.shape[2], generator=torch.Generator().manual_seed(0))
    for expert, (first, second) in enumerate(zip(theirs.w13_weight, theirs.w2_weight, strict=True)):
        hidden = torch.nn.functional.linear(x, first.float())
        hidden = activate(call.name, hidden, call.alpha, call.beta, call.limit)
        wanted = torch.nn.functional.linear(hidden, second.float())
        found = method.apply(mine, x, torch.ones(2, 1), torch.full((2, 1), expert, dtype=torch.int32))
        worst = max(worst, _error(found, wanted))
    return worst


def one(name: str) -> dict[str, Any]:
    """Build and compare one row of `tests.families.gpu_rows`."""
    from tests.families.gpu_rows import GPU

    family = next(family for family in GPU if family.name == name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(family.variables)
        try:
            pack, twin = write(family, Path(folder))
            found = build(pack, dict(family.options))  # first: what vLLM's class lacks, the twin lacks too
            expected = build(twin, dict(family.options))
            return {"name": name, **differences(found, expected, family)}
        except BaseException as error:
            traceback.print_exc()
            return {"name": name, "fault": f"{type(error).__name__}: {error}"[:600]}


def _pretend() -> None:
    """Make this process one of a GPU: its platform, and the libraries that are imported and not called."""
    platforms._current_platform = Hopper()
    # What looks for compiled kernels while it is imported is imported as on a CPU.
    for name in ("compilation.passes.pass_manager", "model_executor.layers.quantization.online.base"):
        importlib.import_module(f"vllm.{name}")

    stand_in(("flashinfer", "torchvision"))
    torch.accelerator.empty_cache = lambda: None
    torch.cuda.Stream = torch.cuda.Event = SimpleNamespace  # type: ignore[misc, assignment]
    # As if vLLM's wheel were the one for GPUs, with its own copy of DeepGEMM.
    for name in ("utils.deep_gemm", "utils.import_utils"):
        importlib.import_module(f"vllm.{name}").has_deep_gemm = lambda: True  # type: ignore[attr-defined]
    inspect_models_here()
    Hopper._enum = PlatformEnum.CUDA
    for name in ("_vllm_fa2_C", "_vllm_fa3_C"):
        sys.modules[f"vllm.vllm_flash_attn.{name}"] = ModuleType(name)
    importlib.reload(importlib.import_module("vllm.v1.attention.backends.fa_utils"))
    stock = torch._ops._OpNamespace.__getattr__

    def kernel(self: Any, name: str) -> Any:
        """A kernel that layers look up as they are built."""
        return _no_kernel if self.name.startswith("_") and not name.startswith("_") else stock(self, name)

    torch._ops._OpNamespace.__getattr__ = kernel  # type: ignore[method-assign]


def _no_kernel(*_: Any, **__: Any) -> None:
    raise RuntimeError("a kernel for GPUs was called")


def main() -> int:
    """Compare rows in this process and print each."""
    _pretend()
    for name in sys.argv[1:]:
        print("RESULT", json.dumps(one(name)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
