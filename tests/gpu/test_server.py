"""``vllm serve`` on a GPU as it starts by default: compiled, with full CUDA graphs, its model in another process."""

import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from vllm_exl3.demo.server import Server, choose_port, vllm_command

PACK = Path(__file__).parents[1] / "data" / "packs" / "llama_odd-4.0-mul1"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def ask(server: Server, path: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps({"model": "tiny", "temperature": 0, **body}).encode()
    request = urllib.request.Request(f"{server.url}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def test_chat_and_counters(tmp_path: Path) -> None:
    (template := tmp_path / "chat.jinja").write_text(TEMPLATE)
    command = [*vllm_command(), "serve", str(PACK), "--served-model-name", "tiny", "--port", str(port := choose_port())]
    command += ["--host", "127.0.0.1", "--max-model-len", "256", "--max-num-seqs", "16", "--dtype", "float16"]
    command += ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(256 << 20)]
    command += ["--chat-template", str(template)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    message = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 12}
    with Server(command, port=port, log=tmp_path / "log", environment=environment) as server:
        server.wait_healthy(240)
        whole = json.loads(ask(server, "/v1/chat/completions", message))["choices"][0]["message"]["content"]
        streamed = ask(server, "/v1/chat/completions", {**message, "stream": True}).splitlines()
        events = [line.removeprefix("data: ") for line in streamed if line.startswith("data: {")]
        parts = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events]
        assert whole and "".join(parts) == whole
        deadline = time.monotonic() + 20
        while "vllm:exl3_kernel_calls_total{" not in (text := ask(server, "/metrics")) and time.monotonic() < deadline:
            time.sleep(0.5)
        log = server.log_text()
    calls = [line for line in text.splitlines() if line.startswith("vllm:exl3_kernel_calls_total{")]
    assert any('backend="native",layer_class="QKVParallelLinear",op="linear"' in line for line in calls), calls
    assert "Capturing CUDA graphs" in log and "FULL" in log
