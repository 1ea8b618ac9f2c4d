"""`bench serve` and `bench load`: against a server that only speaks the API, and (slow) against vLLM."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

psutil = pytest.importorskip("psutil")
pytest.importorskip("aiohttp")

from tests.conftest import DATA  # noqa: E402
from vllm_exl3.bench.memory import gpu_bytes  # noqa: E402
from vllm_exl3.cli import app  # noqa: E402
from vllm_exl3.pack.errors import Exl3PackError  # noqa: E402

PACK = DATA / "packs" / "llama_odd-4.0-mul1"
OTHER = DATA / "packs" / "llama_tied-3.0-mul1"

FAKE = """
import http.server, json, os, sys, time
mode = os.environ.get("FAKE_SERVER", "")
port = int(sys.argv[sys.argv.index("--port") + 1])
print("Loading weights took 0.25 seconds\\nModel loading took 1.5 GiB memory and 2.5 seconds", flush=True)
print("GPU KV cache size: 1,234 tokens", flush=True)
if mode == "dies":
    sys.exit("ValueError: this model is not for me")

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if mode == "refuses":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error": "too long for this server"}')
            return
        if mode == "hangs":
            time.sleep(600)
        assert body["ignore_eos"] and body["stream"] and max(body["prompt"]) < 640
        self.send_response(200)
        self.end_headers()
        count = body["max_tokens"] - (mode == "short")
        # As vLLM does: the first chunk repeats the prompt.
        self._send({"choices": [{"text": "", "token_ids": [], "prompt_token_ids": body["prompt"]}]})
        if mode == "babbles":
            self.wfile.write(b"data: {\\n\\n")
        for number in range(0, count, 2):  # two tokens a chunk, as with speculative decoding
            time.sleep(0.01)
            ids = [1] * min(2, count - number)
            self._send({"choices": [{"text": "", "token_ids": ids}]})
        self._send({"choices": [], "usage": {"completion_tokens": count}})
        self.wfile.write(b"data: [DONE]\\n\\n")

    def _send(self, chunk):
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\\n\\n")
        self.wfile.flush()

    def log_message(self, *arguments):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A `vllm` that is a server of fixed speed; its source."""
    file = tmp_path / "fake.py"
    file.write_text(FAKE)
    monkeypatch.setattr("vllm_exl3.bench.served.vllm_command", lambda: [sys.executable, str(file)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return file


def _bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "200"})


def test_two_models_side_by_side(fake: Path, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    options = ["--concurrency", "1,4", "--prompt", 8, "--output", 5, "--rounds", 2, "--json", file]
    result = _bench("serve", PACK, "--against", OTHER, *options)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    starts, loads = ([row for row in rows if row["subject"] == subject] for subject in ("start", "serve"))
    assert [row["model"] for row in starts] == [PACK.name, OTHER.name]
    assert all(row["weight_bytes"] == 1.5 * 2**30 and row["tokens_in_cache"] == 1234 for row in starts)
    assert all(row["host_peak_bytes"] > 2**20 for row in starts)
    assert [(row["model"], row["concurrency"]) for row in loads] == [(m.name, c) for m in (PACK, OTHER) for c in (1, 4)]
    for row in loads:  # 5 tokens in three chunks of at least 10 ms
        assert len(row["tokens_per_second_each"]) == 2
        assert 10 < row["tokens_per_second"] <= row["concurrency"] * 5 / 0.03
        assert 0.01 <= row["first_token_p50_s"] <= row["first_token_p99_s"]
        assert 0.004 <= row["between_tokens_p50_s"] <= row["between_tokens_p99_s"]
    assert str(tmp_path) not in file.read_text()
    assert "4 at a time, 8 tokens in, 5 out" in result.output and "1.00×" in result.output
    again = _bench("serve", PACK, *options[:-2], "--compare", file)
    assert again.exit_code == 0 and "measures moved beyond noise" in again.output, again.output


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("dies", "status 1"),
        ("refuses", 'the server answered 400: {"error": "too long for this server"}'),
        ("short", "an answer of 4 tokens, where 5 were asked for"),
        ("babbles", "something other than JSON objects: {"),
    ],
)
def test_a_server_that_fails_is_reported(fake: Path, monkeypatch: pytest.MonkeyPatch, mode: str, said: str) -> None:
    monkeypatch.setenv("FAKE_SERVER", mode)
    result = _bench("serve", PACK, "--concurrency", 1, "--prompt", 8, "--output", 5, "--rounds", 1)
    assert result.exit_code == 1 and said in result.output, result.output
    assert mode != "dies" or "this model is not for me" in result.output


def test_what_was_measured_before_a_failure_is_kept(
    fake: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"vocab_size": 640}')
    fake.write_text(FAKE.replace('mode == "dies"', '"broken" in sys.argv[2]'))
    file = tmp_path / "results.json"
    options = ["--concurrency", 1, "--prompt", 8, "--output", 3, "--rounds", 1, "--json", file]
    result = _bench("serve", PACK, "--against", broken, *options)
    assert result.exit_code == 1 and "not for me" in result.output
    assert {row["model"] for row in json.loads(file.read_text())["rows"]} == {PACK.name}


def test_long_prompts_and_more_clients_than_requests(fake: Path) -> None:
    """A prompt of 40,000 tokens comes back in one line of more than 128 KiB."""
    options = ["--concurrency", 3, "--requests", 1, "--prompt", 40_000, "--output", 3, "--rounds", 1]
    result = _bench("serve", PACK, *options)
    assert result.exit_code == 0 and "40000 tokens in" in result.output, result.output


def test_two_at_once_have_a_log_each(tmp_path: Path) -> None:
    from vllm_exl3.bench.served import _own_log

    label = "ä" * 120
    with _own_log(tmp_path, label) as one, _own_log(tmp_path, label) as other, _own_log(tmp_path, "o/n"):
        assert one != other
    with _own_log(tmp_path, label) as again:
        assert again == one
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SystemExit(143), ValueError("a fault")])
def test_whatever_ends_a_run_the_rows_until_then_are_written(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = {"subject": "start", "model": "x", "ready_s": 1.0, "host_peak_bytes": 1}

    def measure(model: str, *_: object, **__: object) -> list[dict[str, object]]:
        if model == str(OTHER):
            raise error
        return [row]

    monkeypatch.setattr("vllm_exl3.bench.serve.measure_model", measure)
    file = tmp_path / "results.json"
    result = _bench("serve", PACK, "--against", OTHER, "--json", file)
    assert result.exit_code == (143 if isinstance(error, SystemExit) else 1)
    assert json.loads(file.read_text())["rows"] == [row]


@pytest.mark.parametrize("config", ["[]", "{", "5", '{"vocab_size": null}', '{"text_config": 5}', '{"vocab_size": -1}'])
def test_a_configuration_that_says_nothing(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    result = _bench("serve", tmp_path)
    assert isinstance(result.exception, Exl3PackError) and str(tmp_path) in result.exception.where


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", PACK, "--prompt", "1e30"], "expected numbers with commas between"),
        (["serve", PACK, "--output", 10**30], "expected numbers below"),
        (["serve", PACK, "--concurrency", 10**9], "tokens in all prompts"),
        (["serve", PACK, "--requests", 10**30], "tokens in all prompts"),
        (["serve", PACK, "--concurrency", "1,x"], "expected numbers with commas between"),
        (["serve", PACK, "--output", "0"], "expected at least 1"),
        (["serve", PACK, "--vllm", "'"], "No closing quotation"),
        (["serve"], "Missing argument"),
        (["load", PACK, "--port", 99999], "65535"),
    ],
)
def test_wrong_arguments(arguments: list[object], said: str) -> None:
    result = _bench(*arguments)
    assert result.exit_code == 2 and said in result.output, result.output


@pytest.mark.parametrize("command", ["serve", "load"])
def test_a_missing_model_and_a_taken_port(fake: Path, command: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = _bench(command, tmp_path / "empty")
    assert isinstance(result.exception, Exl3PackError) and "no config.json" in result.exception.report()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = _bench(command, PACK, "--port", taken.getsockname()[1])
    assert result.exit_code == 1 and "is in use" in result.output


def test_memory_of_gpus_from_nvml_or_its_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Nvml:
        nvmlInit = nvmlShutdown = staticmethod(lambda: None)
        nvmlDeviceGetCount = staticmethod(lambda: 2)
        nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)
        nvmlDeviceGetMemoryInfo = staticmethod(lambda handle: SimpleNamespace(used=1000 + handle))

    monkeypatch.setitem(sys.modules, "pynvml", Nvml)
    assert gpu_bytes() == 2001
    monkeypatch.setitem(sys.modules, "pynvml", None)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 5\necho 7\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_bytes() == 12 << 20


def test_loading_in_both_states(fake: Path, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    result = _bench("load", PACK, "--rounds", 2, "--json", file)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    size = sum(path.stat().st_size for path in PACK.glob("*.safetensors"))
    assert [row["state"] for row in rows] == ["cached", "dropped"]
    for row in rows:
        assert row["file_bytes"] == size and row["weights_s_each"] == [0.25, 0.25]
        assert row["gbps"] == pytest.approx(size / 0.25 / 1e9, abs=1e-6) and row["ready_s"] > 0
    assert "page cache" in result.output and "read from disk" in result.output


def test_ctrl_c_leaves_no_server_behind(fake: Path, tmp_path: Path) -> None:
    program = (
        "import sys, vllm_exl3.bench.served as s; from vllm_exl3.cli import main; "
        f"s.vllm_command = lambda: [sys.executable, {str(fake)!r}]; main()"
    )
    words = ["bench", "serve", str(PACK), "--concurrency", "1"]
    environment = {**os.environ, "FAKE_SERVER": "hangs"}
    parent = subprocess.Popen(
        [sys.executable, "-c", program, *words], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline, server = time.monotonic() + 60, None
        while server is None and time.monotonic() < deadline:
            time.sleep(0.5)
            children = psutil.Process(parent.pid).children(recursive=True)
            server = next((child for child in children if child.net_connections()), None)
        assert server is not None
        time.sleep(1)  # it is sent its first request
        parent.send_signal(signal.SIGINT)
        said = parent.communicate(timeout=30)[1]
        assert parent.returncode == 130 and "no server keeps running" in said
        assert not psutil.pid_exists(server.pid) or psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.slow
def test_vllm_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "results.json"
    load = ["--concurrency", "1,3", "--prompt", 16, "--output", 8, "--rounds", 2]
    options = [*load, "--vllm", "--enforce-eager --dtype float32", "--json", file]
    result = _bench("serve", PACK, "--against", OTHER, *options)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 6 and all(row["tokens_per_second"] > 0 for row in rows if row["subject"] == "serve")
    result = _bench("load", PACK, "--rounds", 1, "--vllm", "--enforce-eager", "--json", file)
    assert result.exit_code == 0, result.output
    assert all(row["gbps"] > 0 for row in json.loads(file.read_text())["rows"])
