"""What the demo makes before it serves, each part kept in a cache folder: the EXL3 pack and the 16-bit reference."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_exl3.cpu.quantize import ENCODER_VERSION, quantize_linear
from vllm_exl3.demo.display import Display
from vllm_exl3.demo.divergence import dense_log_probabilities
from vllm_exl3.demo.kept import KeptLinears
from vllm_exl3.demo.quantize import Recipe, kept_weights, quantize_model, total_weights
from vllm_exl3.demo.smollm2 import DenseModel, read_gguf
from vllm_exl3.demo.source import GGUF_SHA256, find_source, verify_source
from vllm_exl3.demo.tokenizer import tokenizer_files
from vllm_exl3.tools.pack_writer import WRITER
from vllm_exl3.tools.whole_file import whole_file

__all__ = ["Workshop"]


@dataclass
class Workshop:
    """Makes the pack and the reference, or finds them made.

    Attributes:
        cache: where they are kept.
        display: tells what is being done.
        gguf: the source model, where it is not to be found or downloaded.
        recipe: how the pack is quantized.
    """

    cache: Path
    display: Display
    gguf: Path | None = None
    recipe: Recipe = field(default_factory=Recipe)

    @cached_property
    def model(self) -> DenseModel:
        """The source model; read at most once, and not at all when the cache has all that is made of it."""
        path = verify_source(self.gguf) if self.gguf is not None else find_source(self.cache)
        self.display.say("source", f"SmolLM2-135M-Instruct, {path}")
        return read_gguf(path)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the pack's bits: the encoder's version and the recipe."""
        return {"encoder": ENCODER_VERSION, **self.recipe.describe()}

    def pack(self) -> Path:
        """The pack's folder, quantized now if the cache has none of this identity."""
        key = _key({**self.identity, "source": GGUF_SHA256, "writer": WRITER})
        folder = self.cache / f"SmolLM2-135M-Instruct-exl3-{self.recipe.bits:g}bpw-{key}"
        if not folder.exists():
            self._quantize(folder)
        size = sum(file.stat().st_size for file in folder.iterdir())
        self.display.say("pack", f"{folder}, {size / 1e6:.0f} MB")
        return folder

    def reference(self, text: str, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """The 16-bit model's log probabilities on a text, ``[tokens, vocab]``.

        Args:
            text: names it in the cache.
            ids: its tokens.
        """
        path = self.cache / f"reference-{_key({'source': GGUF_SHA256, 'text': text})}.npy"
        if not path.exists():
            self.display.say("reference", "evaluating the 16-bit model with transformers")
            with whole_file(path) as partial:
                np.save(partial, dense_log_probabilities(self.model, ids))
        return np.asarray(np.load(path), np.float32)

    def _quantize(self, folder: Path) -> None:
        model, start = self.model, time.monotonic()
        total = total_weights(model)
        self.display.say("quantize", f"{total / 1e6:.0f} M weights to {self.recipe.bits:g} bits, {ENCODER_VERSION}")
        kept = KeptLinears(self.cache / f".unfinished-{folder.name}")
        done = kept_weights(model, self.recipe, kept)
        if done:
            self.display.say("", f"{done / total:.0%} of it was done before an interruption, and is kept")
        with self.display.progress(total, done) as advance:
            quantize_model(
                folder,
                model,
                recipe=self.recipe,
                encode=quantize_linear,
                extra_files=tokenizer_files(model.metadata),
                progress=advance,
                kept=kept,
            )
        kept.discard()
        self.display.say("", f"took {time.monotonic() - start:.0f} s")


def _key(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
