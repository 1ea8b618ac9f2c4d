"""`Pack`: what it exposes, what it reads, and that opening again is free."""

import glob
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import DATA
from tests.tiny_pack import Draft, linear, llama
from vllm_exl3.pack import Codebook, Exl3PackError, Pack
from vllm_exl3.pack.check import check
from vllm_exl3.pack.source import LocalFolder
from vllm_exl3.pack.stored import HALF_BITS
from vllm_exl3.pack.values import check_marker, check_scales

EVERY_CODE = [
    (half_bits / 2, codebook)
    for half_bits in HALF_BITS
    for codebook in (("mul1",) if half_bits % 2 else ("3inst", "mcg", "mul1"))
]


def test_golden_pack_is_sound(golden_pack: Path) -> None:
    assert check(Pack.open(golden_pack)) == []


def test_golden_pack_says_what_its_name_says(golden_pack: Path) -> None:
    _, bits, codebook = golden_pack.name.split("-")[:3]
    pack = Pack.open(golden_pack)
    assert {linear.codebook.label for linear in pack.linears.values()} == {codebook}
    assert pack.quantization["bits"] == float(bits)
    assert "lm_head" in pack.linears
    assert ("model.embed_tokens" in pack.embeddings) == golden_pack.name.endswith("emb4")
    assert ("model.embed_tokens" in pack.dense) != golden_pack.name.endswith("emb4")
    assert pack.folder == golden_pack and pack.commit is None


@pytest.mark.parametrize(("bits", "codebook"), EVERY_CODE)
def test_every_rate_and_codebook_is_read_from_the_tensors(bits: float, codebook: str, tmp_path: Path) -> None:
    draft = Draft({}, {})
    draft.add_linear("a.b", 256, 384, bits=bits, codebook=codebook)
    stored = Pack.open(draft.write(tmp_path)).linears["a.b"]
    assert (stored.bits, stored.half_bits, stored.codebook.label) == (bits, int(2 * bits), codebook)
    assert (stored.in_features, stored.out_features) == (256, 384)
    assert (stored.marker is None) == (codebook == "3inst")
    assert stored.nbytes == 256 * 384 * bits / 8 + 2 * (256 + 384) + (0 if codebook == "3inst" else 4)


@pytest.mark.parametrize("bias", [384, 300])
def test_bias_may_be_padded_or_not(bias: int, tmp_path: Path) -> None:
    draft = Draft({}, {}).add_linear("a.b", 128, 384, bias=bias)
    stored = Pack.open(draft.write(tmp_path)).linears["a.b"]
    assert stored.bias is not None and stored.bias.shape == (bias,)


def test_legacy_signs(tmp_path: Path) -> None:
    stored = Pack.open(Draft({}, {}).add_linear("a.b", 128, 256, legacy=True, codebook="3inst").write(tmp_path))
    assert stored.linears["a.b"].suh.shape == (8,) and stored.linears["a.b"].svh.shape == (16,)
    assert stored.linears["a.b"].suh.name == "a.b.su" and stored.linears["a.b"].codebook is Codebook.INST3


def test_marker_may_have_one_element_instead_of_none(tmp_path: Path) -> None:
    draft = llama()
    for name, (dtype, values) in draft.tensors.items():
        if name.endswith(".mul1"):
            draft.tensors[name] = (dtype, values.reshape(1))
    draft.sidecar = None
    assert check(Pack.open(draft.write(tmp_path))) == []


def test_ngram_table_in_shards(tmp_path: Path) -> None:
    draft = llama()
    for shard, rows in enumerate((4, 4, 3)):
        draft.tensors[f"model.ngram.shard_{shard}.trellis"] = ("I16", np.zeros((rows, 51)))
    draft.tensors["model.ngram.head_bias"] = ("F16", np.ones((2, 160)))
    for leaf in ("head_offsets", "head_vocab_sizes", "layer_multipliers"):
        draft.tensors[f"model.ngram.{leaf}"] = ("I64", np.ones(2))
    for name in draft.tensors:
        if "ngram" in name:
            draft.file_of[name] = "ngram_table.safetensors"
    draft.index = {name: "model.safetensors" for name in draft.tensors if "ngram" not in name}
    pack = Pack.open(draft.write(tmp_path))
    table = pack.ngram_tables["model.ngram"]
    assert (table.bits, table.rows, len(table.shards)) == (5, 11, 3)
    assert set(table.extra) == {"head_offsets", "head_vocab_sizes", "layer_multipliers"}
    assert check(pack) == [], "no index lists the file of an n-gram table"


