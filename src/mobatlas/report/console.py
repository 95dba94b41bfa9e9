"""Console output of the commands, and the summary of a run that the report also shows."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from mobatlas.errors import listed
from mobatlas.evaluation.evaluate import Evaluation
from mobatlas.evaluation.metrics import PAPER_METRICS
from mobatlas.evaluation.privacy.audit import AMBER, GREEN, RED, Audit
from mobatlas.groups import gender
from mobatlas.regions.ages import parse_age
from mobatlas.regions.identifiability import Diagnosis
from mobatlas.regions.recovery.design import BUDGET, EvidencePlan, ends, mean_of
from mobatlas.regions.recovery.recover import MOSTLY_PRIOR
from mobatlas.regions.types import Regions
from mobatlas.report.tables import (
    Cell,
    Table,
    attacks_table,
    checks_table,
    evaluation_tables,
    scores_table,
)
from mobatlas.supervision.evidence import describe_informed

HEADLINE = "poi"  # the metric of the summary
HELPFUL = 0.02  # of the mean half-width: a smaller reduction is not worth a recommendation
VERDICTS = {
    "identified": "can distinguish",
    "partly identified": "can only partly distinguish",
    "not identified": "cannot distinguish",
}
STYLES = {GREEN: "bold green", AMBER: "bold yellow", RED: "bold red"}
REASONS = {
    "unreliable": "with too many days above max_day_km",
    "coverage": "with too few well-covered days",
    "short": "with too few tokens",
    "anchors": "without a known home and workplace",
}


def summary_table(summary: Mapping[str, Any], out: Path) -> RenderableType:
    """The dataset that `prepare` wrote, by split, and what it dropped."""
    columns = {
        "users": "users",
        "trajectories": "trajectories",
        "tokens": "tokens",
        "length_median": "median length",
        "length_p95": "p95",
        "vocabulary_coverage": "named POIs",
    }
    rows = tuple(
        (split, *(counts[name] for name in columns)) for split, counts in summary["splits"].items()
    )
    table = Table(("split", *columns.values()), rows, f"{out}", {"named POIs": ".1%"})
    return Group(table.as_rich(), _lines(_summary_lines(summary)))


def _summary_lines(summary: Mapping[str, Any]) -> list[str]:
    windows = summary["windows"]
    users = sum(counts["users"] for counts in summary["splits"].values())
    rare = summary["rare_places"]
    known = summary["users_in_people"]
    in_people = "" if known is None else f"; {known:,} are in the people table"
    became_other = (
        f"; {rare['places']:,} have fewer than {rare['min_people']} visitors among training people "
        f"and became OTHER, with {rare['share_of_visits']:.1%} of the visits to POIs"
    )
    lines = [
        f"visits: {summary['visits']['rows']:,} read; dropped: {_dropped_visits(summary)}; "
        f"POIs: {summary['pois']:,}{became_other if rare['places'] else ''}",
        f"users: {summary['users']:,}; {users:,} have a trajectory{in_people}",
        f"windows: {windows['kept']:,} used; dropped: {_dropped_windows(summary)}",
    ]
    titles = {"attributes": "attributes", "regions": "regions", "others": "stored with the labels"}
    columns = [
        f"{titles[key]}: {', '.join(names)}"
        for key, names in summary["people_columns"].items()
        if names
    ]
    if columns:
        lines.append(f"people: {'; '.join(columns)}")
    if summary["inferred_anchors"]:
        lines.append(
            f"inferred from the hours of visits: {' and '.join(summary['inferred_anchors'])}"
        )
    return lines + [f"note: {note}" for note in summary["notes"]]


def _dropped_visits(summary: Mapping[str, Any]) -> str:
    visits = summary["visits"]
    return _counts(
        {
            "without coordinates": visits["missing_coordinates"],
            "not at a POI": visits["not_poi"],
            "invalid": visits["invalid"],
            "duplicates": visits["duplicates"],
        }
    )


def _dropped_windows(summary: Mapping[str, Any]) -> str:
    return _counts({REASONS[name]: count for name, count in summary["windows"]["fell"].items()})


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "none"


def check_table(facts: Mapping[str, Any]) -> RenderableType:
    """What a check found in the tables of a configuration."""
    if not facts:
        return Text("without visits, tables are not checked")
    summary, window = facts["visits"], facts["window"]
    span = f" over {facts['days']:,} days" if facts["days"] else ""
    sample = f" ({facts['share']:.0%} of the people were read)" if facts["share"] < 1 else ""
    rows: dict[str, Cell] = {
        "visits": f"{summary['visits']['rows']:,} of {summary['users']:,} people{span}, at "
        f"{summary['pois']:,} places{sample}; dropped: {_dropped_visits(summary)}",
        "window": f"{window['days']} day{'s' * (window['days'] > 1)}"
        + (f": {window['reason']}" if "reason" in window else ""),
        "trajectories": f"{summary['windows']['kept']:,}; dropped: {_dropped_windows(summary)}",
    }
    for name, each in facts["regions"].items():
        diagnosis = each["diagnosis"]
        levels = "; ".join(f"{key}: {', '.join(own)}" for key, own in diagnosis["attributes"])
        features = listed([f"{count:,} of {kind}" for kind, count in each["features"].items()])
        who = "shares of visits" if each["people"] is None else f"{each['people']:,.0f} people"
        period = f"; a value covers {each['days']:.3g} days" if each["days"] else ""
        rows |= {
            f"regions {name}": f"{diagnosis['regions']:,}; groups: {len(diagnosis['groups'])} "
            f"({levels})",
            "aggregates": f"{who}; features: {features}{period}",
            "evidence": ", ".join(diagnosis["evidence"]) or "none beside regions",
        }
    rows |= {f"per, {name}": ": ".join(reason) for name, reason in facts["periods"].items()}
    sentences = [distinguished(each["diagnosis"]) for each in facts["regions"].values()]
    notes = [f"{kind[:-1]}: {text}" for kind in ("notes", "warnings") for text in facts[kind]]
    return Group(_facts(rows), _lines([*sentences, *notes]))


def costs_table(costs: Mapping[str, Mapping[str, float]]) -> RenderableType:
    """The estimated costs of the steps of a run."""
    rows = [
        (name, each["seconds"] / 60, each["memory_gb"], each["disk_gb"])
        for name, each in costs.items()
    ]
    _, minutes, memory, disk = zip(*rows, strict=True)
    formats = {"minutes": ",.1f", "memory (GB)": ".1f", "disk (GB)": ".2f"}
    return Table(
        ("step", *formats),
        (*rows, ("all", sum(minutes), max(memory), sum(disk))),
        "Estimates for this machine as busy as it is now, from a few steps of training. They may "
        "be wrong by a factor of three.",
        formats,
    ).as_rich()


def city_table(facts: Mapping[str, Any], out: Path) -> RenderableType:
    """The city that `simulate` wrote."""
    return _facts({name.replace("_", " "): value for name, value in facts.items()}, f"{out}")


def diagnosis_table(diagnosis: Diagnosis) -> RenderableType:
    """Which groups the regions can distinguish."""
    smallest, median, largest = diagnosis.people
    groups = len(diagnosis.groups)
    bound = diagnosis.bounds.finite_sample
    unit = "shares" if diagnosis.bounds.of_shares else "visits"
    facts = {
        "regions, groups": f"{diagnosis.regions:,}, {groups}",
        "people in a region": f"{smallest:,.0f} to {largest:,.0f}, median {median:,.0f}",
        "rank, effective rank": f"{diagnosis.rank}, {diagnosis.effective_rank} of {groups}",
        "smallest singular value": f"{diagnosis.sigma_min:.3g}",
        "condition number": f"{diagnosis.condition_number:.3g}",
        "the paper's error bound of all group means together": f"{bound:.3g} {unit} (95 %)"
        if bound < float("inf")
        else "none, because the rank is deficient",
    }
    if (rank := diagnosis.effective_rank_with_rest) is not None:
        facts["with the people outside all regions"] = f"effective rank {rank}"
    evidence = "regions, labelled people and tables" if diagnosis.evidence else "these regions"
    contrasts = dict(each.sentence().rsplit(": ", 1) for each in diagnosis.contrasts)
    caption = (
        f"Differences between groups, from {evidence}: the error to expect, as a share of visits "
        "to a typical place"
    )
    return Group(
        Text(distinguished(diagnosis.as_dict())),
        _facts(contrasts, caption),
        _facts(facts),
        _lines(f"warning: {warning}" for warning in diagnosis.warnings),
    )


def plan_table(plan: EvidencePlan) -> RenderableType:
    """What would help most, and the intervals to expect."""
    rows: list[tuple[Cell, ...]] = [("nothing: as now", "", _interval(mean_of(plan.now)), "")]
    for each in plan.actions:
        then = _interval(mean_of(each.half_widths))
        rows.append((each.name, each.people or "", then, f"{each.reduction:.0%}"))
    caption = (
        f"Expected {100 * plan.level:.4g} % intervals of a ratio to the average that is 1: means "
        "over groups and features, weighted by visits."
    )
    table = Table(("action", "people", "interval", "narrower"), tuple(rows), caption)
    assumptions = {each.kind.capitalize(): each.assumption for each in plan.actions}
    notes = [f"{kind}: we assume that {what}." for kind, what in assumptions.items()]
    notes += [f"Not considered: {reason}." for reason in plan.left_out]
    if plan.uninformed:
        names = ", ".join(plan.uninformed)
        notes.append(
            f"No evidence covers these feature maps, so samples show average behaviour in them: "
            f"{names}. Add them with mobatlas regions --feature."
        )
    notes.append(f"For another budget pass --budget N (default: {BUDGET}, a small survey).")
    return Group(_lines(_recommended(plan)), table.as_rich(), _lines(notes))


def _recommended(plan: EvidencePlan) -> list[str]:
    """The most helpful action for the budget, and what would help more."""
    best = plan.actions[0]
    if best.reduction < HELPFUL:
        return [f"Nothing considered here would narrow the intervals by {HELPFUL:.0%}."]
    within = next(each for each in plan.actions if each.people is not None)
    before, after, beyond = (
        _interval(mean_of(widths), " to ")
        for widths in (plan.now, within.half_widths, best.half_widths)
    )
    maps = " and ".join(f"{bins:,} features of {name}" for name, bins in plan.features.items())
    sentences = [
        f"The most helpful: {within.name}. Expected interval of a group: ratio {after} instead of "
        f"{before} ({len(plan.now)} groups, {maps})."
    ]
    if within.allocation:
        counts = "; ".join(f"{count:,} of {group}" for group, count in within.allocation.items())
        sentences.append(f"This means {counts}.")
    if within is not best:
        sentences.append(f"Beyond this budget, more would help: {best.name} ({beyond}).")
    return sentences


def _interval(half_width: float, to: str = "-") -> str:
    low, high = ends(half_width)
    return f"{low:.2f}{to}{high:,.{2 if high < 99.95 else 0}f}"


def _facts(facts: Mapping[str, Cell], caption: str = "") -> RenderableType:
    return Table(("", ""), tuple(facts.items()), caption).as_rich()


def _lines(lines: Iterable[str]) -> Text:
    return Text("\n".join(lines))


def regions_table(regions: Regions, diagnosis: Diagnosis, out: Path) -> RenderableType:
    """The REGIONS folder that `regions` wrote."""
    details = regions.details
    groups = len(diagnosis.groups)
    lines = [
        f"{out}: {diagnosis.regions:,} regions, {len(regions.aggregates.features):,} features",
        f"composition and aggregates: {details['separation']}",
        distinguished(diagnosis.as_dict()),
        f"rank {diagnosis.rank}, effective rank {diagnosis.effective_rank} of {groups}; "
        f"for details run `mobatlas diagnose {out}`",
    ]
    if details.get("shuffled"):
        lines.append("the regions are shuffled: use this folder as a negative control")
    lines += [f"note: {note}" for note in details.get("notes", ())]
    return _lines([*lines, *(f"warning: {warning}" for warning in diagnosis.warnings)])


def training_table(report: Mapping[str, Any], out: Path) -> RenderableType:
    """The model that `train` wrote."""
    lines = [f"{out}: trained; peak memory {report['peak_gb']:.2f} GB"]
    for stage, values in report.items():
        if isinstance(values, Mapping):
            texts = (
                f"{name} {value:{',' if isinstance(value, int) else '.4g'}}"
                for name, value in values.items()
            )
            lines.append(f"{stage}: " + ", ".join(texts))
    if report.get("truncated"):
        lines.append(
            f"{report['truncated']:,} trajectories are longer than the model and were truncated; "
            "pass --set length=N to keep more"
        )
    return _lines(lines)


def supervised_table(report: Mapping[str, Any], out: Path) -> RenderableType:
    """The model that `supervise` wrote: evidence and fit of each group."""
    strategy = report["strategy"]
    stage = report.get(strategy, {})
    lines = [
        f"{out}: supervised by {strategy} ({report['reason']}); "
        f"peak memory {report['peak_gb']:.2f} GB"
    ]
    if "loss" in stage:
        lines.append(f"loss {stage['loss']:.4g}")
    if "best" in stage:
        best = stage["best"]
        lines.append(
            f"best at step {best['step']}: validation {best['validation']:.4g} "
            f"({stage['validated_on']} people)"
        )
    if report.get("membership"):
        lines.append(
            "membership: the composition of a person's home region is the prior of the person's "
            "group; samples of a group live where the composition says"
        )
    if report.get("evidence"):
        titles = [each["title"] for each in report["evidence"]]
        lines.append(f"evidence beyond regions: {listed(titles)}")
    if report.get("informed"):
        lines.append(describe_informed(report["informed"]))
    lines += [f"warning: {warning}" for warning in report.get("warnings", ())]
    records = [
        _supervised_record(name, share, report)
        for name, share in report.get("information", {}).items()
    ]
    tables = [Table.from_records(records, "Groups").as_rich()] if records else []
    return Group(_lines(lines), *tables)


def _supervised_record(group: str, share: float, report: Mapping[str, Any]) -> dict[str, Cell]:
    record: dict[str, Cell] = {"group": group, "evidence": share}
    if "tilt" in report:
        record["effective share"] = report["tilt"]["groups"][group]["relative_size"]
    if "calibration" in report:
        fit = report["calibration"]["groups"][group]["population"]
        record["JSD to estimate"] = fit["before"]["js"]
        record["calibrated"] = fit["after"]["js"]
        record["accepted"] = 1 / fit["cap"]
    return record


def generated_table(facts: Mapping[str, Any]) -> RenderableType:
    """The file of samples that `generate` wrote."""
    lines = [
        f"{facts['path']}: {facts['n']:,} trajectories, {facts['tokens']:,} tokens, "
        f"{facts['seconds']:.1f} s ({facts['trajectories_per_second']:,.0f} a second), "
        f"peak memory {facts['peak_gb']:.2f} GB"
    ]
    if calibration := facts.get("calibration"):
        lines.append(
            f"calibrated, {calibration['form'].replace('_', ' ')}: "
            f"{facts['acceptance_rate']:.0%} of the candidates were accepted"
        )
        lines += [
            f"{name}: JSD to the estimated means {each['before']['js']:.4f}, "
            f"calibrated {each['after']['js']:.4f}"
            for name, each in calibration["groups"].items()
        ]
    if posterior := facts.get("posterior"):
        shares = ", ".join(
            f"{min(share, 1):.0%} ({name})" for name, share in posterior["spread"].items()
        )
        lines.append(
            f"{posterior['draws']} posterior draws (column draw); share of their spread that the "
            f"samples show: {shares}"
        )
    if facts.get("informed"):
        lines.append(facts["informed"]["others"])
    return _lines(lines)


def evaluation_table(evaluation: Evaluation) -> RenderableType:
    """The evaluation of a file of samples."""
    shown = evaluation_tables(evaluation)
    lines = list(dict.fromkeys(table.note for table in shown if table.note))
    lines += [
        f"group '{name}' is left out: it {reason}" for name, reason in evaluation.left_out.items()
    ]
    lines += [f"warning: {warning}" for warning in evaluation.warnings]
    return Group(*(table.as_rich() for table in shown), _lines(lines))


def run_tables(folder: Path, facts: Mapping[str, Any]) -> RenderableType:
    """The result of a run: a table for each source of regions, and a summary in sentences."""
    results = {
        name: {
            **each,
            "evaluation": json.loads((folder / each["evaluation"]).read_text(encoding="utf-8")),
        }
        for name, each in facts["regions"].items()
    }
    labelled = any(each["evaluation"]["groups"] for each in results.values())
    tables = [_run_table(name, each["evaluation"]) for name, each in results.items()]
    return Group(*tables, *map(Text, summarise(results, labelled)))


def _run_table(name: str, evaluation: Mapping[str, Any]) -> RenderableType:
    """The paper's metrics for the samples of one source of regions."""
    caption = f"regions {name}: JSD in bits to {compared_people(evaluation)}"
    scores = evaluation["groups"] or evaluation["everybody"]
    return scores_table(scores, caption, only=PAPER_METRICS, brief=True).as_rich()


