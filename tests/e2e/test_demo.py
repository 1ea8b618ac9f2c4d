"""The demo as a whole: its cache, its verdict, its error messages, and (slow) the real run."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console

from vllm_exl3 import env
from vllm_exl3.demo import baseline, prepare, run
from vllm_exl3.demo.chat import Answer
from vllm_exl3.demo.display import Display
from vllm_exl3.demo.kept import KeptLinears
from vllm_exl3.demo.prepare import Workshop
from vllm_exl3.demo.quantize import Recipe
from vllm_exl3.demo.server import ServerError, vllm_command
from vllm_exl3.demo.smollm2 import DenseModel, hugging_face_config, hugging_face_tensors
from vllm_exl3.pack.stored import Codebook

IDENTITY = {"encoder": "e1", "bits": 4, "head_bits": 6, "codebook": "mul1"}
ANSWER = Answer("Paris.", 2, 0.1, 20.0)


def quiet() -> Display:
    return Display(Console(file=io.StringIO(), width=200))


def shown(display: Display) -> str:
    assert isinstance(display.console.file, io.StringIO)
    return display.console.file.getvalue()


@pytest.fixture
def workshop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: dict[str, Any], stored: dict[str, np.ndarray]
) -> Workshop:
    """A workshop around the tiny model, whose encoder counts its calls in ``encoded``."""

    def encode(weight: np.ndarray, half_bits: int, codebook: Codebook, progress: Any) -> SimpleNamespace:
        encoded.append(half_bits)
        rows, columns = weight.shape
        trellis = np.zeros((rows // 16, columns // 16, half_bits * 8), np.int16)
        return SimpleNamespace(trellis=trellis, suh=np.ones(rows, np.float16), svh=np.ones(columns, np.float16))

    encoded: list[int] = []
    monkeypatch.setattr(prepare, "quantize_linear", encode)
    made = Workshop(tmp_path, quiet())
    made.model = DenseModel(metadata, hugging_face_config(metadata), hugging_face_tensors(metadata, stored))
    made.encoded = encoded  # type: ignore[attr-defined]
    return made


def test_a_pack_is_made_once_for_an_encoder_and_a_recipe(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = workshop.encoded  # type: ignore[attr-defined]
    first = workshop.pack()
    assert sorted(encoded) == [8] * 14 + [12]
    assert workshop.pack() == first
    assert len(encoded) == 15
    workshop.recipe = Recipe(bits=3)
    assert workshop.pack() != first
    monkeypatch.setattr(prepare, "ENCODER_VERSION", "another")
    assert len({workshop.pack(), first}) == 2
    assert len(encoded) == 45


def test_an_interrupted_quantization_goes_on_where_it_stopped(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = workshop.encoded  # type: ignore[attr-defined]
    encode = prepare.quantize_linear

    def interrupt_sixth(*arguments: Any, progress: Any) -> Any:
        if len(encoded) == 5:
            raise KeyboardInterrupt
        return encode(*arguments, progress=progress)

    monkeypatch.setattr(prepare, "quantize_linear", interrupt_sixth)
    with pytest.raises(KeyboardInterrupt):
        workshop.pack()
    kept = [path for path in workshop.cache.iterdir() if not path.name.startswith(".unfinished-")]
    assert not kept, "an unfinished pack lies where a finished one would"
    (unfinished,) = workshop.cache.iterdir()
    files = sorted(unfinished.iterdir())
    assert len(files) == 5
    # What is not as it was written is made again: one is cut short, one has a changed byte.
    files[0].write_bytes(files[0].read_bytes()[:-1])
    data = bytearray(files[1].read_bytes())
    data[-7] ^= 1
    files[1].write_bytes(data)
    monkeypatch.setattr(prepare, "quantize_linear", encode)
    resumed = workshop.pack()
    assert len(encoded) == 5 + 12
    assert "was done before an interruption" in shown(workshop.display)
    assert not unfinished.exists()
    again = Workshop(workshop.cache / "elsewhere", quiet())
    again.model = workshop.model
    for file in again.pack().iterdir():
        assert file.read_bytes() == (resumed / file.name).read_bytes()


def test_kept_linears_are_of_this_weight_and_rate(tmp_path: Path) -> None:
    kept = KeptLinears(tmp_path / "kept")
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays = {"trellis": np.arange(48, dtype=np.int16).reshape(1, 1, 48)}
    arrays |= {"suh": np.ones(3, np.float16), "svh": np.full(2, 2, np.float16)}
    assert kept.find("a", weight, 6, Codebook.MUL1) is None
    kept.keep("a", weight, 6, Codebook.MUL1, arrays)
    found = kept.find("a", weight, 6, Codebook.MUL1)
    assert found is not None
    for leaf, values in arrays.items():
        np.testing.assert_array_equal(getattr(found, leaf), values)
        assert getattr(found, leaf).dtype == values.dtype
    for other in ((weight + 1, 6, Codebook.MUL1), (weight, 8, Codebook.MUL1), (weight, 6, Codebook.MCG)):
        assert kept.find("a", *other) is None
    assert kept.find("b", weight, 6, Codebook.MUL1) is None


def test_the_reference_is_computed_once(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(prepare, "dense_log_probabilities", lambda model, ids: calls.append(ids) or np.zeros((2, 3)))
    assert workshop.reference("text", [1, 2]).shape == (2, 3)
    assert workshop.reference("text", [1, 2]).dtype == np.float32
    assert calls == [[1, 2]]


@pytest.mark.parametrize(
    ("recorded", "found", "failures"),
    [(0.03, 0.030, 0), (0.03, 0.0359, 0), (0.03, 0.0361, 1), (0.03, float("nan"), 1), (None, 9.0, 0)],
)
def test_the_verdict(tmp_path: Path, recorded: float | None, found: float, failures: int) -> None:
    file = tmp_path / "demo.json"
    if recorded is not None:
        baseline.record(file, {**IDENTITY, "kl": recorded}, "test")
    settings = run.Settings(tmp_path, None, None, file, record=False)
    display = quiet()
    assert len(run.judge(found, [ANSWER], IDENTITY, settings, display)) == failures
    assert ("records no value for this encoder" in shown(display)) == (recorded is None)


def test_recording_then_comparing_passes(tmp_path: Path) -> None:
    file = tmp_path / "results" / "demo.json"
    record = run.Settings(tmp_path, None, None, file, record=True)
    assert run.judge(0.031, [Answer("A short one.", 1, 0.1, None), ANSWER], IDENTITY, record, quiet()) == []
    written = json.loads(file.read_text())
    isa = written["rows"][0].pop("isa")
    assert isa in env.CPU_ISA.help
    assert written["rows"] == [{"kernel": "native", **IDENTITY, "kl": 0.031, "tokens_per_second": 20.0}]
    assert {"machine", "gpu", "driver", "versions", "commit", "date", "command"} <= written["meta"].keys()
    assert baseline.expected_divergence(file, IDENTITY) == 0.031
    assert baseline.expected_divergence(file, {**IDENTITY, "encoder": "e2"}) is None


def test_without_vllm_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vllm_exl3.demo.server.sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match="pip install vllm"):
        vllm_command()


@pytest.mark.slow
def test_the_demo_passes_and_leaves_nothing_running() -> None:
    """The real thing; the cache of earlier runs is used."""
    before = {process.pid for process in psutil.process_iter()}
    command = [sys.executable, "-m", "vllm_exl3.cli", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("The capital of France is Paris", "vllm-exl3", "tokens/s", "nats per token", "passed"):
        assert line in done.stdout
    left = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.pid not in before and any("vllm" in word for word in process.info["cmdline"] or ())
    ]
    assert not left
