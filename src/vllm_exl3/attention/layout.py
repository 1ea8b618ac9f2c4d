"""The int4 per-token-head KV cache: what its bytes mean, in plain PyTorch.

Source: vLLM 0.30 to 0.33, ``v1/attention/ops/int4_per_token_head.py``. One slot holds one token of one KV head:

    [K nibbles: D/2 bytes | K scale: float32 | V nibbles: D/2 bytes | V scale: float32]

Byte i holds element 2i in its low nibble and 2i+1 in its high one. The low four mantissa bits of a scale hold the
zero-point; a value is scale·(nibble - zero-point). K and V are quantized after a randomised Hadamard transform, so
queries are transformed alike before the products, and the output is transformed back.
"""

import functools

import torch

__all__ = [
    "SCALE_BYTES",
    "content_bytes",
    "decode_slots",
    "encode_rows",
    "rotate",
    "rotation_block",
    "rotation_signs",
    "unrotate",
]

SCALE_BYTES = 4
_SEED = 0x9E3779B9
_SMALLEST_SCALE = 1e-6


def content_bytes(head_size: int) -> int:
    """Bytes of one slot."""
    return head_size + 2 * SCALE_BYTES


def rotation_block(head_size: int) -> int:
    """Points of one Hadamard transform: the largest power of two that divides the head size."""
    return head_size & -head_size


@functools.cache
def rotation_signs(block: int) -> torch.Tensor:
    """The transform's signs: float32 ±1 ``[block]`` on the CPU, the same in every process."""
    generator = torch.Generator(device="cpu").manual_seed(_SEED)
    # vLLM changes the default type while it builds a model, and kernels read these as float32.
    half = torch.full((block,), 0.5, device="cpu", dtype=torch.float32)
    return 2.0 * torch.bernoulli(half, generator=generator) - 1.0


def rotate(x: torch.Tensor) -> torch.Tensor:
    """H·diag(signs)·x for every block of the last dimension, not normalised: the norm grows by √block."""
    signs = rotation_signs(rotation_block(x.shape[-1])).to(x)
    return _hadamard(x.unflatten(-1, (-1, signs.numel())) * signs).flatten(-2)


def unrotate(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `rotate`."""
    signs = rotation_signs(rotation_block(x.shape[-1])).to(x)
    return (_hadamard(x.unflatten(-1, (-1, signs.numel()))) * signs / signs.numel()).flatten(-2)


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    step, size = 1, x.shape[-1]
    while step < size:
        pairs = x.unflatten(-1, (-1, 2, step))
        x = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
        step *= 2
    return x


def encode_rows(rotated: torch.Tensor) -> torch.Tensor:
    """Quantize rows that `rotate` made.

    Zero is always inside the quantized range: of a row whose values are all positive (or negative), vLLM's own writer
    clamps most values to one.

    Args:
        rotated: ``[..., D]`` floating point, D a multiple of 8.

    Returns:
        uint8 ``[..., D/2 + 4]``: nibbles and the scale with its zero-point.
    """
    x = rotated.float()
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15.0).clamp(min=_SMALLEST_SCALE)
    zero = torch.floor(-low / scale + 0.5).clamp(0, 15)
    nibbles = torch.floor(x / scale + zero + 0.5).clamp(0, 15).to(torch.uint8)
    packed = nibbles[..., ::2] | nibbles[..., 1::2] << 4
    word = (scale.view(torch.int32) & -16) | zero.to(torch.int32)
    return torch.cat((packed, word.view(torch.uint8)), -1)


def decode_slots(slots: torch.Tensor, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated keys and values of slots.

    Args:
        slots: uint8 ``[..., D + 8]``.
        dtype: of the result; float64 holds every value exactly.

    Returns:
        Two tensors ``[..., D]``.
    """
    half = slots.shape[-1] // 2
    return _decode(slots[..., :half], dtype), _decode(slots[..., half:], dtype)


def _decode(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    packed, word = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].contiguous().view(torch.int32)
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(dtype)
    return (nibbles - (word & 15).to(dtype)) * (word & -16).view(torch.float32).to(dtype)
