"""vLLM's own calls, from the metadata builder to the output, on caches in vLLM's layouts, while requests grow."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from tests.attention.cases import DEVICE, DTYPE, UNPACKED_TOLERANCE, error
from tests.attention.test_prefill import flash_attention
from vllm_exl3.attention import dispatch, native
from vllm_exl3.attention.layout import content_bytes
from vllm_exl3.attention.notes import note_once, say_once
from vllm_exl3.attention.reference import attention_reference
from vllm_exl3.attention.shape import KernelShape
from vllm_exl3.ops import backends
from vllm_exl3.serving import kv
from vllm_exl3.serving.metrics_shared import FALLBACKS

PACK = Path(__file__).parents[1] / "data" / "packs" / "llama_tied-3.0-mul1"
HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 64, 16
VLLMS_OWN = ("int4_attention", "vllm", "Attention")


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    return EngineArgs(
        model=str(PACK), skip_tokenizer_init=True, max_model_len=256, dtype="float32"
    ).create_engine_config()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_INT4_DECODE", "32,2,16")
    monkeypatch.setattr(dispatch, "measured_prefill_shape", lambda size: KernelShape(16, 32, 2, None, 2))
    monkeypatch.setattr(dispatch, "_MIDDLE_CONTEXT", 32)
    monkeypatch.setattr(dispatch, "_LONG_WORK", 64.0 * 70)
    monkeypatch.setattr(kv, "flash_attention", lambda: flash_attention)


@contextlib.contextmanager
def implementation(vllm_config: Any, **options: Any) -> Iterator[Any]:
    arguments = {
        "num_heads": HEADS,
        "head_size": SIZE,
        "scale": 0.125,
        "num_kv_heads": KV_HEADS,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "int4_per_token_head",
    }
    with set_current_vllm_config(vllm_config):
        yield kv.Int4AttentionBackend.get_impl_cls()(**{**arguments, **options})


def metadata(vllm_config: Any, lengths: list[int], counts: list[int], table: torch.Tensor, slots: torch.Tensor) -> Any:
    spec = FullAttentionSpec(
        block_size=PAGE,
        num_kv_heads=KV_HEADS,
        head_size=SIZE,
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.INT4_PER_TOKEN_HEAD,
    )
    builder = kv.Int4AttentionBackend.get_builder_cls()(spec, ["layer"], vllm_config, torch.device(DEVICE))
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        num_reqs=len(counts),
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=slots,
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
    )
    return builder.build(0, common)


@pytest.mark.parametrize(("inside", "capturing"), [(False, False), (True, True)])
def test_requests_grow(vllm_config: Any, inside: bool, capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    # There are no layers to ask.
    monkeypatch.setattr(
        "vllm.v1.attention.backends.triton_attn.get_num_attention_heads_from_layers", lambda *_: HEADS, raising=False
    )
    generator = torch.Generator().manual_seed(int(inside))
    shape = (24, PAGE, KV_HEADS, content_bytes(SIZE)) if inside else (24, KV_HEADS, PAGE, content_bytes(SIZE))
    cache = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(DEVICE)
    cache = cache.transpose(1, 2) if inside else cache
    table = torch.randperm(24, generator=generator).int().view(2, 12).to(DEVICE)
    lengths, written = [0, 0], torch.zeros(2)
    layer = SimpleNamespace()
    with implementation(vllm_config) as impl:
        profile = torch.ones(4, HEADS, SIZE, dtype=DTYPE, device=DEVICE)
        assert not impl.forward(layer, profile, profile, profile, cache, None, profile).any()
        # A chunk, the next one beside another prompt, a short tail over a long context, drafts, one token each.
        for counts in ([30, 0], [70, 12], [20, 3], [2, 40], [1, 1]):
            lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
            positions = [
                (row, length - count + index)
                for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
                for index in range(count)
            ]
            slots = torch.tensor(
                [int(table[row, at // PAGE]) * PAGE + at % PAGE for row, at in positions], device=DEVICE
            )
            # vLLM pads the tensors of a step.
            query, key, value = (
                torch.randn(len(positions) + 3, heads, SIZE, generator=generator).to(DEVICE, DTYPE)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            output = torch.full_like(query, torch.nan)
            meta = metadata(vllm_config, lengths, counts, table, slots)
            impl.do_kv_cache_update(layer, key, value, cache, slots)
            assert impl.forward(layer, query, key, value, cache, meta, output) is output
            starts = [0, counts[0], sum(counts)]
            expected = attention_reference(query[: sum(counts)].cpu(), cache.cpu(), table.cpu(), lengths, starts, 0.125)
            assert error(output[: sum(counts)], expected) <= UNPACKED_TOLERANCE, counts
            assert output[sum(counts) :].isnan().all()
            written += torch.tensor(counts)
    assert written.tolist() == lengths


def test_what_is_not_served_is_refused(vllm_config: Any) -> None:
    for options, named in (
        ({"chunk_lookback": 1, "sliding_window": 64}, "chunked"),
        ({"head_size": 60}, "multiple of 8"),
    ):
        with pytest.raises(NotImplementedError, match=named), implementation(vllm_config, **options):
            pass
    with implementation(vllm_config) as impl:
        cache = torch.zeros(2, KV_HEADS, PAGE, content_bytes(SIZE), dtype=torch.uint8, device=DEVICE)
        x = torch.zeros(1, HEADS, SIZE, device=DEVICE)
        for causal, rswa, named in (
            (False, None, "causal"),
            (torch.ones(1), None, "causal"),
            (True, 1, "sliding-window"),
        ):
            meta = SimpleNamespace(causal=causal, rswa_prefix_lens=rswa)
            with pytest.raises(NotImplementedError, match=named):
                impl.forward(None, x, x, x, cache, meta, x)


def test_other_cache_types_are_vllms_own(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ALiBi over int4, which counts as a fallback."""
    monkeypatch.setattr(kv.TritonAttentionImpl, "forward", lambda self, *arguments: None)
    x = torch.zeros(1, HEADS, SIZE, device=DEVICE)
    for options, counted in (({"kv_cache_dtype": "auto"}, {}), ({"alibi_slopes": [0.5] * HEADS}, {VLLMS_OWN: 1})):
        backends.reset_calls()
        with implementation(vllm_config, **options) as impl:
            assert impl._int4 is None
            for meta in (None, SimpleNamespace()):
                impl.forward("layer", x, x, x, "cache", meta, x)
        assert backends.calls() == counted


