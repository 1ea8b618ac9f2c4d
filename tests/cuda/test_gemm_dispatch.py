"""Which kernel serves how many tokens of a layer where the GEMM for up to 128 tokens is one of them."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_exl3.cuda import dispatch, gemm, linear, prefill, prefill_int8
from vllm_exl3.cuda.compiler import ARCHITECTURES
from vllm_exl3.cuda.gemm_plan import MOST_OF_TWO_KINDS, GemmPartition, k_blocks, plan_gemm
from vllm_exl3.cuda.geometry import Arithmetic, Form, GpuLimits, LinearPlan
from vllm_exl3.cuda.narrow_partition import NarrowPartition
from vllm_exl3.cuda.prefill_plan import INT8_FINISH
from vllm_exl3.cuda.survey import every_kind, typical_limits
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import Codebook

H200 = GpuLimits("sm_90a", 132, 232448, ((2, 66), (4, 30), (8, 14)))
MUL1, MCG = (8, int(Codebook.MUL1)), (8, int(Codebook.MCG))


@pytest.fixture(autouse=True)
def _as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_EXL3_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    linear._steps.cache_clear()
    yield
    linear._steps.cache_clear()


def _layer(width: int, height: int, *kinds: tuple[int, int]) -> tuple[Shard, ...]:
    return tuple(Shard(*kind, width, height, 0, height) for kind in kinds)


def _selected(
    shards: tuple[Shard, ...], rows: int, form: Form | None = None, partition: NarrowPartition | None = None
) -> str:
    """The kernel that serves a call: gemm, prefill, each with int8 products or not, or launches of another."""
    linear._steps.cache_clear()
    settings = (linear.env.batch_invariant(), linear.env.PRECISION.get())
    step = linear._steps(shards, rows, shards[0].in_features, H200, settings, form, partition, None)[0]
    if isinstance(step.plan, LinearPlan):
        return "launches"
    if step.plan.instance.source != "gemm/gemm.cu":
        return "prefill int8" if step.finish is INT8_FINISH else "prefill"
    (_, kinds) = step.plan.instance.macros[1]
    return "gemm int8" if kinds.endswith(f", {int(Arithmetic.BYTE)}>") else "gemm"


SHAPES = ((1024, 1024), (4096, 4096), (4096, 14336), (14336, 4096), (8192, 28672))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kinds", [[MUL1], [MCG], [MUL1, MCG], [(4, 2), (8, 2)]], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_larger_layers_are_served_from_fewer_tokens_on(
    architecture: str, kinds: list[tuple[int, int]], int8: bool
) -> None:
    """From 9 on at the earliest: up to 8 the identities and the fast mode of few tokens serve."""
    found = [dispatch.gemm_rows(architecture, kinds, 0.1 * step, int8=int8) for step in range(3000)]
    firsts = [rows[0] if rows else 1000 for rows in found]
    assert firsts == sorted(firsts, reverse=True)
    assert all(rows[0] > 8 and rows[-1] <= 128 for rows in found if rows)
    assert bool(found[-1]) == (architecture == "sm_90a"), "a GPU that nobody measured, or the one that was"
    assert not found[0]


@given(st.lists(st.sampled_from(every_kind()), min_size=1, max_size=2, unique=True), st.floats(0, 1000), st.booleans())
def test_one_shard_of_halves_makes_a_layer_one_of_halves(
    kinds: list[tuple[int, int]], amount: float, int8: bool
) -> None:
    mul1 = all(codebook == Codebook.MUL1 for _, codebook in kinds)
    alike = [MUL1, (6, 2)] if mul1 else [MCG, (6, 1)]
    expected = dispatch.gemm_rows("sm_90a", alike[: len(kinds)], amount, int8=int8)
    assert dispatch.gemm_rows("sm_90a", kinds, amount, int8=int8) == expected
    assert dispatch.gemm_rows("sm_90a", kinds[::-1], amount, int8=int8) == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kinds", [[MUL1], [MCG], [MUL1, MCG], [MUL1, (5, 2), (6, 2)]], ids=str)
def test_each_number_of_tokens_has_the_kernel_of_the_table(
    shape: tuple[int, int], kinds: list[tuple[int, int]]
) -> None:
    layer = _layer(*shape, *kinds)
    of_the_table = dispatch.gemm_rows("sm_90a", kinds, k_blocks(layer) / H200.multiprocessors)
    limit = {1: 129, 2: MOST_OF_TWO_KINDS + 1, 3: 0}[len(kinds)]  # for want of registers
    served = of_the_table[: max(0, limit - of_the_table.start)]
    assert gemm.served_rows(layer, H200, int8=False) == served
    for rows in range(1, 140):
        expected = "prefill" if prefill.serves(layer, rows, H200) else "launches"
        assert _selected(layer, rows) == ("gemm" if rows in served else expected), rows
    assert _selected(layer, 1000) == "prefill"


def test_what_the_table_gives_to_the_gemm_it_serves() -> None:
    """So that the tests above are about something: the large layer at 32 tokens, in both classes of codebooks."""
    for kind in (MUL1, MCG):
        assert _selected(_layer(8192, 28672, kind), 32) == "gemm"
        assert _selected(_layer(8192, 28672, kind), 129) == "prefill"
        assert _selected(_layer(8192, 28672, kind), 8) == "launches"


def test_a_form_or_a_cut_that_is_asked_for_is_what_serves() -> None:
    layer = _layer(8192, 28672, MUL1)
    assert _selected(layer, 32, form=Form(False, 32)) == "launches"
    assert _selected(layer, 16, form=Form(False, 16)) == "launches"


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 32, 64, 65])
def test_batch_invariance_leaves_the_gemm_out(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """It rounds otherwise than the kernels that then serve all batches."""
    layer = _layer(8192, 28672, MUL1)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert _selected(layer, rows) == "launches"
    assert gemm.instances(layer, H200) == [] and gemm.choose(layer, rows, H200) is None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fast_mode_has_its_own_table(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    layer, coarse = _layer(*shape, MUL1), _layer(*shape, (10, 2))
    default = {rows: _selected(layer, rows) for rows in range(1, 140)}
    monkeypatch.setenv("VLLM_EXL3_PRECISION", "fast")
    served = dispatch.gemm_rows("sm_90a", [MUL1], k_blocks(layer) / H200.multiprocessors, int8=True)
    for rows, before in default.items():
        selected = _selected(layer, rows)
        if rows <= dispatch.FAST_TOKENS:
            assert selected == "launches" and linear.choose_form(layer, rows, H200).fast == (rows > 4)
        elif prefill_int8.serves(layer, rows, H200):
            assert selected == "prefill int8"
        elif rows in served:
            assert selected == "gemm int8"
        else:
            assert selected == before
    assert all("int8" not in _selected(other, 32) for other in (coarse, _layer(*shape, MCG), _layer(*shape, MUL1, MCG)))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert _selected(layer, 32) == "launches"


def test_fast_mode_of_few_tokens_is_asked_before_the_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the default's table says of so few."""
    monkeypatch.setattr(gemm, "served_rows", lambda *_, int8: range(0) if int8 else range(1, 129))
    layer = _layer(8192, 28672, MUL1)
    assert _selected(layer, 8) == "gemm"
    monkeypatch.setenv("VLLM_EXL3_PRECISION", "fast")
    assert _selected(layer, 8) == "launches" and _selected(layer, 9) == "gemm"


