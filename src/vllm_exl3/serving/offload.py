"""Where vLLM's weight offloading has put a layer's parameters, and the guard for experts kept in host memory.

vLLM moves parameters right after it has built a decoder layer, before anything is loaded. Its UVA offloader maps
pinned host memory into the GPU's address space and marks each parameter; without UVA it leaves ordinary CPU tensors
and copies them for every forward. ``VLLM_EXL3_REQUIRE_UVA_EXPERTS=1`` refuses anything but the first for experts.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.platforms import current_platform

from vllm_exl3 import env
from vllm_exl3.plan.placement import EXPERT_PARAMETERS

__all__ = [
    "PARAMETERS",
    "UvaExpertLayerStatus",
    "compute_device",
    "in_host_memory",
    "inspect_exl3_moe_uva_layer",
    "uva_expert_offload_required",
    "validate_exl3_moe_uva_layer",
]

PARAMETERS = EXPERT_PARAMETERS
"""The payloads of a layer's experts; markers and biases are too small to matter."""

_MARKER = "_vllm_is_uva_offloaded"

_REMEDY = (
    "Start with --offload-backend uva --cpu-offload-gb <GiB that hold the experts> --cpu-offload-params "
    + " ".join(PARAMETERS)
    + ", or unset VLLM_EXL3_REQUIRE_UVA_EXPERTS."
)


@dataclass(frozen=True)
class UvaExpertLayerStatus:
    """Where the payloads of one layer's experts are.

    Attributes:
        applicable: whether the layer has EXL3 experts.
        required: whether ``VLLM_EXL3_REQUIRE_UVA_EXPERTS`` asks for all of them in mapped host memory.
        uva_parameters: those that vLLM's UVA offloader has mapped.
        cpu_fallback_parameters: ordinary CPU tensors, which vLLM copies to the GPU for every forward.
        resident_parameters: those in the accelerator's own memory.
        placeholder_parameters: those without contents.
        missing_parameters: those that the layer lacks.
        parameter_segments: the names, as ``--cpu-offload-params`` takes them.
    """

    applicable: bool
    required: bool
    uva_parameters: tuple[str, ...] = ()
    cpu_fallback_parameters: tuple[str, ...] = ()
    resident_parameters: tuple[str, ...] = ()
    placeholder_parameters: tuple[str, ...] = ()
    missing_parameters: tuple[str, ...] = ()
    parameter_segments: tuple[str, ...] = PARAMETERS

    @property
    def fully_uva_offloaded(self) -> bool:
        """Whether all six payloads are mapped."""
        return len(self.uva_parameters) == len(self.parameter_segments)

    @property
    def partially_uva_offloaded(self) -> bool:
        """Whether some payloads are mapped and others are not."""
        return bool(self.uva_parameters) and not self.fully_uva_offloaded

    def as_dict(self) -> dict[str, Any]:
        """The status as plain data, with the two judgements."""
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {
            **lists,
            "fully_uva_offloaded": self.fully_uva_offloaded,
            "partially_uva_offloaded": self.partially_uva_offloaded,
        }


def uva_expert_offload_required() -> bool:
    """Whether ``VLLM_EXL3_REQUIRE_UVA_EXPERTS`` is on.

    Raises:
        ValueError: it is set to something it does not take.
    """
    return env.REQUIRE_UVA_EXPERTS.get()


def inspect_exl3_moe_uva_layer(layer: Any) -> UvaExpertLayerStatus:
    """Where the experts of a layer are; anything with the parameters as attributes will do.

    Args:
        layer: a ``RoutedExperts``, after vLLM has wrapped its decoder layer and before it is loaded or after.
    """
    found = {name: getattr(layer, name, None) for name in PARAMETERS}
    missing = tuple(name for name, parameter in found.items() if parameter is None)
    places: dict[str, list[str]] = {"uva": [], "cpu": [], "resident": [], "placeholder": []}
    for name, parameter in found.items():
        if parameter is not None:
            places[_place(parameter)].append(name)
    return UvaExpertLayerStatus(
        applicable=len(missing) < len(PARAMETERS),
        required=uva_expert_offload_required(),
        uva_parameters=tuple(places["uva"]),
        cpu_fallback_parameters=tuple(places["cpu"]),
        resident_parameters=tuple(places["resident"]),
        placeholder_parameters=tuple(places["placeholder"]),
        missing_parameters=missing,
    )


def validate_exl3_moe_uva_layer(layer: Any, where: str = "routed experts") -> UvaExpertLayerStatus:
    """Refuse a layer whose experts are not all mapped, where the environment asks for that.

    Args:
        layer: a ``RoutedExperts``.
        where: its name, for the message.

    Raises:
        RuntimeError: a payload is missing, a placeholder, an ordinary CPU tensor, or in the GPU's own memory.
    """
    status = inspect_exl3_moe_uva_layer(layer)
    if not status.required or not status.applicable or status.fully_uva_offloaded:
        return status
    if status.missing_parameters:
        found = f"no {_names(status.missing_parameters)}"
    elif status.placeholder_parameters:
        found = f"{_names(status.placeholder_parameters)} without contents"
    elif status.cpu_fallback_parameters:
        found = (
            f"{_names(status.cpu_fallback_parameters)} as ordinary CPU tensors, which vLLM copies to the GPU for every "
            "forward: UVA is unavailable here, or VLLM_WEIGHT_OFFLOADING_DISABLE_UVA is set"
        )
    elif status.partially_uva_offloaded:
        found = f"only {_names(status.uva_parameters)} mapped, and {_names(status.resident_parameters)} on the GPU"
    else:
        found = "none of its payloads mapped by vLLM's UVA offloader"
    raise RuntimeError(
        f"{where}: found {found}; VLLM_EXL3_REQUIRE_UVA_EXPERTS=1 expects all of {', '.join(PARAMETERS)} in mapped "
        f"host memory. {_REMEDY}"
    )


def compute_device(layer: torch.nn.Module) -> torch.device:
    """Where a layer runs, which is not where offloading keeps its parameters."""
    device = next(layer.parameters()).device
    if device.type != "cpu" or current_platform.device_type in ("", "cpu"):
        return device
    return torch.device(current_platform.device_type, torch.accelerator.current_device_index())


def in_host_memory(parameter: torch.nn.Parameter) -> bool:
    """Whether offloading keeps a parameter out of the accelerator's own memory; never where models run on the CPU."""
    return current_platform.device_type != "cpu" and _place(parameter) in ("uva", "cpu")


def _place(parameter: Any) -> str:
    if parameter.is_meta or parameter.numel() == 0:
        return "placeholder"
    if getattr(parameter, _MARKER, False):
        # The marker may outlive the mapping: a copy in the GPU's own memory would take what was to be saved.
        return "uva" if _is_host_memory(parameter) else "resident"
    return "cpu" if parameter.device.type == "cpu" else "resident"


def _is_host_memory(parameter: Any) -> bool:
    """Whether the driver says that an address is host memory; taken on trust where there is none to ask."""
    if not isinstance(parameter, torch.Tensor) or not parameter.is_cuda:
        return True
    from cuda.bindings import driver

    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    status, kind = driver.cuPointerGetAttribute(attribute, parameter.data_ptr())
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuPointerGetAttribute: {status}; cannot tell where an expert's weights are")
    return int(kind) == int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)


def _names(parameters: Iterable[str]) -> str:
    return ", ".join(parameters)
