"""The benchmark on real people, with a simulated city in their place."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import sparse

from bench import prediction
from bench.cells import Job, SeedFolder, Setup
from bench.error_bars import (
    KNOWN,
    PRECAUTIONS,
    RECOVERED,
    STAGES,
    GroupSample,
    coverage,
    error_bars,
    known_residence,
    relative_error,
)
from bench.people import WeightedPeople, draw_rows
from bench.prediction import PredictionOptions
from bench.real import FOUR_VISITS, RealOptions, map_tokens, real_jobs, run
from bench.report import real as report
from bench.report.figures import Bars
from bench.report.questions import write_question
from bench.report.real import (
    draw_real,
    headline_tables,
    real_tables,
    summary_table,
    write_real,
    write_real_page,
)
from bench.runner import Command, Experiment, Runner
from bench.score_models import draw_groups, sample_groups
from bench.survey import SHIFT
from mobatlas import MobatlasError
from mobatlas.config import CityConfig, load_run
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.data.types import Floats
from mobatlas.groups import Groups
from mobatlas.regions.types import Recovery
from mobatlas.report.tables import MINUS
from tests.tiny import OPTIONS, fitted

FAMILY = "autoregressive"
VALUES: dict[str, Any] = OPTIONS[FAMILY] | {
    "training": {"steps": 4, "batch": 32, "warmup": 1},
    "weighted_fit": {"steps": 2, "warmup": 1},
    "calibration": {"pool": 64, "candidates": 4},
}


@pytest.fixture(scope="module")
def survey(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A city whose people have a weekday or a weekend day, and whose districts have a census."""
    folder = tmp_path_factory.mktemp("survey")
    write_city_folder(folder / "city", CityConfig(users=600, pois=40, districts=4, days=15), seed=3)
    path = folder / "city" / "people.parquet"
    people = pq.read_table(path)
    marked = people.append_column("weekday", pa.array(np.arange(people.num_rows) % 5 != 0))
    pq.write_table(marked, path)
    table = people.group_by(["home_district", "age", "gender"]).aggregate([("user_id", "count")])
    names = {"home_district": "region", "user_id_count": "count"}
    pq.write_table(
        table.rename_columns([names.get(n, n) for n in table.column_names]),
        folder / "census.parquet",
    )
    return folder


@pytest.fixture(scope="module")
def dataset(survey: Path) -> TrajectoryDataset:
    prepare(survey / "city", survey / "dataset", preset="small")
    return TrajectoryDataset.open(survey / "dataset")


def real_options(survey: Path) -> RealOptions:
    return RealOptions(
        FAMILY,
        partitions=["demogroups"],
        regions=["home_district"],
        features=[("category",)],
        census=survey / "census.parquet",
        prepared=load_run(preset="small").prepare.model_dump(),
        values=VALUES,
    )


@dataclass(frozen=True)
class Measured:
    """A finished benchmark."""

    experiment: Experiment
    options: RealOptions
    result: dict[str, Any]

    @property
    def out(self) -> Path:
        return self.experiment.out


