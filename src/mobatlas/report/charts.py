"""Charts and maps: inline SVG and HTML for the report; figures of commands as PNG.

Inline charts take their colours from the page, so they follow light and dark mode. Series differ in
dashes and marks as well as in colour, and every chart has a text description.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mobatlas.config import MIN_PEOPLE
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.types import Floats, Ints
from mobatlas.evaluation.metrics import MetricSpec, located, travel_distance
from mobatlas.io.manifest import write_atomic
from mobatlas.regions.recovery.summary import LESS, MORE, NOT_SURE, RecoverySummary

ACROSS = (58, 626)  # pixels of the axes, in charts of 640 x 260
UP = (220, 12)
TICKS = 5
BLUE = "#0072B2"  # these colours are safe for colour-blind readers
ORANGE = "#D55E00"
REAL = "real people"
CLASSES = {REAL: "real", "baseline": "baseline", "supervised": "ours", "strong": "strong"}
EXAMPLES = 6  # samples drawn on a map
LONGEST = 60  # visits on the axis, at most
GREY = "#595959"
# Verdict -> marker, colour and fill; shapes point in the direction of the difference.
VERDICT_MARKS = {
    MORE: (">", BLUE, BLUE),
    LESS: ("<", ORANGE, ORANGE),
    NOT_SURE: ("o", GREY, "white"),
}
PANELS = 3  # side by side
FARTHEST = 3.0  # times the largest mean: longer intervals are cut
WIDEST = 30.0  # the largest ratio on an axis
RATIO_TICKS = (1 / 20, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)


@dataclass(frozen=True)
class Series:
    """A line with its name in the legend; `kind` is its class in the stylesheet."""

    name: str
    kind: str
    x: Floats
    y: Floats


@dataclass(frozen=True)
class Line:
    """A line of a chart as an SVG path."""

    name: str
    kind: str
    path: str


@dataclass(frozen=True)
class Chart:
    """Lines over common axes, which `charts.html.j2` draws."""

    title: str
    x: str  # names of the axes
    y: str
    across: Scale
    up: Scale
    lines: tuple[Line, ...]


def line_chart(
    series: Sequence[Series], title: str, x: str, y: str, *, steps: bool = False, log: bool = False
) -> Chart | None:
    """A chart: histograms with `steps`, a logarithmic y with `log`; None if there are no values."""
    shown = [each for each in series if len(each.x)]
    if not shown:
        return None
    height = np.concatenate([each.y[np.isfinite(each.y)] for each in shown])
    low = float(height[height > 0].min()) if log else 0.0
    high = float(height.max())
    left = min(float(each.x.min()) for each in shown)
    right = max(float(each.x.max()) for each in shown)
    across = Scale(left, right, *ACROSS)
    up = Scale(low, high if high > low else low + 1, *UP, log=log)
    lines = (Line(each.name, each.kind, _path(each, across, up, steps)) for each in shown)
    return Chart(title, x, y, across, up, tuple(lines))


def recovery_figure(
    summary: RecoverySummary, panels: Mapping[str, int], unit: int, path: Path
) -> None:
    """Draw means with intervals as PNG: a panel for each feature, or one panel for a comparison.

    Parameters
    ----------
    summary
        Values, intervals and verdicts.
    panels
        Title -> number of the feature.
    unit
        The number of people that counts are shown for.
    path
        The file to write.
    """
    plt = load_pyplot()
    comparison = summary.is_comparison
    across = 1 if comparison else min(PANELS, len(panels))
    down = 1 if comparison else -(-len(panels) // across)
    rows = list(panels) if comparison else list(summary.rows)
    size = (6.5 if comparison else 1.5 + 3.1 * across, 1.2 + down * (0.6 + 0.25 * len(rows)))
    figure, axes = plt.subplots(
        down, across, figsize=size, layout="constrained", sharey=True, squeeze=False
    )
    if comparison:
        _draw_comparison(axes[0, 0], summary, list(panels.values()))
        label = f"ratio of mean counts, {' / '.join(summary.rows)}"
    else:
        label = f"mean count per {people(unit)} and window"
        for axis, (title, number) in zip(axes.flat, panels.items(), strict=False):
            _draw_means(axis, summary, number, unit)
            axis.set_title(_plain(title), loc="left", fontsize=10, fontweight="bold")
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
    axes[0, 0].set_yticks(range(len(rows)), map(_plain, rows))
    axes[0, 0].set_ylim(len(rows) - 0.5, -0.5)
    maps = ", ".join({summary.features[each].partition(":")[0]: None for each in panels.values()})
    figure.supxlabel(
        f"{_plain(f'{maps}: {label}')}, with {100 * summary.level:.4g} % intervals", fontsize=9
    )
    marks = [
        plt.Line2D([], [], marker=marker, color=colour, markerfacecolor=fill, label=verdict)
        for verdict, (marker, colour, fill) in VERDICT_MARKS.items()
    ]
    line = "equal" if comparison else "population average"
    marks.append(plt.Line2D([], [], color="black", linestyle="--", label=line))
    figure.legend(handles=marks, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150)
    plt.close(figure)
    write_atomic(path, buffer.getvalue())


def _draw_means(axis: Any, summary: RecoverySummary, number: int, unit: int) -> None:
    """The means of one feature by row, and the average."""
    ends = unit * np.stack([each[:, number] for each in (summary.low, summary.value, summary.high)])
    average = unit * float(summary.reference[0, number])
    farthest = FARTHEST * max(float(ends[1].max()), average)
    right = max(min(float(ends[2].max()), farthest), 1e-9) * 1.05
    _draw_dots(axis, ends, summary.verdicts[:, number].tolist(), (0, right))
    axis.axvline(average, color="black", linestyle="--", linewidth=1, zorder=1)


def _draw_comparison(axis: Any, summary: RecoverySummary, numbers: list[int]) -> None:
    """The ratios between two groups by feature."""
    sides = (summary.ratio_low, summary.ratio, summary.ratio_high)
    ends = np.nan_to_num(np.stack([each[0, numbers] for each in sides]), nan=1.0)
    axis.set_xscale("log")
    reach = min(max(1.5, float(ends[2].max()), 1 / max(float(ends[0].min()), 1e-9)), WIDEST)
    _draw_dots(axis, ends, summary.verdicts[0, numbers].tolist(), (1 / reach / 1.05, reach * 1.05))
    axis.axvline(1, color="black", linestyle="--", linewidth=1, zorder=1)
    ticks = [ratio for ratio in RATIO_TICKS if 1 / reach <= ratio <= reach]
    axis.set_xticks(ticks, [f"{ratio:g}" for ratio in ticks])
    axis.minorticks_off()


def _draw_dots(
    axis: Any, ends: Floats, verdicts: Sequence[str], limits: tuple[float, float]
) -> None:
    """Low, value and high (3, rows) as dots on lines; lines that leave the axis end in arrows."""
    low, value, high = np.clip(ends, *limits)
    for place, verdict in enumerate(verdicts):
        marker, colour, fill = VERDICT_MARKS[verdict]
        axis.plot([low[place], high[place]], [place, place], color=colour, linewidth=1.5, zorder=2)
        axis.plot(
            value[place], place, marker, color=colour, markerfacecolor=fill, markersize=6, zorder=3
        )
        for end, cut, arrow in ((low, ends[0], "<"), (high, ends[2], ">")):
            if end[place] != cut[place]:
                axis.plot(end[place], place, arrow, color=colour, markersize=4, clip_on=False)
    axis.set_xlim(*limits)
    axis.tick_params(labelsize=8)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)


def people(unit: int) -> str:
    """The people that a count is shown for."""
    return "person" if unit == 1 else f"{unit:,} people"


def _plain(text: str) -> str:
    """Text in which dollar signs do not begin a formula."""
    return text.replace("$", r"\$")


def load_pyplot() -> Any:
    """Pyplot without a display. Few commands need it, and it takes a second to import."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


