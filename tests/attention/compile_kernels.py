"""Compiles the int4 attention for a GPU that need not be there: ``python -m tests.attention.compile_kernels 90``.

A process of its own, since kernels that were defined for Triton's interpreter cannot be compiled.
"""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_exl3.attention import accumulate, attend, merge, rotation, unpack, write

POINTERS = {
    "query_ptr": "*bf16", "cache_ptr": "*u8", "table_ptr": "*i32", "pages_ptr": "*i32", "lengths_ptr": "*i32",
    "starts_ptr": "*i32", "slots_ptr": "*i64", "signs_ptr": "*fp32", "output_ptr": "*bf16", "partial_ptr": "*fp32",
    "stats_ptr": "*fp32", "x_ptr": "*bf16", "out_ptr": "*bf16", "key_ptr": "*bf16", "value_ptr": "*bf16",
    "part_ptr": "*bf16", "part_lse_ptr": "*fp32", "sum_ptr": "*fp32", "lse_ptr": "*fp32", "sinks_ptr": "*bf16",
    "scale": "fp32", "soft_cap": "fp32", "long_work": "fp32",
}  # fmt: skip


def build(kernel: Any, target: GPUTarget, warps: int, stages: int, **constants: Any) -> Any:
    """Compile one kernel; arguments that are no constants get their type by name, or are int32."""
    if not constants.get("SINKS"):
        constants = {**constants, **({"sinks_ptr": None} if "sinks_ptr" in kernel.arg_names else {})}
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in kernel.arg_names}
    aligned = ("page_stride", "head_stride")
    hints = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in aligned
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=hints)
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})


def head(size: int) -> dict[str, int]:
    """Constants of a head size."""
    block = size & -size
    return {
        "D": size,
        "PADDED": max(64, triton.next_power_of_2(size)),
        "BLOCK": block,
        "LOG_BLOCK": block.bit_length() - 1,
    }


def main(capability: int) -> None:
    """Compile what a model of heads of 256, and one of 96, launches."""
    target = GPUTarget("cuda", capability, 32)
    plain = {"GROUP": 6, "HEAD_BLOCKS": 1, "WIDE": False, "SOFT_CAP": False, "SINKS": False, "WINDOW": 0, "ASM": True}
    decode = {"RAGGED": False, "SPLIT": True, "PAGE": 16, "SLOT": 264, **head(256), **plain}
    variants = [
        (4, 4, {**decode, "TILE": 128, "ROWS": 8, "BLOCK_Q": 1}),
        (2, 6, {**decode, "TILE": 64, "ROWS": 8, "BLOCK_Q": 1}),
        (4, 2, {**decode, "TILE": 64, "ROWS": 32, "BLOCK_Q": 5, "RAGGED": True, "SPLIT": False}),
        (4, 4, {**decode, **head(96), "SLOT": 104, "PAGE": 528, "TILE": 128, "ROWS": 16, "BLOCK_Q": 2, "WINDOW": 100,
                "SOFT_CAP": True, "SINKS": True, "WIDE": True, "SPLIT": False}),
    ]  # fmt: skip
    for warps, stages, constants in variants:
        built = build(attend.attend_kernel, target, warps, stages, **constants)
        # Two values an instruction, on the matrix unit: what the kernel is written for.
        ptx = built.asm["ptx"]
        assert "lop3.b32" in ptx and any(name in ptx for name in ("mma.sync", "wgmma", "tcgen05.mma"))
        assert built.metadata.shared <= 99 * 1024, built.metadata.shared
    rows = {"GROUP": 6, "ROWS": 8, "BLOCK_Q": 1, "HEAD_BLOCKS": 1}
    build(merge.merge_kernel, target, 4, 3, **head(256), **rows, TILE=128, STEP=16, WINDOW=0, SINKS=True)
    build(write._write_kernel, target, 1, 3, **head(256), PAGE=16)
    build(unpack._unpack_kernel, target, 4, 3, PAGE=16, D=256, WORDS=32, TILE=16)
    build(accumulate._accumulate_kernel, target, 4, 3, **head(256), ROWS=4, FIRST=False, LAST=True, SINKS=True)
    small = {name: value for name, value in head(256).items() if name in ("BLOCK", "LOG_BLOCK")}
    build(rotation._rotate_kernel, target, 4, 3, **small, BLOCKS=1, ROWS=16)
    print("compiled", capability, triton.__version__)


if __name__ == "__main__":
    main(int(sys.argv[1]))
