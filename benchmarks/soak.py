"""`vllm serve` on a tiny pack under clients of every kind, for a fixed time or until stopped: what it does to memory,
to requests, and to the answer of one prompt that is asked all along.

    python benchmarks/soak.py --seconds 600
    python benchmarks/soak.py --seconds 0          # until Ctrl-C

Clients stream, disconnect, send prompts that are too long or no JSON at all, ask for guided JSON, log-probabilities
and two adapters, and come in bursts. A request is stuck that has no answer after two minutes. Memory is that of the
server's processes together (proportional set size), its drift from the median of the first fifth after the warm-up to
that of the last fifth. Runs add up: a run's row joins those of earlier ones in the results, whose ``meta`` says how
many requests and hours they are together. Exits with 1 where a request was stuck, an answer was of another status than
its request earns, or the canary changed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from vllm_exl3.demo.server import Server, choose_port, vllm_command
from vllm_exl3.tools.results import write_results

ROOT = Path(__file__).resolve().parents[1]
PACK = ROOT / "tests" / "data" / "packs" / "llama_odd-4.0-mul1"
LENGTH = 256
STUCK = 120.0
WARM_UP = 0.2
WORDS = ("the", "pack", "is", "read", "tile", "by", "tile", "and", "every", "tile", "is", "a", "ring", "of", "bits")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ADAPTERS = ("first", "second")


def adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of random numbers on both layers' o_proj."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    config = json.loads((PACK / "config.json").read_text())
    hidden, queries = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    tensors = {}
    for layer in range(2):
        key = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{key}.lora_A.weight"] = torch.randn(8, queries, generator=generator) / 16
        tensors[f"{key}.lora_B.weight"] = torch.randn(hidden, 8, generator=generator) / 16
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def serve(folder: Path) -> Server:
    """The server, starting."""
    shutil.copytree(PACK, folder / "pack")
    port = choose_port()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [*vllm_command(), "serve", str(folder / "pack"), "--served-model-name", "base", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--enforce-eager", "--dtype", "float32", "--max-model-len", str(LENGTH)]
    command += ["--max-num-batched-tokens", "512", "--max-num-seqs", "32", "--disable-uvicorn-access-log"]
    command += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    command += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules"]
    command += [f"{name}={adapter(folder / name, seed)}" for seed, name in enumerate(ADAPTERS)]
    return Server(command, port=port, log=folder / "log", environment=environment)


class Soak:
    """The clients, and what became of their requests."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self._client = client
        self._chance = random.Random(seed)  # noqa: S311
        self.ends: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.first_token: list[float] = []
        self.canary: list[Any] = []
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "answer": (6, self._answer),
            "stream": (6, self._stream),
            "disconnect": (4, self._disconnect),
            "long prompt": (2, self._long_prompt),
            "too long": (3, self._too_long),
            "no JSON": (3, self._no_json),
            "wrong parameter": (3, self._wrong_parameter),
            "guided JSON": (1, self._guided),
            "logprobs": (2, self._logprobs),
            "adapter": (3, self._adapter),
        }

    def _prompt(self, words: int) -> str:
        return " ".join(self._chance.choice(WORDS) for _ in range(words))

    def _body(self, **options: Any) -> dict[str, Any]:
        body = {
            "model": "base",
            "prompt": self._prompt(self._chance.randint(1, 12)),
            "max_tokens": 8,
            "temperature": 0.7,
        }
        return {**body, **options}

    async def one(self) -> None:
        """A request of a random kind."""
        names = list(self._kinds)
        name = self._chance.choices(names, [self._kinds[kind][0] for kind in names])[0]
        try:
            await asyncio.wait_for(self._kinds[name][1](), STUCK)
            self.ends[name] += 1
        except TimeoutError:
            self.wrong[f"{name}: stuck"] += 1
        except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
            self.wrong[f"{name}: {type(error).__name__} {str(error)[:120]}"] += 1

    async def _post(self, body: Any, expected: int) -> httpx.Response:
        response = await self._client.post("/v1/completions", json=body)
        assert response.status_code == expected, f"{response.status_code} instead of {expected}: {response.text[:80]}"
        return response

    async def _answer(self) -> None:
        answer = (await self._post(self._body(), 200)).json()
        assert answer["usage"]["completion_tokens"] <= 8

    async def _stream(self, lines: int | None = None) -> None:
        begin = time.monotonic()
        body = self._body(stream=True, max_tokens=self._chance.randint(4, 24), ignore_eos=True)
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, f"{response.status_code} instead of 200"
            seen, last = 0, ""
            async for line in response.aiter_lines():
                if not line:
                    continue
                if not seen:
                    self.first_token.append(time.monotonic() - begin)
                seen, last = seen + 1, line
                if seen == lines:
                    return
            assert last == "data: [DONE]", f"a stream that ended with {last[:60]!r}"

    async def _disconnect(self) -> None:
        await self._stream(lines=self._chance.randint(1, 3))

    async def _long_prompt(self) -> None:
        await self._post(self._body(prompt=[self._chance.randrange(3, 200) for _ in range(LENGTH - 9)]), 200)

    async def _too_long(self) -> None:
        await self._post(self._body(prompt=[5] * (LENGTH + self._chance.randint(1, 4000))), 400)

    async def _no_json(self) -> None:
        text = self._chance.choice(('{"model": "base", "prompt"', "", "[]", "\x00", '{"model": "base"}', "null"))
        headers = {"content-type": "application/json"}
        response = await self._client.post("/v1/completions", content=text.encode(), headers=headers)
        assert 400 <= response.status_code < 500, f"{response.status_code} for {text!r}"

    async def _wrong_parameter(self) -> None:
        spoilt = self._chance.choice(
            ({"temperature": -1}, {"max_tokens": -5}, {"n": "x"}, {"top_p": 7}, {"model": "none"}, {"logprobs": 10**6})
        )
        response = await self._client.post("/v1/completions", json=self._body(**spoilt))
        assert 400 <= response.status_code < 500, f"{response.status_code} for {spoilt}"

    async def _guided(self) -> None:
        answer = await self._post(self._body(max_tokens=48, structured_outputs={"json": SCHEMA}), 200)
        text = answer.json()["choices"][0]["text"]
        if answer.json()["choices"][0]["finish_reason"] == "stop":
            assert isinstance(json.loads(text)["n"], int)

    async def _logprobs(self) -> None:
        answer = (await self._post(self._body(logprobs=5), 200)).json()
        assert answer["choices"][0]["logprobs"]["token_logprobs"]

    async def _adapter(self) -> None:
        await self._post(self._body(model=self._chance.choice(ADAPTERS)), 200)

    async def ask_canary(self) -> None:
        """The same prompt once more."""
        body = {"model": "base", "prompt": [7, 8, 9, 10, 11], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        try:
            asked = self._post({**body, "logprobs": 1, "return_token_ids": True}, 200)
            choice = (await asyncio.wait_for(asked, STUCK)).json()["choices"][0]
        except (TimeoutError, httpx.HTTPError, AssertionError) as error:
            self.wrong[f"canary: {type(error).__name__} {str(error)[:120]}"] += 1
            return
        self.canary.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))