@dataclass(frozen=True)
class Scale:
    """From numbers to pixels."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (
            (math.log10(v) for v in (self.low, self.high, value))
            if self.log
            else (self.low, self.high, value)
        )
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Round numbers on the scale."""
        from matplotlib import ticker  # few commands need it, and it takes a while to import

        locator = (
            ticker.LogLocator() if self.log else ticker.MaxNLocator(TICKS, steps=[1, 2, 5, 10])
        )
        values = map(float, locator.tick_values(self.low, self.high))
        return [value for value in values if self.low <= value <= self.high] or [
            self.low,
            self.high,
        ]


def _path(series: Series, across: Scale, up: Scale, steps: bool) -> str:
    points = []
    for number, (x, y) in enumerate(zip(series.x.tolist(), series.y.tolist(), strict=True)):
        if not math.isfinite(y) or (up.log and y <= 0):
            continue
        height = f"{up(y):.1f}"
        points.append(f"{across(x):.1f} {height}")
        if steps and number + 1 < len(series.x):
            points.append(f"{across(float(series.x[number + 1])):.1f} {height}")
    return "M" + ("L".join(points) or "0 0")


@dataclass(frozen=True)
class DensityMap:
    """Where people go, with some trajectories as SVG paths."""

    label: str  # real people or a model
    group: str
    png: str  # base64
    lines: list[str]

    @property
    def kind(self) -> str:
        return CLASSES[self.label]

    @property
    def description(self) -> str:
        """For readers who do not see the map."""
        lines = f"; the lines are {len(self.lines)} trajectories" if self.lines else ""
        return f"Density of visits, {self.group}, {self.label}{lines}"