@pytest.fixture(scope="module")
def measured(survey: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    experiment = Experiment(tmp_path_factory.mktemp("measured") / "out", quiet=True)
    options = real_options(survey)
    return Measured(experiment, options, run(survey / "city", experiment, options))


def test_people_of_another_kind_of_day_do_not_train(survey: Path, measured: Measured) -> None:
    people = pq.read_table(survey / "city" / "people.parquet")
    weekday = dict(zip(people["user_id"].to_pylist(), people["weekday"].to_pylist(), strict=True))
    for name, trains in (("dataset", True), (SHIFT, False)):
        dataset = TrajectoryDataset.open(measured.out / name)
        assert {weekday[user] for user in dataset.people["user_id"].to_pylist()} == {trains}


def test_a_survey_is_measured_under_partitions_and_real_regions(measured: Measured) -> None:
    rows = measured.result["rows"]
    assert {row["anchors"] for row in rows} == {"group", "population", FOUR_VISITS, SHIFT}
    supervised = [
        row for row in rows if row["anchors"] == "group" and row["model"] == "tilt, calibrated"
    ]
    jobs = real_jobs(["demogroups"], ["home_district"], "home_district", [("category",)])
    assert len(supervised) == len(jobs)
    assert sum(row["census"] for row in supervised) == 2
    assert sum(row["shuffled"] for row in supervised) == 1
    strong = {
        row["anchors"]: row["metrics"]["poi"]["floor"] for row in rows if row["model"] == "strong"
    }
    assert strong[SHIFT] != strong["group"] != strong[FOUR_VISITS]
    for words in (
        "--partition demogroups --regions home_district --feature category",
        "--set training.steps=4",
    ):
        assert words in measured.result["command"]


def test_error_bars_are_measured_for_every_kind_of_regions(measured: Measured) -> None:
    bars = measured.result["error_bars"]
    for row in bars:
        assert row["error"] >= 0
        assert (row["cells"] > 0) == (row["coverage"] is not None)
        if row["cells"]:
            assert 0 <= row["coverage"] <= 1
            assert 0.5 < row["coverage_of_labels"] <= 1
    assert sum(row["cells"] > 0 for row in bars) > 2
    distances = [row for row in bars if row["features"] == ["distance"]]
    assert [row["census"] for row in distances] == [False, True]
    assert all(list(row["precautions"]) == list(PRECAUTIONS) for row in distances)


def test_weighted_people_are_measured_before_any_generator(measured: Measured) -> None:
    bars = measured.result["error_bars"]
    exact = next(row for row in bars if row["partition"] == "demogroups")
    assert exact["error"] < 0.2, "regions of one group each identify the groups"
    people = exact["people"]
    assert list(people) == list(STAGES[:2])
    assert people[KNOWN]["poi"] > 0.7
    assert abs(people[KNOWN]["poi"] - people[RECOVERED]["poi"]) < 0.2
    real = [row["people"] for row in bars if "precautions" in row]
    assert all(list(stages) == list(STAGES) for stages in real)
    shuffled = next(row for row in bars if row["shuffled"])["people"]
    assert shuffled[KNOWN]["category"] > 0.7 > 0.4 > shuffled[RECOVERED]["category"]


def test_tables_and_the_page_show_every_kind_of_regions(measured: Measured, tmp_path: Path) -> None:
    result = measured.result
    tables = real_tables(result)
    assert {"gaps-group", "gaps-shift", "jsd-four-visits", "error-bars"} <= set(tables)
    district = "home_district, category"
    census = "home_district, census, category"
    regions = [
        district,
        f"{district}, membership",
        census,
        f"{census}, membership",
        f"shuffled, {district}",
    ]
    kinds = ["strong", "demogroups, poi+category", *regions]
    headline = headline_tables(result)
    assert [row[0] for row in headline["summary"].rows] == kinds
    people = [f"people, {stage}" for stage in STAGES]
    suffixes = ("", ", calibrated", ", membership", ", calibrated, membership")
    models = [f"tilt{suffix}" for suffix in suffixes]
    # Of the district's own regions and of the census.
    assert [row[1] for row in headline["stages"].rows] == 2 * [*people, *models]
    by_group = tables["groups-poi"]
    assert list(by_group.columns[1:]) == list(result["floor_of_groups"])
    assert [row[0] for row in by_group.rows] == kinds
    summary = write_real_page(measured.out, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == [
        f"real-{FAMILY}-partitions.png",
        f"real-{FAMILY}-regions.png",
    ]
    assert f"real-{FAMILY}" in summary
    assert "home\\_district, census, category, membership" in page


def test_only_cells_with_other_inputs_are_computed_again(survey: Path, measured: Measured) -> None:
    def run_again(options: RealOptions) -> dict[str, Any]:
        return run(survey / "city", measured.experiment, options)

    folder = measured.out / FAMILY / "seed-0"
    name = "error-bars-demogroups-poi+category"
    cell = folder / f"{name}.json"
    before = cell.stat().st_mtime_ns
    assert run_again(measured.options) == measured.result
    assert measured.result["draws"] == 3
    assert cell.stat().st_mtime_ns == before
    steps = json.loads((folder / "steps.json").read_text())
    steps[name]["key"] = "of other regions"
    (folder / "steps.json").write_text(json.dumps(steps))
    assert run_again(measured.options) == measured.result
    assert cell.stat().st_mtime_ns != before
    once = run_again(replace(measured.options, draws=1))
    assert once["draws"] == 1
    assert "--draws 1" in once["command"]
    assert once["rows"] != measured.result["rows"]


def test_partitions_and_regions_may_be_measured_apart(survey: Path, tmp_path: Path) -> None:
    experiment = Experiment(tmp_path / "out", quiet=True)
    options = replace(real_options(survey), census=None, draws=1)
    only_partitions = replace(options, regions=["none"], features=RealOptions.features)
    controlled = run(survey / "city", experiment, only_partitions)
    real = run(survey / "city", experiment, replace(options, partitions=["none"]))
    kinds = [{row["partition"] for row in each["rows"]} - {None} for each in (controlled, real)]
    assert kinds == [{"demogroups"}, {"home_district"}]
    assert set(headline_tables(controlled)) == {"summary", "partitions", "groups"}
    assert "precautions" not in real_tables(controlled)
    assert set(headline_tables(real)) == {"summary", "regions", "regions-group-homes", "stages"}
    assert "--partition none --regions home_district" in real["command"]
    write_real(experiment.out, controlled)
    write_real(experiment.out, real)
    write_real_page(experiment.out, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    for kind in ("partitions", "regions"):
        assert f"\n## {FAMILY}-{kind}\n" in page
        assert page.count(f"(page/real-{FAMILY}-{kind}.png)") == 1
        assert (experiment.out / f"real-{FAMILY}-{kind}-tables").is_dir()
    older = {name: value for name, value in real.items() if name != "people"}
    (experiment.out / f"real-{FAMILY}-regions.json").write_text(json.dumps(older))
    with pytest.raises(
        MobatlasError, match=r"real-autoregressive-regions.json: was written by an older mobatlas"
    ):
        write_real_page(experiment.out, tmp_path / "page.md")


def test_predictors_and_the_benchmark_on_real_people_share_models(
    survey: Path, tmp_path: Path
) -> None:
    experiment = Experiment(tmp_path / "out", quiet=True)
    options = PredictionOptions(
        size=400,
        data=survey / "city",
        generator=FAMILY,
        prepared=load_run(preset="small").prepare.model_dump(),
        predictor={"steps": 2, "batch": 16, "hidden": 8, "embedding": 4},
        values=VALUES,
    )
    result = prediction.run(experiment, options)
    labels = ["real", "baseline", "strong", "tilt, calibrated"]
    assert [row["material"] for row in result["rows"]] == labels
    assert all(0 <= row["average"]["accuracy"] <= 1 for row in result["rows"])
    smaller = prediction.run(experiment, replace(options, size=320))
    assert max(smaller["sizes"].values()) < max(result["sizes"].values())
    for words in (
        "rq3 --profile quick --size 400 --data city --generator autoregressive --set ",
        "--set training.steps=4 ",
    ):
        assert words in result["command"]
    write_question(experiment.out, result)
    files = {path.name for path in experiment.out.iterdir()}
    assert {f"rq3-real-{FAMILY}.json", f"rq3-real-{FAMILY}-tables"} <= files
    assert all(row["spread"]["accuracy"] is None for row in result["rows"]), "one seed has none"
    models = experiment.out / FAMILY / "seed-0"
    before = {path: path.stat().st_mtime_ns for path in models.glob("*/weights.safetensors")}
    assert len(before) == 3
    fullrank = replace(real_options(survey), partitions=["fullrank"], census=None)
    run(survey / "city", experiment, fullrank)
    write_real_page(experiment.out, tmp_path / "page.md")
    assert f"## {FAMILY}: next-POI prediction" in (tmp_path / "page.md").read_text()
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_people_of_a_group_are_at_the_floor_and_all_people_at_the_baseline(
    dataset: TrajectoryDataset,
) -> None:
    weighted = WeightedPeople.of(dataset)
    people = np.unique(dataset.person[dataset.split("train")])
    own = (dataset.person_groups()[people][:, None] == np.arange(8)).astype(float)
    assert weighted.gap_closed(own)["poi"] == pytest.approx(1.0)
    assert weighted.gap_closed(np.ones_like(own))["poi"] == pytest.approx(0.0)
    half = weighted.gap_closed(own + own.mean(0))["poi"]
    assert half is not None
    assert 0.1 < half < 0.9
    # Four times as many test people of the same behaviour: half the standard error of the gap.
    many = replace(
        weighted,
        real={
            name: [sparse.vstack([each] * 4) for each in real]
            for name, real in weighted.real.items()
        },
        sizes=4 * weighted.sizes,
    )
    assert 0.35 < many._gap_error["category"] / weighted._gap_error["category"] < 0.75


def test_the_summary_has_a_row_for_each_kind_of_regions_and_never_mixes_models() -> None:
    def row(
        closed: float, anchors: str = "population", model: str = "tilt, calibrated", **more: Any
    ) -> dict[str, Any]:
        names = ("poi", "category", "transitions", "travel_distance", "spatial")
        metrics = {
            name: {"baseline": 1.0, "floor": 0.5, "spread": 0.05, "gap_closed_floor": closed}
            for name in names
        }
        kind = {
            "partition": "home",
            "features": ["category"],
            "census": False,
            "shuffled": False,
            "membership": False,
        }
        return {**kind, "anchors": anchors, "model": model, "metrics": metrics, **more}

    strong = row(0.9, model="strong", partition=None, features=None)
    others = [row(0.1, "group"), row(0.2, model="tilt"), row(-0.3), row(0.4, features=["poi"])]
    table = summary_table(
        {"generator": FAMILY, "seeds": [0, 1], "rows": [strong, *others, row(0.5, membership=True)]}
    )
    gaps = {"strong": "90%", "home, category": f"{MINUS}30%", "home, category, membership": "50%"}
    assert table.rows == tuple((name, *[f"{closed} ± 10%"] * 5) for name, closed in gaps.items())


def test_figures_show_no_share_of_an_unclear_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one seed, where the spread between seeds is zero and every gap would look clear."""
    drawn: list[Bars] = []
    monkeypatch.setattr(
        report, "forest_figure", lambda path, bars, lines, measure: drawn.append(bars)
    )
    unclear = {"baseline": 0.065, "floor": 0.0645, "jsd": 0.0873, "spread": 0.0}
    clear = {"baseline": 0.4, "floor": 0.2, "jsd": 0.3, "spread": 0.0}
    names = ("poi", "category", "transitions", "travel_distance", "spatial")
    metrics = dict.fromkeys(names, unclear | {"gap_closed_floor": None}) | {
        "poi": clear | {"gap_closed_floor": 0.5}
    }
    row = {
        "partition": "messy",
        "features": ["poi"],
        "census": False,
        "shuffled": False,
        "membership": False,
        "model": "tilt",
        "metrics": metrics,
    }
    rows = [row | {"anchors": anchors} for anchors in ("group", "population")]
    draw_real(tmp_path, "real", {"rows": rows, "seeds": [0], "error_bars": []})
    shares = {
        share for bars in drawn for metric in bars.values() for kind in metric.values()
        for share, _ in kind.values()
    }  # fmt: skip
    assert sorted(shares) == [pytest.approx(0.5)]


def test_known_residence_is_the_share_of_labelled_neighbours() -> None:
    groups = Groups.of({"sex": ("M", "F")})
    # Region b is empty; one person has no label, one no region.
    region = np.array([0, 0, 0, 2, 2, -1])
    group = np.array([0, 1, 1, 0, -1, 1])
    shares = known_residence(("a", "b", "c"), region, group, groups)
    all_people = [2 / 4, 2 / 4]  # with both
    neighbours = [[1 / 3, 2 / 3]] * 3 + [[1.0, 0.0], all_people, all_people]
    assert shares == pytest.approx(np.array(neighbours))


def test_people_are_drawn_as_often_as_their_weights_ask() -> None:
    rng = np.random.default_rng(0)
    weights = np.array([0.0, 1.0, 2.0, 8.0, 0.0, 1.0, 0.5, 1e-320])
    expected = 3 * weights / weights.sum()
    counts = np.stack(
        [np.bincount(draw_rows(weights, 3, rng), minlength=len(weights)) for _ in range(20_000)]
    )
    assert (counts.sum(1) == 3).all()
    np.testing.assert_allclose(counts.mean(0), expected, atol=0.02)
    assert (np.abs(counts - expected) < 1).all(), "at most one more than the whole part"
    assert draw_rows(np.array([1.0, 0.0, 1.0]), 4, rng).tolist() == [0, 0, 2, 2]
    assert np.bincount(draw_rows(np.array([1_000.0, 1, 1]), 30, rng), minlength=3)[0] >= 29


def test_draws_differ_and_the_first_is_that_of_a_single_draw(
    dataset: TrajectoryDataset,
) -> None:
    model = fitted(FAMILY, dataset)
    for anchors in ("group", "population"):
        one, two = draw_groups(dataset, {"m": model}, 2, anchors=anchors)
        alone = sample_groups(dataset, {"m": model}, anchors=anchors)
        for name, samples in alone["m"].items():
            assert np.array_equal(one["m"][name].tokens, samples.tokens)
            assert len(two["m"][name]) == len(samples)
        assert any(
            not np.array_equal(one["m"][name].tokens, two["m"][name].tokens) for name in alone["m"]
        )
    with pytest.raises(MobatlasError, match="--draws 0"):
        draw_groups(dataset, {"m": model}, 0)


def test_wrong_options_are_refused_before_anything_is_trained(survey: Path, tmp_path: Path) -> None:
    city = survey / "city"
    experiment = Experiment(tmp_path / "out")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"shift": "week"}, "--shift week: .*no such column"),
        ({"shift": "gender"}, "--shift gender: this column of .* must contain only true or false"),
        ({"partitions": ["mesy"]}, "--partition mesy does not exist.*messy"),
        (
            {"partitions": ["none", "messy"]},
            "--partition none: leave out either none or the other names",
        ),
        (
            {"regions": ["home_district", "none"]},
            "--regions none: leave out either none or the other names",
        ),
        ({"partitions": ["none"], "regions": ["none"]}, "nothing is left to measure"),
        (
            {"regions": ["none"], "census": survey / "census.parquet"},
            "--census: has no effect with --regions none",
        ),
        (
            {"regions": ["none"], "features": [("category",)]},
            "--feature: has no effect with --regions none",
        ),
        ({"features": [("categry",)]}, "categry.*does not exist.*category"),
    ]
    for options, sentence in wrong:
        with pytest.raises(MobatlasError, match=sentence):
            run(city, experiment, RealOptions(**options))
        assert not (tmp_path / "out").exists()
    new = Experiment(tmp_path / "new")
    with pytest.raises(MobatlasError, match=r"autoregresive.*does not exist.*autoregressive"):
        prediction.run(new, PredictionOptions(data=city, generator="autoregresive"))
    with pytest.raises(MobatlasError, match=r"--generator autoregressive: works only with --data"):
        prediction.run(new, PredictionOptions(generator=FAMILY))
    assert not (tmp_path / "new").exists()
    with pytest.raises(MobatlasError, match=r"people.parquet"):
        run(survey, experiment, RealOptions())
    (tmp_path / "unlabelled").mkdir()
    people = pq.read_table(city / "people.parquet").drop_columns(["age", "gender"])
    pq.write_table(people, tmp_path / "unlabelled" / "people.parquet")
    with pytest.raises(MobatlasError, match=r"people.parquet: has no attribute of people"):
        run(tmp_path / "unlabelled", experiment, RealOptions())
    assert not (tmp_path / "out").exists()


def test_other_days_use_the_tokens_of_the_training_people(survey: Path, tmp_path: Path) -> None:
    trajectories = Trajectories(
        np.array([4, 7, 8, 4, 9], dtype=np.int32), np.array([0, 4, 5]), np.zeros((2, 4))
    )
    mapped = map_tokens(trajectories, np.array([0, 1, 2, 3, 4, 5, 6, 6, 6, 7], dtype=np.int32))
    assert mapped.tokens.tolist() == [4, 6, 4, 7]
    assert mapped.offsets.tolist() == [0, 3, 4]


def test_error_bars_use_the_recovery_options_of_the_models(
    dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    job = Job("home_district", "tilt", features=("category",))

    runner = Runner(Experiment(tmp_path), "error bars", Command("real"))

    def measure_error(**values: float) -> float:
        folder = SeedFolder(tmp_path, 0, Setup(values, data=dataset.path))
        [row] = error_bars(runner, [folder], [job])
        assert row["precautions"]["all"] != row["precautions"]["map"]
        return float(row["error"])

    assert measure_error() != measure_error(groups_explain=1e-9)
    # Groups that explain nothing are all like the population.
    assert measure_error(groups_explain=1e-9) == pytest.approx(1, abs=0.01)


def recovery_of(means: Floats, sd: float, features: tuple[str, ...]) -> Recovery:
    """Recovered means of two groups, each with the same standard deviation."""
    count = len(features)
    log_variance = (sd / means.T) ** 2  # (features, groups)
    return Recovery(
        Groups.of({"age": ("a", "b")}),
        features,
        means,
        log_variance[:, :, None] * np.eye(2),
        np.ones((2, count)),
        means.mean(0),
        np.ones(2) / 2,
        {},
        np.ones(count),
        np.ones(count, dtype=bool),
    )


def people_of(means: Floats, n: int, spread: float = 0.0) -> GroupSample:
    return GroupSample(np.full(2, float(n)), means, np.full_like(means, spread))


def test_coverage_is_the_share_of_test_means_inside_the_error_bars() -> None:
    means = np.array([[1.0, 2.0, 0.2], [3.0, 4.0, 0.1]])
    recovery = recovery_of(means, 0.1, ("f:1", "f:2", "f:rare"))
    train = people_of(means, 100)
    assert coverage(recovery, train, people_of(means, 100)) == {
        "coverage": 1.0,
        "coverage_of_labels": 1.0,
        "cells": 4,
    }
    assert relative_error(recovery, means) == 0.0
    moved = means + np.array([[0.1, 0.3, 9.0], [0.0, 0.0, 9.0]])
    shares = coverage(recovery, train, people_of(moved, 100))
    expected = {"coverage": 0.75, "coverage_of_labels": 0.5, "cells": 4}
    assert shares == expected, "rare features do not count"
    assert 0 < (relative_error(recovery, means + 0.1) or 0) < 1
    wide = coverage(recovery, people_of(means, 100, spread=9.0), people_of(moved, 100))
    assert wide["coverage"] == wide["coverage_of_labels"] == 1.0, "chance of so few people"
    moved[1] = np.nan
    shares = coverage(recovery, train, people_of(moved, 100))
    assert shares["cells"] == 2, "the second group has no test people"
    moved[:] = np.nan
    nothing = {"coverage": None, "coverage_of_labels": None, "cells": 0}
    assert coverage(recovery, train, people_of(moved, 0)) == nothing
    assert relative_error(recovery, moved) is None


def test_error_bars_cover_new_people_at_their_level_but_not_their_own_data() -> None:
    """Bayes' rule for normal means: the data lie outside of the bars more often than new people."""
    rng = np.random.default_rng(0)
    count = 4_000
    n = 100
    spread = 9.0
    apart = 0.1
    noise = np.sqrt(spread / n)
    truth = 2 + apart * rng.normal(size=(2, count))
    data, others = (truth + noise * rng.normal(size=truth.shape) for _ in range(2))
    shrinkage = apart**2 / (apart**2 + noise**2)
    features = tuple(f"f:{place}" for place in range(count))
    recovery = recovery_of(2 + shrinkage * (data - 2), np.sqrt(shrinkage) * noise, features)
    train = people_of(data, n, spread)
    shares = coverage(recovery, train, people_of(others, n, spread))
    assert shares["coverage"] == pytest.approx(0.9, abs=0.02)
    assert shares["coverage_of_labels"] == pytest.approx(0.9, abs=0.02)
    exact = people_of(data, n, 0.0)  # as if the data were the truth
    of_truth = coverage(recovery, exact, people_of(truth, n))["coverage"]
    assert of_truth == pytest.approx(0.9, abs=0.02)
    assert coverage(recovery, exact, people_of(data, n))["coverage"] < 0.5
    surer = recovery_of(recovery.means, 0.0, features)
    assert coverage(surer, train, people_of(others, n, spread))["coverage"] < shares["coverage"]


def test_samples_of_people_are_averaged_by_group(dataset: TrajectoryDataset) -> None:
    phi = sparse.csr_array(np.random.default_rng(0).poisson(1.0, (dataset.people.num_rows, 3)))
    sample = GroupSample.of(dataset, phi, "test")
    people = np.intersect1d(dataset.split_people("test"), dataset.person)
    group = dataset.person_groups()
    members = phi.toarray()[people[group[people] == 1]]
    assert sample.n[1] == len(members) > 0
    np.testing.assert_allclose(sample.means[1], members.mean(0))
    np.testing.assert_allclose(sample.variance[1], members.var(0))
