"""vLLM's Triton attention backend with this package's attention where the KV cache is int4_per_token_head.

Registered in place of TRITON_ATTN, the only backend of vLLM 0.30 to 0.33 that takes this cache type; every other cache
type goes to vLLM's own code untouched. Of the backends that vLLM derives from its own Triton backend directly,
``triton_attn_diffkv``, ``triton_flash_attn`` and ``triton_flashinfer`` refuse int4 caches; Whisper's takes them, and
keeps vLLM's int4 attention.
"""

import functools
import logging
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from vllm_exl3.attention.decode import AS_ASKED
from vllm_exl3.attention.dispatch import DECODE_QUERY, HostBatch, Int4Attention, Settings, sort_requests
from vllm_exl3.attention.layout import content_bytes, rotation_block
from vllm_exl3.attention.notes import note_once, say_once
from vllm_exl3.attention.prefill import FlashAttention
from vllm_exl3.attention.rotation import device_signs
from vllm_exl3.attention.write import write_tokens
from vllm_exl3.ops.backends import count_call
from vllm_exl3.serving.kv_contract import mismatches

__all__ = ["Backend", "Int4AttentionBackend", "Int4AttentionImpl", "Int4MetadataBuilder"]

logger = logging.getLogger("vllm.exl3")
_MODE = "int4_per_token_head"


class Int4MetadataBuilder(TritonAttentionMetadataBuilder):
    """vLLM's metadata, with what the host knows of batches that prefill."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TritonAttentionMetadata:
        """See vLLM."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.int4_batch = host_batch(common_attn_metadata)
        return metadata


def host_batch(common: CommonAttentionMetadata) -> HostBatch | None:
    """The batch as the host knows it; None where it only decodes, or where lengths are not known."""
    if common.max_query_len <= DECODE_QUERY:
        return None
    lengths = common.seq_lens_cpu_upper_bound
    if lengths is None:
        say_once("vLLM does not give this batch's lengths on the host: int4 prefill stays on the Triton kernel")
        return None
    requests = common.num_reqs
    return sort_requests(common.query_start_loc_cpu[: requests + 1].tolist(), lengths[:requests].tolist())


