"""Every kind of bad pack is refused before a weight is read, with the four-part message."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_pack import Draft, linear, llama
from vllm_exl3.pack import Exl3PackError, Pack
from vllm_exl3.pack.check import check
from vllm_exl3.pack.source import LocalFolder

Q = "model.layers.0.self_attn.q_proj"
FILE = "model.safetensors"
SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"

Spoil = Callable[[Draft], object]


def _set(name: str, dtype: str, values: np.ndarray) -> Spoil:
    return lambda draft: draft.tensors.__setitem__(name, (dtype, values))


def _trellis(shape: tuple[int, ...], dtype: str = "I16") -> Spoil:
    return _set(f"{Q}.trellis", dtype, np.zeros(shape))


def _after(action: Callable[[Path], object], shards: int = 1) -> Spoil:
    def spoil(draft: Draft) -> None:
        if shards > 1:
            draft.shard(shards)
        draft.after = lambda folder: action(folder) and None

    return spoil


def _truncate(name: str, cut: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - cut)


def _header(edit: Callable[[dict], object]) -> Spoil:
    return lambda draft: setattr(draft, "edit_header", lambda header: edit(header) and None)


def _shift(header: dict, name: str, by: int) -> None:
    header[name]["data_offsets"] = [offset + by for offset in header[name]["data_offsets"]]


def _index(edit: Callable[[dict], object]) -> Spoil:
    def spoil(draft: Draft) -> None:
        draft.shard(2)
        weight_map = dict(draft.file_of)
        edit(weight_map)
        draft.index = weight_map

    return spoil


def _extra_file(draft: Draft) -> None:
    draft.shard(2)
    draft.add_linear("model.layers.1.self_attn.extra", 128, 128)
    for name in linear("model.layers.1.self_attn.extra", 128, 128):
        draft.file_of[name] = "more.safetensors"
    draft.index = {name: file for name, file in draft.file_of.items() if file != "more.safetensors"}


def _same_tensor_twice(folder: Path) -> None:
    (folder / "old.safetensors").write_bytes((folder / FILE).read_bytes())


def _foreign_table(draft: Draft) -> None:
    draft.drop("model.embed_tokens.weight")
    draft.tensors["model.embed_tokens.qweight"] = ("I32", np.zeros((16, 16), np.int32))
    draft.tensors["model.embed_tokens.qscale"] = ("F16", np.ones((16, 1), np.float16))


def _config(**entries: object) -> Spoil:
    return lambda draft: draft.config.update(entries)


def _ledger(key: str, **entries: object) -> Spoil:
    return lambda draft: draft.sidecar["tensor_storage"][key].update(entries)


def _experts(missing: tuple[str, ...] = (), count: int = 4, declared: int = 4) -> Spoil:
    def spoil(draft: Draft) -> None:
        draft.config["num_experts"] = declared
        for expert in range(count):
            for role in ("gate_proj", "up_proj", "down_proj"):
                draft.add_linear(f"model.layers.0.mlp.experts.{expert}.{role}", 128, 128)
        draft.drop(*(f"{name}.{leaf}" for name in missing for leaf in ("trellis", "suh", "svh", "mul1")))

    return spoil


BAD_PACKS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    # Files
    "file cut in the data": (_after(_truncate(FILE, 100)), (FILE, "cut")),
    "file cut in the header": (_after(lambda f: os.truncate(f / FILE, 500)), (FILE, "header")),
    "empty file": (_after(lambda f: os.truncate(f / FILE, 0)), (FILE, "0 bytes")),
    "file with bytes after the last tensor": (
        _after(lambda f: (f / FILE).write_bytes((f / FILE).read_bytes() + b"12")),
        (FILE, "last tensor ends"),
    ),
    "header that is no JSON": (
        _after(lambda f: (f / FILE).write_bytes(b"\x05" + bytes(7) + b"{]]]}")),
        (FILE, "no JSON"),
    ),
    "an HTML page instead of a file": (
        _after(lambda f: (f / FILE).write_text("<!DOCTYPE html><html>not found</html>")),
        (FILE, "header length"),
    ),
    "a pointer file of Git LFS": (
        _after(lambda f: (f / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")),
        (FILE, "header length"),
    ),
    "overlapping tensors": (_header(lambda h: _shift(h, f"{Q}.suh", -32)), (f"{Q}.suh", "overlapping", FILE)),
    "hole between tensors": (_header(lambda h: _shift(h, f"{Q}.suh", 32)), (FILE, "hole")),
    "offsets of another length than the shape": (
        _header(lambda h: h[f"{Q}.suh"].update(shape=[64])),
        (f"{Q}.suh", "256 bytes", "128 bytes"),
    ),
    "unknown dtype": (_header(lambda h: h[f"{Q}.suh"].update(dtype="F17")), (f"{Q}.suh", "F17")),
    "entry without offsets": (_header(lambda h: h[f"{Q}.suh"].pop("data_offsets")), (f"{Q}.suh", FILE)),
    "the same tensor in two files": (_after(_same_tensor_twice), ("old.safetensors", FILE, "another revision")),
    "missing shard that the index names": (_after(lambda f: (f / SHARD_2).unlink(), 2), (SHARD_2, INDEX)),
    "missing shard without an index": (
        _after(lambda f: [(f / SHARD_1).unlink(), (f / INDEX).unlink()], 2),
        (SHARD_1, SHARD_2),
    ),
    "no file at all": (_after(lambda f: (f / FILE).unlink()), ("no *.safetensors",)),
    "no config.json": (_after(lambda f: (f / "config.json").unlink()), ("no config.json", "architecture")),
    "config.json that says nothing": (_after(lambda f: (f / "config.json").write_text("{}")), ("no config.json",)),
    "config.json that is no JSON": (_after(lambda f: (f / "config.json").write_text("{")), ("config.json",)),
    "quantization_config.json cut": (
        _after(lambda f: os.truncate(f / "quantization_config.json", 900)),
        ("quantization_config.json",),
    ),
    # Index
    "index names a tensor that no file holds": (
        _index(lambda m: m.update({"model.layers.0.self_attn.gone.weight": SHARD_1})),
        ("self_attn.gone.weight", SHARD_1, INDEX),
    ),
    "index lacks a stored tensor": (_index(lambda m: m.pop(f"{Q}.suh")), (f"{Q}.suh", SHARD_1, INDEX)),
    "index names another file than the one with the tensor": (
        _index(lambda m: m.update({f"{Q}.suh": SHARD_2})),
        (f"{Q}.suh", SHARD_1, SHARD_2, INDEX),
    ),
    "index does not know a whole file": (_extra_file, ("more.safetensors", INDEX)),
    "index without a weight map": (_after(lambda f: (f / INDEX).write_text("{}"), 2), (INDEX, "weight_map")),
    # Tables
    "a token embedding in another plugin's format": (
        _foreign_table,
        ("embed_tokens", ".qweight I32", "embed-quant", "vllm-quantpack", FILE),
    ),
    # Trellis
    "trellis one tile short": (_trellis((8, 7, 48)), (f"{Q}.trellis", "112 outputs", "128")),
    "inputs no multiple of 128": (_trellis((7, 8, 48)), (f"{Q}.trellis", "112 inputs")),
    "dims multiples of 16 only": (
        lambda d: d.add_linear(Q, 176, 128),
        (f"{Q}.trellis", "176 inputs", "multiples of 128"),
    ),
    "empty trellis": (_trellis((0, 8, 48)), (f"{Q}.trellis",)),
    "last dimension no multiple of 8": (_trellis((8, 8, 47)), (f"{Q}.trellis", "47", "16·K")),
    "K = 9": (_trellis((8, 8, 144)), (f"{Q}.trellis", "144")),
    "K = 0": (_trellis((8, 8, 0)), (f"{Q}.trellis",)),
    "K = 0.5": (_trellis((8, 8, 8)), (f"{Q}.trellis",)),
    "K = 4.5": (_trellis((8, 8, 72)), (f"{Q}.trellis",)),
    "K = 2.5 without a marker": (
        lambda d: d.add_linear(Q, 128, 128, bits=2.5).drop(f"{Q}.mul1"),
        (f"{Q}.trellis", "2.5", "mul1"),
    ),
    "K = 2.5 with mcg": (
        lambda d: d.drop(f"{Q}.mul1").add_linear(Q, 128, 128, bits=2.5, codebook="mcg"),
        (f"{Q}.trellis", "2.5", "mcg"),
    ),
    "trellis as I32": (_trellis((8, 8, 48), "I32"), (f"{Q}.trellis", "I32", "I16")),
    "trellis of rank 4": (_trellis((1, 8, 8, 48)), (f"{Q}.trellis",)),
    "trellis of rank 2 without signs": (_trellis((64, 48)), (f"{Q}.trellis", "signs")),
    # Markers and scales
    "both markers": (lambda d: d.add_linear(Q, 128, 128, codebook="mcg"), (Q, "both .mcg and .mul1", FILE)),
    "wrong marker value": (_set(f"{Q}.mul1", "I32", np.array(1)), (f"{Q}.mul1", "0x00000001", "0x83DCD12D")),
    "the other codebook's value": (
        _set(f"{Q}.mul1", "I32", np.array(-877912083)),
        (f"{Q}.mul1", "0xCBAC1FED", "0x83DCD12D"),
    ),
    "marker with two elements": (_set(f"{Q}.mul1", "I32", np.zeros(2)), (f"{Q}.mul1", "scalar")),
    "marker as I64": (_set(f"{Q}.mul1", "I64", np.array(1)), (f"{Q}.mul1", "I64")),
    "no suh": (lambda d: d.drop(f"{Q}.suh"), (f"{Q}.trellis", "neither .suh nor .su")),
    "no svh": (lambda d: d.drop(f"{Q}.svh"), (f"{Q}.trellis", "neither .svh nor .sv")),
    "suh and su": (_set(f"{Q}.su", "I16", np.zeros(8)), (f"{Q}.trellis", "both .suh and .su")),
    "suh too short": (_set(f"{Q}.suh", "F16", np.ones(112)), (f"{Q}.suh", "[112]", "[128]")),
    "svh too long": (_set(f"{Q}.svh", "F16", np.ones(256)), (f"{Q}.svh", "[256]", "[128]")),
    "suh of rank 2": (_set(f"{Q}.suh", "F16", np.ones((1, 128))), (f"{Q}.suh",)),
    "suh as BF16": (_set(f"{Q}.suh", "BF16", np.ones(128)), (f"{Q}.suh", "BF16", "F16")),
    "legacy signs of the wrong length": (
        lambda d: d.drop(f"{Q}.suh").tensors.update({f"{Q}.su": ("I16", np.zeros(16))}),
        (f"{Q}.su", "[16]", "[8]"),
    ),
    "bias of the wrong length": (_set(f"{Q}.bias", "F16", np.ones(256)), (f"{Q}.bias", "[256]")),
    "bias as integers": (_set(f"{Q}.bias", "I16", np.ones(128)), (f"{Q}.bias", "I16")),
    "a .scale beside a trellis": (_set(f"{Q}.scale", "F16", np.array(1.0)), (f"{Q}.scale", FILE)),
    "scales whose trellis is nowhere": (lambda d: d.drop(f"{Q}.trellis"), (f"{Q}.suh", f"{Q}.trellis", FILE)),
    # Ledger
    "ledger says another K": (_ledger(Q, bits_per_weight=4), (Q, "K = 3", "K = 4", "tensor_storage")),
    "ledger says another codebook": (_ledger(Q, mcg_multiplier=0xCBAC1FED), (Q, "mul1", "mcg", "tensor_storage")),
    "ledger says another multiplier": (_ledger(Q, mul1_multiplier=5), (Q, "0x00000005")),
    "ledger says EXL3, the pack holds a weight": (
        _ledger("model.norm", quant_format="exl3"),
        ("model.norm", "dense .weight"),
    ),
    "ledger describes another shape": (
        _ledger(Q, stored_tensors={f"{Q}.suh": {"shape": [256]}}),
        (Q, "[128]", "[256]"),
    ),
    # The model as a whole
    "untied without a head": (
        lambda d: d.drop("lm_head.trellis", "lm_head.suh", "lm_head.svh", "lm_head.mul1"),
        ("lm_head", "tie_word_embeddings", "config.json"),
    ),
    "a layer missing": (_config(num_hidden_layers=3), ("layer 2", "3 layers")),
    "an expert missing": (_experts(count=3), ("model.layers.0.mlp.experts", "experts 3")),
    "an expert without its down projection": (
        _experts(missing=("model.layers.0.mlp.experts.2.down_proj",)),
        ("model.layers.0.mlp.experts", "experts 2"),
    ),
    "more experts than config.json counts": (_experts(count=5), ("experts 4", "too many")),
    "another method declared": (
        _config(quantization_config={"quant_method": "fp8"}),
        ("fp8", "config.json", "quantization_config.json"),
    ),
    "another method declared in text_config": (
        _config(text_config={"quantization_config": {"quant_method": "gptq"}}),
        ("gptq", "text_config.quantization_config"),
    ),
    "declaration that is no object": (_config(quantization_config="exl3"), ("str", "config.json")),
    "FP8 weights beside EXL3 linears": (
        _set("model.layers.0.self_attn.gate.weight", "F8_E4M3", np.ones((8, 128))),
        ("self_attn.gate.weight", "F8_E4M3"),
    ),
    # Row-coded tables
    "embedding signs of another width": (
        lambda d: d.drop("embed_tokens.weight").tensors.update(
            {
                "model.embed_tokens.trellis": ("I16", np.zeros((256, 65))),
                "model.embed_tokens.signs": ("F16", np.ones((1, 128))),
            }
        ),
        ("model.embed_tokens.signs", "256"),
    ),
    "embedding rows of no integer K": (
        lambda d: d.drop("embed_tokens.weight").tensors.update(
            {
                "model.embed_tokens.trellis": ("I16", np.zeros((256, 64))),
                "model.embed_tokens.signs": ("F16", np.ones((1, 256))),
            }
        ),
        ("model.embed_tokens.trellis", "64"),
    ),
    "n-gram shard missing": (
        lambda d: d.tensors.update(
            {
                "model.ngram.shard_1.trellis": ("I16", np.zeros((4, 51))),
                "model.ngram.head_bias": ("F16", np.ones((2, 160))),
            }
        ),
        ("model.ngram", "shards"),
    ),
}


@pytest.mark.parametrize("case", BAD_PACKS)
def test_bad_pack_is_refused_with_four_parts(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, fragments = BAD_PACKS[case]
    draft = llama()
    spoil(draft)
    folder = draft.write(tmp_path / "pack")
    read = _watch_reads(monkeypatch)
    with pytest.raises(Exl3PackError) as caught:
        check(Pack.open(folder))
    error = caught.value
    for part in (error.found, error.expected, error.where, error.remedy):
        assert part.strip(), "an empty part"
    for fragment in fragments:
        assert fragment in str(error)
    assert read["weights"] == 0, "weights were read before the refusal"


def test_the_untouched_draft_is_fine(tmp_path: Path) -> None:
    assert check(Pack.open(llama().write(tmp_path))) == []
    assert check(Pack.open(llama().shard(3).write(tmp_path / "sharded"))) == []


def test_every_fault_is_found_not_only_the_first(tmp_path: Path) -> None:
    draft = llama()
    for name in ("q_proj", "k_proj", "v_proj"):
        draft.tensors[f"model.layers.0.self_attn.{name}.mul1"] = ("I32", np.array(7))
    with pytest.raises(Exl3PackError, match="2 more faults"):
        check(Pack.open(draft.write(tmp_path)))


@pytest.mark.parametrize("suffix", [".q_weight", ".qweight", ".weight_packed", ".weight_scale_inv"])
def test_other_formats_are_named(suffix: str, tmp_path: Path) -> None:
    draft = llama()
    draft.tensors = {f"model.layers.0.self_attn.q_proj{suffix}": ("I32", np.zeros((8, 8)))}
    draft.config["quantization_config"] = {"quant_method": "other"}
    with pytest.raises(Exl3PackError, match=r"EXL2|GPTQ|compressed-tensors|FP8") as caught:
        Pack.open(draft.write(tmp_path))
    assert "'other'" in caught.value.found


def test_error_survives_a_process_boundary() -> None:
    import pickle

    error = Exl3PackError(found="a", expected="b", where="c", remedy="d")
    copy = pickle.loads(pickle.dumps(error))
    assert copy.parts() == error.parts() == {"found": "a", "expected": "b", "where": "c", "remedy": "d"}
    assert "c" in error.report() and json.dumps(error.parts())


def _watch_reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts reads that go past the header of a safetensors file and are larger than a marker."""
    counts = {"weights": 0}
    read, read_many = LocalFolder.read, LocalFolder.read_many

    def watched(self: LocalFolder, name: str, start: int, length: int) -> bytes:
        data = read(self, name, start, length)
        if name.endswith(".safetensors") and start > 0 and length > 4 and not data.rstrip().endswith(b"}"):
            counts["weights"] += 1
        return data

    def watched_many(self: LocalFolder, ranges: list[tuple[str, int, int]]) -> list[bytes]:
        counts["weights"] += sum(length > 4 for _, _, length in ranges)
        return read_many(self, ranges)

    monkeypatch.setattr(LocalFolder, "read", watched)
    monkeypatch.setattr(LocalFolder, "read_many", watched_many)
    return counts
