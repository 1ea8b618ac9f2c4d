"""Nibbles to bfloat16 in Triton, by bit tricks.

A 16-bit word of the cache holds four consecutive elements; stream J of a tile of words is its J-th nibbles, so a tile
of D/4 words a token becomes four tiles of D/4 values, without moving data between threads. 0x4300 is 128 in bfloat16,
whose step there is 1: or-ing a nibble into it gives 128 + nibble exactly, two values an instruction.
"""

import triton
import triton.language as tl

__all__ = ["centred_nibbles", "raised_nibbles"]


@triton.jit
def raised_nibbles(words, J: tl.constexpr, ASM: tl.constexpr):
    """bfloat16 128 + nibble J of int16 words; ASM uses NVIDIA instructions on pairs of words."""
    if ASM:
        if J == 0:
            return tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x000F000F, 0x43004300, 0xEA;",
                "=r,r",
                [words],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
        elif J == 1:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t; shr.u32 t, $1, 4; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }",
                "=r,r",
                [words],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
        elif J == 2:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }",
                "=r,r",
                [words],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
        else:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t; shr.u32 t, $1, 12; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }",
                "=r,r",
                [words],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
    else:
        return (((words >> (4 * J)) & 0xF).to(tl.float32) + 128.0).to(tl.bfloat16)


@triton.jit
def centred_nibbles(words, J: tl.constexpr, ASM: tl.constexpr):
    """bfloat16 nibble J minus 8, between -8 and 7: sums of many stay small, hence exact, in float32 accumulators."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 one, minus; mov.b32 one, 0x3F803F80; mov.b32 minus, 0xC308C308;"
            " fma.rn.bf16x2 $0, $1, one, minus; }",
            "=r,r",
            [raised_nibbles(words, J, ASM)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return (raised_nibbles(words, J, ASM).to(tl.float32) - 136.0).to(tl.bfloat16)
