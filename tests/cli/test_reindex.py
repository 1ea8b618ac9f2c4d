"""`vllm-exl3 reindex`: what the new index says, and what it does not touch."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tiny_pack import llama
from vllm_exl3.cli import app
from vllm_exl3.pack import Pack
from vllm_exl3.pack.check import find_faults
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.files import INDEX
from vllm_exl3.tools.index_writer import REPAIRED, write_index

Q = "model.layers.0.self_attn.q_proj.suh"
Change = Callable[[dict[str, str]], object]


def write(folder: Path, change: Change | None) -> Path:
    """A pack of two files; None leaves the index out."""
    draft = llama()
    draft.shard(2)
    draft.index = True
    draft.write(folder)
    content = json.loads((folder / INDEX).read_text())
    if change is None:
        (folder / INDEX).unlink()
    else:
        change(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("change", "added", "removed", "moved"),
    [
        (lambda entries: entries.pop(Q), (Q,), (), ()),
        (lambda entries: entries.update(gone="model-00001-of-00002.safetensors"), (), ("gone",), ()),
        (lambda entries: entries.update({Q: "model-00002-of-00002.safetensors"}), (), (), (Q,)),
        (None, (), (), ()),
    ],
    ids=["a tensor it lacks", "a tensor that is nowhere", "another file", "no index"],
)
def test_the_new_index_is_that_of_the_files(
    change: Change | None, added: tuple[str, ...], removed: tuple[str, ...], moved: tuple[str, ...], tmp_path: Path
) -> None:
    folder = write(tmp_path / "pack", change)
    before = (folder / INDEX).read_bytes() if change else None
    written = write_index(folder)
    assert (written.added, written.removed, written.moved) == (added, removed, moved)
    assert written.path.name == (REPAIRED if change else INDEX)
    assert change is None or (folder / INDEX).read_bytes() == before
    written.path.replace(folder / INDEX)
    pack = Pack.open(folder)
    assert pack.index == {name: tensor.file for name, tensor in pack.tensors.items()}
    assert not list(find_faults(pack))
    assert not [path for path in folder.iterdir() if path.suffix == ".part"]


@pytest.mark.parametrize("index", ["", "{", "[]", '{"weight_map": 3}', "[" * 100000])
def test_an_index_that_cannot_be_read_is_replaced_as_well(index: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "pack", lambda entries: None)
    (folder / INDEX).write_text(index)
    assert write_index(folder).tensors == len(Pack.open(folder).tensors)


def test_a_missing_file_is_no_matter_of_the_index(tmp_path: Path) -> None:
    folder = write(tmp_path / "pack", lambda entries: None)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(Exl3PackError, match="model-00002-of-00002"):
        write_index(folder)
    assert not (folder / REPAIRED).exists()


def test_an_earlier_repair_is_not_overwritten(tmp_path: Path) -> None:
    folder = write(tmp_path / "pack", lambda entries: None)
    (folder / REPAIRED).write_text("mine")
    with pytest.raises(Exl3PackError, match="earlier repair"):
        write_index(folder)
    assert (folder / REPAIRED).read_text() == "mine"
    assert not [path for path in folder.iterdir() if path.suffix == ".part"]


def test_the_command_says_what_changed_and_how_to_use_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "pack", lambda entries: entries.update(gone="model-00001-of-00002.safetensors"))
    result = CliRunner().invoke(app, ["reindex", str(folder)])
    assert result.exit_code == 1, result.output
    assert "1 tensor that the old index lists and no file holds" in result.output and "gone" in result.output
    assert f"mv '{folder / REPAIRED}' '{folder / INDEX}'" in result.output
