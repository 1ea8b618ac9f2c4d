"""Which MoE kernels serve how many tokens, and what they are told."""

import ctypes
import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

from vllm_exl3.cuda.compiler import ARCHITECTURES, Instance, kernel_sources
from vllm_exl3.cuda.moe import check_shared, checked_address, instances
from vllm_exl3.cuda.moe_dispatch import Choice, choose, decode_rows, every_form
from vllm_exl3.cuda.moe_gemm import forms
from vllm_exl3.cuda.moe_geometry import ACTIVATION_KINDS, Layer, MoeArgs, MoeForm, MoeStage
from vllm_exl3.cuda.moe_plan import COMBINE_ROWS, GROUP_ROWS, ROUTE, ROWS, SWIGLU_ROWS, Launch, MoePlan, plan_moe
from vllm_exl3.cuda.moe_survey import expert_codes, expert_instances
from vllm_exl3.cuda.survey import typical_limits
from vllm_exl3.ops.activation import ACTIVATIONS
from vllm_exl3.pack.codec import codebook_table
from vllm_exl3.pack.stored import Codebook

MUL1, MCG = int(Codebook.MUL1), int(Codebook.MCG)
H200 = typical_limits("sm_90a")
UNIFORM = tuple((projection, 8, MUL1) for projection in range(3))


def layer(kinds: tuple[tuple[int, int, int], ...] = UNIFORM, experts: int = 128, total: int = 128) -> Layer:
    return Layer(kinds, experts, total, 8, 2048, 768)


LAYERS = {
    "mul1": layer(),
    "mcg": layer(tuple((projection, 6, MCG) for projection in range(3))),
    "mixed": layer(((0, 4, MUL1), (1, 16, MUL1), (2, 6, MCG))),
    "no gate": layer(((0, 6, MUL1), (1, 5, MUL1))),
    "expert parallel": layer(experts=16),
    "few experts": Layer(UNIFORM, 2, 2, 1, 200, 320),
}


def fields(name: str) -> list[str]:
    """Members of a structure in moe_problem.cuh, in order."""
    text = re.sub(r"//.*", "", kernel_sources()["moe_problem.cuh"])
    body = re.search(rf"struct {name} {{(.*?)\n}};", text, re.DOTALL)
    assert body is not None
    declarations = [part.strip() for part in body.group(1).split(";") if part.strip()]
    return [re.sub(r"\[.*\]|\*", "", item).split()[-1] for part in declarations for item in part.split(",")]


@pytest.mark.parametrize("structure", [MoeStage, MoeArgs], ids=lambda structure: structure.__name__)
def test_structures_mirror_the_kernels(structure: type[ctypes.Structure]) -> None:
    assert [name for name, _ in structure._fields_] == fields(structure.__name__)
    assert f"sizeof(MoeArgs) == {ctypes.sizeof(MoeArgs)}," in kernel_sources()["moe_problem.cuh"]


