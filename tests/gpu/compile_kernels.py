"""Compile, by all cores, the kernels that several tests of this folder need: those of the packs and of the int4 cache.

    python -m tests.gpu.compile_kernels

Tests that run meanwhile wait for a kernel that is being compiled here, and take it from the cache. What a single test
needs besides it compiles itself, in parallel, too.
"""

import sys
from pathlib import Path

from vllm_exl3.attention import native_cut
from vllm_exl3.cuda.cache import CubinCache
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.embedding import every_instance, pack_instances
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.cuda.moe_survey import expert_codes, expert_instances
from vllm_exl3.cuda.runtime import build, cache_folder, own_instances
from vllm_exl3.cuda.survey import instances_for, local_gpus, pack_codes
from vllm_exl3.pack.pack import Pack

__all__ = ["shared_instances"]

PACKS = Path(__file__).parents[1] / "data" / "packs"


def shared_instances(limits: GpuLimits) -> list[Instance]:
    """The kernels, each once; those of the packs, for which most tests wait, first."""
    wanted = own_instances(limits)
    for folder in sorted(PACKS.iterdir()):
        pack = Pack.open(folder)
        wanted += [*instances_for(pack_codes(pack), limits), *expert_instances(expert_codes(pack), limits)]
        wanted += pack_instances(pack)
    wanted += [*native_cut.every_instance(limits.shared_memory), *every_instance()]
    return list(dict.fromkeys(wanted))


def main() -> int:
    """Fill the cache."""
    for limits in local_gpus():
        build(shared_instances(limits), limits.architecture, CubinCache(cache_folder()), say=print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
