"""Readers of the weight of a head or a table that is stored otherwise get its rows, decoded; nothing writes them."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from vllm import LLM
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from tests.serving.conftest import PACKS, Tensors
from tests.serving.engine import engine, logits_of, model_of
from tests.serving.test_direct_readers import decoded
from vllm_exl3.pack import Pack
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.serving.decoded_weight import DecodedWeight
from vllm_exl3.tools.table_writer import quantize_embedding

ODD, ROW_CODED, TIED = "llama_odd-4.0-mul1", "qwen3-2.25-mul1-emb4", "llama_tied-3.0-mul1"
ROWS, WIDTH = 9000, 6
TRUE = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


class Decoder:
    """Rows of `TRUE`, counted."""

    def __init__(self) -> None:
        self.decoded = 0

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        self.decoded += len(ids)
        return TRUE[ids]


@pytest.fixture
def decoder() -> Decoder:
    return Decoder()


@pytest.fixture
def weight(decoder: Decoder) -> DecodedWeight:
    return DecodedWeight("lm_head", decoder, (ROWS, WIDTH), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("read", "rows"),
    [
        (lambda w: w.data[[5]], 1),
        (lambda w: w[[5, -1, 5]], 3),
        (lambda w: w.detach()[7], 1),
        (lambda w: w[-1], 1),
        (lambda w: w[3:9], 6),
        (lambda w: w[3:20:4], 5),
        (lambda w: w[-4:], 4),
        (lambda w: w[torch.tensor([[1, 2], [3, 4]])], 4),
        (lambda w: torch.index_select(w, 0, torch.tensor([8, 1])), 2),
        (lambda w: torch.nn.functional.embedding(torch.tensor([[4], [2]]), w), 2),
        (lambda w: w[torch.arange(ROWS) % 4500 == 0], 2),
        (lambda w: w.cpu()[[2]], 1),
        (lambda w: w.to(torch.float64)[[2]], 1),
        (lambda w: w.half().float()[[2]], 1),
        (lambda w: torch.tensor([w.shape[0], w.size(-1), w.dim(), w.numel(), w.element_size(), w.is_cuda]), 0),
        (lambda w: torch.nn.functional.linear(torch.ones(2, WIDTH), w), ROWS),
        (lambda w: w.t() @ torch.ones(ROWS, 1), ROWS),
        (lambda w: w[:, 2], ROWS),
        (lambda w: w + 1, ROWS),
        (lambda w: w[:], 0),
    ],
)
def test_readers_get_the_rows_that_they_ask_for(
    read: Callable[[torch.Tensor], torch.Tensor], rows: int, weight: DecodedWeight, decoder: Decoder
) -> None:
    with torch.inference_mode():
        found, expected = read(weight), read(TRUE)
        assert decoder.decoded == rows
        if isinstance(found, DecodedWeight):  # still a promise
            found = found[torch.arange(ROWS)]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_a_reader_of_everything_is_named(weight: DecodedWeight, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.exl3"):
        _ = weight[[1, 2, 3]]
        assert not caplog.messages
        torch.nn.functional.linear(torch.ones(1, WIDTH), weight)
    assert len(caplog.messages) == 1 and "all of lm_head.weight" in caplog.messages[0]


def test_weights_are_compared_without_decoding_more_than_they_differ_in(
    weight: DecodedWeight, decoder: Decoder
) -> None:
    assert not torch.equal(weight, TRUE[:-1]) and not torch.equal(weight.cpu(), TRUE.double()) and not decoder.decoded
    assert not torch.equal(TRUE + 1, weight) and decoder.decoded < ROWS
    last = TRUE.clone()
    last[-1, -1] += 1
    assert not torch.equal(weight, last)
    assert torch.equal(weight, TRUE) and torch.equal(TRUE, weight.cpu()) and torch.equal(weight, weight)


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.copy_(TRUE),
        lambda w: w.zero_(),
        lambda w: w.data.mul_(2),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: torch.add(TRUE, 1, out=w),
    ],
)
def test_nothing_writes_to_it(write: Callable[[torch.Tensor], object], weight: DecodedWeight) -> None:
    with torch.no_grad(), pytest.raises(Exl3PackError, match=r"lm_head\.weight.*readers only"):
        write(weight)


def test_a_row_that_there_is_not_is_refused(weight: DecodedWeight) -> None:
    for ids in ([ROWS], [-ROWS - 1], [0, ROWS + 5]):
        with pytest.raises(IndexError, match=f"which has {ROWS}"):
            weight[ids]


@pytest.mark.parametrize("name", [ODD, ROW_CODED])
def test_heads_and_tables_of_packs_are_read_as_they_are_stored(name: str) -> None:
    """Against numpy's decoder, and against what the layer itself looks up."""
    pack, ids = Pack.open(PACKS / name), torch.tensor([0, 639, 17, -2])
    with engine(PACKS / name) as llm:
        model = model_of(llm)
        head, table = model.lm_head, model.model.embed_tokens
        assert "weight" not in head._parameters
        assert head.weight.shape == (640, 256) and head.weight.dtype == torch.float32
        expected = decoded(pack, "lm_head", 640)[ids]
        error = torch.linalg.norm(head.weight[ids] - expected) / torch.linalg.norm(expected)
        assert error <= 5e-4
        assert torch.equal(table.weight[ids].float(), table(ids % 640).float())


WITH_TOKENIZER = {"runner": "pooling", "skip_tokenizer_init": False}
RERANKER = {"classifier_from_token": ["!", "#"], "architectures": ["LlamaForSequenceClassification"]}


def scores(llm: LLM, prompts: list[list[int]]) -> torch.Tensor:
    outputs = llm.classify([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
    return torch.tensor([output.outputs.probs for output in outputs])


def without_head(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("lm_head.")]:
        del tensors[name]


@pytest.mark.parametrize("kind", ["exl3 head", pytest.param("tied int8 table", marks=pytest.mark.slow)])
def test_a_reranker_scores_with_two_rows_of_the_head(kind: str, variant: Callable[..., Path], tmp_path: Path) -> None:
    """vLLM makes its classifier of the head's rows for "yes" and "no", which it reads."""
    pack = PACKS / ODD
    if kind != "exl3 head":
        pack = tmp_path / "int8"
        quantize_embedding(variant(TIED, without_head, lambda config: config.update(tie_word_embeddings=True)), pack, 8)
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7]]
    with engine(pack) as llm:
        logits = torch.stack([logits_of(llm, ids)[-1] for ids in prompts])
    no, yes = 3, 5  # "!" and "#"
    expected = torch.sigmoid(logits[:, yes] - logits[:, no])
    assert (expected[0] - expected[1]).abs() > 1e-3
    with engine(pack, **WITH_TOKENIZER, hf_overrides={**RERANKER, "method": "from_2_way_softmax"}) as llm:
        tables = [module for module in model_of(llm).modules() if isinstance(module, VocabParallelEmbedding)]
        assert tables == [model_of(llm).model.embed_tokens]  # the head was there for its rows only
        torch.testing.assert_close(scores(llm, prompts)[:, 0], expected, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_a_classifier_of_the_head_s_rows_without_more_ado() -> None:
    with engine(PACKS / ODD) as llm:
        logits = logits_of(llm, [1, 2, 3, 4, 5])[-1][[3, 5]]
    with engine(PACKS / ODD, **WITH_TOKENIZER, hf_overrides={**RERANKER, "method": "no_post_processing"}) as llm:
        found = scores(llm, [[1, 2, 3, 4, 5]])[0]
    torch.testing.assert_close(found, logits.softmax(0), rtol=2e-3, atol=2e-3)
