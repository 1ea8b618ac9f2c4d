"""Compares what an engine over two GPUs computed with one GPU's and with exllamav3's own logits."""

import json
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["compare", "reference_of"]

Row = dict[str, Any]

_NEAR_TIE = {"int4": 0.1, "gemma2": 0.1}
"""Distance of the two largest log probabilities under which one GPU may have chosen either token, where rounding is
coarser than float16's: a key or value that falls on the other side of a step of int4, and bfloat16."""

_LEAST_TIE, _BOUND, _COARSE_BOUND = 1e-2, 2e-3, 2e-2
"""Elsewhere; and relative errors of logits against one GPU's, in float16 and where rounding is coarser."""


def reference_of(variant: str) -> str:
    """What a variant is compared with."""
    return "one-int4" if "int4" in variant else "one"


def compare(path: Path, work: Path) -> Row:
    """The row of one engine's file.

    Args:
        path: ``work/variant/pack.npz``, with ``.0`` or ``.1`` after the pack for a rank of data parallelism; or
            ``.failed``.
        work: where the reference variant's folder and ``packs`` are.
    """
    variant = path.parent.name
    pack = path.name.removesuffix(path.suffix)
    rank = pack[-1] if pack.endswith((".0", ".1")) and variant.startswith("dp2") else ""
    pack = pack.removesuffix(f".{rank}") if rank else pack
    mode = f"{variant} rank {rank}" if rank else variant
    row: Row = {"kernel": "native", "subject": "whole model", "pack": pack, "mode": mode}
    if path.suffix == ".failed":
        return {**row, "ok": False, "failed": path.read_text(encoding="utf-8")[:300]}
    logits, rest = _read(path)
    row |= {"ok": True, "start_s": rest["seconds"]["start"]}
    calls = sorted({name for state in rest["ranks"] for name in state["calls"]})
    row["kernel"] = "+".join(sorted({name.split()[-1] for name in calls}))
    row["served"] = calls
    golden = work / "packs" / pack / "golden.npz"
    if logits is not None and golden.exists():
        row |= _against_golden(logits, golden)
    reference = work / reference_of(variant) / f"{pack}.npz"
    if reference.exists() and reference != path:
        row |= _against_one(
            logits, rest, *_read(reference), coarse=next((k for k in _NEAR_TIE if k in f"{mode} {pack}"), "")
        )
    row["rank_states"] = [{key: value for key, value in state.items() if key != "calls"} for state in rest["ranks"]]
    return row


def _read(path: Path) -> tuple[np.ndarray | None, dict[str, Any]]:
    with np.load(path) as file:
        return file.get("logits"), json.loads(str(file["rest"]))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _against_golden(logits: np.ndarray, golden: Path) -> Row:
    theirs = np.load(golden)["logits"].astype(np.float64)
    ours = logits[:, : theirs.shape[1]].astype(np.float64)
    p, q = _log_softmax(theirs), _log_softmax(ours)
    return {
        "error": float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)),
        "kl": float((np.exp(p) * (p - q)).sum(-1).mean()),
    }


def _against_one(
    logits: np.ndarray | None, rest: dict[str, Any], one: np.ndarray | None, other: dict[str, Any], *, coarse: str
) -> Row:
    """Errors of logits, and greedy tokens up to the first that one GPU might as well have chosen otherwise."""
    found: Row = {}
    if logits is not None and one is not None:
        errors = np.linalg.norm(logits - one, axis=1) / np.linalg.norm(one, axis=1)
        # the median: at a near tie of experts, a position of a MoE model is served by others
        found |= {"error_to_one": float(np.median(errors)), "worst_error_to_one": float(errors.max())}
    total = equal = 0
    ties = []
    for ours, theirs, gaps in zip(rest["tokens"], other["tokens"], other["gaps"], strict=True):
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(theirs))
        total, equal = total + len(theirs), equal + same
        if same < len(theirs):
            ties.append(gaps[same])
    limit = _NEAR_TIE.get(coarse, _LEAST_TIE)
    bound = _COARSE_BOUND if coarse else _BOUND
    ok = found.get("error_to_one", 0.0) <= bound and max(ties, default=0.0) <= limit
    return {**found, "ok": ok, "tokens": total, "equal_tokens": equal, "gaps_at_differences": ties}
