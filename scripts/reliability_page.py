"""Writes docs/reliability.md from benchmarks/results/cpu/fuzz.json and soak.json.

``--record`` first takes what the campaigns of `make fuzz` have counted so far, in .cache/fuzz, into fuzz.json.
"""

import argparse
import json
import sys
from collections import Counter
from typing import Any

from generated import ROOT, write_or_check

PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
GPU_RESULTS = ROOT / "benchmarks" / "results" / "h200"
STATE = ROOT / ".cache" / "fuzz"

HEAD = """# Reliability

Made by `python scripts/reliability_page.py` from `fuzz.json` and `soak.json` in `benchmarks/results/cpu`; do not edit
it by hand. `make fuzz` goes on with the campaigns and `make soak` repeats the load; `--record` takes the counts over.

## Damaged packs and calls

A case is a pack damaged in one or two ways, or a call with arguments that a fuzzer chose. It may end in a clean error,
a warning or the undamaged pack's logits, equal to the bit; anything else is a finding.

| campaign | cases | CPU hours | open findings |
|---|---|---|---|
"""

CALLED = """
By function, from the first {inputs} inputs of seed {seed}. Arguments are valid, at a boundary, or such as the
interface refuses. Buffers end beside pages that may not be touched or lie on a heap that AddressSanitizer watches; a
call that computes is made twice over different garbage, and a sample once more by the scalar instruction set, with
which the result is compared. The driver of launches is the test's own, and counts as refusing where it fails.

| function | computed | refused | compared |
|---|---|---|---|
"""

CALLS = ("computed", "refused", "compared")

FUNCTIONS = {"small": "names, texts, versions"}

LOADED = """
What became of packs that vLLM was to load, by damage. Silent are those whose logits differ without a word: most have
headers that are as they should be.

"""

LOAD = """
## Load

`vllm serve` on a CPU under clients of every kind, bursts and a canary (`benchmarks/soak.py`). The canary is one greedy
prompt of the base model among requests with adapters; its spread is that of the log-probabilities of equal tokens.
(vLLM's own `VLLM_BATCH_INVARIANT=1` needs Triton, which CPUs lack.) "Wrong" counts connections that were closed and
answers of another status than the request earns.

| seconds | requests | stuck | wrong | canaries | answers | spread | memory drift | p99 to first token |
|---|---|---|---|---|---|---|---|---|
"""

GPU_LOAD = """
On one H200, servers as `vllm serve` starts them by default, at once and each under its own clients and bursts
(`benchmarks/gpu_soak.py`, `benchmarks/results/h200/soak.json`). They run under `VLLM_BATCH_INVARIANT=1`, so that every
canary must be equal to the bit. GPU memory is that of all servers together.

| server | seconds | requests | stuck | wrong | canaries | equal | memory drift | GPU drift | p99, first token |
|---|---|---|---|---|---|---|---|---|---|
"""

TAUGHT = """
## Findings and changes

| where | what was found | what changed | test |
|---|---|---|---|
"""

NAMES = {
    "open": "`Pack.open` and `survey` of damaged packs (`tests/fuzz/campaign.py`)",
    "load": "damaged packs through vLLM's loading and one forward pass on a CPU (`tests/fuzz/loader.py`)",
    "abi": "calls of the C++ library under AddressSanitizer and UndefinedBehaviorSanitizer (`tests/fuzz/abi.py`)",
    "guided": "the same, chosen by libFuzzer (`--guided`)",
}

LESSONS = (
    ("open", "a thread for each opened pack took longer than parsing it", "folders are read without threads", ""),
    (
        "open",
        "integers of hundreds of digits in config.json overflowed the plans that `inspect` computes",
        "JSON with integers of more than 128 bits is refused",
        "tests/pack/test_hostile.py",
    ),
    (
        "load",
        "bytes of a norm read as another 16-bit type, silently",
        "layers are compared by dtype, too",
        "tests/pack/test_layers.py",
    ),
    (
        "load",
        "a version in quantization_config that is a number stopped the engine with a TypeError",
        "the report takes any JSON value there",
        "tests/serving/test_report.py",
    ),
    (
        "abi",
        "bit rates beyond 32 bits, crops that overflow, shards of two widths, an index beside ids that nothing checked",
        "the C interface checks every field itself",
        "tests/ops/test_cpu_abi.py",
    ),
    (
        "abi",
        "NaN converted to an integer, and a pointer added to null",
        "what processors do alike is undefined still",
        "tests/fuzz/abi.cpp",
    ),
    (
        "abi",
        "a thread that cannot be started, or memory that runs out in one, ended the process",
        "exceptions stay inside the team that works",
        "tests/ops/test_cpu_abi.py",
    ),
    (
        "abi",
        "a negative number shifted left, in instruction sets that were new since; a program for the GPU whose "
        "arguments or patches go beyond the buffer that they are written to",
        "a set is fuzzed from the day that it is added; programs are checked like any other argument",
        "tests/ops/test_cpu_abi.py",
    ),
    (
        "faults",
        "an error about a path that is no UTF-8 could not be printed",
        "errors are escaped where they are made",
        "tests/faults/test_surroundings.py",
    ),
    (
        "faults",
        "the engine of an API server that was killed went on, with its memory",
        "an engine watches the process that started it",
        "tests/serving/test_parents.py",
    ),
    (
        "soak",
        "two answers of the canary: in a batch with adapters, vLLM's CPU kernels gave the base model the last of them",
        "rows without an adapter are cleared; a canary belongs into every kind of load",
        "tests/serving/test_lora.py",
    ),
)


