"""What one process serves and how, as data: for ``vllm_exl3.runtime_diagnostics()`` and for workers over RPC.

Earlier EXL3 plugins had a function of this name; where one of its keys still means something, it is here under the
same name.
"""

from typing import Any

from vllm.platforms import current_platform

from vllm_exl3 import env
from vllm_exl3.env_planning import SPEC_SCHEDULE
from vllm_exl3.ops import backends
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.moe import moe_reference
from vllm_exl3.pack.stored import HALF_BITS
from vllm_exl3.plan.deepseek_v41 import plan_deepseek_v41
from vllm_exl3.plan.exllamav3_offload import OWN_ROUTE
from vllm_exl3.serving import report
from vllm_exl3.serving.offload import PARAMETERS, inspect_exl3_moe_uva_layer, uva_expert_offload_required

_BITS = [half / 2 for half in HALF_BITS]
"""Every K that experts may have."""

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
        "per_bit_native_policy_installed": True,
        "fused_temp_rows_actual": env.FUSED_TEMP_ROWS.get(),
        "fused_temp_rows_requested": env.FUSED_TEMP_ROWS.get(),
        "fused_temp_rows_override_active": bool(env.FUSED_TEMP_ROWS.given()),
        "fat_expert_threshold": env.FAT_THRESHOLD.get(),
        "fat_kernel_available": device != "cpu" and moe.backend.name == "native",
        "spec_schedule": SPEC_SCHEDULE.given()[0][1] if SPEC_SCHEDULE.given() else "<default>",
        "deepseek_v41": {"compat_installed": True, "recommended_tp4_ep4": plan_deepseek_v41().to_dict()},
        "cpu_offload": {"execution_available": False, "owner": "exllamav3", "note": OWN_ROUTE},
        "grouped_prefill": {
            "requested": env.GROUPED_PREFILL.get(),
            "supported_bits": _BITS,
            "max_rows_per_window": env.GROUPED_PREFILL_MAX_ROWS.get(),
            "execution_available": device != "cpu",
        },
        "mixed_k": {
            "tensor_level_mixed_k_within_layer": True,
            "heterogeneous_dispatch": moe.backend.name,
            "uniform_k_dispatch": moe.backend.name,
            "cudagraph_qualified": moe.backend.name == "native",
            "recommended_first_boot": "graphs",
            "legacy_shape_overlap_diagnostic": False,
        },
        "uva_expert_offload": {
            "requested": uva_expert_offload_required(),
            "guard_installed": True,
            "parameter_segments": list(PARAMETERS),
            "execution_model": "the kernels that serve resident experts read pinned host memory over the bus",
            "qualification": "docs/offload.md",
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
