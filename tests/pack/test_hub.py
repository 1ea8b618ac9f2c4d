"""Packs in Hub repositories, read from a local server that stands in for the Hub."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download

from tests.pack.hub_server import REPOSITORY, Hub, serve
from tests.tiny_pack import llama
from vllm_exl3.pack import Exl3PackError, Pack
from vllm_exl3.pack.check import check
from vllm_exl3.pack.headers import FIRST_READ

CACHE = "cache"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A repository whose main branch is empty and that has two bit rates."""
    branches = {}
    for name, bits in (("3.0bpw", 3), ("4.0bpw", 4)):
        branches[name] = llama(bits=bits).shard(2).write(tmp_path / name)
    branches["main"] = tmp_path / "main"
    branches["main"].mkdir()
    (branches["main"] / "README.md").write_text("Choose a branch")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / CACHE))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serve(Hub(branches)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)


def test_branch_is_read_by_ranges_and_equals_the_folder(hub: Hub) -> None:
    pack = Pack.open(REPOSITORY, "4.0bpw", token=False)
    local = Pack.open(hub.branches["4.0bpw"])
    assert pack.linears == local.linears and pack.tensors == local.tensors and pack.dense == local.dense
    assert pack.config == local.config and pack.quantization == local.quantization and pack.index == local.index
    assert pack.commit == hub.commit("4.0bpw") and pack.folder is None
    assert check(pack) == []
    weights = [ranges for path, ranges in hub.file_requests() if path.endswith(".safetensors")]
    assert all(ranges is not None for ranges in weights)


def test_only_headers_travel(hub: Hub, tmp_path: Path) -> None:
    draft = llama()
    draft.add_linear("model.layers.0.mlp.wide", 1024, 2048, bits=8)
    hub.branches["big"] = draft.write(tmp_path / "big")
    Pack.open(REPOSITORY, "big", token=False)
    size = (tmp_path / "big/model.safetensors").stat().st_size
    assert hub.sent < FIRST_READ + 64 * 1024 < size / 10


def test_long_header_takes_exactly_two_reads(hub: Hub, tmp_path: Path) -> None:
    draft = llama()
    for index in range(300):
        draft.add_linear(f"model.layers.0.extra.with_a_rather_long_name_to_fill_the_header.{index}", 128, 128, bits=1)
    hub.branches["long"] = draft.write(tmp_path / "long")
    pack = Pack.open(REPOSITORY, "long", token=False)
    assert len(pack.linears) == 315
    ranges = [ranges for path, ranges in hub.file_requests() if path.endswith(".safetensors")]
    assert len(ranges) == 2 and ranges[0] == f"bytes=0-{FIRST_READ - 1}"
    assert ranges[1] is not None and ranges[1].startswith(f"bytes={FIRST_READ}-")


def test_every_request_names_the_resolved_commit(hub: Hub) -> None:
    Pack.open(REPOSITORY, "3.0bpw", token=False)
    files = [path for path, _ in hub.file_requests()]
    assert files and all(hub.commit("3.0bpw") in path for path in files)
    listings = [path for path, _ in hub.requests if path.startswith("/api/")]
    assert listings == [f"/api/models/{REPOSITORY}/revision/3.0bpw"], "the branch is resolved once"


def test_opening_again_costs_one_listing(hub: Hub) -> None:
    first = Pack.open(REPOSITORY, "3.0bpw", token=False)
    hub.requests.clear()
    assert Pack.open(REPOSITORY, hub.commit("3.0bpw"), token=False) is first
    assert hub.file_requests() == []


def test_pickled_pack_reopens_at_the_same_commit(hub: Hub) -> None:
    pack = Pack.open(REPOSITORY, "3.0bpw", token="hf_secret")
    data = pickle.dumps(pack)
    assert b"hf_secret" not in data and len(data) < 1000
    hub.requests.clear()
    assert pickle.loads(data).commit == pack.commit
    assert hub.requests == [(f"/api/models/{REPOSITORY}/revision/{pack.commit}", None)]


def test_redirects_to_storage_are_followed(hub: Hub) -> None:
    hub.redirect = True
    assert check(Pack.open(REPOSITORY, "4.0bpw", token=False)) == []
    assert any(path.startswith("/storage/") for path, _ in hub.requests)


def test_files_in_folders_are_left_alone(hub: Hub) -> None:
    nested = hub.branches["3.0bpw"] / "original"
    nested.mkdir()
    (nested / "consolidated.safetensors").write_bytes(b"not one")
    Pack.open(REPOSITORY, "3.0bpw", token=False)
    assert not any("original" in path for path, _ in hub.file_requests())


@pytest.mark.parametrize("kind", ["whole", "short", "shifted", "no range"])
def test_server_that_does_not_honour_ranges_is_refused(hub: Hub, kind: str) -> None:
    hub.misbehave = kind
    with pytest.raises(Exl3PackError) as caught:
        Pack.open(REPOSITORY, "4.0bpw", token=False)
    error = caught.value
    assert "safetensors" in error.where and hub.endpoint in error.where
    assert "206" in error.remedy
    if kind == "whole":
        assert "200" in error.found


