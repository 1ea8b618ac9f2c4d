"""The cache's bytes: against vLLM's own transform and the format's definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_exl3.attention.layout import (
    content_bytes,
    decode_slots,
    encode_rows,
    rotate,
    rotation_block,
    rotation_signs,
    unrotate,
)
from vllm_exl3.attention.reference import attention_reference, gather_slots

SIGNS = "+-++----+--++-+-++--+++-+-+--++-"
SIZES = (64, 72, 80, 96, 128, 192, 256, 512)


@pytest.mark.parametrize(("size", "block"), [(64, 64), (72, 8), (80, 16), (96, 32), (192, 64), (256, 256), (512, 512)])
def test_rotation_block(size: int, block: int) -> None:
    assert rotation_block(size) == block


@pytest.mark.parametrize("size", SIZES)
def test_rotation_keeps_products_and_inverts(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x, y = torch.randn(2, 5, size, generator=generator, dtype=torch.float64)
    products = (rotate(x) * rotate(y)).sum(-1) / rotation_block(size)
    assert torch.allclose(products, (x * y).sum(-1))
    assert torch.allclose(unrotate(rotate(x)), x)


def test_the_signs_are_the_formats() -> None:
    # Of torch's generator with vLLM's seed: a change of either would make cached tokens of other processes unreadable.
    assert "".join("-+"[int(sign > 0)] for sign in rotation_signs(32)) == SIGNS
    assert set(rotation_signs(256).tolist()) == {-1.0, 1.0}


def test_the_signs_are_float32_whatever_vllm_is_building() -> None:
    # They are cached, and first asked for while vLLM has set the model's type as default.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert rotation_signs.__wrapped__(64).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from((8, 64, 96, 256)),
    seed=st.integers(0, 2**31),
    shift=st.sampled_from((0.0, 3.0, -100.0)),
    spread=st.sampled_from((0.0, 1e-9, 1.0, 1e4)),
)
def test_quantized_rows_are_within_half_a_step(size: int, seed: int, shift: float, spread: float) -> None:
    x = torch.randn(7, size, generator=torch.Generator().manual_seed(seed)) * spread + shift
    slots = torch.cat((encode_rows(x), encode_rows(-x)), -1)
    assert slots.shape == (7, content_bytes(size)) and slots.dtype == torch.uint8
    keys, values = decode_slots(slots)
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    # A step and the zero-point's rounding move the ends of the range by half a step each.
    step = ((high - low) / 15).clamp(min=1e-6).double()
    assert ((keys - x).abs() <= 1.001 * step).all()
    assert ((values + x).abs() <= 1.001 * step).all()


def test_a_slot_by_hand() -> None:
    slot = torch.zeros(content_bytes(8), dtype=torch.uint8)
    slot[:4] = torch.tensor([0x10, 0x32, 0x54, 0xF6])
    slot[4:8] = torch.tensor([0.5]).view(torch.int32).add(3).view(torch.uint8)
    slot[8:12] = 0x99
    slot[12:16] = torch.tensor([2.0]).view(torch.int32).add(15).view(torch.uint8)
    keys, values = decode_slots(slot)
    assert keys.tolist() == [0.5 * (nibble - 3) for nibble in (0, 1, 2, 3, 4, 5, 6, 15)]
    assert values.tolist() == [2.0 * (9 - 15)] * 8


def test_slots_are_gathered_in_the_order_of_the_table() -> None:
    cache = torch.arange(5).reshape(5, 1, 1, 1).expand(5, 2, 4, 3)
    slots = gather_slots(cache, torch.tensor([3, 0, 4]), 9)
    assert slots.shape == (2, 9, 3)
    assert slots[1, :, 0].tolist() == [3, 3, 3, 3, 0, 0, 0, 0, 4]


def test_the_reference_is_attention() -> None:
    generator = torch.Generator().manual_seed(5)
    size, heads, kv_heads, length, count = 64, 4, 2, 37, 5
    keys, values = torch.randn(2, kv_heads, length, size, generator=generator)
    slots = torch.cat((encode_rows(rotate(keys)), encode_rows(rotate(values))), -1)
    cache = torch.zeros(3, kv_heads, 16, content_bytes(size), dtype=torch.uint8)
    for page in range(3):
        part = slots[:, page * 16 : page * 16 + 16]
        cache[page, :, : part.shape[1]] = part
    query = torch.randn(count, heads, size, generator=generator)
    output = attention_reference(query, cache, torch.tensor([[0, 1, 2]]), [length], [0, count], 0.125)
    rotated_keys, rotated_values = decode_slots(slots)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double().transpose(0, 1),
        unrotate(rotated_keys).repeat_interleave(2, 0),
        unrotate(rotated_values).repeat_interleave(2, 0),
        attn_mask=torch.ones(count, length).tril(length - count).bool(),
        scale=0.125,
    ).transpose(0, 1)
    assert torch.allclose(output, expected)
