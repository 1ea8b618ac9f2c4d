"""How DeepSeek V4.1's routed experts divide over ranks: the contract of an earlier plugin's planner.

``backend`` answers by the published rules, in which a part of an expert that is no multiple of 128 falls to a Python
loop. This package divides experts into whole blocks of 128, so ``intermediate_by_rank`` is served natively.
"""

from dataclasses import asdict, dataclass
from typing import Any

from vllm_exl3.pack.stored import BLOCK
from vllm_exl3.plan.partition import block_split

__all__ = ["DeepseekV41Plan", "plan_deepseek_v41"]


@dataclass(frozen=True)
class DeepseekV41Plan:
    """The division.

    Attributes:
        tp: tensor-parallel ranks.
        ep: whether experts are divided whole.
        experts: routed experts of a layer.
        hidden_size: width of a token.
        intermediate_size: width of an expert.
        topk: experts of a token.
        moe_tp: ranks that share one expert.
        local_experts: experts of a rank.
        local_intermediate: width of a rank's part of an expert, by even division.
        native_candidate: whether both widths are multiples of 128.
        backend: ``exllamav3`` or ``loop``, by the published rules.
        intermediate_by_rank: width of each rank's part as this package divides it.
        own_backend: what serves it in this package, on a GPU.
    """

    tp: int
    ep: bool
    experts: int
    hidden_size: int
    intermediate_size: int
    topk: int
    moe_tp: int
    local_experts: int
    local_intermediate: int
    native_candidate: bool
    backend: str
    intermediate_by_rank: tuple[int, ...]
    own_backend: str = "native"

    def to_dict(self) -> dict[str, Any]:
        """All fields; tuples become lists."""
        return {**asdict(self), "intermediate_by_rank": list(self.intermediate_by_rank)}


def plan_deepseek_v41(
    tp: int = 4,
    ep: bool = True,
    experts: int = 384,
    hidden_size: int = 5120,
    intermediate_size: int = 2304,
    topk: int = 6,
) -> DeepseekV41Plan:
    """Divide the experts.

    Args:
        tp: tensor-parallel ranks.
        ep: divide whole experts over them.
        experts: routed experts of a layer.
        hidden_size: width of a token.
        intermediate_size: width of an expert.
        topk: experts of a token.

    Raises:
        TypeError: a number is no whole number.
        ValueError: a number is not positive, or experts or their width do not divide over the ranks.
    """
    named = {"tp": tp, "experts": experts, "hidden_size": hidden_size, "intermediate_size": intermediate_size,
             "topk": topk}  # fmt: skip
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} {value!r}: expected a whole number")
        if value <= 0:
            raise ValueError(f"{name} {value}: expected a positive number")
    if topk > experts:
        raise ValueError(f"topk {topk}: a layer has {experts} experts")
    if ep and experts % tp:
        raise ValueError(f"{experts} experts do not divide by {tp} ranks")
    if not ep and intermediate_size % tp:
        raise ValueError(f"a width of {intermediate_size} does not divide by {tp} ranks")
    local = intermediate_size if ep else intermediate_size // tp
    aligned = hidden_size % BLOCK == 0 and local % BLOCK == 0
    stored = -(-intermediate_size // BLOCK) * BLOCK
    return DeepseekV41Plan(
        tp=tp,
        ep=ep,
        experts=experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        topk=topk,
        moe_tp=1 if ep else tp,
        local_experts=experts // tp if ep else experts,
        local_intermediate=local,
        native_candidate=aligned,
        backend="exllamav3" if ep or aligned else "loop",
        intermediate_by_rank=tuple(
            stored if ep else block_split(stored, rank, tp, where="routed experts")[1] for rank in range(tp)
        ),
    )
