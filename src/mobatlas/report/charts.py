"""Charts as inline SVG: they take their colours from the page, so they follow light and dark, print, and need nothing else.

Series are told apart by dashes and marks as well as by colour, and every chart says in words what it shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

from mobatlas.regions.types import Floats

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40  # margins
TICKS = 5


@dataclass(frozen=True)
class Series:
    """A line, named in the legend; `kind` is its class in the stylesheet."""

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
    """Lines over a common axis; with `steps` they are histograms, with `log` the vertical axis is logarithmic."""
    shown = [each for each in series if len(each.x)]
    if not shown:
        return Markup("")
    height = np.concatenate([each.y[np.isfinite(each.y)] for each in shown])
    low, high = (
        (float(height[height > 0].min()), float(height.max()))
        if log
        else (0.0, float(height.max()))
    )
    across = _Scale(
        min(float(each.x.min()) for each in shown),
        max(float(each.x.max()) for each in shown),
        LEFT,
        WIDTH - RIGHT,
    )
    up = _Scale(low, high if high > low else low + 1, HEIGHT - BOTTOM, TOP, log)
    parts = [_axes(across, up, x, y)]
    for each in shown:
        points = _points(each, across, up, steps)
        parts.append(
            f'<path class="line {escape(each.kind)}" d="M{"L".join(points)}"><title>{escape(each.name)}</title></path>'
        )
    return _figure(
        "".join(parts), title, HEIGHT, legend([(each.name, each.kind) for each in shown])
    )


def bar_chart(
    labels: Sequence[str],
    values: Sequence[float],
    kinds: Sequence[str],
    title: str,
    most: float = 0.0,
) -> Markup:
    """Horizontal bars with their values beside them; text stays as large as the page's on a phone."""
    top = max(most, max(values, default=0.0)) or 1.0
    rows = [
        f'<div class="row"><span>{escape(label)}</span><span class="track"><i class="bar {escape(kind)}" '
        f'style="width:{100 * max(0.0, value) / top:.1f}%"></i></span><span>{value:.3g}</span></div>'
        for label, value, kind in zip(labels, values, kinds, strict=True)
    ]
    return Markup(
        f'<figure class="bars"><figcaption>{escape(title)}</figcaption>{"".join(rows)}</figure>'
    )


def gap_chart(rows: Sequence[tuple[str, Sequence[Mark], float, float]], title: str) -> Markup:
    """For each metric where marks lie between the baseline, at the left, and the sampling floor, at the right."""
    drawn = []
    for label, marks, baseline, floor in rows:
        inside = '<span class="quiet">the baseline is at the floor already</span>'
        if baseline > floor:
            inside = "".join(
                _placed(mark, (baseline - mark.value) / (baseline - floor)) for mark in marks
            )
            inside = f'<span class="gap"><i class="rail"></i>{inside}</span>'
        drawn.append(f'<div class="row"><span>{escape(label)}</span>{inside}</div>')
    kinds = dict.fromkeys((mark.name, mark.kind) for _, marks, _, _ in rows for mark in marks)
    ends = Markup('<span class="quiet">left end: baseline; right end: sampling floor</span>')
    below = f'<div class="legend">{legend(list(kinds))}{ends}</div>'
    return Markup(
        f'<figure class="gaps"><figcaption>{escape(title)}</figcaption>{"".join(drawn)}{below}</figure>'
    )


def _placed(mark: Mark, share: float) -> str:
    """A mark on a rail that begins at a sixth of the width and ends at five sixths."""
    said = f"{mark.name}: {mark.value:.4f} ({share:.0%} of the way)"
    place = 100 * (1 / 6 + 2 / 3 * min(1.2, max(-0.2, share)))
    shape = f'<svg viewBox="0 0 16 16"><g class="mark {escape(mark.kind)}">{_shape(mark.kind, 8, 8)}</g></svg>'
    return f'<i class="at" role="img" aria-label="{escape(said)}" title="{escape(said)}" style="left:{place:.1f}%">{shape}</i>'


def legend(names: Sequence[tuple[str, str]]) -> Markup:
    """What the lines and marks are."""
    items = [
        f'<span class="key"><svg viewBox="0 0 28 12" aria-hidden="true"><path class="line {escape(kind)}" d="M1 6L27 6"></path>'
        f'<g class="mark {escape(kind)}">{_shape(kind, 14, 6, 4)}</g></svg>{escape(name)}</span>'
        for name, kind in names
    ]
    return Markup("".join(items))


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
            found = [
                10.0**power
                for power in range(
                    math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1
                )
            ]
            return [each for each in found if self.low <= each <= self.high] or [
                self.low,
                self.high,
            ]
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        step = 10 ** math.floor(math.log10(span / TICKS))
        step *= next(times for times in (1, 2, 5, 10) if span / (step * times) <= TICKS + 1)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _axes(across: _Scale, up: _Scale, x: str, y: str) -> str:
    parts = []
    for value in up.ticks():
        place = up(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}"></line>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{value:g}</text>')
    base = HEIGHT - BOTTOM
    below = f'y="{base + 16}" text-anchor="middle"'
    parts += [f'<text x="{across(tick):.1f}" {below}>{tick:g}</text>' for tick in across.ticks()]
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"></line>'
    )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>'
    )
    middle = (TOP + base) / 2
    parts.append(
        f'<text transform="translate(13 {middle:.0f}) rotate(-90)" text-anchor="middle">{escape(y)}</text>'
    )
    return "".join(parts)


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


def _shape(kind: str, x: float, y: float, size: float = 6) -> str:
    """A circle, a square, a triangle or a diamond, by kind."""
    if kind == "strong":
        return f'<rect x="{x - size:.1f}" y="{y - size:.1f}" width="{2 * size}" height="{2 * size}"></rect>'
    if kind == "baseline":
        return f'<path d="M{x:.1f} {y - size:.1f}L{x + size:.1f} {y + size:.1f}L{x - size:.1f} {y + size:.1f}Z"></path>'
    if kind == "real":
        corners = "L".join(
            f"{a:.1f} {b:.1f}"
            for a, b in ((x, y - size), (x + size, y), (x, y + size), (x - size, y))
        )
        return f'<path d="M{corners}Z"></path>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}"></circle>'


def _figure(inside: str, title: str, height: int, below: Markup) -> Markup:
    drawn = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{inside}</svg>'
    return Markup(
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{drawn}<div class="legend">{below}</div></figure>'
    )
