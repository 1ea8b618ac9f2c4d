"""Plan of a pack's experts on the CPU by ExLlamaV3: the contract of an earlier plugin's planner.

It decides by metadata alone. ``own_executor_available`` says whether this package executes experts on a CPU beside a
GPU, which it does for every codebook and bit rate (``VLLM_EXL3_EXPERTS=cpu``, docs/offload.md).
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["OWN_ROUTE", "CpuOffloadPlan", "plan_exllamav3_cpu_offload"]

OWN_ROUTE = (
    "VLLM_EXL3_EXPERTS=cpu: the CPU computes experts that are not in GPU memory; =host: the GPU reads them there"
)
"""This package's own way to serve models larger than the GPU."""

_MOST_BITS = 8
_V41 = "deepseekv41"


@dataclass(frozen=True)
class CpuOffloadPlan:
    """The answer.

    Attributes:
        architecture: as given.
        codebooks: lower case, each once, sorted.
        max_k: the largest K, where known.
        uniform_expert_biases: whether all experts have biases or none has, where known.
        exllamav3_architecture_available: whether ExLlamaV3 has the architecture, where known.
        exllamav3_metadata_candidate: nothing known speaks against ExLlamaV3's CPU experts.
        vllm_exl3_execution_available: always False: the published field, about that plugin.
        blockers: what speaks against it.
        warnings: what is not known.
        recommended_route: what to do.
        own_executor_available: whether this package can execute experts on a CPU beside a GPU.
        own_route: what this package offers instead.
    """

    architecture: str
    codebooks: tuple[str, ...]
    max_k: int | None
    uniform_expert_biases: bool | None
    exllamav3_architecture_available: bool | None
    exllamav3_metadata_candidate: bool
    vllm_exl3_execution_available: bool
    blockers: tuple[str, ...]
    warnings: tuple[str, ...]
    recommended_route: str
    own_executor_available: bool = True
    own_route: str = OWN_ROUTE

    def to_dict(self) -> dict[str, Any]:
        """All fields; tuples become lists."""
        found = asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def plan_exllamav3_cpu_offload(
    *,
    architecture: str,
    codebooks: str | Iterable[str] | None = None,
    max_k: int | None = None,
    uniform_expert_biases: bool | None = None,
    exllamav3_architecture_available: bool | None = None,
) -> CpuOffloadPlan:
    """Judge a pack by its metadata.

    Args:
        architecture: of config.json.
        codebooks: of the experts.
        max_k: the largest K of the experts.
        uniform_expert_biases: whether all of them have biases or none has.
        exllamav3_architecture_available: whether ExLlamaV3 has the architecture.
    """
    names = [codebooks] if isinstance(codebooks, str) else list(codebooks or ())
    books = tuple(sorted({name.strip().lower() for name in names if name.strip()}))
    blockers: list[str] = []
    warnings: list[str] = []
    if not architecture.strip():
        blockers.append("the architecture is empty")
    if exllamav3_architecture_available is False:
        blockers.append("ExLlamaV3 does not have this architecture")
    elif exllamav3_architecture_available is None:
        warnings.append("whether ExLlamaV3 has this architecture is not proven")
    if not books:
        blockers.append("the experts' codebook is not proven")
    elif books != ("mul1",):
        blockers.append(f"ExLlamaV3's CPU experts take mul1 only; this pack has {', '.join(books)}")
    _judge_bits(max_k, blockers, warnings)
    if uniform_expert_biases is False:
        blockers.append("some experts have biases and others have none")
    elif uniform_expert_biases is None:
        warnings.append("whether all experts have biases or none has is not proven")
    return CpuOffloadPlan(
        architecture=architecture,
        codebooks=books,
        max_k=max_k,
        uniform_expert_biases=uniform_expert_biases,
        exllamav3_architecture_available=exllamav3_architecture_available,
        exllamav3_metadata_candidate=not blockers,
        vllm_exl3_execution_available=False,
        blockers=tuple(blockers),
        warnings=tuple(warnings),
        recommended_route=_route(architecture, books, exllamav3_architecture_available, candidate=not blockers),
    )


def _judge_bits(max_k: object, blockers: list[str], warnings: list[str]) -> None:
    if max_k is None:
        warnings.append("the largest K of the experts is not proven")
    elif isinstance(max_k, bool) or not isinstance(max_k, int) or max_k <= 0:
        blockers.append(f"the largest K is {max_k!r}, no positive whole number")
    elif max_k > _MOST_BITS:
        blockers.append(f"the largest K is {max_k}, above {_MOST_BITS}")


def _route(architecture: str, books: tuple[str, ...], available: bool | None, *, candidate: bool) -> str:
    if _V41 in architecture.lower().replace("_", "").replace("-", "") and available is not True:
        return "complete a standalone port of the architecture to ExLlamaV3"
    if books != ("mul1",):
        return "produce a mul1 sibling pack"
    return "try it in ExLlamaV3, an external runtime" if candidate else "resolve the blockers"
