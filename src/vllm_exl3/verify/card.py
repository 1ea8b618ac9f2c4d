"""The card of a pack for a model's page: README-ready Markdown, the numbers as JSON, and pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vllm_exl3.pack import Exl3PackError
from vllm_exl3.tools.whole_file import check_target, whole_file
from vllm_exl3.verify.run import write_json, write_text

__all__ = ["check_card", "write_card"]

_HISTOGRAM, _LAYERS = "kl.png", "layers.png"


def check_card(folder: Path) -> None:
    """Find out before a long measurement that no card could be written.

    Raises:
        Exl3PackError: matplotlib is not installed.
        OSError: there is a file of that name, or the folder cannot be made or written to.
    """
    _figure_class()
    check_target(folder / "card.md")


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Exl3PackError(
            found="no matplotlib",
            expected="the package that draws the card's pictures",
            where="--card",
            remedy="Install it: pip install 'vllm-exl3[report]'.",
        ) from error
    return Figure


def write_card(folder: Path, report: Mapping[str, Any], divergences: Mapping[str, Any]) -> None:
    """Write ``card.md``, ``card.json``, and two pictures; each file is complete or absent.

    Args:
        folder: made if it is not there.
        report: what `vllm_exl3.verify.run.run` found.
        divergences: label to `vllm_exl3.verify.judge.Divergence`.

    Raises:
        Exl3PackError: matplotlib is not installed.
    """
    make = _figure_class()
    folder.mkdir(parents=True, exist_ok=True)
    _save(_histogram(make, divergences), folder / _HISTOGRAM)
    _save(_layers(make, report["weights"]), folder / _LAYERS)
    write_json(folder / "card.json", dict(report))
    write_text(folder / "card.md", _markdown(report))


def _save(figure: Any, path: Path) -> None:
    with whole_file(path) as partial:
        figure.savefig(partial, format="png", dpi=120)


def _histogram(make: Any, divergences: Mapping[str, Any]) -> Any:
    figure = make(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    floor = 1e-8
    edges = np.logspace(np.log10(floor), 2, 81)
    for label, found in divergences.items():
        finite = found.kl[np.isfinite(found.kl)]
        axes.hist(np.clip(finite, floor, 99), edges, histtype="step", label=_plain(label))
    axes.set_xscale("log")
    axes.set(
        xlabel="KL(16-bit ‖ model) of one token, nats", ylabel="tokens", title="Divergence of next-token predictions"
    )
    axes.legend(loc="upper left", fontsize="small")
    return figure


def _plain(label: str) -> str:
    """A folder's name as a legend shows it: a dollar would begin mathematics, a leading underscore hide the entry."""
    escaped = label.replace("$", r"\$")
    return f" {escaped}" if label.startswith("_") else escaped


def _layers(make: Any, layers: list[Mapping[str, Any]]) -> Any:
    figure = make(figsize=(7, 4.5), layout="constrained")
    error, bits = figure.subplots(2, 1, sharex=True)
    places = range(len(layers))
    error.plot(places, [layer["error"] for layer in layers], ".", label="measured")
    error.plot(places, [layer["expected"] for layer in layers], "_", label="Gaussian weights at this K")
    error.set(ylabel="relative error", yscale="log", title="Linears in the pack's order")
    error.legend(fontsize="small")
    bits.plot(places, [layer["bits"] for layer in layers], ".")
    bits.set(xlabel="linear", ylabel="bits per weight")
    return figure


def _markdown(report: Mapping[str, Any]) -> str:
    text, count = report["text"], len(report["findings"])
    lines = [
        f"## Quality of {report['pack']}",
        "",
        f"Against the 16-bit model, teacher-forced, {text['tokens']} tokens in {text['sequences']} sequences; 95 % "
        "confidence intervals by bootstrap over sequences.",
        "",
        "| model | KL, nats per token | same likeliest token | perplexity | 16-bit perplexity |",
        "|---|---|---|---|---|",
    ]
    for label, found in report["divergence"].items():
        columns = ("kl", "top1_agreement", "perplexity", "reference_perplexity")
        lines.append(f"| {_cell(label)} | {' | '.join(_interval(found[key]) for key in columns)} |")
    lines += ["", f"![KL histogram]({_HISTOGRAM})", "", f"![Error and bits of each linear]({_LAYERS})", ""]
    checked = f"{report['tensors']['tensors']} tensors checked by `vllm-exl3 verify`"
    lines.append(f"{checked}: {'no faults' if not count else f'{count} faults'}.")
    lines += [
        f"- {found['where']}: found {found['found']}; expected {found['expected']}" for found in report["findings"]
    ]
    return "\n".join(lines) + "\n"


def _interval(found: Mapping[str, float | None]) -> str:
    mean, low, high = (found[key] for key in ("mean", "low", "high"))
    if mean is None or low is None or high is None:
        return "not finite"
    return f"{mean:.4g} ({low:.4g} to {high:.4g})"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
