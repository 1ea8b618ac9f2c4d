"""Where the routed experts of a model are kept: ``VLLM_EXL3_EXPERTS`` and its budget, decided once in a process.

The first layer of experts that is built asks for the whole model, whose sizes the pack's headers tell. What is not kept
in GPU memory lies in pinned host memory; GPU kernels read it there, through offsets from the same base address.
"""

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.parallel_state import get_world_group
from vllm.platforms import current_platform

from vllm_exl3 import env
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.skip import Skipper
from vllm_exl3.pack.stored import ExpertGroup
from vllm_exl3.pack.wording import byte_size
from vllm_exl3.plan.expert_budget import planned_budget
from vllm_exl3.plan.expert_usage import check_usage, read_usage
from vllm_exl3.plan.residency import LayerExperts, expert_bytes, resident_experts
from vllm_exl3.processors import allowed_set
from vllm_exl3.serving.expert_tier_checks import check_host_memory, refuse_unserved
from vllm_exl3.serving.expert_usage import RoutingCounter, recorder
from vllm_exl3.serving.skipping import OtherStages

if TYPE_CHECKING:
    from vllm_exl3.cuda.share import SideStream
    from vllm_exl3.serving.config import Exl3Config

__all__ = ["ExpertTiers", "Placement", "Share"]

logger = logging.getLogger("vllm.exl3")

_CACHE_TYPES = {"float16": "auto", "bfloat16": "auto", "fp8": "fp8"}
"""vLLM's ``--kv-cache-dtype`` by what the plan calls it, where the two differ."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of every layer's experts that a rank has.

    Attributes:
        local: numbers of its experts in the model.
        rank: among the ranks that divide each expert.
        ranks: how many divide each expert.
    """

    local: tuple[int, ...]
    rank: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The tiers of one rank's experts.

    Attributes:
        tier: ``gpu``, or what is done with the others: ``host`` (the GPU reads them), ``cpu`` (the CPU computes).
        resident: by layer, the experts whose trellises stay in GPU memory; empty if all do.
        gpu_bytes: of trellises that stay.
        host_bytes: of those in host memory.
        chosen_by: ``lowest numbers``, or the file of statistics.
        budget: where the limit comes from.
    """

    tier: str
    resident: Mapping[str, frozenset[int]]
    gpu_bytes: int
    host_bytes: int
    chosen_by: str = ""
    budget: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The placement as plain data, for the report."""
        kept = [len(experts) for experts in self.resident.values()]
        return {
            "tier": self.tier,
            "gpu_bytes": self.gpu_bytes,
            "host_bytes": self.host_bytes,
            "resident_experts": [min(kept), max(kept)] if kept else None,
            "chosen_by": self.chosen_by,
            "budget": self.budget,
        }