def compared_people(evaluation: Mapping[str, Any]) -> str:
    """The people that a table of scores compares samples with."""
    same_group = " of the same group, mean over groups" if evaluation["groups"] else ""
    return f"held-out people{same_group}"


def audit_table(audit: Audit) -> RenderableType:
    """The checks of an audit, the attacks, the verdict and what to do."""
    people = audit.people
    compared = audit.compared
    checks = checks_table(audit.as_dict(), limits=False)  # narrow enough for 80 characters
    lines = [
        checks.note,
        f"compared: {people['train']:,} training people with {people['test']:,} held-out people; "
        f"the attacker knows {people['val']:,} others; attacked: {compared['people']:,} people"
        + (f", with {compared['samples']:,} samples" if audit.trajectories else ""),
        *(
            f"{check.spec.title}: {check.verdict}, {check.explanation}"
            for check in audit.checks
            if check.explanation
        ),
        *(f"warning: {warning}" for warning in audit.warnings),
        *audit.advice,
    ]
    verdict = Text.assemble("verdict: ", (audit.verdict, STYLES.get(audit.verdict, "bold")))
    attacks = attacks_table(audit).as_rich()
    return Group(checks.as_rich(), attacks, _lines(lines), verdict, Text(audit.answer))


def answers(facts: Mapping[str, Any]) -> list[str]:
    """Whether the samples of a run are safe to share, in a sentence for each kind of regions."""
    return [
        f"{name}: {chapter['answer']}"
        for name, chapter in facts["regions"].items()
        if "answer" in chapter
    ]


