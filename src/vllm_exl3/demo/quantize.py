"""Quantizes the demo's model to an EXL3 pack with this project's own encoder, the way exllamav3 lays packs out.

Widths are padded with zeros to multiples of 128; a tied head becomes a linear of its own; embeddings and
norms stay float16.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vllm_exl3.demo.kept import KeptLinears
from vllm_exl3.demo.smollm2 import DenseModel
from vllm_exl3.pack.stored import Codebook, pad_to_block
from vllm_exl3.tools.pack_writer import WRITER, PackTensor, linear_tensors, write_pack

__all__ = ["EncodedLinear", "Encoder", "Recipe", "kept_weights", "quantize_model", "total_weights"]

Array = npt.NDArray[Any]


class EncodedLinear(Protocol):
    """What an encoder returns for a weight ``[in, out]``."""

    trellis: Array
    suh: Array
    svh: Array


class Encoder(Protocol):
    """A function that quantizes one weight."""

    def __call__(
        self,
        weight: npt.NDArray[np.float32],
        half_bits: int,
        codebook: Codebook,
        /,
        *,
        progress: Callable[[int, int], None],
    ) -> EncodedLinear:
        """Quantize a weight ``[in, out]`` (multiples of 128) at 2·K half bits; tell tiles done and all tiles."""
        ...


@dataclass(frozen=True)
class Recipe:
    """How a pack is quantized; together with the encoder's version it names the pack in the cache.

    Attributes:
        bits: K of the decoder's linears.
        head_bits: K of ``lm_head``.
        codebook: ``3inst``, ``mcg`` or ``mul1``.
    """

    bits: float = 4
    head_bits: float = 6
    codebook: str = "mul1"

    def describe(self) -> dict[str, Any]:
        """The recipe as plain values."""
        return asdict(self)

    @property
    def kind(self) -> Codebook:
        """The codebook by its name."""
        return next(kind for kind in Codebook if kind.label == self.codebook)

    def half_bits(self, key: str) -> int:
        """2·K of a linear, by its name."""
        return round(2 * (self.head_bits if key == "lm_head" else self.bits))


def quantize_model(
    folder: Path,
    model: DenseModel,
    *,
    recipe: Recipe,
    encode: Encoder,
    extra_files: dict[str, str],
    progress: Callable[[float, str], None] = lambda weights, module: None,
    kept: KeptLinears | None = None,
) -> Path:
    """Quantize every linear of a llama model and write the pack.

    Args:
        folder: where the pack goes; an existing folder is replaced.
        model: the model.
        recipe: bits and codebook.
        encode: the encoder.
        extra_files: the tokenizer's files, name → text.
        progress: called now and then with how many more weights are done, and their linear's name.
        kept: linears of an earlier run that was interrupted, to be taken from there; what is encoded is added.

    Returns:
        The folder.
    """
    config = {**model.config, "tie_word_embeddings": False}
    return write_pack(
        folder,
        config=config,
        quantization={
            "quant_method": "exl3",
            "version": WRITER,
            "bits": float(recipe.bits),
            "head_bits": recipe.head_bits,
            # nothing was calibrated: weights are rounded without a Hessian
            "calibration": {"rows": 0, "cols": 0},
            "out_scales": "always",
            "codebook": recipe.codebook,
        },
        tensors=_planned(model, recipe, encode, progress, kept),
        extra_files={**extra_files, "generation_config.json": _generation_config(model.config)},
    )


def total_weights(model: DenseModel) -> int:
    """How many weights `quantize_model` encodes, padding left out."""
    return sum(weight.size for _, weight in _linears(model))


def kept_weights(model: DenseModel, recipe: Recipe, kept: KeptLinears) -> int:
    """How many of the `total_weights` need not be encoded, since an earlier run has."""
    codebook = recipe.kind
    return sum(
        weight.size
        for key, weight in _linears(model)
        if kept.find(key, weight, recipe.half_bits(key), codebook) is not None
    )


def _planned(
    model: DenseModel,
    recipe: Recipe,
    encode: Encoder,
    progress: Callable[[float, str], None],
    kept: KeptLinears | None,
) -> Iterator[PackTensor]:
    codebook = recipe.kind
    for name, weight in model.tensors.items():
        if not _is_linear(name, weight):
            yield PackTensor(name, "F16", weight.shape, lambda weight=weight: weight.astype(np.float16))
    for key, weight in _linears(model):
        half_bits = recipe.half_bits(key)
        rows, columns = pad_to_block(weight.shape[1]), pad_to_block(weight.shape[0])
        yield from linear_tensors(
            key,
            in_features=rows,
            out_features=columns,
            half_bits=half_bits,
            codebook=codebook,
            make=_OnceEncoded(key, weight, half_bits, codebook, encode, progress, kept),
        )


def _is_linear(name: str, weight: Array) -> bool:
    return weight.ndim == 2 and name != "model.embed_tokens.weight"


def _linears(model: DenseModel) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Key and weight ``[out, in]`` of every linear, the head last; a tied head is the embedding."""
    for name, weight in model.tensors.items():
        if _is_linear(name, weight) and name != "lm_head.weight":
            yield name.removesuffix(".weight"), weight
    yield "lm_head", model.tensors.get("lm_head.weight", model.tensors["model.embed_tokens.weight"])


@dataclass
class _OnceEncoded:
    """Makes the leaves of one linear: encodes at the first one asked for, forgets after the last."""

    key: str
    weight: npt.NDArray[np.float32]
    half_bits: int
    codebook: Codebook
    encode: Encoder
    progress: Callable[[float, str], None]
    kept: KeptLinears | None
    encoded: EncodedLinear | None = None
    shown: float = 0.0

    def __call__(self, leaf: str) -> Array:
        if self.encoded is None:
            self.encoded = self._found_or_encoded()
        values: Array = getattr(self.encoded, leaf)
        if leaf == "trellis":
            self.encoded = None
        return values

    def _found_or_encoded(self) -> EncodedLinear:
        facts = (self.key, self.weight, self.half_bits, self.codebook)
        if self.kept is not None and (found := self.kept.find(*facts)) is not None:
            return found
        encoded = self.encode(_padded(self.weight.T), self.half_bits, self.codebook, progress=self._advance)
        if self.kept is not None:
            self.kept.keep(*facts, {leaf: getattr(encoded, leaf) for leaf in ("trellis", "suh", "svh")})
        return encoded

    def _advance(self, tiles: int, all_tiles: int) -> None:
        share = tiles / all_tiles
        self.progress((share - self.shown) * self.weight.size, self.key)
        self.shown = share


def _padded(weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    rows, columns = (pad_to_block(size) for size in weight.shape)
    padded = np.zeros((rows, columns), np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded


def _generation_config(config: dict[str, Any]) -> str:
    return json.dumps({key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}, indent=2) + "\n"
