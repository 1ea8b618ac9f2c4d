"""Every environment variable this package reads, with its type, default and meaning.

All are called ``VLLM_EXL3_*``. A value that does not parse is an error naming the variable, its
value and what it takes: a typo must not silently change how a model is served.
"""

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from vllm_exl3.attention.shape import parse_decode_shape, parse_prefill_shape

__all__ = [
    "CACHE",
    "CPU_ISA",
    "EMBEDDING_KERNEL",
    "INT4_DECODE",
    "INT4_FA_PREFILL",
    "INT4_KV",
    "INT4_TILES",
    "LINEAR_KERNEL",
    "MOE_KERNEL",
    "NGRAM_CACHE_MIB",
    "NGRAM_KERNEL",
    "NGRAM_TABLE",
    "REQUIRE_UVA_EXPERTS",
    "VARIABLES",
    "Variable",
    "validate",
]

logger = logging.getLogger("vllm.exl3")

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


def _yes_or_no(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in values:
        raise ValueError(f"expected one of {', '.join(values)}")
    return values[text.lower()]


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return text == "1"


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


def _ngram_kernel(text: str) -> str:
    """Kernels by the names that earlier plugins used as well."""
    name = _choice("auto", "native", "torch", "exllamav3", "ext")(text)
    if name == "ext":
        name = "exllamav3" if importlib.util.find_spec("exllamav3") else "native"
        logger.info("VLLM_EXL3_NGRAM_KERNEL=ext means %s here", name)
    return "reference" if name == "torch" else name


def _mebibytes(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("expected a number of MiB, 0 or more")
    return int(text)


EMBEDDING_KERNEL = Variable(
    "VLLM_EXL3_EMBEDDING_KERNEL",
    "auto",
    _choice("auto", "native", "reference"),
    "Which kernels decode quantized token embeddings: auto takes the fastest that runs here; native are this "
    "package's, reference is plain PyTorch.",
)

NGRAM_KERNEL = Variable(
    "VLLM_EXL3_NGRAM_KERNEL",
    "auto",
    _ngram_kernel,
    "Which kernels decode rows of n-gram tables: auto takes the fastest that runs here; native are this package's, "
    "torch is plain PyTorch, exllamav3 that package's where it is installed beside a GPU, ext is another name for "
    "exllamav3 where it is installed, else for native.",
)

NGRAM_TABLE = Variable(
    "VLLM_EXL3_NGRAM_TABLE",
    "auto",
    _choice("auto", "resident", "pinned", "disk"),
    "Where n-gram tables lie: resident on the device, pinned in host memory that the GPU reads, or on disk, which "
    "needs --compilation-config without full CUDA graphs; auto takes resident if the model fits so, else pinned.",
)

NGRAM_CACHE_MIB = Variable(
    "VLLM_EXL3_NGRAM_CACHE_MIB",
    "256",
    _mebibytes,
    "Host memory in MiB for rows of an n-gram table on disk that were read before; 0 keeps none.",
)

REQUIRE_UVA_EXPERTS = Variable(
    "VLLM_EXL3_REQUIRE_UVA_EXPERTS",
    "0",
    _yes_or_no,
    "1 makes start-up refuse unless vLLM's UVA offloader has mapped the weights of all routed experts into host memory "
    "(docs/offload.md).",
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

INT4_KV = Variable(
    "VLLM_EXL3_INT4_KV",
    "1",
    _switch,
    "Serve vLLM's int4 KV cache (--kv-cache-dtype int4_per_token_head), of any model, with this package's attention; 0 "
    "leaves vLLM's own in place.",
    aliases=("VLLM_QUANTPACK_INT4_KV",),
)

INT4_DECODE = Variable(
    "VLLM_EXL3_INT4_DECODE",
    "auto",
    parse_decode_shape,
    "How decoding over the int4 KV cache is cut: tile,warps,segments (such as 64,4,auto; segments a power of two from "
    "16 to 128, or auto); auto takes what was measured for the shape.",
    aliases=("VLLM_QUANTPACK_INT4_DECODE",),
)

INT4_FA_PREFILL = Variable(
    "VLLM_EXL3_INT4_FA_PREFILL",
    "1",
    _switch,
    "Prefill chunks of 64 and more tokens over 8192 and more cached ones by FlashAttention on keys and values unpacked "
    "a stretch at a time; 0 leaves them to the Triton kernel.",
    aliases=("VLLM_QUANTPACK_INT4_FA_PREFILL",),
)

INT4_TILES = Variable(
    "VLLM_EXL3_INT4_TILES",
    "auto",
    parse_prefill_shape,
    "How the Triton prefill over the int4 KV cache is cut: rows,tile,warps,stages (such as 64,64,8,2); auto takes what "
    "was measured.",
    aliases=("VLLM_QUANTPACK_INT4_TILES",),
)

VARIABLES: tuple[Variable[object], ...] = (
    LINEAR_KERNEL,  # type: ignore[assignment]
    MOE_KERNEL,
    INT4_KV,
    INT4_DECODE,
    INT4_FA_PREFILL,
    INT4_TILES,
    EMBEDDING_KERNEL,
    NGRAM_KERNEL,
    NGRAM_TABLE,
    NGRAM_CACHE_MIB,
    REQUIRE_UVA_EXPERTS,
    CPU_ISA,
    CACHE,
)
"""All of them, for the doctor and the documentation."""


def validate() -> None:
    """Read every variable once, so that a typo stops start-up rather than a half-loaded model.

    Raises:
        ValueError: a variable is set to something it does not take.
    """
    for variable in VARIABLES:
        variable.get()
