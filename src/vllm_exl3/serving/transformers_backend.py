"""Models that vLLM builds from transformers' classes: what those do past vLLM's layers and its quantization methods.

The backend takes a model's layers from transformers and computes the logits itself. Of what the classes there do to
logits it knows ``logit_scale`` and ``final_logit_softcapping``; a model with another factor would answer with other
probabilities. And where code of transformers reads a linear's ``weight``, that layer needs one.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import MODEL_MAPPING
from vllm.config import VllmConfig

from vllm_exl3.pack.errors import Exl3PackError

__all__ = ["LOGIT_FACTORS", "check_logit_factors", "read_matrices", "reads_matrix"]

LOGIT_FACTORS = {
    "logits_scaling": "Granite, HyperCLOVA X",
    "lm_head_multiplier": "Falcon-H1",
    "dim_model_base": "MiniCPM",
    "output_multiplier": "Muse Glimmer",
    "output_multiplier_scale": "Grok",
    "output_mult": "TeleFLM",
    "mup_width_multiplier": "Phi-3-small",
    "logit_softcapping": "Laguna",
    "logits_soft_cap": "RecurrentGemma",
}
"""What config.json calls such a factor, and models that have it."""


def check_logit_factors(config: VllmConfig | None, where: str) -> None:
    """Refuse a model whose logits the backend would compute otherwise.

    Args:
        config: vLLM's current configuration, where there is one.
        where: the pack, for the error.

    Raises:
        Exl3PackError: naming the factor.
    """
    model = config.model_config if config is not None else None
    if model is None or not model.using_transformers_backend():
        return
    text = model.hf_text_config
    values = {name: getattr(text, name, None) for name in LOGIT_FACTORS}
    if name := next((name for name in values if _counts(name, values, getattr(text, "hidden_size", None))), None):
        raise Exl3PackError(
            found=f"{name} {values[name]} in config.json ({LOGIT_FACTORS[name]}), and vLLM's transformers backend, "
            "which leaves it out of the logits",
            expected="a backend that computes the model's own probabilities",
            where=where,
            remedy="Start without --model-impl transformers, with a vLLM that has this model class.",
        )


def _counts(name: str, values: Mapping[str, Any], hidden: Any) -> bool:
    """Whether a factor changes logits: 1 does not, nor a base width that is the model's."""
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value not in (0, hidden if name == "dim_model_base" else 1)


def reads_matrix(config: VllmConfig | None, prefix: str) -> bool:
    """True if code of transformers reads the ``weight`` of this layer, which is then decoded while loading.

    Args:
        config: vLLM's current configuration, where there is one.
        prefix: the layer's name.
    """
    model = config.model_config if config is not None else None
    if model is None or not model.using_transformers_backend():
        return False
    name = prefix.rpartition(".")[2]
    return any(name in _read_in(module) for module in _modelling_modules(model.hf_config))


def read_matrices(source: str) -> frozenset[str]:
    """The attributes of ``self`` whose ``weight`` some code reads, but to initialize it.

    Args:
        source: of a Python module.
    """
    return frozenset(_read(ast.parse(source)))


@functools.cache
def _read_in(module: str) -> frozenset[str]:
    return read_matrices(inspect.getsource(sys.modules[module]))


def _read(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef) and node.name == "_init_weights":
        return
    if isinstance(node, ast.Attribute) and node.attr == "weight" and isinstance(node.value, ast.Attribute):
        owner = node.value.value
        if isinstance(owner, ast.Name) and owner.id == "self":
            yield node.value.attr
    for child in ast.iter_child_nodes(node):
        yield from _read(child)


def _modelling_modules(config: Any) -> Iterator[str]:
    """The modules of the classes that a configuration and the ones in it stand for, of those that transformers has."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for each in (config, *parts):
        if type(each) in MODEL_MAPPING:
            made = MODEL_MAPPING[type(each)]
            yield from {one.__module__ for one in (made if isinstance(made, tuple) else (made,))}