def test_shards_of_different_widths_are_never_one_product() -> None:
    layer = (*_layer(4096, 14336, MUL1), *_layer(8192, 14336, MUL1))
    for rows in (9, 16, 32, 64, 200):
        assert gemm.choose(layer, rows, H200) is None
        assert not prefill.serves(layer, rows, H200)


@pytest.mark.parametrize("precision", ["default", "fast"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_serves_was_compiled_while_the_model_loaded(
    architecture: str, shape: tuple[int, int], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXL3_PRECISION", precision)
    limits = typical_limits(architecture)
    for kinds in ([MUL1], [MCG], [MUL1, MCG], [MUL1, (5, 2)]):
        layer, served = _layer(*shape, *kinds), set()
        ready = set(gemm.instances(layer, limits))
        for rows in range(1, 140):
            if (int8 := gemm.choose(layer, rows, limits)) is not None:
                plan = plan_gemm(layer, rows, shape[0], limits, int8=int8)
                served |= {plan.instance, plan.transform.instance}
        assert served <= ready and bool(served) == bool(ready)


def test_a_cut_changes_neither_kernel() -> None:
    layer = _layer(4096, 14336, MUL1)
    ready = set(gemm.instances(layer, H200))
    for partition in (GemmPartition(112, True), GemmPartition(100, False)):
        plan = plan_gemm(layer, 64, 4096, H200, partition)
        assert {plan.instance, plan.transform.instance} <= ready
