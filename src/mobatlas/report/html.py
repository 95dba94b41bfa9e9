"""One HTML file about a run: nothing is fetched from anywhere, so it can be mailed, archived and read without a network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError
from markupsafe import Markup, escape

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.samples import Samples, read_samples
from mobatlas.data.trajectories import Trajectories
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.comparison import EVERYBODY, group_members
from mobatlas.evaluation.metrics import METRICS, PAPER_METRICS, MetricSpec, metrics
from mobatlas.features.divergences import column_sums, jsd
from mobatlas.generators.store import KIND as MODEL
from mobatlas.generators.store import SUPERVISION
from mobatlas.groups import Groups
from mobatlas.io.manifest import as_written, read_manifest, write_whole
from mobatlas.io.output import only_writer
from mobatlas.regions.recovery.recover import MOSTLY_PRIOR
from mobatlas.report.charts import Mark, Series, bar_chart, gap_chart, line_chart
from mobatlas.report.summary import summary
from mobatlas.report.views import REAL, View, Views
from mobatlas.supervision.store import CURVE as VALIDATIONS

RUN = "run.json"
CURVE = 300  # points of a learning curve
BY_GROUP = "js "  # begins the columns of a finetuning curve


def write_report(run: Path | str, out: Path | str, *, overwrite: bool = False) -> Path:
    """Read the folder of a run and write the page."""
    folder, target = Path(run), Path(out)
    if target.exists() and not overwrite:
        raise MobatlasError(f"{target}: exists already; choose another name, or pass --overwrite")
    with only_writer(target), as_written(folder):
        write_whole(target, render(folder).encode())
    return target


def render(folder: Path) -> str:
    """The page as text."""
    story = _Story(folder, _facts(folder))
    environment = Environment(
        loader=PackageLoader("mobatlas.report"), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["share"] = lambda value: "-" if value is None else f"{value:.0%}"
    environment.filters["bits"] = lambda value: "-" if value is None else f"{value:.4f}"
    try:
        return environment.get_template("report.html.j2").render(story=story, style=_style())
    except UndefinedError as error:  # a file of the run lacks what the page asks of it
        raise LookupError(str(error)) from error


def _facts(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MobatlasError(
            f"{folder}: has no {RUN}; give the folder that `mobatlas run` or `mobatlas demo` wrote"
        ) from None
    except (OSError, ValueError):
        raise MobatlasError(
            f"{folder / RUN}: is not what `mobatlas run` writes; run it again"
        ) from None
    return found


def _style() -> Markup:
    return Markup(
        resources.files("mobatlas.report")
        .joinpath("templates", "report.css")
        .read_text(encoding="utf-8")
    )


@dataclass(frozen=True)
class Chapter:
    """One way to know regions."""

    name: str
    diagnosis: dict[str, Any]
    supervision: dict[str, Any]
    evaluation: dict[str, Any]
    privacy: dict[str, Any] | None  # None where no audit was asked for
    gaps: Markup
    identified: Markup
    composition: Markup
    likeness: list[tuple[str, Markup]]
    curves: list[Markup]
    views: list[View]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The metric table: averages over groups, or of everybody."""
        found = self.evaluation["groups"] or self.evaluation["everybody"]
        rows = []
        for metric in (
            each for each in METRICS.values() if each.name in found["intervals"]["ours"]
        ):
            values = {
                label: scores["average"].get(metric.name)
                for label, scores in found["scores"].items()
            }
            interval = found["intervals"]["ours"][metric.name]
            closed = found["gap_closed_floor"].get(metric.name, {})
            rows.append({"metric": metric, **values, "interval": interval, "closed": closed})
        return rows

    @property
    def group_rows(self) -> list[tuple[str, dict[str, float], dict[str, float]]]:
        """By group: ours and the baseline on the paper's metrics."""
        found = self.evaluation["groups"]
        if not found:
            return []
        ours, baseline = found["scores"]["ours"]["groups"], found["scores"]["baseline"]["groups"]
        return [(name, ours[name], baseline[name]) for name in ours]

    @property
    def diversity(self) -> dict[str, Any]:
        found: dict[str, Any] = self.evaluation["everybody"]["scores"]["ours"]["diversity"]
        return found


