"""Paged causal attention over the int4 cache in float64: what every kernel is compared with."""

import torch

from vllm_exl3.attention.layout import decode_slots, rotate, unrotate

__all__ = ["attention_reference", "gather_slots"]


def gather_slots(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """The first slots of one request in order.

    Args:
        cache: uint8 ``[pages, kv_heads, page, D + 8]``, any strides.
        pages: integers, the request's row of the page table.
        length: tokens wanted.

    Returns:
        ``[kv_heads, length, D + 8]``.
    """
    page = cache.shape[2]
    used = cache[pages[: -(-length // page)].long()]
    return used.transpose(0, 1).flatten(1, 2)[:, :length]


def attention_reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: list[int],
    starts: list[int],
    scale: float,
    window: int | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every query token over its request's cached tokens up to itself.

    Args:
        query: ``[tokens, heads, D]``, as the model made it.
        cache: uint8 ``[pages, kv_heads, page, D + 8]``; it already holds the query tokens' own keys and values.
        table: integers ``[requests, pages a request]``.
        lengths: each request's tokens in the cache, the query tokens being the last of them.
        starts: ``requests + 1`` offsets into the query tokens.
        scale: of the scores.
        window: a token sees itself and the ``window - 1`` tokens before; None sees all.
        soft_cap: scores become cap·tanh(score/cap) when positive.
        sinks: ``[heads]``, the logit of a key without a value.

    Returns:
        float64 ``[tokens, heads, D]``.
    """
    heads, size = query.shape[1:]
    kv_heads = cache.shape[1]
    rotated = rotate(query.double()) / (size & -size)
    output = torch.zeros_like(rotated)
    for request, length in enumerate(lengths):
        first, last = starts[request], starts[request + 1]
        if last == first or length == 0:
            continue
        keys, values = decode_slots(gather_slots(cache, table[request], length))
        q = rotated[first:last].unflatten(1, (kv_heads, heads // kv_heads))
        scores = torch.einsum("qhgd,hkd->hgqk", q, keys) * scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = torch.arange(length - (last - first), length, device=query.device)[:, None]
        key = torch.arange(length, device=query.device)[None, :]
        seen = (key <= position) & (position - key < (window or length + 1))
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            sink = sinks.double().view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sink), -1)
        weights = torch.softmax(scores, -1)[..., :length]
        output[first:last] = torch.einsum("hgqk,hkd->qhgd", weights, values).flatten(1, 2)
    return unrotate(output)
