"""vLLM with int4 KV caches on a GPU: models that are no EXL3 packs, two head sizes, reused and preempted pages."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

from vllm import LLM

from tests.gpu import engines
from tests.gpu.kv_model import simulated_logits, write_llama
from tests.serving.engine import generate, logits_of
from vllm_exl3.attention import dispatch
from vllm_exl3.attention.dispatch import Int4Attention
from vllm_exl3.attention.reference import attention_reference

PACK = Path(__file__).parents[1] / "data" / "packs" / "llama_odd-4.0-mul1"
MODE = "int4_per_token_head"
GENERATOR = torch.Generator().manual_seed(3)
LONG = torch.randint(0, 640, (700,), generator=GENERATOR).tolist()
PROMPTS = [LONG[:40], LONG[100:117], LONG[:333], LONG[:33] + LONG[500:530]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "model")


@contextmanager
def serving(model: Path, **options: Any) -> Iterator[LLM]:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "kv_cache_dtype": MODE,
        "kv_cache_memory_bytes": 64 << 20,
    }
    with engines.serving(model, **{**defaults, **options}) as llm:
        yield llm


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double().cpu() - expected).norm() / expected.norm())


def assert_greedy(model: Path, prompts: list[list[int]], answers: list[list[int]], margin: float) -> None:
    """Every token is the simulation's first choice after the tokens before it, or within `margin` of it."""
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = simulated_logits(model, prompt + answer, True)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        behind = logits.amax(1) - chosen
        assert behind.max() <= margin, behind
        assert (behind == 0).float().mean() > 0.9


def test_the_simulation_is_the_model(llama: Path) -> None:
    with serving(llama, kv_cache_dtype="auto") as llm:
        assert relative(logits_of(llm, LONG), simulated_logits(llama, LONG, False)) <= 2e-3


@pytest.mark.parametrize(("dtype", "most"), [("float32", 3e-2), ("bfloat16", 0.13)])
def test_logits(llama: Path, dtype: str, most: float) -> None:
    expected = simulated_logits(llama, LONG, True)
    # Such a cache is far enough from a 16-bit one to be told from it.
    assert relative(simulated_logits(llama, LONG, False), expected) > 1.4 * most
    with serving(llama, dtype=dtype) as llm:
        assert relative(logits_of(llm, LONG), expected) <= most


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": False, "compilation_config": GRAPHS},
        {"speculative_config": DRAFTS},
        {"speculative_config": DRAFTS, "enforce_eager": False, "compilation_config": GRAPHS},
        {"enable_prefix_caching": True},
        {"max_num_batched_tokens": 64, "max_num_seqs": 4},
    ],
    ids=["eager", "graphs", "drafts", "drafts in graphs", "prefix caching", "chunks of 64"],
)
def test_tokens(llama: Path, options: dict[str, Any]) -> None:
    with serving(llama, **options) as llm:
        for _ in range(2):  # the second time, prefixes are found in the cache
            assert_greedy(llama, PROMPTS, generate(llm, PROMPTS, 24), 0.2)


