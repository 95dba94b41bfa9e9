"""The research questions as tables, figures and one page: what `python -m bench rq1` to `rq3` found, the paper's own beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.report.figures import bars_figure, curves_figure, heatmap_figure
from bench.report.published import AVERAGE, STATES, published, published_rows
from bench.score_models import FLOOR
from bench.summary import Result, read_result
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.metrics import PAPER_METRICS, metrics
from mobatlas.io.manifest import write_atomic
from mobatlas.report.tables import SHARE, Cell, Table, write_tables

QUESTIONS = {
    "rq1": "RQ1: how groups are mixed in regions",
    "rq2": "RQ2: which feature the regions tell",
    "rq3": "RQ3: next-POI prediction",
}
PREDICTION = {
    "accuracy": "Accuracy",
    "hr10": "HR@10",
    "ndcg10": "NDCG@10",
    "geo_error_km": "GeoError, km",
}
POI_ALONE = {"poi_accuracy": "Accuracy, POIs alone", "poi_hr10": "HR@10, POIs alone"}
TITLES = {metric.name: metric.title for metric in metrics()}
WRITTEN = "Written by `python -m bench results"
OWN = "tilt, calibrated"  # the default strategy


def question_tables(result: Result) -> dict[str, Table]:
    """Of one question, by name; the first is the one to read."""
    return _prediction_tables(result) if result["question"] == "rq3" else _divergence_tables(result)


def write_question(out: Path, result: Result) -> None:
    """Tables in four formats and figures, in folders of the question within `out`."""
    folder = out / f"{result.get('name', result['question'])}-tables"
    folder.mkdir(exist_ok=True)
    write_tables(folder, question_tables(result))
    _draw(folder, result)


def write_page(folder: Path, out: Path, *, all_tables: bool = False) -> str:
    """Write one page with every question whose result lies in `folder`.

    Figures go into a folder beside the page that has its name. By default each question shows
    its average table; `all_tables` adds the other metrics, every group and the paper's numbers.
    """
    found = {
        name: read_result(folder / f"{name}.json")
        for name in QUESTIONS
        if (folder / f"{name}.json").exists()
    }
    if not found:
        raise MobatlasError(
            f"{folder}: has none of {', '.join(f'{name}.json' for name in QUESTIONS)}; run python -m bench rq1 first"
        )
    figures = out.parent / out.stem
    figures.mkdir(parents=True, exist_ok=True)
    more = " --all" if all_tables else ""
    parts = [
        "# Results\n",
        f"{WRITTEN} {folder.as_posix()}{more} --out {out.as_posix()}`.\n",
        "JSD in bits; lower is better. The *floor* compares real training people with real test "
        "people: sampling noise alone. *Gap closed* is the share of the distance from the baseline "
        "to the floor.\n",
    ]
    for name, result in found.items():
        parts += _section(name, result, figures, all_tables)
    write_markdown(out, parts)
    return f"{out}: {', '.join(found)}"


def _section(name: str, result: Result, figures: Path, all_tables: bool) -> Iterator[str]:
    versions = ", ".join(
        f"{key} {value}"
        for key, value in result["versions"].items()
        if key in ("mobatlas", "torch")
    )
    yield f"## {QUESTIONS[name]}\n"
    yield f"`{result['command']}`, seeds {', '.join(map(str, result['seeds']))}; {versions}.\n"
    yield f"{_sentence(result)}\n"
    for path in _draw(figures, result):
        yield f"![{path.stem.replace('-', ' ')}]({figures.name}/{path.name})\n"
    tables = list(question_tables(result).values())
    for table in tables if all_tables else tables[:1]:
        yield table.as_markdown()


def _sentence(result: Result) -> str:
    """What was found, in plain words."""
    if result["question"] == "rq3":
        rows = {row["material"]: row for row in result["rows"]}
        closed = rows[OWN]["gap_closed"]["accuracy"]
        said = ", ".join(f"{label} {row['average']['accuracy']:.3f}" for label, row in rows.items())
        ours = (
            "no gap to close"
            if closed is None
            else f"{closed:.0%} of the way from the baseline to real people"
        )
        return f"Accuracy of the next visit by what the predictor learnt from: {said}. The default strategy: {ours}."
    rows_of = [row for row in _rows(result, "group") if row["model"] == OWN]
    what = "partition" if result["question"] == "rq1" else "features"
    told = [
        (row[what] if what == "partition" else "+".join(row[what]), row["metrics"]["poi"])
        for row in rows_of
    ]
    closed = [f"{name} {_share(found['floor_closed'])}" for name, found in told]
    return f"The default strategy, of the way from the baseline to the floor on POI frequency: {', '.join(closed)}."


def _share(value: float | None) -> str:
    return "nothing to close" if value is None else format(value, SHARE)


def _rows(result: Result, anchors: str) -> list[Mapping[str, Any]]:
    return [row for row in result["rows"] if row["anchors"] == anchors]


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['model']}, {row['divergence']}" if row["divergence"] else str(row["model"])


def _where(result: Result) -> tuple[str, Callable[[Mapping[str, Any]], str]]:
    """The first column: what a question varies."""
    if result["question"] == "rq1":
        return "partition", lambda row: row["partition"] or ""
    return "feature", lambda row: " + ".join(row["features"] or ())


def _divergence_tables(result: Result) -> dict[str, Table]:
    seeds = len(result["seeds"])
    of_seeds = f"{seeds} seeds" if seeds > 1 else "one seed"
    caption = (
        f"JSD in bits to test people of a group, average over groups, {of_seeds}; anchors of the"
    )
    rest = [metric.name for metric in metrics() if metric.name not in PAPER_METRICS]
    tables = {
        "average": _averages(result, "group", PAPER_METRICS, f"{caption} group."),
        "gap": _gaps(result),
        "population": _averages(result, "population", PAPER_METRICS, f"{caption} population."),
        "others": _averages(result, "group", rest, f"{caption} group, other metrics."),
    }
    for metric in PAPER_METRICS:
        tables[f"groups-{metric}"] = _by_group(result, metric, of_seeds)
    return tables | {f"published-{state.lower()}": _published(result, state) for state in STATES}


def _averages(result: Result, anchors: str, metrics: Sequence[str], caption: str) -> Table:
    """JSD, and what is closed of the way to the floor."""
    first, where = _where(result)
    rows: list[tuple[Cell, ...]] = []
    for row in _rows(result, anchors):
        found = [row["metrics"][name] for name in metrics]
        rows.append(
            (
                where(row),
                _label(row),
                *_pairs((each["jsd"], each["floor_closed"]) for each in found),
            )
        )
    floor = [
        (row["metrics"][name]["floor"], 1.0)
        for row in _rows(result, anchors)[:1]
        for name in metrics
    ]
    rows.insert(2, ("", FLOOR, *_pairs(floor)))
    columns = [name for metric in metrics for name in (TITLES[metric], f"closed, {TITLES[metric]}")]
    formats = {name: SHARE for name in columns if name.startswith("closed")}
    note = "Closed: none where baseline and floor differ by no more than the spread between seeds."
    return Table((first, "model", *columns), tuple(rows), caption, formats, note)


def _pairs(values: Any) -> list[Cell]:
    return [cell for pair in values for cell in pair]


def _gaps(result: Result) -> Table:
    """Gap closed towards strong, as the paper has it."""
    first, where = _where(result)
    rows = [
        (where(row), _label(row), *(row["metrics"][name]["gap_closed"] for name in PAPER_METRICS))
        for row in _rows(result, "group")
        if row[first if first == "partition" else "features"]
    ]
    columns = (first, "model", *(TITLES[name] for name in PAPER_METRICS))
    note = (
        "None where strong is not better than the baseline by more than the spread between seeds."
    )
    return Table(
        columns, tuple(rows), "Gap closed towards strong.", dict.fromkeys(columns[2:], SHARE), note
    )


def _by_group(result: Result, metric: str, of_seeds: str) -> Table:
    first, where = _where(result)
    rows = []
    names = list(_rows(result, "group")[0]["groups"])
    for row in _rows(result, "group"):
        found = [row["groups"][name][metric] for name in names]
        cells: list[Cell] = [
            f"{mean:.3f} ± {sd:.3f}" if len(result["seeds"]) > 1 else mean for mean, sd in found
        ]
        spread = float(np.std([mean for mean, _ in found], ddof=1))
        rows.append((where(row), _label(row), *cells, row["metrics"][metric]["jsd"], spread))
    caption = f"{TITLES[metric]}: JSD in bits to test people of each group, {of_seeds}."
    return Table((first, "model", *names, "average", "sd over groups"), tuple(rows), caption)


def _published(result: Result, state: str) -> Table:
    """The averages that the paper printed."""
    question = result["question"]
    caption = f"For orientation, as published: {state}. {published()['source']['caveat']}"
    cells = [row for row in published_rows(question, state) if row["group"] == AVERAGE]
    metrics = PREDICTION if question == "rq3" else {name: TITLES[name] for name in PAPER_METRICS}
    first = "feature" if question == "rq2" else "partition"
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in cells:
        key = (str(row["feature" if question == "rq2" else "partition"] or ""), row["model"])
        found.setdefault(key, {})[row["metric"]] = row["mean"]
    rows = tuple((*key, *(values.get(name) for name in metrics)) for key, values in found.items())
    return Table((first, "model", *metrics.values()), rows, caption)


def _prediction_tables(result: Result) -> dict[str, Table]:
    sizes = sum(result["sizes"].values())
    columns = PREDICTION | POI_ALONE
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            row["material"],
            *(row["average"][name] for name in columns),
            row["gap_closed"]["accuracy"],
        )
        for row in result["rows"]
    )
    caption = f"Next visits of real test people, average over groups; {sizes:,} trajectories of each material to learn from."
    closed = "closed, Accuracy"
    note = "Closed: of the way from the baseline to real training people."
    head: tuple[str, ...] = ("learnt from", *columns.values(), closed)
    also = f"closed, {POI_ALONE['poi_hr10']}"
    if len(result["seeds"]) > 1 and "spread" in result["rows"][0]:
        note += " Empty where seeds differ by more than that way. Spread: standard deviation between seeds."
        head = (*head, also, *(f"spread, {columns[name]}" for name in ("accuracy", "poi_hr10")))
        rows = tuple(
            (
                *row,
                found["gap_closed"]["poi_hr10"],
                found["spread"]["accuracy"],
                found["spread"]["poi_hr10"],
            )
            for row, found in zip(rows, result["rows"], strict=True)
        )
    tables = {"average": Table(head, rows, caption, {closed: SHARE, also: SHARE}, note)}
    names = list(result["rows"][0]["groups"])
    for metric, title in columns.items():
        body = tuple(
            (
                row["material"],
                *(row["groups"][name][metric] for name in names),
                row["average"][metric],
            )
            for row in result["rows"]
        )
        tables[f"groups-{metric.replace('_', '-')}"] = Table(
            ("learnt from", *names, "average"), body, f"{title} of the next visit, by group."
        )
    return tables | {f"published-{state.lower()}": _published(result, state) for state in STATES}


def _draw(folder: Path, result: Result) -> list[Path]:
    """The figures of a question, as PNG files of its name."""
    name = result["question"]
    made: list[Path] = []
    if name == "rq3":
        return made
    bars = folder / f"{name}-bars.png"
    bars_figure(bars, *_bars(result))
    made.append(bars)
    if result["curves"]:
        made.append(folder / f"{name}-curves.png")
        curves_figure(made[-1], result["curves"])
    if name == "rq1":
        made.append(folder / f"{name}-groups.png")
        groups = list(_rows(result, "group")[0]["groups"])
        apart = {
            TITLES[metric]: np.array(result["between_groups"][metric])
            for metric in ("poi", "spatial")
        }
        heatmap_figure(made[-1], groups, apart)
    return made


def _bars(
    result: Result,
) -> tuple[dict[str, dict[str, dict[str, tuple[float, float]]]], dict[str, dict[str, float]]]:
    """Metric -> what is varied -> model -> (JSD, sd over groups); and the lines that all of a metric have in common."""
    _, where = _where(result)
    rows = _rows(result, "group")
    bars: dict[str, Any] = {TITLES[name]: {} for name in PAPER_METRICS}
    lines: dict[str, Any] = {}
    for name in PAPER_METRICS:
        first = rows[0]["metrics"][name]
        lines[TITLES[name]] = {label: first[label] for label in ("baseline", "strong", "floor")}
        for row in rows:
            if row["features"] is None:  # phase 1, drawn as lines
                continue
            spread = float(np.std([values[name][0] for values in row["groups"].values()], ddof=1))
            bars[TITLES[name]].setdefault(where(row), {})[_label(row)] = (
                row["metrics"][name]["jsd"],
                spread,
            )
    return bars, lines


def write_markdown(out: Path, parts: Sequence[str]) -> None:
    """Write a page over one that was written so, and over nothing else."""
    if out.exists() and WRITTEN not in out.read_text(encoding="utf-8", errors="replace"):
        raise MobatlasError(
            f"{out}: was not written by python -m bench results; choose another --out"
        )
    write_atomic(out, "\n".join(parts).encode())