def test_dense_modules_and_sizes(tmp_path: Path) -> None:
    pack = Pack.open(llama().write(tmp_path))
    assert set(pack.dense) == {
        "model.embed_tokens", "model.norm",
        *(f"model.layers.{layer}.{name}_layernorm" for layer in range(2) for name in ("input", "post_attention")),
    }  # fmt: skip
    assert pack.nbytes == sum(tensor.nbytes for tensor in pack.tensors.values())
    assert set(pack.files) == {"model.safetensors"}


@pytest.mark.parametrize("dtype", ["F16", "F32", "I16", "I32", "I64", "U8"])
def test_read_returns_what_is_stored(dtype: str, tmp_path: Path) -> None:
    values = np.arange(6).reshape(2, 3)
    draft = llama()
    draft.tensors["x.y"] = (dtype, values)
    assert np.array_equal(Pack.open(draft.write(tmp_path)).read("x.y"), values)


def test_read_of_bfloat16_is_exact(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 3.0e38], np.float32)
    draft = llama()
    draft.tensors["x.y"] = ("BF16", values.view(np.uint32) >> 16)
    read = Pack.open(draft.write(tmp_path)).read("x.y")
    assert read.dtype == np.float32 and np.allclose(read, values, rtol=2**-8)


@pytest.mark.parametrize("name", ["x.y", "nothing.there"])
def test_read_of_what_cannot_be_read(name: str, tmp_path: Path) -> None:
    draft = llama()
    draft.tensors["x.y"] = ("F8_E4M3", np.zeros(3))
    with pytest.raises(Exl3PackError, match=name.replace(".", r"\.")):
        Pack.open(draft.write(tmp_path)).read(name)


def test_opening_again_returns_the_same_object(tmp_path: Path) -> None:
    folder = llama().write(tmp_path)
    assert Pack.open(folder) is Pack.open(str(folder) + "/")


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    folder = llama(bits=3).write(tmp_path)
    first = Pack.open(folder)
    llama(bits=4).write(tmp_path)
    second = Pack.open(folder)
    assert first is not second
    assert second.linears["model.layers.0.mlp.up_proj"].bits == 4


def test_opening_reads_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = llama()
    draft.add_linear("model.layers.0.mlp.wide", 2048, 2048, bits=8)
    folder = draft.write(tmp_path)
    read = LocalFolder.read
    lengths = []

    def watched(self: LocalFolder, name: str, start: int, length: int) -> bytes:
        lengths.append(length)
        return read(self, name, start, length)

    monkeypatch.setattr(LocalFolder, "read", watched)
    Pack.open(folder)
    assert sum(lengths) < 200_000 < (folder / "model.safetensors").stat().st_size


def test_pickle_carries_the_place_only(tmp_path: Path) -> None:
    pack = Pack.open(llama().write(tmp_path))
    data = pickle.dumps(pack)
    assert len(data) < 500
    assert pickle.loads(data) is pack
    script = "import sys, pickle; print(len(pickle.load(sys.stdin.buffer).linears))"
    done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, check=True,
                          env={"PYTHONPATH": ":".join(sys.path)})  # fmt: skip
    assert done.stdout.strip() == b"15", "any process can open it"


