"""KV cache by layer kind and cache type, held against vLLM's own arithmetic where it is installed."""

from typing import Any

import pytest

from vllm_exl3.plan.cache import cache_capacity, request_bytes, token_bytes, unsupported
from vllm_exl3.plan.layers import CacheLayer, cache_layers

LLAMA = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
         "num_key_value_heads": 8}  # fmt: skip
V3 = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512,
      "qk_rope_head_dim": 64}  # fmt: skip
NEXT = {"model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}  # fmt: skip
GEMMA = {"model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4,
         "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512}  # fmt: skip
NEMOTRON = {"model_type": "nemotron_h", "num_hidden_layers": 8, "hybrid_override_pattern": "M-M*ME-*",
            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128,
            "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (LLAMA, {"full": 32}),
        ({**LLAMA, "sliding_window": 4096}, {"window": 32}),
        ({**LLAMA, "sliding_window": 4096, "use_sliding_window": False}, {"full": 32}),
        ({**LLAMA, "layer_types": ["sliding_attention", "full_attention"] * 16, "sliding_window": 64},
         {"window": 16, "full": 16}),
        ({**LLAMA, "layer_types": ["chunked_attention"] * 24 + ["full_attention"] * 8, "attention_chunk_size": 8192},
         {"window": 24, "full": 8}),
        (GEMMA, {"window": 22, "full": 4}),
        ({"text_config": GEMMA, "vision_config": {}}, {"window": 22, "full": 4}),
        (V3, {"latent": 61}),
        (NEXT, {"state": 36, "full": 12}),
        (NEMOTRON, {"state": 3, "none": 3, "full": 2}),
        ({**LLAMA, "model_type": "gemma3n_text", "num_kv_shared_layers": 10}, {"full": 22, "none": 10}),
    ],
)  # fmt: skip
def test_layers_are_told_apart(config: dict[str, Any], kinds: dict[str, int]) -> None:
    found = cache_layers(config)
    assert not found.unknown
    assert {kind: sum(layer.kind == kind for layer in found.layers) for kind in kinds} == kinds
    assert sum(kinds.values()) == len(found.layers)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**V3, "model_type": "deepseek_v4"}, "compressed"),
        ({**LLAMA, "model_type": "kimi_linear"}, "KDA"),
        ({**LLAMA, "layer_types": ["full_attention", "butterfly"] * 16}, "butterfly"),
        ({**NEMOTRON, "mamba_head_dim": None}, "mamba"),
        ({"model_type": "llama"}, "num_hidden_layers"),
        ({"model_type": "llama", "num_hidden_layers": 10**15}, "num_hidden_layers"),
        ({"model_type": "llama", "num_hidden_layers": 2}, "heads"),
        ({"num_hidden_layers": "many", "layer_types": 3}, "num_hidden_layers"),
    ],
)
def test_what_is_not_modelled_is_named(config: dict[str, Any], said: str) -> None:
    assert any(said in sentence for sentence in cache_layers(config).unknown)


@pytest.mark.parametrize(
    ("config", "cache_type", "ranks", "nbytes"),
    [
        (LLAMA, "auto", 1, 32 * 8 * 2 * 128 * 2),
        (LLAMA, "fp8", 1, 32 * 8 * 2 * 128),
        (LLAMA, "int4_per_token_head", 1, 32 * 8 * (128 + 8)),
        (LLAMA, "auto", 4, 32 * 2 * 2 * 128 * 2),
        (LLAMA, "auto", 16, 32 * 1 * 2 * 128 * 2),  # eight heads, copied
        (V3, "auto", 8, 61 * 576 * 2),
        (V3, "fp8", 1, 61 * 576),
        ({**V3, "index_topk": 2048, "index_head_dim": 128}, "fp8", 1, 61 * (576 + 132)),
        (NEXT, "auto", 1, 12 * 2 * 2 * 256 * 2),
    ],
)
def test_bytes_of_a_token(config: dict[str, Any], cache_type: str, ranks: int, nbytes: int) -> None:
    assert sum(token_bytes(layer, cache_type, ranks) for layer in cache_layers(config).layers) == nbytes


def test_int4_takes_what_the_attention_package_stores() -> None:
    pytest.importorskip("torch")
    from vllm_exl3.attention.layout import content_bytes

    for size in (64, 80, 128, 256, 512):
        assert token_bytes(CacheLayer("full", kv_heads=1, head_dim=size), "int4_per_token_head") == content_bytes(size)


