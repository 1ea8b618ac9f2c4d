"""exllamav3's own routed experts, where that package is installed: whole blocks of a generated pack of one layer.

Used by ``gpu_moe.py --peer``. A block is its module ``model.layers.0.mlp``: its router, and the path that it chooses by
the number of tokens. It runs as the package's engine runs it, eagerly, in float16. What is timed is a run of calls over
different inputs without a pause between them, which hides its launches where the GPU is the slower of the two; and, as
`us_alone`, a call by itself.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_moe_layers import GpuLayer, random_layer

from vllm_exl3.cuda import moe as kernels
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.random_pack import write_random_pack

AGREEMENT = 1e-2
"""Relative Frobenius distance of its block and ours on the same weights, inputs and routing: its routing weights and
some of its sums are float16."""

_HEAD_DIM = 128


class PeerBlock:
    """A block of random experts.

    Args:
        experts: of the layer.
        top_k: experts a token visits.
        hidden: channels that enter and leave.
        intermediate: channels between the projections.
        bits: K of every projection; the codebook is mul1.
    """

    def __init__(self, experts: int, top_k: int, hidden: int, intermediate: int, bits: int) -> None:
        from exllamav3 import Config, Model

        self._hidden, self._bits = hidden, bits
        with tempfile.TemporaryDirectory() as folder:
            write_random_pack(
                Path(folder) / "pack", hidden=hidden, intermediate=intermediate, layers=1,
                heads=hidden // _HEAD_DIM, kv_heads=1, head_dim=_HEAD_DIM, vocab=1024, bits=bits, head_bits=16,
                codebook="mul1", architecture="Qwen3MoeForCausalLM", experts=experts, top_k=top_k,
            )  # fmt: skip
            model = Model.from_config(Config.from_directory(str(Path(folder) / "pack")))
            self._block: Any = model.modules[model.first_block_idx].mlp
            self._block.load(torch.device("cuda", torch.cuda.current_device()))
            torch.cuda.synchronize()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden]`` float32 of float16 ``[tokens, hidden]``."""
        return self._block.forward(x[None], {})[0]

    @torch.inference_mode()
    def us(self, tokens: int, copies: int, repeats: int = 5) -> dict[str, float]:
        """Microseconds of a call with so many tokens, medians.

        Returns:
            ``us`` of runs of ``copies`` calls; ``us_alone`` of calls before and behind which the GPU idles: with few
            tokens their launches are in it.
        """
        inputs = [torch.randn(tokens, self._hidden, device="cuda").half() for _ in range(copies)]
        for x in inputs:  # it chooses and tunes its kernels at the first calls
            self.forward(x)
        runs = [self._elapsed(inputs) / copies for _ in range(repeats)]
        alone = [self._elapsed(inputs[i % copies :][:1]) for i in range(2 * repeats)]
        return {"us": statistics.median(runs), "us_alone": statistics.median(alone)}

    def _elapsed(self, inputs: Sequence[torch.Tensor]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for x in inputs:
            self.forward(x)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    @torch.inference_mode()
    def distances(self, batches: Iterable[int]) -> dict[int, float]:
        """How far its block and ours are apart on its weights and its routing, relative, by the number of tokens."""
        layer, found = self._copied(), {}
        for tokens in batches:
            x = torch.randn(tokens, self._hidden, device="cuda").half()
            chosen, weights = self._block.routing_fn(tokens, self._block.routing_cfg, x, {})
            ours = kernels.moe(x, *layer.arguments(weights.float(), chosen.int())).float()
            found[tokens] = float((self.forward(x).float() - ours).norm() / ours.norm())
        return found

    def _copied(self) -> GpuLayer:
        """Its experts in the op's layout."""
        block = self._block
        kind = (self._bits, int(Codebook.MUL1))
        layer = random_layer(len(block.ups), self._hidden, block.intermediate_size, [kind])
        for own, *linears in zip(layer.projections, block.gates, block.ups, block.downs, strict=True):
            for part, name, linear in zip(own, ("w13", "w13", "w2"), linears, strict=True):
                for leaf in ("trellis", "suh", "svh"):
                    target, source = layer.tensors[f"{name}_{leaf}"], getattr(linear.inner, leaf)
                    assert target is not None
                    start = getattr(part, leaf)
                    target[start : start + source.numel()] = source.flatten().view(target.dtype)
        return layer


def peer_us(
    shape: tuple[int, int, int, int, int], copies_for: Callable[[int], int]
) -> Callable[[int], dict[str, float]]:
    """A function of the number of tokens: what `PeerBlock.us` gives, after it was seen to compute what ours does.

    Args:
        shape: experts, top_k, hidden, intermediate, K.
        copies_for: how many calls make a run, by the number of tokens.

    Raises:
        ValueError: it computes something else.
    """
    block = PeerBlock(*shape)
    for tokens, distance in block.distances((1, 8, 64, 512)).items():
        if not distance <= AGREEMENT:
            raise ValueError(
                f"exllamav3 and ours, {tokens} tokens of {shape}: {distance:.2e} apart, expected {AGREEMENT}"
            )
    return lambda tokens: block.us(tokens, copies_for(tokens))
