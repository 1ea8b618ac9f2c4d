#!/usr/bin/env python3
"""How far the logits and layers of packs made by exllamav3 are from exllamav3's own, served by vLLM on this CPU.

    python benchmarks/golden.py [PACK ...] [--write]

A pack folder holds ``golden.npz`` (``ids``, ``logits``) and ``golden_linear.npz`` (``key``, ``x``, ``y1``,
``y5``). The bounds are those that the tests assert: relative error 1e-3 on the tiny models and on every probed
layer, KL divergence 1e-4 per position on a real one, whose fp16 noise is larger.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.serving.conftest import DENSE, PACKS, relative_error
from tests.serving.engine import engine, logits_of, model_of
from vllm_exl3.ops import backends
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack import Pack
from vllm_exl3.tools.results import write_results

RESULTS = Path(__file__).parent / "results" / "cpu" / "golden.json"


def model_row(folder: Path) -> dict[str, object]:
    """Serve one pack and compare a whole forward pass."""
    golden = np.load(folder / "golden.npz")
    theirs = golden["logits"].astype(np.float64)
    backends.reset_calls()
    with engine(folder) as llm:
        ours = logits_of(llm, [int(token) for token in golden["ids"]])
        parameters = sum(parameter.numel() for parameter in model_of(llm).parameters())
    served = sorted({backend for op, backend, _ in backends.calls() if op == "linear"})
    log_theirs = torch.log_softmax(torch.from_numpy(theirs), -1)
    log_ours = torch.log_softmax(ours.double()[:, : theirs.shape[1]], -1)
    return {
        "kernel": "+".join(served),
        "pack": folder.name,
        "subject": "logits",
        "positions": len(theirs),
        "parameters": parameters,
        "error": relative_error(ours, theirs),
        "kl": float((log_theirs.exp() * (log_theirs - log_ours)).sum(-1).mean()),
    }


def layer_row(folder: Path) -> dict[str, object]:
    """Compare the probed layer's output for one and for five rows."""
    golden = np.load(folder / "golden_linear.npz")
    pack = Pack.open(folder)
    linear = pack.linears[str(golden["key"])]
    shard = Shard(
        linear.half_bits, int(linear.codebook), linear.in_features, linear.out_features, 0, golden["y5"].shape[1]
    )
    trellis, suh, svh = (
        torch.from_numpy(pack.read(part.name).copy()) for part in (linear.trellis, linear.suh, linear.svh)
    )
    errors = {}
    for rows in (1, 5):
        x = torch.from_numpy(golden["x"][:rows].astype(np.float32))
        ours = torch.ops.vllm_exl3.linear(x, trellis.flatten(), suh, svh, None, pack_shards([shard]), "probe")
        errors[rows] = relative_error(ours, golden[f"y{rows}"].astype(np.float64))
    return {
        "kernel": backends.select("linear", "cpu", lambda: None).backend.name,
        "pack": folder.name,
        "subject": str(golden["key"]),
        "bits": linear.bits,
        "codebook": linear.codebook.label,
        "error": max(errors.values()),
    }


def main() -> None:
    """Measure, print, and write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", nargs="*", type=Path, default=[PACKS / name for name in DENSE])
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS}")
    arguments = parser.parse_args()
    rows = []
    for folder in arguments.packs:
        rows += [model_row(folder), layer_row(folder)]
        for row in rows[-2:]:
            kl = f", KL {row['kl']:.2e}" if "kl" in row else ""
            print(
                f"{row['pack']:>28}  {row['subject']}: relative error {row['error']:.2e}{kl} ({row['kernel']})",
                flush=True,
            )
    if arguments.write:
        names = {folder.name for folder in arguments.packs}
        write_results(
            RESULTS,
            rows,
            machine="cpu",
            command="python benchmarks/golden.py PACK ... --write",
            replaces=lambda row: row["pack"] in names,
        )


if __name__ == "__main__":
    main()