def summarise(results: Mapping[str, Mapping[str, Any]], labelled: bool) -> list[str]:
    """One paragraph for each kind of regions.

    `results` holds the diagnosis, the information about each group and the evaluation by name.
    """
    paragraphs = [
        " ".join([f"{name}:", *_identified(result), *_distance(result["evaluation"], labelled)])
        for name, result in results.items()
    ]
    if not labelled:
        paragraphs.append(
            "No person in this dataset has a label. The report therefore cannot measure how close "
            "samples of a group are to people of that group. Instead, it measures how well the "
            "model predicts regions of held-out people and regions that were left out."
        )
    return paragraphs


def _identified(result: Mapping[str, Any]) -> list[str]:
    """Which groups the regions distinguish."""
    diagnosis = result["diagnosis"]
    groups = len(diagnosis["groups"])
    sentences = [distinguished(diagnosis)]
    if vague := [name for name, share in result["information"].items() if share < MOSTLY_PRIOR]:
        names = "any group" if len(vague) == groups else listed(vague)
        verb = "their estimates stay" if len(vague) > 1 else "its estimate stays"
        sentences.append(f"The data say little about {names}; {verb} close to the city average.")
    return sentences


def distinguished(diagnosis: Mapping[str, Any]) -> str:
    """Which groups the evidence distinguishes, in words; see `Diagnosis.as_dict`."""
    groups = len(diagnosis["groups"])
    rank = diagnosis.get("effective_rank_with_evidence") or diagnosis["effective_rank"]
    count = diagnosis["regions"]
    subject = "This region" if count == 1 else f"These {count:,} regions"
    if diagnosis.get("evidence"):
        subject += f", with {listed(diagnosis['evidence'])},"
    found: dict[str, list[str]] = {form: [] for form in VERDICTS.values()}
    for attribute, levels in diagnosis.get("attributes", ()):
        if len(levels) > 1:
            found[_verdict(diagnosis, attribute)].append(_levels(attribute, levels))
    clauses = [f"{form} {listed(names)}" for form, names in found.items() if names]
    clauses.append(
        f"{'identifies' if count == 1 else 'identify'} {rank} of {groups} independent "
        "combinations of groups"
    )
    if rank == groups:
        clauses = [f"can distinguish all {groups} groups"]
    subjects = [subject] + ["It" if count == 1 else "They"] * len(clauses[1:])
    return " ".join(f"{who} {clause}." for who, clause in zip(subjects, clauses, strict=True))


