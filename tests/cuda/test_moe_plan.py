"""What launches of the MoE kernels are made of, and what the kernels are told."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

from tests.cuda.moe_shapes import H200, LAYERS, MUL1, UNIFORM, layer
from vllm_exl3.cuda.compiler import Instance, kernel_sources
from vllm_exl3.cuda.moe import check_shared, checked_address, instances
from vllm_exl3.cuda.moe_dispatch import choose
from vllm_exl3.cuda.moe_gemm import forms
from vllm_exl3.cuda.moe_geometry import Layer, MoeForm
from vllm_exl3.cuda.moe_plan import COMBINE_ROWS, GROUP_ROWS, ROUTE, ROWS, SWIGLU_ROWS, Launch, MoePlan, plan_moe
from vllm_exl3.cuda.moe_survey import expert_codes, expert_instances
from vllm_exl3.cuda.survey import typical_limits
from vllm_exl3.pack.codec import codebook_table
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.stored import Codebook


def plan(name: str, tokens: int, form: MoeForm) -> MoePlan:
    return plan_moe(LAYERS[name], tokens, form, form.tile_rows // 2, H200)


def launch(made: MoePlan, instance: Instance) -> Launch:
    return next(launch for launch in made.launches if launch.instance == instance)


def gemms(made: MoePlan) -> list[Launch]:
    return [launch for launch in made.launches if dict(launch.instance.macros).get("INSTANCE_KINDS")]


@pytest.mark.parametrize(("variable", "tokens"), [("GROUPED_PREFILL_MAX_ROWS", 8192), ("FUSED_TEMP_ROWS", 2048)])
def test_windows_bound_the_scratch(monkeypatch: pytest.MonkeyPatch, variable: str, tokens: int) -> None:
    if variable == "FUSED_TEMP_ROWS":
        monkeypatch.setenv("VLLM_EXL3_GROUPED_PREFILL", "0")

    def scratch() -> int:
        choice = choose(LAYERS["mul1"], 100_000, H200)
        return plan("mul1", choice.window, choice.form).scratch.size

    assert choose(LAYERS["mul1"], 100_000, H200).window == tokens
    before = scratch()
    monkeypatch.setenv(f"VLLM_EXL3_{variable}", str(tokens // 4))
    assert scratch() < 0.3 * before


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("form", forms(H200), ids=lambda form: form.name)
def test_scratch_parts_hold_what_the_kernels_write(name: str, form: MoeForm) -> None:
    """Sizes by the worst routing: all slots of a few experts, or one row over a full block in each."""
    for tokens in (1, 7, 300):
        made, shape = plan(name, tokens, form), LAYERS[name]
        parts, info_rows = made.scratch.parts, made.scratch.info_rows
        ends = sorted({*parts.values(), made.scratch.size})
        sizes = {part: next((end for end in ends if end > at), at) - at for part, at in parts.items()}
        slots, padding = tokens * shape.top_k, made.values["row_padding"]
        least, full = sorted((made.values["thin_rows"], made.values["tile_rows"]))
        for used in range(1, min(shape.experts, slots) + 1):
            counts = [slots // used + (expert < slots % used) for expert in range(used)]
            assert sizes["blocks"] >= 16 * sum(math.ceil(count / least) for count in counts)
            rows = sum(math.ceil(count / padding) * padding for count in counts)
            assert made.values["padded_rows"] >= rows
            assert sizes["sorted_slots"] >= 4 * rows
            first, second = made.stages
            outputs = rows if form.wide else slots
            item = 2 if form.wide else 4
            assert sizes["out_1"] >= item * outputs * second["out_features"]
            assert sizes["out_0"] >= item * outputs * first["projections"] * first["out_features"]
            # Sums are read in groups of a form's rows, beyond the last.
            beyond = form.tile_rows if form.wide else 0
            assert info_rows >= outputs
            assert sizes["sums"] >= 4 * (info_rows * (first["projections"] + 1) + beyond)
            assert sizes["rows_0"] >= 2 * rows * first["projections"] * first["in_features"]
            assert sizes["rows_1"] >= 2 * rows * second["in_features"]
        assert sizes["row_largest"] >= 4 * tokens
        if form.wide:
            assert sizes["totals"] >= 4 * launch(made, ROUTE).grid[0] * shape.experts
        else:
            assert launch(made, ROWS).shared >= 16 + 4 * made.stages[0]["in_features"]
        assert all(offset % 256 == 0 for offset in parts.values())
        assert all(launch.shared <= H200.shared_memory for launch in made.launches)
        assert full >= least


@pytest.mark.parametrize("intermediate", [128, 640, 768, 1024, 2048, 2304, 4096, 6144, 7168])
def test_every_warp_of_the_hidden_transform_has_work(intermediate: int) -> None:
    made = plan_moe(dataclasses.replace(layer(), intermediate=intermediate), 300, MoeForm(False, 64), 32, H200)
    hidden = launch(made, GROUP_ROWS[1])
    blocks, warps, shared = intermediate // 128, hidden.threads // 32, hidden.shared
    assert 1 <= warps <= 12
    assert shared <= H200.shared_memory
    assert bool(made.values["keep_hidden"]) == (intermediate <= 6144)
    resident = min(12 // warps, (H200.shared_memory + 1024) // (shared + 1024))
    assert resident * blocks / -(-blocks // warps) >= min(8, blocks)


@pytest.mark.parametrize("intermediate", [128, 640, 768, 1024, 2048, 2304, 4096, 6144, 7168, 14336])
def test_swiglu_without_biases_has_a_transform_of_its_own(intermediate: int) -> None:
    for swiglu in (False, True):
        shape = dataclasses.replace(layer(), intermediate=intermediate, swiglu=swiglu)
        made = plan_moe(shape, 300, MoeForm(False, 64), 32, H200)
        found = [launch.instance for launch in made.launches]
        assert (SWIGLU_ROWS in found) == (swiglu and intermediate < 14336)
        assert (SWIGLU_ROWS in found) != (GROUP_ROWS[1] in found)
        if SWIGLU_ROWS in found:
            hidden = launch(made, SWIGLU_ROWS)
            assert 32 <= hidden.threads <= 640
            assert hidden.shared == intermediate // 128 * 2112 + 32 <= H200.shared_memory


@pytest.mark.parametrize("tokens", [1, 3, 64, 1000, 5000, 8192])
def test_the_weighted_sum_has_warps_for_every_token(tokens: int) -> None:
    """As moe/combine_rows.cu shares them out: whole parts of every token, and no more than 128-blocks."""
    made = plan_moe(layer(), tokens, MoeForm(False, 64), 32, H200)
    combine, blocks = launch(made, COMBINE_ROWS), made.stages[1]["out_features"] // 128
    warps = combine.grid[0] * combine.threads // 32
    split = min(blocks, -(-32 * H200.multiprocessors // tokens))
    assert tokens * split <= warps < tokens * split + combine.threads // 32


def test_the_ring_is_deep_enough_at_every_rate() -> None:
    for half_bits in (2, 3, 8, 16):
        shape = Layer(tuple((p, half_bits, MUL1) for p in range(3)), 8, 8, 2, 4096, 2048)
        for form in forms(H200):
            if form.wide:
                # decoding runs one slot ahead of the products, and one more is on its way
                values = plan_moe(shape, 100, form, 64, H200).values
                one = 4 * values["weight_pitch"] + values["activation_stride"]
                assert values["pipeline_stages"] >= 3
                assert values["pipeline_stages"] * values["stage_stride"] >= 4 * one


def test_precompiling_knows_what_a_packs_experts_mix() -> None:
    packs = Path(__file__).parents[1] / "data" / "packs"
    found = {path.name: expert_codes(Pack.open(str(path))) for path in packs.iterdir() if path.is_dir()}
    assert any(found.values())
    for codes in filter(None, found.values()):
        shapes = [Layer(tuple((2, *kind) for kind in kinds), 8, 8, 1, 2048, 768) for kinds in codes]
        wanted = expert_instances(codes, H200)
        assert all(set(instances(shape, H200)) <= set(wanted) for shape in shapes)
        assert GROUP_ROWS[1] in wanted
        assert not any(
            instance.source in ("moe/wide.cu", "moe/cluster.cu")
            for instance in expert_instances(codes, typical_limits("sm_80"))
        )


def test_few_items_of_exact_sums_get_twice_the_warps() -> None:
    form = MoeForm(True, 4)
    one, many = gemms(plan("mul1", 1, form)), gemms(plan("mul1", 64, form))
    assert [gemm.threads for gemm in one] == [512, 512]  # 8 slots × 2 projections × 6 strips, and 8 × 16
    assert [gemm.threads for gemm in many] == [256, 256]
    for name in ("mcg", "mixed"):  # the order of float sums must not depend on the batch
        assert [gemm.threads for gemm in gemms(plan(name, 1, form))] == [256, 256]
    for gemm in (*one, *many):
        assert dict(gemm.instance.macros)["INSTANCE_WARPS"] == str(gemm.threads // 32)
        assert gemm.instance in instances(LAYERS["mul1"], H200)


def test_tensors_that_kernels_would_misread_are_refused() -> None:
    words = torch.zeros(64, dtype=torch.int16)
    assert checked_address("trellis", words, torch.int16) == words.data_ptr()
    for wrong in (words.float(), words[1:33], words[::2]):
        with pytest.raises(ValueError, match=r"trellis of the experts: found .* expected contiguous torch\.int16"):
            checked_address("trellis", wrong, torch.int16)


@pytest.mark.parametrize(("hidden", "intermediate"), [(26_000, 1024), (1024, 32_768)])
def test_experts_too_wide_for_a_gpu_are_refused_while_loading(hidden: int, intermediate: int) -> None:
    layer = Layer(((0, 8, Codebook.MUL1), (1, 8, Codebook.MUL1), (2, 8, Codebook.MUL1)), 8, 8, 1, hidden, intermediate)
    with pytest.raises(ValueError, match="bytes of shared memory in a block of this GPU "):
        check_shared(layer, typical_limits("sm_86"))
    check_shared(layer, typical_limits("sm_90a"))
    check_shared(Layer(layer.kinds, 8, 8, 1, 8192, 16_384), typical_limits("sm_86"))


def test_a_gpu_that_holds_no_cluster_is_named_while_loading() -> None:
    limits = dataclasses.replace(H200, multiprocessors=1)
    with pytest.raises(ValueError, match=r"GPU of 1 multiprocessor, expected 2 or more.*MOE_KERNEL=reference"):
        check_shared(LAYERS["mul1"], limits)
    for many in (2, 3, 16):
        limits = dataclasses.replace(H200, multiprocessors=many)
        check_shared(LAYERS["mul1"], limits)
        for form in forms(limits):
            launches = plan_moe(LAYERS["mul1"], 300, form, 0, limits).launches
            assert min(min(launch.grid) for launch in launches) > 0
            assert all(launch.grid[0] % launch.cluster == 0 for launch in launches)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_no_sum_overflows_what_it_is_stored_as(architecture: str) -> None:
    """Sums are fp16 between the kernels: the largest that any weights and inputs can make, of the widest rows.

    Before the transform no channel exceeds 2^7.5 (of moe/epilogue.cuh), so a 128-block's magnitudes behind it add up to
    128·2^7.5 at most.
    """
    limits, widest = typical_limits(architecture), 0
    for width in range(1024, 1 << 20, 1024):
        try:
            check_shared(Layer(UNIFORM, 8, 8, 1, width, 128), limits)
        except ValueError:
            break
        widest = width
    scale = re.search(r"STORED_SCALE = (0x1p-\d+)f", kernel_sources()["moe/epilogue.cuh"])
    assert scale is not None
    largest = max(float(abs(codebook_table(codebook).astype(float)).max()) for codebook in Codebook)
    assert 16_384 < widest < 1 << 19
    assert 2**7.5 * widest * largest * float.fromhex(scale.group(1)) < 65_504
