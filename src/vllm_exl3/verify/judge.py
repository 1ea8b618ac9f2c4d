"""Teacher-forced divergence of a quantized model from the 16-bit one, on models larger than memory.

Transformers' modules run with one decoder layer's weights in memory at a time: a hook fills a layer when the hidden
states of all sequences reach it, and empties it when they leave. Of each model only the final hidden states are kept;
both heads are then applied to a few tokens at a time.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from vllm_exl3.pack import Exl3PackError
from vllm_exl3.pack.skip import main_layers
from vllm_exl3.verify.statistics import Estimate, bootstrap_mean
from vllm_exl3.verify.weights import Weights, find_weight

__all__ = ["Divergence", "FinalStates", "compare", "final_states"]

_HEAD_TOKENS = 64
_HEAD_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier", "dim_model_base", "output_multiplier_scale")
"""Factors on logits in configurations of model classes whose heads are more than a matrix."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
"""The number of a decoder layer in a tensor's name."""

Progress = Callable[[float], None]


@dataclass(frozen=True)
class FinalStates:
    """Final hidden states of a model on a text, and its head.

    Attributes:
        hidden: float32 ``[sequences, tokens, hidden]``, after the final norm.
        head: float32 ``[vocabulary, hidden]``.
        softcap: bound of the logits (Gemma 2), or None.
    """

    hidden: torch.Tensor
    head: torch.Tensor
    softcap: float | None

    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden]`` to ``[tokens, vocabulary]`` in float32."""
        logits = hidden @ self.head.T
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return torch.log_softmax(logits, -1)


@dataclass(frozen=True)
class Divergence:
    """How a model differs from the reference on a text.

    Attributes:
        kl: KL(reference ‖ model) of each predicted token, nats, ``[sequences, tokens]``.
        agrees: whether the likeliest token is the same, likewise.
        loss: negative log likelihood of the text's token under the model, likewise.
        reference_loss: the same under the reference.
    """

    kl: npt.NDArray[np.float32]
    agrees: npt.NDArray[np.bool_]
    loss: npt.NDArray[np.float32]
    reference_loss: npt.NDArray[np.float32]

    @property
    def not_finite(self) -> int:
        """Tokens at which the model's predictions are no numbers."""
        return int((~(np.isfinite(self.kl) & np.isfinite(self.loss))).sum())

    def estimates(self) -> dict[str, Estimate]:
        """Means over tokens with 95 % intervals by bootstrap over sequences; NaN where predictions are no numbers."""
        return {
            "kl": bootstrap_mean(self.kl),
            "top1_agreement": bootstrap_mean(self.agrees),
            "perplexity": bootstrap_mean(self.loss).exp(),
            "reference_perplexity": bootstrap_mean(self.reference_loss).exp(),
            "loss_increase": bootstrap_mean(self.loss - self.reference_loss),
        }


def final_states(
    weights: Weights, config: Mapping[str, Any], ids: torch.Tensor, progress: Progress = lambda layers: None
) -> FinalStates:
    """Run a model's layers over a text, streaming its weights.

    Args:
        weights: the model.
        config: its config.json.
        ids: int64 ``[sequences, tokens]``.
        progress: called after each layer, with 1.

    Raises:
        Exl3PackError: transformers has no such model, its layers cannot be streamed, or a weight is missing.
    """
    values = {key: value for key, value in config.items() if key not in ("quantization_config", "architectures")}
    _check_depth(weights, config)
    model, settings = _on_meta(weights.label, values)
    base: Any = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    _check_head(weights.label, model, settings)
    if int(ids.max()) >= settings.vocab_size:
        expected = f"more than {int(ids.max())}, a token of the text"
        raise _unsupported(weights.label, f"a vocabulary of {settings.vocab_size} tokens", expected)
    prefix = next(name for name, module in model.named_modules() if module is base)
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise _unsupported(weights.label, f"{type(base).__name__} without layers", "a decoder-only language model")
    sizes = _row_counts(model)
    inside = {id(parameter) for parameter in layers.parameters()}
    rest = {name: parameter for name, parameter in base.named_parameters() if id(parameter) not in inside}
    _fill(base, rest, prefix, weights, sizes)
    handles = []
    for number, layer in enumerate(layers):
        place = f"{prefix}.layers.{number}"
        enter, leave = _streaming(place, weights, sizes, progress)
        handles += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    with torch.inference_mode():
        hidden = base(input_ids=ids, use_cache=False).last_hidden_state.float()
    for handle in handles:
        handle.remove()
    head = find_weight(weights, "lm_head.weight", sizes.get)
    if head is None:
        raise _missing(weights.label, "lm_head.weight")
    vocabulary = settings.vocab_size
    softcap = getattr(settings, "final_logit_softcapping", None)
    return FinalStates(hidden, torch.from_numpy(np.array(head[:vocabulary, : hidden.shape[-1]])), softcap)