def test_neither_torch_nor_vllm_is_imported() -> None:
    script = (
        "import sys; from vllm_exl3.pack import Pack; import vllm_exl3.pack.check, vllm_exl3.pack.codec, "
        f"vllm_exl3.pack.hub; Pack.open({str(DATA / 'packs/phi3-5.0-mul1')!r}); "
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": ":".join(sys.path)})  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_consolidated_copy_is_left_alone(tmp_path: Path) -> None:
    folder = llama().write(tmp_path)
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    pack = Pack.open(folder)
    assert set(pack.files) == {"model.safetensors"} and set(pack.ignored_files) == {"consolidated.safetensors"}
    (warning,) = check(pack)
    assert "vLLM's --load-format auto reads it instead" in str(warning)


@pytest.mark.parametrize("names", [["._model.safetensors"], [".hidden.safetensors", "._config.json", "._x.index.json"]])
def test_files_that_vllm_s_pattern_skips_are_left_alone(names: list[str], tmp_path: Path) -> None:
    """macOS leaves such files on drives that do not keep its attributes."""
    folder = llama().write(tmp_path)
    for name in names:
        (folder / name).write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X        ")
    pack = Pack.open(folder)
    assert check(pack) == [] and set(pack.files) == {"model.safetensors"}
    assert set(pack.ignored_files) == {name for name in names if name.endswith(".safetensors")}
    found = {Path(path).name for path in glob.glob(f"{folder}/*.safetensors")}  # as vLLM looks for them
    assert found == set(pack.files)


def test_an_index_that_names_a_file_which_vllm_skips_is_refused(tmp_path: Path) -> None:
    draft = llama().shard(2)
    draft.file_of = {name: file.replace("model-00002", ".model-00002") for name, file in draft.file_of.items()}
    with pytest.raises(Exl3PackError, match=r"found no \.model-00002"):
        check(Pack.open(draft.write(tmp_path)))


def test_a_folder_of_side_files_alone_is_no_pack(tmp_path: Path) -> None:
    folder = llama().write(tmp_path)
    (folder / "model.safetensors").rename(folder / "._model.safetensors")
    with pytest.raises(Exl3PackError, match=r"no \*\.safetensors"):
        Pack.open(folder)


def test_single_file_of_any_name_and_any_sharding(tmp_path: Path) -> None:
    whole = Pack.open(llama().write(tmp_path / "whole"))
    for count in (2, 5):
        pack = Pack.open(llama().shard(count).write(tmp_path / str(count)))
        assert check(pack) == [] and len(pack.files) == count
        assert pack.linears.keys() == whole.linears.keys()
    draft = llama()
    draft.file_of = dict.fromkeys(draft.tensors, "weights.safetensors")
    assert check(Pack.open(draft.write(tmp_path / "named"))) == []


DIMENSIONS = st.integers(1, 4).map(lambda blocks: 128 * blocks)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    specs=st.lists(
        st.tuples(DIMENSIONS, DIMENSIONS, st.sampled_from(EVERY_CODE), st.booleans(), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    shards=st.integers(1, 3),
)
def test_any_valid_pack_opens_as_written(specs, shards: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    draft = Draft({}, {"quantization_config": {"quant_method": "exl3"}})
    for index, (inputs, outputs, (bits, codebook), biased, legacy) in enumerate(specs):
        bias = outputs if biased else 0
        draft.add_linear(f"m.{index}", inputs, outputs, bits=bits, codebook=codebook, bias=bias, legacy=legacy)
    pack = Pack.open(draft.shard(shards).write(tmp_path_factory.mktemp("pack")))
    assert check(pack) == []
    for index, (inputs, outputs, (bits, codebook), biased, _) in enumerate(specs):
        stored = pack.linears[f"m.{index}"]
        assert (stored.in_features, stored.out_features, stored.bits) == (inputs, outputs, bits)
        assert stored.codebook.label == codebook and (stored.bias is not None) == biased
        assert np.array_equal(pack.read(stored.trellis.name), draft.tensors[stored.trellis.name][1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, np.nan, 2.0, np.nan], "2 values that are NaN or infinite, the first at channel 1"),
        ([1.0, np.inf], "1 values that are NaN or infinite, the first at channel 1"),
        ([0.0, 0.0, 0.0], "zeros only"),
    ],
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_meaningless_scales_are_refused(values: list[float], message: str, dtype: type) -> None:
    with pytest.raises(Exl3PackError, match=message) as caught:
        check_scales("model.layers.0.mlp.up_proj.suh", np.array(values, dtype), file="model.safetensors")
    assert caught.value.where == "model.layers.0.mlp.up_proj.suh in model.safetensors"


@pytest.mark.parametrize(
    "values",
    [np.array([0.0, 1.0], np.float16), np.zeros(0, np.float16), np.zeros(4, np.int16), -np.ones(3, np.float32)],
)
def test_sound_scales_pass(values: np.ndarray) -> None:
    check_scales("x.svh", values)


def test_marker_values() -> None:
    for leaf, value in (("mcg", -877912083), ("mcg", 0xCBAC1FED), ("mul1", -2082680531), ("mul1", 0x83DCD12D)):
        check_marker(f"x.{leaf}", value)
    for leaf, value in (("mcg", 0x83DCD12D), ("mul1", 0), ("mul1", 0x83DCD12C)):
        with pytest.raises(Exl3PackError, match=f"x.{leaf} in f"):
            check_marker(f"x.{leaf}", value, file="f")


def test_tied_config_with_an_own_head_says_which_is_served(tmp_path: Path) -> None:
    draft = llama()
    draft.config["tie_word_embeddings"] = True
    (warning,) = check(Pack.open(draft.write(tmp_path)))
    assert "stored head is served" in str(warning)


def test_tied_without_a_head_is_sound(tmp_path: Path) -> None:
    draft = llama().drop("lm_head.trellis", "lm_head.suh", "lm_head.svh", "lm_head.mul1")
    draft.config["tie_word_embeddings"] = True
    draft.sidecar = None
    assert check(Pack.open(draft.write(tmp_path))) == []


@pytest.mark.parametrize("architecture", ["LlamaModel", "Qwen3ForSequenceClassification"])
def test_models_that_do_not_generate_need_no_head(architecture: str, tmp_path: Path) -> None:
    draft = llama().drop("lm_head.trellis", "lm_head.suh", "lm_head.svh", "lm_head.mul1")
    draft.config["architectures"] = [architecture]
    draft.sidecar = None
    assert check(Pack.open(draft.write(tmp_path))) == []


def test_q_k_v_of_different_rates_and_one_dense(tmp_path: Path) -> None:
    draft = llama(bits=5)
    prefix = "model.layers.0.self_attn"
    draft.add_linear(f"{prefix}.q_proj", 128, 128, bits=4)
    draft.drop(*(f"{prefix}.v_proj.{leaf}" for leaf in ("trellis", "suh", "svh", "mul1")))
    draft.tensors[f"{prefix}.v_proj.weight"] = ("BF16", np.zeros((128, 128)))
    draft.sidecar = None
    pack = Pack.open(draft.write(tmp_path))
    assert [pack.linears[f"{prefix}.{name}_proj"].bits for name in "qk"] == [4, 5]
    assert f"{prefix}.v_proj" in pack.dense
    assert check(pack) == []


def test_declared_source_format_beside_exl3_is_no_fault(tmp_path: Path) -> None:
    draft = llama()
    draft.tensors["model.layers.0.self_attn.gate.weight"] = ("F8_E4M3", np.zeros((8, 128)))
    draft.tensors["model.layers.0.self_attn.gate.weight_scale_inv"] = ("F32", np.zeros((1, 1)))
    draft.config["quantization_config"]["non_routed_quantization"] = {"quant_method": "fp8"}
    assert check(Pack.open(draft.write(tmp_path))) == []


def test_linear_contents_do_not_depend_on_the_run() -> None:
    first, second = linear("a", 128, 128), linear("a", 128, 128)
    assert all(np.array_equal(first[name][1], second[name][1]) for name in first)


def test_dense_head_at_sixteen_bits_agrees_with_its_declaration(tmp_path: Path) -> None:
    draft = llama().drop("lm_head.trellis", "lm_head.suh", "lm_head.svh", "lm_head.mul1")
    draft.tensors["lm_head.weight"] = ("F16", np.ones((256, 128)))
    draft.config["quantization_config"]["head_bits"] = 16
    draft.sidecar = None
    assert check(Pack.open(draft.write(tmp_path))) == []


def test_layers_of_a_tower_do_not_stand_for_the_model_s(tmp_path: Path) -> None:
    draft = llama(layers=1)
    draft.tensors["model.vision_tower.encoder.layers.1.norm.weight"] = ("F16", np.ones(8))
    assert check(Pack.open(draft.write(tmp_path / "complete"))) == []
    draft.config["num_hidden_layers"] = 2
    with pytest.raises(Exl3PackError, match="layer 1"):
        check(Pack.open(draft.write(tmp_path / "short")))


def test_configuration_without_weights_names_the_reason(tmp_path: Path) -> None:
    folder = llama().write(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(Exl3PackError, match="download them too") as caught:
        Pack.open(folder)
    assert "no *.safetensors" in caught.value.found
