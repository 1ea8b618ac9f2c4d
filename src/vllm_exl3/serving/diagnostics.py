"""What one process serves and how, as data: for ``vllm_exl3.runtime_diagnostics()`` and for workers over RPC.

Earlier EXL3 plugins had a function of this name; where one of its keys still means something, it is here under the
same name.
"""

from typing import Any

from vllm.platforms import current_platform

from vllm_exl3 import env
from vllm_exl3.ops import backends
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.moe import moe_reference
from vllm_exl3.serving import report
from vllm_exl3.serving.offload import PARAMETERS, inspect_exl3_moe_uva_layer, uva_expert_offload_required

__all__ = ["WorkerExtension", "runtime_diagnostics", "worker_diagnostics"]


def runtime_diagnostics() -> dict[str, Any]:
    """Models, kernels, calls and settings of this process; plain values that JSON takes.

    With the default engine, models are in the worker processes: ask them with ``collective_rpc``.
    """
    device = current_platform.device_type or "cpu"
    moe = backends.select("moe", device, moe_reference)
    return {
        **report.runtime_diagnostics(),
        "linear_backend": backends.select("linear", device, linear_reference).backend.name,
        "moe_backend": moe.backend.name,
        "native_available": moe.backend.name == "native" or "native" not in moe.declined,
        "native_row_caps": {str(bits): cap.get() for bits, cap in env.NATIVE_MOE_MAX_ROWS_BY_BITS.items()},
        "fused_temp_rows_actual": env.FUSED_TEMP_ROWS.get(),
        "fat_expert_threshold": env.FAT_THRESHOLD.get(),
        "grouped_prefill": {
            "requested": env.GROUPED_PREFILL.get(),
            "max_rows_per_window": env.GROUPED_PREFILL_MAX_ROWS.get(),
            "execution_available": device != "cpu",
        },
        "mixed_k": {"tensor_level_mixed_k_within_layer": True},
        "uva_expert_offload": {
            "requested": uva_expert_offload_required(),
            "guard_installed": True,
            "parameter_segments": list(PARAMETERS),
            "layers": {
                where: inspect_exl3_moe_uva_layer(layer).as_dict()
                for model in report.reports()
                for where, layer in model.built_experts()
            },
        },
        "environment": {variable.name: _plain(variable.get()) for variable in env.VARIABLES},
    }


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def worker_diagnostics(worker: object) -> dict[str, Any]:
    """The same from a worker: ``llm.collective_rpc(vllm_exl3.serving.diagnostics.worker_diagnostics)``.

    vLLM sends functions to other processes only with ``VLLM_ALLOW_INSECURE_SERIALIZATION=1``; `WorkerExtension` does
    without.
    """
    return runtime_diagnostics()


class WorkerExtension:
    """Gives workers a method for it: ``--worker-extension-cls vllm_exl3.serving.diagnostics.WorkerExtension``."""

    def exl3_diagnostics(self) -> dict[str, Any]:
        """The diagnostics of this worker's process, for ``llm.collective_rpc("exl3_diagnostics")``."""
        return runtime_diagnostics()
