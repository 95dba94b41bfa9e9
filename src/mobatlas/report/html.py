"""The report of a run: one self-contained HTML file that can be read offline."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError
from markupsafe import Markup

from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.samples import Samples
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.comparison import EVERYBODY, labelled_groups, real_groups
from mobatlas.evaluation.evaluate import STRONG_CALIBRATED, sample_reader
from mobatlas.evaluation.metrics import PAPER_METRICS, MetricSpec, metrics
from mobatlas.features.maps import Feature
from mobatlas.generators.store import KIND as MODEL
from mobatlas.generators.store import SUPERVISION
from mobatlas.groups import Groups
from mobatlas.io.manifest import read_manifest, refuse_corrupt, write_atomic
from mobatlas.io.output import lock_output
from mobatlas.regions.recovery.recover import MOSTLY_PRIOR
from mobatlas.report.charts import REAL, Chart, Series, View, Views, line_chart
from mobatlas.report.console import answers, compared_people, distinguished, summarise
from mobatlas.report.tables import Cell, Table, checks_table, scores_table
from mobatlas.supervision.evidence import describe_informed
from mobatlas.supervision.store import CURVE as VALIDATIONS

RUN = "run.json"
POINTS = 300  # of a learning curve
BITS = ".4f"
STYLESHEET = resources.files("mobatlas.report").joinpath("templates", "report.css")
Bar = tuple[str, float, str]  # label, value, class in the stylesheet
GROUP_COLUMN = "js "  # prefix of the group columns in a finetuning curve


def write_report(
    run: Path | str,
    out: Path | str,
    *,
    overwrite: bool = False,
    read: Callable[..., Samples] | None = None,
) -> Path:
    """Write the report of a run.

    Parameters
    ----------
    run
        The folder that `mobatlas run` or `mobatlas demo` wrote.
    out
        The HTML file.
    overwrite
        Whether to replace an existing file.
    read
        Reads a file of samples; see `sample_reader`. A run passes a reader with a filled cache.

    Returns
    -------
    Path
        The file.

    Examples
    --------
    >>> write_report("run", "report.html")  # doctest: +SKIP
    """
    folder = Path(run)
    target = Path(out)
    if target.exists() and not overwrite:
        raise MobatlasError(f"{target}: exists already; choose another name, or pass --overwrite")
    with lock_output(target), refuse_corrupt(folder):
        write_atomic(target, render(folder, read).encode())
    return target


def render(folder: Path, read: Callable[..., Samples] | None = None) -> str:
    """The report as HTML text."""
    facts = _read_run(folder)
    dataset = TrajectoryDataset.open(folder / facts["dataset"])
    page = _Page(folder, facts, dataset, read or sample_reader(dataset))
    environment = Environment(
        loader=PackageLoader("mobatlas.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    try:
        return environment.get_template("report.html.j2").render(
            page=page, style=Markup(STYLESHEET.read_text(encoding="utf-8"))
        )
    except UndefinedError as error:  # a file of the run is incomplete
        raise LookupError(str(error)) from error


def _read_run(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MobatlasError(
            f"{folder}: has no {RUN}; give the folder that `mobatlas run` or `mobatlas demo` wrote"
        ) from None
    except (OSError, ValueError):
        raise MobatlasError(
            f"{folder / RUN}: cannot be read; run `mobatlas run` again to replace it"
        ) from None


@dataclass(frozen=True)
class Chapter:
    """The results for one kind of regions."""

    name: str
    diagnosis: dict[str, Any]
    supervision: dict[str, Any]
    evaluation: dict[str, Any]
    privacy: dict[str, Any] | None  # None: the run has no audit
    curves: list[Chart]
    views: list[View]

    @property
    def scores(self) -> dict[str, Any]:
        """Scores averaged over groups, or of everybody if there are no labels."""
        return self.evaluation["groups"] or self.evaluation["everybody"]

    @property
    def scores_table(self) -> Markup:
        people = compared_people(self.evaluation)
        caption = f"Jensen-Shannon divergence in bits to {people}. 0 is best."
        return scores_table(self.scores, caption, ours="supervised", digits=BITS).as_html()

    @property
    def missing_gaps(self) -> dict[str, str]:
        """Metric -> why there is no gap to close."""
        gaps = self.scores["gap_closed_floor"]
        return {
            metric.title: gaps[metric.name]["reason"]
            for metric in metrics(with_times=True)
            if metric.name in gaps and gaps[metric.name]["reason"]
        }

    @property
    def group_table(self) -> Markup:
        """The paper's metrics by group: ours, with the baseline in brackets."""
        scores = self.evaluation["groups"]["scores"]
        baseline = scores["baseline"]["groups"]
        records: list[dict[str, Cell]] = [
            {"group": name}
            | {
                metric.title: f"{ours[metric.name]:{BITS}} ({baseline[name][metric.name]:{BITS}})"
                for metric in _paper_metrics()
            }
            for name, ours in scores["ours"]["groups"].items()
        ]
        return Table.from_records(records, "Supervised (baseline), JSD in bits").as_html()

    @property
    def checks_table(self) -> Markup:
        assert self.privacy is not None  # the template checks this first
        return replace(checks_table(self.privacy), caption="", note="").as_html()

    @property
    def identified(self) -> list[Bar]:
        """How far the regions identify each contrast between groups."""
        kinds = {"identified": "ours", "partly identified": "partly", "not identified": "not"}
        return [
            (each["name"], each["share_identified"], kinds[each["verdict"]])
            for each in self.diagnosis["contrasts"]
        ]

    @property
    def distinguished(self) -> str:
        """Which groups the evidence can distinguish."""
        return distinguished(self.diagnosis)

    @property
    def informed(self) -> str | None:
        """Which features the evidence informs; None if the run did not record it."""
        shares = self.supervision.get("informed")
        return None if shares is None else describe_informed(shares)

    @property
    def evidence(self) -> list[str]:
        """The evidence beyond regions, such as "200 labelled people"."""
        return [each["title"] for each in self.supervision.get("evidence", ())]

    @property
    def information(self) -> list[Bar]:
        """The share of each group's estimate that comes from data, not from the prior."""
        return [
            (name, share, "ours" if share >= MOSTLY_PRIOR else "partly")
            for name, share in self.supervision.get("information", {}).items()
        ]


