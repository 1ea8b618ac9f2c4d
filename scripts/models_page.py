"""Writes docs/models.md from tests/families/results.json; ``--run [NAME ...]`` fills that first.

Each row of the table in ``tests/families`` is served in stock vLLM on this machine's CPU, which takes about a minute.
"""

import argparse
import datetime
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "tests" / "families" / "results.json"

HEAD = """# Models

Made by `python scripts/models_page.py` from `tests/families/results.json`, which `--run` fills; edit neither by hand.

Any vLLM model class that is built from vLLM's own linear layers can be served; the plugin implements no models. For
each family below, a tiny random pack with the family's own tensor names was served in stock vLLM on a CPU in float32,
and so was its twin, which holds what the pack's trellises decode to. The error is that of all logits of a prompt,
relative (Frobenius norm), of which 1e-3 is allowed: the rounding of 16-bit activations. "Decoded" says that some module
takes its weight decoded, because vLLM builds or reads it without quantization; the start-up report names it.

"""

TABLE = """| family | what it stands for | error | worst position | same greedy tokens | decoded | vLLM |
|---|---|---|---|---|---|---|
"""

NOT = """
## Not compared

| family | why |
|---|---|
"""


def page(results: list[dict[str, Any]]) -> str:
    """The page's text, from recorded results."""
    served = [row for row in results if "error" in row]
    faults = [row for row in results if "error" not in row]
    text = HEAD + TABLE
    for row in sorted(served, key=lambda row: str(row["name"])):
        kind = row["kind"] or ("tied head" if row["tied"] else "")
        tokens, decoded = ("yes" if row[name] else "no" for name in ("same_tokens", "decoded"))
        text += (
            f"| `{row['name']}` | {kind} | {row['error']:.1e} | {row['worst']:.1e} | {tokens} | {decoded} "
            f"| {row['vllm']} |\n"
        )
    if faults:
        text += NOT + "".join(f"| `{row['name']}` | {row['fault']} |\n" for row in faults)
    return text


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
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    arguments = parser.parse_args()
    if arguments.run is not None:
        run(arguments.run)
    text = page(recorded())
    if arguments.check:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.name} is {'current' if current else 'out of date: run python scripts/models_page.py'}")
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
