"""Engines over two processes continue every prompt as one process does."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.serving.conftest import PACKS, drop_the_head, write_variant
from tests.serving.engine import PROMPTS, engine, generate, generate_each_on_two_ranks
from vllm_exl3.tools.table_writer import quantize_embedding

TOKENS = 24


class Case(NamedTuple):
    """A pack, and how its engine differs from one of tensor parallelism."""

    pack: str
    options: dict[str, Any]
    table_bits: int | None = None
    """Bits of an integer table that takes the place of the pack's embedding and of its head."""


CASES = {
    "an MLP of 160 inputs a rank, inside a block": Case("llama_odd-4.0-mul1", {}),
    "an MLP of 192 inputs a rank, one KV head": Case("phi3-5.0-mul1", {}),
    "experts of three blocks, two of them on one rank": Case("mixtral-4.0-3inst", {}),
    "whole experts": Case("qwen3_moe-3.0-mul1", {"enable_expert_parallel": True}),
    "row code": Case("qwen3-2.25-mul1-emb4", {}),
    "a head tied to an integer table": Case("llama_tied-3.0-mul1", {}, table_bits=8),
}


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, case in CASES.items():
        folders[name] = PACKS / case.pack
        if case.table_bits is not None:
            parent = tmp_path_factory.mktemp("packs")
            tied = write_variant(
                parent, case.pack, drop_the_head, lambda config: config.update(tie_word_embeddings=True)
            )
            folders[name] = parent / "pack"
            quantize_embedding(tied, folders[name], case.table_bits)
    return folders


@pytest.fixture(scope="module")
def of_two_ranks(packs: dict[str, Path]) -> dict[str, list[list[int]]]:
    """Continuations by every case's engine: the two processes start once."""
    found = generate_each_on_two_ranks([(packs[name], TOKENS, case.options) for name, case in CASES.items()])
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_one_ranks_tokens(
    name: str, packs: dict[str, Path], of_two_ranks: dict[str, list[list[int]]]
) -> None:
    with engine(packs[name]) as llm:
        assert of_two_ranks[name] == generate(llm, PROMPTS, TOKENS)
