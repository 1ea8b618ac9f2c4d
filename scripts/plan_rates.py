"""Writes src/vllm_exl3/plan/rates.json, the measured rates that `vllm-exl3 plan` scales, from benchmarks/results.

Reads committed results only. ``--check`` says whether the file is current, and writes nothing.
"""

import argparse
import json
import statistics
import sys
from typing import Any

from generated import ROOT, write_or_check

RESULTS = ROOT / "benchmarks" / "results"
TARGET = ROOT / "src" / "vllm_exl3" / "plan" / "rates.json"

SMALL, LARGE = (4096, 4096), (8192, 28672)
SHAPE = {"layers": 32, "linears": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)), "head": (4096, 128256)}
"""The model of serve.json: its fused linears at 4 bits, and its head at 6."""
KV_BYTES = 2 * 4 * 256 / 1e3  # kv.json: 4 heads of 256, keys and values, in KB per token of one byte an element
KV_INT4_BYTES = 4 * (256 + 8) / 1e3


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of one committed result file."""
    return list(json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"])


def one(found: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The last row that has these values."""
    return [row for row in found if all(row.get(key) == value for key, value in wanted.items())][-1]


def linear_rates() -> dict[str, dict[str, float]]:
    """Per K: microseconds to start one linear, and per million weights, of one token with mul1 weights."""
    found = [row for row in rows("h200/linear.json") if row["kernel"] == "native" and row["m"] == 1]
    rates = {}
    for bits in (2.0, 3.0, 4.0, 6.0):
        small, large = (
            one(found, codebook="mul1", bits=bits, **{"in": shape[0], "out": shape[1]})["us"]
            for shape in (SMALL, LARGE)
        )
        weights = [shape[0] * shape[1] / 1e6 for shape in (SMALL, LARGE)]
        slope = (large - small) / (weights[1] - weights[0])
        rates[f"{bits:g}"] = {"start_us": round(small - slope * weights[0], 3), "us_per_mweight": round(slope, 5)}
    return rates


def step_rates(linear: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Time of a decoding step of a whole model beside its linears, and the cost of each further sequence."""
    found = [row for row in rows("h200/serve.json") if row["kernel"] == "native" and row["subject"] == "decode"]
    step = {row["m"]: row["us"] for row in found}
    body = sum(_linear_us(linear["4"], *shape) for shape in SHAPE["linears"]) * SHAPE["layers"]
    head = _linear_us(linear["6"], *SHAPE["head"])
    gweights = (sum(a * b for a, b in SHAPE["linears"]) * SHAPE["layers"] + SHAPE["head"][0] * SHAPE["head"][1]) / 1e9
    more = {m: (us - step[1]) / (m - 1) / gweights for m, us in sorted(step.items()) if m > 1}
    return {
        "us_per_layer": round((step[1] - body - head) / SHAPE["layers"], 2),
        "us_per_sequence_gweight": {str(m): round(us, 3) for m, us in more.items()},
    }


def _linear_us(rate: dict[str, float], inputs: int, outputs: int) -> float:
    return rate["start_us"] + rate["us_per_mweight"] * inputs * outputs / 1e6


def prefill_rates() -> dict[str, Any]:
    """Tokens of a prompt: TFLOP/s of a dense model by length, and of routed experts."""
    found = [row for row in rows("h200/serve.json") if row["kernel"] == "native" and row["subject"] == "first_token"]
    weights = sum(a * b for a, b in SHAPE["linears"]) * SHAPE["layers"]
    dense = {str(row["m"]): round(2 * weights * row["m"] / row["us"] / 1e6, 1) for row in found}
    experts = [row["tflops"] for row in rows("h200/moe.json") if row["kernel"] == "native" and row["m"] == 8192]
    return {"dense_tflops": dense, "expert_tflops": round(statistics.median(experts), 1)}


def expert_rates(linear: dict[str, dict[str, float]]) -> dict[str, float]:
    """Microseconds that a layer of routed experts takes beyond the time of its weights, for one token."""
    found = [
        row for row in rows("h200/moe.json") if row["kernel"] == "native" and row["m"] == 1 and len(row["bits"]) == 1
    ]
    extra = []
    for row in found:
        weights = 3 * row["in"] * row["out"] * row["top_k"] / 1e6
        bits = min(linear, key=lambda name: abs(float(name) - row["bits"][0]))
        extra.append(row["us"] - weights * linear[bits]["us_per_mweight"])
    return {"start_us": round(statistics.median(extra), 2)}


def cache_rates() -> dict[str, float]:
    """GB/s at which a decoding step reads the KV cache of one request of 131,072 tokens."""
    found = [row for row in rows("h200/kv.json") if row["subject"] == "decode" and row["batch"] == row["query"] == 1]
    context = 131072
    fp8 = one(found, kernel="fp8_fa3", context=context)["us"]
    int4 = one(found, kernel="int4", context=context)["us"]
    return {"fp8": round(context * KV_BYTES / fp8, 1), "int4_per_token_head": round(context * KV_INT4_BYTES / int4, 1)}


def parallel_rates() -> dict[str, float]:
    """Microseconds of one all-reduce of a decoding step over two GPUs: two a layer."""
    found = [row for row in rows("h200-x2/two.json") if row["subject"] == "kernels" and row["kernel"] == "native"]
    return {"all_reduce_us": round(one(found, ranks=2, m=1, rank=0)["all_reduce_us"] / (2 * SHAPE["layers"]), 2)}


def cpu_rates() -> dict[str, Any]:
    """Microseconds per million weights of one token on the CPU of cpu_linear.json, and its read bandwidth."""
    found = rows("cpu/cpu_linear.json")
    timed = {}
    for bits in (2.0, 3.0, 4.0, 6.0, 8.0):
        options = [row for row in found if row["kernel"] == "native" and row.get("bits") == bits and row["m"] == 1]
        us = [row["us"] for row in options if "us" in row and row["codebook"] == "mul1" and row["out"] == 14336]
        if us:
            timed[f"{bits:g}"] = round(us[-1] / (4096 * 14336 / 1e6), 3)
    meta = json.loads((RESULTS / "cpu/cpu_linear.json").read_text(encoding="utf-8"))["meta"]
    read = next(row["gbps"] for row in found if row["kernel"] == "read_bandwidth")
    return {"us_per_mweight": timed, "gbps": read, "threads": meta["threads"], "cpu": meta["cpu"]}


def rates() -> dict[str, Any]:
    """Everything, with the files that it was read from."""
    linear = linear_rates()
    files = ("h200/linear.json", "h200/serve.json", "h200/moe.json", "h200/kv.json", "h200-x2/two.json",
             "cpu/cpu_linear.json")  # fmt: skip
    return {
        "made_by": "python scripts/plan_rates.py",
        "sources": [f"benchmarks/results/{name}" for name in files],
        "gpu": "H200",
        "linear": linear,
        "step": step_rates(linear),
        "experts": expert_rates(linear),
        "prefill": prefill_rates(),
        "cache_gbps": cache_rates(),
        "parallel": parallel_rates(),
        "cpu": cpu_rates(),
    }


def main() -> int:
    """Write the file, or with ``--check`` compare it."""
    parser = argparse.ArgumentParser(description="Write the measured rates that vllm-exl3 plan scales.")
    parser.add_argument("--check", action="store_true", help="only say whether the file is current")
    return write_or_check({TARGET: json.dumps(rates(), indent=1) + "\n"}, check=parser.parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
