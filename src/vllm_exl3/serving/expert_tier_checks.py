"""Settings that experts outside of GPU memory do not go together with, and host memory that there is not."""

from vllm.config import VllmConfig

from vllm_exl3 import env, host_memory
from vllm_exl3.cpu import library
from vllm_exl3.ops import backends
from vllm_exl3.ops.moe import moe_reference
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.wording import byte_size

__all__ = ["check_host_memory", "refuse_unserved"]

_REMEDY = "Lower what is kept there (a larger VLLM_EXL3_EXPERTS_GPU_GIB), use more GPUs, or free host memory."


def refuse_unserved(where: str, wanted: str, device: str, current: VllmConfig | None) -> None:
    """Refuse what experts in host memory do not go together with.

    Args:
        where: a layer, for the error.
        wanted: of ``VLLM_EXL3_EXPERTS``.
        device: on which vLLM runs the model.
        current: vLLM's configuration, where it is known.

    Raises:
        Exl3PackError: naming the two settings.
    """

    def refuse(found: str, expected: str, remedy: str) -> None:
        raise Exl3PackError(found=f"{env.EXPERTS.name}={wanted} {found}", expected=expected, where=where, remedy=remedy)

    if device != "cuda":
        refuse(
            f"on {device or 'no device'}",
            "a CUDA GPU, whose kernels read host memory",
            f"Unset {env.EXPERTS.name}: on a CPU, all experts are in host memory.",
        )
    kernel = backends.select("moe", "cuda", moe_reference).backend.name
    if kernel != "native":
        refuse(
            f"with {kernel} kernels for routed experts",
            "this package's own, which find each expert by its address",
            f"Set {env.MOE_KERNEL.name}=native, or {env.EXPERTS.name}=gpu.",
        )
    if wanted == "cpu" and (reason := library.unavailable()) is not None:
        refuse("without the C++ library", "its kernels for experts", reason)
    if env.REQUIRE_UVA_EXPERTS.get():
        refuse(
            f"with {env.REQUIRE_UVA_EXPERTS.name}=1",
            "one of the two: that one wants vLLM to keep experts in host memory",
            f"Unset {env.REQUIRE_UVA_EXPERTS.name}.",
        )
    if current is None:
        return
    offload = getattr(current, "offload_config", None)
    if offload is not None and (offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0):
        refuse(
            "with vLLM's own offloading (--cpu-offload-gb or --offload-group-size)",
            "one of the two: vLLM would move the parameters that kernels find host memory by",
            f"Leave vLLM's options out, or set {env.EXPERTS.name}=gpu.",
        )
    if "sharded" in str(current.load_config.load_format):
        refuse(
            f"with --load-format {current.load_config.load_format}",
            "a loader that hands over single tensors: a sharded state holds parameters only, and experts in host "
            "memory are none",
            "Serve the pack itself: --load-format auto.",
        )


def check_host_memory(where: str, nbytes: int, current: VllmConfig | None) -> None:
    """Refuse more than the host has, before anything is read: Linux would grant it, and kill the process later.

    Args:
        where: a layer, for the error.
        nbytes: of experts that this rank keeps there.
        current: vLLM's configuration, which knows the other ranks of this machine.

    Raises:
        Exl3PackError: naming what there is and what is needed.
    """
    ranks = current.parallel_config.local_world_size if current is not None else 1
    needed, there = nbytes * ranks, host_memory.available()
    if there is not None and needed > there:
        each = f", {byte_size(nbytes)} for each of {ranks} ranks" if ranks > 1 else ""
        raise Exl3PackError(
            found=f"{byte_size(there)} of host memory available",
            expected=f"{byte_size(needed)} for routed experts outside of GPU memory{each}",
            where=where,
            remedy=_REMEDY,
        )
