"""Which tensor- and expert-parallel degrees a pack allows, and what stands against each other one.

The format itself allows any split of a linear: a rank holds the blocks of 128 that cover its range,
and a block that two ranks share is stored by both. Experts are split on whole blocks, so each rank
needs one. What remains are vLLM's own rules: heads and widths divide over the ranks, key/value heads
divide or are replicated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.metadata import text_config
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.skip import Skipper
from vllm_exl3.pack.stored import BLOCK
from vllm_exl3.plan.partition import block_split
from vllm_exl3.plan.shapes import ROW_LEAVES, input_width, number

__all__ = ["DEGREES", "Degree", "expert_parallel", "refuse_expert_split", "tensor_parallel"]

DEGREES = (1, 2, 3, 4, 6, 8, 16)
"""The degrees that are reported."""

_TOWERS = ("visual", "vision", "audio")


@dataclass(frozen=True, slots=True)
class Degree:
    """One degree of parallelism.

    Attributes:
        degree: number of ranks.
        blocker: the first layer that cannot be split so, with its numbers; None for a legal degree.
        note: at a legal degree, the first layer whose ranks share a block of 128, which both store.
    """

    degree: int
    blocker: str | None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    """A linear whose inputs are split: one stands for all of its name and size."""

    key: str
    stored: int
    inputs: int
    expert: bool


def tensor_parallel(pack: Pack, degrees: Sequence[int] = DEGREES) -> list[Degree]:
    """Legality of each tensor-parallel degree, routed experts split like the rest.

    Vision and audio towers are left out: where they cannot be split, vLLM runs them whole with
    ``--mm-encoder-tp-mode data``.
    """
    rows = list(_rows(pack))
    return [_degree(pack, rows, degree) for degree in degrees]


def expert_parallel(pack: Pack, degrees: Sequence[int] = DEGREES) -> list[Degree]:
    """Legality of each expert-parallel degree: whole experts per rank, the rest split as in tensor parallelism.

    Returns:
        An empty list for a pack without routed experts.
    """
    if not pack.experts:
        return []
    rows = [row for row in _rows(pack) if not row.expert]
    key, group = min(pack.experts.items(), key=lambda item: len(item[1].members))
    answers = []
    for degree in degrees:
        answer = _degree(pack, rows, degree)
        if degree > len(group.members):
            answer = Degree(degree, f"{key}.experts: {len(group.members)} experts for {degree} ranks")
        answers.append(answer)
    return answers


def refuse_expert_split(pack: Pack, ranks: int, *, whole: bool) -> None:
    """Refuse to spread a pack's routed experts over more ranks than they allow.

    Args:
        pack: the pack.
        ranks: among how many the experts are spread, data-parallel ones counted.
        whole: each rank holds whole experts (expert parallelism), not a part of each.

    Raises:
        Exl3PackError: some rank would hold nothing.
    """
    if not pack.experts:
        return
    key, group = min(pack.experts.items(), key=lambda item: len(item[1].members))
    if whole and ranks > len(group.members):
        raise Exl3PackError(
            found=f"{len(group.members)} experts for {ranks} ranks",
            expected="at least one expert per rank",
            where=f"{key}.experts in {pack.source}",
            remedy=f"Use at most {len(group.members)} ranks; data-parallel ranks count.",
        )
    for row in _rows(pack):
        if row.expert and not whole:
            block_split(row.stored, 0, ranks, where=f"{row.key} in {pack.source}")


def _rows(pack: Pack) -> Iterator[_Row]:
    skipper = Skipper(pack)
    seen: set[tuple[str, int, bool]] = set()
    for key, linear in pack.linears.items():
        leaf = key.rpartition(".")[2]
        expert = ".experts." in key
        same = (leaf, linear.in_features, expert)
        if leaf not in ROW_LEAVES or same in seen or any(tower in key for tower in _TOWERS) or skipper.is_mtp(key):
            continue
        seen.add(same)
        yield _Row(key, linear.in_features, input_width(leaf, linear.in_features, pack.config), expert)


def _degree(pack: Pack, rows: Sequence[_Row], degree: int) -> Degree:
    if degree == 1:
        return Degree(1, None)
    if blocker := _head_blocker(text_config(pack.config), degree):
        return Degree(degree, blocker)
    for row in rows:
        if row.inputs % degree:
            return Degree(degree, f"{row.key}: {row.inputs} inputs do not divide by {degree}")
        try:
            if row.expert:
                block_split(row.stored, 0, degree, where=row.key)
        except Exl3PackError as refusal:
            return Degree(degree, f"{row.key}: {refusal.found}")
    shared = [row for row in rows if not row.expert and row.inputs // degree % BLOCK]
    note = f"{shared[0].key}: {shared[0].inputs // degree} inputs a rank, edge blocks stored twice" if shared else None
    return Degree(degree, None, note)


def _head_blocker(text: Mapping[str, Any], degree: int) -> str | None:
    heads = number(text, "num_attention_heads")
    if heads % degree:
        return f"attention: {heads} heads do not divide by {degree}"
    kv_heads = number(text, "num_key_value_heads")
    if kv_heads and not number(text, "kv_lora_rank") and kv_heads % degree and degree % kv_heads:
        return f"attention: {kv_heads} key/value heads neither divide by {degree} nor are replicated evenly over it"
    for name in ("linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads"):
        if number(text, name) % degree:
            return f"linear attention: {name} = {number(text, name)} does not divide by {degree}"
    return None
