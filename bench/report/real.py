"""Tables and one page of the benchmark on real people."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.people import DRAWING
from bench.real import real_name
from bench.report.figures import forest_figure
from bench.report.files import as_markdown, write_tables
from bench.report.questions import TITLES, WRITTEN, question_tables, write_markdown
from bench.reweight import METRICS as WEIGHED
from bench.reweight import case_label
from bench.score_models import FLOOR
from bench.summary import SUMMARY, Result, read_result
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.comparison import gap_closed
from mobatlas.evaluation.metrics import PAPER_METRICS, metrics
from mobatlas.report.tables import MINUS, SHARE, Cell, Table

SHOWN = (*PAPER_METRICS, "category", "transitions", "length")
VIEWS = {
    "group": "Homes of training people of the group, against test people.",
    "population": "Homes of all training people; a calibrated model chooses home and trajectory "
    "together.",
    "four visits": "Only trajectories of at least four visits, on either side.",
    "shift": "Against people of another kind of day, who were left out of training.",
}
PRECAUTIONS = {
    "none": "regression",
    "composition": "composition error",
    "regions": "region effects",
    "map": "surface over the map",
    "all": "limit of group variance",
}
DEFAULT = "tilt, calibrated"


def real_tables(result: Result) -> dict[str, Table]:
    """Return all tables by name, the most important first."""
    views = [view for view in VIEWS if any(row["anchors"] == view for row in result["rows"])]
    tables = {f"gaps-{view.replace(' ', '-')}": _gaps(result, view) for view in views}
    tables |= {f"jsd-{view.replace(' ', '-')}": _divergences(result, view) for view in views}
    tables |= {
        f"groups-{metric}": _by_group(result, metric)
        for metric in ("poi", "category", "transitions")
    }
    tables["error-bars"] = _error_bars(result)
    if _real_regions(result):
        tables["precautions"] = _precautions(result)
    return tables | {"stages": _stages(result, result["error_bars"])}


def headline_tables(result: Result) -> dict[str, Table]:
    """Return tables of strong and the default strategy, for partitions and for real regions."""
    real_regions = _real_regions(result)
    kinds = {
        "partitions": ("group", False),
        "regions": ("population", True),
        "regions-group-homes": ("group", True),
    }
    tables = {"summary": summary_table(result)}
    for name, (view, real) in kinds.items():
        rows = [
            row
            for row in _rows(result, view)
            if row["partition"] is None or (row["partition"] in real_regions) == real
        ]
        if any(row["partition"] is not None for row in rows):  # a result may lack either kind
            shown = [row for row in rows if row["model"] in ("strong", DEFAULT)]
            tables[name] = _gap_table(result, shown, view)
    if "partitions" in tables:
        tables["groups"] = _by_group(result, "poi", real_regions)
    if real_regions:
        features = [row["features"] for row in result["rows"] if row["partition"] in real_regions]
        shown = [
            row
            for row in result["error_bars"]
            if "precautions" in row
            and not row["shuffled"]
            and row["features"] in (features[0], features[-1])
        ]
        tables["stages"] = _stages(result, shown)
    return tables


def summary_table(result: Result) -> Table:
    """Return the gap closed by strong and by the default strategy, one row for each regions."""
    metrics = ("poi", "category", "transitions", "travel_distance", "spatial")
    kinds: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in _rows(result, "population"):
        if row["model"] in ("strong", DEFAULT):
            keys = ("partition", "census", "shuffled", "membership")
            key = (*(row[name] for name in keys), row.get("labelled", 0))
            kinds.setdefault(key, row)
    seeds = len(result["seeds"])
    body = [
        (
            regions_label(row) or row["model"],
            *(_with_spread(row["metrics"][metric], seeds) for metric in metrics),
        )
        for row in kinds.values()
    ]
    caption = (
        f"{result['generator']}: gap closed from the baseline to the floor, by strong (trained on "
        f"labels) and by the default strategy ({DEFAULT}). {VIEWS['population']}"
    )
    return Table(("regions", *(TITLES[metric] for metric in metrics)), tuple(body), caption)


def _real_regions(result: Result) -> set[str]:
    """Return the columns of people that name real regions."""
    return {row["partition"] for row in result["error_bars"] if "precautions" in row}


def write_real(out: Path, result: Result) -> None:
    """Write all tables in four formats, in a folder within `out`."""
    folder = out / f"{real_name(result['generator'], result['kinds'])}-tables"
    folder.mkdir(exist_ok=True)
    write_tables(folder, real_tables(result))


def write_real_page(folder: Path, out: Path, *, all_tables: bool = False) -> str:
    """Write one page with every family that has a real-FAMILY.json in `folder`.

    By default each family shows its headline tables; `all_tables` adds all others.
    """
    results = {path.stem: read_result(path) for path in _results(folder, "real-*.json")}
    if not results:
        raise MobatlasError(f"{folder}: has no real-FAMILY.json; run python -m bench real first")
    more = " --all" if all_tables else ""
    parts = [
        "# Real people: tables\n",
        f"{WRITTEN} {folder.as_posix()} --real{more} --out {out.as_posix()}`.\n",
        "JSD in bits, lower is better. *Gap closed* is the share of the distance from the baseline "
        "to the sampling floor, of means over seeds, with the standard deviation between seeds. "
        "It is empty if the distance is within that deviation.\n",
    ]
    for name, result in results.items():
        if result.get("people") != DRAWING:
            raise MobatlasError(
                f"{folder / name}.json: was written by an older mobatlas; "
                "run python -m bench real again"
            )
    figures = out.parent / out.stem
    figures.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        parts += _section(name, result, figures, all_tables)
    for path in _results(folder, "rq3-real-*.json"):
        parts += _prediction(read_result(path))
    write_markdown(out, parts)
    return f"{out}: {', '.join(results)}"


def _results(folder: Path, pattern: str) -> list[Path]:
    return [path for path in sorted(folder.glob(pattern)) if not path.name.endswith(SUMMARY)]


def _section(name: str, result: Result, figures: Path, all_tables: bool) -> Iterator[str]:
    versions = ", ".join(
        f"{key} {value}"
        for key, value in result["versions"].items()
        if key in ("mobatlas", "torch")
    )
    yield f"## {name.removeprefix('real-')}\n"
    yield f"`{result['command']}`, seeds {', '.join(map(str, result['seeds']))}; {versions}.\n"
    for path in draw_real(figures, name, result):
        yield f"![{path.stem.replace('-', ' ')}]({figures.name}/{path.name})\n"
    yield "### In short\n"
    for table in headline_tables(result).values():
        yield as_markdown(table)
    if all_tables:
        yield "### All tables\n"
        for table in real_tables(result).values():
            yield as_markdown(table)


def _prediction(result: Result) -> Iterator[str]:
    yield f"## {result['name'].removeprefix('rq3-real-')}: next-POI prediction\n"
    yield f"`{result['command']}`, regions {result['partition']}.\n"
    for name, table in question_tables(result).items():
        if not name.startswith("published"):
            yield as_markdown(table)


@dataclass(frozen=True)
class _Figure:
    """The rows and metrics of one figure."""

    name: str
    view: str
    real: bool
    metrics: tuple[str, ...]


FIGURES = (
    _Figure("partitions", "group", False, ("poi", "category", "transitions")),
    _Figure(
        "regions",
        "population",
        True,
        ("spatial", "travel_distance", "poi", "category", "transitions"),
    ),
)


def draw_real(folder: Path, title: str, result: Result) -> list[Path]:
    """Draw the gap closed under partitions and under real regions; return the PNG files."""
    paths = []
    real_regions = _real_regions(result)
    for figure in FIGURES:
        rows = [
            row
            for row in _rows(result, figure.view)
            if row["partition"] is not None and (row["partition"] in real_regions) == figure.real
        ]
        all_bars = {TITLES[metric]: _bars(rows, metric) for metric in figure.metrics}
        bars = {name: values for name, values in all_bars.items() if any(values.values())}
        if bars:
            paths.append(folder / f"{title.removesuffix(f'-{figure.name}')}-{figure.name}.png")
            lines = {name: {"baseline": 0.0, "floor": 1.0} for name in bars}
            forest_figure(paths[-1], bars, lines, "gap closed, baseline to floor")
    return paths


def _bars(
    rows: Sequence[Mapping[str, Any]], metric: str
) -> dict[str, dict[str, tuple[float, float]]]:
    bars: dict[str, dict[str, tuple[float, float]]] = {}
    for row in rows:
        score = row["metrics"][metric]
        models = bars.setdefault(regions_label(row), {})
        share = score["gap_closed_floor"]
        if share is not None:
            gap = score["baseline"] - score["floor"]
            models[row["model"]] = (share, score["spread"] / gap if gap > 0 else 0.0)
    return bars


def regions_label(row: Mapping[str, Any]) -> str:
    """Describe the regions that a model was supervised with."""
    parts = (
        "shuffled" if row["shuffled"] else "",
        str(row["partition"] or ""),
        "census" if row["census"] else "",
        "+".join(row["features"] or ()),
        f"{row['labelled']} labelled" if row.get("labelled") else "",
        "membership" if row.get("membership") else "",
    )
    return ", ".join(part for part in parts if part)


def _rows(result: Result, view: str) -> list[Mapping[str, Any]]:
    return [row for row in result["rows"] if row["anchors"] == view]


def _gaps(result: Result, view: str) -> Table:
    """Return the gap closed by all models but the baseline."""
    shown = [row for row in _rows(result, view) if row["model"] != "baseline"]
    return _gap_table(result, shown, view)


def _gap_table(result: Result, shown: Sequence[Mapping[str, Any]], view: str) -> Table:
    seeds = len(result["seeds"])
    rows: list[tuple[Cell, ...]] = [
        (
            regions_label(row),
            row["model"],
            *(_with_spread(row["metrics"].get(name, {}), seeds) for name in SHOWN),
        )
        for row in shown
    ]
    columns = ("regions", "model", *(TITLES[name] for name in SHOWN))
    caption = f"{result['generator']}: gap closed from the baseline to the floor. {VIEWS[view]}"
    return Table(columns, tuple(rows), caption)


def _with_spread(score: Mapping[str, Any], seeds: int) -> str | None:
    """Format the gap closed, with the spread between seeds if there are several."""
    if score.get("gap_closed_floor") is None:
        return None
    gap = score["baseline"] - score["floor"]
    spread = f" ± {score['spread'] / gap:.0%}" if seeds > 1 and gap > 0 else ""
    return _percent(score["gap_closed_floor"]) + spread


def _percent(share: float) -> str:
    return format(share, SHARE).replace("-", MINUS)


def _by_group(result: Result, metric: str, without: Container[str] = ()) -> Table:
    """Return the gap closed by strong and the default strategy for each group."""
    rows = [
        row
        for row in _rows(result, "group")
        if row["model"] in ("strong", DEFAULT) and row["partition"] not in without
    ]
    floor = result["floor_of_groups"]
    baseline = _rows(result, "group")[0]["groups"]

    def closed(row: Mapping[str, Any], group: str) -> str | None:
        start, start_spread = baseline[group][metric]
        end, end_spread = floor[group][metric]
        jsd, spread = row["groups"][group][metric]
        error = float(np.hypot(start_spread, end_spread)) / np.sqrt(len(result["seeds"]))
        share = gap_closed(jsd, start, end, standard_error=error)
        if share is None:
            return None
        if len(result["seeds"]) == 1:
            return _percent(share)
        return f"{_percent(share)} ± {np.hypot(start_spread, spread) / (start - end):.0%}"

    body = tuple(
        (regions_label(row) or row["model"], *(closed(row, group) for group in floor))
        for row in rows
    )
    caption = (
        f"{TITLES[metric]}: gap closed from the baseline to the floor, by group. {VIEWS['group']}"
    )
    distances = ", ".join(
        f"{group} {baseline[group][metric][0] - floor[group][metric][0]:.3f}" for group in floor
    )
    note = f"Gap in bits: {distances}. Spread: of baseline and model between seeds."
    return Table(("regions", *floor), body, caption, note=note)


def _divergences(result: Result, view: str) -> Table:
    first = _rows(result, view)[0]["metrics"]
    shown = [metric for metric in metrics() if metric.name in first]
    rows: list[tuple[Cell, ...]] = [
        (
            regions_label(row),
            row["model"],
            *(row["metrics"][metric.name]["jsd"] for metric in shown),
        )
        for row in _rows(result, view)
    ]
    references = sum(row["features"] is None for row in _rows(result, view))
    rows.insert(references, ("", FLOOR, *(first[metric.name]["floor"] for metric in shown)))
    return Table(
        ("regions", "model", *(metric.title for metric in shown)),
        tuple(rows),
        f"JSD in bits. {VIEWS[view]}",
    )


def _error_bars(result: Result) -> Table:
    rows: Sequence[tuple[Cell, ...]] = [
        (
            regions_label(row),
            row["coverage"],
            row["coverage_of_labels"],
            row["cells"],
            row["error"],
            "yes" if row["said"] else "",
        )
        for row in result["error_bars"]
    ]
    caption = "Recovered group means against those of labelled people."
    note = (
        "Covered: share of cells (a feature of a group) whose 90 % error bar contains the mean of "
        "test people; the bar includes their sampling error, and cells have at least 30 expected "
        "visits. Labels: the same for the means of training people. Error left: error to these "
        "means, as a share of the error of the population mean. Warned: supervise warns that "
        "estimates depend on places, or that groups differ more than expected."
    )
    columns = ("regions", "covered", "labels", "cells", "error left", "warned")
    return Table(columns, tuple(rows), caption, dict.fromkeys(("covered", "labels"), SHARE), note)


def _stages(result: Result, shown: Sequence[Mapping[str, Any]]) -> Table:
    """Return the gap closed without a generator, after the weighted fit, and when calibrated."""
    metrics = ("poi", "travel_distance", "category", "transitions", "spatial")
    body: list[tuple[Cell, ...]] = []
    for row in shown:
        label = regions_label(row)
        stages = [(f"people, {stage}", shares) for stage, shares in row["people"].items()]
        for model in _rows(result, "population"):
            name = regions_label(model)
            if name in (label, f"{label}, membership"):
                shares = {key: model["metrics"][key]["gap_closed_floor"] for key in metrics}
                stages.append((model["model"] + name.removeprefix(label), shares))
        body += [(label, stage, *(shares[key] for key in metrics)) for stage, shares in stages]
    titles = [TITLES[name] for name in metrics]
    note = (
        "People: training people drawn by weights, without a generator. The gap is that from "
        "unweighted people to people of the group. Weights match the means of labels, the "
        "recovered means (the difference is the error of recovery), the composition of each "
        "person's region, or the labels of that region (known residence). Models: with homes of "
        "all training people, or by region (membership)."
    )
    caption = f"{result['generator']}: gap closed against test people, stage by stage."
    formats = dict.fromkeys(titles, SHARE)
    return Table(("regions", "stage", *titles), tuple(body), caption, formats, note)


def reweighting_table(result: Result) -> Table:
    """Return the gap closed by training people who are weighted by recovered means."""
    rows: list[tuple[Cell, ...]] = []
    for row in result["rows"]:
        cells: list[Cell] = [case_label(row)]
        for metric in WEIGHED:
            by_seed = row[metric]["gap_closed_labelled_by_seed"]
            spread = ""
            if None not in by_seed and len(set(by_seed)) > 1:
                spread = f" ± {np.std(by_seed, ddof=1):.0%}"
            share = row[metric]["gap_closed_labelled"]
            cells.append(None if share is None else _percent(share) + spread)
        rows.append(tuple(cells))
    caption = (
        "Training people weighted by recovered means: gap closed from all people to people of the "
        "group."
    )
    note = (
        "±: standard deviation between seeds, which halve the people. Regions with a census use "
        "all people and have none."
    )
    columns = ("regions", *(TITLES[metric] for metric in WEIGHED))
    return Table(columns, tuple(rows), caption, note=note)


def _precautions(result: Result) -> Table:
    rows: Sequence[tuple[Cell, ...]] = [
        (regions_label(row), *(row["precautions"][name] for name in PRECAUTIONS))
        for row in result["error_bars"]
        if "precautions" in row
    ]
    caption = "Error of recovered means, against the group means of labelled validation people."
    note = "1 is the error of the population mean. Each column adds a precaution to the one before."
    return Table(("regions", *PRECAUTIONS.values()), tuple(rows), caption, note=note)
