"""Where every stored expert tensor of a MoE layer lies in the layer's flat parameters on this rank.

Expert parallelism gives a rank whole experts; tensor parallelism gives it a range of whole 128-blocks
of every expert's intermediate channels. Sizes, bit rates and codebooks come from the tensor headers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_exl3.ops.experts import Projection, pack_table, projection_kinds
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.stored import BLOCK, Codebook, ExpertGroup, StoredLinear, pad_to_block
from vllm_exl3.plan.partition import block_split

__all__ = ["STAND_IN_WORDS", "ExpertLayout", "ExpertSlot", "Sizes"]


@dataclass(frozen=True, slots=True)
class ExpertSlot:
    """One stored projection of an expert, and what of it this rank holds where.

    Attributes:
        linear: the stored tensors.
        rows: first stored input channel held, and how many.
        columns: first stored output channel held, and how many.
        projection: its row of the op's table. If the expert is in host memory, its trellis' offset counts in that.
        stand_in: where, in the flat trellis, some words stand for a trellis in host memory; -1 for others.
    """

    linear: StoredLinear
    rows: tuple[int, int]
    columns: tuple[int, int]
    projection: Projection
    stand_in: int = -1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements of the flat parameters of w13 or w2; ``bias`` is 0 where the pack has none.

    ``host`` counts the words of trellises in host memory, which are no parameter.
    """

    trellis: int
    suh: int
    svh: int
    bias: int
    host: int


STAND_IN_WORDS = 8
"""int16 words in the flat trellis for one in host memory: vLLM's reloading counts what was loaded into parameters."""


class ExpertLayout:
    """The experts of one MoE layer on one rank.

    Args:
        where: the layer's name, for errors.
        group: the layer's experts as the pack names them.
        linears: the pack's EXL3 linears.
        local: the experts of this rank, in the order of their local numbers.
        total: experts that the model has in this layer.
        hidden: channels that enter and leave an expert.
        intermediate: channels between the projections, over all tensor-parallel ranks, before padding.
        roles: what the model's experts have: gate, up and down, or up and down.
        rank: tensor-parallel rank.
        ranks: tensor-parallel ranks.
        resident: the experts, by their numbers in the model, whose trellises stay on the GPU; None for all.

    Attributes:
        in_host: local numbers of the experts whose trellises lie in host memory.

    Raises:
        Exl3PackError: experts are missing or incomplete, or sizes do not fit the model.
    """

    def __init__(
        self,
        where: str,
        group: ExpertGroup,
        linears: Mapping[str, StoredLinear],
        *,
        local: Sequence[int],
        total: int,
        hidden: int,
        intermediate: int,
        roles: tuple[str, ...],
        rank: int,
        ranks: int,
        resident: frozenset[int] | None = None,
    ) -> None:
        if not local:
            raise Exl3PackError(
                found=f"a rank without any of the {total} experts",
                expected="at least one expert on every rank",
                where=where,
                remedy="Use fewer ranks, or leave --enable-expert-parallel out, which splits every expert.",
            )
        self.where = where
        self.roles = roles
        self.local = tuple(local)
        self.in_host = tuple(
            index for index, expert in enumerate(self.local) if resident is not None and expert not in resident
        )
        self.total = total
        self.hidden = hidden
        self.split = ranks > 1
        _check_members(where, group, total, roles)
        start, size = block_split(pad_to_block(intermediate), rank, ranks, where=where)
        self.intermediate = min(start + size, intermediate) - start
        self._share = (start, size)
        everywhere = [[linears[group.members[expert][role]] for role in roles] for expert in range(total)]
        self._stored = [everywhere[expert] for expert in self.local]
        # Other ranks' tensors pass through this rank's loaders too, so these follow from all experts.
        self.markers = {name: _markers(_named(name, everywhere), _named(name, self._stored)) for name in ("w13", "w2")}
        self._biased = {name: self._has_bias(name, _named(name, everywhere)) for name in ("w13", "w2")}
        self._check_sizes(intermediate)
        self.slots, self.sizes = self._place()
        projections = [[slot.projection for slot in expert] for expert in self.slots]
        self.table = pack_table(projections)
        self.kinds = projection_kinds(projections)

    @property
    def kernel_key(self) -> tuple[tuple[int, ...], int, int, int, int]:
        """What the layer's kernels depend on: kinds, experts here and in all, hidden and intermediate channels."""
        return tuple(self.kinds), len(self.local), self.total, self.hidden, self.intermediate

    def weights_by_bits(self) -> Counter[float]:
        """How many weights this rank holds at each K."""
        histogram: Counter[float] = Counter()
        for expert in self.slots:
            for slot in expert:
                histogram[slot.linear.bits] += slot.rows[1] * slot.columns[1]
        return histogram

    def codebooks(self) -> Counter[str]:
        """How many projections use each codebook."""
        return Counter(slot.linear.codebook.label for expert in self.slots for slot in expert)

    def _has_bias(self, name: str, stored: list[StoredLinear]) -> bool:
        biased = [linear for linear in stored if linear.bias is not None]
        if biased and len(biased) != len(stored):
            raise Exl3PackError(
                found=f"biases on {len(biased)} of {len(stored)} {name} projections, such as {biased[0].key}",
                expected="biases on all of a layer's experts or on none",
                where=self.where,
                remedy="Tensors are missing from the pack: fetch it again.",
            )
        return bool(biased)

    def _check_sizes(self, intermediate: int) -> None:
        inner, outer = pad_to_block(intermediate), pad_to_block(self.hidden)
        for expert, stored in zip(self.local, self._stored, strict=True):
            for role, linear in zip(self.roles, stored, strict=True):
                wanted = (inner, outer) if role == "down" else (outer, inner)
                if (linear.in_features, linear.out_features) != wanted:
                    raise Exl3PackError(
                        found=f"a trellis of {linear.in_features} × {linear.out_features} channels for {role}",
                        expected=f"{wanted[0]} × {wanted[1]}: {self.hidden} and {intermediate}, padded to {BLOCK}",
                        where=f"{self.where}, expert {expert} ({linear.trellis.file}, {linear.trellis.name})",
                        remedy="The pack does not belong to this config.json, or was converted by a faulty tool.",
                    )

    def _place(self) -> tuple[list[list[ExpertSlot]], dict[str, Sizes]]:
        """Lay the experts out one after the other, gate beside up, so that both are one two-shard linear."""
        taken = {name: [0, 0, 0, 0, 0] for name in ("w13", "w2")}
        slots = []
        outer, in_host = (0, pad_to_block(self.hidden)), set(self.in_host)
        for local, stored in enumerate(self._stored):
            expert = []
            for role, linear in zip(self.roles, stored, strict=True):
                name, rows, columns, outputs = (
                    ("w2", self._share, outer, self.hidden)
                    if role == "down"
                    else ("w13", outer, self._share, self.intermediate)
                )
                at = taken[name]
                projection = Projection(
                    at[4] if local in in_host else at[0],
                    at[1],
                    at[2],
                    at[3] if self._biased[name] else -1,
                    linear.half_bits,
                    int(linear.codebook),
                    rows[1],
                    columns[1],
                )
                expert.append(ExpertSlot(linear, rows, columns, projection, at[0] if local in in_host else -1))
                if local in in_host:
                    at[0] += STAND_IN_WORDS
                    at[4] += projection.trellis_words
                else:
                    at[0] += projection.trellis_words
                at[1] += rows[1]
                at[2] += columns[1]
                at[3] += outputs if self._biased[name] else 0
            slots.append(expert)
        return slots, {name: Sizes(*at) for name, at in taken.items()}