@dataclass(frozen=True)
class _Page:
    """Everything that the template shows."""

    folder: Path
    facts: dict[str, Any]
    dataset: TrajectoryDataset
    read: Callable[..., Samples]

    @cached_property
    def spec(self) -> MetricSpec:
        return MetricSpec.of(self.dataset)

    @cached_property
    def labelled(self) -> bool:
        return labelled_groups(self.dataset) is not None

    @cached_property
    def chapters(self) -> list[Chapter]:
        return [self._chapter(name, facts) for name, facts in self.facts["regions"].items()]

    @property
    def answers(self) -> list[str]:
        """Whether the samples are safe to share."""
        return answers(self.facts) or [
            "The privacy of these samples was not audited: do not share them before "
            "`mobatlas audit` says that they are safe."
        ]

    @property
    def summary(self) -> list[str]:
        results = {
            chapter.name: {
                "diagnosis": chapter.diagnosis,
                "information": chapter.supervision["information"],
                "evaluation": chapter.evaluation,
            }
            for chapter in self.chapters
        }
        return summarise(results, self.labelled)

    @property
    def metrics(self) -> list[Feature]:
        """All metrics that a chapter shows."""
        shown = {name for each in self.chapters for name in each.scores["intervals"]["ours"]}
        return [metric for metric in metrics(with_times=True) if metric.name in shown]

    @property
    def configuration(self) -> str:
        return json.dumps(self.facts["config"], indent=2, ensure_ascii=False)

    def _chapter(self, name: str, facts: Mapping[str, Any]) -> Chapter:
        model = self.folder / facts["model"]
        details = read_manifest(model, MODEL).details
        groups = Groups.of(details[SUPERVISION]["groups"])
        # Of the baseline, and of strong if there are labels; maps need no calibrated strong.
        common = {
            label: path
            for label, path in self.facts["samples"].items()
            if label != STRONG_CALIBRATED
        }
        files = {"baseline": common["baseline"], "supervised": facts["samples"], **common}
        samples = {
            label: self.read(self.folder / path, groups=groups) for label, path in files.items()
        }
        curves = (
            *_training_curves(self.folder / "baseline", "baseline"),
            *_training_curves(model, name),
            *_validation_curves(model, name),
        )
        return Chapter(
            name=name,
            diagnosis=dict(facts["diagnosis"]),
            supervision=details["report"],
            evaluation=self._read_json(facts["evaluation"]),
            privacy=self._read_json(facts["audit"]) if "audit" in facts else None,
            curves=[curve for curve in curves if curve is not None],
            views=self._views(samples, groups),
        )

    def _read_json(self, path: str) -> dict[str, Any]:
        return json.loads((self.folder / path).read_text(encoding="utf-8"))

    @cached_property
    def _held_out(self) -> dict[str, Trajectories]:
        """Held-out people by group; nothing without labels."""
        return real_groups(self.dataset, "test") if self.labelled else {}

    def _views(self, samples: Mapping[str, Samples], groups: Groups) -> list[View]:
        draw = Views(self.dataset, self.spec).view
        real = {REAL: Trajectories.of(self.dataset, self.dataset.split("test"))}
        views = [draw(EVERYBODY, real | {k: v.trajectories for k, v in samples.items()})]
        for number, name in enumerate(groups.names):
            real = {REAL: self._held_out[name]} if name in self._held_out else {}
            views.append(draw(name, real | {k: v.of_group(number) for k, v in samples.items()}))
        return views


