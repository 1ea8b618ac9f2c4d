"""Compares rows of the table, each in a process of its own: ``python -m tests.families.run [NAME ...]``.

Prints one line of JSON a row, with what was found or why it could not be served.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

__all__ = ["one", "rows"]

_ROOT = Path(__file__).parents[2]
_TIMEOUT = 400


def one(name: str) -> dict[str, Any]:
    """Compare one row in this process.

    Args:
        name: of the row.

    Returns:
        ``name``, ``kind`` and either ``error``, ``worst``, ``bound``, ``same_tokens``, ``choice`` where those are not,
        ``served``, ``kernels``, ``decoded`` and ``missing`` (what the report should say and does not), or ``fault``.
    """
    from tests.families.rows import FAMILIES

    family = next(family for family in FAMILIES if family.name == name)
    if family.interpreted:
        from tests.families.interpreted import complete_metadata  # ahead of vLLM

        complete_metadata()
    from tests.families.compare import compare

    with tempfile.TemporaryDirectory() as folder:
        found = compare(family, Path(folder))
    return {
        "name": name,
        "kind": family.kind,
        "tied": family.tied,
        "error": float(f"{found.error:.2g}"),
        "worst": float(f"{found.worst:.2g}"),
        "bound": float(f"{found.bound:.2g}"),
        "same_tokens": found.same_tokens,
        **({} if found.choice is None else {"choice": {**asdict(found.choice), "is_tie": found.choice.is_tie}}),
        "served": found.is_served,
        "kernels": found.kernels,
        "decoded": "decoded while loading" in found.report,
        "missing": [text for text in family.shows if text not in found.report],
    }


def rows(names: list[str]) -> list[dict[str, Any]]:
    """Compare rows, each in a process of its own, and print each as it comes."""
    from tests.families.rows import FAMILIES

    results = []
    reasons = {family.name: family.gpu for family in FAMILIES}
    for name in names:
        if reasons[name]:
            results.append({"name": name, "fault": reasons[name]})
            continue
        command = [sys.executable, "-m", "tests.families.run", "--here", name]
        try:
            done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
            match = re.search(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
            result = json.loads(match[1]) if match else {"name": name, "fault": _last_line(done.stdout + done.stderr)}
        except subprocess.TimeoutExpired:
            result = {"name": name, "fault": f"no result within {_TIMEOUT} s"}
        print(json.dumps(result), flush=True)
        results.append(result)
    return results


def _last_line(text: str) -> str:
    lines = re.findall(r"^(?:\[rank\d+\]: )?((?:[\w.]+\.)?\w*(?:Error|Exception)\b.*)$", text, re.MULTILINE)
    return str(lines[0])[:600] if lines else text[-300:]


def main() -> int:
    """Compare the rows that the command line names, or all."""
    from tests.families.rows import FAMILIES

    parser = argparse.ArgumentParser(description="Compare families' packs with their decoded twins.")
    parser.add_argument("names", nargs="*", help="rows; all without")
    parser.add_argument("--here", action="store_true", help="one row, in this process")
    arguments = parser.parse_args()
    if arguments.here:
        print("RESULT", json.dumps(one(arguments.names[0])))
    else:
        rows(arguments.names or [family.name for family in FAMILIES])
    return 0


if __name__ == "__main__":
    sys.exit(main())
