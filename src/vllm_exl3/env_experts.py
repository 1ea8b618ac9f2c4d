"""Environment variables that say where routed experts are kept and computed."""

from typing import Any

from vllm_exl3.env_variable import (
    Variable,
    VariableError,
    choice,
    file_in_a_folder,
    gibibytes_or_auto,
    threads_or_auto,
    whole,
)

__all__ = [
    "EXPERTS",
    "EXPERTS_CPU_ROWS",
    "EXPERTS_CPU_THREADS",
    "EXPERTS_GPU_GIB",
    "EXPERTS_STATS",
    "EXPERTS_VARIABLES",
    "check_experts",
]

EXPERTS = Variable(
    "VLLM_EXL3_EXPERTS",
    "gpu",
    choice("gpu", "host", "cpu", "auto"),
    "Where routed experts are kept when a GPU serves the model. gpu: all in its memory; host: as many as "
    "VLLM_EXL3_EXPERTS_GPU_GIB allows, the others in pinned host memory, which the GPU's kernels read over the bus, "
    "with the same results bit for bit; cpu: the same, but in steps of few tokens the CPU computes those others while "
    "the GPU computes its own; auto: as many in GPU memory as vllm-exl3 plan finds room for, the others in "
    "host memory (docs/offload.md).",
)

EXPERTS_GPU_GIB = Variable(
    "VLLM_EXL3_EXPERTS_GPU_GIB",
    "auto",
    gibibytes_or_auto,
    "How many GiB of routed experts' trellises each GPU keeps in its own memory. auto: none for "
    "VLLM_EXL3_EXPERTS=host and cpu, what is planned for auto. Their scales and biases, about 1 % more, always stay "
    "there.",
)

EXPERTS_STATS = Variable(
    "VLLM_EXL3_EXPERTS_STATS",
    "",
    file_in_a_folder,
    "File of routing statistics. If it exists when the model is loaded, the most used experts stay in GPU memory. "
    "While a GPU serves, routed slots are counted and added to it every minute and at the end. Empty: every layer "
    "keeps the same share of its experts, and nothing is counted.",
)

EXPERTS_CPU_ROWS = Variable(
    "VLLM_EXL3_EXPERTS_CPU_ROWS",
    "64",
    whole(1, 4096),
    "Tokens of a step up to which VLLM_EXL3_EXPERTS=cpu lets the CPU compute experts; for more the GPU reads them over "
    "the bus.",
)

EXPERTS_CPU_THREADS = Variable(
    "VLLM_EXL3_EXPERTS_CPU_THREADS",
    "auto",
    threads_or_auto,
    "Threads of each rank that compute experts with VLLM_EXL3_EXPERTS=cpu. auto: the processors that the process may "
    "use, but one, divided over the ranks of the machine.",
)

EXPERTS_VARIABLES: tuple[Variable[Any], ...] = (
    EXPERTS,
    EXPERTS_GPU_GIB,
    EXPERTS_STATS,
    EXPERTS_CPU_ROWS,
    EXPERTS_CPU_THREADS,
)
"""All of them."""


def check_experts() -> None:
    """Refuse a limit where nothing is limited.

    Raises:
        VariableError: naming both variables.
    """
    if EXPERTS.get() == "gpu" and EXPERTS_GPU_GIB.get() is not None:
        raise VariableError(
            f"{EXPERTS_GPU_GIB.name}={EXPERTS_GPU_GIB.given()[0][1]} limits what {EXPERTS.name}=gpu keeps in GPU "
            f"memory whole: set {EXPERTS.name}=host or auto, or unset the limit"
        )
