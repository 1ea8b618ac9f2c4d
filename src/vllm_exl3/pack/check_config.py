"""Values of config.json that no model can have: named here, where vLLM would meet them late and without the file."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_exl3.pack.check_experts import EXPERT_COUNTS, declared_experts
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.metadata import text_config
from vllm_exl3.pack.pack import Pack

__all__ = ["config_faults"]

_COUNTS = ("num_hidden_layers", "hidden_size", "vocab_size")
_PER_LAYER_COUNTS = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
"""May be lists, one value a layer; 0 for models without."""

_EXPERT_SIZES = (*EXPERT_COUNTS, "num_experts_per_tok", "moe_intermediate_size")
"""Looked at where experts are stored: dense models of a family with experts have all kinds of values there."""

_PER_TOKEN = "num_experts_per_tok"  # noqa: S105  a token of text
_SHOWN = 60


def config_faults(pack: Pack) -> Iterator[Exl3PackError]:
    """Every value that is of a kind, or of a size, that its key cannot have."""
    names = pack.config.get("architectures", [])
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        yield _fault(pack, "architectures", names, "a list of names of model classes")
    part = text_config(pack.config)
    yield from _counts(pack, part, _COUNTS, 1, lists=False)
    yield from _counts(pack, part, _PER_LAYER_COUNTS, 0, lists=True)
    if pack.experts:
        yield from _counts(pack, part, _EXPERT_SIZES, 1, lists=True)
        chosen, experts = part.get(_PER_TOKEN), declared_experts(pack.config)
        if type(chosen) is int and 0 < experts < chosen:
            yield _fault(pack, _PER_TOKEN, chosen, f"at most the {experts} experts of a layer")


def _counts(
    pack: Pack, part: Mapping[str, Any], names: tuple[str, ...], least: int, *, lists: bool
) -> Iterator[Exl3PackError]:
    for name in names:
        value = part.get(name)
        if value is None or (lists and isinstance(value, list)):
            continue
        if type(value) is not int or value < least:
            yield _fault(pack, name, value, f"a whole number of at least {least}")


def _fault(pack: Pack, name: str, value: object, expected: str) -> Exl3PackError:
    text = json.dumps(value)
    return Exl3PackError(
        found=f"{name} {text if len(text) <= _SHOWN else text[:_SHOWN] + '…'}",
        expected=expected,
        where=f"config.json of {pack.source}",
        remedy="The file was damaged or edited: fetch it again from where the pack comes from.",
    )
