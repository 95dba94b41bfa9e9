"""Tables, figures and one page of the research questions, with the paper's own numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.report.figures import Bars, Lines, bars_figure, curves_figure, heatmap_figure
from bench.report.files import as_markdown, write_tables
from bench.report.published import AVERAGE, STATES, published, published_rows
from bench.score_models import FLOOR
from bench.summary import Result, read_result
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.metrics import PAPER_METRICS, metrics
from mobatlas.features.maps import FEATURES
from mobatlas.io.manifest import write_atomic
from mobatlas.report.tables import SHARE, Cell, Table

QUESTIONS = {
    "rq1": "RQ1: how groups are mixed in regions",
    "rq2": "RQ2: which feature the aggregates contain",
    "rq3": "RQ3: next-POI prediction",
}
PREDICTION = {
    "accuracy": "Accuracy",
    "hr10": "HR@10",
    "ndcg10": "NDCG@10",
    "geo_error_km": "GeoError, km",
}
POI_ALONE = {"poi_accuracy": "Accuracy, POIs alone", "poi_hr10": "HR@10, POIs alone"}
DEFINITIONS_TEXT = """## Definitions, earlier and present

Four definitions have changed, and with them every table. The tables below show how much.

- **Trip** is the pair (cell of the first visit, cell of the last visit) of a trajectory, as in the
  paper. Pairs of consecutive visits are **Flows**; earlier pages called them Trip. Most windows
  begin and end at home, so trips are nearly unique and their gap is rarely clear.
- **The floor** has as many people as the held-out group, not only as many trajectories. Windows of
  one person are alike, so fewer people leave more sampling noise, and the floor is higher. In
  Santiago everybody has one window, so it stays the same.
- **Gap closed** compares excess, the JSD beyond what chance leaves, because chance differs between
  samples with and without people.
- **A percentage** is shown only where its gap is at least three standard errors. Standard errors
  resample people. Earlier pages compared with the spread between seeds, which is zero for one seed.