def memory(root: int) -> int:
    """Bytes of the server's processes, shared pages divided."""
    total = 0
    with contextlib.suppress(psutil.Error):
        for process in (psutil.Process(root), *psutil.Process(root).children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total


async def soak(
    port: int, root: int, seconds: float, clients: int, burst: int, kind: type[Soak] = Soak
) -> tuple[Soak, list[tuple[float, int]]]:
    """Keep the clients at it; memory by time."""
    # The server closes connections that nobody used for five seconds: a client that sends just then reads nothing.
    limits = httpx.Limits(max_connections=burst + clients + 8, keepalive_expiry=2)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=STUCK, limits=limits) as client:
        load, samples, begin = kind(client, 0), [], time.monotonic()
        over = begin + (seconds or float("inf"))

        async def keep_asking() -> None:
            while time.monotonic() < over:
                await load.one()

        async def watch() -> None:
            bursts = 0
            while time.monotonic() < over:
                samples.append((time.monotonic() - begin, memory(root)))
                await load.ask_canary()
                if (time.monotonic() - begin) // 60 > bursts:
                    bursts += 1
                    await asyncio.gather(*(load.one() for _ in range(burst)))
                    load.ends["bursts"] += 1
                await asyncio.sleep(3)

        with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C: report what was done
            await asyncio.gather(watch(), *(keep_asking() for _ in range(clients)))
        return load, samples


