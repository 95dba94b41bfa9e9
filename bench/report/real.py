"""The benchmark on real people as tables and one page."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.people import DRAWING
from bench.real import real_name
from bench.report.figures import forest_figure
from bench.report.questions import TITLES, WRITTEN, question_tables, write_markdown
from bench.reweight import METRICS as WEIGHED
from bench.reweight import case_label
from bench.score_models import FLOOR
from bench.summary import SUMMARY, Result, read_result
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.comparison import gap_closed
from mobatlas.evaluation.metrics import PAPER_METRICS, metrics
from mobatlas.report.tables import MINUS, SHARE, Cell, Table, write_tables

SHOWN = (*PAPER_METRICS, "category", "transitions", "length")
VIEWS = {
    "group": "Homes of training people of the group, against test people.",
    "population": "Homes of everybody, chosen together with the trajectory where the model is calibrated.",
    "four visits": "Trajectories of at least four visits alone, on either side.",
    "shift": "Against people of another kind of day, on whom nothing was trained.",
}
PRECAUTIONS = {
    "none": "regression",
    "composition": "doubt of the composition",
    "regions": "regions of their own",
    "map": "surface over the map",
    "all": "limit to groups",
}
DEFAULT = "tilt, calibrated"


def real_tables(result: Result) -> dict[str, Table]:
    """By name; the first is the one to read."""
    views = [view for view in VIEWS if any(row["anchors"] == view for row in result["rows"])]
    tables = {f"closed-{view.replace(' ', '-')}": _closed(result, view) for view in views}
    tables |= {f"jsd-{view.replace(' ', '-')}": _divergences(result, view) for view in views}
    tables |= {
        f"groups-{metric}": _by_group(result, metric)
        for metric in ("poi", "category", "transitions")
    }
    tables["error-bars"] = _error_bars(result)
    if _chosen(result):
        tables["precautions"] = _precautions(result)
    return tables | {"stages": _stages(result, result["error_bars"])}


def headline_tables(result: Result) -> dict[str, Table]:
    """Strong and the default strategy alone: in short, partitions with homes of the group, real regions with either kind."""
    chosen = _chosen(result)
    kinds = {
        "partitions": ("group", False),
        "regions": ("population", True),
        "regions-given": ("group", True),
    }
    tables = {"summary": summary_table(result)}
    for name, (view, real) in kinds.items():
        rows = [
            row
            for row in _rows(result, view)
            if row["partition"] is None or (row["partition"] in chosen) == real
        ]
        if any(row["partition"] is not None for row in rows):  # either kind may be left out
            tables[name] = _closed_table(
                result, [row for row in rows if row["model"] in ("strong", DEFAULT)], view
            )
    if "partitions" in tables:
        tables["groups"] = _by_group(result, "poi", chosen)
    if chosen:
        regional = [
            row for row in result["error_bars"] if "precautions" in row and not row["shuffled"]
        ]
        told = [row["features"] for row in result["rows"] if row["partition"] in chosen]
        some = (told[0], told[-1])  # one feature alone, and what is also shuffled
        tables["stages"] = _stages(result, [row for row in regional if row["features"] in some])
    return tables


def summary_table(result: Result) -> Table:
    """Strong, and the default strategy by kinds of regions with the first features they tell, with homes of everybody."""
    metrics = ("poi", "category", "transitions", "travel_distance", "spatial")
    kinds: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in _rows(result, "population"):
        if row["model"] in ("strong", DEFAULT):
            kinds.setdefault(
                tuple(row[name] for name in ("partition", "census", "shuffled", "membership")), row
            )
    seeds = len(result["seeds"])
    body = [
        (
            regions_label(row) or row["model"],
            *(_with_spread(row["metrics"][metric], seeds) for metric in metrics),
        )
        for row in kinds.values()
    ]
    caption = (
        f"{result['generator']}: closed of the way from the baseline to the floor by strong, which was trained on labels, and "
        f"by the default strategy ({DEFAULT}), with homes of everybody."
    )
    return Table(("regions", *(TITLES[metric] for metric in metrics)), tuple(body), caption)


def _chosen(result: Result) -> set[str]:
    """Columns of regions that people chose themselves."""
    return {row["partition"] for row in result["error_bars"] if "precautions" in row}


def write_real(out: Path, result: Result) -> None:
    """Tables in four formats, in a folder within `out`."""
    folder = out / f"{real_name(result['generator'], result['kinds'])}-tables"
    folder.mkdir(exist_ok=True)
    write_tables(folder, real_tables(result))


def write_real_page(folder: Path, out: Path, *, all_tables: bool = False) -> str:
    """Write one page with every family whose real-FAMILY.json lies in `folder`.

    By default each family shows its headline tables; `all_tables` adds all others.
    """
    found = {path.stem: read_result(path) for path in _results(folder, "real-*.json")}
    if not found:
        raise MobatlasError(f"{folder}: has no real-FAMILY.json; run python -m bench real first")
    more = " --all" if all_tables else ""
    parts = [
        "# Real people: tables\n",
        f"{WRITTEN} {folder.as_posix()} --real{more} --out {out.as_posix()}`.\n",
        "JSD in bits, lower is better. *Closed* is the share of the way from the baseline to the sampling floor, of means over "
        "seeds, with the standard deviation between seeds; it is empty where the two differ by no more than that.\n",
    ]
    for name, result in found.items():
        if result.get("people") != DRAWING:
            raise MobatlasError(
                f"{folder / name}.json: was written by an older mobatlas; run python -m bench real again"
            )
    figures = out.parent / out.stem
    figures.mkdir(parents=True, exist_ok=True)
    for name, result in found.items():
        parts += _section(name, result, figures, all_tables)
    for path in _results(folder, "rq3-real-*.json"):
        parts += _prediction(read_result(path))
    write_markdown(out, parts)
    return f"{out}: {', '.join(found)}"


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
        yield table.as_markdown()
    if all_tables:
        yield "### All tables\n"
        for table in real_tables(result).values():
            yield table.as_markdown()


def _prediction(result: Result) -> Iterator[str]:
    yield f"## {result['name'].removeprefix('rq3-real-')}: next-POI prediction\n"
    yield f"`{result['command']}`, regions {result['partition']}.\n"
    for name, table in question_tables(result).items():
        if not name.startswith("published"):
            yield table.as_markdown()


def draw_real(folder: Path, title: str, result: Result) -> list[Path]:
    """What is closed under partitions with homes of the group, and under real regions with homes of everybody."""
    made, chosen = [], _chosen(result)
    for name, view, real, shown in (
        ("partitions", "group", False, ("poi", "category", "transitions")),
        (
            "regions",
            "population",
            True,
            ("spatial", "travel_distance", "poi", "category", "transitions"),
        ),
    ):
        rows = [row for row in _rows(result, view) if row["partition"] is not None]
        rows = [row for row in rows if (row["partition"] in chosen) == real]
        bars = {
            TITLES[metric]: found
            for metric in shown
            if any((found := _bars(rows, metric)).values())
        }
        if bars:
            made.append(folder / f"{title.removesuffix(f'-{name}')}-{name}.png")
            lines = {title: {"baseline": 0.0, "floor": 1.0} for title in bars}
            forest_figure(made[-1], bars, lines, "closed of baseline to floor")
    return made


def _bars(
    rows: Sequence[Mapping[str, Any]], metric: str
) -> dict[str, dict[str, tuple[float, float]]]:
    bars: dict[str, dict[str, tuple[float, float]]] = {}
    for row in rows:
        found = row["metrics"][metric]
        own, gap = bars.setdefault(regions_label(row), {}), found["baseline"] - found["floor"]
        if gap > found["spread"]:
            own[row["model"]] = ((found["baseline"] - found["jsd"]) / gap, found["spread"] / gap)
    return bars


def regions_label(row: Mapping[str, Any]) -> str:
    """Where what was learnt came from."""
    parts = (
        "shuffled" if row["shuffled"] else "",
        str(row["partition"] or ""),
        "census" if row["census"] else "",
        "+".join(row["features"] or ()),
        "membership" if row.get("membership") else "",
    )
    return ", ".join(part for part in parts if part)


def _rows(result: Result, view: str) -> list[Mapping[str, Any]]:
    return [row for row in result["rows"] if row["anchors"] == view]


def _closed(result: Result, view: str) -> Table:
    """Of supervised models."""
    return _closed_table(
        result, [row for row in _rows(result, view) if row["model"] != "baseline"], view
    )


def _closed_table(result: Result, shown: Sequence[Mapping[str, Any]], view: str) -> Table:
    seeds = len(result["seeds"])
    rows: list[tuple[Cell, ...]] = [
        (
            regions_label(row),
            row["model"],
            *(_with_spread(row["metrics"][name], seeds) for name in SHOWN),
        )
        for row in shown
    ]
    columns = ("regions", "model", *(TITLES[name] for name in SHOWN))
    caption = (
        f"{result['generator']}: closed of the way from the baseline to the floor. {VIEWS[view]}"
    )
    return Table(columns, tuple(rows), caption)


def _with_spread(found: Mapping[str, Any], seeds: int) -> str | None:
    """A share, and how much seeds differ where there are several."""
    if found["floor_closed"] is None:
        return None
    gap = found["baseline"] - found["floor"]
    spread = f" ± {found['spread'] / gap:.0%}" if seeds > 1 and gap > 0 else ""
    return format(found["floor_closed"], SHARE).replace("-", MINUS) + spread


def _by_group(result: Result, metric: str, without: Container[str] = ()) -> Table:
    """Of strong and the default strategy, `without` some kinds of regions."""
    rows = [row for row in _rows(result, "group") if row["model"] in ("strong", DEFAULT)]
    rows = [row for row in rows if row["partition"] not in without]
    floor, first = result["floor_of_groups"], _rows(result, "group")[0]["groups"]  # of the baseline

    def closed(row: Mapping[str, Any], group: str) -> str | None:
        (start, early), (end, late), (ours, spread) = (
            each[group][metric] for each in (first, floor, row["groups"])
        )
        share = gap_closed(ours, start, end, float(np.hypot(early, late)))
        if share is None:
            return None
        said = format(share, SHARE).replace("-", MINUS)
        return (
            f"{said} ± {np.hypot(early, spread) / (start - end):.0%}"
            if len(result["seeds"]) > 1
            else said
        )

    body = tuple(
        (regions_label(row) or row["model"], *(closed(row, group) for group in floor))
        for row in rows
    )
    caption = f"{TITLES[metric]}: closed of the way from the baseline to the floor, by group. {VIEWS['group']}"
    apart = ", ".join(
        f"{group} {first[group][metric][0] - floor[group][metric][0]:.3f}" for group in floor
    )
    note = f"Bits on that way: {apart}. Spread: of baseline and model between seeds."
    return Table(("regions", *floor), body, caption, note=note)


def _divergences(result: Result, view: str) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            regions_label(row),
            row["model"],
            *(row["metrics"][metric.name]["jsd"] for metric in metrics()),
        )
        for row in _rows(result, view)
    ]
    first = _rows(result, view)[0]["metrics"]
    rows.insert(2, ("", FLOOR, *(first[metric.name]["floor"] for metric in metrics())))
    return Table(
        ("regions", "model", *(metric.title for metric in metrics())),
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
        "Covered: how often a 90 % error bar, widened by what chance does to so few, holds the mean of test people, in cells "
        "(a feature of a group) where 30 of their visits are expected. Labels: the same of the means of training people. "
        "Error left: to those, 1 being that of the population's mean for everybody. "
        "Warned: supervise says that it follows places, or differs by more than groups are believed to explain."
    )
    columns = ("regions", "covered", "labels", "cells", "error left", "warned")
    return Table(columns, tuple(rows), caption, dict.fromkeys(("covered", "labels"), SHARE), note)


def _stages(result: Result, told: Sequence[Mapping[str, Any]]) -> Table:
    """What is closed before any generator, as it is taught, and as it is calibrated."""
    shown = ("poi", "travel_distance", "category", "transitions", "spatial")
    body: list[tuple[Cell, ...]] = []
    for row in told:
        label = regions_label(row)
        people = [(f"people, {stage}", found) for stage, found in row["people"].items()]
        models = [
            (
                each["model"] + name.removeprefix(label),
                {key: each["metrics"][key]["floor_closed"] for key in shown},
            )
            for each in _rows(result, "population")
            if (name := regions_label(each)) in (label, f"{label}, membership")
        ]
        body += [
            (label, stage, *(found[name] for name in shown)) for stage, found in (*people, *models)
        ]
    titles = [TITLES[name] for name in shown]
    note = (
        "People: training people drawn by weights, nobody twice by chance, without a generator, from unweighted ones to those "
        "of the group: weighed to the means that labels know, to those that regions tell (the difference is what recovery "
        "changes), or by residence: what the composition says of their region, and what labels of all of them say of it (known "
        "residence). Models: with homes of everybody, or by region (membership)."
    )
    caption = f"{result['generator']}: what is closed against test people, stage by stage."
    return Table(
        ("regions", "stage", *titles), tuple(body), caption, dict.fromkeys(titles, SHARE), note
    )


def reweighting_table(result: Result) -> Table:
    """What training people close who are weighed by recovered means, with the spread between seeds."""
    rows: list[tuple[Cell, ...]] = []
    for row in result["rows"]:
        shares = [row[metric]["gap_closed_by_seed"] for metric in WEIGHED]
        several = [
            f" ± {np.std(each, ddof=1):.0%}" if len(set(each)) > 1 else "" for each in shares
        ]
        closed = [
            format(row[metric]["gap_closed"], SHARE).replace("-", MINUS) for metric in WEIGHED
        ]
        rows.append((case_label(row), *map("".join, zip(closed, several, strict=True))))
    caption = "Training people weighed by what regions tell: closed of the way from everybody to people of the group."
    note = "±: standard deviation between seeds, which halve the people; a census needs no half of them, and has none."
    return Table(
        ("regions", *(TITLES[metric] for metric in WEIGHED)), tuple(rows), caption, note=note
    )


def _precautions(result: Result) -> Table:
    rows: Sequence[tuple[Cell, ...]] = [
        (regions_label(row), *(row["precautions"][name] for name in PRECAUTIONS))
        for row in result["error_bars"]
        if "precautions" in row
    ]
    caption = "What recovery gains from each precaution: error left to the group means of labelled validation people."
    note = (
        "1 is the error of the population's mean for everybody. Each column adds to the one before."
    )
    return Table(("regions", *PRECAUTIONS.values()), tuple(rows), caption, note=note)