def compare(
    reference: FinalStates, other: FinalStates, ids: torch.Tensor, progress: Progress = lambda tokens: None
) -> Divergence:
    """Compare two models' predictions of every token but the first of each sequence.

    Args:
        reference: the 16-bit model's states.
        other: the quantized model's, on the same text.
        ids: the text, int64 ``[sequences, tokens]``.
        progress: called with the number of tokens that were compared since the last call.
    """
    sequences, tokens = ids.shape
    targets = ids[:, 1:].reshape(-1)
    flat = [states.hidden[:, :-1].reshape(len(targets), -1) for states in (reference, other)]
    kl, loss, reference_loss = (np.empty(len(targets), np.float32) for _ in range(3))
    agrees = np.empty(len(targets), bool)
    with torch.inference_mode():
        for start in range(0, len(targets), _HEAD_TOKENS):
            part = slice(start, start + _HEAD_TOKENS)
            p, q = (
                states.log_probabilities(hidden[part]) for states, hidden in zip((reference, other), flat, strict=True)
            )
            if p.shape != q.shape:
                raise ValueError(f"vocabulary: found {q.shape[-1]} tokens, expected {p.shape[-1]} as in the reference")
            kl[part] = (p.exp() * (p - q)).sum(-1, dtype=torch.float64).numpy()
            agrees[part] = (p.argmax(-1) == q.argmax(-1)).numpy()
            each = torch.arange(len(p))
            reference_loss[part], loss[part] = (-lines[each, targets[part]].numpy() for lines in (p, q))
            progress(len(p))
    shape = sequences, tokens - 1
    return Divergence(kl.reshape(shape), agrees.reshape(shape), loss.reshape(shape), reference_loss.reshape(shape))


def _check_depth(weights: Weights, config: Mapping[str, Any]) -> None:
    """Refuse a configuration of more layers than are stored before modules are made for them."""
    declared = main_layers(config)
    stored = {int(match[1]) for name in weights.names() if (match := _LAYER.search(name))}
    if stored and declared > len(stored):
        raise _unsupported(weights.label, f"{declared} layers in config.json", f"the {len(stored)} that are stored")


def _check_head(label: str, model: Any, settings: Any) -> None:
    """Refuse a head that does more than multiply: its predictions would be wrong without a word."""
    found = [name for name in _HEAD_SCALES if getattr(settings, name, None) not in (None, 1, 1.0)]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        found.append("a bias")
    if found:
        raise _unsupported(label, f"a head with {', '.join(found)}", "a head that is a matrix")


def _on_meta(label: str, values: dict[str, Any]) -> tuple[Any, Any]:
    """The model without weights but with its buffers, which no checkpoint stores, and the language model's settings."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.for_model(**values)
        config._attn_implementation = "sdpa"
        with _meta_parameters():
            made: Any = AutoModelForCausalLM
            return made.from_config(config, dtype=torch.float32).eval(), config.get_text_config()
    except Exception as error:  # what a wrong configuration raises is up to each model class
        says = (str(error).splitlines() or [type(error).__name__])[0]
        found = f"model_type {values.get('model_type')!r}: {says[:300]}"
        raise _unsupported(label, found, "a causal language model that transformers knows") from error


@contextmanager
def _meta_parameters() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False))

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _row_counts(model: nn.Module) -> dict[str, int]:
    """Rows of every linear, and of the parts of fused ones as far as they are modules."""
    return {name: parameter.shape[0] for name, parameter in model.named_parameters()}


def _streaming(
    place: str, weights: Weights, sizes: Mapping[str, int], progress: Progress
) -> tuple[Callable[..., None], Callable[..., None]]:
    def enter(layer: nn.Module, _: Any) -> None:
        _fill(layer, dict(layer.named_parameters()), place, weights, sizes)

    def leave(layer: nn.Module, _: Any, __: Any) -> None:
        for name, parameter in list(layer.named_parameters()):
            _set(layer, name, parameter.to("meta"))
        progress(1)

    return enter, leave


def _fill(
    module: nn.Module, names: Mapping[str, nn.Parameter], place: str, weights: Weights, sizes: Mapping[str, int]
) -> None:
    for name, parameter in names.items():
        full = f"{place}.{name}" if place else name
        value = find_weight(weights, full, sizes.get)
        if value is None:
            raise _missing(weights.label, full)
        if value.ndim != parameter.ndim or any(
            not 0 <= have - want < 128 for have, want in zip(value.shape, parameter.shape, strict=True)
        ):
            found = f"shape {list(value.shape)}"
            raise _unsupported(weights.label, found, f"{list(parameter.shape)}, padded at most, for {full}")
        cropped = value[tuple(slice(size) for size in parameter.shape)]
        _set(module, name, torch.from_numpy(np.array(cropped, np.float32)))


def _set(module: nn.Module, name: str, value: torch.Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, nn.Parameter(value, requires_grad=False))


def _missing(label: str, name: str) -> Exl3PackError:
    return Exl3PackError(
        found=f"no {name}, nor tensors that it could be made of",
        expected="every weight of the model that config.json describes",
        where=label,
        remedy="If the model is complete, transformers names it differently: judge it through a server instead.",
    )


def _unsupported(label: str, found: str, expected: str) -> Exl3PackError:
    return Exl3PackError(found=found, expected=expected, where=label, remedy="`verify` without --text does the rest.")