class ExpertTiers:
    """Decides for one model in one process.

    Args:
        config: of the pack that is built.
    """

    def __init__(self, config: "Exl3Config") -> None:
        self._config = config
        self.placement: Placement | None = None
        self._said = False
        self._side: weakref.ref[SideStream] | None = None
        self._rows, self._rank = 0, (0, 1)

    def resident(self, where: str, group: ExpertGroup, share: Share) -> frozenset[int] | None:
        """The experts of a layer whose trellises stay in GPU memory; None for all.

        Args:
            where: the layer's name.
            group: its experts in the pack.
            share: what this rank has of them.

        Raises:
            Exl3PackError: the settings cannot be met.
        """
        if Skipper(self._config.pack).is_mtp(_any_module(group)):
            return None  # a draft is read in every step
        if self.placement is None:
            self.placement = self._decide(where, share)
        return self.placement.resident.get(group.key)

    @property
    def computes_on_cpu(self) -> bool:
        """True if the CPU computes experts that are not on the GPU, for few tokens."""
        return self.placement is not None and self.placement.tier == "cpu"

    @property
    def cpu_rows(self) -> int:
        """Tokens of a step up to which it does."""
        return self._rows

    def side_stream(self, hidden: int, top_k: int) -> "SideStream":
        """The stream of the CPU's work, which all layers share; made at the first forward.

        Args:
            hidden: channels of a token.
            top_k: experts of a token.
        """
        side = self._side() if self._side is not None else None
        if side is None:
            from vllm_exl3.cuda.share import SideStream

            threads, cpus = cpu_threads(env.EXPERTS_CPU_THREADS.get(), *self._rank)
            side = SideStream(threads, cpus, self._rows, hidden, top_k)
            self._side = weakref.ref(side)  # the layers keep it: vLLM keeps configs longer than models
            logger.info("vllm-exl3: %d threads compute experts that are not in GPU memory", threads)
        return side

    def counter(self, group: ExpertGroup, experts: int, owner: object) -> RoutingCounter | None:
        """What counts the routing of a layer, if this rank is the one that does so for all.

        Args:
            group: the layer's experts in the pack.
            experts: of the whole model.
            owner: the counter is read as long as this lives.
        """
        found = recorder()
        if found is None or current_platform.device_type != "cuda":
            if found is not None and not self._said:
                self._said = True
                logger.warning("vllm-exl3: %s: routing is counted on GPUs only", env.EXPERTS_STATS.name)
            return None
        current = get_current_vllm_config_or_none()
        # Ranks of tensor and data parallelism see the same tokens, gathered before they are routed.
        first = get_tensor_model_parallel_rank() == 0
        first = first and (current is None or current.parallel_config.data_parallel_rank == 0)
        return found.counter(group.key, experts, owner) if first else None

    def _decide(self, where: str, share: Share) -> Placement:
        wanted, current = env.EXPERTS.get(), get_current_vllm_config_or_none()
        layers = self._layers(share) if wanted != "gpu" else []
        total = sum(layer.total for layer in layers)
        if wanted == "gpu" or (wanted == "auto" and current_platform.device_type == "cpu"):
            return Placement("gpu", {}, total, 0)
        refuse_unserved(where, wanted, current_platform.device_type, current)
        budget, origin = self._budget(where, wanted, layers, current)
        if total <= budget:
            return Placement("gpu", {}, total, 0, budget=f"{origin}, which holds all")
        usage, chosen_by = self._usage(layers)
        resident = resident_experts(layers, budget, usage)
        kept = sum(layer.nbytes[expert] for layer in layers for expert in resident[layer.key])
        tier = "cpu" if wanted == "cpu" else "host"
        if tier == "cpu":
            self._rows, self._rank = env.EXPERTS_CPU_ROWS.get(), _local_rank(current)
        placement = Placement(tier, resident, kept, total - kept, chosen_by, origin)
        check_host_memory(where, placement.host_bytes, current)
        return placement

    def _layers(self, share: Share) -> list[LayerExperts]:
        """The layers with experts of this pipeline stage. A draft's experts stay on the GPU."""
        pack = self._config.pack
        skipper, stages = Skipper(pack), OtherStages(pack)
        return [
            expert_bytes(group, pack.linears, share.local, share.rank, share.ranks)
            for key, group in pack.experts.items()
            if not skipper.is_mtp(_any_module(group)) and stages.reason(key) is None
        ]

    def _budget(
        self, where: str, wanted: str, layers: Sequence[LayerExperts], current: VllmConfig | None
    ) -> tuple[int, str]:
        """Bytes of trellises that stay in GPU memory, and who says so."""
        limit = env.EXPERTS_GPU_GIB.get()
        if limit is not None:
            memory = torch.cuda.mem_get_info()[1]
            if limit > memory:
                raise Exl3PackError(
                    found=f"{env.EXPERTS_GPU_GIB.name} of {byte_size(limit)} on a GPU with {byte_size(memory)}",
                    expected="a part of the GPU's memory: layers, KV cache and activations need some, too",
                    where=where,
                    remedy=f"Set it lower, or {env.EXPERTS.name}=auto without it.",
                )
        if wanted != "auto":
            return limit or 0, f"{env.EXPERTS_GPU_GIB.name}={'none set' if limit is None else byte_size(limit)}"
        planned = _planned(self._config, where, sum(layer.scales for layer in layers), current)
        if limit is not None and limit < planned:
            return limit, f"{env.EXPERTS_GPU_GIB.name}={byte_size(limit)}"
        return planned, f"a plan of GPU memory with {byte_size(planned)} left for them"

    def _usage(self, layers: Sequence[LayerExperts]) -> tuple[dict[str, list[int]] | None, str]:
        """Routed slots by layer, and what the report says decided."""
        name = env.EXPERTS_STATS.get()
        usage = read_usage(Path(name)) if name else None
        if usage is None:
            return None, "lowest numbers, evenly over layers"
        groups = self._config.pack.experts
        check_usage(Path(name), usage, {layer.key: len(groups[layer.key].experts) for layer in layers})
        return usage, f"routing statistics of {name}"


def _any_module(group: ExpertGroup) -> str:
    """The name of one of a layer's experts' linears in the pack."""
    return next(iter(next(iter(group.members.values())).values()))


def cpu_threads(wanted: int | None, rank: int, ranks: int) -> tuple[int, list[int] | None]:
    """How many threads of a rank compute experts, and the processor of each but the first; None for any.

    Args:
        wanted: how many were asked for; None for as many as this machine's ranks have each, but one in all.
        rank: of this process among those on this machine.
        ranks: how many those are.
    """
    processors = sorted(allowed_set())
    each = max(1, (len(processors) - 1) // ranks)
    if ranks == 1 or wanted is not None or len(processors) < ranks:
        return wanted or each, None
    own = processors[rank * each : (rank + 1) * each]
    return each, own[1:]


def _local_rank(current: VllmConfig | None) -> tuple[int, int]:
    """This process among the ranks on its machine, and how many those are."""
    ranks = current.parallel_config.local_world_size if current is not None else 1
    return get_world_group().local_rank % ranks if ranks > 1 else 0, ranks


def _planned(config: "Exl3Config", where: str, scales: int, current: VllmConfig | None) -> int:
    """What `vllm-exl3 plan` would leave for experts on this GPU under this engine's settings."""
    memory = torch.cuda.mem_get_info()[1]
    if current is None:
        raise RuntimeError("VLLM_EXL3_EXPERTS=auto: vLLM has no current configuration")
    parallel, cache = current.parallel_config, current.cache_config
    stages = OtherStages(config.pack)
    return planned_budget(
        config.pack,
        memory=int(memory * cache.gpu_memory_utilization),
        length=current.model_config.max_model_len,
        chunk=current.scheduler_config.max_num_batched_tokens,
        seqs=current.scheduler_config.max_num_seqs,
        cache_type=_CACHE_TYPES.get(str(cache.cache_dtype).partition("_e")[0], str(cache.cache_dtype)),
        cache_bytes=cache.kv_cache_memory_bytes,
        ranks=parallel.tensor_parallel_size,
        scales=scales,
        layers=stages.layers,
        stages=parallel.pipeline_parallel_size,
        where=where,
    )
