"""The int4 attention inside vLLM: registration, contract, refusals, and the layouts that vLLM gives caches."""

import dataclasses
import logging
import re
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, SlidingWindowSpec

try:
    from vllm.v1.core.kv_cache_planning import unify_kv_cache_spec_page_size
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import unify_kv_cache_spec_page_size

from tests.serving.conftest import PACKS
from tests.serving.engine import engine
from vllm_exl3.attention.layout import content_bytes
from vllm_exl3.serving import kv, kv_contract, kv_register

MODE = "int4_per_token_head"
OPS = "vllm.v1.attention.ops.int4_per_token_head"
KEEP_OVERRIDES = ("TRITON_ATTN", "CPU_ATTN")


@pytest.fixture
def overrides() -> Any:
    """The registry's overrides, cleared for the test and put back after it."""
    from vllm.v1.attention.backends import registry

    before = dict(registry._ATTN_OVERRIDES)
    for name in KEEP_OVERRIDES:
        AttentionBackendEnum[name].clear_override()
    yield
    registry._ATTN_OVERRIDES.clear()
    registry._ATTN_OVERRIDES.update(before)


@pytest.mark.usefixtures("overrides")
def test_turning_it_off_leaves_vllm_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_INT4_KV", "0")
    kv_register.register_attention()
    assert not any(AttentionBackendEnum[name].is_overridden() for name in KEEP_OVERRIDES)
    monkeypatch.setenv("VLLM_EXL3_INT4_KV", "1")
    kv_register.register_attention()
    assert AttentionBackendEnum.TRITON_ATTN.get_class() is kv.Int4AttentionBackend
    assert AttentionBackendEnum.TRITON_ATTN.get_class().get_name() == "TRITON_ATTN"


@pytest.mark.usefixtures("overrides")
def test_another_plugins_backend_stays(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.v1.attention.backends.registry import register_backend

    register_backend(AttentionBackendEnum.TRITON_ATTN, "other.plugin.Backend")
    with caplog.at_level(logging.WARNING, "vllm.exl3"):
        kv_register.register_attention()
    assert AttentionBackendEnum.TRITON_ATTN.get_path() == "other.plugin.Backend"
    assert "other.plugin.Backend" in caplog.text


@pytest.mark.usefixtures("overrides")
def test_registering_again_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.exl3"):
        kv_register.register_attention()
        kv_register.register_attention()
    assert not caplog.records


def test_the_contract_runs_none_of_vllms_gpu_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a GPU's build of vLLM the transform of a CPU tensor raises.
    monkeypatch.delattr(f"{OPS}.fast_hadamard_transform")
    assert kv_contract.mismatches() == []


def test_this_vllm_is_as_expected() -> None:
    assert kv_contract.mismatches() == []
    assert kv.Backend is kv.Int4AttentionBackend


def _without_field(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [field for field in dataclasses.fields(TritonAttentionMetadata) if field.name != "block_table"]
    monkeypatch.setattr(dataclasses, "fields", lambda owner: fields)


def _other_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv.TritonAttentionImpl, "forward", lambda self, layer, q, k, v: None)


def _other_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        TritonAttentionBackend,
        "customize_spec",
        classmethod(lambda cls, spec: dataclasses.replace(spec, state_content_bytes=144)),
    )


def _other_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{OPS}._get_rht_signs", lambda size, index, device: -torch.ones(size))


def _rotation_that_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> torch.Tensor:
        raise NotImplementedError("Could not run 'x' with arguments from the 'CPU' backend.\nMany lines more.")

    monkeypatch.setattr(f"{OPS}._get_rht_signs", refuse)


def _no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kv.TritonAttentionImpl, "do_kv_cache_update")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_without_field, "lacks .*block_table"),
        (_other_forward, "TritonAttentionImpl.forward takes"),
        (_other_layout, "144 bytes"),
        (_other_rotation, "signs of its Hadamard transform differ"),
        (_rotation_that_needs_a_gpu, r"NotImplementedError: Could not run 'x' .*backend\.\)"),
        (_no_update, "do_kv_cache_update"),
    ],
)
def test_another_vllm_keeps_its_own_kernels(
    change: Any, named: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change(monkeypatch)
    with caplog.at_level(logging.WARNING, "vllm.exl3"):
        assert kv._backend() is TritonAttentionBackend
    assert re.search(named, caplog.text), caplog.text


def test_cpus_refuse() -> None:
    with (
        pytest.raises((ValueError, RuntimeError), match=r"(?i)int4_per_token_head.*(needs a GPU|not)"),
        engine(PACKS / "llama_tied-3.0-mul1", kv_cache_dtype=MODE),
    ):
        pass


def spec(kind: type, heads: int, size: int, **options: Any) -> Any:
    """A layer's cache as vLLM's Triton backend lays it out."""
    plain = kind(
        block_size=16,
        num_kv_heads=heads,
        head_size=size,
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.INT4_PER_TOKEN_HEAD,
        **options,
    )
    return kv.Int4AttentionBackend.customize_spec(plain)


@pytest.mark.parametrize("heads", [(1, 1), (8, 4), (16, 4), (4, 8)])
def test_pages_of_models_with_two_head_sizes(heads: tuple[int, int]) -> None:
    # gemma-4: local layers with heads of 256 under a window, global ones with heads of 512.
    specs = {
        "local": spec(SlidingWindowSpec, heads[0], 256, sliding_window=1024),
        "global": spec(FullAttentionSpec, heads[1], 512),
    }
    assert [layer.page_size_bytes for layer in specs.values()] == [
        16 * heads[0] * content_bytes(256),
        16 * heads[1] * content_bytes(512),
    ]
    unified = unify_kv_cache_spec_page_size(specs)
    sizes = {layer.page_size_bytes for layer in unified.values()}
    assert len(sizes) == 1
    # What the read kernel wants of a page's stride, however it is padded.
    assert sizes.pop() % 8 == 0


class _Layer:
    """As much of an implementation as the functions under test read."""

    head_size, num_kv_heads = 64, 2
    _check_cache = kv.Int4AttentionImpl._check_cache
    _ensure_scale_caches = kv.Int4AttentionImpl._ensure_scale_caches
    _int4 = object()


def test_an_unexpected_cache_is_refused() -> None:
    good = torch.zeros(3, 2, 16, 72, dtype=torch.uint8)
    layer = _Layer()
    layer._check_cache(good)
    for bad in (good.view(torch.int8), good[..., :64], good[:, :1]):
        with pytest.raises(RuntimeError, match=r"expected torch.uint8 \(pages, 2, tokens a page, 72\)"):
            layer._check_cache(bad)


@pytest.mark.parametrize("inside", [False, True])
def test_scale_views_keep_what_is_written(inside: bool) -> None:
    cache = torch.randint(0, 256, (3, 16, 2, 72) if inside else (3, 2, 16, 72), dtype=torch.uint8)
    cache = cache.transpose(1, 2) if inside else cache
    before = cache.clone()
    layer = _Layer()
    layer._ensure_scale_caches(cache)
    assert torch.equal(cache, before)
    for view, at in ((layer._k_scale_cache, 32), (layer._v_scale_cache, 68)):
        assert view.shape == (3, 16, 2)
        assert view[2, 5, 1].view(torch.int32) == cache[2, 1, 5, at : at + 4].clone().view(torch.int32)