@dataclass(frozen=True)
class View:
    """The pictures of one group."""

    name: str
    maps: list[DensityMap]
    distributions: list[Chart]


@dataclass(frozen=True)
class Views:
    """Draws the pictures of the groups of a dataset."""

    dataset: TrajectoryDataset
    spec: MetricSpec

    def view(self, name: str, sources: Mapping[str, Trajectories]) -> View:
        """The pictures of a group: REAL or a model -> its trajectories."""
        sources = {label: each for label, each in sources.items() if len(each)}
        density = {
            label: self._density(each, MIN_PEOPLE if label == REAL else 0)
            for label, each in sources.items()
        }
        top = max((float(each.max()) for each in density.values()), default=1.0)
        maps = []
        for label, trajectories in sources.items():
            # The report may be shared, so it shows no day of a real person.
            lines = [] if label == REAL else self._lines(trajectories)
            png = _png(np.sqrt(density[label] / max(top, 1e-12)))
            maps.append(DensityMap(label, name, png, lines))
        return View(name, maps, self._distributions(name, sources))

    def _density(self, trajectories: Trajectories, fewest: int) -> Floats:
        """Shares of visits by cell, (cells, cells), north at the top; none of fewer people."""
        cells = self.spec.cells
        visits = self.spec.counts(trajectories)["spatial"][:, : cells**2]  # (trajectories, cells)
        trajectory, cell = visits.nonzero()
        person = trajectory if trajectories.person is None else trajectories.person[trajectory]
        people = np.bincount(np.unique([person, cell], axis=1)[1], minlength=cells**2)
        counts = np.where(people >= fewest, np.asarray(visits.sum(0)).ravel(), 0)
        return np.asarray((counts / max(counts.sum(), 1)).reshape(cells, cells)[::-1])

    def _lines(self, trajectories: Trajectories) -> list[str]:
        """Some samples as paths on a map of 400 x 400."""
        owner, places = located(trajectories, self.dataset.vocabulary)
        south, west, north, east = self.spec.box
        x = 400 * (places[:, 1] - west) / max(east - west, 1e-12)
        y = 400 * (north - places[:, 0]) / max(north - south, 1e-12)
        examples = np.linspace(0, len(trajectories) - 1, min(EXAMPLES, len(trajectories)))
        lines = []
        for number in examples.astype(int).tolist():
            own = owner == number
            if own.sum() > 1:
                points = zip(x[own], y[own], strict=True)
                lines.append("M" + "L".join(f"{a:.0f} {b:.0f}" for a, b in points))
        return lines

    def _distributions(self, name: str, sources: Mapping[str, Trajectories]) -> list[Chart]:
        km = {
            label: travel_distance(each, self.dataset.vocabulary) for label, each in sources.items()
        }
        visits = {label: np.diff(each.offsets).astype(float) for label, each in sources.items()}
        charts = [
            _histogram(km, f"Kilometres of a trajectory, {name}", "km"),
            _histogram(visits, f"Visits of a trajectory, {name}", "visits", integers=True),
        ]
        hours = {label: each.hours for label, each in sources.items() if each.hours is not None}
        if hours:
            missing = "" if set(hours) - {REAL} else " (samples have no times)"
            title = f"Hour of arrival, {name}{missing}"
            charts.append(_step_chart(hours, np.arange(25.0), title, "hour", "share of visits"))
        return [chart for chart in charts if chart is not None]


def _histogram(
    values: Mapping[str, Floats], title: str, unit: str, *, integers: bool = False
) -> Chart | None:
    everything = np.concatenate(list(values.values())) if values else np.zeros(0)
    if not len(everything):
        return None
    top = float(np.quantile(everything, 0.99)) or 1.0
    edges = np.arange(0, min(top, LONGEST) + 2) if integers else np.linspace(0, top, 41)
    return _step_chart(values, edges, title, unit, "share of trajectories")


def _step_chart(
    values: Mapping[str, Floats | Ints], edges: Floats, title: str, x: str, y: str
) -> Chart | None:
    """Shares of values between edges, a line for each label."""
    series = []
    for label, each in values.items():
        counts = np.histogram(each, edges)[0] / max(len(each), 1)
        series.append(Series(label, CLASSES[label], edges, np.append(counts, counts[-1])))
    return line_chart(series, title, x, y, steps=True)


def _png(values: Floats) -> str:
    """Values from 0 to 1 as a PNG of one pixel each, in a colour-blind-safe scale; base64."""
    buffer = io.BytesIO()
    load_pyplot().imsave(buffer, values, cmap="cividis", vmin=0, vmax=1, format="png")
    return base64.b64encode(buffer.getvalue()).decode()
