"""The steps of ``vllm-exl3 verify`` in order, and the one report that they make."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_exl3.pack import Pack
from vllm_exl3.pack.check import find_faults
from vllm_exl3.pack.metadata import text_config
from vllm_exl3.plan.shapes import number
from vllm_exl3.tools.whole_file import check_target, whole_file
from vllm_exl3.verify.display import Display
from vllm_exl3.verify.finding import Finding
from vllm_exl3.verify.tensors import scan_tensors

if TYPE_CHECKING:
    import torch

    from vllm_exl3.verify.weights import DenseFolder

__all__ = ["Request", "check_tensors", "run", "write_json", "write_text"]


@dataclass(frozen=True)
class Request:
    """The options of one verification.

    Attributes:
        pack: the pack's folder.
        against: folder or repository of the 16-bit model.
        text: a text file for the divergence.
        tokens: tokens of it.
        compare: other packs to measure on the same text.
        backends: decode a sample with every backend.
        canary: serve with vLLM twice.
        json_file: where the report goes.
        card: folder of the card.
    """

    pack: str
    against: str | None = None
    text: Path | None = None
    tokens: int = 8192
    compare: tuple[str, ...] = ()
    backends: bool = True
    canary: bool = False
    json_file: Path | None = None
    card: Path | None = None


def run(request: Request, display: Display) -> list[Finding]:
    """Verify a pack, print the account, and write the files.

    Returns:
        Every fault.

    Raises:
        Exl3PackError: the pack or a model it is compared with cannot be read.
        OSError: a file cannot be read or written.
    """
    pack = Pack.open(request.pack)
    ids = _prepare(pack, request)
    findings, figures = check_tensors(pack, display)
    report: dict[str, Any] = {"pack": Path(pack.source).name, "tensors": figures}
    if request.backends:
        findings += _check_backends(pack, report, display)
    if request.canary:
        findings += _run_canary(pack, report, display)
    divergences: dict[str, Any] = {}
    if request.against is not None:
        divergences = _judge(pack, request, ids, report, findings, display)
    report["findings"] = [finding.as_dict() for finding in findings]
    _say_findings(findings, request, display)
    if request.json_file is not None:
        write_json(request.json_file, report)
    if request.card is not None:
        from vllm_exl3.verify.card import write_card

        write_card(request.card, report, divergences)
        display.say(f"card       {request.card}")
    return findings


def _prepare(pack: Pack, request: Request) -> "torch.Tensor | None":
    """Find out what would fail at the end, before hours of measuring; the text as tokens, where there is one."""
    if request.json_file is not None:
        check_target(request.json_file)
    if request.card is not None:
        from vllm_exl3.verify.card import check_card

        check_card(request.card)
    if request.text is None:
        return None
    from vllm_exl3.verify.measure import check_others
    from vllm_exl3.verify.text import read_text

    check_others(request.compare)
    vocabulary = number(text_config(pack.config), "vocab_size")
    return read_text(request.text, pack.folder or Path(pack.source), request.tokens, vocabulary)


def _check_backends(pack: Pack, report: dict[str, Any], display: Display) -> list[Finding]:
    try:
        from vllm_exl3.verify.decoders import decoders
        from vllm_exl3.verify.decoding import compare_decoders, sample_linears
    except ImportError as error:
        display.say(f"backends   not compared: {error}")
        return []
    found, absent = decoders()
    with display.progress("decoding a sample", len(sample_linears(pack)), "linears") as advance:
        result = compare_decoders(pack, found, advance)
    display.say(f"backends   {len(result.linears)} linears decoded alike by {', '.join(result.decoders)}"
                if not result.findings else f"backends   {len(result.linears)} linears decoded")  # fmt: skip
    for name, reason in absent.items():
        display.say(f"           not by {name}: {reason}")
    report["backends"] = {**result.figures(), "absent": absent}
    return result.findings


def _run_canary(pack: Pack, report: dict[str, Any], display: Display) -> list[Finding]:
    from vllm_exl3.verify.canary import run_canary

    folder = pack.folder or Path(pack.source)
    vocabulary = number(text_config(pack.config), "vocab_size") or 256
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    with display.progress("serving a canary", 2, "runs") as advance:
        result = run_canary(folder, vocabulary, progress=advance, environment=environment)
    if not result.findings:
        display.say(f"canary     two runs of vLLM gave the same tokens, in {sum(result.seconds):.0f} s")
    report["canary"] = result.figures()
    return result.findings


def _judge(
    pack: Pack,
    request: Request,
    ids: "torch.Tensor | None",
    report: dict[str, Any],
    findings: list[Finding],
    display: Display,
) -> dict[str, Any]:
    from vllm_exl3.verify.measure import open_source

    assert request.against is not None
    source = open_source(request.against)
    report["weights"] = _judge_weights(pack, source, findings, display)
    return {} if ids is None else _judge_text(pack, source, request, ids, report, findings, display)


def _judge_weights(
    pack: Pack, source: "DenseFolder", findings: list[Finding], display: Display
) -> list[dict[str, Any]]:
    from vllm_exl3.verify.against import compare_weights

    weights = sum(linear.in_features * linear.out_features for linear in pack.linears.values())
    with display.progress("comparing weights", weights, "M weights", 1e6) as advance:
        errors, faults, missing = compare_weights(pack, source, advance)
    findings += faults
    if missing:
        names = ", ".join(missing[:4])
        findings.append(Finding("weights", source.label, f"no tensor for {len(missing)} linears ({names})", "all"))
    if errors:
        worst = max(errors, key=lambda layer: layer.error / layer.expected if math.isfinite(layer.error) else math.inf)
        display.say(f"weights    {len(errors)} linears; the worst has {worst.error:.3g} where {worst.expected:.3g} is "
                    f"expected at K = {worst.bits:g}: {worst.key}")  # fmt: skip
    return [layer.as_dict() for layer in errors]


def _judge_text(
    pack: Pack,
    source: "DenseFolder",
    request: Request,
    ids: "torch.Tensor",
    report: dict[str, Any],
    findings: list[Finding],
    display: Display,
) -> dict[str, Any]:
    from vllm_exl3.verify.measure import measure

    divergences = measure(pack, source, request.compare, ids, display)
    name, own = next(iter(divergences.items()))
    if own.not_finite:
        found = f"predictions that are no numbers at {own.not_finite} of {own.kl.size} tokens"
        findings.append(Finding("divergence", name, found, "finite logits"))
    report["text"] = {"tokens": ids.numel(), "sequences": len(ids)}
    report["divergence"] = {
        name: {key: value.as_dict() for key, value in found.estimates().items()} for name, found in divergences.items()
    }
    return divergences


def _say_findings(findings: list[Finding], request: Request, display: Display) -> None:
    for finding in findings:
        display.say(f"FAULT  {finding.where}\n  check     {finding.check}\n  found     {finding.found}\n"
                    f"  expected  {finding.expected}")  # fmt: skip
    if not findings:
        hint = " Flipped signs and exchanged tensors of one shape and K show only with --against."
        display.say("No faults." + ("" if request.against else hint))


def check_tensors(pack: Pack, display: Display) -> tuple[list[Finding], dict[str, Any]]:
    """Check headers and contents.

    Returns:
        The faults, and the figures of the pass for the report.
    """
    findings = [Finding("headers", fault.where, fault.found, fault.expected) for fault in find_faults(pack)]
    with display.progress("reading tensors", pack.nbytes) as advance:
        scan = scan_tensors(pack, advance)
    rate = scan.nbytes / max(scan.seconds, 1e-9) / 1e9
    display.say(f"tensors    {scan.tensors} read, {scan.nbytes / 1e9:.3f} GB at {rate:.3g} GB/s")
    if scan.undecided:
        display.say(f"           {scan.undecided} linears below K = 1.5, whose bits say nothing about themselves")
    figures = {"tensors": scan.tensors, "bytes": scan.nbytes, "seconds": scan.seconds, "undecided": scan.undecided}
    return [*findings, *scan.findings], figures


def write_text(path: Path, text: str) -> None:
    """Write a file that is complete or absent, whenever the process is interrupted; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON, complete or not at all."""
    write_text(path, json.dumps(report, indent=1, allow_nan=False) + "\n")
