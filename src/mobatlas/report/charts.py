"""Charts and maps: inline SVG and HTML for the report, and the figure of a diagnosis as PNG.

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
from markupsafe import Markup, escape

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.evaluation.metrics import MetricSpec, located, travel_distance
from mobatlas.regions.identifiability import Diagnosis
from mobatlas.regions.types import Composition

WIDTH = 640
HEIGHT = 260
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40  # margins
TICKS = 5
SHOWN_REGIONS = 60
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"  # safe for colour-blind readers
REAL = "real people"
CLASSES = {REAL: "real", "baseline": "baseline", "supervised": "ours", "strong": "strong"}
EXAMPLES = 6  # samples drawn on a map
LONGEST = 60  # visits on the axis, at most
VERDICT_COLOURS = {"identified": BLUE, "partly identified": ORANGE, "not identified": GREY}


@dataclass(frozen=True)
class Series:
    """A line with its name in the legend; `kind` is its class in the stylesheet."""

    name: str
    kind: str
    x: Floats
    y: Floats


@dataclass(frozen=True)
class Mark:
    """A point on a scale."""

    name: str
    kind: str
    value: float


def line_chart(
    series: Sequence[Series], title: str, x: str, y: str, *, steps: bool = False, log: bool = False
) -> Markup:
    """Lines over common axes named x and y: histograms with `steps`, a logarithmic y with `log`."""
    shown = [each for each in series if len(each.x)]
    if not shown:
        return Markup("")
    height = np.concatenate([each.y[np.isfinite(each.y)] for each in shown])
    low = float(height[height > 0].min()) if log else 0.0
    high = float(height.max())
    left = min(float(each.x.min()) for each in shown)
    right = max(float(each.x.max()) for each in shown)
    across = _Scale(left, right, LEFT, WIDTH - RIGHT)
    up = _Scale(low, high if high > low else low + 1, HEIGHT - BOTTOM, TOP, log)
    parts = [_axes(across, up, x, y)]
    for each in shown:
        points = "L".join(_points(each, across, up, steps))
        parts.append(
            f'<path class="line {escape(each.kind)}" d="M{points}">'
            f"<title>{escape(each.name)}</title></path>"
        )
    legend = _legend([(each.name, each.kind) for each in shown])
    return Markup(
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'{"".join(parts)}</svg><div class="legend">{legend}</div></figure>'
    )


def bar_chart(
    labels: Sequence[str], values: Sequence[float], kinds: Sequence[str], title: str
) -> Markup:
    """Horizontal bars of values up to 1 or more; text is as large as on the rest of the page."""
    top = max(1.0, max(values, default=0.0))
    rows = [
        f'<div class="row"><span>{escape(label)}</span><span class="track">'
        f'<i class="bar {escape(kind)}" style="width:{100 * max(0.0, value) / top:.1f}%"></i>'
        f"</span><span>{value:.3g}</span></div>"
        for label, value, kind in zip(labels, values, kinds, strict=True)
    ]
    return _html_figure("bars", title, "".join(rows))


def gap_chart(rows: Sequence[tuple[str, Sequence[Mark], float, float]], title: str) -> Markup:
    """Where marks lie between baseline and floor; rows of (metric, marks, baseline, floor)."""
    drawn = []
    for label, marks, baseline, floor in rows:
        content = '<span class="quiet">the baseline is already at the floor</span>'
        if baseline > floor:
            places = [_placed(mark, (baseline - mark.value) / (baseline - floor)) for mark in marks]
            content = f'<span class="gap"><i class="rail"></i>{"".join(places)}</span>'
        drawn.append(f'<div class="row"><span>{escape(label)}</span>{content}</div>')
    kinds = dict.fromkeys((mark.name, mark.kind) for _, marks, _, _ in rows for mark in marks)
    ends = '<span class="quiet">left end: baseline; right end: sampling floor</span>'
    legend = f'<div class="legend">{_legend(list(kinds))}{ends}</div>'
    return _html_figure("gaps", title, "".join(drawn) + legend)


def heat_table(values: Mapping[str, Mapping[str, float]]) -> Markup:
    """A square table of values between 0 and 1; larger values have a darker background."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in values)
    rows = []
    for name, row in values.items():
        cells = "".join(f'<td style="--heat:{x:.3f}">{x:.2f}</td>' for x in row.values())
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    return Markup(
        f'<table class="heat"><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def diagnosis_figure(diagnosis: Diagnosis, composition: Composition, path: Path) -> None:
    """Draw the composition, its singular values and the contrasts between groups as PNG."""
    plt = load_pyplot()
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(15, 5), layout="constrained", width_ratios=(3, 2, 3)
    )
    _draw_composition(figure, left, diagnosis, composition)
    order = np.arange(1, len(diagnosis.singular_values) + 1)
    middle.bar(order, np.maximum(diagnosis.singular_values, 1e-12), color=BLUE)
    noise = 1 / np.sqrt(diagnosis.people[1])
    middle.axhline(noise, color=ORANGE, linestyle="--", label="noise of a median region")
    middle.set_yscale("log")
    middle.set_xticks(order)
    rank = f"rank {diagnosis.rank}, effective {diagnosis.effective_rank}"
    middle.set_title(f"singular values: {rank}")
    middle.legend()
    rows = list(diagnosis.contrasts)[::-1]
    right.barh(
        [row.name for row in rows],
        [row.share_identified for row in rows],
        color=[VERDICT_COLOURS[row.verdict] for row in rows],
    )
    right.set_xlim(0, 1)
    right.set_xlabel("share of the contrast that these regions identify")
    right.set_title("contrasts")
    right.tick_params(axis="y", labelsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_composition(
    figure: Any, axes: Any, diagnosis: Diagnosis, composition: Composition
) -> None:
    shown = composition.shares[:SHOWN_REGIONS]
    top = max(float(shown.max()), 1e-9)
    image = axes.imshow(shown, aspect="auto", cmap="cividis", vmin=0, vmax=top)
    axes.set_xticks(range(len(diagnosis.groups)), diagnosis.groups, rotation=60, ha="right")
    size = 8 if len(shown) < 30 else 4
    axes.set_yticks(range(len(shown)), composition.regions[:SHOWN_REGIONS], fontsize=size)
    more = ""
    if diagnosis.regions > SHOWN_REGIONS:
        more = f" (first {SHOWN_REGIONS} of {diagnosis.regions})"
    axes.set_title(f"composition P{more}")
    figure.colorbar(image, ax=axes, label="share of people")


def load_pyplot() -> Any:
    """Pyplot without a display. Few commands need it, and it takes a second to import."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


@dataclass(frozen=True)
class _Scale:
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
        if self.log:
            first = math.floor(math.log10(self.low))
            powers = [10.0**k for k in range(first, math.ceil(math.log10(self.high)) + 1)]
            inside = [each for each in powers if self.low <= each <= self.high]
            return inside or [self.low, self.high]
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        step = 10 ** math.floor(math.log10(span / TICKS))
        step *= next(times for times in (1, 2, 5, 10) if span / (step * times) <= TICKS + 1)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _axes(across: _Scale, up: _Scale, x: str, y: str) -> str:
    base = HEIGHT - BOTTOM
    parts = []
    for value in up.ticks():
        place = up(value)
        parts.append(_horizontal("grid", f"{place:.1f}"))
        parts.append(f'<text x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{value:g}</text>')
    below = f'y="{base + 16}" text-anchor="middle"'
    parts += [f'<text x="{across(tick):.1f}" {below}>{tick:g}</text>' for tick in across.ticks()]
    parts.append(_horizontal("axis", f"{base}"))
    middle = f'x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}"'
    parts.append(f'<text {middle} text-anchor="middle">{escape(x)}</text>')
    turned = f'transform="translate(13 {(TOP + base) / 2:.0f}) rotate(-90)"'
    parts.append(f'<text {turned} text-anchor="middle">{escape(y)}</text>')
    return "".join(parts)


def _horizontal(kind: str, y: str) -> str:
    return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"></line>'


def _points(series: Series, across: _Scale, up: _Scale, steps: bool) -> list[str]:
    points = []
    for number, (x, y) in enumerate(zip(series.x.tolist(), series.y.tolist(), strict=True)):
        if not math.isfinite(y) or (up.log and y <= 0):
            continue
        height = f"{up(y):.1f}"
        points.append(f"{across(x):.1f} {height}")
        if steps and number + 1 < len(series.x):
            points.append(f"{across(float(series.x[number + 1])):.1f} {height}")
    return points or ["0 0"]


def _placed(mark: Mark, share: float) -> str:
    """A mark on a rail that begins at a sixth of the width and ends at five sixths."""
    text = escape(f"{mark.name}: {mark.value:.4f} (gap closed: {share:.0%})")
    place = 100 * (1 / 6 + 2 / 3 * min(1.2, max(-0.2, share)))
    return (
        f'<i class="at" role="img" aria-label="{text}" title="{text}" style="left:{place:.1f}%">'
        f'<svg viewBox="0 0 16 16"><g class="mark {escape(mark.kind)}">'
        f"{_shape(mark.kind, 8, 8)}</g></svg></i>"
    )


def _legend(names: Sequence[tuple[str, str]]) -> Markup:
    items = [
        f'<span class="key"><svg viewBox="0 0 28 12" aria-hidden="true">'
        f'<path class="line {escape(kind)}" d="M1 6L27 6"></path>'
        f'<g class="mark {escape(kind)}">{_shape(kind, 14, 6, 4)}</g></svg>{escape(name)}</span>'
        for name, kind in names
    ]
    return Markup("".join(items))


def _shape(kind: str, x: float, y: float, size: float = 6) -> str:
    """A square, a triangle, a diamond or a circle, by kind."""
    left, right, top, bottom = x - size, x + size, y - size, y + size
    corners = {
        "strong": ((left, top), (right, top), (right, bottom), (left, bottom)),
        "baseline": ((x, top), (right, bottom), (left, bottom)),
        "real": ((x, top), (right, y), (x, bottom), (left, y)),
    }
    if kind not in corners:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}"></circle>'
    path = "L".join(f"{a:.1f} {b:.1f}" for a, b in corners[kind])
    return f'<path d="M{path}Z"></path>'


def _html_figure(kind: str, title: str, content: str) -> Markup:
    return Markup(
        f'<figure class="{kind}"><figcaption>{escape(title)}</figcaption>{content}</figure>'
    )


@dataclass(frozen=True)
class View:
    """The pictures of one group."""

    name: str
    maps: dict[str, Markup]  # source of trajectories -> picture
    distributions: Markup


@dataclass(frozen=True)
class Views:
    """Draws the pictures of the groups of a dataset."""

    dataset: TrajectoryDataset
    spec: MetricSpec

    def view(self, name: str, sources: Mapping[str, Trajectories]) -> View:
        """The pictures of a group: REAL or a model -> its trajectories."""
        sources = {label: each for label, each in sources.items() if len(each)}
        density = {label: self._density(each) for label, each in sources.items()}
        top = max((float(each.max()) for each in density.values()), default=1.0)
        maps = {}
        for label, trajectories in sources.items():
            # The report may be shared, so it shows no day of a real person.
            lines = [] if label == REAL else self._lines(trajectories)
            maps[label] = _map(label, name, density[label] / max(top, 1e-12), lines)
        return View(name, maps, self._distributions(name, sources))

    def _density(self, trajectories: Trajectories) -> Floats:
        """Shares of visits by cell, (cells, cells), north at the top."""
        cells = self.spec.cells
        counts = np.asarray(self.spec.counts(trajectories)["spatial"].sum(0)).ravel()[: cells**2]
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
            here = owner == number
            if here.sum() > 1:
                points = zip(x[here], y[here], strict=True)
                lines.append("M" + "L".join(f"{a:.0f} {b:.0f}" for a, b in points))
        return lines

    def _distributions(self, name: str, sources: Mapping[str, Trajectories]) -> Markup:
        km = {
            label: travel_distance(each, self.dataset.vocabulary) for label, each in sources.items()
        }
        visits = {label: np.diff(each.offsets).astype(float) for label, each in sources.items()}
        charts = [
            _histogram(km, f"Kilometres of a trajectory, {name}", "km"),
            _histogram(visits, f"Visits of a trajectory, {name}", "visits", whole=True),
        ]
        hours = {label: each.hours for label, each in sources.items() if each.hours is not None}
        if hours:
            missing = "" if set(hours) - {REAL} else " (samples have no times)"
            charts.append(_hours(hours, f"Hour of arrival, {name}{missing}"))
        return Markup("").join(charts)


def _map(label: str, group: str, brightness: Floats, lines: list[str]) -> Markup:
    """A map of densities from 0 to 1 (cells, cells) with some trajectories."""
    paths = "".join(f'<path d="{line}"></path>' for line in lines)
    description = f"Density of visits, {group}, {label}"
    if lines:
        description += f"; the lines are {len(lines)} trajectories"
    return Markup(
        f'<figure class="map {CLASSES[label]}"><figcaption>{escape(label)}</figcaption>'
        f'<svg viewBox="0 0 400 400" role="img" aria-label="{escape(description)}">'
        f'<image href="data:image/png;base64,{_png(np.sqrt(brightness))}" width="400" '
        f'height="400" preserveAspectRatio="none"></image><g>{paths}</g></svg></figure>'
    )


def _hours(hours: Mapping[str, Ints], title: str) -> Markup:
    series = []
    for label, each in hours.items():
        counts = np.bincount(each, minlength=24) / max(len(each), 1)
        series.append(Series(label, CLASSES[label], np.arange(25.0), np.append(counts, counts[-1])))
    return line_chart(series, title, "hour", "share of visits", steps=True)


def _histogram(
    values: Mapping[str, Floats], title: str, unit: str, *, whole: bool = False
) -> Markup:
    everything = np.concatenate(list(values.values())) if values else np.zeros(0)
    if not len(everything):
        return Markup("")
    top = float(np.quantile(everything, 0.99)) or 1.0
    edges = np.arange(0, min(top, LONGEST) + 2) if whole else np.linspace(0, top, 41)
    series = []
    for label, each in values.items():
        counts = np.histogram(each, edges)[0] / max(len(each), 1)
        series.append(Series(label, CLASSES[label], edges, np.append(counts, counts[-1])))
    return line_chart(series, title, unit, "share of trajectories", steps=True)


def _png(values: Floats) -> str:
    """Values from 0 to 1 as a PNG of one pixel each, in a colour-blind-safe scale; base64."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import image

    buffer = io.BytesIO()
    image.imsave(buffer, values, cmap="cividis", vmin=0, vmax=1, format="png")
    return base64.b64encode(buffer.getvalue()).decode()