"""
EARLIER = 1  # of `definitions` in a result
SHOWN = (*PAPER_METRICS, "poi_all")
TITLES = {metric.name: metric.title for metric in metrics()}
WRITTEN = "Written by `python -m bench results"
DEFAULT = "tilt, calibrated"  # the default strategy
MATERIAL = "training material"


def question_tables(result: Result) -> dict[str, Table]:
    """Return the tables of a question by name, the most important first."""
    return _prediction_tables(result) if result["question"] == "rq3" else _divergence_tables(result)


def write_question(out: Path, result: Result) -> None:
    """Write tables in four formats and figures, in a folder within `out`."""
    folder = out / f"{result.get('name', result['question'])}-tables"
    folder.mkdir(exist_ok=True)
    write_tables(folder, question_tables(result))
    _draw(folder, result)


def write_page(folder: Path, out: Path, *, all_tables: bool = False) -> str:
    """Write one page with every question that has a result in `folder`.

    Figures go into a folder next to the page, with the same name. By default each question shows
    its average table; `all_tables` adds the other metrics, every group and the paper's numbers.
    """
    results = {
        path.stem: read_result(path)
        for name in QUESTIONS
        for path in sorted(folder.glob(f"{name}*.json"), key=lambda path: path.stem)
        if not path.stem.startswith("rq3-real") and not path.stem.endswith(".summary")
    }
    if not results:
        names = ", ".join(f"{name}.json" for name in QUESTIONS)
        raise MobatlasError(f"{folder}: has none of {names}; run python -m bench rq1 first")
    figures = out.parent / out.stem
    figures.mkdir(parents=True, exist_ok=True)
    more = " --all" if all_tables else ""
    parts = [
        "# Results\n",
        f"{WRITTEN} {folder.as_posix()}{more} --out {out.as_posix()}`.\n",
        "JSD in bits; lower is better. The *floor* compares real training people with real test "
        "people: sampling noise alone. *Gap closed to floor* is the share of the gap from the "
        "baseline to the floor.\n",
    ]
    parts += _definitions(folder)
    for result in results.values():
        parts += _section(result, figures, all_tables)
    write_markdown(out, parts)
    return f"{out}: {', '.join(results)}"


def _definitions(folder: Path) -> Iterator[str]:
    """Set earlier and present definitions side by side, for each data set that was measured."""
    paths = sorted(folder.glob("definitions*.json"))
    if not paths:
        return
    yield DEFINITIONS_TEXT
    for path in paths:
        result = read_result(path)
        yield f"`{result['command']}`, mean of {len(result['seeds'])} seeds.\n"
        yield as_markdown(definitions_table(result))


def _section(result: Result, figures: Path, all_tables: bool) -> Iterator[str]:
    versions = ", ".join(
        f"{key} {value}"
        for key, value in result["versions"].items()
        if key in ("mobatlas", "torch")
    )
    yield f"## {_title(result)}\n"
    yield f"`{result['command']}`, seeds {', '.join(map(str, result['seeds']))}; {versions}.\n"
    if result.get("definitions") == EARLIER:
        yield (
            "These results are from earlier definitions: what was called Trip then is Flows now, "
            "and the floor had more people than the held-out group. Percentages are left out "
            "where the gap was not clear.\n"
        )
    yield f"{_sentence(result)}\n"
    for path in _draw(figures, result):
        yield f"![{path.stem.replace('-', ' ')}]({figures.name}/{path.name})\n"
    tables = list(question_tables(result).values())
    for table in tables if all_tables else tables[:1]:
        yield as_markdown(table)


def _title(result: Result) -> str:
    """Return the heading of a result: the question, and what differs from its defaults."""
    question = result["question"]
    name = result.get("name", question).removeprefix(question).strip("-")
    generator = name.removesuffix("without-rest").strip("-")
    rest = "without rest" if name.endswith("without-rest") else ""
    return ", ".join(part for part in (QUESTIONS[question], generator, rest) if part)


def _sentence(result: Result) -> str:
    """Summarise a result in one sentence."""
    if result["question"] == "rq3":
        rows = {row["material"]: row for row in result["rows"]}
        accuracies = ", ".join(
            f"{label} {row['average']['accuracy']:.3f}" for label, row in rows.items()
        )
        closed = rows[DEFAULT]["gap_closed_real"]["accuracy"]
        gap = (
            "The gap from the baseline to real people is not clear"
            if closed is None
            else f"The default strategy closes {_share(closed)} of the gap from the baseline to "
            "real people"
        )
        return f"Accuracy of the next visit, by training material: {accuracies}. {gap}."
    shares = [
        f"{' + '.join(_varied(result, row))} {_share(row['metrics']['poi']['gap_closed_floor'])}"
        for row in _rows(result, "group")
        if row["model"] == DEFAULT
    ]
    return f"Gap closed by the default strategy on POI frequency: {', '.join(shares)}."


def _varied(result: Result, row: Mapping[str, Any]) -> Sequence[str]:
    return [row["partition"]] if result["question"] == "rq1" else row["features"]


def _share(value: float | None) -> str:
    return "no clear gap" if value is None else format(value, SHARE)


def _rows(result: Result, anchors: str) -> list[Mapping[str, Any]]:
    return [row for row in result["rows"] if row["anchors"] == anchors]


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['model']}, {row['divergence']}" if row["divergence"] else str(row["model"])


def _varied_column(result: Result) -> tuple[str, Callable[[Mapping[str, Any]], str]]:
    """Return the name and the cells of the column that a question varies."""
    if result["question"] == "rq1":
        return "partition", lambda row: row["partition"] or ""
    return "feature", lambda row: " + ".join(row["features"] or ())


def _divergence_tables(result: Result) -> dict[str, Table]:
    seeds = len(result["seeds"])
    of_seeds = f"{seeds} seeds" if seeds > 1 else "one seed"
    caption = (
        f"JSD in bits to test people of the same group, average over groups, {of_seeds}; anchors "
        "of the"
    )
    rest = [metric.name for metric in metrics() if metric.name not in SHOWN]
    tables = {
        "average": _averages(result, "group", SHOWN, f"{caption} group."),
        "gap": _gaps(result),
        "population": _averages(result, "population", SHOWN, f"{caption} population."),
        "others": _averages(result, "group", rest, f"{caption} group, other metrics."),
    }
    for metric in _measured(result, PAPER_METRICS):
        tables[f"groups-{metric}"] = _by_group(result, metric, of_seeds)
    return tables | {f"published-{state.lower()}": _published(result, state) for state in STATES}


def _measured(result: Result, names: Sequence[str]) -> list[str]:
    """Return the metrics that a result has; earlier results have no trips."""
    return [name for name in names if name in result["rows"][0]["metrics"]]


def _averages(result: Result, anchors: str, metrics: Sequence[str], caption: str) -> Table:
    """Return JSD and the gap closed to the floor."""
    first, cell_of = _varied_column(result)
    rows: list[tuple[Cell, ...]] = []
    for row in _rows(result, anchors):
        scores = [row["metrics"].get(name, {}) for name in metrics]
        pairs = _pairs((score.get("jsd"), score.get("gap_closed_floor")) for score in scores)
        rows.append((cell_of(row), _label(row), *pairs))
    floor = [
        (row["metrics"].get(name, {}).get("floor"), None)
        for row in _rows(result, anchors)[:1]
        for name in metrics
    ]
    # After the models without regions.
    rows.insert(
        sum(row["features"] is None for row in _rows(result, anchors)), ("", FLOOR, *_pairs(floor))
    )
    titles = [TITLES[metric] for metric in metrics]
    columns = [name for title in titles for name in (title, f"gap closed to floor, {title}")]
    formats = {name: SHARE for name in columns if name.startswith("gap closed")}
    note = (
        "Gap closed to floor: share of the gap in excess from the baseline to the floor. Excess is "
        "the JSD beyond chance. Samples have more different homes than the held-out people, so "
        "their JSD may be below the floor. A share is left out if the gap is below three standard "
        "errors."
    )
    return Table((first, "model", *columns), tuple(rows), caption, formats, note)


def _pairs(values: Any) -> list[Cell]:
    return [cell for pair in values for cell in pair]


def _gaps(result: Result) -> Table:
    """Return the gap closed to strong, as the paper defines it."""
    first, cell_of = _varied_column(result)
    rows = [
        (
            cell_of(row),
            _label(row),
            *(row["metrics"].get(name, {}).get("gap_closed_strong") for name in SHOWN),
        )
        for row in _rows(result, "group")
        if row[first if first == "partition" else "features"]
    ]
    columns = (first, "model", *(TITLES[name] for name in SHOWN))
    note = "Empty if strong is not better than the baseline by three standard errors."
    formats = dict.fromkeys(columns[2:], SHARE)
    return Table(columns, tuple(rows), "Gap closed to strong.", formats, note)


def _by_group(result: Result, metric: str, of_seeds: str) -> Table:
    first, cell_of = _varied_column(result)
    rows = []
    names = list(_rows(result, "group")[0]["groups"])
    for row in _rows(result, "group"):
        scores = [row["groups"][name][metric] for name in names]
        cells: list[Cell] = [
            f"{mean:.3f} ± {sd:.3f}" if len(result["seeds"]) > 1 else mean for mean, sd in scores
        ]
        spread = float(np.std([mean for mean, _ in scores], ddof=1))
        rows.append((cell_of(row), _label(row), *cells, row["metrics"][metric]["jsd"], spread))
    caption = f"{TITLES[metric]}: JSD in bits to test people of each group, {of_seeds}."
    return Table((first, "model", *names, "average", "sd over groups"), tuple(rows), caption)


def _published(result: Result, state: str) -> Table:
    """Return the averages that the paper prints."""
    question = result["question"]
    caption = f"For orientation, as published: {state}. {published()['source']['caveat']}"
    cells = [row for row in published_rows(question, state) if row["group"] == AVERAGE]
    metrics = PREDICTION if question == "rq3" else {name: TITLES[name] for name in PAPER_METRICS}
    first = "feature" if question == "rq2" else "partition"
    models: dict[tuple[str, str], dict[str, float]] = {}
    for row in cells:
        key = (str(row["feature" if question == "rq2" else "partition"] or ""), row["model"])
        models.setdefault(key, {})[row["metric"]] = row["mean"]
    rows = tuple((*key, *(values.get(name) for name in metrics)) for key, values in models.items())
    return Table((first, "model", *metrics.values()), rows, caption)


def _prediction_tables(result: Result) -> dict[str, Table]:
    columns = PREDICTION | POI_ALONE
    tables = {"average": _prediction_averages(result, columns)}
    groups = list(result["rows"][0]["groups"])
    for metric, title in columns.items():
        body = tuple(
            (
                row["material"],
                *(row["groups"][group][metric] for group in groups),
                row["average"][metric],
            )
            for row in result["rows"]
        )
        tables[f"groups-{metric.replace('_', '-')}"] = Table(
            (MATERIAL, *groups, "average"), body, f"{title} of the next visit, by group."
        )
    return tables | {f"published-{state.lower()}": _published(result, state) for state in STATES}


def _prediction_averages(result: Result, columns: Mapping[str, str]) -> Table:
    spread = len(result["seeds"]) > 1 and "spread" in result["rows"][0]
    closed = ("accuracy", "poi_hr10") if spread else ("accuracy",)
    rows: list[tuple[Cell, ...]] = []
    for row in result["rows"]:
        cells: list[Cell] = [row["material"], *(row["average"][name] for name in columns)]
        cells += [row["gap_closed_real"][name] for name in closed]
        cells += [row["spread"][name] for name in closed if spread]
        rows.append(tuple(cells))
    sizes = sum(result["sizes"].values())
    caption = (
        f"Next visits of real test people, average over groups; {sizes:,} training trajectories of "
        "each material."
    )
    note = "Gap closed: share of the distance from the baseline to real training people."
    if spread:
        note += (
            " It is empty if the gap is below three standard errors over seeds. "
            "Spread: standard deviation between seeds."
        )
    shares = [f"gap closed, {columns[name]}" for name in closed]
    spreads = [f"spread, {columns[name]}" for name in closed if spread]
    head = (MATERIAL, *columns.values(), *shares, *spreads)
    return Table(head, tuple(rows), caption, dict.fromkeys(shares, SHARE), note)


def _draw(folder: Path, result: Result) -> list[Path]:
    """Draw the figures of a question as PNG files and return their paths."""
    question = result["question"]
    name = result.get("name", question)
    if question == "rq3":
        return []
    figures = [folder / f"{name}-bars.png"]
    bars_figure(figures[-1], *_bars(result))
    if result["curves"]:
        figures.append(folder / f"{name}-curves.png")
        curves_figure(figures[-1], result["curves"])
    if question == "rq1":
        figures.append(folder / f"{name}-groups.png")
        groups = list(_rows(result, "group")[0]["groups"])
        distances = {
            TITLES[metric]: np.array(result["between_groups"][metric])
            for metric in ("poi", "spatial")
        }
        heatmap_figure(figures[-1], groups, distances)
    return figures


def _bars(result: Result) -> tuple[Bars, Lines]:
    """Return JSD and its standard deviation over groups, and the lines that models share."""
    _, cell_of = _varied_column(result)
    rows = _rows(result, "group")
    names = _measured(result, PAPER_METRICS)
    bars: dict[str, Any] = {TITLES[name]: {} for name in names}
    lines: dict[str, Any] = {}
    for name in names:
        first = rows[0]["metrics"][name]
        lines[TITLES[name]] = {label: first[label] for label in ("baseline", "strong", "floor")}
        for row in rows:
            if row["features"] is None:  # phase 1, drawn as lines
                continue
            spread = float(np.std([values[name][0] for values in row["groups"].values()], ddof=1))
            models = bars[TITLES[name]].setdefault(cell_of(row), {})
            models[_label(row)] = (row["metrics"][name]["jsd"], spread)
    return bars, lines


def write_markdown(out: Path, parts: Sequence[str]) -> None:
    """Write a page; replace only a page that this function wrote."""
    if out.exists() and WRITTEN not in out.read_text(encoding="utf-8", errors="replace"):
        raise MobatlasError(
            f"{out}: was not written by python -m bench results; choose another --out"
        )
    write_atomic(out, "\n".join(parts).encode())


def definitions_table(result: Result) -> Table:
    """Return earlier and present floors by metric, and whether a gap is clear."""
    rows = tuple(
        (
            FEATURES[row["metric"]].title,
            row["baseline"],
            row["earlier floor"],
            row["floor"],
            format(row["signal"], "z.1f"),
            {1.0: "yes", 0.0: "no"}.get(row["clear"], "in some seeds"),
        )
        for row in result["rows"]
        if row["metric"] in FEATURES
    )
    columns = ("metric", "baseline", "earlier floor", "floor", "signal", "gap is clear")
    return Table(columns, rows, f"{result['measure']}.")
