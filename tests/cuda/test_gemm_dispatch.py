"""Which kernel serves how many tokens of a layer where the GEMM for up to 64 tokens is one of them."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_exl3.cuda import dispatch, gemm, linear, prefill, prefill_int8
from vllm_exl3.cuda.compiler import ARCHITECTURES
from vllm_exl3.cuda.gemm_plan import GEMM_TILES, GemmCut, plan_gemm, units
from vllm_exl3.cuda.geometry import Form, GpuLimits
from vllm_exl3.cuda.narrow_cut import Cut
from vllm_exl3.cuda.survey import every_kind, typical_limits
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import Codebook

H200 = GpuLimits("sm_90a", 132, 232448, ((2, 66), (4, 30), (8, 14)))
MUL1, MCG = (8, int(Codebook.MUL1)), (8, int(Codebook.MCG))
DEFAULT = (False, "exact")


@pytest.fixture(autouse=True)
def _as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_EXL3_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    linear._way_to_serve.cache_clear()
    yield
    linear._way_to_serve.cache_clear()


def _layer(width: int, height: int, *kinds: tuple[int, int]) -> tuple[Shard, ...]:
    return tuple(Shard(*kind, width, height, 0, height) for kind in kinds)


def _way(shards: tuple[Shard, ...], rows: int, form: Form | None = None, cut: Cut | None = None) -> object:
    linear._way_to_serve.cache_clear()
    settings = (linear.env.batch_invariant(), linear.env.PRECISION.get())
    way = linear._way_to_serve(shards, rows, shards[0].in_features, H200, settings, form, cut, None)
    return "launches" if isinstance(way, tuple) else way


SHAPES = ((1024, 1024), (4096, 4096), (4096, 14336), (14336, 4096), (8192, 28672))


@pytest.mark.parametrize("kinds", [[MUL1], [MCG], [MUL1, MCG], [(4, 2), (8, 2)]], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_larger_layers_are_served_from_fewer_tokens_on(architecture: str, kinds: list[tuple[int, int]]) -> None:
    """From 9 on at the earliest: up to 8 the identities and the fast mode serve."""
    amounts = [0.1 * step for step in range(3000)]
    found = [dispatch.gemm_from(architecture, kinds, each) for each in amounts]
    from_on = [each if each is not None else 1000 for each in found]
    assert from_on == sorted(from_on, reverse=True)
    assert all(8 < each <= gemm.MOST_ROWS for each in found if each is not None)
    assert (found[-1] is not None) == (architecture == "sm_90a"), "a GPU that nobody measured, or the one that was"
    assert found[0] is None


@given(st.lists(st.sampled_from(every_kind()), min_size=1, max_size=2), st.floats(0, 1000))
def test_one_shard_of_halves_makes_a_layer_one_of_halves(kinds: list[tuple[int, int]], amount: float) -> None:
    mul1 = all(codebook == Codebook.MUL1 for _, codebook in kinds)
    alike = [MUL1] if mul1 else [MCG]
    assert dispatch.gemm_from("sm_90a", kinds, amount) == dispatch.gemm_from("sm_90a", alike, amount)
    assert dispatch.gemm_from("sm_90a", kinds[::-1], amount) == dispatch.gemm_from("sm_90a", alike, amount)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kinds", [[MUL1], [MCG], [MUL1, MCG], [MUL1, (5, 2), (6, 2)]], ids=str)
def test_each_number_of_tokens_has_the_kernel_of_the_table(
    shape: tuple[int, int], kinds: list[tuple[int, int]]
) -> None:
    layer = _layer(*shape, *kinds)
    first = dispatch.gemm_from("sm_90a", kinds, units(layer) / H200.multiprocessors) if len(kinds) <= 2 else None
    for rows in range(1, 140):
        if first is not None and first <= rows <= max(GEMM_TILES):
            expected: object = gemm.gemm
        else:
            expected = prefill.prefill if prefill.serves(layer, rows, H200) else "launches"
        assert _way(layer, rows) == expected, rows
    assert _way(layer, 1000) is prefill.prefill


def test_what_the_table_gives_to_the_gemm_it_serves() -> None:
    """So that the tests above are about something: the large layer at 32 tokens, in both classes of codebooks."""
    for kind in (MUL1, MCG):
        assert _way(_layer(8192, 28672, kind), 32) is gemm.gemm
        assert _way(_layer(8192, 28672, kind), 65) is not gemm.gemm
        assert _way(_layer(8192, 28672, kind), 8) == "launches"


def test_a_form_or_a_cut_that_is_asked_for_is_what_serves() -> None:
    layer = _layer(8192, 28672, MUL1)
    assert _way(layer, 32, form=Form(False, 32)) == "launches"
    assert _way(layer, 16, form=Form(False, 16)) == "launches"


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 32, 64, 65])
def test_batch_invariance_leaves_the_gemm_out(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """It rounds otherwise than the kernels that then serve all batches."""
    layer = _layer(8192, 28672, MUL1)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert _way(layer, rows) == "launches"
    assert gemm.instances(layer, H200) == [] and not gemm.serves(layer, rows, H200)


def test_fast_mode_keeps_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer(8192, 28672, MUL1)
    before = {rows: _way(layer, rows) for rows in (9, 32, 64)}
    monkeypatch.setenv("VLLM_EXL3_PRECISION", "fast")
    for rows in range(1, 9):
        assert _way(layer, rows) == "launches" and linear.choose_form(layer, rows, H200).fast == (rows > 4)
    for rows, way in before.items():
        int8 = prefill_int8.serves(layer, rows, H200)
        assert _way(layer, rows) is (prefill_int8.prefill_int8 if int8 else way)


def test_fast_mode_of_few_tokens_is_asked_before_the_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a table says of fewer tokens than today's."""
    monkeypatch.setattr(gemm, "serves", lambda *_: True)
    layer = _layer(8192, 28672, MUL1)
    assert _way(layer, 8) is gemm.gemm
    monkeypatch.setenv("VLLM_EXL3_PRECISION", "fast")
    assert _way(layer, 8) == "launches"


def test_shards_of_different_widths_are_never_one_product() -> None:
    layer = (*_layer(4096, 14336, MUL1), *_layer(8192, 14336, MUL1))
    for rows in (9, 16, 32, 64, 200):
        assert not gemm.serves(layer, rows, H200)
        assert not prefill.serves(layer, rows, H200)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_serves_was_compiled_while_the_model_loaded(architecture: str, shape: tuple[int, int]) -> None:
    limits = typical_limits(architecture)
    for kinds in ([MUL1], [MCG], [MUL1, MCG], [MUL1, (5, 2)]):
        layer = _layer(*shape, *kinds)
        ready = set(gemm.instances(layer, limits))
        for rows in range(1, 100):
            if gemm.serves(layer, rows, limits):
                plan = plan_gemm(layer, rows, shape[0], limits)
                assert {plan.instance, plan.transform.instance} <= ready, (kinds, rows)
        assert bool(ready) == any(gemm.serves(layer, rows, limits) for rows in range(1, 100))


def test_a_cut_changes_neither_kernel() -> None:
    layer = _layer(4096, 14336, MUL1)
    ready = set(gemm.instances(layer, H200))
    for cut in (GemmCut(112, True), GemmCut(100, False)):
        plan = plan_gemm(layer, 64, 4096, H200, cut)
        assert {plan.instance, plan.transform.instance} <= ready
