"""The benchmark on real people, on a city in their place: who trains, what stands beside what, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import sparse

from bench import prediction
from bench.cells import Bench, Job, Place
from bench.error_bars import (
    KNOWN,
    PRECAUTIONS,
    RECOVERED,
    STAGES,
    Sample,
    coverage,
    error_bars,
    error_left,
    known_residence,
)
from bench.people import Crowd, _some
from bench.real import FOUR_VISITS, _collapsed, real_jobs, run
from bench.report.questions import write_question
from bench.report.real import (
    headline_tables,
    real_tables,
    summary_table,
    write_real,
    write_real_page,
)
from bench.score_models import draw_groups, sample_groups
from bench.survey import SHIFT
from mobatlas import MobatlasError
from mobatlas.config import CityConfig, load_run
from mobatlas.data.arrays import Floats
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.data.trajectories import Trajectories
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


def test_a_survey_is_measured_under_partitions_and_real_regions(
    survey: Path, tmp_path: Path
) -> None:
    manner: dict[str, Any] = {
        "generator": FAMILY,
        "partitions": ["demogroups"],
        "regions": ["home_district"],
    }
    manner |= {"features": [("category",)], "census": survey / "census.parquet", "quiet": True}
    manner |= {"prepared": load_run(preset="small").prepare.model_dump(), "values": VALUES}
    found = run(survey / "city", tmp_path / "out", 1, **manner)
    people = pq.read_table(survey / "city" / "people.parquet")
    marked = dict(zip(people["user_id"].to_pylist(), people["weekday"].to_pylist(), strict=True))
    for name, weekday in (("dataset", True), (SHIFT, False)):
        dataset = TrajectoryDataset.open(tmp_path / "out" / name)
        assert {marked[user] for user in dataset.people["user_id"].to_pylist()} == {weekday}
    assert {row["anchors"] for row in found["rows"]} == {"group", "population", FOUR_VISITS, SHIFT}
    supervised = [
        row
        for row in found["rows"]
        if row["anchors"] == "group" and row["model"] == "tilt, calibrated"
    ]
    assert len(supervised) == len(
        real_jobs(["demogroups"], ["home_district"], "home_district", [("category",)])
    )
    assert (
        sum(row["census"] for row in supervised) == 2
        and sum(row["shuffled"] for row in supervised) == 1
    )
    metrics = {
        view: row["metrics"]["poi"]
        for row in found["rows"]
        if (view := row["anchors"]) and row["model"] == "strong"
    }
    assert metrics[SHIFT]["floor"] != metrics["group"]["floor"] != metrics[FOUR_VISITS]["floor"]
    for row in found["error_bars"]:
        assert row["error"] >= 0 and (row["cells"] > 0) == (row["coverage"] is not None)
        assert not row["cells"] or (
            0 <= row["coverage"] <= 1 and 0.5 < row["coverage_of_labels"] <= 1
        )
    assert sum(row["cells"] > 0 for row in found["error_bars"]) > 2
    bands = [row for row in found["error_bars"] if row["features"] == ["distance"]]
    assert [row["census"] for row in bands] == [False, True]
    assert all(list(row["precautions"]) == list(PRECAUTIONS) for row in bands)
    asked = (
        "--partition demogroups --regions home_district --feature category",
        "--set training.steps=4",
    )
    assert all(some in found["command"] for some in asked)
    exact = next(row for row in found["error_bars"] if row["partition"] == "demogroups")
    assert exact["error"] < 0.2, "regions of one group each tell nearly everything"
    people = exact["people"]
    assert people[KNOWN]["poi"] > 0.7 and abs(people[KNOWN]["poi"] - people[RECOVERED]["poi"]) < 0.2
    lived = [row["people"] for row in found["error_bars"] if "precautions" in row]
    assert all(list(some) == list(STAGES) for some in lived) and list(people) == list(STAGES[:2])
    unknown = next(row for row in found["error_bars"] if row["shuffled"])["people"]
    assert unknown[KNOWN]["category"] > 0.7 > 0.4 > unknown[RECOVERED]["category"]
    kept = tmp_path / "out" / FAMILY / "seed-0" / "error-bars-demogroups-poi+category.json"
    before = kept.stat().st_mtime_ns
    again = run(survey / "city", tmp_path / "out", 1, **manner)
    assert again == found and found["draws"] == 3
    assert kept.stat().st_mtime_ns == before, "what is judged is not judged again"
    kept.write_text(kept.read_text().replace('"regions": "', '"regions": "0'))
    assert run(survey / "city", tmp_path / "out", 1, **manner) == found
    assert kept.stat().st_mtime_ns != before, "of other regions it is"
    once = run(survey / "city", tmp_path / "out", 1, draws=1, **manner)
    assert once["draws"] == 1 and "--draws 1" in once["command"]
    assert once["rows"] != found["rows"], "cells of another number of draws are scored again"
    tables = real_tables(found)
    assert {"closed-group", "closed-shift", "jsd-four-visits", "error-bars"} <= set(tables)
    district, summary = "home_district, category", headline_tables(found)["summary"]
    census = "home_district, census, category"
    real = [
        district,
        f"{district}, membership",
        census,
        f"{census}, membership",
        f"shuffled, {district}",
    ]
    kinds = ["strong", "demogroups, poi+category", *real]
    assert [row[0] for row in summary.rows] == kinds
    stages = headline_tables(found)["stages"]
    people = [f"people, {stage}" for stage in STAGES]
    models = [
        f"tilt{more}" for more in ("", ", calibrated", ", membership", ", calibrated, membership")
    ]
    assert [row[1] for row in stages.rows] == 2 * [*people, *models], (
        "of the district's own regions and of the census"
    )
    by_group = tables["groups-poi"]
    assert list(by_group.columns[1:]) == list(found["floor_of_groups"]) and len(
        by_group.rows
    ) == 1 + len(supervised)
    assert by_group.rows[0][0] == "strong" and by_group.rows[1][0] == "demogroups, poi+category"
    said = write_real_page(tmp_path / "out", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == [
        f"real-{FAMILY}-partitions.png", f"real-{FAMILY}-regions.png"
    ]  # fmt: skip
    assert f"real-{FAMILY}" in said and "home\\_district, census, category, membership" in page


def test_partitions_and_regions_may_be_measured_apart(survey: Path, tmp_path: Path) -> None:
    manner: dict[str, Any] = {"generator": FAMILY, "draws": 1, "quiet": True}
    manner |= {"prepared": load_run(preset="small").prepare.model_dump(), "values": VALUES}
    dealt = run(
        survey / "city", tmp_path / "out", 1, partitions=["demogroups"], regions=["none"], **manner
    )
    manner |= {"regions": ["home_district"], "features": [("category",)]}
    lived = run(survey / "city", tmp_path / "out", 1, partitions=["none"], **manner)
    kinds = [{row["partition"] for row in found["rows"]} - {None} for found in (dealt, lived)]
    assert kinds == [{"demogroups"}, {"home_district"}]
    assert set(headline_tables(dealt)) == {
        "summary",
        "partitions",
        "groups",
    } and "precautions" not in real_tables(dealt)
    assert set(headline_tables(lived)) == {"summary", "regions", "regions-given", "stages"}
    assert "--partition none --regions home_district" in lived["command"]
    write_real(tmp_path / "out", dealt)
    write_real(tmp_path / "out", lived)
    write_real_page(tmp_path / "out", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    for kind in ("partitions", "regions"):
        assert (
            f"\n## {FAMILY}-{kind}\n" in page
            and page.count(f"(page/real-{FAMILY}-{kind}.png)") == 1
        )
        assert (tmp_path / "out" / f"real-{FAMILY}-{kind}-tables").is_dir()
    older = {name: value for name, value in lived.items() if name != "people"}
    (tmp_path / "out" / f"real-{FAMILY}-regions.json").write_text(json.dumps(older))
    with pytest.raises(
        MobatlasError, match=r"real-autoregressive-regions.json: was written by an older mobatlas"
    ):
        write_real_page(tmp_path / "out", tmp_path / "page.md")


def test_predictors_learn_from_models_of_a_survey_that_are_there_already(
    survey: Path, tmp_path: Path
) -> None:
    manner: dict[str, Any] = {"generator": FAMILY, "values": VALUES, "quiet": True}
    manner |= {"prepared": load_run(preset="small").prepare.model_dump()}
    brief = {"steps": 2, "batch": 16, "hidden": 8, "embedding": 4}
    found = prediction.run(
        survey / "out", data=survey / "city", seeds=1, size=400, predictor=brief, **manner
    )
    assert [row["material"] for row in found["rows"]] == [
        "real",
        "baseline",
        "strong",
        "tilt, calibrated",
    ]
    assert all(0 <= row["average"]["accuracy"] <= 1 for row in found["rows"])
    again = prediction.run(
        survey / "out", data=survey / "city", seeds=1, size=320, predictor=brief, **manner
    )
    assert max(again["sizes"].values()) < max(found["sizes"].values()), (
        "another size is measured anew"
    )
    asked = (
        "rq3 --profile quick --size 400 --data city --generator autoregressive --set ",
        "--set training.steps=4 ",
    )
    assert all(some in found["command"] for some in asked)
    write_question(survey / "out", found)
    assert {f"rq3-real-{FAMILY}.json", f"rq3-real-{FAMILY}-tables"} <= {
        path.name for path in (survey / "out").iterdir()
    }
    assert all(row["spread"]["accuracy"] is None for row in found["rows"]), "one seed has none"
    trained = survey / "out" / FAMILY / "seed-0"
    before = {path: path.stat().st_mtime_ns for path in trained.glob("*/weights.safetensors")}
    options: dict[str, Any] = {
        "partitions": ["fullrank"],
        "regions": ["home_district"],
        "features": [("category",)],
    }
    run(survey / "city", survey / "out", 1, **options, **manner)
    write_real_page(survey / "out", survey / "page.md")
    assert f"## {FAMILY}: next-POI prediction" in (survey / "page.md").read_text()
    assert len(before) == 3 and all(
        path.stat().st_mtime_ns == when for path, when in before.items()
    )


def test_people_of_a_group_are_at_the_floor_and_everybody_at_the_baseline(
    dataset: TrajectoryDataset,
) -> None:
    crowd, people = Crowd.of(dataset), np.unique(dataset.person[dataset.split("train")])
    own = (dataset.person_groups()[people][:, None] == np.arange(8)).astype(float)
    assert crowd.closed(own)["poi"] == pytest.approx(1.0) and crowd.closed(np.ones_like(own))[
        "poi"
    ] == pytest.approx(0.0)
    half = crowd.closed(own + own.mean(0))
    assert half["poi"] is not None and 0.1 < half["poi"] < 0.9


def test_the_summary_has_a_row_for_each_kind_of_regions_and_never_mixes_models() -> None:
    def row(
        closed: float, anchors: str = "population", model: str = "tilt, calibrated", **more: Any
    ) -> dict[str, Any]:
        names = ("poi", "category", "transitions", "travel_distance", "spatial")
        metrics = {
            name: {"baseline": 1.0, "floor": 0.5, "spread": 0.05, "floor_closed": closed}
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
    found = summary_table(
        {"generator": FAMILY, "seeds": [0, 1], "rows": [strong, *others, row(0.5, membership=True)]}
    )
    told = {"strong": "90%", "home, category": f"{MINUS}30%", "home, category, membership": "50%"}
    assert found.rows == tuple((name, *[f"{closed} ± 10%"] * 5) for name, closed in told.items())


def test_known_residence_is_the_share_of_labelled_neighbours() -> None:
    groups = Groups.of({"sex": ("M", "F")})
    # Nobody lives in b; one has no label, one no region.
    region, group = np.array([0, 0, 0, 2, 2, -1]), np.array([0, 1, 1, 0, -1, 1])
    found = known_residence(("a", "b", "c"), region, group, groups)
    everybody = [2 / 4, 2 / 4]  # of those who have both
    neighbours = [[1 / 3, 2 / 3]] * 3 + [[1.0, 0.0], everybody, everybody]
    assert found == pytest.approx(np.array(neighbours))


def test_people_are_drawn_as_often_as_their_weights_say_and_never_twice_by_chance() -> None:
    rng, weights = np.random.default_rng(0), np.array([0.0, 1.0, 2.0, 8.0, 0.0, 1.0, 0.5, 1e-320])
    expected = 3 * weights / weights.sum()
    counts = np.stack(
        [np.bincount(_some(weights, 3, rng), minlength=len(weights)) for _ in range(20_000)]
    )
    assert (counts.sum(1) == 3).all()
    np.testing.assert_allclose(counts.mean(0), expected, atol=0.02)
    assert (np.abs(counts - expected) < 1).all(), "whole times for certain, and at most once more"
    assert _some(np.array([1.0, 0.0, 1.0]), 4, rng).tolist() == [0, 0, 2, 2]
    assert np.bincount(_some(np.array([1_000.0, 1, 1]), 30, rng), minlength=3)[0] >= 29


def test_draws_are_new_samples_of_which_the_first_is_drawn_alone(
    dataset: TrajectoryDataset,
) -> None:
    model = fitted(FAMILY, dataset)
    for anchors in ("group", "population"):
        one, two = draw_groups(dataset, {"m": model}, 2, anchors=anchors)
        alone = sample_groups(dataset, {"m": model}, anchors=anchors)
        for name, made in alone["m"].items():
            assert np.array_equal(one["m"][name].tokens, made.tokens) and len(
                two["m"][name]
            ) == len(made)
        assert any(
            not np.array_equal(one["m"][name].tokens, two["m"][name].tokens) for name in alone["m"]
        )
    with pytest.raises(MobatlasError, match="--draws 0"):
        draw_groups(dataset, {"m": model}, 0)


def test_what_cannot_be_used_is_refused_before_anything_is_trained(
    survey: Path, tmp_path: Path
) -> None:
    city = survey / "city"
    for options, sentence in (
        ({"shift": "week"}, "--shift week: .*no such column.*weekday"),
        ({"shift": "gender"}, "--shift gender: is no column of true and false"),
        ({"partitions": ["mesy"]}, "--partition mesy does not exist.*messy"),
        ({"partitions": ["none", "messy"]}, "--partition none: stands beside others"),
        ({"regions": ["home_district", "none"]}, "--regions none: stands beside others"),
        ({"partitions": ["none"], "regions": ["none"]}, "nothing is left to measure"),
        ({"regions": ["none"], "census": survey / "census.parquet"}, "--census: is about regions"),
        ({"regions": ["none"], "features": [("category",)]}, "--feature: is about regions"),
        ({"features": [("categry",)]}, "categry.*does not exist.*category"),
    ):
        with pytest.raises(MobatlasError, match=sentence):
            run(city, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()
    with pytest.raises(MobatlasError, match=r"autoregresive.*does not exist.*autoregressive"):
        prediction.run(tmp_path / "new", data=city, generator="autoregresive")
    with pytest.raises(MobatlasError, match=r"--generator autoregressive goes with --data"):
        prediction.run(tmp_path / "new", generator=FAMILY)
    assert not (tmp_path / "new").exists()
    with pytest.raises(MobatlasError, match=r"people.parquet"):
        run(survey, tmp_path / "out")
    (tmp_path / "unlabelled").mkdir()
    people = pq.read_table(city / "people.parquet").drop_columns(["age", "gender"])
    pq.write_table(people, tmp_path / "unlabelled" / "people.parquet")
    with pytest.raises(MobatlasError, match=r"people.parquet: has no attribute of people"):
        run(tmp_path / "unlabelled", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_days_are_told_in_the_words_of_the_training_people(
    survey: Path, tmp_path: Path
) -> None:
    trajectories = Trajectories(
        np.array([4, 7, 8, 4, 9], dtype=np.int32), np.array([0, 4, 5]), np.zeros((2, 4))
    )
    found = _collapsed(trajectories, np.array([0, 1, 2, 3, 4, 5, 6, 6, 6, 7], dtype=np.int32))
    assert found.tokens.tolist() == [4, 6, 4, 7] and found.offsets.tolist() == [0, 3, 4]


def test_error_bars_are_those_of_the_belief_that_models_were_given(
    dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    job = Job("home_district", "tilt", features=("category",))

    def left(**values: float) -> float:
        place = Place(tmp_path / "seed-0", 0, Bench("", values, data=dataset.path))
        place.prepared()
        [row] = error_bars([place], [job])
        assert row["precautions"]["all"] != row["precautions"]["map"]
        return float(row["error"])

    assert left() != left(groups_explain=1e-9), "kept ones are of the other belief"
    assert left(groups_explain=1e-9) == pytest.approx(1, abs=0.01)  # groups are everybody


def of_means(means: Floats, sd: float, features: tuple[str, ...]) -> Recovery:
    """What two groups are believed to do, each mean with the same error bar."""
    count = len(features)
    return Recovery(
        Groups.of({"age": ("a", "b")}),
        features,
        means,
        np.repeat((sd**2 * np.eye(2))[None], count, 0),
        np.ones((2, count)),
        means.mean(0),
        np.ones(2) / 2,
        {},
        np.ones(count),
    )


def people_of(means: Floats, n: int, spread: float = 0.0) -> Sample:
    return Sample(np.full(2, float(n)), means, np.full_like(means, spread))


def test_error_bars_are_judged_by_whether_they_hold_what_others_do() -> None:
    means = np.array([[1.0, 2.0, 0.2], [3.0, 4.0, 0.1]])
    recovery, told = of_means(means, 0.1, ("f:1", "f:2", "f:rare")), people_of(means, 100)
    assert coverage(recovery, told, people_of(means, 100)) == {
        "coverage": 1.0,
        "coverage_of_labels": 1.0,
        "cells": 4,
    }
    assert error_left(recovery, means) == 0.0
    moved = means + np.array([[0.1, 0.3, 9.0], [0.0, 0.0, 9.0]])
    found = coverage(recovery, told, people_of(moved, 100))
    assert found == {"coverage": 0.75, "coverage_of_labels": 0.5, "cells": 4}, (
        "what is rare tells nothing"
    )
    assert 0 < (error_left(recovery, means + 0.1) or 0) < 1
    wide = coverage(recovery, people_of(means, 100, spread=9.0), people_of(moved, 100))
    assert wide["coverage"] == wide["coverage_of_labels"] == 1.0, "so few people may stray so far"
    moved[1] = np.nan
    assert coverage(recovery, told, people_of(moved, 100))["cells"] == 2, (
        "nobody of the second group was tested"
    )
    moved[:] = np.nan
    nothing = {"coverage": None, "coverage_of_labels": None, "cells": 0}
    assert (
        coverage(recovery, told, people_of(moved, 0)) == nothing
        and error_left(recovery, moved) is None
    )


def test_error_bars_hold_as_often_as_they_say_though_not_the_data_behind_them() -> None:
    """Bayes' rule for normal means by hand: the data themselves lie outside of the bars far oftener than new people do."""
    rng, count, n, spread, apart = np.random.default_rng(0), 4_000, 100, 9.0, 0.1
    noise = np.sqrt(spread / n)
    truth = 2 + apart * rng.normal(size=(2, count))
    data, others = (truth + noise * rng.normal(size=truth.shape) for _ in range(2))
    kept = apart**2 / (apart**2 + noise**2)
    features = tuple(f"f:{place}" for place in range(count))
    recovery = of_means(2 + kept * (data - 2), np.sqrt(kept) * noise, features)
    told = people_of(data, n, spread)
    found = coverage(recovery, told, people_of(others, n, spread))
    assert found["coverage"] == pytest.approx(0.9, abs=0.02)
    assert found["coverage_of_labels"] == pytest.approx(0.9, abs=0.02)
    exact = people_of(data, n, 0.0)  # as if the data were the truth
    assert coverage(recovery, exact, people_of(truth, n))["coverage"] == pytest.approx(
        0.9, abs=0.02
    )
    assert coverage(recovery, exact, people_of(data, n))["coverage"] < 0.5
    surer = of_means(recovery.means, 0.0, features)
    assert coverage(surer, told, people_of(others, n, spread))["coverage"] < found["coverage"]


def test_people_are_summed_up_by_group(dataset: TrajectoryDataset) -> None:
    phi = sparse.csr_array(np.random.default_rng(0).poisson(1.0, (dataset.people.num_rows, 3)))
    found = Sample.of(dataset, phi, "test")
    people, group = (
        np.intersect1d(dataset.split_people("test"), dataset.person),
        dataset.person_groups(),
    )
    theirs = phi.toarray()[people[group[people] == 1]]
    assert found.n[1] == len(theirs) > 0
    np.testing.assert_allclose(found.means[1], theirs.mean(0))
    np.testing.assert_allclose(found.spread[1], theirs.var(0))
