"""What is not served on purpose, each under a named rule, and what nobody accounts for.

Nothing may vanish silently: `classify` sorts every stored byte into served, skipped under a rule,
or unknown, and `vllm-exl3 inspect` shows the three.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_exl3.pack.assemble import LINEAR_LEAVES, NGRAM_EXTRA
from vllm_exl3.pack.metadata import text_configs
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.stored import StoredRowTable, StoredTensor

__all__ = ["MAIN_LAYER", "RULES", "Accounts", "Rule", "Skipper", "classify", "draft_layers", "main_layers"]

MAIN_LAYER = re.compile(r"^(?:model\.|language_model\.|transformer\.)*layers\.(\d+)\.")
"""The start of every tensor name in a decoder layer of the language model."""

_SPLIT_QKV = re.compile(r"^(?P<attention>.+\.attn)\.(?:q|k|v|q_proj|k_proj|v_proj)$")


@dataclass(frozen=True, slots=True)
class Rule:
    """A reason to leave stored tensors unread.

    Attributes:
        name: what `inspect` shows.
        reason: why leaving them out is right.
        matches: whether it applies to a module, given its key.
        leaves: the tensors of the module that it applies to; empty for all.
        speculation: whether the tensors are wanted once speculative decoding is on.
    """

    name: str
    reason: str
    matches: Callable[["Skipper", str], bool]
    leaves: tuple[str, ...] = ()
    speculation: bool = False


def _alignment_filler(_: "Skipper", key: str) -> bool:
    return key.startswith("__align_pad__")


def _mtp(skipper: "Skipper", key: str) -> bool:
    return skipper.is_mtp(key)


def _duplicated_vision(skipper: "Skipper", key: str) -> bool:
    match = _SPLIT_QKV.match(key) if ".attn." in key else None
    return match is not None and skipper.has_module(f"{match['attention']}.qkv")


def _superseded(skipper: "Skipper", key: str) -> bool:
    return key in skipper.pack.linears or key in skipper.pack.embeddings


def _any_module(_: "Skipper", key: str) -> bool:
    return True


RULES = (
    Rule("alignment filler", "padding that lets other servers map the file; holds no weights", _alignment_filler),
    Rule("MTP without speculation", "draft layers, read only with --speculative-config", _mtp, speculation=True),
    Rule("duplicated vision attention", "q, k, v stored again beside the fused qkv", _duplicated_vision),
    Rule("dense copy of an EXL3 module", "a .weight beside a trellis; the trellis is served", _superseded, ("weight",)),
    Rule("rotary buffer", "computed by vLLM itself", _any_module, ("inv_freq", "cos_cached", "sin_cached")),
)
"""Every rule, in the order they are tried."""

_RULED_LEAVES = frozenset(leaf for rule in RULES for leaf in rule.leaves)


class Skipper:
    """Applies the rules to the tensors of one pack."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        first = main_layers(pack.config)
        self._draft_layers = range(first, first + draft_layers(pack.config))
        self._module_rules: dict[str, Rule | None] = {}

    def rule_for_module(self, key: str, *, draft: bool = False) -> Rule | None:
        """The rule that skips a whole module; with ``draft`` speculation is on."""
        if key not in self._module_rules:
            whole = (rule for rule in RULES if not rule.leaves and rule.matches(self, key))
            self._module_rules[key] = next(whole, None)
        rule = self._module_rules[key]
        return None if rule is not None and draft and rule.speculation else rule

    def rule_for_tensor(self, name: str, *, draft: bool = False) -> Rule | None:
        """The rule that skips one tensor; with ``draft`` speculation is on."""
        key, _, leaf = name.rpartition(".")
        if (rule := self.rule_for_module(key, draft=draft)) is not None:
            return rule
        if leaf not in _RULED_LEAVES:
            return None
        return next((rule for rule in RULES if leaf in rule.leaves and rule.matches(self, key)), None)

    def is_mtp(self, key: str) -> bool:
        """Whether a module belongs to draft layers: under ``mtp``, or those that config.json counts after the stack."""
        if key.startswith(("mtp.", "model.mtp.")):
            return True
        match = MAIN_LAYER.match(f"{key}.")
        return match is not None and int(match[1]) in self._draft_layers

    def has_module(self, key: str) -> bool:
        """Whether the pack stores this module, quantized or not."""
        return key in self.pack.linears or key in self.pack.dense


@dataclass
class Accounts:
    """Every stored byte of a pack by what becomes of it.

    Attributes:
        served: class of tensor (``EXL3 linears``, ``dense`` …) to bytes.
        skipped: rule name to the tensors that it skips.
        unknown: tensors that nobody accounts for.
        ignored_files: files left unopened, with the reason.
    """

    served: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, list[StoredTensor]] = field(default_factory=dict)
    unknown: list[StoredTensor] = field(default_factory=list)
    ignored_files: Mapping[str, str] = field(default_factory=dict)


def classify(pack: Pack, *, speculation: bool = False) -> Accounts:
    """Sort every stored tensor into served, skipped under a rule, or unknown."""
    accounts = Accounts(ignored_files=pack.ignored_files)
    skipper = Skipper(pack)
    declared = pack.quantization.get("non_routed_quantization")
    other = f"{declared.get('quant_method')} (declared source format)" if isinstance(declared, Mapping) else None
    for name, tensor in pack.tensors.items():
        key, _, leaf = name.rpartition(".")
        if rule := skipper.rule_for_tensor(name, draft=speculation):
            accounts.skipped.setdefault(rule.name, []).append(tensor)
        elif kind := _served_as(pack, key, leaf, tensor, other):
            accounts.served[kind] = accounts.served.get(kind, 0) + tensor.nbytes
        else:
            accounts.unknown.append(tensor)
    return accounts


def _served_as(pack: Pack, key: str, leaf: str, tensor: StoredTensor, other: str | None) -> str | None:
    """The class of a served tensor; ``other`` is that of formats which only the metadata explains."""
    kind = other
    if key in pack.linears:
        kind = ("EXL3 experts" if ".experts." in key else "EXL3 linears") if leaf in LINEAR_LEAVES else None
    elif key in pack.embeddings:
        kind = _embedding_class(pack, key, leaf)
    elif _ngram_owner(pack, key):
        kind = "EXL3 n-gram tables" if leaf in ("trellis", "head_bias", *NGRAM_EXTRA) else None
    elif tensor.dtype in ("F16", "BF16", "F32", "F64", "I64", "I32", "BOOL") and leaf not in LINEAR_LEAVES[:-1]:
        kind = "dense"
    return kind


def _embedding_class(pack: Pack, key: str, leaf: str) -> str | None:
    if isinstance(pack.embeddings[key], StoredRowTable):
        return "EXL3 embeddings" if leaf in ("trellis", "signs") else None
    return f"int{pack.embeddings[key].bits} embeddings" if leaf in ("qrows", "scales") else None


def _ngram_owner(pack: Pack, key: str) -> bool:
    return key in pack.ngram_tables or key.rpartition(".shard_")[0] in pack.ngram_tables


def main_layers(config: Mapping[str, Any]) -> int:
    """Decoder layers of the main model, or 0 when config.json does not say."""
    for holder in text_configs(config):
        if isinstance(holder.get("num_hidden_layers"), int):
            return int(holder["num_hidden_layers"])
    return 0


def draft_layers(config: Mapping[str, Any]) -> int:
    """MTP layers that config.json declares, under any of the names in use."""
    for holder in text_configs(config):
        for name, value in holder.items():
            if ("nextn" in name or "mtp" in name) and "layers" in name and type(value) is int:
                return value
    return 0
