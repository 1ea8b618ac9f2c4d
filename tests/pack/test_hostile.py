"""Folders made to hurt: whatever stands in a file, opening ends with a pack or with `Exl3PackError`, and soon."""

import io
import json
import os
import random
import shutil
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.tiny_pack import Draft, ledger, llama
from vllm_exl3.cli.tables import print_survey
from vllm_exl3.pack import Exl3PackError, Pack
from vllm_exl3.pack.check import check
from vllm_exl3.pack.headers import MAX_HEADER, FileHeader, read_header
from vllm_exl3.pack.json_text import parse_json
from vllm_exl3.plan.survey import survey

_HUGE = 10**12
_JUNK = (
    *(None, True, False, 0, 1, -1, 0.5, 1.0, _HUGE, 10**400, float("nan"), float("inf")),
    *(
        "",
        "exl3",
        "[/x]",
        "\ud800",
        "9" * 5000,
        [],
        [1],
        ["a"],
        [[1]],
        {},
        {"a": 1},
        {"bits": {}},
        {"hidden_size": [1]},
    ),
)
_NAMES = ("[/x]", "a[/b].weight", "\udfff.trellis", "", ".", f"model.layers.{_HUGE}.mlp.down_proj.trellis")


def _look_at(folder: Path) -> None:
    """Everything that reads a pack without its weights."""
    check(Pack.open(folder))
    found = survey(Pack.open(folder))
    json.dumps(found)
    print_survey(found, Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), markup=False, emoji=False))


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*place, key))


def _spoil(value: Any, chance: random.Random) -> Any:
    """A copy with one value replaced by another kind of value, or one key renamed."""
    value = json.loads(json.dumps(value))
    place = chance.choice(list(_places(value)))
    if not place:
        return chance.choice(_JUNK)
    holder = value
    for key in place[:-1]:
        holder = holder[key]
    if isinstance(holder, dict) and chance.random() < 0.25:
        holder[chance.choice(_NAMES)] = holder.pop(place[-1])
    else:
        holder[place[-1]] = chance.choice(_JUNK)
    return value


def _rich_draft() -> Draft:
    """A pack with every piece of metadata that is looked at."""
    draft = llama(layers=1)
    assert draft.config is not None
    for expert in range(2):
        for name, inputs, outputs in (("gate_proj", 128, 256), ("up_proj", 128, 256), ("down_proj", 256, 128)):
            draft.add_linear(f"model.layers.0.mlp.experts.{expert}.{name}", inputs, outputs)
    draft.config |= {"num_experts": 2, "num_nextn_predict_layers": 1, "text_config": {"hidden_size": 128}}
    draft.config["quantization_config"] |= {
        "layer_bits": {"0": 3},
        "non_routed_exl3": {"codebook": "mul1", "layers": {"model.layers.0.self_attn.q_proj": {"bits": 3}}},
        "ngram_embedding": {"bits": 4},
    }
    draft.sidecar = {**draft.config["quantization_config"], "tensor_storage": ledger(draft)}
    return draft.shard(2)


@pytest.mark.parametrize("which", ["config.json", "quantization_config.json", "model.safetensors.index.json", "header"])
@given(chance=st.randoms(use_true_random=False))
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_spoilt_value_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, which: str, chance: random.Random
) -> None:
    folder = tmp_path_factory.mktemp("pack")
    draft = _rich_draft()
    if which == "header":

        def edit(header: dict[str, Any]) -> None:
            spoilt = _spoil(header, chance)
            if isinstance(spoilt, dict):
                header.clear()
                header.update(spoilt)

        draft.edit_header = edit
    draft.write(folder)
    if which != "header":
        file = folder / which
        file.write_text(json.dumps(_spoil(json.loads(file.read_text()), chance)))
    before = time.thread_time()
    try:
        _look_at(folder)
    except Exl3PackError as error:
        assert all(error.parts().values())
        error.report().encode()
    finally:
        shutil.rmtree(folder)
    # Of this thread, since a clock would measure the machine's other work; long words in narrow columns take one.
    assert time.thread_time() - before < 10, "seconds"


@pytest.mark.parametrize(("digits", "taken"), [(31, True), (38, True), (40, False), (400, False), (5000, False)])
def test_integers_are_numbers_of_something(digits: int, taken: bool) -> None:
    """Tokenizers' files hold 10^30 for "no limit"; of longer ones no plan could compute a float."""
    text = b'{"layers": 2, "most": -1' + b"0" * (digits - 1) + b"}"
    if taken:
        assert parse_json(text) == {"layers": 2, "most": -(10 ** (digits - 1))}
    else:
        with pytest.raises(ValueError, match="digits"):
            parse_json(text)


