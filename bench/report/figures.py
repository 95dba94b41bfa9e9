"""Figures of benchmarks as PNG files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mobatlas.data.types import Floats
from mobatlas.evaluation.metrics import PAPER_METRICS
from mobatlas.features.maps import FEATURES
from mobatlas.report.charts import BLUE, ORANGE, load_pyplot

PALETTE = (BLUE, ORANGE, "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("--", "-.", ":")
HATCHES = ("", "//", "..", "xx", "--", "oo")
MARKERS = "os^D"
DPI = 110
# metric -> partition or feature -> model -> (value, error)
Bars = Mapping[str, Mapping[str, Mapping[str, tuple[float, float]]]]
Lines = Mapping[str, Mapping[str, float]]  # metric -> name of a line -> value


def bars_figure(path: Path, bars: Bars, lines: Lines, measure: str = "JSD, bits") -> None:
    """Draw a panel of grouped bars for each metric, with lines for values that all share."""
    plt = load_pyplot()
    figure, axes = _panels(plt, len(bars), (4 * len(bars), 4))
    models = _models(bars)
    width = 0.8 / max(len(models), 1)
    for axis, (metric, kinds) in zip(axes[0], bars.items(), strict=True):
        for number, label in enumerate(models):
            points = _points(kinds, list(kinds), label)
            if points is None:
                continue
            place, value, error = points
            axis.bar(
                place + (number - (len(models) - 1) / 2) * width,
                value,
                width,
                yerr=error,
                label=label,
                edgecolor="white",
                color=PALETTE[number % len(PALETTE)],
                hatch=HATCHES[number % len(HATCHES)],
            )
        _draw_lines(axis.axhline, lines[metric])
        axis.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right")
        axis.set_title(metric)
    axes[0][0].set_ylabel(measure)
    _legend_below(figure, axes[0], models)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def forest_figure(path: Path, bars: Bars, lines: Lines, measure: str) -> None:
    """Draw a panel of points with error bars for each metric, with lines for shared values."""
    plt = load_pyplot()
    kinds = list(dict.fromkeys(kind for metric in bars.values() for kind in metric))
    models = _models(bars)
    figure, axes = _panels(plt, len(bars), (3 + 2.4 * len(bars), 1.6 + 0.3 * len(kinds)), True)
    for axis, (metric, values) in zip(axes[0], bars.items(), strict=True):
        for number, label in enumerate(models):
            points = _points(values, kinds, label)
            if points is None:
                continue
            place, value, error = points
            axis.errorbar(
                value,
                place + 0.3 * ((number + 0.5) / len(models) - 0.5),
                xerr=error,
                label=label,
                capsize=2,
                linewidth=1,
                color=PALETTE[number % len(PALETTE)],
                fmt=MARKERS[number % len(MARKERS)],
                markersize=4,
            )
        _draw_lines(axis.axvline, lines[metric])
        axis.set_title(metric)
        axis.grid(axis="y", linewidth=0.3)
    axes[0][0].set_yticks(range(len(kinds)), kinds)
    axes[0][0].invert_yaxis()
    axes[0][len(bars) // 2].set_xlabel(measure)
    _legend_below(figure, axes[0], models)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def _panels(plt: Any, number: int, size: tuple[float, float], sharey: bool = False) -> Any:
    return plt.subplots(1, number, figsize=size, layout="constrained", squeeze=False, sharey=sharey)


def _models(bars: Bars) -> list[str]:
    """Return the labels of all models, in order of appearance."""
    kinds = (kind for metric in bars.values() for kind in metric.values())
    return list(dict.fromkeys(label for kind in kinds for label in kind))


def _points(
    kinds: Mapping[str, Mapping[str, tuple[float, float]]], order: Sequence[str], label: str
) -> list[Floats] | None:
    """Return places, values and errors of a model in a panel, or None if it has none."""
    points = [
        (order.index(kind), *values[label]) for kind, values in kinds.items() if label in values
    ]
    return [np.array(column) for column in zip(*points, strict=True)] if points else None


def disclosure_figure(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw errors of recovered means by epsilon: a panel for each feature, a line for each city."""
    plt = load_pyplot()
    features = list(dict.fromkeys(row["feature"] for row in rows))
    figure, axes = _panels(plt, len(features), (4.5 * len(features), 4))
    for axis, feature in zip(axes[0], features, strict=True):
        _draw_disclosure(axis, [row for row in rows if row["feature"] == feature])
        axis.set(xscale="log", xlabel="epsilon", title=feature, ylim=(0, None))
    axes[0][0].set_ylabel("error of recovered group means (dotted: exact)")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8
    )
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def _draw_disclosure(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    lines = dict.fromkeys((row["partition"], row["panel"]) for row in rows)
    for number, line in enumerate(lines):
        partition, panel = line
        errors = {
            row["rule"]: row["error"] for row in rows if (row["partition"], row["panel"]) == line
        }
        rules = [rule for rule in errors if rule.startswith("epsilon")]
        colour = PALETTE[number % len(PALETTE)]
        axis.plot(
            [float(rule.split()[-1]) for rule in rules],
            [errors[rule] for rule in rules],
            color=colour,
            marker=MARKERS[number % len(MARKERS)],
            label=f"{partition}, {panel:,} people",
        )
        axis.axhline(errors["exact"], color=colour, linestyle=":", linewidth=1)
    axis.axhline(1.0, color="black", linestyle="--", linewidth=1, label="population mean")


def curves_figure(path: Path, curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draw the regional loss and the JSD of groups to their recovered means, by training step."""
    plt = load_pyplot()
    figure, axes = plt.subplots(
        2, len(curves), figsize=(4.5 * len(curves), 6), layout="constrained", squeeze=False
    )
    for (above, below), (name, rows) in zip(axes.T, curves.items(), strict=True):
        steps = [row["step"] for row in rows]
        averages = {
            "validation": (ORANGE, "o", "regional loss"),
            "js average": (BLUE, "s", "JSD, average of groups"),
        }
        for key, (colour, marker, label) in averages.items():
            values = [row[key] for row in rows]
            above.plot(steps, values, color=colour, marker=marker, label=label)
        above.set_title(name)
        above.legend(fontsize=8)
        groups = [key for key in rows[0] if key.startswith("js ") and key != "js average"]
        for number, key in enumerate(groups):
            below.plot(
                steps,
                [row[key] for row in rows],
                color=PALETTE[number % len(PALETTE)],
                linestyle=("-", "--")[number // len(PALETTE) % 2],
                label=key.removeprefix("js "),
            )
        below.set_xlabel("step")
    axes[0][0].set_ylabel("bits")
    axes[1][0].set_ylabel("JSD to recovered means, bits")
    figure.legend(
        *axes[1][0].get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize=8
    )
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def learning_curve_figure(path: Path, result: Mapping[str, Any]) -> None:
    """Draw the JSD of the model and of the floor by training step, a panel for each metric.

    A thin line is a group, the thick line their average.
    """
    plt = load_pyplot()
    figure, axes = _panels(plt, len(PAPER_METRICS), (4 * len(PAPER_METRICS), 4))
    rows = sorted(result["rows"], key=lambda row: row["step"])
    steps = sorted({row["step"] for row in rows})
    for axis, metric in zip(axes[0], PAPER_METRICS, strict=True):
        for group in rows[0]["model"].get("groups", {}):
            values = [row["model"]["groups"][group][metric] for row in rows]
            axis.plot(steps, _by_step(steps, rows, values), color="0.8", linewidth=1)
        values = [row["model"][metric]["jsd"] for row in rows]
        axis.plot(steps, _by_step(steps, rows, values), color="black", label="model")
        floor = float(np.mean([row["floor"][metric]["jsd"] for row in rows]))
        axis.axhline(floor, color="black", linestyle="--", linewidth=1, label="floor")
        axis.set(title=FEATURES[metric].title, xlabel="step", ylabel="JSD, bits")
    _legend_below(figure, axes[0], ["model", "floor"])
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def _by_step(steps: Sequence[int], rows: Sequence[Mapping[str, Any]], values: Any) -> list[float]:
    """Return the mean over seeds of each step."""
    pairs = list(zip((row["step"] for row in rows), values, strict=True))
    return [float(np.mean([value for at, value in pairs if at == step])) for step in steps]


def heatmap_figure(path: Path, names: Sequence[str], tables: Mapping[str, Floats]) -> None:
    """Draw the JSD between each two groups, one square table for each metric."""
    plt = load_pyplot()
    figure, axes = _panels(plt, len(tables), (6.5 * len(tables), 5.5))
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
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def _draw_lines(line: Callable[..., Any], levels: Mapping[str, float]) -> None:
    """Draw values that all models of a panel share, with its `axhline` or `axvline`."""
    for (name, level), dash in zip(levels.items(), itertools.cycle(DASHES), strict=False):
        line(level, color="black", linestyle=dash, linewidth=1, label=name)


def _legend_below(figure: Any, axes: Sequence[Any], models: Sequence[str]) -> None:
    """Draw one legend for all panels, models first; a panel may have only some."""
    pairs = [pair for axis in axes for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    named = {label: handle for handle, label in reversed(pairs)}
    shown = {label: named[label] for label in [*models, *named] if label in named}
    figure.legend([*shown.values()], [*shown], loc="outside lower center", ncols=5, fontsize=8)