def test_passing_failures_are_tried_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    _quick_retries(monkeypatch)
    hub.failures = 3
    assert len(Pack.open(REPOSITORY, "4.0bpw", token=False).linears) == 15


def test_lasting_failure_names_the_file(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    _quick_retries(monkeypatch)
    hub.failures = 10**6
    with pytest.raises(Exl3PackError, match=r"config\.json|safetensors") as caught:
        Pack.open(REPOSITORY, "4.0bpw", token=False)
    assert "503" in caught.value.found


def test_main_without_a_pack_lists_the_branches(hub: Hub) -> None:
    with pytest.raises(Exl3PackError) as caught:
        Pack.open(REPOSITORY, token=False)
    assert "--revision" in caught.value.remedy
    assert "3.0bpw" in caught.value.remedy and "4.0bpw" in caught.value.remedy


def test_unknown_revision_lists_the_branches(hub: Hub) -> None:
    with pytest.raises(Exl3PackError) as caught:
        Pack.open(REPOSITORY, "5.0bpw", token=False)
    assert "5.0bpw" in caught.value.found
    assert "3.0bpw, 4.0bpw, main" in caught.value.expected


def test_unknown_repository_says_that_there_is_no_folder_either(hub: Hub) -> None:
    with pytest.raises(Exl3PackError, match="no local folder") as caught:
        Pack.open("nobody/nothing", token=False)
    assert "no such repository" in caught.value.found


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/folder", "~/nowhere", "a/b/c", "sp ace/x"])
def test_what_can_be_no_repository_is_a_missing_folder(path: str) -> None:
    with pytest.raises(Exl3PackError, match="no readable folder"):
        Pack.open(path)


def _download(hub: Hub, branch: str, files: list[str] | None = None) -> Path:
    """Put a snapshot into the cache as a download leaves it."""
    folder = Path(constants.HF_HUB_CACHE) / f"models--{REPOSITORY.replace('/', '--')}"
    snapshot = folder / "snapshots" / hub.commit(branch)
    snapshot.mkdir(parents=True, exist_ok=True)
    for file in hub.branches[branch].iterdir():
        if files is None or file.name in files:
            (snapshot / file.name).write_bytes(file.read_bytes())
    refs = folder / "refs"
    refs.mkdir(exist_ok=True)
    (refs / branch).write_text(hub.commit(branch))
    return snapshot


def test_whole_snapshot_in_the_cache_is_a_local_pack(hub: Hub) -> None:
    snapshot = _download(hub, "4.0bpw")
    pack = Pack.open(REPOSITORY, "4.0bpw", token=False)
    assert pack.folder == snapshot and pack.commit == hub.commit("4.0bpw")
    assert hub.file_requests() == []


def test_cached_files_are_not_fetched_again(hub: Hub) -> None:
    _download(hub, "4.0bpw", ["model-00001-of-00002.safetensors", "config.json"])
    pack = Pack.open(REPOSITORY, "4.0bpw", token=False)
    assert len(pack.linears) == 15 and pack.folder is None
    fetched = {path.rpartition("/")[2] for path, _ in hub.file_requests()}
    assert fetched == {"model-00002-of-00002.safetensors"}


def test_offline_uses_the_snapshot_without_a_request(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = _download(hub, "4.0bpw")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    pack = Pack.open(REPOSITORY, "4.0bpw")
    assert pack.folder == snapshot and check(pack) == []
    assert hub.requests == []
    with pytest.raises(Exl3PackError, match="HF_HUB_OFFLINE") as caught:
        Pack.open(REPOSITORY, "3.0bpw")
    assert "3.0bpw" in caught.value.found


def test_other_cache_folder(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _download(hub, "4.0bpw")
    moved = tmp_path / "elsewhere"
    (tmp_path / CACHE).rename(moved)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert Pack.open(REPOSITORY, "4.0bpw", cache_dir=moved).commit == hub.commit("4.0bpw")


def test_unreachable_hub_falls_back_to_the_snapshot_and_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    _quick_retries(monkeypatch)
    _download(hub, "4.0bpw")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    pack = Pack.open(REPOSITORY, "4.0bpw")
    (warning,) = check(pack)
    assert "cached snapshot" in str(warning)
    with pytest.raises(Exl3PackError, match="did not answer"):
        Pack.open(REPOSITORY, "3.0bpw")


def test_endpoint_and_offline_mode_come_from_the_environment(hub: Hub, tmp_path: Path) -> None:
    script = f"from vllm_exl3.pack import Pack; print(len(Pack.open({REPOSITORY!r}, '3.0bpw').linears))"
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "15"
    environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "HF_HUB_OFFLINE is set" in done.stderr


def test_snapshot_layout_is_the_library_s_own(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = _download(hub, "4.0bpw")
    assert Path(snapshot_download(REPOSITORY, revision="4.0bpw", cache_dir=constants.HF_HUB_CACHE)) == snapshot
