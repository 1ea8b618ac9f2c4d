"""Published figures of GPUs, for estimates: memory, bandwidth, multiprocessors, clock, tensor-core rate, bus.

Source: NVIDIA's data sheets and architecture white papers of each product. ``bf16_tflops`` is the dense rate with
float32 accumulation, ``pcie_gbps`` the theoretical rate of the slot in one direction. Only the H200 has been measured.
"""

import functools
import re
from dataclasses import dataclass

__all__ = ["GPUS", "MEASURED", "Gpu", "find_gpu", "gpu_by_memory"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model.

    Attributes:
        name: as ``--gpu`` takes it.
        memory_gib: memory in GiB, as nvidia-smi reports it, rounded.
        bandwidth_gbps: of its memory, in GB/s.
        multiprocessors: their number.
        clock_ghz: boost clock in GHz.
        bf16_tflops: dense bf16 tensor-core rate in TFLOP/s.
        pcie_gbps: of the bus to host memory in one direction, in GB/s; for unified memory, the memory's own rate.
        capability: compute capability times ten.
        unified: whether host and GPU share one memory.
    """

    name: str
    memory_gib: float
    bandwidth_gbps: float
    multiprocessors: int
    clock_ghz: float
    bf16_tflops: float
    pcie_gbps: float
    capability: int
    unified: bool = False


GPUS = (
    Gpu("RTX 3050", 8, 224, 20, 1.78, 18, 15.8, 86),
    Gpu("RTX 3060", 12, 360, 28, 1.78, 25, 31.5, 86),
    Gpu("RTX 3070", 8, 448, 46, 1.73, 41, 31.5, 86),
    Gpu("RTX 3080", 10, 760, 68, 1.71, 60, 31.5, 86),
    Gpu("RTX 3090", 24, 936, 82, 1.70, 71, 31.5, 86),
    Gpu("RTX 4060", 8, 272, 24, 2.46, 30, 15.8, 89),
    Gpu("RTX 4060 Ti", 16, 288, 34, 2.54, 44, 15.8, 89),
    Gpu("RTX 4070", 12, 504, 46, 2.48, 58, 31.5, 89),
    Gpu("RTX 4070 Ti SUPER", 16, 672, 66, 2.61, 88, 31.5, 89),
    Gpu("RTX 4080", 16, 717, 76, 2.51, 97, 31.5, 89),
    Gpu("RTX 4090", 24, 1008, 128, 2.52, 165, 31.5, 89),
    Gpu("RTX 5060 Ti", 16, 448, 36, 2.57, 47, 31.5, 120),
    Gpu("RTX 5070", 12, 672, 48, 2.51, 62, 63, 120),
    Gpu("RTX 5070 Ti", 16, 896, 70, 2.45, 88, 63, 120),
    Gpu("RTX 5080", 16, 960, 84, 2.62, 113, 63, 120),
    Gpu("RTX 5090", 32, 1792, 170, 2.41, 210, 63, 120),
    Gpu("RTX A6000", 48, 768, 84, 1.80, 155, 31.5, 86),
    Gpu("RTX 6000 Ada", 48, 960, 142, 2.51, 364, 31.5, 89),
    Gpu("RTX PRO 6000", 96, 1792, 188, 2.62, 504, 63, 120),
    Gpu("L4", 24, 300, 58, 2.04, 121, 31.5, 89),
    Gpu("L40S", 48, 864, 142, 2.52, 362, 31.5, 89),
    Gpu("A10", 24, 600, 72, 1.70, 125, 31.5, 86),
    Gpu("A100 40GB", 40, 1555, 108, 1.41, 312, 31.5, 80),
    Gpu("A100 80GB", 80, 2039, 108, 1.41, 312, 31.5, 80),
    Gpu("H100", 80, 3350, 132, 1.98, 989, 63, 90),
    Gpu("H200", 141, 4800, 132, 1.98, 989, 63, 90),
    Gpu("B200", 180, 8000, 148, 1.97, 2250, 63, 100),
    Gpu("DGX Spark", 120, 273, 48, 2.42, 125, 273, 121, unified=True),
)
"""Every GPU that ``--gpu`` knows, by architecture and size."""

MEASURED = "H200"
"""The one whose rates were measured; those of others are scaled from it by published figures."""


@functools.lru_cache(maxsize=256)
def find_gpu(name: str) -> Gpu:
    """The GPU of this name, in any spelling that leaves its letters and digits: ``rtx4090``, ``NVIDIA RTX 4090``.

    Raises:
        ValueError: there is none, or several have such a name.
    """
    wanted = _plain(name)
    found = [gpu for gpu in GPUS if _plain(gpu.name) == wanted] or [gpu for gpu in GPUS if wanted in _plain(gpu.name)]
    if len(found) != 1:
        what = (
            f"several GPUs ({', '.join(gpu.name for gpu in found)})"
            if found
            else "a GPU without published figures here"
        )
        raise ValueError(f"{name} is {what}: expected one of {', '.join(gpu.name for gpu in GPUS)}")
    return found[0]


def gpu_by_memory(gib: float) -> Gpu:
    """The slowest GPU of the table with at least this memory, among those with the least: a cautious stand-in.

    Args:
        gib: memory of the card in GiB; more than any has stands for the largest.
    """
    large = [gpu for gpu in GPUS if gpu.memory_gib >= gib - 1 and not gpu.unified]
    if not large:
        return max(GPUS, key=lambda gpu: gpu.memory_gib)
    least = min(gpu.memory_gib for gpu in large)
    return min((gpu for gpu in large if gpu.memory_gib == least), key=lambda gpu: gpu.bandwidth_gbps)


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
