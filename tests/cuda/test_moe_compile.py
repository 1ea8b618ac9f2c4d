"""The MoE kernels compile for every architecture, without a GPU, without spills and without serialised wgmma."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_exl3.cuda.compiler import ARCHITECTURES, Cubin, Instance, compile_instance, compiler_unavailable
from vllm_exl3.cuda.moe import instances
from vllm_exl3.cuda.moe_gemm import forms, gemm_instance
from vllm_exl3.cuda.moe_geometry import Layer
from vllm_exl3.cuda.moe_plan import COMBINE, COMBINE_ROWS, COUNT, GROUP_ROWS, ROUTE, ROWS, SCHEDULE, SWIGLU_ROWS
from vllm_exl3.cuda.survey import every_kind, typical_limits

pytestmark = pytest.mark.skipif(compiler_unavailable() is not None, reason=str(compiler_unavailable()))

SAMPLE = dict(zip(ARCHITECTURES, ((8, 2), (3, 2), (8, 1), (6, 0), (10, 2), (7, 2), (12, 1), (16, 2)), strict=True))
"""(half_bits, codebook) of which every kernel is compiled, one an architecture."""

QUICK = ("sm_80", "sm_90a", "sm_120a")
"""One architecture of each kind of tensor core that kernels differ by."""

MIXED = ((5, 2), (8, 1), (12, 0))
MANY = tuple((2 * bits, 2) for bits in range(2, 9))
"""K = 2 to 8: the most kinds whose kernels have several widths of product."""


def tolerated(instance: Instance) -> int:
    """Bytes of stack that cost nothing measurable.

    Warpgroup kernels put accumulators aside once an item, until their rows are stored, clusters only where kinds mix;
    those for small row blocks then also two to four words in eight products, as they refill the ring. fp16 with
    mma.sync, for GPUs without wgmma, lacks a few registers at some rates; kernels around the GEMMs trade a few for a
    second block.
    """
    if instance.source == "moe/cluster.cu":
        return 176 if dict(instance.macros)["INSTANCE_KINDS"].count("Kind<") > 1 else 0
    return {"moe/wide.cu": 384, "moe/gemm.cu": 96, "moe/group_rows.cu": 160}.get(instance.source, 0)


def check(wanted: list[Instance], architecture: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        cubins: list[Cubin] = list(pool.map(lambda instance: compile_instance(instance, architecture), wanted))
    for instance, cubin in zip(wanted, cubins, strict=True):
        assert cubin.image.startswith(b"\x7fELF"), instance
        assert cubin.stack_bytes <= tolerated(instance), (instance, architecture, cubin.log)
        assert cubin.spill_bytes == 0 or tolerated(instance), (instance, architecture, cubin.log)
        assert not cubin.serialised, (instance, architecture, cubin.serialised)


@pytest.mark.parametrize(
    "architecture", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in ARCHITECTURES]
)
def test_kernels_compile(architecture: str) -> None:
    layer = Layer(tuple((projection, *SAMPLE[architecture]) for projection in range(3)), 8, 8, 2, 2048, 768)
    check(instances(layer, typical_limits(architecture)), architecture)


def test_layers_that_mix_compile() -> None:
    check([gemm_instance(MIXED, form) for form in forms(typical_limits("sm_90a"))[:1]], "sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("code", every_kind(), ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles(architecture: str, code: tuple[int, int]) -> None:
    check([gemm_instance([code], form) for form in forms(typical_limits(architecture))], architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mixed_and_common_kernels_compile(architecture: str) -> None:
    mixed = [gemm_instance(MIXED, form) for form in forms(typical_limits(architecture))]
    check([ROWS, *GROUP_ROWS, SWIGLU_ROWS, COUNT, ROUTE, SCHEDULE, COMBINE, COMBINE_ROWS, *mixed], architecture)


@pytest.mark.slow
def test_the_widest_kernels_of_many_kinds_compile() -> None:
    check([gemm_instance(MANY, form) for form in forms(typical_limits("sm_90a")) if form.cluster > 1], "sm_90a")
