"""Asks a server questions through the OpenAI API, streaming, and measures how fast it answers."""

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Answer", "ask"]


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Attributes:
        text: what the model said.
        tokens: completion tokens, as the server counts them.
        first_token_seconds: from the request to the first token.
        tokens_per_second: of the tokens after the first; None when there was only one.
    """

    text: str
    tokens: int
    first_token_seconds: float
    tokens_per_second: float | None


def ask(
    url: str, model: str, question: str, *, max_tokens: int = 64, on_text: Callable[[str], None] = lambda text: None
) -> Answer:
    """Ask one question, greedily.

    Args:
        url: the server's base address.
        model: the name it serves the pack under.
        question: the user's message.
        max_tokens: where to cut the answer.
        on_text: called with each piece of text as it arrives.
    """
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    start = time.monotonic()
    arrivals: list[float] = []
    pieces: list[str] = []
    tokens = 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    for event in stream:
        if event.usage is not None:
            tokens = event.usage.completion_tokens
        text = event.choices[0].delta.content if event.choices else None
        if text:
            arrivals.append(time.monotonic())
            pieces.append(text)
            on_text(text)
    if not arrivals:
        raise RuntimeError(f"the server answered {question!r} with nothing")
    spent = arrivals[-1] - arrivals[0]
    rate = (tokens - 1) / spent if tokens > 1 and spent > 0 else None
    return Answer("".join(pieces), tokens, arrivals[0] - start, rate)
