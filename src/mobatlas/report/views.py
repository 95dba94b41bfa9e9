"""Maps and distributions of a group: real people beside the samples of each model."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.evaluation.metrics import MetricSpec, located, travel_distance
from mobatlas.report.charts import Series, line_chart

REAL = "real people"
STYLES = {REAL: "real", "baseline": "baseline", "supervised": "ours", "strong": "strong"}
EXAMPLES = 6  # samples drawn on a map
LONGEST = 60  # visits on the axis, at most


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
        f'<figure class="map {STYLES[label]}"><figcaption>{escape(label)}</figcaption>'
        f'<svg viewBox="0 0 400 400" role="img" aria-label="{escape(description)}">'
        f'<image href="data:image/png;base64,{_png(np.sqrt(brightness))}" width="400" '
        f'height="400" preserveAspectRatio="none"></image><g>{paths}</g></svg></figure>'
    )


def _hours(hours: Mapping[str, Ints], title: str) -> Markup:
    series = []
    for label, each in hours.items():
        counts = np.bincount(each, minlength=24) / max(len(each), 1)
        series.append(Series(label, STYLES[label], np.arange(25.0), np.append(counts, counts[-1])))
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
        series.append(Series(label, STYLES[label], edges, np.append(counts, counts[-1])))
    return line_chart(series, title, unit, "share of trajectories", steps=True)


def _png(values: Floats) -> str:
    """Values from 0 to 1 as a PNG of one pixel each, in a colour-blind-safe scale; base64."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import image

    buffer = io.BytesIO()
    image.imsave(buffer, values, cmap="cividis", vmin=0, vmax=1, format="png")
    return base64.b64encode(buffer.getvalue()).decode()
