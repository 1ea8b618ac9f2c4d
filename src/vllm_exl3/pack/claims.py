"""What a pack's metadata claims, held against what its headers say.

The ledger (``tensor_storage``) speaks of single tensors, so where it contradicts a trellis one of
the two belongs to another pack: a fault. ``bits``, ``layer_bits``, ``codebook`` and the like only
summarise: one warning names every disagreement with both values, and the headers win.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vllm_exl3.pack.assemble import MARKERS
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.metadata import declared_blocks
from vllm_exl3.pack.names import NameResolver
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.skip import Skipper
from vllm_exl3.pack.spelling import is_head_name
from vllm_exl3.pack.stored import StoredLinear
from vllm_exl3.pack.wording import counted

__all__ = ["LedgerAudit", "audit_ledger", "body_and_head", "claim_warnings", "mean_bits"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_TOLERANCE = 0.1
"""How far the declared average may lie from the measured one: writers round, and count differently."""


@dataclass(frozen=True)
class LedgerAudit:
    """What one pass over the ledger shows.

    Attributes:
        faults: entries that contradict the tensors they describe.
        absent: listed tensors that no file holds.
    """

    faults: tuple[Exl3PackError, ...]
    absent: tuple[str, ...]


@lru_cache(maxsize=4)
def audit_ledger(pack: Pack) -> LedgerAudit:
    """Compare every entry of ``tensor_storage`` with the headers."""
    faults: list[Exl3PackError] = []
    absent: list[str] = []
    for key, entry in pack.ledger():
        linear = pack.linears.get(key)
        absent += [name for name in _stored(entry) if name not in pack.tensors]
        faults += [
            Exl3PackError(
                found=found,
                expected=f"{expected}, as tensor_storage in quantization_config.json says",
                where=f"{key} in {linear.trellis.file if linear else pack.source}",
                remedy="The file and quantization_config.json are of different packs: fetch both from one revision.",
            )
            for found, expected in _contradictions(pack, key, linear, entry)
        ]
    return LedgerAudit(tuple(faults), tuple(absent))


def _contradictions(
    pack: Pack, key: str, linear: StoredLinear | None, entry: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """What the headers say and what the entry says, where the two differ."""
    if linear is None:
        if entry.get("quant_format") == "exl3" and key in pack.dense:
            yield "a dense .weight", "an EXL3 linear"
    else:
        bits = _number(entry.get("bits_per_weight"))
        if bits is not None and bits != linear.bits:
            yield f"K = {linear.bits:g} from trellis {list(linear.trellis.shape)}", f"K = {bits:g}"
        for leaf, (codebook, multiplier) in MARKERS.items():
            value = entry.get(f"{leaf}_multiplier")
            if isinstance(value, int) and (value & 0xFFFFFFFF != multiplier or linear.codebook is not codebook):
                yield f"codebook {linear.codebook.label}", f"{leaf} with multiplier 0x{value & 0xFFFFFFFF:08X}"
    for name, described in _stored(entry).items():
        shape = described.get("shape") if isinstance(described, dict) else None
        tensor = pack.tensors.get(name)
        if tensor is not None and isinstance(shape, list) and tuple(shape) != tensor.shape:
            yield f"shape {list(tensor.shape)} of {name}", f"{shape}"


def claim_warnings(pack: Pack) -> Iterator[str]:
    """Metadata that disagrees with the headers, and metadata that is not there."""
    differences = [*_summary_differences(pack)]
    if differences:
        yield f"metadata disagrees with the tensors, which are served as stored: {'; '.join(differences)}"
    if pack.config and not declared_blocks(pack.config):
        yield (
            "config.json has no quantization_config, so vLLM takes this pack for an unquantized model: "
            "start it with --quantization exl3"
        )
    if absent := audit_ledger(pack).absent:
        yield f"tensor_storage lists {counted(len(absent), 'tensor')} that no file holds: {', '.join(absent[:3])}"


def _stored(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    stored = entry.get("stored_tensors")
    return stored if isinstance(stored, dict) else {}


def _number(value: object) -> float | None:
    """A JSON number as a float, one that is too large for it as infinity; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _summary_differences(pack: Pack) -> Iterator[str]:
    declared = pack.quantization
    body, head = body_and_head(pack)
    bits = _number(declared.get("bits"))
    if bits is not None and body and not _agrees(bits, body):
        yield f"bits {bits:g} (headers: {mean_bits(body):.2f} on average)"
    head_bits = _number(declared.get("head_bits"))
    if head_bits is not None and head and any(linear.bits != head_bits for linear in head):
        yield f"head_bits {head_bits:g} (headers: {', '.join(f'{linear.bits:g}' for linear in head)})"
    codebook = declared.get("codebook")
    used = Counter(linear.codebook.label for linear in pack.linears.values())
    if isinstance(codebook, str) and used and set(used) != {codebook.lower()}:
        yield f"codebook {codebook} (headers: {', '.join(sorted(used))})"
    yield from _layer_differences(pack, declared.get("layer_bits"))
    yield from _module_differences(pack, declared.get("non_routed_exl3"))
    yield from _ngram_differences(pack, declared.get("ngram_embedding"))


