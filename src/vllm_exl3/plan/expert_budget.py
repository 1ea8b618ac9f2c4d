"""GPU memory that is left for routed experts once everything else has its place: ``VLLM_EXL3_EXPERTS=auto``."""

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.wording import byte_size
from vllm_exl3.plan.cache import CACHE_TYPES, request_bytes, unsupported
from vllm_exl3.plan.layers import cache_layers
from vllm_exl3.plan.weights import rank_weights, stage
from vllm_exl3.plan.workspace import workspace

__all__ = ["planned_budget"]

_REMEDY = (
    "Set VLLM_EXL3_EXPERTS=host and VLLM_EXL3_EXPERTS_GPU_GIB=<GiB of experts that stay>; vllm-exl3 plan shows what "
    "else a server needs."
)


def planned_budget(
    pack: Pack,
    *,
    memory: int,
    length: int,
    chunk: int,
    seqs: int,
    cache_type: str,
    cache_bytes: int | None,
    ranks: int,
    scales: int,
    layers: range,
    stages: int,
    where: str,
) -> int:
    """Bytes that a rank has for routed experts, as `serving_plan` counts everything else.

    Args:
        pack: the pack, by its headers.
        memory: bytes that vLLM may take of the GPU.
        length: ``--max-model-len``; the cache holds one request of it.
        chunk: ``--max-num-batched-tokens``.
        seqs: ``--max-num-seqs``.
        cache_type: ``--kv-cache-dtype``.
        cache_bytes: ``--kv-cache-memory-bytes``, which counts instead; None where it is not set.
        ranks: tensor-parallel ranks.
        scales: bytes of this rank's routed experts besides trellises.
        layers: decoder layers of this pipeline stage.
        stages: pipeline stages.
        where: the layer, for errors.

    Raises:
        Exl3PackError: the rest leaves nothing, or what the cache takes is not known.
    """
    weights = max(
        (rank_weights(pack, ranks, rank, whole_experts=True) for rank in {0, ranks - 1}),
        key=lambda part: part.total - part.experts,
    )
    if stages > 1:
        index = 0 if layers.start == 0 else stages - 1 if layers.stop == len(weights.layers) else 1
        weights = stage(weights, layers.start, len(layers), stages=stages, index=index)
    spent = sum(workspace(pack.config, chunk=chunk, seqs=seqs, ranks=ranks, length=length).values())
    if cache_bytes is None:
        cache_bytes = _request(pack, length, chunk, cache_type, ranks, layers if stages > 1 else None, where)
    rest = weights.total - weights.experts + scales
    left = memory - spent - cache_bytes - rest
    if left < 0:
        raise Exl3PackError(
            found=f"{byte_size(memory)} of GPU memory that vLLM may take",
            expected=f"{byte_size(memory - left)} even without routed experts: {byte_size(rest)} of other weights, "
            f"{byte_size(spent)} of workspace, {byte_size(cache_bytes)} of KV cache",
            where=where,
            remedy="Lower --max-model-len or --max-num-batched-tokens, use --kv-cache-dtype fp8, or use more GPUs.",
        )
    return left


def _request(pack: Pack, length: int, chunk: int, cache_type: str, ranks: int, stage: range | None, where: str) -> int:
    """Bytes of cache that one request of full length takes."""
    found = cache_layers(pack.config)
    if found.unknown or cache_type not in CACHE_TYPES or unsupported(cache_type, found.layers):
        reason = found.unknown[0] if found.unknown else f"--kv-cache-dtype {cache_type}"
        raise Exl3PackError(
            found=f"a KV cache whose size is not planned ({reason})",
            expected="one that vllm-exl3 plan knows, since VLLM_EXL3_EXPERTS=auto leaves memory for it",
            where=where,
            remedy=f"{_REMEDY} --kv-cache-memory-bytes does as well.",
        )
    layers = found.layers if stage is None else found.layers[stage.start : stage.stop]
    return request_bytes(layers, cache_type, length, ranks=ranks, chunk=chunk)
