"""What is served and how: one block in the log per engine start, and the same as data.

Fed by the quantization config while vLLM builds and loads the model; printed once every EXL3 layer
is loaded, by the first rank.
"""

import logging
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from vllm_exl3 import __version__, env
from vllm_exl3.ops import backends
from vllm_exl3.ops.embedding import embedding_reference
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.moe import moe_reference
from vllm_exl3.ops.ngram import ngram_reference
from vllm_exl3.pack.wording import byte_size, counted
from vllm_exl3.processors import measure_others, shortage
from vllm_exl3.serving.offload import compute_device, in_host_memory

if TYPE_CHECKING:
    from vllm_exl3.pack import Pack
    from vllm_exl3.serving.expert_tiers import Placement
    from vllm_exl3.serving.layout import Layout
    from vllm_exl3.serving.moe_layout import ExpertLayout

__all__ = ["Report", "is_first_rank", "reports", "runtime_diagnostics"]

TIERS = {
    "host": "read by the GPU over the bus",
    "cpu": "computed on the CPU in steps of few tokens, else read by the GPU over the bus",
}
"""What is done with experts that are not in GPU memory."""

logger = logging.getLogger("vllm.exl3")
_reports: list["Report"] = []


class Report:
    """Facts about one model in one process."""

    def __init__(self) -> None:
        self.pack: Pack | None = None
        self.layers: dict[str, tuple[str, Layout]] = {}
        self.experts: dict[str, ExpertLayout] = {}
        self.dense: dict[str, str] = {}
        self.embeddings: dict[str, str] = {}
        self._embedding_bytes: dict[str, int] = {}
        self.device: str | None = None
        self.bytes: Counter[str] = Counter()
        self._waiting: set[str] = set()
        self._built: dict[str, weakref.ref[torch.nn.Module]] = {}
        self.shortage: str | None = None
        self.tiers: Placement | None = None

    def add_layer(self, where: str, layer: torch.nn.Module, layout: "Layout") -> None:
        """Note a layer that is built but not loaded yet."""
        self.layers[where] = (type(layer).__name__, layout)
        self._built[where] = weakref.ref(layer)
        self._waiting.add(where)

    def add_experts(self, where: str, layer: torch.nn.Module, layout: "ExpertLayout") -> None:
        """Note a layer's routed experts that are built but not loaded yet."""
        self.experts[where] = layout
        self._built[where] = weakref.ref(layer)
        self._waiting.add(where)

    def add_dense(self, where: str, why: str) -> None:
        """Note a layer that is not EXL3, and how it is served instead."""
        self.dense[where] = why

    def add_decoded(self, where: str, nbytes: int) -> None:
        """Note a module that takes its weight decoded, and the bytes of that on this rank."""
        self.dense[where] = "decoded while loading, since vLLM builds or reads them without quantization"
        self.bytes["decoded weights"] += nbytes

    def embedding_ready(self, where: str, kind: str, nbytes: int) -> None:
        """Note a loaded embedding: how it is coded or that it is dense, and its bytes on this rank."""
        self.embeddings[where] = kind
        self._embedding_bytes[where] = nbytes
        self.bytes["embedding"] = sum(self._embedding_bytes.values())

    def layer_ready(self, where: str, layer: torch.nn.Module, pack: "Pack") -> bool:
        """Note a loaded layer, dense or routed experts.

        Returns:
            Whether it was the last one that was waited for.
        """
        if where not in self._waiting:
            return False
        self._waiting.discard(where)
        self.pack, self.device = pack, compute_device(layer).type
        for name, parameter in layer.named_parameters(recurse=False):
            kind = "trellis" if name.endswith("trellis") else "scales" if name.endswith(("suh", "svh")) else None
            if kind is not None:
                self.bytes[f"{kind} in host memory" if in_host_memory(parameter) else kind] += parameter.nbytes
        if (method := getattr(layer, "quant_method", None)) is not None:
            self.bytes.update(getattr(method, "bytes_beside_parameters", dict)())
        if not all(self._is_left_out(other) for other in self._waiting):
            return False
        for other in self._waiting:
            self.layers.pop(other, None)
            self.experts.pop(other, None)
        self._waiting.clear()
        return True

    def built_experts(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The layers with EXL3 experts that exist, by name."""
        for where in self.experts:
            if (layer := self._built[where]()) is not None:
                yield where, layer

    @property
    def alive(self) -> bool:
        """Whether the model still exists: an engine may end before its process does."""
        return any(layer() is not None for layer in self._built.values())

    def _is_left_out(self, where: str) -> bool:
        """Whether vLLM dropped a built layer before loading: a tower it does not run, a pooling model's head."""
        layer = self._built[where]()
        return layer is None or all(parameter.is_meta for parameter in layer.parameters())

    def publish(self) -> None:
        """Log the block, once a rank group, and keep the report for `runtime_diagnostics`."""
        _reports.append(self)
        if self.device == "cpu":
            self.shortage = shortage(torch.get_num_threads(), measure_others())
        if is_first_rank():
            logger.info("%s", self.text())

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        histogram: dict[str, int] = defaultdict(int)
        codebooks: Counter[str] = Counter()
        classes: Counter[str] = Counter()
        for layer_class, layout in self.layers.values():
            classes[layer_class] += 1
            for slot in layout.exl3_slots:
                histogram[f"{slot.linear.bits:g}"] += slot.piece.row_size * slot.piece.column_size
                codebooks[slot.linear.codebook.label] += 1
        for experts in self.experts.values():
            for bits, count in experts.weights_by_bits().items():
                histogram[f"{bits:g}"] += count
            codebooks += experts.codebooks()
        weights = sum(histogram.values())
        return {
            "version": __version__,
            "pack": str(self.pack.source) if self.pack is not None else None,
            "commit": self.pack.commit if self.pack is not None else None,
            "quantizer": self.pack.quantization.get("version") if self.pack is not None else None,
            "codebooks": dict(codebooks),
            "weights_by_bits": dict(sorted(histogram.items(), key=lambda item: float(item[0]))),
            "average_bits": sum(float(k) * n for k, n in histogram.items()) / weights if weights else None,
            "head_bits": self._head_bits(),
            "layer_classes": dict(classes),
            "experts": self._experts(),
            "tiers": self.tiers.as_dict() if self.tiers is not None else None,
            "embeddings": dict(self.embeddings),
            "dense_linears": dict(sorted(self.dense.items())),
            "kernels": self._kernels(),
            "dispatch": self._dispatch(),
            "precision": self._precision(),
            "shortage": self.shortage,
            "bytes": dict(self.bytes),
        }

    def text(self) -> str:
        """The report as the block that an engine start logs."""
        facts = self.as_dict()
        bits = ", ".join(f"{n / 1e6:.1f} M at {k} bits" for k, n in facts["weights_by_bits"].items())
        codebooks = ", ".join(f"{name} ({counted(count, 'tensor')})" for name, count in facts["codebooks"].items())
        classes = ", ".join(f"{count} {name}" for name, count in facts["layer_classes"].items())
        lines = [
            f"vllm-exl3 {facts['version']} serves {facts['pack']}"
            + (f" at {facts['commit'][:12]}" if facts["commit"] else ""),
            f"  quantizer  {_quantizer(facts['quantizer'])}, codebook {codebooks}",
            f"  weights    {bits}; {facts['average_bits']:.2f} on average, "
            + (f"the head {facts['head_bits']:g}" if facts["head_bits"] else "no EXL3 head on this rank"),
            f"  layers     {classes or 'routed experts only'}",
            f"  not EXL3   {_by_reason(facts['dense_linears'])}",
        ]
        for where, kind in facts["embeddings"].items():
            lines.append(f"  table      {where}: {kind}, {byte_size(self._embedding_bytes[where])}")
        if experts := facts["experts"]:
            mixed = ", ".join(f"K {bits}: {share:.0%}" for bits, share in experts["weights_by_bits"].items())
            held = "" if experts["local"] == experts["total"] else f", {experts['local']} of them on this rank"
            lines.append(
                f"  experts    {experts['total']} in each of {counted(experts['layers'], 'layer')}{held}; {mixed}"
            )
            if facts["tiers"] and facts["tiers"]["tier"] != "gpu":
                lines.append(f"  tiers      {_tiers(facts['tiers'])}")
        for op, kernel in facts["kernels"].items():
            declined = "; ".join(f"{name}: {reason}" for name, reason in kernel["declined"].items())
            lines.append(
                f"  {op:<10} {kernel['backend']} on {kernel['device']}" + (f" ({declined})" if declined else "")
            )
        if facts["dispatch"]:
            lines.append(f"  dispatch   {facts['dispatch']}")
        lines += [f"  precision  {line}" for line in facts["precision"]]
        if facts["shortage"]:
            lines.append(f"  processors {facts['shortage']}")
        memory = ", ".join(f"{name} {byte_size(size)}" for name, size in facts["bytes"].items())
        lines.append(f"  memory     {memory} on this rank")
        return "\n".join(lines)

    def _head_bits(self) -> float | None:
        for where, (_, layout) in self.layers.items():
            if where.rpartition(".")[2] == "lm_head":
                return layout.exl3_slots[0].linear.bits
        return None

    def _experts(self) -> dict[str, Any]:
        if not self.experts:
            return {}
        histogram: Counter[float] = Counter()
        for layout in self.experts.values():
            histogram += layout.weights_by_bits()
        weights = sum(histogram.values())
        return {
            "layers": len(self.experts),
            "total": max(layout.total for layout in self.experts.values()),
            "local": max(len(layout.local) for layout in self.experts.values()),
            "weights_by_bits": {f"{bits:g}": count / weights for bits, count in sorted(histogram.items())},
        }

    def _kernels(self) -> dict[str, Any]:
        if self.device is None:
            return {}
        references = {"linear": linear_reference} if self.layers else {}
        references |= {"moe": moe_reference} if self.experts else {}
        kinds = {kind.split()[0].rstrip(",") for kind in self.embeddings.values()}
        references |= {"embedding": embedding_reference} if kinds - {"dense", "n-gram"} else {}
        references |= {"ngram": ngram_reference} if "n-gram" in kinds else {}
        choices = {op: backends.select(op, self.device, reference) for op, reference in references.items()}
        return {
            op: {"backend": choice.backend.name, "device": self.device, "declined": choice.declined}
            for op, choice in choices.items()
        }

    def _dispatch(self) -> str | None:
        """Where it comes from which native kernel of linears serves how many tokens, on a GPU."""
        if self.device != "cuda" or not self.layers:
            return None
        if backends.select("linear", self.device, linear_reference).backend.name != "native":
            return None
        from vllm_exl3.cuda import dispatch, runtime

        here = runtime.device(torch.cuda.current_device())
        return dispatch.origin(here.limits.architecture, here.name)

    def _precision(self) -> list[str]:
        """What fast arithmetic serves, where it was asked for."""
        if self.device is None or env.PRECISION.get() == "default":
            return []
        experts = ["fast was asked for; routed experts have no such mode"] if self.experts else []
        if not self.layers:
            return experts
        backend = backends.select("linear", self.device, linear_reference).backend
        if self.device != "cuda" or backend.name != "native":
            refusal = f"fast was asked for; {backend.name} on {self.device}, which serves linears, has no such mode"
            return [refusal, *experts]
        from vllm_exl3.cuda.precision import summary

        return [*summary([layout.shards for _, layout in self.layers.values()]), *experts]


def reports() -> list[Report]:
    """The reports of the models that this process has loaded, oldest first."""
    return list(_reports)


def runtime_diagnostics() -> dict[str, object]:
    """Reports of the models loaded in this process, and how often each kernel path has run."""
    calls = [
        {"op": op, "backend": backend, "layer_class": layer_class, "calls": count}
        for (op, backend, layer_class), count in sorted(backends.calls().items())
    ]
    return {"version": __version__, "models": [report.as_dict() for report in _reports], "calls": calls}


def _quantizer(version: object) -> str:
    """Who wrote the pack: exllamav3 states its bare version, others put their name before theirs."""
    text = "" if version is None else str(version)  # whatever the JSON holds in its place
    return f"exllamav3 {text}" if text[:1].isdigit() else text or "unknown"


def _tiers(placement: Mapping[str, Any]) -> str:
    """Where routed experts are, in a sentence."""
    fewest, most = placement["resident_experts"]
    kept = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return (
        f"{byte_size(placement['gpu_bytes'])} of experts' trellises in GPU memory, {kept} experts in each layer "
        f"({placement['chosen_by']}; {placement['budget']}); {byte_size(placement['host_bytes'])} in host memory, "
        f"{TIERS[placement['tier']]}"
    )


def _by_reason(dense: Mapping[str, str], limit: int = 4) -> str:
    """Layers that are not EXL3, by how they are served."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for where, why in dense.items():
        groups[why].append(where)
    parts = []
    for why, names in groups.items():
        more = f" and {len(names) - limit} more" if len(names) > limit else ""
        parts.append(f"{why}: {', '.join(names[:limit])}{more}")
    return "; ".join(parts) or "none"


def is_first_rank() -> bool:
    """Whether this process speaks for all ranks."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