def _paper_metrics() -> list[Feature]:
    return [metric for metric in metrics(with_times=True) if metric.name in PAPER_METRICS]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file; none if the file cannot be read."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []


def _training_curves(model: Path, label: str) -> Iterator[Chart | None]:
    """Training losses of a model, one chart a stage."""
    rows = _read_lines(model / "metrics.jsonl")
    for stage in dict.fromkeys(row["stage"] for row in rows):
        mine = [row for row in rows if row["stage"] == stage and row.get("loss") is not None]
        every = max(1, len(mine) // POINTS)
        blocks = len(mine) // every
        step, loss = (np.array([float(row[name]) for row in mine]) for name in ("step", "loss"))
        x = step[: blocks * every : every]
        y = loss[: blocks * every].reshape(blocks, every).mean(1)
        title = f"Training: {label}, {stage}"
        yield line_chart([Series("loss", "ours", x, y)], title, "step", "loss", log=True)


def _validation_curves(model: Path, label: str) -> Iterator[Chart | None]:
    """Validation losses of `finetune`; nothing for other strategies."""
    if not (rows := _read_lines(model / VALIDATIONS)):
        return
    step = np.array([float(row["step"]) for row in rows])

    def series(column: str, name: str, kind: str) -> Series:
        return Series(name, kind, step, np.array([float(row[column]) for row in rows]))

    kinds = ("ours", "strong", "baseline", "real")
    names = [name for name in rows[0] if name.startswith(GROUP_COLUMN)]
    groups = [
        series(name, name.removeprefix(GROUP_COLUMN), kinds[k % len(kinds)])
        for k, name in enumerate(names)
    ]
    regions = [series("validation", "regions of validation people", "ours")]
    yield line_chart(regions, f"Finetuning {label}: regional loss", "step", "bits")
    title = f"Finetuning {label}: JSD of each group to its estimate"
    yield line_chart(groups, title, "step", "bits")
