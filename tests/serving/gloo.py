"""Collectives that data parallelism with experts needs and vLLM's communicator for CPUs lacks, over gloo."""

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

__all__ = ["lend_collectives"]


def lend_collectives() -> None:
    """Give this process's communicators the two: vLLM has them for GPUs, and calls them by these names."""
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(
    self: CpuCommunicator, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """Every rank's rows, one rank after another; ``sizes`` says how many each has."""
    if isinstance(input_, list):
        return [_all_gatherv(self, part, dim, sizes) for part in input_]
    counts = sizes or [input_.shape[0]] * self.world_size
    padded = input_.new_zeros((max(counts), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _reduce_scatterv(
    self: CpuCommunicator, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """This rank's rows of the sum over ranks."""
    counts = sizes or [input_.shape[0] // self.world_size] * self.world_size
    total = input_.clone()
    dist.all_reduce(total, group=self.device_group)
    return total.split(counts)[self.rank_in_group].clone()