@dataclass(frozen=True)
class _Story:
    """All that the page shows."""

    folder: Path
    facts: dict[str, Any]

    @property
    def title(self) -> str:
        return str(self.facts["title"])

    @property
    def paper_metrics(self) -> list[Any]:
        return [metric for metric in metrics() if metric.name in PAPER_METRICS]

    @cached_property
    def dataset(self) -> TrajectoryDataset:
        return TrajectoryDataset.open(self.folder / self.facts["dataset"])

    @cached_property
    def spec(self) -> MetricSpec:
        return MetricSpec.of(self.dataset)

    @cached_property
    def labelled(self) -> bool:
        return self.dataset.groups is not None and self.dataset.labels() is not None

    @cached_property
    def chapters(self) -> list[Chapter]:
        return [self._chapter(name, found) for name, found in self.facts["regions"].items()]

    @cached_property
    def summary(self) -> list[str]:
        told = {
            each.name: {
                "diagnosis": each.diagnosis,
                "information": each.supervision["information"],
                "evaluation": each.evaluation,
            }
            for each in self.chapters
        }
        return summary(told, self.labelled)

    @property
    def people(self) -> dict[str, int]:
        return {split: len(self.dataset.split_people(split)) for split in ("train", "val", "test")}

    @property
    def configuration(self) -> str:
        return json.dumps(self.facts["config"], indent=2, ensure_ascii=False)

    @property
    def published(self) -> dict[str, Any]:
        """What the paper printed: its caveat, and rows with the JSD of its four metrics."""
        text = resources.files("mobatlas.report").joinpath("published.json").read_text("utf-8")
        tables = json.loads(text)
        return {"caveat": tables["source"]["caveat"], "rows": tables["rq1"]["rows"]}

    def _chapter(self, name: str, found: Mapping[str, Any]) -> Chapter:
        evaluation = json.loads((self.folder / found["evaluation"]).read_text(encoding="utf-8"))
        details = read_manifest(self.folder / found["model"], MODEL).details
        supervision, groups = details["report"], Groups.of(details[SUPERVISION]["groups"])
        files = {"baseline": self.facts["samples"]["baseline"], "supervised": found["samples"]}
        if "strong" in self.facts["samples"]:
            files["strong"] = self.facts["samples"]["strong"]
        words = self.dataset.vocabulary
        samples = {
            label: read_samples(self.folder / path, words, groups) for label, path in files.items()
        }
        models = {"baseline": "baseline", name: found["model"]}
        return Chapter(
            name=name,
            diagnosis=dict(found["diagnosis"]),
            supervision=supervision,
            evaluation=evaluation,
            privacy=json.loads((self.folder / found["audit"]).read_text(encoding="utf-8"))
            if "audit" in found
            else None,
            gaps=_gaps(evaluation),
            identified=_identified(found["diagnosis"]),
            composition=_told_of(supervision),
            likeness=self._likeness(samples["supervised"], groups),
            curves=[
                *(
                    curve
                    for label, path in models.items()
                    for curve in _curves(self.folder / path, label)
                ),
                *_validations(self.folder / found["model"], name),
            ],
            views=self._views(samples, groups),
        )

    @cached_property
    def _members(self) -> dict[str, np.ndarray[Any, Any]]:
        return group_members(self.dataset, "test") if self.labelled else {}

    def _views(self, samples: Mapping[str, Samples], groups: Groups) -> list[View]:
        draw = Views(self.dataset, self.spec).view
        views = [
            draw(
                EVERYBODY,
                {REAL: self._real(None)} | {k: v.trajectories for k, v in samples.items()},
            )
        ]
        for number, name in enumerate(groups.names):
            shown = {label: each.of_group(number) for label, each in samples.items()}
            real = {REAL: self._real(name)} if name in self._members else {}
            views.append(draw(name, real | shown))
        return views

    def _real(self, group: str | None) -> Trajectories:
        rows = self.dataset.split("test") if group is None else self._members[group]
        return Trajectories.of(self.dataset, rows)

    def _likeness(self, samples: Samples, groups: Groups) -> list[tuple[str, Markup]]:
        """JSD of POIs between groups, of real people and of samples: groups should be as unlike each other as they are."""
        if not self.labelled:
            return []
        training = {
            name: Trajectories.of(self.dataset, rows)
            for name, rows in group_members(self.dataset, "train").items()
        }
        made = {name: samples.of_group(number) for number, name in enumerate(groups.names)}
        return [("real training people", self._heat(training)), ("samples", self._heat(made))]

    def _heat(self, groups: Mapping[str, Trajectories]) -> Markup:
        bins = {
            name: column_sums(self.spec.counts(each)["poi"])
            for name, each in groups.items()
            if len(each)
        }
        head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in bins)
        rows = []
        for name, mine in bins.items():
            values = [jsd(mine, other) for other in bins.values()]
            cells = "".join(f'<td style="--heat:{value:.3f}">{value:.2f}</td>' for value in values)
            rows.append(f"<tr><th scope='row'>{escape(name)}</th>{cells}</tr>")
        return Markup(
            f'<table class="heat"><thead><tr><td></td>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        )


def _gaps(evaluation: Mapping[str, Any]) -> Markup:
    """Where samples lie between baseline and floor."""
    found = evaluation["groups"] or evaluation["everybody"]
    scores = {label: each["average"] for label, each in found["scores"].items()}
    if "baseline" not in scores:
        return Markup("")
    shown = [
        (label, kind) for label, kind in (("ours", "ours"), ("strong", "strong")) if label in scores
    ]
    rows = [
        (
            metric.title,
            [
                Mark("supervised" if label == "ours" else label, kind, scores[label][metric.name])
                for label, kind in shown
            ],
            scores["baseline"][metric.name],
            scores["floor"][metric.name],
        )
        for metric in metrics()
        if metric.name in PAPER_METRICS
    ]
    return gap_chart(rows, "How far from the model without groups towards real people")


def _identified(diagnosis: Mapping[str, Any]) -> Markup:
    contrasts = diagnosis["contrasts"]
    kinds = [
        "ours"
        if each["verdict"] == "identified"
        else "partly"
        if "partly" in each["verdict"]
        else "not"
        for each in contrasts
    ]
    return bar_chart(
        [each["name"] for each in contrasts],
        [each["share_identified"] for each in contrasts],
        kinds,
        "Differences between groups: the share of each that these regions could tell, given enough people",
        1.0,
    )


def _told_of(supervision: Mapping[str, Any]) -> Markup:
    told = supervision.get("information", {})
    kinds = ["ours" if share >= MOSTLY_PRIOR else "partly" for share in told.values()]
    title = (
        "What they told of each group with the people they have (0 is all assumption, 1 all data)"
    )
    return bar_chart(list(told), list(told.values()), kinds, title, 1.0)


def _curves(model: Path, label: str) -> list[Markup]:
    """Training losses of a model, one chart a stage."""
    try:
        lines = [
            json.loads(line)
            for line in (model / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
    except (OSError, ValueError):
        return []
    charts = []
    for stage in dict.fromkeys(line["stage"] for line in lines):
        mine = [line for line in lines if line["stage"] == stage and line.get("loss") is not None]
        every = max(1, len(mine) // CURVE)
        step, loss = (np.array([float(line[name]) for line in mine]) for name in ("step", "loss"))
        blocks = len(mine) // every
        x, y = step[: blocks * every : every], loss[: blocks * every].reshape(blocks, every).mean(1)
        charts.append(
            line_chart(
                [Series("loss", "ours", x, y)],
                f"Training: {label}, {stage}",
                "step",
                "loss",
                log=True,
            )
        )
    return charts


def _validations(model: Path, label: str) -> list[Markup]:
    """How finetuning came nearer to the regions and to the means recovered for each group; nothing of other strategies."""
    try:
        rows = [
            json.loads(line)
            for line in (model / VALIDATIONS).read_text(encoding="utf-8").splitlines()
        ]
    except (OSError, ValueError):
        return []
    step = np.array([float(row["step"]) for row in rows])
    names = [name for name in rows[0] if name.startswith(BY_GROUP)] if rows else []

    def series(name: str, label: str, kind: str) -> Series:
        return Series(label, kind, step, np.array([float(row[name]) for row in rows]))

    kinds = ("ours", "strong", "baseline", "real")
    groups = [
        series(name, name.removeprefix(BY_GROUP), kinds[k % len(kinds)])
        for k, name in enumerate(names)
    ]
    drawn = [
        (
            [series("validation", "regions of validation people", "ours")],
            f"Finetuning {label}: regional loss",
        ),
        (groups, f"Finetuning {label}: JSD of each group to its recovered means"),
    ]
    return [line_chart(lines, title, "step", "bits") for lines, title in drawn if rows]
