"""What `verify` says of texts, models and baselines that are something else, and of packs whose figures are no numbers.

Each is found before anything is measured, where that can be known so early.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.verify import damage
from vllm_exl3.pack import Exl3PackError, Pack
from vllm_exl3.verify import run
from vllm_exl3.verify.against import compare_weights
from vllm_exl3.verify.card import check_card
from vllm_exl3.verify.display import Display
from vllm_exl3.verify.gguf_weights import gguf_weights
from vllm_exl3.verify.judge import final_states
from vllm_exl3.verify.measure import check_others, measure, open_source
from vllm_exl3.verify.run import Request
from vllm_exl3.verify.text import read_text
from vllm_exl3.verify.weights import DenseFolder, PackWeights

NAME = "llama_tied-3.0-mul1"
PACK = damage.DATA / "packs" / NAME
DISPLAY = Display(Console(quiet=True))
IDS = torch.randint(0, 640, (2, 256), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damage.source_of(PACK, tmp_path_factory.mktemp("source") / "model")


def test_a_text_is_read_no_further_than_needed(tmp_path: Path) -> None:
    sentence = "Ein Käfer läuft über die Straße, und niemand hält ihn auf. "
    file = tmp_path / "text"
    file.write_text("\ufeff" + sentence * 400, encoding="utf-8")
    whole = read_text(file, PACK, 10**9)
    assert len(whole) > 4
    for tokens in (512, 700, 1024):
        assert torch.equal(read_text(file, PACK, tokens), whole[: tokens // 256])
    with file.open("r+b") as stream:
        stream.truncate(1 << 40)  # a terabyte of nothing
    assert torch.equal(read_text(file, PACK, 512), whole[:2])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 tokens"),
        (b"a", "1 tokens"),
        (b"caf\xe9 " * 2000, "0xe9 that is no UTF-8"),
        ("text ".encode("utf-16") * 2000, "no UTF-8"),
        (np.random.default_rng(0).bytes(5000), "no UTF-8"),
        ("cut ä".encode()[:-1], "no UTF-8"),
    ],
)
def test_what_is_no_text(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "text"
    file.write_bytes(content)
    with pytest.raises(Exl3PackError, match=says) as error:
        read_text(file, PACK, 512)
    assert error.value.where == str(file)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b'{"model": 5}'])
def test_what_is_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(Exl3PackError, match="a tokenizer"):
        read_text(PACK / "config.json", tmp_path, 512)


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("Some words of a text. " * 400)
    with pytest.raises(Exl3PackError, match="another model's"):
        read_text(file, PACK, 512, 16)


@pytest.mark.parametrize(
    "config",
    ["", "{", "[]", "{}", "\xff", '{"quantization_config": 5}', '{"quantization_config": {"quant_method": 1}}', None],
)
def test_models_to_compare_with_are_looked_at_first(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_bytes(config.encode("latin-1"))
    with pytest.raises(Exl3PackError) as error:
        check_others([str(tmp_path)])
    assert str(tmp_path) in error.value.where
    for absent in ("/none/model", "~nobody-of-this-name/model", "none.gguf", ""):
        with pytest.raises(Exl3PackError):
            check_others([absent])


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 630},
        {"vocab_size": 650},
        {"vocab_size": 1 << 50},
        {"num_hidden_layers": 10**7},
        {"num_hidden_layers": "two"},
        {"num_attention_heads": 0},
        {"hidden_size": -1},
        {"model_type": "no such model"},
        {"model_type": None},
    ],
)
def test_a_configuration_of_another_model(source: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    other = Path(shutil.copytree(source, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text()) | changes
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exl3PackError) as error:
        measure(Pack.open(PACK), open_source(str(source)), [str(other)], IDS, DISPLAY)
    assert str(other) in error.value.where


def test_models_of_one_name_are_told_apart(source: Path, tmp_path: Path) -> None:
    others = [str(shutil.copytree(source, tmp_path / folder / "model")) for folder in ("a", "b")]
    found = measure(Pack.open(PACK), open_source(str(source)), [*others, str(PACK)], IDS, DISPLAY)
    assert list(found) == [NAME, "model", "model (2)", f"{NAME} (2)"]


@pytest.mark.parametrize("field", ["final_logit_softcapping", "logit_scale"])
def test_a_head_described_in_a_nested_configuration(field: str) -> None:
    """Configurations of multimodal models describe their language model one level down."""
    name = "gemma2-6.0-mcg" if field == "final_logit_softcapping" else NAME
    pack = Pack.open(damage.DATA / "packs" / name)
    config = dict(pack.config) | ({} if field == "final_logit_softcapping" else {field: 0.5})
    if field == "logit_scale":
        with pytest.raises(Exl3PackError, match="logit_scale"):
            final_states(PackWeights(pack), config, IDS)
    else:
        assert final_states(PackWeights(pack), config, IDS[:, :8]).softcap == config[field]


def test_a_16_bit_model_that_is_something_else(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Exl3PackError, match="an EXL3 pack"):
        open_source(str(PACK))
    twice = Path(shutil.copytree(source, tmp_path / "twice"))
    shutil.copy(twice / "model.safetensors", twice / "other.safetensors")
    with pytest.raises(Exl3PackError, match=r"in model.safetensors and in other.safetensors"):
        open_source(str(twice))
    os.truncate(twice / "other.safetensors", 1000)
    with pytest.raises(Exl3PackError) as error:
        open_source(str(twice))
    assert "other.safetensors" in error.value.where and str(twice) in error.value.where


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_16_bit_model_with_nan(source: Path, tmp_path: Path, name: str) -> None:
    broken = Path(shutil.copytree(source, tmp_path / "broken"))
    tensor = DenseFolder(broken)._tensors[name]
    damage.overwrite(broken, tensor, struct.pack("<e", float("nan")))
    with pytest.raises(Exl3PackError, match="not finite") as error:
        opened = open_source(str(broken))
        compare_weights(Pack.open(PACK), opened)
        measure(Pack.open(PACK), opened, [], IDS, DISPLAY)
    assert str(broken) in error.value.where


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF" + bytes(100),
        b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + b"\xff" * 64,
        b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(64),
        np.random.default_rng(0).bytes(3000),
    ],
)
def test_gguf_files_that_are_damaged(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(Exl3PackError) as error:
        gguf_weights(file)
    assert error.value.where == str(file)


def _nan_norm(pack: Path) -> str:
    norm = next(value for key, value in Pack.open(pack).dense.items() if key.endswith("1.input_layernorm"))
    damage.overwrite(pack, norm, np.full(norm.shape, np.nan, "<f2").tobytes())
    return norm.name


@pytest.mark.parametrize("harm", [damage.set_scale("suh", float("nan")), _nan_norm])
def test_a_pack_whose_figures_are_no_numbers_has_a_report(
    harm: Callable[[Path], str], source: Path, tmp_path: Path
) -> None:
    pack, text = damage.copy_of(NAME, tmp_path), tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    where = harm(pack)
    report, card = tmp_path / "made" / "report.json", tmp_path / "card"
    request = Request(
        str(pack), str(source), text, 512, (str(PACK),), backends=False, json_file=report, card=card
    )  # fmt: skip
    findings = run.run(request, DISPLAY)
    assert {"not finite", "divergence"} <= {finding.check for finding in findings}
    assert where in {finding.where for finding in findings}
    found = json.loads(report.read_text(), parse_constant=pytest.fail)
    assert found["divergence"][NAME]["kl"] == {"mean": None, "low": None, "high": None}
    assert found["divergence"][f"{NAME} (2)"]["kl"]["mean"] is not None
    page = (card / "card.md").read_text()
    assert f"| {NAME} | not finite |" in page and len(list(card.iterdir())) == 4


@pytest.mark.parametrize("name", ["a$b^$", "_x|y"])
def test_any_name_of_a_folder_has_a_card(name: str, tmp_path: Path) -> None:
    from vllm_exl3.verify.card import write_card
    from vllm_exl3.verify.judge import Divergence

    values = np.full((2, 3), 0.5, np.float32)
    found = Divergence(values, values > 0, values, values)
    estimates = {key: value.as_dict() for key, value in found.estimates().items()}
    report = {
        "pack": name, "weights": [], "findings": [], "tensors": {"tensors": 1},
        "text": {"tokens": 6, "sequences": 2}, "divergence": {name: estimates},
    }  # fmt: skip
    write_card(tmp_path / "card", report, {name: found})
    row = next(line for line in (tmp_path / "card" / "card.md").read_text().splitlines() if "0.5 (" in line)
    assert row.replace("\\|", "").count("|") == 6


def test_files_that_cannot_be_written_are_found_first(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotADirectoryError, match=str(file)):
        check_card(file)
    for path in (tmp_path, file / "report.json"):
        with pytest.raises(OSError, match=str(tmp_path)):
            run.run(Request(str(PACK), json_file=path), DISPLAY)


def test_a_wrong_model_is_told_without_reading_it_again_and_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every linear is a fault, and for each of them the one whose weights it has is looked for."""
    other = Path(shutil.copytree(source, tmp_path / "other"))
    opened = DenseFolder(other)
    for name in opened.names():
        if name.endswith("_proj.weight"):
            values = opened.read(name)[::-1]
            damage.overwrite(other, opened._tensors[name], np.ascontiguousarray(values, "<f2").tobytes())
    reads: list[str] = []
    plain = DenseFolder.read_rows

    def counting(folder: DenseFolder, name: str, first: int, count: int | None) -> object:
        reads.append(name)
        return plain(folder, name, first, count)

    monkeypatch.setattr(DenseFolder, "read_rows", counting)
    pack = Pack.open(PACK)
    findings = compare_weights(pack, DenseFolder(other))[1]
    assert len(findings) == len(pack.linears) - 1 and len(reads) <= 2 * len(pack.linears)


def test_one_expert_is_read_without_the_others(tmp_path: Path) -> None:
    from vllm_exl3.tools.pack_writer import PackTensor, write_safetensors
    from vllm_exl3.verify.weights import find_weight

    stacked = np.arange(4 * 6 * 2, dtype=np.float32).reshape(4, 6, 2)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    write_safetensors(tmp_path / "model.safetensors", [PackTensor(name, "F32", stacked.shape, lambda: stacked)])
    folder = DenseFolder(tmp_path)
    found = find_weight(folder, "model.layers.0.mlp.experts.2.up_proj.weight", lambda _: None)
    assert np.array_equal(found, stacked[2, 3:])
    assert find_weight(folder, "model.layers.0.mlp.experts.4.up_proj.weight", lambda _: None) is None
    assert np.array_equal(folder.read_rows(name, 3, 5), stacked[3:])
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 4)
    with pytest.raises(OSError, match="ended while it was read"):
        folder.read(name)