def drift(samples: list[tuple[float, int]]) -> float:
    """Relative growth of memory, from the first fifth after the warm-up to the last."""
    end = samples[-1][0]
    settled = [size for at, size in samples if at >= WARM_UP * end]
    fifth = max(1, len(settled) // 5)
    first = statistics.median(settled[:fifth])
    return statistics.median(settled[-fifth:]) / first - 1 if first else float("nan")  # a server that ended early


def spread(canary: list[Any]) -> float:
    """How far log-probabilities of the same tokens after the same tokens lie apart."""
    worst, (ids, usual) = 0.0, canary[0] if canary else ((), ())
    for tokens, values in canary[1:]:
        for position, (token, value) in enumerate(zip(tokens, values, strict=True)):
            if token != ids[position]:
                break
            worst = max(worst, abs(value - usual[position]))
    return worst


def record(path: Path, row: dict[str, Any], command: str) -> dict[str, float]:
    """Add a run to those in a results file; what they are together."""
    earlier = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    total = {
        "total_runs": len(earlier) + 1,
        "total_requests": sum(each["requests"] for each in (*earlier, row)),
        "total_hours": round(sum(each["seconds"] for each in (*earlier, row)) / 3600, 3),
    }
    write_results(path, [row], machine="cpu", command=command, replaces=lambda _: False, facts=total)
    return total


def main() -> int:
    """Start, load, stop, and write the result."""
    parser = argparse.ArgumentParser(description="Load a server with clients of every kind.")
    parser.add_argument("--seconds", type=float, default=1800, help="how long; 0 until Ctrl-C")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--burst", type=int, default=1024, help="requests at once, every minute")
    parser.add_argument("--note", default="", help="what else the machine did")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cpu" / "soak.json")
    parser.add_argument("--log", type=Path, default=ROOT / ".cache" / "soak.log", help="where the server's log goes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, serve(Path(place)) as server:
        server.wait_healthy(600)
        try:
            load, samples = asyncio.run(
                soak(server.port, server.pid, arguments.seconds, arguments.clients, arguments.burst)
            )
        finally:
            arguments.log.parent.mkdir(parents=True, exist_ok=True)
            arguments.log.write_text(server.log_text())
        tracebacks = server.log_text().count("Traceback")
    tokens = {tuple(ids) for ids, _ in load.canary}
    row = {
        "seconds": round(samples[-1][0]),
        "requests": load.ends.total() - load.ends["bursts"] + sum(load.wrong.values()) + len(load.canary),
        "by_kind": dict(sorted(load.ends.items())),
        "wrong": dict(load.wrong),
        "stuck": sum(count for what, count in load.wrong.items() if what.endswith("stuck")),
        "canaries": len(load.canary),
        "canary_answers": len(tokens),
        "canary_bits": len({str(answer) for answer in load.canary}),
        "canary_spread": spread(load.canary),
        "canary_values": list({str(ids): (ids, values) for ids, values in load.canary}.values())[:8],
        "tracebacks_in_log": tracebacks,
        "memory_mib": [round(samples[0][1] / 2**20), round(samples[-1][1] / 2**20)],
        "memory_drift": round(drift(samples), 5),
        "first_token_p50_s": round(statistics.median(load.first_token), 3),
        "first_token_p99_s": round(statistics.quantiles(load.first_token, n=100)[98], 3),
        "note": arguments.note,
    }
    print(json.dumps(row, indent=1))
    command = f"python benchmarks/soak.py --seconds {arguments.seconds:g}"
    print(json.dumps(record(arguments.out, row, command)))
    return 1 if load.wrong or len(tokens) != 1 else 0


if __name__ == "__main__":
    raise SystemExit(main())
