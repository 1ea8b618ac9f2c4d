"""The doctor's check of the int4 attention: writing keys and values, decoding and prefill, against float64."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["compare_attention"]

_HEADS, _KV_HEADS, _SIZE, _PAGE = 4, 2, 128, 16
_LENGTHS, _COUNTS = (70, 17), (1, 12)
_CODED = 0.2
"""More than what 16 levels cost of normal values (0.1), and less than what a wrong nibble or scale would."""
_LIMITS = {"bfloat16": 5e-3, "float32": 1e-3}


def compare_attention(device: "torch.device", dtype: "torch.dtype") -> str:
    """Fill a cache with the write kernel, and attend over it with as many query tokens as decoding and prefill have.

    Raises:
        RuntimeError: the cache does not hold what was written, or an output is off.
    """
    import torch

    from vllm_exl3.attention.dispatch import Int4Attention, Settings, sort_requests
    from vllm_exl3.attention.layout import content_bytes, decode_slots, rotate
    from vllm_exl3.attention.reference import attention_reference, gather_slots
    from vllm_exl3.attention.write import write_tokens

    generator = torch.Generator().manual_seed(0)
    pages = -(-max(_LENGTHS) // _PAGE)
    table = torch.randperm(len(_LENGTHS) * pages, generator=generator).view(-1, pages).int()
    cache = torch.zeros((table.numel(), _KV_HEADS, _PAGE, content_bytes(_SIZE)), dtype=torch.uint8, device=device)
    for row, length in zip(table.long(), _LENGTHS, strict=True):
        rows = torch.randn((2, length, _KV_HEADS, _SIZE), generator=generator).to(dtype)
        slots = (row[:, None] * _PAGE + torch.arange(_PAGE)).flatten()[:length]
        write_tokens(rows[0].to(device), rows[1].to(device), cache, slots.to(device))
        stored = torch.stack(decode_slots(gather_slots(cache.cpu(), row, length)))
        if not (error := _error(stored, rotate(rows.double()).transpose(1, 2))) <= _CODED:
            raise RuntimeError(f"written keys and values: error {error:.2e}")
    layer = Int4Attention(_HEADS, _KV_HEADS, _SIZE, _SIZE**-0.5, 0, 0.0, Settings(None, None, True, False))
    layer.decoder.prepare(device)
    lengths = torch.tensor(_LENGTHS, dtype=torch.int32, device=device)
    worst = 0.0
    for count in _COUNTS:
        starts = list(range(0, (len(_LENGTHS) + 1) * count, count))
        query = torch.randn((starts[-1], _HEADS, _SIZE), generator=generator).to(dtype)
        expected = attention_reference(query, cache.cpu(), table, list(_LENGTHS), starts, _SIZE**-0.5)
        output = torch.full_like(query, torch.nan, device=device)
        there = torch.tensor(starts, dtype=torch.int32, device=device)
        batch = sort_requests(starts, _LENGTHS)
        layer(query.to(device), cache, table.to(device), lengths, there, output, None, count, batch, None)
        error = _error(output.cpu(), expected)
        if not error <= _LIMITS[str(dtype).removeprefix("torch.")]:
            raise RuntimeError(f"{count} query tokens a request: error {error:.2e}")
        worst = max(worst, error)
    return f"writing, decoding and prefill, largest relative error {worst:.1e}"


def _error(found: "torch.Tensor", expected: "torch.Tensor") -> float:
    return float((found.double() - expected).norm() / expected.norm())