def test_bidirectional_tokens_go_to_vllms_kernel(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    backends.reset_calls()
    monkeypatch.setattr(kv.TritonAttentionImpl, "forward", lambda self, *arguments: called.append(arguments))
    with implementation(vllm_config) as impl:
        meta = SimpleNamespace(causal=True, rswa_prefix_lens=None, mm_prefix_range_tensor=torch.zeros(1, 1, 2))
        x = torch.zeros(1, HEADS, SIZE, device=DEVICE)
        impl.forward("layer", x, x, x, "cache", meta, x)
    assert called[0][0] == "layer" and called[0][5] is meta
    assert backends.calls() == {VLLMS_OWN: 1} and "vllm" in FALLBACKS


@pytest.mark.parametrize(
    ("cut", "reason", "level"),
    [
        ("32,2,16", "as the settings ask", logging.INFO),
        ("auto", "cuda:0 has no compiler", logging.WARNING),
    ],
)
def test_a_layer_that_the_cuda_kernels_do_not_decode_is_said(
    cut: str,
    reason: str,
    level: int,
    vllm_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("VLLM_EXL3_INT4_DECODE", cut)
    monkeypatch.setattr(native, "unavailable", lambda device: "cuda:0 has no compiler")
    say_once.cache_clear()
    note_once.cache_clear()
    x = torch.ones(1, HEADS, SIZE, dtype=DTYPE, device=DEVICE)
    with caplog.at_level(logging.INFO, "vllm.exl3"):
        for _ in range(2):  # layers
            with implementation(vllm_config) as impl:
                impl.forward(None, x, x, x, None, None, x)
    said = [record for record in caplog.records if "Triton kernel decodes" in record.getMessage()]
    assert [record.levelno for record in said] == [level] and said[0].getMessage().endswith(f"CUDA kernels: {reason}")
