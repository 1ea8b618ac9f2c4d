"""The GEMM for up to 128 tokens as machine code: registers, spills, waits that the compiler adds, and its main loop."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cuda.sass import product_loops, spills_beside_products
from vllm_exl3.cuda.compiler import Cubin, Instance, compile_instance, compiler_unavailable
from vllm_exl3.cuda.gemm_plan import GEMM_TILES, INT8_GEMM_TILES, gemm_instance
from vllm_exl3.cuda.prefill_input import ROTATE_FEW, ROTATE_FUSED
from vllm_exl3.cuda.survey import every_kind

pytestmark = pytest.mark.skipif(compiler_unavailable() is not None, reason=str(compiler_unavailable()))

Kind = tuple[int, int]

_SPILLS, _STACK = 96, 40
"""Bytes of spills, stored and loaded, and of stack outside loops of products: words of the walk over segments."""

_WEIGHTS = {False: 64 * 16 // 128, True: 64 * 32 // 128}
"""Of a lane, in one product, by whether it is of int8."""

_MOST_OF_TWO_KINDS = 64
"""Tokens up to which layers of two kinds are served (dispatch.py)."""

_PAIRS = (((8, 2), (10, 2)), ((3, 2), (16, 2)), ((6, 1), (8, 2)), ((8, 0), (8, 1)), ((5, 2), (7, 2)))
"""Kinds of fused layers: two rates, two codebooks, the widest windows."""


def _compiled(tile: int, kinds: tuple[Kind, ...], *, int8: bool = False) -> Cubin:
    """A kernel that is as it should be but for what its loop costs."""
    cubin = compile_instance(gemm_instance(tile, sorted(kinds), int8=int8), "sm_90a")
    assert not cubin.serialised, (tile, kinds, cubin.serialised)
    assert cubin.registers <= (88 if len(kinds) == 1 and tile <= 80 else 96), (tile, kinds, cubin.registers)
    assert cubin.spill_bytes <= _SPILLS and cubin.stack_bytes <= _STACK, (tile, kinds, cubin.log)
    assert cubin.stack_bytes == 0 or cubin.spill_bytes, (tile, kinds, "an array in local memory", cubin.log)
    assert not cubin.spill_bytes or not spills_beside_products(cubin.image), (tile, kinds)
    return cubin


def _instructions_a_weight(cubin: Cubin, kinds: int, *, int8: bool = False) -> list[float]:
    """Of each kind's loop, in which the ring's addresses have to stay in uniform registers."""
    loops = product_loops(cubin.image)
    assert len(loops) == kinds, f"{len(loops)} loops of products, expected one a kind"
    for loop in loops:
        moved = [text for text in loop if re.search(r"\bR2UR\b", text)]
        assert not moved, f"addresses that the compiler does not know to be the same for a warp: {moved}"
    return [len(loop) / (_WEIGHTS[int8] * sum("GMMA" in text for text in loop)) for loop in loops]


@pytest.mark.parametrize("tile", [32, *(pytest.param(t, marks=pytest.mark.slow) for t in GEMM_TILES if t != 32)])
def test_main_loop_of_four_bits(tile: int) -> None:
    (found,) = _instructions_a_weight(_compiled(tile, ((8, 2),)), 1)
    assert found <= 5.0


@pytest.mark.parametrize("kinds", [((8, 2), (10, 2)), pytest.param(((6, 1), (8, 2)), marks=pytest.mark.slow)], ids=str)
def test_fused_layers_of_two_kinds(kinds: tuple[Kind, ...]) -> None:
    assert max(_instructions_a_weight(_compiled(64, kinds), 2)) <= 7.5


@pytest.mark.parametrize(
    "tile", [64, *(pytest.param(tile, marks=pytest.mark.slow) for tile in INT8_GEMM_TILES if tile != 64)]
)
def test_main_loop_of_int8(tile: int) -> None:
    (found,) = _instructions_a_weight(_compiled(tile, ((8, 2),), int8=True), 1, int8=True)
    assert found <= 5.0


@pytest.mark.slow
@pytest.mark.parametrize("half_bits", range(2, 9))
def test_every_rate_and_tile_of_int8(half_bits: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        for cubin in pool.map(lambda tile: _compiled(tile, ((half_bits, 2),), int8=True), INT8_GEMM_TILES):
            assert _instructions_a_weight(cubin, 1, int8=True)[0] <= 7.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", every_kind(), ids=str)
def test_every_kind_and_tile(kind: Kind) -> None:
    with ThreadPoolExecutor(2) as pool:
        for cubin in pool.map(lambda tile: _compiled(tile, (kind,)), GEMM_TILES):
            assert _instructions_a_weight(cubin, 1)[0] <= 7.5


@pytest.mark.slow
@pytest.mark.parametrize("kinds", _PAIRS, ids=str)
def test_every_tile_of_fused_layers(kinds: tuple[Kind, ...]) -> None:
    tiles = [tile for tile in GEMM_TILES if tile <= _MOST_OF_TWO_KINDS]
    with ThreadPoolExecutor(2) as pool:
        for cubin in pool.map(lambda tile: _compiled(tile, kinds), tiles):
            assert max(_instructions_a_weight(cubin, 2)) <= 7.5


@pytest.mark.parametrize(
    ("transforms", "instance"),
    [(key[0], instance) for key, instance in (ROTATE_FEW | ROTATE_FUSED).items()],
    ids=str,
)
def test_rotation_fits_beside_the_gemm(transforms: int, instance: Instance) -> None:
    """A block of it starts beside one of the GEMM before it, which leaves it 9216 registers where it has one kind.

    But for inputs of more than 16,384 channels, of which a warp has four 128-blocks.
    """
    cubin = compile_instance(instance, "sm_90a")
    assert cubin.registers <= (32 if transforms < 4 else 42)
    assert transforms == 4 or 256 * cubin.registers <= 65536 - 640 * 88
    if transforms <= 2:
        assert cubin.spill_bytes <= 16 and cubin.stack_bytes <= 8  # none but behind a norm
    else:  # of inputs of more than 16384 channels
        assert cubin.spill_bytes <= 160 and cubin.stack_bytes <= 64
