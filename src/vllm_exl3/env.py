"""Every environment variable this package reads, with its type, default and meaning; all are called ``VLLM_EXL3_*``."""

import functools
import os
from pathlib import Path
from typing import Any

from vllm_exl3.attention.shape import parse_decode_shape, parse_prefill_shape
from vllm_exl3.env_experts import (
    EXPERTS,
    EXPERTS_CPU_ROWS,
    EXPERTS_CPU_THREADS,
    EXPERTS_GPU_GIB,
    EXPERTS_STATS,
    EXPERTS_VARIABLES,
    check_experts,
)
from vllm_exl3.env_planning import PLANNING
from vllm_exl3.env_variable import (
    Variable,
    VariableError,
    choice,
    existing_or_new_folder,
    mebibytes_or_unlimited,
    ngram_kernel,
    rows_or_auto,
    whole,
    yes_or_no,
)

__all__ = [
    "CACHE",
    "CPU_ISA",
    "DECODE_LIMIT",
    "DEPENDENT_LAUNCH",
    "EMBEDDING_KERNEL",
    "EXPERTS",
    "EXPERTS_CPU_ROWS",
    "EXPERTS_CPU_THREADS",
    "EXPERTS_GPU_GIB",
    "EXPERTS_STATS",
    "FAT_THRESHOLD",
    "FUSED_TEMP_ROWS",
    "FUSION",
    "GROUPED_PREFILL",
    "GROUPED_PREFILL_MAX_ROWS",
    "INT4_DECODE",
    "INT4_FA_PREFILL",
    "INT4_KV",
    "INT4_TILES",
    "LINEAR_KERNEL",
    "METRICS_FOLDER",
    "MOE_KERNEL",
    "NATIVE_MOE_MAX_ROWS",
    "NATIVE_MOE_MAX_ROWS_BY_BITS",
    "NGRAM_CACHE_MIB",
    "NGRAM_KERNEL",
    "NGRAM_TABLE",
    "PRECISION",
    "RECONSTRUCT_MB",
    "REQUIRE_UVA_EXPERTS",
    "VARIABLES",
    "Variable",
    "VariableError",
    "batch_invariant",
    "user_cache",
    "validate",
]

LINEAR_KERNEL = Variable(
    "VLLM_EXL3_LINEAR_KERNEL",
    "auto",
    choice("auto", "native", "reconstruct", "exllamav3", "reference"),
    "Which kernels serve linears. auto: the fastest that can run here; native: this package's; reconstruct: decode to "
    "dense weights on a GPU and multiply with cuBLAS; exllamav3: that package's, if it is installed on a machine with "
    "a GPU; reference: plain PyTorch. The last three are for comparison.",
)

PRECISION = Variable(
    "VLLM_EXL3_PRECISION",
    "default",
    choice("default", "fast"),
    "Precision of the native kernels for linears on a GPU. default: the relative error of a linear is about 0.02 %; "
    "fast: int8 for mul1 weights where there is a kernel for it, which is faster, with an error of up to 1.2 % "
    "(docs/fast-mode.md).",
)

DEPENDENT_LAUNCH = Variable(
    "VLLM_EXL3_DEPENDENT_LAUNCH",
    "auto",
    choice("auto", "0", "1"),
    "Whether the kernels that torch.compile generates for an EXL3 model let the next kernel start before they end, so "
    "that it can fetch weights in the meantime (Inductor's triton.enable_pdl, on GPUs from Hopper on). auto: yes, but "
    "not with LoRA and not in models whose layers carry a state (Mamba, linear attention).",
)

FUSION = Variable(
    "VLLM_EXL3_FUSION",
    "auto",
    choice("auto", "0"),
    "Whether RMS norms and SiLU products are computed by the kernel that rotates the input of the EXL3 linear behind "
    "them: in the graphs that vLLM compiles, for 9 to 128 tokens, on Hopper. auto: where a kernel serves it. It costs "
    "a compilation more at a first start, and differs from 0 by the rounding that it leaves out.",
)

MOE_KERNEL = Variable(
    "VLLM_EXL3_MOE_KERNEL",
    "auto",
    choice("auto", "native", "exllamav3", "reference"),
    "Which kernels serve routed experts. auto: the fastest that can run here; native: this package's; exllamav3: that "
    "package's linears, one expert after another, if it is installed on a machine with a GPU; reference: plain "
    "PyTorch. The last two are for comparison.",
)

NATIVE_MOE_MAX_ROWS = Variable(
    "VLLM_EXL3_NATIVE_MOE_MAX_ROWS",
    "auto",
    rows_or_auto,
    "Largest number of tokens for which routed experts on a GPU use the decode path; longer inputs use the grouped "
    "prefill. 0: never; auto: chosen from measurements by the average number of tokens per expert. Other EXL3 plugins "
    "default to 8.",
)

