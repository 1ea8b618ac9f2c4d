"""Writes docs/models.md from tests/families/results.json; ``--run [NAME ...]`` fills that first.

Each row of the table in ``tests/families`` is served in stock vLLM on this machine's CPU, which takes about a minute.
``--built`` notes in tests/families/built.json what classes for GPUs load, built here; ``--releases``
notes in tests/families/releases.json which classes each release of vLLM registers.
"""

import argparse
import datetime
import importlib.metadata
import json
import re
import sys
from typing import Any

from generated import ROOT, write_or_check

PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "tests" / "families" / "results.json"

GPU = ROOT / "benchmarks" / "results" / "h200" / "families.json"

BUILT = ROOT / "tests" / "families" / "built.json"

RELEASES = ROOT / "tests" / "families" / "releases.json"
SUPPORTED = ("0.30", "0.31", "0.32", "0.33")

NAMED = {
    "DeepSeek V4": ("DeepseekV4ForCausalLM", "deepseek_v4"),
    "DeepSeek V4 with images": ("DeepseekV4ForConditionalGeneration", ""),
    "DeepSeek V4.1": ("DeepseekV41ForCausalLM", "deepseek_v41"),
    "GLM-5.3-Flash": ("Glm5NextForConditionalGeneration", "glm5_next"),
    "Qwen3.8-Flash-Next": ("Qwen4ExpForConditionalGeneration", "qwen4_exp"),
    "Nemotron-H Super with images": ("NemotronH_Super_Omni_Reasoning_V3", ""),
    "Flint": ("FlintForCausalLM", "flint"),
    "Kimi Linear": ("KimiLinearForCausalLM", "kimi_linear"),
    "Laguna": ("LagunaForCausalLM", "laguna"),
    "OLMo hybrid": ("OlmoHybridForCausalLM", "olmo_hybrid"),
    "MiMo-V2": ("MiMoV2ForCausalLM", "mimo_v2"),
    "MiMo-V2-Flash": ("MiMoV2FlashForCausalLM", "mimo_v2_flash"),
    "Spark-X2.5": ("Spark2_5ForCausalLM", ""),
    "Ministral 3": ("Ministral3ForCausalLM", "ministral3"),
    "Hunyuan MoE": ("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe"),
}
"""Families with packs that are asked for, to the class of their config.json and a row above, if there is one."""

NAMED_HEAD = """
## By release

Which releases of vLLM have the class of a family. A family without a row above needs a GPU, or has none yet: it is
built from the same layers, and none of its packs was compared. Where no release has the class, vLLM refuses the model
by the name of its class.

| family | class | 0.30 | 0.31 | 0.32 | 0.33 | compared above |
|---|---|---|---|---|---|---|
"""

HEAD = """# Models

Made by `python scripts/models_page.py` from `tests/families/results.json`, which `--run` fills; edit neither by hand.

Any vLLM model class that is built from vLLM's own linear layers can be served; the plugin implements no models. For
each family below, a tiny random pack with the family's own tensor names was served in stock vLLM on a CPU in float32,
and so was its twin, which holds what the pack's trellises decode to; families that take images were given one. The
error is that of all logits of a prompt, relative (Frobenius norm). 1e-3 is allowed, the rounding of 16-bit activations,
or more where vLLM's class rounds to 16 bits throughout. "Decoded" says that some module takes its weight decoded,
because vLLM builds or reads it without quantization; the start-up report names it. Four greedy tokens are compared;
where they differ, it says how far the twin's logits of the two tokens are apart, and how far the allowed error can move
two logits of that position.

"""

TABLE = """| family | what it stands for | error | allowed | worst position | same greedy tokens | decoded | vLLM |
|---|---|---|---|---|---|---|---|
"""

NOT = """
## Not compared

| family | why |
|---|---|
"""


LOADED = """
## Loaded

vLLM's classes for GPUs, built on a CPU: the pack's model and its twin's were loaded by vLLM's own loader, and every
linear, layer of experts and other parameter compared (`tests/families/built.py`, `tests/families/built.json`). The
kernels that these classes launch are not part of it; where a GPU had what they need, the table above has their logits.

| family | EXL3 linears and heads | layers of experts | other parameters | differ | vLLM |
|---|---|---|---|---|---|
"""


def page(results: list[dict[str, Any]]) -> str:
    """The page's text, from recorded results."""
    served = [row for row in results if "error" in row]
    faults = [row for row in results if "error" not in row]
    text = HEAD + TABLE
    for row in sorted(served, key=lambda row: str(row["name"])):
        kind = row["kind"] or ("tied head" if row["tied"] else "")
        tokens, decoded = _tokens(row), "yes" if row["decoded"] else "no"
        errors = f"{row['error']:.1e} | {row['bound']:.0e} | {row['worst']:.1e}"
        text += f"| `{row['name']}` | {kind} | {errors} | {tokens} | {decoded} | {row['vllm']} |\n"
    if faults:
        text += NOT + "".join(f"| `{row['name']}` | {row['fault']} |\n" for row in faults)
    gpu = json.loads(GPU.read_text(encoding="utf-8"))
    compared = [*served, *(row for row in gpu["rows"] if row["outcome"] == "ok")]
    return text + _on_a_gpu(gpu) + _loaded() + _by_release({str(row["name"]) for row in compared})