def test_latent_attention_has_no_int4_cache() -> None:
    assert "MLA" in str(unsupported("int4_per_token_head", cache_layers(V3).layers))
    assert unsupported("int4_per_token_head", cache_layers(LLAMA).layers) is None
    assert "expected one of" in str(unsupported("nvfp4", cache_layers(LLAMA).layers))


def test_a_window_stops_growing() -> None:
    layers = cache_layers({**LLAMA, "sliding_window": 1024}).layers
    short, long, longer = (request_bytes(layers, "auto", length, chunk=512) for length in (1024, 8192, 1 << 20))
    assert short < long == longer
    assert long == (-(-(1023 + 512) // 16) + 1) * 16 * 32 * 8 * 2 * 128 * 2


def test_states_take_pages_whatever_the_length() -> None:
    """vLLM makes attention's pages as large as a state; a request holds two states of each layer that has them."""
    layers = cache_layers(NEXT).layers
    state = (3 * (2 * 16 * 128 + 32 * 128) + 32 * 128 * 128) * 2
    one = request_bytes(layers, "auto", 1)
    per_token = 2 * 2 * 256 * 2
    page = -(-state // (16 * per_token)) * 16 * per_token
    assert one == (2 * 36 + 12) * page and request_bytes(layers, "auto", page // per_token) == one


@pytest.mark.parametrize("cache_type", ["auto", "fp8", "int4_per_token_head"])
@pytest.mark.parametrize(
    "config", [LLAMA, GEMMA, NEXT, {**LLAMA, "sliding_window": 1024}], ids=["full", "gemma3", "next", "window"]
)
def test_capacity_and_requests_agree(config: dict[str, Any], cache_type: str) -> None:
    layers, length = cache_layers(config).layers, 32768
    one = request_bytes(layers, cache_type, length)
    found = cache_capacity(layers, cache_type, 3 * one, length)
    assert found.requests == 3 and found.tokens == 3 * length and found.longest == length
    less = cache_capacity(layers, cache_type, one - 1, length)
    assert less.requests < 1 and less.longest < length
    assert request_bytes(layers, cache_type, less.longest) <= one - 1
    assert cache_capacity(layers, cache_type, 0, length).longest == 0


def _vllm_spec(layer: CacheLayer, cache_type: str, block: int, page: int) -> Any:
    torch = pytest.importorskip("torch")
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    dtype = {"auto": torch.bfloat16, "fp8": torch.uint8}[cache_type]
    if layer.kind == "latent":
        return interface.MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=layer.latent, dtype=dtype)
    if layer.kind == "state":
        return interface.MambaSpec(
            block_size=block, shapes=((layer.state,),), dtypes=(torch.uint8,), page_size_padded=page,
            mamba_cache_mode="align", num_prefill_checkpoint_blocks=layer.states - 2,
        )  # fmt: skip
    common = {"block_size": block, "num_kv_heads": layer.kv_heads, "head_size": layer.head_dim, "dtype": dtype}
    if layer.kind == "window":
        return interface.SlidingWindowSpec(**common, sliding_window=layer.window)
    return interface.FullAttentionSpec(**common)


@pytest.mark.parametrize("cache_type", ["auto", "fp8"])
@pytest.mark.parametrize(
    "config",
    [LLAMA, GEMMA, {**LLAMA, "sliding_window": 1024}, V3, NEXT, {**NEXT, "mamba_ssm_dtype": "float32"}, NEMOTRON],
    ids=["full", "gemma3", "window", "latent", "delta net", "delta net in float32", "mamba2"],
)
def test_vllm_groups_layers_and_counts_pages_alike(config: dict[str, Any], cache_type: str) -> None:
    from types import SimpleNamespace

    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    layers, length, chunk = cache_layers(config).layers, 8192, 2048
    block = 16
    if state := max(layer.state for layer in layers):  # as vLLM raises the block of such models
        block = 16 * -(-state // (16 * max(token_bytes(layer, cache_type) for layer in layers)))
    page = block * max(token_bytes(layer, cache_type) for layer in layers)
    specs = {str(index): _vllm_spec(layer, cache_type, block, page) for index, layer in enumerate(layers)
             if layer.kind != "none"}  # fmt: skip
    groups = (
        utils._get_kv_cache_groups_uniform_page_size(specs)
        if len({layer.kind for layer in layers}) > 1
        else utils._get_kv_cache_groups_uniform_spec(specs)
    )
    settings = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=length),
        cache_config=SimpleNamespace(mamba_cache_mode="align"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        max_in_flight_tokens=chunk,
    )
    size = max(len(group.layer_names) for group in groups)
    total = sum(group.kv_cache_spec.max_memory_usage_bytes(settings) for group in groups) * size
    assert total == request_bytes(layers, cache_type, length, chunk=chunk)
