"""The command: exit status, report, and that nothing half-written is left behind."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.verify import damage
from vllm_exl3.cli import app
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.verify import run, tensors
from vllm_exl3.verify.card import write_card

NAME = "llama_tied-3.0-mul1"


def _verify(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", *map(str, arguments)], env={"COLUMNS": "200"})
    if isinstance(result.exception, Exl3PackError):
        raise result.exception
    return result.exit_code, result.output


def test_intact_pack_with_everything_but_vllm(tmp_path: Path) -> None:
    pack = damage.DATA / "packs" / NAME
    source = damage.source_of(pack, tmp_path / "source")
    text, report = tmp_path / "text.txt", tmp_path / "report.json"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    card = tmp_path / "card"
    options = ("--text", text, "--tokens", 512, "--compare", source, "--json", report, "--card", card)
    code, output = _verify(pack, "--against", source, *options)
    assert code == 0 and "No faults." in output
    found = json.loads(report.read_text())
    assert found["findings"] == [] and found["tensors"]["bytes"] > 0
    assert found["divergence"]["source"]["kl"]["mean"] == pytest.approx(0, abs=1e-6)
    assert found["divergence"][NAME]["kl"]["mean"] >= found["divergence"]["source"]["kl"]["mean"]
    assert len(found["weights"]) == 15 and any("native on cpu" in name for name in found["backends"]["decoders"])
    assert str(tmp_path) not in report.read_text()
    assert sorted(path.name for path in card.iterdir()) == ["card.json", "card.md", "kl.png", "layers.png"]
    assert json.loads((card / "card.json").read_text()) == found
    page = (card / "card.md").read_text()
    assert f"| {NAME} | {found['divergence'][NAME]['kl']['mean']:.4g} (" in page and "no faults" in page
    assert all((card / name).read_bytes().startswith(b"\x89PNG") for name in ("kl.png", "layers.png"))


def test_card_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Exl3PackError, match=r"vllm-exl3\[report\]"):
        write_card(tmp_path / "card", {}, {})
    assert not (tmp_path / "card").exists()


def test_damage_ends_with_status_1(tmp_path: Path) -> None:
    pack, report = damage.copy_of(NAME, tmp_path), tmp_path / "report.json"
    where = damage.randomize(pack)
    code, output = _verify(pack, "--no-backends", "--json", report)
    assert code == 1 and where in output
    assert [finding["where"] for finding in json.loads(report.read_text())["findings"]] == [where]


def test_interruption_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report.json"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run, "scan_tensors", interrupted)
        code, output = _verify(damage.DATA / "packs" / NAME, "--json", report)
    assert code == 130 and "no file was written" in output and not list(tmp_path.iterdir())
    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.write_text(report, "half")
    assert not list(tmp_path.iterdir())


def test_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    folder = damage.copy_of(NAME, tmp_path)
    pack = tensors.Pack.open(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(700_000)
    with pytest.raises(OSError, match="ended while it was read"):
        tensors.scan_tensors(pack)


def test_awq_without_its_package_is_refused(tmp_path: Path) -> None:
    from vllm_exl3.verify.loaded import LoadedWeights

    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4}})
    )
    with pytest.raises(Exl3PackError, match="quant_method awq"):
        LoadedWeights(tmp_path, "awq")