def _tokens(row: dict[str, Any]) -> str:
    """Whether the pack continues as the twin does, and if not, by how much the twin prefers its own token."""
    if row["same_tokens"]:
        return "yes"
    choice = row.get("choice")
    if choice is None:
        return "no"
    apart = f"{choice['gap']:.2g} apart ({choice['steps']:.2g} steps of bfloat16), {choice['allowed']:.2g} allowed"
    return f"the {['first', 'second', 'third', 'fourth'][choice['index']]} is not: {apart}"


def _on_a_gpu(results: dict[str, Any]) -> str:
    """Families whose classes need a GPU, as benchmarks/gpu_families.py compared them there."""
    meta = results["meta"]
    text = (
        "\n## On a GPU\n\n"
        f"The same comparison on one {meta['gpu']} (vLLM {meta['versions']['vllm']}, "
        "`benchmarks/results/h200/families.json`), where\nthe machine had what the class needs:\n\n"
        "| family | error | allowed | worst position | same greedy tokens |\n|---|---|---|---|---|\n"
    )
    for row in results["rows"]:
        if row["outcome"] == "ok":
            errors = f"{row['error']:.1e} | {row['bound']:.0e} | {row['worst']:.1e}"
            text += f"| `{row['name']}` | {errors} | {_tokens(row)} |\n"
    text += "\n| not compared | why |\n|---|---|\n"
    for row in results["rows"]:
        if row["outcome"] != "ok":
            text += f"| `{row['name']}` | {row['reason'].splitlines()[0][:160]} |\n"
    return text


def _loaded() -> str:
    rows = json.loads(BUILT.read_text(encoding="utf-8"))
    text = LOADED
    for row in rows:
        counts = f"{row['exl3']} | {row['experts']} | {row['parameters']} | {len(row['differ'])}"
        text += f"| `{row['name']}` | {counts} | {row['vllm']} |\n"
    return text


def build(names: list[str]) -> None:
    """Build rows of classes for GPUs and keep what is found, beside what is known of the others."""
    sys.path.insert(0, str(ROOT))
    from tests.families.build_apart import build_apart
    from tests.families.gpu_rows import GPU

    known = {row["name"]: row for row in json.loads(BUILT.read_text(encoding="utf-8"))} if BUILT.exists() else {}
    for name in names or [family.name for family in GPU]:
        known[name] = build_apart(name)
        order = [family.name for family in GPU if family.name in known]
        BUILT.write_text(json.dumps([known[name] for name in order], indent=1) + "\n", encoding="utf-8")


def _by_release(served: set[str]) -> str:
    registered = json.loads(RELEASES.read_text(encoding="utf-8"))
    loaded = {row["name"] for row in json.loads(BUILT.read_text(encoding="utf-8"))}
    text = NAMED_HEAD
    for family, (name, row) in NAMED.items():
        cells = ["yes" if name in registered[release] else "no" for release in SUPPORTED]
        compared = f"`{row}`" if row in served else f"`{row}`, loaded" if row in loaded else "no"
        text += f"| {family} | `{name}` | {' | '.join(cells)} | {compared} |\n"
    return text


def note_releases() -> None:
    """Note which of the named classes each release registers, from its own Python files."""
    sys.path.insert(0, str(ROOT))
    from scripts.vllm_tree import make_tree

    registered = {}
    for release in SUPPORTED:
        registry = make_tree(f"{release}.0") / "vllm" / "model_executor" / "models" / "registry.py"
        names = set(re.findall(r'^ +"(\w+)": \(', registry.read_text(encoding="utf-8"), re.MULTILINE))
        registered[release] = sorted(names & {name for name, _ in NAMED.values()})
    RELEASES.write_text(json.dumps(registered, indent=1) + "\n", encoding="utf-8")


def run(names: list[str]) -> None:
    """Compare rows and keep what is found, beside what is known of the others."""
    sys.path.insert(0, str(ROOT))
    from tests.families.rows import FAMILIES
    from tests.families.run import rows

    stamp = {"vllm": importlib.metadata.version("vllm"), "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    known = {row["name"]: row for row in recorded()}
    for name in names or [family.name for family in FAMILIES]:
        known |= {row["name"]: {**row, **stamp} for row in rows([name])}
        order = [family.name for family in FAMILIES if family.name in known]
        RESULTS.write_text(json.dumps([known[name] for name in order], indent=1) + "\n", encoding="utf-8")


def recorded() -> list[dict[str, Any]]:
    """What was found so far."""
    return list(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else []


def main() -> int:
    """Write the page; with ``--run`` compare first; with ``--check`` only say whether it is current."""
    parser = argparse.ArgumentParser(description="Write docs/models.md from recorded comparisons.")
    parser.add_argument("--run", nargs="*", metavar="NAME", help="compare these rows first, or all")
    parser.add_argument("--built", nargs="*", metavar="NAME", help="build these rows of classes for GPUs, or all")
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    parser.add_argument("--releases", action="store_true", help="note first what each release of vLLM registers")
    arguments = parser.parse_args()
    if arguments.releases:
        note_releases()
    if arguments.built is not None:
        build(arguments.built)
    if arguments.run is not None:
        run(arguments.run)
    return write_or_check({PAGE: page(recorded())}, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
