"""What is compiled ahead of time: all that layers of these kinds will ask for, of any shape and in any mode."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.conftest import DATA
from vllm_exl3.cli import app
from vllm_exl3.cuda import linear, runtime, survey
from vllm_exl3.cuda.compiler import ARCHITECTURES, Instance
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.random_pack import write_random_pack


@settings(max_examples=50, deadline=None)
@example([(8, 2)], 112, 183, "sm_120a", {}, 132, 0)
@example([(8, 2)] * 3, 1, 1, "sm_90a", {"VLLM_EXL3_PRECISION": "fast"}, 132, 0)
@example([(8, 1)], 1, 1, "sm_80", {"VLLM_BATCH_INVARIANT": "1"}, 132, 0)
@example([(8, 2)], 32, 32, "sm_90a", {}, 114, 2)
@example([(2, 2)], 257, 3, "sm_90a", {"VLLM_EXL3_PRECISION": "fast"}, 100, 0)
@given(
    st.lists(st.sampled_from(survey.every_kind()), min_size=1, max_size=4),
    st.integers(1, 420),
    st.integers(1, 500),
    st.sampled_from(ARCHITECTURES),
    st.sampled_from([{}, {"VLLM_EXL3_PRECISION": "fast"}, {"VLLM_BATCH_INVARIANT": "1"}]),
    st.sampled_from([100, 114, 132, 148, 188]),
    st.integers(0, 20),
)
def test_precompiling_covers_every_shape(
    kinds: list[tuple[int, int]],
    in_blocks: int,
    blocks: int,
    name: str,
    variables: dict[str, str],
    multiprocessors: int,
    lost: int,
) -> None:
    """On every GPU of the architecture: they differ in multiprocessors, and in how many clusters find room."""
    shards = [Shard(*kind, in_blocks * 128, blocks * 128, 0, blocks * 128) for kind in kinds]
    limits, codes = survey.typical_limits(name), tuple(sorted(set(kinds)))
    clusters = tuple((size, max(0, multiprocessors // size - lost)) for size in (2, 4, 8))
    real = replace(
        limits, multiprocessors=multiprocessors, clusters=clusters if limits.dependent_launch and lost < 20 else ()
    )
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in variables.items():
            patch.setenv(variable, value)
        compiled = set(survey.instances_for([codes], limits))
        assert compiled.issuperset(linear.instances(tuple(pack_shards(shards)), in_blocks * 128, real))


def test_precompiling_knows_what_a_packs_layers_fuse(tmp_path: Path) -> None:
    """And leaves routed experts to their own kernels."""
    shape = {"hidden": 256, "intermediate": 256, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 128, "vocab": 256}
    rates = {"q_proj": 3, "k_proj": 4, "v_proj": 5, "gate_proj": 2, "up_proj": 2}
    write_random_pack(tmp_path / "pack", **shape, bits=lambda key: rates.get(key.rpartition(".")[2], 6))
    single = [((2 * bits, Codebook.MUL1),) for bits in (2, 3, 4, 5, 6)]
    fused = tuple((2 * bits, Codebook.MUL1) for bits in (3, 4, 5))
    assert survey.pack_codes(Pack.open(str(tmp_path / "pack"))) == sorted([*single, fused])
    for pack in ("mixtral-4.0-3inst", "qwen3_moe-3.0-mul1"):
        opened = Pack.open(str(DATA / "packs" / pack))
        dense = {(item.half_bits, item.codebook) for key, item in opened.linears.items() if ".experts." not in key}
        assert {kind for codes in survey.pack_codes(Pack.open(str(DATA / "packs" / pack))) for kind in codes} == dense


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_device_itself_asks_for_is_compiled_ahead_too(
    architecture: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted: list[Instance] = []
    monkeypatch.setenv("VLLM_EXL3_CACHE", str(tmp_path))
    monkeypatch.setattr("vllm_exl3.cuda.compiler.compiler_unavailable", lambda: None)
    monkeypatch.setattr(runtime, "build", lambda instances, *_, **__: wanted.extend(instances))
    result = CliRunner().invoke(app, ["precompile", "--arch", architecture])
    assert result.exit_code == 0 and f"{len(wanted)} kernels ready" in result.output
    limits = survey.typical_limits(architecture)
    assert len(runtime.own_instances(limits)) == (limits.architecture not in ("sm_80", "sm_86", "sm_89"))
    assert set(runtime.own_instances(limits)) <= set(wanted) and len(set(wanted)) == len(wanted)
