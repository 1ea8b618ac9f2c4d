"""Draws the figures of `report.py`, as SVG that takes its text colour from the page."""

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

__all__ = ["Axes", "bars", "curves", "logarithmic", "panels"]

_INK = "#010203"
"""Stands for the colour of text, and is replaced by it."""

_COLORS = ("#2f81d7", "#d9772b", "#2f9e5f", "#c2528f", "#8b6fd6", "#9a8420", "#4aa3b5", "#c94f4f")
"""Of about equal contrast with white and with black."""

_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.grid": True,
    "grid.color": "#808080",
    "grid.alpha": 0.25,
    "legend.frameon": False,
}

Points = Sequence[tuple[float, float]]


def panels(
    name: str,
    titles: Sequence[str],
    draw: Callable[[Axes, str], None],
    *,
    columns: int = 2,
    height: float = 2.7,
) -> str:
    """Several plots with one legend.

    Args:
        name: distinguishes the SVG's identifiers from those of other figures.
        titles: one per plot.
        draw: draws the plot of a title.
        columns: plots in a row.
        height: of a plot, in inches.

    Returns:
        An ``<svg>`` element.
    """
    columns = min(columns, len(titles))
    lines = -(-len(titles) // columns)
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(4.8 * columns, height * lines + 0.5), layout="constrained")
        plots = figure.subplots(lines, columns, squeeze=False).flat
        labels: dict[str, Any] = {}
        for plot, title in zip(plots, titles, strict=False):
            plot.set_title(title, loc="left")
            draw(plot, title)
            labels |= {label: handle for handle, label in zip(*plot.get_legend_handles_labels(), strict=True)}
        for plot in figure.axes[len(titles) :]:
            plot.set_visible(False)
        if labels:
            figure.legend(labels.values(), labels.keys(), loc="outside upper left", ncols=min(len(labels), 3 * columns))
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # the page sets the width, and the view box keeps the ratio
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )


def curves(
    plot: Axes, series: Mapping[str, Points], *, x: str, y: str, colors: Mapping[str, int], log_y: bool = True
) -> None:
    """Lines over a logarithmic axis of powers of two.

    Args:
        plot: where to.
        series: points by label.
        x: label of the horizontal axis.
        y: label of the vertical axis.
        colors: number of each label's colour; the same one in all plots of a figure. A limit is dashed in the text's.
        log_y: whether the vertical axis is logarithmic.
    """
    ticks: set[float] = set()
    for label, points in series.items():
        if not points:
            continue
        limit = label.startswith("limit")
        style = {"color": _INK, "linestyle": "--", "linewidth": 1} if limit else {"color": _COLORS[colors[label] % 8]}
        plot.plot(*zip(*sorted(points), strict=True), label=label, marker="" if limit else ".", **style)
        ticks.update(point[0] for point in points)
    plot.set_xscale("log", base=2)
    if log_y:
        logarithmic(plot)
    shown = _thinned(sorted(tick for tick in ticks if tick > 0 and float(tick).is_integer()))
    plot.set_xticks(shown, [f"{tick:g}" if tick < 1024 else f"{tick / 1024:g}k" for tick in shown])
    plot.xaxis.set_minor_locator(NullLocator())
    plot.xaxis.set_minor_formatter(NullFormatter())
    plot.set_xlabel(x)
    plot.set_ylabel(y)


def logarithmic(plot: Axes) -> None:
    """A logarithmic vertical axis with plain numbers at 1, 2 and 5 times powers of ten."""
    plot.set_yscale("log")
    low, high = plot.get_ylim()
    plot.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    plot.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    plot.yaxis.set_minor_formatter(NullFormatter())


def _thinned(ticks: Sequence[float]) -> list[float]:
    """Powers of two, every other one where there are many."""
    powers = [tick for tick in ticks if int(tick) & (int(tick) - 1) == 0] or list(ticks)
    return powers[:: 2 if len(powers) > 8 else 1]


def bars(plot: Axes, groups: Sequence[str], series: Mapping[str, Iterable[float]], *, y: str) -> None:
    """Bars of each series beside one another in each group."""
    count = len(series)
    for number, (label, values) in enumerate(series.items()):
        at = [group + (number - (count - 1) / 2) * 0.8 / count for group in range(len(groups))]
        plot.bar(at, list(values), 0.8 / count, label=label, color=_COLORS[number % 8])
    plot.set_xticks(range(len(groups)), groups)
    plot.grid(visible=False, axis="x")
    plot.set_ylabel(y)
