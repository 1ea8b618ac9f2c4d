"""The demo's KL divergence, and its streaming client against a stand-in server."""

import http.server
import json
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_exl3.demo.chat import ask
from vllm_exl3.demo.divergence import kl_divergence, served_log_probabilities


def listed(log_probabilities: np.ndarray, top: int) -> list[dict[int, float]]:
    """The ``top`` likeliest tokens of each position, as a server lists them."""
    order = np.argsort(-log_probabilities, axis=1)[:, :top]
    return [{int(i): float(row[i]) for i in best} for row, best in zip(log_probabilities, order, strict=True)]


def random_pair(seed: int, vocab: int = 50) -> tuple[np.ndarray, np.ndarray]:
    logits = np.random.default_rng(seed).standard_normal((2, 3, vocab)) * 3
    return tuple((x - np.log(np.exp(x).sum(-1, keepdims=True))).astype(np.float32) for x in logits)  # type: ignore


@given(seed=st.integers(0, 10_000))
def test_all_tokens_listed_gives_the_exact_divergence(seed: int) -> None:
    p, q = random_pair(seed)
    exact = float(np.mean(np.sum(np.exp(p) * (p.astype(np.float64) - q), -1)))
    assert kl_divergence(p, listed(q, 50)) == pytest.approx(exact, rel=1e-4, abs=1e-6)


@given(seed=st.integers(0, 10_000), top=st.integers(1, 50))
def test_fewer_listed_tokens_can_only_lower_it(seed: int, top: int) -> None:
    p, q = random_pair(seed)
    # what is left of q is a difference of float32 numbers near 1: one that is too small has no digits
    left = 1 - np.sort(np.exp(q.astype(np.float64)), -1)[:, -top:].sum(-1)
    assume(top == 50 or left.min() > 1e-3)
    partial = kl_divergence(p, listed(q, top))
    assert -1e-6 <= partial <= kl_divergence(p, listed(q, 50)) * 1.001 + 1e-6


def test_it_is_zero_for_equal_and_grows_with_the_distance() -> None:
    p, q = random_pair(0)
    assert kl_divergence(p, listed(p, 50)) == pytest.approx(0, abs=1e-6)
    near = 0.9 * p + 0.1 * q
    near -= np.log(np.exp(near).sum(-1, keepdims=True))
    assert 0 < kl_divergence(p, listed(near, 50)) < kl_divergence(p, listed(q, 50))
    with pytest.raises(ValueError, match="found 2 served positions, expected 3"):
        kl_divergence(p, listed(q, 5)[:2])


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as vLLM does, and keeps what it was asked in ``server.asked``."""

    protocol_version = "HTTP/1.0"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked = asked  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        if "prompt_logprobs" in asked:
            entry = {"7": {"logprob": -0.5, "rank": 1}, "9": {"logprob": -2.0, "rank": 2}}
            answer = {"choices": [{"prompt_logprobs": [None, entry]}]}
            self.wfile.write(json.dumps(answer).encode())
            return
        for piece in ("The capital", " is", " Paris."):
            self.event({"choices": [{"index": 0, "delta": {"content": piece}}]})
        self.event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, value: dict[str, object]) -> None:
        base = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        self.wfile.write(b"data: " + json.dumps({**base, **value}).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_answers_stream_and_are_counted(server: http.server.HTTPServer) -> None:
    pytest.importorskip("openai")
    heard: list[str] = []
    answer = ask(f"http://127.0.0.1:{server.server_port}", "m", "Where?", on_text=heard.append)
    assert heard == ["The capital", " is", " Paris."]
    assert (answer.text, answer.tokens) == ("The capital is Paris.", 5)
    assert answer.tokens_per_second is not None and answer.tokens_per_second > 0
    assert server.asked["temperature"] == 0  # type: ignore[attr-defined]


def test_served_probabilities_skip_the_first_token(server: http.server.HTTPServer) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    assert served_log_probabilities(url, "m", [1, 7], top=2) == [{7: -0.5, 9: -2.0}]
    assert server.asked["prompt_logprobs"] == 2  # type: ignore[attr-defined]
