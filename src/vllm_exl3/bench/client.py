"""Drives a server over its OpenAI API with streams, and measures when tokens arrive."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

__all__ = ["Load", "LoadError", "Timing", "drive"]

_TIMEOUT_SECONDS = 1800


class LoadError(RuntimeError):
    """A request was refused, failed or gave another number of tokens; the message says how the server answered."""


@dataclass(frozen=True)
class Load:
    """One setting of a load.

    Attributes:
        concurrency: requests at a time.
        prompt: tokens of each prompt.
        output: tokens of each answer.
        requests: how many in all.
    """

    concurrency: int
    prompt: int
    output: int
    requests: int


@dataclass
class Timing:
    """What one run of a load took.

    Attributes:
        seconds: from the first request to the last token.
        tokens: tokens of all answers.
        first: seconds until the first token, one per request.
        between: seconds between two tokens; one that brings several counts once for each.
    """

    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


def drive(
    url: str, model: str, vocabulary: int, load: Load, *, seed: int, done: Callable[[float], None] = lambda _: None
) -> Timing:
    """Send the requests of a load, the next whenever one is answered.

    Prompts are random token ids, so that no prefix is cached and no tokenizer has a say.

    Args:
        url: the server, such as ``http://127.0.0.1:8000``.
        model: the name that it serves under.
        vocabulary: token ids are below this.
        load: what to send.
        seed: of the prompts; the same one gives the same prompts.
        done: called with 1 after each request.

    Raises:
        LoadError: a request failed.
    """
    return asyncio.run(_drive(url, model, vocabulary, load, seed, done))


async def _drive(url: str, model: str, vocabulary: int, load: Load, seed: int, done: Callable[[float], None]) -> Timing:
    chance, timing = random.Random(seed), Timing()  # noqa: S311
    prompts = [[chance.randrange(vocabulary) for _ in range(load.prompt)] for _ in range(load.requests)]
    waiting = iter(prompts)

    async def client(session: aiohttp.ClientSession) -> None:
        for prompt in waiting:
            body = {
                "model": model,
                "prompt": prompt,
                "max_tokens": load.output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,  # without it, no chunk comes for a token that completes no character
            }
            await _request(session, f"{url}/v1/completions", body, load.output, timing)
            done(1)

    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    start = time.perf_counter()
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(load.concurrency, load.requests)):
                    group.create_task(client(session))
        except* (aiohttp.ClientError, TimeoutError, LoadError) as errors:
            raise _first(errors) from None
    timing.seconds = time.perf_counter() - start
    return timing


def _first(errors: BaseExceptionGroup) -> LoadError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, LoadError) else LoadError(f"a request failed: {type(error).__name__}: {error}")


async def _request(
    session: aiohttp.ClientSession, url: str, body: dict[str, object], wanted: int, timing: Timing
) -> None:
    sent = last = time.perf_counter()
    tokens, first, reported = 0, None, None
    between: list[float] = []
    async with session.post(url, json=body) as answer:
        if answer.status != 200:
            raise LoadError(f"the server answered {answer.status}: {(await answer.text())[:500]}")
        async for chunk in _chunks(answer.content):
            if "error" in chunk:
                raise LoadError(f"the server broke off: {json.dumps(chunk['error'])[:500]}")
            reported = (chunk.get("usage") or {}).get("completion_tokens", reported)
            count = sum(len(choice.get("token_ids") or ()) for choice in chunk.get("choices") or ())
            if not count:
                continue
            now = time.perf_counter()
            if first is None:
                first = now - sent
            else:
                between += [(now - last) / count] * count
            tokens, last = tokens + count, now
    if first is None or tokens != wanted or reported not in (None, wanted):
        raise LoadError(f"an answer of {reported or tokens} tokens, where {wanted} were asked for")
    timing.first.append(first)
    timing.between += between
    timing.tokens += tokens


async def _chunks(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, whatever their length: the first one repeats the ids of the prompt.

    Raises:
        LoadError: one is no JSON object.
    """
    async for line in _lines(content):
        data = line.strip().removeprefix(b"data: ")
        if not data or data == b"[DONE]":
            continue
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            raise LoadError(f"the server sent something other than JSON objects: {data[:200].decode(errors='replace')}")
        yield chunk


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length; aiohttp's own iterator refuses those above 128 KiB."""
    begun: list[bytes] = []
    async for part in content.iter_any():
        *ends, rest = part.split(b"\n")
        for end in ends:
            yield b"".join([*begun, end])
            begun = []
        begun.append(rest)
    yield b"".join(begun)
