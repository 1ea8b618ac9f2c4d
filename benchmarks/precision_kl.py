#!/usr/bin/env python3
"""What the fast mode's int8 costs a language model: KL divergence from the same pack in the default arithmetic.

    python benchmarks/precision_kl.py PACK [--text FILE ...] [--tokens 3072] [--write]

The CPU computes what the GPU's kernel would (`vllm_exl3.ops.int8`), for the layers and numbers of tokens that the
kernel serves. Weights and activations are also rounded one at a time, to tell which of them costs what. The text is
this repository's README and documentation unless files are named; it is read in windows of 512 tokens.
"""

import argparse
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from embedding_kl import ROOT, WINDOW, divergence, log_probabilities
from tokenizers import Tokenizer

from vllm_exl3.cuda.prefill_int8 import LEAST_ROWS
from vllm_exl3.ops import backends
from vllm_exl3.ops.int8 import MOST_HALF_BITS, WEIGHT_STEP, quantize_rows, weight_bytes
from vllm_exl3.ops.linear import linear_reference, split_shards
from vllm_exl3.ops.shards import cached_shards
from vllm_exl3.ops.trellis import decode, hadamard
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.results import write_results

RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "precision_kl.json"
VARIANTS = {"int8": (True, True), "int8_weights": (True, False), "int8_activations": (False, True)}
"""Whether weights and whether activations are rounded."""


class Emulation:
    """The linear op with rounded weights, rounded activations, or both, in place of the CPU's own.

    Args:
        weights: round weights to int8.
        activations: round rotated inputs to int8.
        replaced: the backend that serves the other layers.
    """

    def __init__(self, weights: bool, activations: bool, replaced: Callable[..., torch.Tensor]) -> None:
        self.weights, self.activations, self.replaced = weights, activations, replaced
        self.served = 0
        self.errors: list[float] = []
        self._decoded: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(
        self,
        x: torch.Tensor,
        trellis: torch.Tensor,
        suh: torch.Tensor,
        svh: torch.Tensor,
        bias: torch.Tensor | None,
        shards: tuple[int, ...],
    ) -> torch.Tensor:
        """The op; see `vllm_exl3.ops.linear`."""
        layer = cached_shards(tuple(shards))
        exact = self.replaced(x, trellis, suh, svh, bias, shards)
        if x.shape[0] < LEAST_ROWS or any(
            shard.codebook != Codebook.MUL1 or shard.half_bits > MOST_HALF_BITS for shard in layer
        ):
            return exact
        self.served += 1
        outputs = []
        for shard, words, suh_part, svh_part in split_shards(trellis, suh, svh, tuple(shards)):
            rotated = x.new_zeros((x.shape[0], shard.in_features), dtype=torch.float32)
            rotated[:, : x.shape[1]] = x
            rotated = hadamard(rotated * suh_part.float())
            if self.activations:
                values, step = quantize_rows(rotated)
                rotated = values.float() * step
            y = hadamard(rotated @ self._matrix(words, shard.trellis_shape, shard.half_bits)) * svh_part.float()
            outputs.append(y[:, shard.crop_start : shard.crop_start + shard.crop_size])
        output = torch.cat(outputs, dim=1)
        output = (output if bias is None else output + bias.float()).to(x.dtype)
        self.errors.append(((output - exact).norm() / exact.norm()).item())
        return output

    def _matrix(self, words: torch.Tensor, shape: tuple[int, int, int], half_bits: int) -> torch.Tensor:
        key = (words.data_ptr(), words.numel())
        if key not in self._decoded:
            stored = words.view(shape)
            self._decoded[key] = (
                weight_bytes(stored, half_bits).float() * WEIGHT_STEP
                if self.weights
                else decode(stored, half_bits, Codebook.MUL1).float()
            )
        return self._decoded[key]


def main() -> None:
    """Measure, print, and write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", default=[ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))])
    parser.add_argument("--tokens", type=int, default=6 * WINDOW)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in arguments.text)
    ids = Tokenizer.from_file(str(arguments.pack / "tokenizer.json")).encode(text).ids[: arguments.tokens]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)]
    digest = hashlib.sha256(np.array(windows, "<u4").tobytes()).hexdigest()
    backend = backends.select("linear", "cpu", linear_reference).backend
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.pack.parent) as scratch:
        reference = log_probabilities(arguments.pack, windows, Path(scratch) / "reference.npy")
        for name in arguments.variants:
            weights, activations = VARIANTS[name]
            emulation = Emulation(weights, activations, backend.function)
            replacement = backends.Backend("linear", "cpu", backend.name, emulation, lambda: None)
            backends.register_backend(replacement)
            found = log_probabilities(arguments.pack, windows, Path(scratch) / f"{name}.npy")
            backends.register_backend(backend)
            kl, error, same = divergence(reference, found)
            errors = torch.tensor(emulation.errors)
            print(
                f"{name}: KL {kl:.2e} ± {error:.1e} nats per token, same likeliest token {same:.2%}; "
                f"{emulation.served} linears, median relative error {errors.median():.2%}, largest {errors.max():.2%}",
                flush=True,
            )
            rows.append(
                {
                    "kernel": name,
                    "pack": arguments.pack.resolve().name,
                    "tokens": len(windows) * WINDOW,
                    "tokens_sha256": digest,
                    "linears": emulation.served,
                    "error": errors.median().item(),
                    "largest_error": errors.max().item(),
                    "kl": kl,
                    "kl_standard_error": error,
                    "same_likeliest_token": same,
                }
            )
    if arguments.write:
        write_results(
            RESULTS,
            rows,
            machine="cpu",
            command="python benchmarks/precision_kl.py PACK --write",
            replaces=lambda row: row["kernel"] in arguments.variants,
        )


if __name__ == "__main__":
    main()