def test_262144_tokens(tmp_path: Path) -> None:
    """A synthetic model of which a few keys take most weight: tokens with an int4 and a 16-bit cache, each as float64
    has them, hence equal to each other where float64 says so."""
    length, count, margin = 262144, 3, 0.2
    model = write_llama(tmp_path / "model", 2.0, num_hidden_layers=1, max_position_embeddings=length + 64)
    generator = torch.Generator().manual_seed(4)
    context, *tails = (
        torch.randint(0, 640, (size,), generator=generator).tolist() for size in (length - 16, *[16] * 10)
    )
    prompts = [context + tail for tail in tails]
    answers = {}
    for mode in (MODE, "auto"):
        options = {"max_model_len": length + 64, "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 1 << 30}
        with serving(model, dtype="float16", kv_cache_dtype=mode, enable_prefix_caching=True, **options) as llm:
            answers[mode] = generate(llm, prompts, count)
    clear = 0
    for prompt, *both in zip(prompts, *answers.values(), strict=True):
        firsts = []
        for mode, answer in zip(answers, both, strict=True):
            logits = simulated_logits(model, prompt + answer, mode == MODE, "cuda", count + 1)[:-1].cpu()
            behind = logits.amax(1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            assert behind.max() <= margin, (mode, behind)
            top = logits[0].topk(2)
            firsts.append((int(top.indices[0]), float(top.values[0] - top.values[1])))
        if firsts[0][0] == firsts[1][0] and min(firsts[0][1], firsts[1][1]) > margin:
            clear += 1
            assert both[0][0] == both[1][0] == firsts[0][0]
    assert clear >= 2


def test_preempted_requests(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = [LONG[start : start + 150] for start in (0, 100, 200, 300)]
    # 4 requests of 150 + 100 tokens want 64 pages of 16.
    with serving(llama, num_gpu_blocks_override=44, max_model_len=400, enable_prefix_caching=True) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempted = []
        original = scheduler._preempt_request
        scheduler._preempt_request = lambda *args, **kwargs: (preempted.append(1), original(*args, **kwargs))[1]
        assert_greedy(llama, prompts, generate(llm, prompts, 100), 0.2)
        assert preempted


class Checked:
    """Every batch's attention held against float64 over the cache as it is then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.errors: list[float] = []
        self.layers: set[tuple[int, int]] = set()
        self.padded = False
        original = Int4Attention.__call__

        def call(layer: Int4Attention, query: Any, cache: Any, table: Any, lengths: Any, starts: Any, output: Any,
                 sinks: Any, *rest: Any) -> None:  # fmt: skip
            original(layer, query, cache, table, lengths, starts, output, sinks, *rest)
            offsets = starts.tolist()
            kept = offsets[-1]
            expected = attention_reference(
                query[:kept], cache, table, lengths.tolist(), offsets, layer.scale, layer.window or None,
                layer.soft_cap, sinks,
            )  # fmt: skip
            self.errors.append(relative(output[:kept], expected.cpu()))
            self.layers.add((layer.head_size, layer.window))
            self.padded |= cache.stride(0) > cache.shape[1] * cache.shape[2] * cache.shape[3]

        patch.setattr(Int4Attention, "__call__", call)


def gemma4(folder: Path) -> Path:
    config = {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2, "vocab_size": 640,
        "vocab_size_per_layer_input": 640, "hidden_size_per_layer_input": 0, "sliding_window": 64,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 2048, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("heads", [2, 4])
def test_two_head_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    """As gemma-4: local layers of 256 under a window, global ones of 512, in pages of one size."""
    model = gemma4(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_global_key_value_heads": heads}))
    checked = Checked(monkeypatch)
    options = {"dtype": "bfloat16", "load_format": "dummy", "enable_prefix_caching": True}
    with serving(model, **options) as llm:
        first, second = generate(llm, PROMPTS, 12), generate(llm, PROMPTS, 12)
        assert [len(answer) for answer in first + second] == [12] * 8
    assert checked.layers == {(256, 64), (512, 0)}
    assert len(checked.errors) > 40 and max(checked.errors) <= 5e-3


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": True}, {"max_num_batched_tokens": 64}], ids=str)
def test_every_batch_of_a_pack(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(dispatch, "_MIDDLE_CONTEXT", 32)
    monkeypatch.setattr(dispatch, "_LONG_WORK", 64.0 * 80)
    checked = Checked(monkeypatch)
    with serving(PACK, dtype="float16", **options) as llm:
        for _ in range(2):
            generate(llm, PROMPTS, 12)
    assert len(checked.errors) > 40 and max(checked.errors) <= 5e-3


def test_turned_off_vllm_serves_itself(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import _cached_get_attn_backend

    from vllm_exl3.serving.kv_register import register_attention

    monkeypatch.setenv("VLLM_EXL3_INT4_KV", "0")
    AttentionBackendEnum.TRITON_ATTN.clear_override()
    _cached_get_attn_backend.cache_clear()
    try:
        checked = Checked(monkeypatch)
        with serving(llama, dtype="bfloat16") as llm:
            assert relative(logits_of(llm, LONG), simulated_logits(llama, LONG, True)) <= 0.13
        assert not checked.errors
    finally:
        monkeypatch.setenv("VLLM_EXL3_INT4_KV", "1")
        register_attention()
        _cached_get_attn_backend.cache_clear()
