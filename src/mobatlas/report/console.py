"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mobatlas.evaluation.evaluate import Evaluation
from mobatlas.evaluation.metrics import PAPER_METRICS, metrics
from mobatlas.regions.identifiability import Diagnosis
from mobatlas.regions.types import Regions
from mobatlas.report import tables

REASON_WORDS = {
    "unreliable": "too many days above max_day_km",
    "coverage": "too few well-covered days",
    "short": "too few tokens",
    "anchors": "no known home and work",
}


def summary_table(summary: Mapping[str, Any], out: Path) -> RenderableType:
    """What a preparation kept, per split, and why the rest fell."""
    table = Table(title=f"{out}", title_justify="left")
    table.add_column("split")
    for name in ("users", "trajectories", "tokens", "median length", "p95", "named POIs"):
        table.add_column(name, justify="right")
    for split, counts in summary["splits"].items():
        coverage = counts["vocabulary_coverage"]
        table.add_row(
            split,
            f"{counts['users']:,}",
            f"{counts['trajectories']:,}",
            f"{counts['tokens']:,}",
            _or_dash(counts["length_median"]),
            _or_dash(counts["length_p95"]),
            "-" if coverage is None else f"{coverage:.1%}",
        )
    return Group(table, Text("\n".join(_summary_lines(summary))))


def _summary_lines(summary: Mapping[str, Any]) -> list[str]:
    visits, windows = summary["visits"], summary["windows"]
    dropped = {
        "without coordinates": visits["missing_coordinates"],
        "not at a POI": visits["not_poi"],
        "invalid": visits["invalid"],
        "duplicates": visits["duplicates"],
    }
    said = ", ".join(f"{count:,} {name}" for name, count in dropped.items() if count) or "none"
    fell = (
        ", ".join(
            f"{count:,} {REASON_WORDS[name]}" for name, count in windows["fell"].items() if count
        )
        or "none"
    )
    kept = sum(counts["users"] for counts in summary["splits"].values())
    known = summary["users_in_people"]
    in_people = "" if known is None else f"; {known:,} are in people"
    lines = [
        f"visits: {visits['rows']:,} read, dropped: {said}; POIs: {summary['pois']:,}",
        f"users: {summary['users']:,}, {kept:,} of them with a trajectory{in_people}",
        f"windows: {windows['kept']:,} kept; fell: {fell}",
    ]
    columns = {key: names for key, names in summary["people_columns"].items() if names}
    if columns:
        words = {"attributes": "attributes", "regions": "regions", "others": "kept with the labels"}
        lines.append(
            "people: "
            + "; ".join(f"{words[key]}: {', '.join(names)}" for key, names in columns.items())
        )
    if summary["inferred_anchors"]:
        lines.append(
            f"inferred from the hours of visits: {' and '.join(summary['inferred_anchors'])}"
        )
    return lines + [f"note: {note}" for note in summary["notes"]]


def city_table(facts: Mapping[str, Any], out: Path) -> RenderableType:
    """What a simulation wrote."""
    table = Table(title=f"{out}", title_justify="left", show_header=False)
    for name, value in facts.items():
        table.add_row(
            name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value)
        )
    return table


def diagnosis_table(found: Diagnosis) -> RenderableType:
    """What regions can tell, in words and numbers."""
    smallest, median, largest = found.people
    facts = Table(show_header=False)
    facts.add_row("regions, groups", f"{found.regions:,}, {len(found.groups)}")
    facts.add_row("people in a region", f"{smallest:,.0f} to {largest:,.0f}, median {median:,.0f}")
    facts.add_row(
        "rank, effective rank", f"{found.rank}, {found.effective_rank} of {len(found.groups)}"
    )
    if found.effective_rank_with_rest is not None:
        facts.add_row(
            "with the people of no region", f"effective rank {found.effective_rank_with_rest}"
        )
    facts.add_row("smallest singular value", f"{found.sigma_min:.3g}")
    facts.add_row("condition number", f"{found.condition_number:.3g}")
    bound = found.bounds.finite_sample
    facts.add_row(
        "the paper's bound on |M - M*|",
        f"{bound:.3g} (shares, 95 %)" if bound < float("inf") else "none: rank deficient",
    )
    contrasts = Table(title="what is known of the groups", title_justify="left", show_header=False)
    for contrast in found.contrasts:
        name, _, verdict = contrast.sentence().rpartition(": ")
        contrasts.add_row(name, verdict)
    help_ = Table(title="what would help", title_justify="left")
    for name in ("", "smallest singular value", "effective rank"):
        help_.add_column(name, justify="left" if not name else "right")
    for proposal in found.proposals:
        help_.add_row(proposal.action, f"{proposal.sigma_min:.3g}", str(proposal.effective_rank))
    return Group(
        facts,
        contrasts,
        help_,
        Text("\n".join(f"warning: {warning}" for warning in found.warnings)),
    )


def regions_table(made: Regions, found: Diagnosis, out: Path) -> RenderableType:
    """What a regions folder holds."""
    details = made.details
    lines = [
        f"{out}: {found.regions:,} regions, {len(made.aggregates.features):,} features",
        f"composition and aggregates: {details['separation']}",
        f"rank {found.rank}, effective rank {found.effective_rank} of {len(found.groups)}; see mobatlas diagnose {out}",
    ]
    lines += (
        ["regions were shuffled: this is the negative control"] if details.get("shuffled") else []
    )
    lines += [f"note: {note}" for note in details.get("notes", ())]
    lines += [f"warning: {warning}" for warning in found.warnings]
    return Text("\n".join(lines))