def _agrees(bits: float, body: list[StoredLinear]) -> bool:
    """The declared value is the average or, as other tools write it, the commonest K (of the experts if any)."""
    if abs(bits - mean_bits(body)) <= _TOLERANCE:
        return True
    experts = [linear for linear in body if ".experts." in linear.key]
    return Counter(linear.bits for linear in experts or body).most_common(1)[0][0] == bits


def _layer_differences(pack: Pack, layer_bits: object) -> Iterator[str]:
    """``layer_bits``: layer index to the K of its routed experts."""
    if not isinstance(layer_bits, Mapping):
        return
    stored: dict[str, set[float]] = {}
    for group in pack.experts.values():
        if match := _LAYER.search(f"{group.key}."):
            keys = (key for roles in group.members.values() for key in roles.values())
            stored.setdefault(match[1], set()).update(pack.linears[key].bits for key in keys)
    for layer, bits in layer_bits.items():
        found = stored.get(str(layer))
        if found and found != {_number(bits)}:
            yield f"layer_bits {layer}: {bits} (headers: {', '.join(f'{value:g}' for value in sorted(found))})"


def _module_differences(pack: Pack, spec: object) -> Iterator[str]:
    """``non_routed_exl3``: a codebook, and ``layers``: vLLM module name to ``{"bits": K}``."""
    if not isinstance(spec, Mapping):
        return
    codebook = spec.get("codebook")
    used = {linear.codebook.label for key, linear in pack.linears.items() if ".experts." not in key}
    if isinstance(codebook, str) and used and used != {codebook.lower()}:
        yield f"non_routed_exl3.codebook {codebook} (headers: {', '.join(sorted(used))})"
    layers = spec.get("layers")
    resolver = NameResolver(pack) if layers else None
    for prefix, entry in layers.items() if isinstance(layers, Mapping) else ():
        bits = _number(entry.get("bits")) if isinstance(entry, Mapping) else None
        found = _stored_bits(resolver, str(prefix)) if resolver else set()
        if found and bits is not None and found != {bits}:
            headers = ", ".join(f"{value:g}" for value in sorted(found))
            yield f"non_routed_exl3.layers {prefix}: {bits:g} (headers: {headers})"


def _stored_bits(resolver: NameResolver, prefix: str) -> set[float]:
    """K of the linears under a name that metadata gives; empty where the name means nothing here."""
    try:
        resolution = resolver.resolve(prefix)
    except Exl3PackError:
        return set()  # half a fused module: for the model to ask for, not for a summary to refuse
    return {linear.bits for linear in resolution.linears} if resolution else set()


def _ngram_differences(pack: Pack, spec: object) -> Iterator[str]:
    """``ngram_embedding``: the K of the n-gram tables."""
    bits = spec.get("bits") if isinstance(spec, Mapping) else None
    for table in pack.ngram_tables.values():
        if bits is not None and bits != table.bits:
            yield f"ngram_embedding.bits {bits} (headers: {table.bits})"


def body_and_head(pack: Pack) -> tuple[list[StoredLinear], list[StoredLinear]]:
    """The linears that ``bits`` averages over, and the heads; draft layers are in neither."""
    skipper = Skipper(pack)
    body: list[StoredLinear] = []
    head: list[StoredLinear] = []
    for key, linear in pack.linears.items():
        if is_head_name(key):
            head.append(linear)
        elif not skipper.is_mtp(key):
            body.append(linear)
    return body, head


def mean_bits(linears: list[StoredLinear]) -> float:
    """Trellis bits per weight over some linears, each weight counted once."""
    weights = [linear.in_features * linear.out_features for linear in linears]
    return sum(linear.bits * size for linear, size in zip(linears, weights, strict=True)) / sum(weights)
