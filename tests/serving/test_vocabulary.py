"""Vocabularies as models have them over any number of ranks: rows and logits of quantized tables, without an engine."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from vllm.model_executor.layers import vocab_parallel_embedding as stock

from vllm_exl3.ops.embedding import embedding_reference
from vllm_exl3.pack.scaled_rows import row_layout
from vllm_exl3.serving.embedding import QuantizedEmbeddingMethod, Table
from vllm_exl3.serving.embedding_hook import _OneMethod

VOCABULARIES = (151936, 128256, 248320, 100352, 49152, 640, 65)
WIDTH = 64


def table_of(kind: str, vocabulary: int) -> tuple[Table, torch.Tensor, torch.Tensor]:
    """A table's description, its codes and its scales."""
    rng = np.random.default_rng(vocabulary)
    if kind == "row code":
        codes = torch.from_numpy(rng.integers(-(2**15), 2**15, (vocabulary, 33)).astype(np.int16))
        codes[:, 0] = 0x2E66
        signs = torch.from_numpy(rng.choice([-1.0, 1.0], (1, 256)).astype(np.float16))
        table = Table("t", vocabulary, ("trellis", torch.int16), 33, ("signs", torch.float16), (1, 256))
        return table, codes, signs
    columns, groups = row_layout(WIDTH, int(kind))
    table = Table.of_integers("t", vocabulary, int(kind), columns, groups, torch.float32)
    low, high, dtype = (-127, 128, np.int8) if kind == "8" else (0, 256, np.uint8)
    codes = torch.from_numpy(rng.integers(low, high, (vocabulary, columns)).astype(dtype))
    return table, codes, torch.from_numpy(rng.uniform(0.01, 0.02, (vocabulary, groups)).astype(np.float32))


def layers(
    monkeypatch: pytest.MonkeyPatch, ranks: int, table: Table, codes: torch.Tensor, scales: torch.Tensor
) -> Iterator[torch.nn.Module]:
    """The loaded layer of each rank in turn."""
    monkeypatch.setattr(stock, "get_tensor_model_parallel_world_size", lambda: ranks)
    monkeypatch.setattr(stock, "tensor_model_parallel_all_reduce", lambda values: values)
    for rank in range(ranks):
        monkeypatch.setattr(stock, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        method = QuantizedEmbeddingMethod("embed_tokens", table)
        layer = stock.VocabParallelEmbedding(table.rows, WIDTH, quant_config=_OneMethod(method), prefix="embed_tokens")
        for name, values in ((table.table[0], codes), (table.scales[0], scales)):
            param = getattr(layer, name)
            param.weight_loader(param, values)
        method.process_weights_after_loading(layer)
        yield layer


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("kind", ["8", "4", "row code"])
def test_ranks_hold_the_vocabulary_once_and_add_up_to_it(
    monkeypatch: pytest.MonkeyPatch, vocabulary: int, kind: str
) -> None:
    table, codes, scales = table_of(kind, vocabulary)
    ids = torch.tensor([0, 1, vocabulary // 2, vocabulary - 2, vocabulary - 1])
    wanted = embedding_reference(ids, codes, scales, WIDTH, torch.float32)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
    if multiplies := vocabulary <= 49152:
        products = x @ embedding_reference(torch.arange(vocabulary), codes, scales, WIDTH, torch.float32).T
    for ranks in (1, 2, 3, 8):
        padded = stock.pad_vocab_size(vocabulary, 64)
        if padded % ranks:
            continue
        total, held, columns = torch.zeros(len(ids), WIDTH), 0, []
        for layer in layers(monkeypatch, ranks, table, codes, scales):
            total += layer(ids)
            held += layer.shard_indices.num_org_elements
            columns.append(layer.quant_method.apply(layer, x) if multiplies else None)
        assert held == vocabulary
        assert torch.equal(total, wanted)
        if multiplies:
            logits = torch.cat(columns, dim=1)
            assert logits.shape == (2, padded) and not logits[:, vocabulary:].any()
            torch.testing.assert_close(logits[:, :vocabulary], products, rtol=1e-4, atol=1e-4)
