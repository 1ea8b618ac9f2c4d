"""The demo itself: serves the pack with stock vLLM, asks, compares with the 16-bit model, and judges."""

import contextlib
import os
import shlex
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_exl3.cpu.library import library
from vllm_exl3.demo import baseline
from vllm_exl3.demo.chat import Answer, ask
from vllm_exl3.demo.display import Display, report_lines
from vllm_exl3.demo.divergence import kl_divergence, served_log_probabilities
from vllm_exl3.demo.prepare import Workshop
from vllm_exl3.demo.server import Server, choose_port, signals_as_exit, vllm_command
from vllm_exl3.demo.source import verify_source
from vllm_exl3.processors import SPINS, allowed_set, waits_by_spinning
from vllm_exl3.tools import vllm_cpu

__all__ = ["PARAGRAPH", "QUESTIONS", "Settings", "judge", "run_demo"]

QUESTIONS = (("What is the capital of France?", "Paris"), ("Explain in one sentence why plants need sunlight.", None))
"""What is asked, and what the answer must contain."""

PARAGRAPH = (
    "The lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote the weather into a thick book. "
    "On clear nights he counted the ships that passed; in fog he rang the bell and waited for an answer. After thirty "
    "years he knew every rock of the coast by the sound of the waves that broke on it, and the fishermen said that he "
    "could tell from the colour of the water what the next day would bring."
)
"""The text on which the pack is compared with the 16-bit model."""

LISTED_TOKENS = 4000
"""Tokens whose probability the server lists for each position of the paragraph."""

SERVED_NAME = "smollm2-135m-instruct"
START_SECONDS = 300.0


@dataclass(frozen=True)
class Settings:
    """What a run of the demo may vary.

    Attributes:
        cache: folder for the source model, the pack, the reference and the server's log.
        gguf: the source model, where it is not to be found or downloaded.
        port: the port to serve on, if it is free.
        baseline: the file of recorded results.
        record: write this run's results there instead of comparing with it.
    """

    cache: Path
    gguf: Path | None
    port: int | None
    baseline: Path
    record: bool


def run_demo(settings: Settings, console: Console) -> list[str]:
    """Run all of it; everything started is stopped when this returns or raises.

    Returns:
        What failed, one sentence each; empty when all is well.
    """
    with signals_as_exit():
        return _run(settings, console)


def _run(settings: Settings, console: Console) -> list[str]:
    start = time.monotonic()
    display = Display(console)
    if settings.gguf is not None:
        verify_source(settings.gguf)  # before the cache, whose pack needs no source any more, hides that it is wrong
    workshop = Workshop(settings.cache, display, settings.gguf)
    pack = workshop.pack()
    ids = _token_ids(pack)
    reference = workshop.reference(PARAGRAPH, ids)
    with _serve(pack, settings, display) as server:
        answers = [_ask(server, question, display) for question, _ in QUESTIONS]
        served = served_log_probabilities(server.url, SERVED_NAME, ids, LISTED_TOKENS)
    display.say("stopped", "the server and all its processes")
    divergence = kl_divergence(reference[:-1], served)
    failures = [
        f"the answer to {question!r} does not contain {wanted!r}: {answer.text!r}"
        for (question, wanted), answer in zip(QUESTIONS, answers, strict=True)
        if wanted is not None and wanted not in answer.text
    ]
    failures += judge(divergence, answers, workshop.identity, settings, display)
    display.say("time", f"{time.monotonic() - start:.0f} s")
    return failures


@contextlib.contextmanager
def _serve(pack: Path, settings: Settings, display: Display) -> Iterator[Server]:
    """vLLM, serving the pack with its stock command line."""
    port = choose_port(settings.port)
    if settings.port not in (None, port):
        display.say("port", f"{settings.port} is taken, using {port}")
    command = serve_command(pack, port)
    log = settings.cache / "server.log"
    display.say("serve", f"vllm {shlex.join(command[1:])}")
    start = time.monotonic()
    with (
        server_environment() as environment,
        Server(command, port=port, log=log, environment=environment, processors=allowed_set()) as server,
    ):
        with display.waiting("  vLLM is starting") as update:
            server.wait_healthy(START_SECONDS, update)
        display.say("", f"ready after {time.monotonic() - start:.0f} s; its log: {log}")
        for line in report_lines(server.log_text()) or ["(found no start-up report in the log)"]:
            display.say("", line)
        yield server


def serve_command(pack: Path, port: int) -> list[str]:
    """vLLM's command line for the pack on a port of the loopback interface."""
    options = (
        f"--host 127.0.0.1 --port {port} --served-model-name {SERVED_NAME} --max-model-len 1024 --max-num-seqs 4 "
        f"--max-num-batched-tokens 512 --max-logprobs {LISTED_TOKENS} --enforce-eager"
    )
    return [*vllm_command(), "serve", str(pack), *options.split()]


@contextlib.contextmanager
def server_environment() -> Iterator[dict[str, str]]:
    """The server's environment: offline, a small KV cache, and a name for `vllm-cpu` where it needs one."""
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if waits_by_spinning():
        # Threads that spin while they wait take a busy machine's processors from those waited for.
        environment["GOMP_SPINCOUNT"] = SPINS
    with tempfile.TemporaryDirectory() as folder:
        if vllm_cpu.needed():
            vllm_cpu.write_metadata(Path(folder))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        yield environment


def _ask(server: Server, question: str, display: Display) -> Answer:
    display.say("question", question)
    display.console.print("  [bold]answer     [/]", end="")
    answer = ask(server.url, SERVED_NAME, question, on_text=display.stream)
    display.console.print()
    rate = "" if answer.tokens_per_second is None else f", then {answer.tokens_per_second:.1f} tokens/s"
    display.say("", f"{answer.tokens} tokens: the first after {answer.first_token_seconds:.2f} s{rate}")
    return answer


def _token_ids(pack: Path) -> list[int]:
    """The paragraph in the pack's tokens."""
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(pack / "tokenizer.json")).encode(PARAGRAPH).ids)


def judge(
    divergence: float, answers: list[Answer], identity: dict[str, Any], settings: Settings, display: Display
) -> list[str]:
    """Compare the divergence with the recorded one, or record it.

    Returns:
        What is wrong with it, or nothing.
    """
    found = f"{divergence:.4f} nats per token from the 16-bit model"
    longest = max(answers, key=lambda answer: answer.tokens)
    if settings.record:
        row = {
            "kernel": "native",
            **identity,
            "isa": library().exl3_isa().decode(),
            "kl": round(divergence, 6),
            "tokens_per_second": round(longest.tokens_per_second or 0.0, 1),
        }
        baseline.record(settings.baseline, row, "vllm-exl3 demo --record")
        display.say("KL", f"{found}, recorded in {settings.baseline}")
        return []
    expected = baseline.expected_divergence(settings.baseline, identity)
    if expected is None:
        display.say("KL", f"{found}; {settings.baseline} records no value for this encoder to compare with")
        return []
    limit = expected * baseline.MARGIN
    display.say("KL", f"{found}; recorded {expected:.4f}, limit {limit:.4f}")
    if not divergence <= limit:  # NaN fails too
        return [f"the KL divergence {divergence:.4f} exceeds {limit:.4f}, the recorded value times {baseline.MARGIN}"]
    return []
