"""Tensors that one decoder layer lacks or has of another type than its siblings, and a model without its final norm."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from vllm_exl3.pack.assemble import LINEAR_LEAVES
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.metadata import text_configs
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.skip import MAIN_LAYER, Skipper, main_layers
from vllm_exl3.pack.spelling import TOWER

__all__ = ["layer_faults", "layer_warnings"]

_MLP = re.compile(r"(^|\.)(\w*mlp|feed_forward|ffn|shared_experts?)$")
_NEEDS = {"gate_proj": ("up_proj", "down_proj"), "up_proj": ("down_proj",)}
"""Projections of an MLP that make no sense alone; an MLP without a gate has the last two."""

_KINDS = ("layer_types", "mlp_layer_types")
"""Lists of config.json by which layers of one model differ."""

_NORM = re.compile(r"(^|[._])(\w*norm\w*|ln(_\w+)?)$")
_TOWERS = re.compile(rf"(^|\.)({TOWER}|mtp)\.")
_FEWEST = 3
"""Layers of one kind from which on a difference in a single one is none of design."""

_REMEDY = "A tensor was lost when the pack was made or copied: fetch the pack again."


@dataclass(frozen=True)
class _Lacking:
    """A module, or a bias, that one layer lacks although all others of its kind have it."""

    layer: int
    key: str
    like: str
    others: int
    at_an_end: bool


def layer_faults(pack: Pack) -> Iterator[Exl3PackError]:
    """Modules of decoder layers, and the final norm, that are certainly missing."""
    layers = _layers(pack)
    halves = _halves_of_mlps(layers)
    for key, have in halves.items():
        yield _fault(pack, key, f"a tensor of it beside {have}")
    for lacking in _odd_ones_out(pack, layers):
        if not lacking.at_an_end and lacking.key not in halves:
            yield _fault(pack, lacking.key, f"it, as in {lacking.others} other layers, such as {lacking.like}")
    if layers and any(_NORM.search(name) for names in layers.values() for name in names) and not _has_final_norm(pack):
        yield _fault(pack, "final norm", "a norm after the last layer, since the layers have norms")


def layer_warnings(pack: Pack) -> Iterator[str]:
    """Differences of the first and the last layer, where models may have them by design."""
    layers = _layers(pack)
    named = _halves_of_mlps(layers)
    for lacking in _odd_ones_out(pack, layers):
        if lacking.at_an_end and lacking.key not in named:
            yield (
                f"no {lacking.key}, which {lacking.others} other layers have ({lacking.like}); if the model needs it, "
                "vLLM will refuse to start"
            )
    yield from _other_types(pack)


def _other_types(pack: Pack) -> Iterator[str]:
    """Tensors of another dtype than in every other layer: converters treat all layers alike, so bytes are misread."""
    found: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, tensor in pack.tensors.items():
        if ".experts." not in name and (match := MAIN_LAYER.match(name)) is not None:
            found[name[match.end() :]][tensor.dtype].append(name)
    for by_type in found.values():
        if len(by_type) != 2:
            continue
        (odd, names), (usual, others) = sorted(by_type.items(), key=lambda item: len(item[1]))
        if len(names) == 1 and len(others) >= _FEWEST - 1:
            yield f"{names[0]} is {odd}, where {len(others)} other layers have {usual}, such as {others[0]}"


def _layers(pack: Pack) -> dict[int, dict[str, str]]:
    """What each decoder layer stores: names within the layer to names in the pack; a weight is named by its module."""
    layers: defaultdict[int, dict[str, str]] = defaultdict(dict)
    skipper, count = Skipper(pack), main_layers(pack.config)
    sliced: set[int] = set()
    # Routed experts are compared elsewhere; here it counts that a layer has some.
    experts = dict.fromkeys(name.partition(".experts.")[0] for name in pack.tensors if ".experts." in name)
    plain = (name for name in pack.tensors if ".experts." not in name)
    for name in (*plain, *(f"{key}.experts.weight" for key in experts)):
        match = MAIN_LAYER.match(name)
        if match is None or int(match[1]) >= count:
            continue
        if ".slice." in name:  # refused elsewhere, as not served
            sliced.add(int(match[1]))
        key, _, leaf = name.rpartition(".")
        if skipper.rule_for_tensor(name) is None:
            full = key if leaf == "weight" or (leaf in LINEAR_LEAVES and leaf != "bias") else name
            layers[int(match[1])][full[match.end() :]] = full
    return {layer: names for layer, names in layers.items() if layer not in sliced}


def _halves_of_mlps(layers: Mapping[int, Mapping[str, str]]) -> dict[str, str]:
    """Each missing projection, and a present one that it belongs to."""
    found: dict[str, str] = {}
    for names in layers.values():
        for name, full in names.items():
            parent, _, leaf = name.rpartition(".")
            if not _MLP.search(parent):
                continue
            for other in _NEEDS.get(leaf, ()):
                if f"{parent}.{other}" not in names:
                    found.setdefault(f"{full.removesuffix(leaf)}{other}", full)
    return found


def _odd_ones_out(pack: Pack, layers: Mapping[int, Mapping[str, str]]) -> Iterator[_Lacking]:
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for layer, names in sorted(layers.items()):
        blocks = {name.rpartition(".")[0] for name in names} - names.keys()
        blocks |= {name for name in names if name.endswith(".experts")}
        groups[(*_kinds(pack.config, layer), frozenset(blocks))].append(layer)
    ends = {0, main_layers(pack.config) - 1}
    for members in groups.values():
        if len(members) < _FEWEST:
            continue
        for name in dict.fromkeys(name for layer in members for name in layers[layer]):
            without = [layer for layer in members if name not in layers[layer]]
            if len(without) == 1:
                (layer,) = without
                like = next(layers[other][name] for other in members if name in layers[other])
                key = MAIN_LAYER.sub(lambda match: match[0].replace(f".{match[1]}.", f".{layer}."), like)  # noqa: B023
                yield _Lacking(layer, key, like, len(members) - 1, layer in ends)


def _kinds(config: Mapping[str, Any], layer: int) -> tuple[object, ...]:
    """What config.json says of one layer in particular."""
    found = []
    for holder in text_configs(config):
        for name in _KINDS:
            kinds = holder.get(name)
            if isinstance(kinds, list) and layer < len(kinds):
                found.append(str(kinds[layer]))
    return tuple(found)


def _has_final_norm(pack: Pack) -> bool:
    skipper = Skipper(pack)

    @cache
    def counts(key: str) -> bool:
        outside = MAIN_LAYER.match(f"{key}.") is None and not _TOWERS.search(f"{key}.") and not skipper.is_mtp(key)
        return outside and _NORM.search(key) is not None

    return any(".experts." not in name and counts(name.rpartition(".")[0]) for name in pack.tensors)


def _fault(pack: Pack, key: str, expected: str) -> Exl3PackError:
    return Exl3PackError(found=f"no {key}", expected=expected, where=pack.source, remedy=_REMEDY)
