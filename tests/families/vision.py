"""Requests with one image: a tiny tokenizer and the family's own processor beside a pack, and a picture.

vLLM takes the processor from the model's folder, and the processor a tokenizer that knows the family's special tokens.
Here both are as small as the models are: words are numbers, pictures a few patches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["FIRST_TOKEN", "Vision", "picture", "write_processor"]

FIRST_TOKEN = 600
"""The id of a family's first special token; the words before it are their own numbers."""

_WORDS = 640


@dataclass(frozen=True)
class Vision:
    """How a family takes an image.

    Attributes:
        processor: makes transformers' processor from a tokenizer.
        tokens: special tokens, whose ids begin with `FIRST_TOKEN`, in order.
        prompt: those of them that stand for one image in a prompt, before vLLM expands them.
        named: tokenizer attributes that the processor reads, to their tokens.
        size: width and height of the picture in pixels.
    """

    processor: Callable[[Any], Any]
    tokens: tuple[str, ...]
    prompt: tuple[str, ...]
    named: Mapping[str, str] = field(default_factory=dict)
    size: tuple[int, int] = (64, 96)

    def id_of(self, token: str) -> int:
        """The id of one of the special tokens."""
        return FIRST_TOKEN + self.tokens.index(token)

    def prompt_ids(self, before: list[int], after: list[int]) -> list[int]:
        """A prompt with one image between two runs of text."""
        return [*before, *(self.id_of(token) for token in self.prompt), *after]


def write_processor(vision: Vision, folder: Path) -> None:
    """Write the tokenizer and the processor's configuration into a model's folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(_WORDS)}
    for count in range(1, 5):  # Gemma's processor looks for runs of newlines
        words["\n" * count] = words.pop(str(FIRST_TOKEN - count))
    for token in vision.tokens:
        del words[str(vision.id_of(token))]
        words[token] = vision.id_of(token)
    made = Tokenizer(models.WordLevel(words, unk_token="3"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="0",
        bos_token="1",
        eos_token="2",
        unk_token="3",
        extra_special_tokens=dict(vision.named) or None,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(vision.tokens)})
    vision.processor(tokenizer).save_pretrained(folder)


def picture(vision: Vision) -> Any:
    """A picture that is the same each time, and not the same everywhere."""
    from PIL import Image

    width, height = vision.size
    pixels = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height))
