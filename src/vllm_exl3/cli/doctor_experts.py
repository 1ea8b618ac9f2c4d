"""The doctor's check of routed experts: every codebook, whole and half bits, few tokens and many, against PyTorch."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from vllm_exl3.ops.experts import Projection

__all__ = ["compare_experts"]

_EXPERTS, _HIDDEN, _INTERMEDIATE, _TOP_K = 6, 256, 384, 2
_TOKENS = (1, 9, 150)
_LIMIT = 2e-3


def compare_experts(device: "torch.device") -> str:
    """Compare the native kernels of a device with the reference on the CPU.

    Raises:
        RuntimeError: there are none, or one is off, naming the codebook and the number of tokens.
    """
    import torch

    from vllm_exl3.ops import backends
    from vllm_exl3.ops.experts import pack_table, projection_kinds
    from vllm_exl3.ops.moe import moe_reference
    from vllm_exl3.pack.stored import Codebook

    backends.select("moe", device.type, moe_reference)  # registers what there is for this device
    native = backends.find("moe", device.type, "native")
    if native is None or (reason := native.unavailable()) is not None:
        raise RuntimeError("no native kernels for experts" + (f": {reason}" if native is not None else ""))
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for codebook in Codebook:
        projections = _projections((4, 6, 5) if codebook is Codebook.MUL1 else (4, 6, 8), codebook)
        kinds = projection_kinds(projections)
        if native.prepare is not None:
            native.prepare([(tuple(kinds), _EXPERTS, _EXPERTS, _HIDDEN, _INTERMEDIATE)], device)
        weights = [*_weights(projections, generator), pack_table(projections)]
        numbers = (kinds, _INTERMEDIATE, "swiglu", 1.0, 0.0, math.inf, False)
        for tokens in _TOKENS:
            x = torch.randn((tokens, _HIDDEN), generator=generator)
            shares, ids = torch.rand((tokens, _EXPERTS), generator=generator).topk(_TOP_K)
            host = [shares, ids.int(), None, *weights]
            there = [None if value is None else value.to(device) for value in host]
            expected = moe_reference(x, *host, *numbers)
            found = native.function(x.to(device), *there, *numbers).cpu()
            error = ((found - expected).norm() / expected.norm()).item()
            if not error <= _LIMIT:
                raise RuntimeError(f"codebook {codebook.label}, {tokens} tokens: error {error:.2e}")
            worst = max(worst, error)
    return f"{len(Codebook)} codebooks, largest relative error {worst:.1e}"


def _projections(half_bits: tuple[int, int, int], codebook: int) -> "list[list[Projection]]":
    """Gate, up and down of every expert; their bits take turns, so that experts differ."""
    from vllm_exl3.tools.expert_layout import lay_out_experts

    kinds = [(half_bits[(expert + index) % 3] / 2, codebook) for expert in range(_EXPERTS) for index in range(3)]
    return lay_out_experts(_EXPERTS, _HIDDEN, _INTERMEDIATE, kinds)[0]


def _weights(experts: "list[list[Projection]]", generator: "torch.Generator") -> "list[torch.Tensor | None]":
    """The op's eight weight arguments: random bits, scales of both signs, no biases."""
    import torch

    tensors: list[torch.Tensor | None] = []
    for parts in ([part for row in experts for part in row[:2]], [row[2] for row in experts]):
        words = sum(part.trellis_words for part in parts)
        tensors.append(torch.randint(-(2**15), 2**15, (words,), generator=generator, dtype=torch.int16))
        tensors += [
            torch.randn(sum(sizes), generator=generator).half() * factor
            for sizes, factor in (
                ([part.in_features for part in parts], parts[0].in_features ** -0.5),
                ([part.out_features for part in parts], 1.0),
            )
        ]
        tensors.append(None)
    return tensors