def _record() -> None:
    """The campaigns' states as a results file."""
    from vllm_exl3.tools.results import write_results

    rows: list[dict[str, Any]] = []
    for campaign, file in (
        ("open", "pack.json"),
        ("load", "loader.json"),
        ("abi", "abi.json"),
        ("guided", "guided.json"),
    ):
        if not (STATE / file).exists():
            continue
        state = json.loads((STATE / file).read_text(encoding="utf-8"))
        row = {"campaign": campaign, "cases": state.get("calls", state["next"]), "cpu_seconds": state["cpu_seconds"]}
        row |= {name: state[name] for name in ("loaded", "inputs", "seed", *CALLS) if name in state}
        rows.append({**row, "findings": len(state["found"]), "ends": state.get("ends", {})})
    write_results(
        RESULTS / "fuzz.json",
        rows,
        machine="cpu",
        command="make fuzz; python scripts/reliability_page.py --record",
        replaces=lambda row: row["campaign"] in {new["campaign"] for new in rows},
    )


def _calls(row: dict[str, Any]) -> str:
    """Calls of the C interface, by function."""
    text = CALLED.format(inputs=f"{row['inputs']:,}", seed=row["seed"])
    for function in row["computed"]:
        counts = (f"{row[kind].get(function, 0):,}" for kind in CALLS)
        text += f"| {FUNCTIONS.get(function, f'`exl3_{function}`')} | {' | '.join(counts)} |\n"
    return text


def _kinds(ends: dict[str, int]) -> str:
    """How loaded packs ended, by kind of damage."""
    columns = ("refused", "vLLM: refused", "warned", "equal", "reported by verify", "not finite", "silent")
    table = "| damage | " + " | ".join(columns) + " |\n" + "|---" * (1 + len(columns)) + "|\n"
    counts: dict[str, Counter[str]] = {}
    for name, count in ends.items():
        damage, _, end = name.partition(": ")
        counts.setdefault(damage, Counter())[end] += count
    for damage, found in sorted(counts.items()):
        cells = " | ".join(str(found[column]) if found[column] else "" for column in columns)
        table += f"| {damage.replace('_', ' ')} | {cells} |\n"
    return table


def page() -> str:
    """The text of docs/reliability.md."""
    rows = {row["campaign"]: row for row in json.loads((RESULTS / "fuzz.json").read_text(encoding="utf-8"))["rows"]}
    text = HEAD
    for campaign, what in NAMES.items():
        if row := rows.get(campaign):
            cases = f"{row['cases']:,}" + (f", of which vLLM loaded {row['loaded']:,}" if "loaded" in row else "")
            text += f"| {what} | {cases} | {row['cpu_seconds'] / 3600:.2f} | {row['findings']} |\n"
    if (row := rows.get("abi")) and "seed" in row:
        text += _calls(row)
    if row := rows.get("load"):
        text += LOADED
        text += _kinds(row["ends"])
    if (RESULTS / "soak.json").exists():
        text += _load(json.loads((RESULTS / "soak.json").read_text(encoding="utf-8")))
    if (GPU_RESULTS / "soak.json").exists():
        text += _gpu_load(json.loads((GPU_RESULTS / "soak.json").read_text(encoding="utf-8")))
    text += TAUGHT
    for where, found, taught, test in LESSONS:
        text += f"| {where} | {found} | {taught} | {f'`{test}`' if test else ''} |\n"
    return text


def _load(results: dict[str, Any]) -> str:
    text, rows = LOAD, results["rows"]
    for row in rows:
        cells = (row["seconds"], f"{row['requests']:,}", row["stuck"], sum(row["wrong"].values()))
        cells += (
            row["canaries"],
            row["canary_answers"],
            f"{row['canary_spread']:.1e}",
            f"{100 * row['memory_drift']:.2f} %",
            f"{row['first_token_p99_s']} s",
        )
        text += "| " + " | ".join(map(str, cells)) + " |\n"
    requests, hours = sum(row["requests"] for row in rows), sum(row["seconds"] for row in rows) / 3600
    text += f"\nTogether: {requests:,} requests in {hours:.2f} hours.\n"
    return text + "".join(f"\nOf the run of {row['seconds']} s: {row['note']}.\n" for row in rows if row["note"])


def _gpu_load(results: dict[str, Any]) -> str:
    text, rows = GPU_LOAD, results["rows"]
    for row in rows:
        equal = "yes" if row["canary_bits"] == 1 else f"{row['canary_bits']} answers"
        cells = (row["subject"], row["seconds"], f"{row['requests']:,}", row["stuck"], sum(row["wrong"].values()))
        cells += (row["canaries"], equal, *(f"{100 * row[of]:.2f} %" for of in ("memory_drift", "gpu_memory_drift")))
        text += "| " + " | ".join(map(str, (*cells, f"{row['first_token_p99_s']} s"))) + " |\n"
    kinds = Counter[str]()
    for row in rows:
        kinds.update({what.partition(":")[0]: count for what, count in row["wrong"].items()})
    wrong = "; ".join(f"{count:,} requests of the kind “{what}” got an internal error" for what, count in kinds.items())
    return text + (f"\n{wrong} without a message; the cause is not known.\n" if wrong else "")


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description="Write docs/reliability.md.")
    parser.add_argument("--record", action="store_true", help="first take over what .cache/fuzz has counted")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; the exit status says whether it is current"
    )
    arguments = parser.parse_args()
    if arguments.record:
        _record()
    return write_or_check({PAGE: page()}, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
