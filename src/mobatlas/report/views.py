"""How a group looks, as real people and as each model have it: maps of its visits, and distributions."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

from mobatlas.data.arrays import Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.evaluation.metrics import MetricSpec, located, travel_distance
from mobatlas.regions.types import Floats
from mobatlas.report.charts import Series, line_chart

REAL = "real people"
KINDS = {REAL: "real", "baseline": "baseline", "supervised": "ours", "strong": "strong"}
EXAMPLES = 6  # samples drawn on a map
LONGEST = 60  # visits that are shown, at most


@dataclass(frozen=True)
class View:
    """A group as real people and as each model have it."""

    name: str
    maps: dict[str, Markup]  # who -> picture
    distributions: Markup


@dataclass(frozen=True)
class Views:
    """Views of the groups of a dataset."""

    dataset: TrajectoryDataset
    spec: MetricSpec

    def view(self, name: str, shown: Mapping[str, Trajectories]) -> View:
        """A group of that name, who -> trajectories; who has none is left out."""
        shown = {label: each for label, each in shown.items() if len(each)}
        density = {label: self._density(each) for label, each in shown.items()}
        top = max((float(each.max()) for each in density.values()), default=1.0)
        maps = {
            label: self._map(label, name, density[label], top, each)
            for label, each in shown.items()
        }
        return View(name, maps, self._distributions(name, shown))

    def _density(self, trajectories: Trajectories) -> Floats:
        """Shares of visits by cell, (cells, cells), north at the top."""
        cells = self.spec.cells
        counts = np.asarray(self.spec.counts(trajectories)["spatial"].sum(0)).ravel()[: cells**2]
        return np.asarray((counts / max(counts.sum(), 1)).reshape(cells, cells)[::-1])

    def _map(
        self, who: str, group: str, density: Floats, top: float, trajectories: Trajectories
    ) -> Markup:
        picture = _png(np.sqrt(density / max(top, 1e-12)))
        # A page is handed on: nobody's own day is on it.
        lines = [] if who == REAL else self._lines(trajectories)
        paths = "".join(f'<path d="{line}"></path>' for line in lines)
        said = f"Where {who} of {group} go: density of visits" + (
            f", and {len(lines)} days as lines" if lines else ""
        )
        return Markup(
            f'<figure class="map {KINDS[who]}"><figcaption>{escape(who)}</figcaption>'
            f'<svg viewBox="0 0 400 400" role="img" aria-label="{escape(said)}">'
            f'<image href="data:image/png;base64,{picture}" width="400" height="400" preserveAspectRatio="none"></image>'
            f"<g>{paths}</g></svg></figure>"
        )

    def _lines(self, trajectories: Trajectories) -> list[str]:
        """Some samples as paths on a map of 400 x 400."""
        owner, places = located(trajectories, self.dataset.vocabulary)
        south, west, north, east = self.spec.box
        x = 400 * (places[:, 1] - west) / max(east - west, 1e-12)
        y = 400 * (north - places[:, 0]) / max(north - south, 1e-12)
        lines = []
        for number in (
            np.linspace(0, len(trajectories) - 1, min(EXAMPLES, len(trajectories)))
            .astype(int)
            .tolist()
        ):
            mine = owner == number
            if mine.sum() > 1:
                lines.append(
                    "M"
                    + "L".join(f"{a:.0f} {b:.0f}" for a, b in zip(x[mine], y[mine], strict=True))
                )
        return lines

    def _distributions(self, name: str, shown: Mapping[str, Trajectories]) -> Markup:
        km = {
            label: travel_distance(each, self.dataset.vocabulary) for label, each in shown.items()
        }
        visits = {label: np.diff(each.offsets).astype(float) for label, each in shown.items()}
        charts = [
            _histogram(km, f"Kilometres of a trajectory, {name}", "km"),
            _histogram(visits, f"Visits of a trajectory, {name}", "visits", whole=True),
        ]
        hours = {label: each.hours for label, each in shown.items() if each.hours is not None}
        if hours:
            silent = "" if set(hours) - {REAL} else " (samples tell no hours)"
            charts.append(_hours(hours, f"Hour of arrival, {name}{silent}"))
        return Markup("").join(charts)


def _hours(hours: Mapping[str, Ints], title: str) -> Markup:
    series = []
    for label, each in hours.items():
        counts = np.bincount(each, minlength=24) / max(len(each), 1)
        series.append(Series(label, KINDS[label], np.arange(25.0), np.append(counts, counts[-1])))
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
        series.append(Series(label, KINDS[label], edges, np.append(counts, counts[-1])))
    return line_chart(series, title, unit, "share of trajectories", steps=True)


def _png(values: Floats) -> str:
    """A picture of values from 0 to 1, one pixel each, in colours that all people tell apart; base64."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import image

    buffer = io.BytesIO()
    image.imsave(buffer, values, cmap="cividis", vmin=0, vmax=1, format="png")
    return base64.b64encode(buffer.getvalue()).decode()