class Int4AttentionImpl(TritonAttentionImpl):
    """vLLM's implementation for every cache type but int4."""

    _int4: Int4Attention | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.kv_cache_dtype != _MODE or self.attn_type != AttentionType.DECODER:
            return
        if reason := self._unsupported():
            raise NotImplementedError(
                f"An attention layer uses {reason}, which --kv-cache-dtype {_MODE} does not serve: "
                "use --kv-cache-dtype fp8 or auto."
            )
        if self.alibi_slopes is not None:
            say_once("ALiBi: vLLM's own int4 attention serves these layers (inexact over long contexts, and slow)")
            return
        config = get_current_vllm_config()
        self._max_requests = config.scheduler_config.max_num_seqs
        self._int4 = Int4Attention(
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scale=self.scale,
            window=self.sliding_window[0] + 1 if self.sliding_window[0] >= 0 else 0,
            soft_cap=float(self.logits_soft_cap),
            settings=Settings.from_environment(envs.VLLM_BATCH_INVARIANT),
        )
        note_once("the int4 KV cache is served by this package's attention (docs/kv-cache.md)")

    def _unsupported(self) -> str | None:
        if self.head_size % 8:
            return f"heads of {self.head_size} (a multiple of 8 is wanted)"
        if getattr(self, "chunk_lookback", -1) > -1:
            return "chunked attention"
        return None

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Not with int4: the output is rotated back, then cast."""
        return self._int4 is None and super().fused_output_quant_supported(quant_key)

    def _ensure_scale_caches(self, kv_cache: torch.Tensor) -> None:
        """Views of the scales for vLLM's own kernels, which serve what ours do not.

        vLLM fills all scales when it makes the views; here that may be after tokens were written.
        """
        if self._int4 is None:
            super()._ensure_scale_caches(kv_cache)
            return
        half = kv_cache.shape[-1] // 2
        words = kv_cache.transpose(1, 2)
        self._k_scale_cache = words[..., half - 4 : half].view(torch.float32)[..., 0]
        self._v_scale_cache = words[..., -4:].view(torch.float32)[..., 0]

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See vLLM."""
        int4 = self._int4
        if int4 is None:
            if self.kv_cache_dtype == _MODE and attn_metadata is not None:
                count_call("int4_attention", "vllm", "Attention")
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if attn_metadata is None:
            device_signs(rotation_block(self.head_size), query.device)
            if (reason := int4.decoder.triton_decodes(query.device)) is not None:
                say = note_once if reason == AS_ASKED else say_once
                say(f"the Triton kernel decodes over the int4 KV cache, not the CUDA kernels: {reason}")
            int4.decoder.prepare(query.device)
            int4.reserve(self._max_requests, output)
            return output.fill_(0)
        if not isinstance(attn_metadata.causal, bool) or not attn_metadata.causal:
            raise NotImplementedError(
                f"--kv-cache-dtype {_MODE} serves causal attention only, and this layer is not causal (a draft "
                "model's, perhaps): use --kv-cache-dtype fp8 or auto."
            )
        if attn_metadata.rswa_prefix_lens is not None:
            raise NotImplementedError(f"--kv-cache-dtype {_MODE} does not serve reference sliding-window attention")
        if attn_metadata.mm_prefix_range_tensor is not None:
            say_once("bidirectional image tokens: vLLM's own int4 attention serves such batches")
            count_call("int4_attention", "vllm", "Attention")
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        self._check_cache(kv_cache)
        tokens = attn_metadata.num_actual_tokens
        capturing = torch.cuda.is_current_stream_capturing()
        batch = None if capturing else getattr(attn_metadata, "int4_batch", None)
        int4(
            query[:tokens],
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            attn_metadata.query_start_loc,
            output[:tokens],
            self.sinks,
            attn_metadata.max_query_len,
            batch,
            flash_attention(),
        )
        return output

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See vLLM."""
        if self._int4 is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        self._check_cache(kv_cache)
        write_tokens(key, value, kv_cache, slot_mapping)

    def _check_cache(self, cache: torch.Tensor) -> None:
        wanted = content_bytes(self.head_size)
        if cache.dtype != torch.uint8 or cache.shape[-1] != wanted or cache.shape[1] != self.num_kv_heads:
            raise RuntimeError(
                f"vLLM's {_MODE} cache is {cache.dtype} {tuple(cache.shape)}; expected torch.uint8 "
                f"(pages, {self.num_kv_heads}, tokens a page, {wanted}). VLLM_EXL3_INT4_KV=0 serves it with vLLM's own "
                "kernels."
            )


class Int4AttentionBackend(TritonAttentionBackend):
    """TRITON_ATTN, with this package's attention over int4 caches."""

    forward_includes_kv_cache_update: ClassVar[bool] = False

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """See vLLM."""
        return Int4AttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        """See vLLM."""
        return Int4MetadataBuilder


@functools.cache
def flash_attention() -> FlashAttention | None:
    """vLLM's FlashAttention, 3 on Hopper and 2 elsewhere; None where it does not run."""
    try:
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
    except ImportError as error:
        say_once(f"FlashAttention does not load ({error}): int4 prefill stays on the Triton kernel")
        return None
    version = get_flash_attn_version()
    if version == 4 and is_fa_version_supported(2):
        version = 2  # the fourth takes other arguments
    if version not in (2, 3):
        say_once(f"FlashAttention is version {version}, not 2 or 3: int4 prefill stays on the Triton kernel")
        return None

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_starts: torch.Tensor,
        key_starts: torch.Tensor,
        output: torch.Tensor,
        scale: float,
        causal: bool,
        soft_cap: float,
    ) -> torch.Tensor:
        _, lse = flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            max_seqlen_q=query.shape[0],
            cu_seqlens_q=query_starts,
            max_seqlen_k=key.shape[0],
            cu_seqlens_k=key_starts,
            softmax_scale=scale,
            causal=causal,
            softcap=soft_cap,
            return_softmax_lse=True,
            out=output,
            fa_version=version,
        )
        return lse

    return attend


def _backend() -> type[TritonAttentionBackend]:
    if found := mismatches():
        logger.warning(
            "vllm-exl3: this vLLM's int4 attention is not as expected (%s); vLLM's own kernels serve int4 caches "
            "(inexact over long contexts, and slow)",
            "; ".join(found),
        )
        return TritonAttentionBackend
    return Int4AttentionBackend


Backend = _backend()
"""What TRITON_ATTN resolves to: vLLM's own backend where its internals are not as expected."""