NATIVE_MOE_MAX_ROWS_BY_BITS = {
    bits: Variable(
        f"VLLM_EXL3_NATIVE_MOE_MAX_ROWS_K{bits}",
        "auto",
        rows_or_auto,
        f"The same for layers with experts of K = {bits}{f' or {bits - 0.5:g}' if 1 < bits < 5 else ''}. auto: use the "
        f"variable without _K{bits}. In a layer with several bit rates, the smallest number applies.",
    )
    for bits in range(1, 9)
}

GROUPED_PREFILL = Variable(
    "VLLM_EXL3_GROUPED_PREFILL",
    "1",
    yes_or_no,
    "Whether inputs too long for the decode path use the grouped prefill on a GPU. 0: serve all with the decode path.",
)

GROUPED_PREFILL_MAX_ROWS = Variable(
    "VLLM_EXL3_GROUPED_PREFILL_MAX_ROWS",
    "8192",
    whole(1),
    "How many tokens the grouped prefill processes at once, which limits its scratch memory.",
)

FUSED_TEMP_ROWS = Variable(
    "VLLM_EXL3_FUSED_TEMP_ROWS",
    "2048",
    whole(1),
    "How many tokens the decode path processes at once, which limits its scratch memory.",
)

FAT_THRESHOLD = Variable(
    "VLLM_EXL3_FAT_THRESHOLD",
    "auto",
    rows_or_auto,
    "Experts with more tokens than this use the large tiles of the grouped prefill. auto: half a large tile, as "
    "measured. Other EXL3 plugins default to 256.",
)


_mebibytes = whole(0, 1 << 24)

RECONSTRUCT_MB = Variable(
    "VLLM_EXL3_RECONSTRUCT_MB",
    "256",
    _mebibytes,
    "Scratch memory in MiB into which VLLM_EXL3_LINEAR_KERNEL=reconstruct decodes a layer, some output columns at a "
    "time; at least one block of 128 columns is decoded.",
)

DECODE_LIMIT = Variable(
    "VLLM_EXL3_DECODE_LIMIT",
    "unlimited",
    mebibytes_or_unlimited,
    "How many MiB of weights a rank may decode while loading, for modules that vLLM builds or reads without "
    "quantization; start-up stops where they would take more. The report names them and what they take.",
)

EMBEDDING_KERNEL = Variable(
    "VLLM_EXL3_EMBEDDING_KERNEL",
    "auto",
    choice("auto", "native", "reference"),
    "Which kernels decode quantized token embeddings. auto: the fastest that can run here; native: this package's; "
    "reference: plain PyTorch.",
)

NGRAM_KERNEL = Variable(
    "VLLM_EXL3_NGRAM_KERNEL",
    "auto",
    ngram_kernel,
    "Which kernels decode rows of n-gram tables. auto: the fastest that can run here; native: this package's; torch: "
    "plain PyTorch; exllamav3: that package's, if it is installed on a machine with a GPU; ext: exllamav3 if it is "
    "installed, otherwise native.",
)

NGRAM_TABLE = Variable(
    "VLLM_EXL3_NGRAM_TABLE",
    "auto",
    choice("auto", "resident", "pinned", "disk"),
    "Where n-gram tables are kept. resident: on the device; pinned: in host memory that the GPU reads; disk: in the "
    "pack's files, which requires a --compilation-config without full CUDA graphs; auto: resident if the model then "
    "fits, otherwise pinned.",
)

NGRAM_CACHE_MIB = Variable(
    "VLLM_EXL3_NGRAM_CACHE_MIB",
    "256",
    _mebibytes,
    "Host memory in MiB for caching rows of an n-gram table on disk; 0: no cache.",
)

REQUIRE_UVA_EXPERTS = Variable(
    "VLLM_EXL3_REQUIRE_UVA_EXPERTS",
    "0",
    yes_or_no,
    "1: refuse to start unless vLLM's UVA offloader has mapped the weights of all routed experts into host memory "
    "(docs/offload.md).",
)

_X86 = ("avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_vbmi", "avx512_words", "avx512_fp16", "amx")
CPU_ISAS = ("scalar", "neon", *_X86)
"""Every instruction set that the CPU library has kernels for, a later one above those before it."""

CPU_ISA = Variable(
    "VLLM_EXL3_CPU_ISA",
    "auto",
    choice("auto", *CPU_ISAS),
    "Which instruction set the CPU kernels use. auto: the fastest that the CPU supports. A lower one, for tests and "
    "comparison: scalar; on x86 avx2, avx2_vnni (AVX-VNNI), avx512, avx512_vnni, avx512_vbmi (what auto takes on AMD), "
    "avx512_words (the same instructions, arithmetic in words), avx512_fp16 or amx; on aarch64 neon. One that the CPU "
    "lacks is refused.",
)

METRICS_FOLDER = Variable(
    "VLLM_EXL3_METRICS_FOLDER",
    "",
    existing_or_new_folder,
    "Folder in which the processes that run models keep their counters for /metrics. Empty: a folder that the server "
    "creates, and removes when it ends.",
    # How a server tells its workers: vLLM warns of unknown names that begin with VLLM_, or refuses to start.
    aliases=("EXL3_METRICS_FOLDER",),
)

