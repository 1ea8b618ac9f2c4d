"""Every environment variable this package reads, with its type, default and meaning.

All are called ``VLLM_EXL3_*``. A value that does not parse is an error naming the variable, its
value and what it takes: a typo must not silently change how a model is served.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["CACHE", "CPU_ISA", "LINEAR_KERNEL", "MOE_KERNEL", "VARIABLES", "Variable", "validate"]

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable.

    Attributes:
        name: ``VLLM_EXL3_…``.
        default: the text that an unset variable stands for.
        parse: turns the text into a value; raises ValueError saying what it takes.
        help: one sentence for ``vllm-exl3 doctor`` and ``docs/environment.md``.
        aliases: older names for the same setting; the new name wins where both are set.
    """

    name: str
    default: str
    parse: Callable[[str], T]
    help: str
    aliases: tuple[str, ...] = ()

    def get(self) -> T:
        """The current value.

        Raises:
            ValueError: the variable is set to something it does not take.
        """
        for name in (self.name, *self.aliases):
            text = os.environ.get(name)
            if text is not None and text.strip():
                return self._parse(name, text.strip())
        return self._parse(self.name, self.default)

    def _parse(self, name: str, text: str) -> T:
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{name}={text!r}: {error}") from None


def _choice(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in values:
            raise ValueError(f"expected one of {', '.join(values)}")
        return text.lower()

    return parse


LINEAR_KERNEL = Variable(
    "VLLM_EXL3_LINEAR_KERNEL",
    "auto",
    _choice("auto", "native", "exllamav3", "reference"),
    "Which kernels serve the linears: auto takes the fastest that runs here; native are this package's, exllamav3 that "
    "package's where it is installed beside a GPU (for comparison), reference is plain PyTorch.",
)

MOE_KERNEL = Variable(
    "VLLM_EXL3_MOE_KERNEL",
    "auto",
    _choice("auto", "native", "exllamav3", "reference"),
    "Which kernels serve routed experts: auto takes the fastest that runs here; native are this package's, on CPUs; "
    "reference is plain PyTorch.",
)

CPU_ISA = Variable(
    "VLLM_EXL3_CPU_ISA",
    "auto",
    _choice("auto", "scalar", "avx2", "avx512", "avx512_vnni", "avx512_vbmi"),
    "Which instruction set the CPU kernels use: auto takes the best that the CPU runs; scalar, avx2, avx512, "
    "avx512_vnni and avx512_vbmi are for comparison.",
)

CACHE = Variable(
    "VLLM_EXL3_CACHE",
    "",
    str,
    "Folder for compiled GPU kernels; empty means the user's cache folder.",
    aliases=("VLLM_QUANTPACK_CACHE",),
)

VARIABLES: tuple[Variable[object], ...] = (LINEAR_KERNEL, MOE_KERNEL, CPU_ISA, CACHE)  # type: ignore[assignment]
"""All of them, for the doctor and the documentation."""


def validate() -> None:
    """Read every variable once, so that a typo stops start-up rather than a half-loaded model.

    Raises:
        ValueError: a variable is set to something it does not take.
    """
    for variable in VARIABLES:
        variable.get()
