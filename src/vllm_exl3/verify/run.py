"""The steps of ``vllm-exl3 verify`` in order, and the one report that they make."""

import json
import os
from pathlib import Path
from typing import Any

from vllm_exl3.pack import Pack
from vllm_exl3.plan.survey import survey
from vllm_exl3.verify.display import Display
from vllm_exl3.verify.finding import Finding
from vllm_exl3.verify.tensors import scan_tensors

__all__ = ["check_tensors", "write_json", "write_text"]


def check_tensors(pack: Pack, display: Display) -> tuple[list[Finding], dict[str, Any]]:
    """Check headers and contents.

    Returns:
        The faults, and the figures of the pass for the report.
    """
    faults = survey(pack)["faults"]
    findings = [Finding("headers", fault["where"], fault["found"], fault["expected"]) for fault in faults]
    with display.progress("reading tensors", pack.nbytes, "GB", 1e9) as advance:
        scan = scan_tensors(pack, advance)
    rate = scan.nbytes / max(scan.seconds, 1e-9) / 1e9
    display.say(f"tensors    {scan.tensors} read, {scan.nbytes / 1e9:.3f} GB at {rate:.2f} GB/s")
    if scan.undecided:
        display.say(f"           {scan.undecided} linears below K = 1.5, whose bits say nothing about themselves")
    figures = {"tensors": scan.tensors, "bytes": scan.nbytes, "seconds": scan.seconds, "undecided": scan.undecided}
    return [*findings, *scan.findings], figures


def write_text(path: Path, text: str) -> None:
    """Write a file that is complete or absent, whenever the process is interrupted."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON, complete or not at all."""
    write_text(path, json.dumps(report, indent=1, allow_nan=False) + "\n")
