"""Advice for a pack that does not fit, and the command that starts one that does."""

import shlex
from collections.abc import Iterator

from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.skip import main_layers
from vllm_exl3.pack.stored import StoredTensor
from vllm_exl3.pack.wording import byte_size, counted
from vllm_exl3.plan.cache import CACHE_TYPES
from vllm_exl3.plan.parallel import DEGREES, tensor_parallel
from vllm_exl3.plan.placement import EXPERT_PARAMETERS
from vllm_exl3.plan.serving_plan import Plan, with_changes

__all__ = ["advice", "command", "environment"]

_LEAST_LENGTH = 256
_INT8 = 1.01
"""Bytes of a weight in an int8 table: one, and a scale a row."""


def command(pack: Pack, plan: Plan, revision: str | None = None) -> list[str]:
    """The words of the ``vllm serve`` command; `environment` has the variables that go before it."""
    wish = plan.wish
    words = ["vllm", "serve", pack.source]
    if revision is not None and pack.commit is not None:
        words += ["--revision", revision]
    if wish.ranks > 1:
        words += ["--tensor-parallel-size", str(wish.ranks)]
    if wish.stages > 1:
        words += ["--pipeline-parallel-size", str(wish.stages)]
    if wish.whole_experts:
        words += ["--enable-expert-parallel"]
    words += ["--max-model-len", str(plan.length)]
    if wish.cache_type != "auto":
        words += ["--kv-cache-dtype", wish.cache_type]
    if wish.seqs is not None:
        words += ["--max-num-seqs", str(wish.seqs)]
    words += ["--gpu-memory-utilization", f"{wish.utilization:g}"]
    if plan.offloaded:
        most = max(plan.ranks, key=lambda rank: rank.placement.offload_gib).placement
        words += ["--offload-backend", "uva", "--cpu-offload-gb", f"{most.offload_gib:g}"]
        if all(rank.placement.experts_only for rank in plan.ranks if rank.placement.offload_gib):
            words += ["--cpu-offload-params", *EXPERT_PARAMETERS]
    return words


def environment(plan: Plan) -> dict[str, str]:
    """Variables that the command needs."""
    found = {}
    if plan.wish.stages > 1 and len(set(plan.wish.gpu_bytes)) > 1:
        found["VLLM_PP_LAYER_PARTITION"] = ",".join(str(rank.layers) for rank in plan.ranks)
    return found


def shell(pack: Pack, plan: Plan, revision: str | None = None) -> str:
    """The command as a line for a shell."""
    before = [f"{name}={value}" for name, value in environment(plan).items()]
    return " ".join([*before, shlex.join(command(pack, plan, revision))])


def advice(pack: Pack, plan: Plan) -> Iterator[str]:
    """Changes that make it fit, the least loss first; none where the plan fits. Each takes a plan or more to find."""
    if plan.fits:
        return
    if plan.blocker is not None:
        if plan.wish.stages > main_layers(pack.config) > 0:
            yield f"use fewer GPUs, or a larger --tp: {plan.blocker}"
            return
        yield from _other_degrees(pack, plan)
        return
    if reason := plan.unsupported.get(plan.wish.cache_type):
        yield f"use --kv-cache-dtype auto: {reason}"
        return
    for lines in (_cache_types, _shorter, _fewer_sequences, _embedding, _host_memory, _more_gpus, _fewer_bits):
        yield from lines(pack, plan)


def _other_degrees(pack: Pack, plan: Plan) -> Iterator[str]:
    legal = [str(degree.degree) for degree in tensor_parallel(pack, DEGREES) if degree.blocker is None]
    yield f"use a degree that works, one of {', '.join(legal)}: {plan.blocker}"


def _cache_types(pack: Pack, plan: Plan) -> Iterator[str]:
    """Cheaper caches, in which the same context may fit."""
    for name in CACHE_TYPES[CACHE_TYPES.index(plan.wish.cache_type) + 1 :]:
        if name not in plan.unsupported and with_changes(pack, plan, cache_type=name).fits:
            yield f"--kv-cache-dtype {name}: {plan.length} tokens then fit"


def _shorter(pack: Pack, plan: Plan) -> Iterator[str]:
    low, high = 0, plan.length
    while high - low > _LEAST_LENGTH:
        middle = (low + high) // 2
        low, high = (middle, high) if with_changes(pack, plan, length=middle, host_bytes=None).fits else (low, middle)
    if low >= _LEAST_LENGTH:
        yield f"--max-model-len {low // _LEAST_LENGTH * _LEAST_LENGTH}: that many tokens fit as things are"


def _fewer_sequences(pack: Pack, plan: Plan) -> Iterator[str]:
    """Room for logits and activations goes with the number of sequences."""
    fewer = 16
    if plan.seqs <= fewer:
        return
    changed = with_changes(pack, plan, seqs=fewer)
    if changed.fits:
        freed = sum(plan.ranks[0].workspace.values()) - sum(changed.ranks[0].workspace.values())
        yield f"--max-num-seqs {fewer}: logits of {plan.seqs} sequences take {byte_size(freed)} more"


def _embedding(pack: Pack, plan: Plan) -> Iterator[str]:
    del plan
    for key, tensor in pack.dense.items():
        if _is_table(key, tensor):
            saved = tensor.nbytes - int(tensor.nbytes / 2 * _INT8)
            yield f"vllm-exl3 embed-quant with --bits 8: {key} is dense, and {byte_size(saved)} smaller as int8"


def _is_table(key: str, tensor: StoredTensor) -> bool:
    return key.rpartition(".")[2] in ("embed_tokens", "wte") and len(tensor.shape) == 2 and tensor.dtype != "F32"


def _host_memory(pack: Pack, plan: Plan) -> Iterator[str]:
    """Offloading, with the host memory that it takes."""
    if plan.wish.host_bytes is not None and plan.offloaded:
        pinned = sum(rank.placement.pinned for rank in plan.ranks)
        yield f"more host memory: {byte_size(pinned)} would be pinned, {byte_size(plan.wish.host_bytes)} is given"
        return
    wide = with_changes(pack, plan, host_bytes=1 << 50)
    if wide.fits:
        pinned = sum(rank.placement.pinned for rank in wide.ranks) * plan.wish.ranks
        yield f"--host-memory: {byte_size(pinned)} of it holds what the GPU lacks, at the speed of the bus"


def _more_gpus(pack: Pack, plan: Plan) -> Iterator[str]:
    if len(set(plan.wish.gpu_bytes)) > 1:
        return
    for degree in DEGREES:
        if degree > plan.wish.gpus:
            wider = with_changes(pack, plan, gpus=degree, tensor_parallel=degree, host_bytes=None)
            if wider.fits:
                yield f"{counted(degree, 'GPU')} of this size with --tensor-parallel-size {degree}"
                return


def _fewer_bits(pack: Pack, plan: Plan) -> Iterator[str]:
    """The bit rate at which a pack of the same model would fit."""
    del pack
    short = sum(max(rank.placement.gpu + plan.needed + sum(rank.workspace.values()) - rank.budget, 0)
                for rank in plan.ranks)  # fmt: skip
    body = [layer for rank in plan.ranks for layer in rank.weights.layers]
    weights = sum(layer.weights + layer.expert_weights for layer in body)
    bits = 8 * sum(layer.nbytes + layer.expert_bytes for layer in body) / weights if weights else 0.0
    lower = bits - 8 * short / weights if weights else 0.0
    if short and lower >= 1:
        yield f"a pack of this model with {lower:.1f} bits per weight or fewer (this one has {bits:.1f})"
