"""Every environment variable this package reads, with its type, default and meaning; all are called ``VLLM_EXL3_*``."""

import os
from pathlib import Path
from typing import Any

from vllm_exl3.attention.shape import parse_decode_shape, parse_prefill_shape
from vllm_exl3.env_variable import (
    Variable,
    VariableError,
    choice,
    existing_or_new_folder,
    ngram_kernel,
    rows_or_auto,
    whole,
    yes_or_no,
)

__all__ = [
    "CACHE",
    "CPU_ISA",
    "DEPENDENT_LAUNCH",
    "EMBEDDING_KERNEL",
    "FAT_THRESHOLD",
    "FUSED_TEMP_ROWS",
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
    "Which kernels serve the linears: auto takes the fastest that runs here; native are this package's, reconstruct "
    "decodes to dense weights on a GPU and leaves the product to cuBLAS, exllamav3 are that package's where it is "
    "installed beside a GPU (both for comparison), reference is plain PyTorch.",
)

PRECISION = Variable(
    "VLLM_EXL3_PRECISION",
    "default",
    choice("default", "fast"),
    "How exactly the native kernels for linears multiply on a GPU: default keeps at least 15 bits of an activation; "
    "fast takes int8 for mul1 weights where there is a kernel for it, which is faster and errs by up to 1.2 % a layer "
    "(docs/fast-mode.md).",
)

DEPENDENT_LAUNCH = Variable(
    "VLLM_EXL3_DEPENDENT_LAUNCH",
    "auto",
    choice("auto", "0", "1"),
    "Whether the kernels that torch.compile makes for an EXL3 model let the next kernel start before they end, on GPUs "
    "from Hopper on (Inductor's triton.enable_pdl), so that weights are fetched meanwhile: auto leaves out LoRA, and "
    "models whose layers carry a state (Mamba, linear attention).",
)

MOE_KERNEL = Variable(
    "VLLM_EXL3_MOE_KERNEL",
    "auto",
    choice("auto", "native", "exllamav3", "reference"),
    "Which kernels serve routed experts: auto takes the fastest that runs here; native are this package's, exllamav3 "
    "that package's linears, expert by expert, where it is installed beside a GPU (for comparison), reference is plain "
    "PyTorch.",
)

NATIVE_MOE_MAX_ROWS = Variable(
    "VLLM_EXL3_NATIVE_MOE_MAX_ROWS",
    "auto",
    rows_or_auto,
    "Up to how many tokens routed experts on a GPU take the decode path; 0 never, auto as measured, by tokens an "
    "expert (other EXL3 plugins: 8). Longer inputs take the grouped prefill.",
)

NATIVE_MOE_MAX_ROWS_BY_BITS = {
    bits: Variable(
        f"VLLM_EXL3_NATIVE_MOE_MAX_ROWS_K{bits}",
        "auto",
        rows_or_auto,
        f"The same for layers with experts of K = {bits}{f' or {bits - 0.5:g}' if 1 < bits < 5 else ''}; auto leaves "
        f"it to the variable without _K{bits}. The smallest number counts where a layer mixes.",
    )
    for bits in range(1, 9)
}

GROUPED_PREFILL = Variable(
    "VLLM_EXL3_GROUPED_PREFILL",
    "1",
    yes_or_no,
    "Whether inputs too long for the decode path take the grouped prefill on a GPU; 0 serves all by the decode path.",
)

GROUPED_PREFILL_MAX_ROWS = Variable(
    "VLLM_EXL3_GROUPED_PREFILL_MAX_ROWS",
    "8192",
    whole(1),
    "Tokens that the grouped prefill has in work at once: bounds its scratch.",
)

FUSED_TEMP_ROWS = Variable(
    "VLLM_EXL3_FUSED_TEMP_ROWS",
    "2048",
    whole(1),
    "Tokens that the decode path has in work at once: bounds its scratch.",
)

FAT_THRESHOLD = Variable(
    "VLLM_EXL3_FAT_THRESHOLD",
    "auto",
    rows_or_auto,
    "Experts with more tokens than this take the large tiles of the grouped prefill; auto as measured, half a large "
    "tile (other EXL3 plugins: 256).",
)


_mebibytes = whole(0, 1 << 24)