def _file(header: dict[str, Any] | bytes, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _entry(dtype: str, shape: list[Any], offsets: list[Any]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _read(data: bytes) -> FileHeader:
    return read_header("x.safetensors", len(data), lambda start, length: data[start : start + length])


_BYTE = _entry("U8", [1], [0, 1])
_UNLOADABLE = {
    "nested too deeply": _file(b"[" * 100_000 + b"]" * 100_000),
    "offset beyond 64 bits": _file({"a": _entry("U8", [0], [10**30, 10**30])}),
    "size beyond 64 bits": _file({"a": _entry("U8", [10**20], [0, 10**20])}),
    "sum beyond 63 bits": _file({"a": _entry("U8", [2**62], [0, 2**62]), "b": _entry("U8", [2**62], [2**62, 2**63])}),
    "true after 1": _file({"a": _BYTE, "b": _entry("U8", [True], [1, 2])}, b"ab"),
    "1.0 after 1": _file({"a": _BYTE, "b": _entry("U8", [1.0], [1, 2])}, b"ab"),
    "offset that is no integer": _file({"a": _entry("U8", [1], [0, 1.0])}, b"a"),
    "UTF-16": _file(json.dumps({"a": _BYTE}).encode("utf-16"), b"a"),
    "byte order mark": _file(b"\xef\xbb\xbf" + json.dumps({"a": _BYTE}).encode(), b"a"),
    "Latin-1": _file(b'{"\xff":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"a"),
    "NaN": _file({"a": _BYTE | {"x": float("nan")}}, b"a"),
    "half a surrogate pair": _file({"\ud800": _BYTE}, b"a"),
    "metadata that are no strings": _file({"__metadata__": {"a": 1}, "a": _BYTE}, b"a"),
    "an end inside a byte": _file({"a": _entry("F4", [1], [0, 1])}, b"a"),
    "a name of thousands of digits": _file({f"layers.{'9' * 5000}.x": _BYTE}, b"a"),
    "longer than the library reads": struct.pack("<Q", MAX_HEADER + 1) + b"{}",
}


@pytest.mark.parametrize("kind", _UNLOADABLE)
def test_headers_that_loaders_refuse_are_refused_with_the_file(kind: str) -> None:
    with pytest.raises(Exl3PackError, match=r"x\.safetensors"):
        _read(_UNLOADABLE[kind])


def test_surrogate_pairs_and_escaped_backslashes_are_text() -> None:
    names = ["\N{GRINNING FACE}", r"\ud800", "\N{LATIN SMALL LETTER E WITH ACUTE}"]
    file = _file({name: _entry("U8", [1], [i, i + 1]) for i, name in enumerate(names)}, b"abc")
    assert list(_read(file).tensors) == names


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("target", ["/nowhere/at/all", "itself"])
def test_links_that_lead_nowhere_are_named(tmp_path: Path, name: str, target: str) -> None:
    folder = llama(layers=1).write(tmp_path / "pack")
    (folder / name).unlink()
    (folder / name).symlink_to(name if target == "itself" else target)
    with pytest.raises(Exl3PackError, match=name) as error:
        Pack.open(folder)
    assert "cannot be read" in error.value.found


def test_links_folders_and_pipes_that_are_no_part_of_the_pack_do_no_harm(tmp_path: Path) -> None:
    folder = llama(layers=1).write(tmp_path / "pack")
    (folder / "README.md").symlink_to("/nowhere/at/all")
    (folder / "x.safetensors").mkdir()
    os.mkfifo(folder / "y.safetensors")
    assert check(Pack.open(folder)) == []


@pytest.mark.parametrize("change", ["cut", "removed"])
def test_a_file_that_changes_after_opening_is_named(tmp_path: Path, change: str) -> None:
    folder = llama(layers=1).write(tmp_path / "pack")
    pack = Pack.open(folder)
    file = folder / "model.safetensors"
    os.truncate(file, 5000) if change == "cut" else file.unlink()
    with pytest.raises(Exl3PackError, match=r"model\.safetensors"):
        check(pack)


def test_a_replaced_file_is_read_again_though_size_and_time_are_kept(tmp_path: Path) -> None:
    folder = llama(layers=1).write(tmp_path / "pack")
    file = folder / "model.safetensors"
    before = file.stat()
    assert "model.norm.weight" in Pack.open(folder).tensors
    file.write_bytes(file.read_bytes().replace(b"model.norm.weight", b"model.morn.weight"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "model.morn.weight" in Pack.open(folder).tensors


def test_many_threads_may_open_more_packs_than_are_kept(tmp_path: Path) -> None:
    folders = [llama(layers=1).write(tmp_path / str(number)) for number in range(6)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda number: Pack.open(folders[number % 6]).linears, range(200)))


@pytest.mark.parametrize("source", ["y" * 5000, "~nobody-of-this-name/pack", "a\0b", Path("a\0b")])
def test_impossible_paths_are_refused(source: str | Path) -> None:
    with pytest.raises(Exl3PackError):
        Pack.open(source)