def _verdict(diagnosis: Mapping[str, Any], attribute: str) -> str:
    """Whether the evidence can distinguish the levels of an attribute, as a verb."""
    verdicts = {
        each["verdict"]
        for each in diagnosis["contrasts"]
        if re.split("[:,]", each["name"])[0] == attribute and each["kind"] != "group"
    }
    return VERDICTS[verdicts.pop() if len(verdicts) == 1 else "partly identified"]


def _levels(attribute: str, levels: Sequence[str]) -> str:
    """What it is to distinguish the levels of an attribute, such as "women from men"."""
    if {*map(gender, levels)} == {"M", "F"}:
        return "women from men"
    if all(map(parse_age, levels)):
        return "age groups"
    return " from ".join(levels) if len(levels) == 2 else f"levels of {attribute}"


def _distance(evaluation: Mapping[str, Any], labelled: bool) -> list[str]:
    """How close samples are to held-out people, or to their regions if there are no labels."""
    if labelled and evaluation["groups"]:
        return _group_distance(evaluation["groups"])
    if not (people := evaluation.get("regional", {}).get("held_out_people")):
        return []
    closer = "closer" if people["supervised"] < people["baseline"] else "no closer"
    return [
        f"Simulated regions are {people['supervised']:.4f} bits from the regions of held-out "
        f"people: {closer} than the model without groups ({people['baseline']:.4f})."
    ]


def _group_distance(scores: Mapping[str, Any]) -> list[str]:
    average = {label: each["average"][HEADLINE] for label, each in scores["scores"].items()}
    gap = scores["gap_closed_floor"].get(HEADLINE, {})
    sentence = (
        f"POI visits of samples are {average['ours']:.3f} bits from those of held-out people of "
        f"the same group (model without groups: {average['baseline']:.3f}; real training people: "
        f"{average['floor']:.3f})."
    )
    if (share := gap.get("share")) is None:
        return [sentence, f"There is no gap to close: {gap.get('reason', 'none was measured')}."]
    if share > 0:
        return [sentence, f"This closes {share:.0%} of the gap from baseline to floor."]
    return [
        sentence,
        "This is no closer than the model without groups: the regions do not identify these groups "
        "well enough. Prefer the baseline.",
    ]