RECONSTRUCT_MB = Variable(
    "VLLM_EXL3_RECONSTRUCT_MB",
    "256",
    _mebibytes,
    "Scratch in MiB that VLLM_EXL3_LINEAR_KERNEL=reconstruct decodes a layer into, some output columns after the "
    "other; at least one block of 128 columns.",
)

EMBEDDING_KERNEL = Variable(
    "VLLM_EXL3_EMBEDDING_KERNEL",
    "auto",
    choice("auto", "native", "reference"),
    "Which kernels decode quantized token embeddings: auto takes the fastest that runs here; native are this "
    "package's, reference is plain PyTorch.",
)

NGRAM_KERNEL = Variable(
    "VLLM_EXL3_NGRAM_KERNEL",
    "auto",
    ngram_kernel,
    "Which kernels decode rows of n-gram tables: auto takes the fastest that runs here; native are this package's, "
    "torch is plain PyTorch, exllamav3 that package's where it is installed beside a GPU, ext is another name for "
    "exllamav3 where it is installed, else for native.",
)

NGRAM_TABLE = Variable(
    "VLLM_EXL3_NGRAM_TABLE",
    "auto",
    choice("auto", "resident", "pinned", "disk"),
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
    yes_or_no,
    "1 makes start-up refuse unless vLLM's UVA offloader has mapped the weights of all routed experts into host memory "
    "(docs/offload.md).",
)

CPU_ISA = Variable(
    "VLLM_EXL3_CPU_ISA",
    "auto",
    choice("auto", "scalar", "avx2", "avx512", "avx512_vnni", "avx512_vbmi"),
    "Which instruction set the CPU kernels use: auto takes the best that the CPU runs; scalar, avx2, avx512, "
    "avx512_vnni and avx512_vbmi are for comparison.",
)

METRICS_FOLDER = Variable(
    "VLLM_EXL3_METRICS_FOLDER",
    "",
    existing_or_new_folder,
    "Folder where the processes that run models leave their counters for /metrics; empty means a folder of the "
    "server's own, which it removes when it ends.",
    # How a server tells its workers: vLLM warns of unknown names that begin with VLLM_, or refuses to start.
    aliases=("EXL3_METRICS_FOLDER",),
)

CACHE = Variable(
    "VLLM_EXL3_CACHE",
    "",
    existing_or_new_folder,
    "Folder for compiled GPU kernels; empty means the user's cache folder.",
    aliases=("VLLM_QUANTPACK_CACHE",),
)

INT4_KV = Variable(
    "VLLM_EXL3_INT4_KV",
    "1",
    yes_or_no,
    "Serve vLLM's int4 KV cache (--kv-cache-dtype int4_per_token_head), of any model, with this package's attention; 0 "
    "leaves vLLM's own in place.",
    aliases=("VLLM_QUANTPACK_INT4_KV",),
)

INT4_DECODE = Variable(
    "VLLM_EXL3_INT4_DECODE",
    "auto",
    parse_decode_shape,
    "Lets the Triton kernel decode over the int4 KV cache, cut so: tile,warps,segments (such as 64,4,auto; segments a "
    "power of two from 16 to 128, or auto). auto takes the CUDA kernels where they serve the shape, and elsewhere the "
    "Triton kernel as it was measured to be fastest.",
    aliases=("VLLM_QUANTPACK_INT4_DECODE",),
)

INT4_FA_PREFILL = Variable(
    "VLLM_EXL3_INT4_FA_PREFILL",
    "1",
    yes_or_no,
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

VARIABLES: tuple[Variable[Any], ...] = (
    LINEAR_KERNEL,
    PRECISION,
    DEPENDENT_LAUNCH,
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
    EMBEDDING_KERNEL,
    NGRAM_KERNEL,
    NGRAM_TABLE,
    NGRAM_CACHE_MIB,
    REQUIRE_UVA_EXPERTS,
    CPU_ISA,
    METRICS_FOLDER,
    CACHE,
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
    return os.environ.get("VLLM_BATCH_INVARIANT", "0").strip().lower() in ("1", "true")


def user_cache() -> Path:
    """This package's folder among the user's caches: below ``XDG_CACHE_HOME`` where that is an absolute path."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # Not Path.home(): it raises for a user without a home, as containers have them, and a server needs no cache.
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "vllm_exl3"
