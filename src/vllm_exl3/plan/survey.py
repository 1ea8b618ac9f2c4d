"""`survey`: everything `vllm-exl3 inspect` shows of a pack, as plain data that JSON can carry."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_exl3.pack.check import find_faults, find_warnings
from vllm_exl3.pack.claims import body_and_head, mean_bits
from vllm_exl3.pack.metadata import architectures
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.skip import RULES, classify
from vllm_exl3.pack.stored import StoredLinear, StoredRowTable, StoredScaledTable, StoredTensor
from vllm_exl3.pack.support import unserved
from vllm_exl3.plan.as_data import CARDS, card_line
from vllm_exl3.plan.module_kinds import module_kinds
from vllm_exl3.plan.parallel import Degree, expert_parallel, tensor_parallel
from vllm_exl3.plan.shapes import input_width, output_width

__all__ = ["survey"]

DECLARED = (
    "quant_method",
    "version",
    "bits",
    "head_bits",
    "mtp_bits",
    "vision_bits",
    "codebook",
    "out_scales",
    "calibration",
    "scope",
)
"""Metadata that is shown as declared, whatever the headers say."""

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")
_SAMPLES = 8


def survey(pack: Pack) -> dict[str, Any]:
    """Describe a pack that could be opened; its faults and warnings are part of the description."""
    body, head = body_and_head(pack)
    return {
        "source": pack.source,
        "commit": pack.commit,
        "architectures": architectures(pack.config),
        "model_type": pack.config.get("model_type"),
        "declared": {key: pack.quantization[key] for key in DECLARED if key in pack.quantization},
        "files": len(pack.files),
        "tensors": len(pack.tensors),
        "bytes": pack.nbytes,
        "average_bits": {"body": _mean(body), "head": _mean(head)},
        "codebooks": _histogram(pack.linears.values(), lambda linear: linear.codebook.label),
        "bits": _histogram(pack.linears.values(), lambda linear: f"{linear.bits:g}"),
        "module_kinds": [
            {"kind": kind.name, "modules": kind.modules, "weights": kind.weights, "bytes": kind.nbytes,
             "bits": round(kind.bits, 3)}
            for kind in module_kinds(pack)
        ],
        "shapes": _shapes(pack),
        "dense": _dense(pack),
        "embeddings": [
            {"module": table.key, "format": _table_format(table), "bits": table.bits, "rows": table.rows,
             "groups": table.groups, "bytes": table.nbytes}
            for table in pack.embeddings.values()
        ],
        "ngram_tables": [
            {"module": table.key, "format": f"n-gram rows, K = {table.bits}", "bits": table.bits,
             "rows": table.rows, "shards": len(table.shards), "bytes": table.nbytes}
            for table in pack.ngram_tables.values()
        ],
        "experts": _experts(pack),
        "bytes_by_fate": _accounts(pack),
        "tensor_parallel": _degrees(tensor_parallel(pack)),
        "expert_parallel": _degrees(expert_parallel(pack)),
        "cards": {str(gib): card_line(pack, gib) for gib in CARDS},
        "faults": [fault.parts() for fault in find_faults(pack)],
        "warnings": [str(warning) for warning in find_warnings(pack)],
        "not_served_yet": [refusal.found for refusal in unserved(pack)],
    }  # fmt: skip


def _mean(linears: list[StoredLinear]) -> float | None:
    return round(mean_bits(linears), 3) if linears else None


def _histogram(linears: Iterable[StoredLinear], label: Any) -> list[dict[str, Any]]:
    """Tensors, weights and bytes per label, the most bytes first."""
    rows: dict[str, dict[str, Any]] = {}
    for linear in linears:
        row = rows.setdefault(label(linear), {"label": label(linear), "tensors": 0, "weights": 0, "bytes": 0})
        row["tensors"] += 1
        row["weights"] += linear.in_features * linear.out_features
        row["bytes"] += linear.nbytes
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def _shapes(pack: Pack) -> list[dict[str, Any]]:
    """One row for all linears of one name, size and K; with the width before padding where it differs."""
    groups: defaultdict[tuple[str, int, int, float], list[StoredLinear]] = defaultdict(list)
    for key, linear in pack.linears.items():
        groups[_pattern(key), linear.in_features, linear.out_features, linear.bits].append(linear)
    rows = []
    for (pattern, inputs, outputs, bits), linears in groups.items():
        leaf = pattern.rpartition(".")[2]
        row = {"modules": pattern, "count": len(linears), "in": inputs, "out": outputs, "bits": bits}
        row["model_in"] = input_width(leaf, inputs, pack.config)
        row["model_out"] = output_width(leaf, outputs, pack.config)
        rows.append(row)
    return rows


def _dense(pack: Pack) -> list[dict[str, Any]]:
    """Unquantized modules by name pattern, the most bytes first, with the likely reason."""
    groups: defaultdict[tuple[str, str], list[StoredTensor]] = defaultdict(list)
    for key, tensor in pack.dense.items():
        groups[_pattern(key), tensor.dtype].append(tensor)
    rows = [
        {"modules": pattern, "dtype": dtype, "count": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors),
         "why": _why_dense(pattern, tensors[0])}
        for (pattern, dtype), tensors in groups.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -int(str(row["bytes"])))


def _why_dense(pattern: str, tensor: StoredTensor) -> str:
    leaf = pattern.rpartition(".")[2]
    if len(tensor.shape) < 2:
        return "vector"
    if "embed" in leaf or leaf == "wte":
        return "embedding"
    if leaf in ("gate", "router", "shared_expert_gate"):
        return "router"
    return "left unquantized by the pack"


def _table_format(table: StoredRowTable | StoredScaledTable) -> str:
    return f"row code, K = {table.bits}" if isinstance(table, StoredRowTable) else f"int{table.bits}"


def _experts(pack: Pack) -> dict[str, Any] | None:
    if not pack.experts:
        return None
    linears = [pack.linears[key] for group in pack.experts.values() for roles in group.members.values()
               for key in roles.values()]  # fmt: skip
    groups = pack.experts.values()
    return {
        "layers": len(groups),
        "experts": sorted({len(group.members) for group in groups}),
        "roles": list(dict.fromkeys(role for group in groups for role in group.roles)),
        "bits": dict(sorted(Counter(f"{linear.bits:g}" for linear in linears).items())),
        "bytes": sum(linear.nbytes for linear in linears),
    }


def _accounts(pack: Pack) -> dict[str, Any]:
    accounts = classify(pack)
    reasons = {rule.name: rule.reason for rule in RULES}
    return {
        "served": accounts.served,
        "skipped": [
            {"rule": rule, "reason": reasons[rule], "tensors": len(tensors), "bytes": sum(t.nbytes for t in tensors)}
            for rule, tensors in accounts.skipped.items()
        ],
        "unknown": {
            "tensors": len(accounts.unknown),
            "bytes": sum(tensor.nbytes for tensor in accounts.unknown),
            "names": [tensor.name for tensor in accounts.unknown[:_SAMPLES]],
        },
        "ignored_files": dict(accounts.ignored_files),
    }


def _degrees(degrees: Iterable[Degree]) -> list[Mapping[str, Any]]:
    return [
        {"degree": degree.degree, "legal": degree.blocker is None, "blocker": degree.blocker, "note": degree.note}
        for degree in degrees
    ]


def _pattern(key: str) -> str:
    return _INDEX.sub("*", key)
