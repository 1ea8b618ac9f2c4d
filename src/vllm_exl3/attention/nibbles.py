"""Nibbles to float16 in Triton, by bit tricks.

A 16-bit word of the cache holds four consecutive elements; stream J of a tile of words is its J-th nibbles, so a tile
of D/4 words a token becomes four tiles of D/4 values, without moving data between threads. 0x6400 is 1024 in float16,
whose step there is 1: or-ing a nibble into its lowest bits gives 1024 + nibble, into the next four 1024 + 16·nibble,
exactly, two values an instruction, one shift for every other pair of streams.
"""

import triton
import triton.language as tl

__all__ = ["centred_nibbles", "log2_of_positive", "raised_nibbles", "reciprocal"]


@triton.jit
def raised_nibbles(words, J: tl.constexpr, ASM: tl.constexpr):
    """float16 1024 + nibble J of int16 words for even J, 1024 + 16·nibble for odd; ASM uses NVIDIA instructions."""
    if ASM:
        if J == 0:
            return tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x000F000F, 0x64006400, 0xEA;",
                "=r,r",
                [words],
                dtype=tl.float16,
                is_pure=True,
                pack=2,
            )
        elif J == 1:
            return tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x00F000F0, 0x64006400, 0xEA;",
                "=r,r",
                [words],
                dtype=tl.float16,
                is_pure=True,
                pack=2,
            )
        elif J == 2:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, 0x000F000F, 0x64006400, 0xEA; }",
                "=r,r",
                [words],
                dtype=tl.float16,
                is_pure=True,
                pack=2,
            )
        else:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, 0x00F000F0, 0x64006400, 0xEA; }",
                "=r,r",
                [words],
                dtype=tl.float16,
                is_pure=True,
                pack=2,
            )
    else:
        return (((words >> (4 * J)) & 0xF).to(tl.float32) * (1 + 15 * (J % 2)) + 1024.0).to(tl.float16)


@triton.jit
def centred_nibbles(words, zeros, J: tl.constexpr, ASM: tl.constexpr):
    """float16 nibble J minus the zero-point of its token, exactly.

    Sums of many centred values stay small. Sums of raised ones, a correction taken off afterwards, would drift over
    long contexts: tensor cores truncate when they add.

    Args:
        words: int16 ``[WORDS, TILE]``.
        zeros: float16 ``[TILE]``.
        J: the stream.
        ASM: use NVIDIA instructions.
    """
    if ASM:
        raised = raised_nibbles(words, J, ASM)
        if J % 2 == 0:
            return raised - (zeros + 1024.0).to(tl.float16)[None, :]
        else:
            shift = tl.broadcast_to((-64.0 - zeros).to(tl.float16)[None, :], raised.shape)
            return tl.inline_asm_elementwise(
                "{ .reg .b32 a; mov.b32 a, 0x2C002C00; fma.rn.f16x2 $0, $1, a, $2; }",
                "=r,r,r",
                [raised, shift],
                dtype=tl.float16,
                is_pure=True,
                pack=2,
            )
    else:
        return (((words >> (4 * J)) & 0xF).to(tl.float32) - zeros[None, :].to(tl.float32)).to(tl.float16)


@triton.jit
def log2_of_positive(x, ASM: tl.constexpr):
    """Binary logarithm of float32 within 2⁻²², in one instruction; Triton's own takes twenty."""
    if ASM:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def reciprocal(x, ASM: tl.constexpr):
    """1/x of float32 within one unit in the last place, in one instruction."""
    if ASM:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x
