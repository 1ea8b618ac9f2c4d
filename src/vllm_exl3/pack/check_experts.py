"""What can be wrong with a pack's routed experts, as its headers tell: gaps, doubles, and tensors that do not match."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.experts import stored_twice
from vllm_exl3.pack.metadata import text_configs
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.skip import Skipper
from vllm_exl3.pack.stored import ExpertGroup, StoredLinear

__all__ = ["EXPERT_COUNTS", "declared_experts", "expert_faults"]

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What config.json may call the number of routed experts."""

_ROUTERS = ("gate", "router")
_NUMBERED = re.compile(r"(?<=\.)\d+(?=\.|$)")
_NUMBERS = 8
"""Experts that a message lists; a damaged count may claim any number of them."""


def expert_faults(pack: Pack) -> Iterator[Exl3PackError]:
    """Every fault of the routed experts."""
    for first, second in stored_twice(pack.linears):
        yield Exl3PackError(
            found=f"{first} and {second}: one projection of one expert under two names",
            expected="each projection of an expert under one name",
            where=f"{pack.linears[second].trellis.name} in {pack.linears[second].trellis.file}",
            remedy="Tensors are left over from another naming scheme: fetch the pack again, or quantize it anew.",
        )
    declared = declared_experts(pack.config)
    for group in pack.experts.values():
        yield from _gaps(pack, group, declared)
        yield from _sizes(pack, group)
        yield from _biases(pack, group)
    yield from _absent(pack)


def declared_experts(config: Mapping[str, Any]) -> int:
    """How many routed experts config.json says a layer has, or 0 where it does not."""
    for holder in text_configs(config):
        for name in EXPERT_COUNTS:
            if type(holder.get(name)) is int:
                return int(holder[name])
    return 0


def _gaps(pack: Pack, group: ExpertGroup, declared: int) -> Iterator[Exl3PackError]:
    """Experts that config.json counts and no file holds, and the other way round."""
    count = declared or max(group.members) + 1
    roles = set(group.roles)
    incomplete = (index for index in range(count) if set(group.members.get(index, ())) != roles)
    missing = list(islice(incomplete, _NUMBERS))
    extra = [index for index in group.experts if index >= count]
    if missing or extra:
        numbers = ", ".join(map(str, (missing or extra)[:_NUMBERS]))
        yield Exl3PackError(
            found=f"experts {numbers} {'incomplete' if missing else 'too many'}",
            expected=f"{count} experts with {', '.join(group.roles)} each",
            where=f"{group.key}.experts in {pack.source}",
            remedy="A file of the pack is missing or config.json is of another model: fetch the pack again.",
        )


def _sizes(pack: Pack, group: ExpertGroup) -> Iterator[Exl3PackError]:
    """All experts of a layer have one width outside and one between their projections."""
    widths = {linear.key: _widths(role, linear) for role, linear in _linears(pack, group)}
    (outer, inner), _ = Counter(widths.values()).most_common(1)[0]
    for role, linear in _linears(pack, group):
        if widths[linear.key] != (outer, inner):
            wanted = (inner, outer) if role == "down" else (outer, inner)
            yield Exl3PackError(
                found=f"a trellis of {linear.in_features} × {linear.out_features} channels for {role}",
                expected=f"{wanted[0]} × {wanted[1]}, as the layer's other projections have it",
                where=f"{linear.trellis.name} in {linear.trellis.file}",
                remedy="The tensor is of another model, or was renamed by a faulty tool: fetch the pack again.",
            )
            return


def _widths(role: str, linear: StoredLinear) -> tuple[int, int]:
    """Channels outside the expert, and between its projections."""
    sizes = (linear.in_features, linear.out_features)
    return sizes[::-1] if role == "down" else sizes


def _biases(pack: Pack, group: ExpertGroup) -> Iterator[Exl3PackError]:
    """Either all experts of a layer have a bias on what enters (or leaves) them, or none has."""
    for down in (False, True):
        linears = [linear for role, linear in _linears(pack, group) if (role == "down") == down]
        without = [linear for linear in linears if linear.bias is None]
        if without and len(without) < len(linears):
            yield Exl3PackError(
                found=f"no bias on {len(without)} of {len(linears)} projections, such as {without[0].key}",
                expected="biases on all of a layer's experts or on none",
                where=f"{group.key}.experts in {pack.source}",
                remedy="Tensors are missing from the pack: fetch it again.",
            )


def _linears(pack: Pack, group: ExpertGroup) -> Iterator[tuple[str, StoredLinear]]:
    for roles in group.members.values():
        for role, key in roles.items():
            yield role, pack.linears[key]


def _absent(pack: Pack) -> Iterator[Exl3PackError]:
    """A layer that has a router, as layers with experts have one, and not a single expert in whatever form."""
    alike = {_NUMBERED.sub("*", key) for key in pack.experts}
    if not alike:
        return
    filled = {name.partition(".experts.")[0] for name in pack.tensors if ".experts." in name}
    skipper = Skipper(pack)
    for key in (*pack.dense, *pack.linears):
        mlp, _, leaf = key.rpartition(".")
        if leaf in _ROUTERS and mlp not in filled and _NUMBERED.sub("*", mlp) in alike and not skipper.is_mtp(mlp):
            yield Exl3PackError(
                found=f"a router ({key}) and no expert",
                expected="the experts that it chooses from, EXL3 or in 16 bits",
                where=f"{mlp}.experts in {pack.source}",
                remedy="A file of the pack is missing: fetch the pack again.",
            )
