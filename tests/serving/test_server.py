"""``vllm serve <pack>`` as clients see it: chat, tools, guided JSON, logprobs, metrics, rude clients, signals."""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import APIError, BadRequestError, OpenAI

from tests.serving.conftest import PACKS
from vllm_exl3.demo.server import Server, choose_port, vllm_command
from vllm_exl3.serving.diagnostics import WorkerExtension

pytestmark = pytest.mark.slow

MODEL = "tiny"
LENGTH = 256
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
HELLO: list[dict[str, str]] = [{"role": "user", "content": "hello there"}]


def start(folder: Path, *options: str) -> Server:
    """A server for a tiny pack that has a byte-level tokenizer."""
    pack = folder / "pack"
    if not pack.exists():
        shutil.copytree(PACKS / "llama_odd-4.0-mul1", pack)
        (folder / "chat.jinja").write_text(TEMPLATE)
    port = choose_port()
    # The package and its entry point may be on the path of this process only.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    command = [*vllm_command(), "serve", str(pack), "--served-model-name", MODEL, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--enforce-eager", "--dtype", "float32", "--max-model-len", str(LENGTH)]
    command += ["--max-num-batched-tokens", "256", "--max-num-seqs", "4", "--chat-template", str(folder / "chat.jinja")]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    # a model without sense would fill its answer with the blanks that JSON allows
    command += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    command += ["--worker-extension-cls", f"{WorkerExtension.__module__}.{WorkerExtension.__name__}", *options]
    return Server(command, port=port, log=folder / "log", environment=environment)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start(tmp_path_factory.mktemp("server")) as started:
        started.wait_healthy(240)
        yield started


@pytest.fixture
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def metrics(server: Server) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        return answer.read().decode()


def test_a_streamed_chat_is_the_same_text_as_a_whole_one(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**options)
    parts = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text and text == whole.choices[0].message.content
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens == 12


def test_tools_may_be_offered(client: OpenAI) -> None:
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=[{"type": "function", "function": function}],
        tool_choice="auto",
        max_tokens=8,
        temperature=0,
    )
    assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")


def test_guided_json_is_json_of_that_form(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"sky": {"enum": ["blue", "grey"]}, "warm": {"type": "boolean"}},
        "required": ["sky", "warm"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        response_format={"type": "json_schema", "json_schema": {"name": "day", "schema": schema}},
        max_tokens=100,
        temperature=0,
    )
    content = json.loads(answer.choices[0].message.content)
    assert set(content) == {"sky", "warm"} and content["sky"] in ("blue", "grey") and isinstance(content["warm"], bool)


def test_logprobs_of_answers_and_prompts(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="hello",
        max_tokens=4,
        temperature=0,
        logprobs=3,
        extra_body={"prompt_logprobs": 2, "return_token_ids": True},
    )
    (choice,) = answer.choices
    assert len(choice.logprobs.token_logprobs) == 4 and all(value <= 0 for value in choice.logprobs.token_logprobs)
    for chosen, top in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
        assert chosen == pytest.approx(max(top.values()))
    prompt = choice.model_extra["prompt_logprobs"]
    assert prompt[0] is None and all(len(entry) in (2, 3) for entry in prompt[1:])


def test_several_choices_and_stop_words(client: OpenAI) -> None:
    several = client.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=1, temperature=1.0, max_tokens=8)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in several.choices}) > 1
    plain = client.completions.create(model=MODEL, prompt="hello", max_tokens=24, temperature=0).choices[0].text
    stop = plain[len(plain) // 2 :][:1]
    cut = client.completions.create(model=MODEL, prompt="hello", max_tokens=24, temperature=0, stop=[stop]).choices[0]
    assert cut.text == plain[: plain.index(stop)] and cut.finish_reason == "stop"


def test_clients_at_the_same_time_get_what_they_get_alone(client: OpenAI) -> None:
    def ask(prompt: str) -> str:
        return client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, temperature=0).choices[0].text

    prompts = ["one two three", "a quite different prompt", "one two three", "the fourth"]
    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask, prompts)) == alone


def test_a_prompt_that_is_too_long_is_a_clean_error(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match=rf"(?s)maximum.*{LENGTH}"):
        client.completions.create(model=MODEL, prompt="word " * 2000, max_tokens=4)
    assert client.completions.create(model=MODEL, prompt="short", max_tokens=2).choices[0].text


