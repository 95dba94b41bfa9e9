"""Figures of benchmarks as PNG files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mobatlas.data.arrays import Floats
from mobatlas.report.charts import BLUE, ORANGE, load_pyplot

PALETTE = (BLUE, ORANGE, "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("--", "-.", ":")
HATCHES = ("", "//", "..", "xx", "--", "oo")
Bars = Mapping[
    str, Mapping[str, Mapping[str, tuple[float, float]]]
]  # metric -> what varies -> model -> (value, error)


def bars_figure(
    path: Path, bars: Bars, lines: Mapping[str, Mapping[str, float]], measure: str = "JSD, bits"
) -> None:
    """A panel for each metric: bars in groups, and lines across for what all of them share."""
    plt = load_pyplot()
    figure, axes = plt.subplots(
        1, len(bars), figsize=(4 * len(bars), 4), layout="constrained", squeeze=False
    )
    models = list(
        dict.fromkeys(
            label for metric in bars.values() for kinds in metric.values() for label in kinds
        )
    )
    width = 0.8 / max(len(models), 1)
    for axis, (metric, kinds) in zip(axes[0], bars.items(), strict=True):
        for number, label in enumerate(models):
            drawn = [
                (place, *values[label])
                for place, values in enumerate(kinds.values())
                if label in values
            ]
            if drawn:
                where, value, error = (np.array(column) for column in zip(*drawn, strict=True))
                shift = (number - (len(models) - 1) / 2) * width
                manner = {
                    "color": PALETTE[number % len(PALETTE)],
                    "hatch": HATCHES[number % len(HATCHES)],
                }
                axis.bar(
                    where + shift,
                    value,
                    width,
                    yerr=error,
                    label=label,
                    edgecolor="white",
                    **manner,
                )
        _across(axis.axhline, lines[metric])
        axis.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right")
        axis.set_title(metric)
    axes[0][0].set_ylabel(measure)
    _legend_below(figure, axes[0], models)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def forest_figure(
    path: Path, bars: Bars, lines: Mapping[str, Mapping[str, float]], measure: str
) -> None:
    """A panel for each metric beside one list of what varies: points with error bars, and lines for what all of them share."""
    plt = load_pyplot()
    kinds = list(dict.fromkeys(kind for metric in bars.values() for kind in metric))
    models = list(
        dict.fromkeys(
            label for metric in bars.values() for found in metric.values() for label in found
        )
    )
    size = (3 + 2.4 * len(bars), 1.6 + 0.3 * len(kinds))
    figure, axes = plt.subplots(
        1, len(bars), figsize=size, layout="constrained", squeeze=False, sharey=True
    )
    for axis, (metric, found) in zip(axes[0], bars.items(), strict=True):
        for number, label in enumerate(models):
            drawn = [
                (kinds.index(kind), *values[label])
                for kind, values in found.items()
                if label in values
            ]
            if drawn:
                where, value, error = (np.array(column) for column in zip(*drawn, strict=True))
                shift = 0.3 * ((number + 0.5) / len(models) - 0.5)
                manner = {
                    "color": PALETTE[number % len(PALETTE)],
                    "fmt": "os^D"[number % 4],
                    "markersize": 4,
                }
                axis.errorbar(
                    value, where + shift, xerr=error, label=label, capsize=2, linewidth=1, **manner
                )
        _across(axis.axvline, lines[metric])
        axis.set_title(metric)
        axis.grid(axis="y", linewidth=0.3)
    axes[0][0].set_yticks(range(len(kinds)), kinds)
    axes[0][0].invert_yaxis()
    axes[0][len(bars) // 2].set_xlabel(measure)
    _legend_below(figure, axes[0], models)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def disclosure_figure(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Error of recovered means against epsilon: a panel for each feature, a line for each partition and number of people."""
    plt = load_pyplot()
    features = list(dict.fromkeys(row["feature"] for row in rows))
    figure, axes = plt.subplots(
        1, len(features), figsize=(4.5 * len(features), 4), layout="constrained", squeeze=False
    )
    for axis, feature in zip(axes[0], features, strict=True):
        mine = [row for row in rows if row["feature"] == feature]
        lines = dict.fromkeys((row["partition"], row["panel"]) for row in mine)
        for number, (partition, panel) in enumerate(lines):
            of = {
                row["rule"]: row["error"]
                for row in mine
                if (row["partition"], row["panel"]) == (partition, panel)
            }
            points = [
                (float(rule.split()[-1]), error)
                for rule, error in of.items()
                if rule.startswith("epsilon")
            ]
            colour, mark = PALETTE[number % len(PALETTE)], "os^D"[number % 4]
            axis.plot(
                *zip(*points, strict=True),
                color=colour,
                marker=mark,
                label=f"{partition}, {panel:,} people",
            )
            axis.axhline(of["exact"], color=colour, linestyle=":", linewidth=1)
        axis.axhline(1.0, color="black", linestyle="--", linewidth=1, label="everybody alike")
        axis.set(xscale="log", xlabel="epsilon", title=feature, ylim=(0, None))
    axes[0][0].set_ylabel("error of recovered group means (dotted: exact)")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def curves_figure(path: Path, curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """How finetuning went: for each run the regional loss and the JSD of groups to their recovered means, step by step."""
    plt = load_pyplot()
    figure, axes = plt.subplots(
        2, len(curves), figsize=(4.5 * len(curves), 6), layout="constrained", squeeze=False
    )
    for (above, below), (name, rows) in zip(axes.T, curves.items(), strict=True):
        steps = [row["step"] for row in rows]
        above.plot(
            steps,
            [row["validation"] for row in rows],
            color=ORANGE,
            marker="o",
            label="regional loss",
        )
        above.plot(
            steps,
            [row["js average"] for row in rows],
            color=BLUE,
            marker="s",
            label="JSD, average of groups",
        )
        above.set_title(name)
        above.legend(fontsize=8)
        groups = [key for key in rows[0] if key.startswith("js ") and key != "js average"]
        for number, key in enumerate(groups):
            colour, dash = PALETTE[number % len(PALETTE)], ("-", "--")[number // len(PALETTE) % 2]
            below.plot(
                steps,
                [row[key] for row in rows],
                color=colour,
                linestyle=dash,
                label=key.removeprefix("js "),
            )
        below.set_xlabel("step")
    axes[0][0].set_ylabel("bits")
    axes[1][0].set_ylabel("JSD to recovered means, bits")
    figure.legend(
        *axes[1][0].get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize=8
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def heatmap_figure(path: Path, names: Sequence[str], tables: Mapping[str, Floats]) -> None:
    """Square tables with a number in each cell: how far groups are from each other."""
    plt = load_pyplot()
    figure, axes = plt.subplots(
        1, len(tables), figsize=(6.5 * len(tables), 5.5), layout="constrained", squeeze=False
    )
    for axis, (title, table) in zip(axes[0], tables.items(), strict=True):
        image = axis.imshow(table, cmap="cividis", vmin=0)
        for row, column in np.ndindex(table.shape):
            light = table[row, column] < table.max() / 2
            axis.text(
                column,
                row,
                f"{table[row, column]:.2f}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if light else "black",
            )
        axis.set_xticks(range(len(names)), names, rotation=60, ha="right")
        axis.set_yticks(range(len(names)), names)
        axis.set_title(f"{title}: JSD between groups, bits")
        figure.colorbar(image, ax=axis)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _across(line: Callable[..., Any], levels: Mapping[str, float]) -> None:
    """What all of a panel share, drawn by its `axhline` or `axvline`."""
    for (name, level), dash in zip(levels.items(), itertools.cycle(DASHES), strict=False):
        line(level, color="black", linestyle=dash, linewidth=1, label=name)


def _legend_below(figure: Any, axes: Sequence[Any], models: Sequence[str]) -> None:
    """One legend of all panels, models first."""
    pairs = [pair for axis in axes for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    named = {
        label: handle for handle, label in reversed(pairs)
    }  # a panel may lack what another has
    shown = {label: named[label] for label in [*models, *named] if label in named}
    figure.legend([*shown.values()], [*shown], loc="outside lower center", ncols=5, fontsize=8)