CACHE = Variable(
    "VLLM_EXL3_CACHE",
    "",
    existing_or_new_folder,
    "Folder for compiled GPU kernels. Empty: vllm_exl3 in the user's cache folder.",
    aliases=("VLLM_QUANTPACK_CACHE",),
)

INT4_KV = Variable(
    "VLLM_EXL3_INT4_KV",
    "1",
    yes_or_no,
    "Whether this package's attention serves vLLM's int4 KV cache (--kv-cache-dtype int4_per_token_head), in any "
    "model. 0: vLLM's own attention does.",
    aliases=("VLLM_QUANTPACK_INT4_KV",),
)

INT4_DECODE = Variable(
    "VLLM_EXL3_INT4_DECODE",
    "auto",
    parse_decode_shape,
    "How decoding over the int4 KV cache is done. auto: by the CUDA kernels where they support the shape, otherwise by "
    "the Triton kernel in the form that was measured to be fastest; tile,warps,segments (such as 64,4,auto): by the "
    "Triton kernel in this form, where segments is a power of two from 16 to 128 or auto.",
    aliases=("VLLM_QUANTPACK_INT4_DECODE",),
)

INT4_FA_PREFILL = Variable(
    "VLLM_EXL3_INT4_FA_PREFILL",
    "1",
    yes_or_no,
    "Whether long prefill over the int4 KV cache (chunks of at least 64 tokens, if chunk times cached tokens is at "
    "least 64 x 8192) uses FlashAttention on keys and values that are unpacked piece by piece. 0: the Triton kernel "
    "serves it.",
    aliases=("VLLM_QUANTPACK_INT4_FA_PREFILL",),
)

INT4_TILES = Variable(
    "VLLM_EXL3_INT4_TILES",
    "auto",
    parse_prefill_shape,
    "Form of the Triton kernel for prefill over the int4 KV cache: rows,tile,warps,stages (such as 64,64,8,2). auto: "
    "chosen from measurements.",
    aliases=("VLLM_QUANTPACK_INT4_TILES",),
)

VARIABLES: tuple[Variable[Any], ...] = (
    LINEAR_KERNEL,
    PRECISION,
    DEPENDENT_LAUNCH,
    FUSION,
    MOE_KERNEL,
    INT4_KV,
    INT4_DECODE,
    INT4_FA_PREFILL,
    INT4_TILES,
    NATIVE_MOE_MAX_ROWS,
    *NATIVE_MOE_MAX_ROWS_BY_BITS.values(),
    GROUPED_PREFILL,
    GROUPED_PREFILL_MAX_ROWS,
    FUSED_TEMP_ROWS,
    FAT_THRESHOLD,
    RECONSTRUCT_MB,
    DECODE_LIMIT,
    EMBEDDING_KERNEL,
    NGRAM_KERNEL,
    NGRAM_TABLE,
    NGRAM_CACHE_MIB,
    REQUIRE_UVA_EXPERTS,
    *EXPERTS_VARIABLES,
    CPU_ISA,
    METRICS_FOLDER,
    CACHE,
    *PLANNING,
)
"""All of them, for the doctor and the documentation."""


def validate() -> None:
    """Read every variable once, so that a typo stops start-up rather than a half-loaded model.

    Raises:
        VariableError: a variable is set to something it does not take, or two of them rule each other out.
    """
    for variable in VARIABLES:
        variable.get()
    if not GROUPED_PREFILL.get():
        _require_decode_path()
    check_experts()


def _require_decode_path() -> None:
    """Raises VariableError where experts are left to the decode path alone, and another variable rules that out."""
    caps = (NATIVE_MOE_MAX_ROWS, *NATIVE_MOE_MAX_ROWS_BY_BITS.values())
    others = [f"{cap.name}=0" for cap in caps if cap.get() == 0]
    if batch_invariant():
        others.append("VLLM_BATCH_INVARIANT=1, which routed experts keep to by the grouped prefill")
    if others:
        raise VariableError(
            f"{GROUPED_PREFILL.name}=0 leaves routed experts the decode path alone, which is ruled out by {others[0]}: "
            "unset one of the two"
        )


def batch_invariant() -> bool:
    """Whether vLLM was asked for results that do not depend on the batch (its own variable)."""
    return _is_yes(os.environ.get("VLLM_BATCH_INVARIANT", "0"))


@functools.lru_cache(maxsize=64)
def _is_yes(text: str) -> bool:
    text = text.strip().lower()
    try:
        return bool(int(text))  # as vLLM reads it, to which 2 is yes
    except ValueError:
        return text == "true"


def user_cache() -> Path:
    """This package's folder among the user's caches: below ``XDG_CACHE_HOME`` where that is an absolute path."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # Not Path.home(): it raises for a user without a home, as containers have them, and a server needs no cache.
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "vllm_exl3"