def rows_table(rows: Sequence[Mapping[str, Any]], title: str) -> RenderableType:
    """Rows of one shape, as a benchmark gives them."""
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(
            name.replace("_", " "), justify="left" if isinstance(rows[0][name], str) else "right"
        )
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def training_table(report: Mapping[str, Any], out: Path) -> RenderableType:
    """What training came to."""
    lines = [f"{out}: trained, {report['peak_gb']:.2f} GB at most"]
    for stage, values in report.items():
        if isinstance(values, Mapping):
            said = (
                f"{name} {value:{',' if isinstance(value, int) else '.4g'}}"
                for name, value in values.items()
            )
            lines.append(f"{stage}: " + ", ".join(said))
    if report.get("truncated"):
        lines.append(
            f"{report['truncated']:,} trajectories are longer than the model and were cut off (--set length=N)"
        )
    return Text("\n".join(lines))


def supervised_table(report: Mapping[str, Any], out: Path) -> RenderableType:
    """What phase 2 came to: by group how sure the regions are of it, and how near its samples come."""
    lines = [
        f"{out}: supervised by {report['strategy']} ({report['reason']}), {report['peak_gb']:.2f} GB at most"
    ]
    stage = report.get(report["strategy"], {})
    lines += [f"{name} {stage[name]:.4g}" for name in ("loss",) if name in stage]
    if report["strategy"] == "finetune":
        best = stage["best"]
        lines.append(
            f"best at step {best['step']}: validation {best['validation']:.4g} ({stage['validated_on']} people)"
        )
    if report.get("membership"):
        lines.append(
            "membership: weights began from the region that each person lives in, and groups live where their regions are"
        )
    lines += [f"warning: {warning}" for warning in report.get("warnings", ())]
    rows = [
        _supervised_row(name, told, report) for name, told in report.get("information", {}).items()
    ]
    return (
        Group(Text("\n".join(lines)), rows_table(rows, "groups"))
        if rows
        else Text("\n".join(lines))
    )


def _supervised_row(group: str, told: float, report: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"group": group, "told by regions": told}
    if "tilt" in report:
        row["effective share"] = report["tilt"]["groups"][group]["relative_size"]
    if "calibration" in report:
        fitted = report["calibration"]["groups"][group]["population"]
        row |= {"JSD to its means": fitted["before"]["js"], "calibrated": fitted["after"]["js"]}
        row["accepted"] = 1 / fitted["cap"]
    return row


def evaluation_table(found: Evaluation) -> RenderableType:
    """A file of samples beside baseline, strong and floor; what is by group stays for the written tables."""
    made = [table for name, table in tables.evaluation_tables(found).items() if name != "groups"]
    lines = list(dict.fromkeys(table.note for table in made if table.note))
    lines += [f"group '{name}' is left out: it {reason}" for name, reason in found.left_out.items()]
    lines += [f"warning: {warning}" for warning in found.warnings]
    return Group(*map(plain_table, made), Text("\n".join(lines)))


def plain_table(table: tables.Table) -> RenderableType:
    """Without lines between columns: nine of them fit into 80 characters."""
    printed = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name, numeric in zip(table.columns, table.numeric, strict=True):
        printed.add_column(Text(name), justify="right" if numeric else "left", no_wrap=numeric)
    for row in table.texts():
        printed.add_row(*map(Text, row))
    return Group(Text(table.caption, style="italic"), printed)


def run_table(name: str, evaluation: Mapping[str, Any]) -> RenderableType:
    """How near the samples of one way to know regions come, on the paper's metrics."""
    found = evaluation["groups"] or evaluation["everybody"]
    labels = [
        label for label in ("baseline", "ours", "strong", "floor") if label in found["scores"]
    ]
    rows = [
        {"metric": metric.title}
        | {
            "supervised" if label == "ours" else label: found["scores"][label]["average"][
                metric.name
            ]
            for label in labels
        }
        | {"closed": _closed(found["gap_closed_floor"].get(metric.name, {}).get("share")).strip()}
        for metric in metrics()
        if metric.name in PAPER_METRICS
    ]
    who = (
        "held-out people of the group, mean over groups"
        if evaluation["groups"]
        else "held-out people"
    )
    return rows_table(rows, f"regions {name}: JSD in bits to {who}")


def _closed(share: float | None) -> str:
    return f"{'-' if share is None else format(share, '.0%'):>5}"


def generated_table(made: Mapping[str, Any]) -> RenderableType:
    """What a file of samples holds."""
    lines = [
        f"{made['path']}: {made['n']:,} trajectories, {made['tokens']:,} tokens, {made['seconds']:.1f} s "
        f"({made['trajectories_per_second']:,.0f} a second), {made['peak_gb']:.2f} GB at most"
    ]
    calibration = made.get("calibration")
    if calibration:
        lines.append(
            f"calibrated, anchors {calibration['form']}: {made['acceptance_rate']:.0%} of the candidates were accepted"
        )
        lines += [
            f"{name}: JSD to its recovered means {each['before']['js']:.4f}, calibrated {each['after']['js']:.4f}"
            for name, each in calibration["groups"].items()
        ]
    return Text("\n".join(lines))


def _or_dash(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