def _named(name: str, experts: list[list[StoredLinear]]) -> list[StoredLinear]:
    """The projections that ``w13`` or ``w2`` holds, of all these experts."""
    return [linear for expert in experts for linear in (expert[:-1] if name == "w13" else expert[-1:])]


def _markers(everywhere: list[StoredLinear], here: list[StoredLinear]) -> dict[Codebook, dict[str, int]]:
    """For each codebook that has markers, the names of those that this rank holds, and their places."""
    named: dict[Codebook, dict[str, int]] = {linear.codebook: {} for linear in everywhere if linear.marker is not None}
    for linear in here:
        if linear.marker is not None:
            places = named[linear.codebook]
            places[linear.marker.name] = len(places)
    return named


def _check_members(where: str, group: ExpertGroup, total: int, roles: tuple[str, ...]) -> None:
    if group.experts != tuple(range(total)):
        found = f"EXL3 experts {_ranges(group.experts)}"
        expected = f"experts 0 to {total - 1}, as config.json says"
    elif (broken := _first_incomplete(group, roles)) is not None:
        found = f"expert {broken} with {', '.join(sorted(group.members[broken]))} in EXL3"
        expected = f"{', '.join(roles)} in every expert"
    else:
        return
    raise Exl3PackError(
        found=found,
        expected=expected,
        where=f"{where} ({group.key})",
        remedy="A file of the pack is missing, or part of the experts was left unquantized, which is not served: "
        "fetch the pack again, or quantize all experts of the layer.",
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: ``0-6, 8``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in parts) or "none"


def _first_incomplete(group: ExpertGroup, roles: tuple[str, ...]) -> int | None:
    return next((expert for expert in group.experts if set(group.members[expert]) != set(roles)), None)