def test_a_client_that_leaves_does_not_keep_the_engine_busy(server: Server, client: OpenAI) -> None:
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 200, "stream": True, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
    deadline = time.monotonic() + 30
    while 'num_requests_running{engine="0"' in (text := metrics(server)) and time.monotonic() < deadline:
        running = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
        if all(line.endswith(" 0.0") for line in running):
            break
        time.sleep(0.2)
    assert all(line.endswith(" 0.0") for line in running)
    assert client.completions.create(model=MODEL, prompt="again", max_tokens=2).choices[0].text


def test_the_metrics_count_what_the_worker_ran(server: Server, client: OpenAI) -> None:
    client.completions.create(model=MODEL, prompt="count", max_tokens=4)
    deadline = time.monotonic() + 20
    while "vllm:exl3_kernel_calls_total{" not in (text := metrics(server)) and time.monotonic() < deadline:
        time.sleep(0.5)
    lines = [line for line in text.splitlines() if line.startswith("vllm:exl3_kernel_calls_total{")]
    assert any('layer_class="QKVParallelLinear",op="linear"' in line for line in lines)
    assert "vllm:generation_tokens_total" in text and 'vllm:exl3_weight_bytes{kind="trellis"}' in text


def counted_calls(text: str) -> float:
    """Calls of linears by the layer's class that the tiny pack surely runs."""
    lines = [line for line in text.splitlines() if line.startswith("vllm:exl3_kernel_calls_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if 'layer_class="QKVParallelLinear"' in line)


def test_two_front_processes_count_the_same_calls(tmp_path: Path) -> None:
    """Whichever of them answers ``/metrics``."""
    with start(tmp_path, "--api-server-count", "2") as server:
        server.wait_healthy(240)
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        before = 0.0
        for _ in range(2):
            client.completions.create(model=MODEL, prompt="count", max_tokens=8, extra_body={"ignore_eos": True})
            deadline = time.monotonic() + 20
            while (now := counted_calls(metrics(server))) < before + 8 and time.monotonic() < deadline:
                time.sleep(0.5)
            assert now >= before + 8
            time.sleep(5)  # two writes
            now = counted_calls(metrics(server))
            assert {counted_calls(metrics(server)) for _ in range(8)} == {now}
            before = now
        assert 'vllm:exl3_weight_bytes{kind="trellis"}' in metrics(server)


def test_the_worker_answers_for_itself(server: Server) -> None:
    request = urllib.request.Request(
        f"{server.url}/collective_rpc",
        json.dumps({"method": "exl3_diagnostics"}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        (worker,) = json.loads(answer.read())["results"]
    assert worker["models"][-1]["average_bits"] > 3 and worker["calls"]


class Listener(threading.Thread):
    """A client that goes on listening however the server leaves, for up to a minute of silence.

    Not longer: when vLLM (0.30 to 0.33) aborts what is running, it sometimes cancels the task that hands out answers
    before that task has told open streams of the engine's end. The server then waits for its clients to leave.
    """

    def __init__(self, url: str, tokens: int) -> None:
        super().__init__(daemon=True)
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        self._stream = client.completions.create(
            model=MODEL, prompt="hello", max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(self._stream))
        self.finish_reason: str | None = None
        self.start()

    def run(self) -> None:
        with self._stream, contextlib.suppress(APIError, httpx.HTTPError):
            for part in self._stream:
                self.finish_reason = part.choices[0].finish_reason


def end_while_generating(server: Server, number: signal.Signals) -> Listener:
    """Start an answer, send the signal, and expect every process to end."""
    server.wait_healthy(240)
    listener = Listener(server.url, tokens=240)
    parent = psutil.Process(server._process.pid)
    children = parent.children(recursive=True)
    assert children
    parent.send_signal(number)
    _, alive = psutil.wait_procs([parent, *children], timeout=180)
    assert not alive
    assert "Traceback" not in server.log_text() or "vllm_exl3" not in server.log_text().rpartition("Traceback")[2]
    listener.join(60)
    return listener


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_generating_ends_every_process(tmp_path: Path, number: signal.Signals) -> None:
    with start(tmp_path) as server:
        end_while_generating(server, number)


def test_a_server_with_time_to_shut_down_finishes_what_it_generates(tmp_path: Path) -> None:
    with start(tmp_path, "--shutdown-timeout", "120") as server:
        assert end_while_generating(server, signal.SIGTERM).finish_reason == "length"
