"""Which linears are routed experts: by name, in either of the two schemes that checkpoints use."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from vllm_exl3.pack.stored import ExpertGroup

__all__ = ["EXPERT", "group_experts", "stored_twice"]

EXPERT = re.compile(r"^(?P<mlp>.+)\.experts\.(?P<index>\d+)\.(?P<name>gate_proj|up_proj|down_proj|w1|w3|w2)$")
_ROLE = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def group_experts(keys: Iterable[str]) -> dict[str, ExpertGroup]:
    """Group the linears named ``<mlp>.experts.<index>.<projection>`` by MLP."""
    members: defaultdict[str, defaultdict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for key in keys:
        if ".experts." in key and (match := EXPERT.match(key)):
            members[match["mlp"]][int(match["index"])][_ROLE[match["name"]]] = key
    groups = {}
    for mlp, experts in members.items():
        seen = {role for roles in experts.values() for role in roles}
        groups[mlp] = ExpertGroup(mlp, tuple(role for role in ("gate", "up", "down") if role in seen), dict(experts))
    return groups


def stored_twice(keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Pairs of keys that name one projection of one expert, in both schemes or with another spelling of its number."""
    first: dict[tuple[str, int, str], str] = {}
    for key in keys:
        if ".experts." in key and (match := EXPERT.match(key)):
            known = first.setdefault((match["mlp"], int(match["index"]), _ROLE[match["name"]]), key)
            if known != key:
                yield known, key