def test_activations_are_numbered_as_the_kernels_number_them() -> None:
    text = kernel_sources()["moe_activation.cuh"]
    body = re.search(r"enum ActivationKind : u32 {(.*?)}", text, re.DOTALL)
    assert body is not None
    names = [item.split("=")[0].strip().lower() for item in body.group(1).split(",")]
    assert tuple(names) == ACTIVATION_KINDS
    assert set(names) == set(ACTIVATIONS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", LAYERS)
def test_classes_are_intervals_of_the_batch_size(name: str, architecture: str) -> None:
    limits, seen = typical_limits(architecture), []
    for tokens in [*range(1, 70), 128, 300, 1000, 4000, 9000, 100_000]:
        choice = choose(LAYERS[name], tokens, limits)
        assert choice.form in every_form(LAYERS[name], limits)
        assert choice.form in forms(limits)
        assert not choice.form.wide or limits.warpgroups
        seen.append(not choice.form.identity)
    assert seen == sorted(seen)
    assert not seen[0]
    assert seen[-1]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_one_class_serves_every_batch_when_asked(architecture: str) -> None:
    limits = typical_limits(architecture)
    found = {choose(LAYERS["mul1"], tokens, limits, one_class=True).form for tokens in (1, 8, 100, 9000)}
    assert {(form.identity, form.wide) for form in found} == {(False, limits.warpgroups)}


@pytest.mark.parametrize(("kinds", "middle"), [(1, 256), (3, 256), (4, 128), (7, 128), (11, 128)])
def test_row_blocks_follow_the_rows_an_expert_has(kinds: int, middle: int) -> None:
    """Row blocks of 128 serve layers of many kinds, whose widest kernel has two widths of product, and no others."""
    shape = layer(tuple((projection, 2 + kind, MUL1) for kind in range(kinds) for projection in range(3)))
    found = {rows: choose(shape, rows * 128 // 8, H200).form.tile_rows for rows in (8, 24, 25, 52, 53, 106, 107, 400)}
    assert found == {8: 32, 24: 32, 25: 64, 52: 64, 53: middle, 106: middle, 107: 256, 400: 256}
    assert (MoeForm(False, 128) in every_form(shape, H200)) == (middle == 128)


def test_wide_inputs_do_not_overflow_integer_sums() -> None:
    wide = Layer(UNIFORM, 8, 8, 2, 20480, 768)
    assert not choose(wide, 1, H200).form.identity
    assert choose(layer(tuple((p, 6, MCG) for p in range(3))), 1, H200).form.identity


@pytest.mark.parametrize(
    ("variables", "name", "rows"),
    [
        ({"NATIVE_MOE_MAX_ROWS": "5"}, "mul1", 5),
        ({"NATIVE_MOE_MAX_ROWS": "0"}, "mul1", 0),
        ({"NATIVE_MOE_MAX_ROWS_K4": "0"}, "mul1", 0),
        ({"NATIVE_MOE_MAX_ROWS": "5", "NATIVE_MOE_MAX_ROWS_K4": "7"}, "mul1", 7),
        ({"NATIVE_MOE_MAX_ROWS": "5", "NATIVE_MOE_MAX_ROWS_K4": "7"}, "mcg", 5),
        ({"NATIVE_MOE_MAX_ROWS": "5", "NATIVE_MOE_MAX_ROWS_K8": "3"}, "mixed", 3),
        ({"NATIVE_MOE_MAX_ROWS_K2": "2", "NATIVE_MOE_MAX_ROWS_K3": "6"}, "no gate", 6),  # K = 3 and 2.5
    ],
)
def test_row_caps_decide_the_path(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str, rows: int
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(f"VLLM_EXL3_{variable}", value)
    assert decode_rows(LAYERS[name]) == rows
    assert all(choose(LAYERS[name], tokens, H200).form.identity for tokens in range(1, rows + 1))
    assert not choose(LAYERS[name], rows + 1, H200).form.identity


def test_grouped_prefill_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(LAYERS["mul1"], 5000, H200).form.wide
    monkeypatch.setenv("VLLM_EXL3_GROUPED_PREFILL", "0")
    assert choose(LAYERS["mul1"], 5000, H200) == Choice(MoeForm(True, 4), 2048, 2)


def test_the_fat_threshold_is_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(LAYERS["mul1"], 5000, H200).fat_rows == choose(LAYERS["mul1"], 5000, H200).form.tile_rows // 2
    monkeypatch.setenv("VLLM_EXL3_FAT_THRESHOLD", "0")
    assert choose(LAYERS["mul1"], 5000, H200).fat_rows == 0


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
        parts, fact_rows = made.scratch.parts, made.scratch.fact_rows
        ends = sorted({*parts.values(), made.scratch.size})
        sizes = {part: next((end for end in ends if end > at), at) - at for part, at in parts.items()}
        slots, padding = tokens * shape.top_k, made.values["row_padding"]
        least, full = sorted((made.values["thin_rows"], made.values["tile_rows"]))
        for used in range(1, min(shape.experts, slots) + 1):
            counts = [slots // used + (expert < slots % used) for expert in range(used)]
            assert sizes["blocks"] >= 16 * sum(math.ceil(count / least) for count in counts)
            rows = sum(math.ceil(count / padding) * padding for count in counts)
            assert made.values["padded_rows"] >= rows
            assert sizes["order"] >= 4 * rows
            first, second = made.stages
            outputs = rows if form.wide else slots
            item = 2 if form.wide else 4
            assert sizes["out_1"] >= item * outputs * second["out_features"]
            assert sizes["out_0"] >= item * outputs * first["projections"] * first["out_features"]
            # Sums are read in groups of a form's rows, beyond the last.
            beyond = form.tile_rows if form.wide else 0
            assert fact_rows >= outputs
            assert sizes["sums"] >= 4 * (fact_rows * (first["projections"] + 1) + beyond)
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
    """As moe_combine_rows.cu shares them out: whole parts of every token, and no more than 128-blocks."""
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
                assert values["ring_stages"] >= 3
                assert values["ring_stages"] * values["ring_stride"] >= 4 * one


def test_precompiling_knows_what_a_packs_experts_mix() -> None:
    packs = Path(__file__).parents[1] / "data" / "packs"
    found = {path.name: expert_codes(str(path)) for path in packs.iterdir() if path.is_dir()}
    assert any(found.values())
    for codes in filter(None, found.values()):
        shapes = [Layer(tuple((2, *kind) for kind in kinds), 8, 8, 1, 2048, 768) for kinds in codes]
        wanted = expert_instances(codes, H200)
        assert all(set(instances(shape, H200)) <= set(wanted) for shape in shapes)
        assert GROUP_ROWS[1] in wanted
        assert not any(
            instance.source in ("moe_wide.cu", "moe_cluster.cu")
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


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_no_sum_overflows_what_it_is_stored_as(architecture: str) -> None:
    """Sums are fp16 between the kernels: the largest that any weights and inputs can make, of the widest rows.

    Before the transform no channel exceeds 2^7.5 (of moe_finish.cuh), so a 128-block's magnitudes behind it add up to
    128·2^7.5 at most.
    """
    limits, widest = typical_limits(architecture), 0
    for width in range(1024, 1 << 20, 1024):
        try:
            check_shared(Layer(UNIFORM, 8, 8, 1, width, 128), limits)
        except ValueError:
            break
        widest = width
    scale = re.search(r"STORED_SCALE = (0x1p-\d+)f", kernel_sources()["moe_finish.cuh"])
    assert scale is not None
    largest = max(float(abs(codebook_table(codebook).astype(float)).max()) for codebook in Codebook)
    assert 16_384 < widest < 1 << 19
    assert 2**7.5 * widest * largest * float.fromhex(scale.group(1)) < 65_504
