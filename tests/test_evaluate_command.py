"""`evaluate` scores samples beside floor, baseline and labelled model, or says why it cannot."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from mobatlas import (
    Evaluation,
    MetricSpec,
    MobatlasError,
    Trajectories,
    TrajectoryDataset,
    evaluate,
    prepare,
    read_samples,
)
from mobatlas.cli.commands import app
from mobatlas.evaluation.comparison import (
    EVERYBODY,
    compare_models,
    group_members,
    real_groups,
)
from mobatlas.evaluation.evaluate import ModelScores
from mobatlas.groups import DEFAULT_GROUPS
from mobatlas.report.tables import evaluation_tables, scores_table
from mobatlas.sampling.chunks import SampleRequest
from tests.small_town import NAMES
from tests.tiny import fresh, small_city
from tests.written import write


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_city(tmp_path_factory.mktemp("city"), users=400)


@pytest.fixture(scope="module")
def training(dataset: TrajectoryDataset) -> tuple[Trajectories, list[str]]:
    """Of training people, with the group of each."""
    return people(dataset, "train")


@pytest.fixture(scope="module")
def files(
    dataset: TrajectoryDataset,
    training: tuple[Trajectories, list[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """Training people of everybody, of each group, and of the wrong group."""
    folder = tmp_path_factory.mktemp("files")
    (trajectories, groups) = training
    names = DEFAULT_GROUPS.names
    wrong = [names[(names.index(name) + 1) % len(names)] for name in groups]
    return {
        name: write(folder / f"{name}.parquet", dataset, trajectories, group_labels)
        for name, group_labels in (("everybody", None), ("real", groups), ("wrong", wrong))
    }


@pytest.fixture(scope="module")
def evaluation(dataset: TrajectoryDataset, files: dict[str, Path]) -> Evaluation:
    """The wrong groups beside everybody's samples and those of the right groups."""
    return evaluate(files["wrong"], dataset.path, baseline=files["everybody"], strong=files["real"])


def people(dataset: TrajectoryDataset, split: str) -> tuple[Trajectories, list[str]]:
    rows = dataset.split(split)
    codes = dataset.person_groups()[dataset.person[rows]]
    return Trajectories.of(dataset, rows), [DEFAULT_GROUPS.names[code] for code in codes]


def relabelled(dataset: TrajectoryDataset, copy: Path, keep: Callable[[str, str], bool]) -> Path:
    """A copy of a dataset with the labels of people whose (group, split) `keep` accepts."""
    shutil.copytree(dataset.path, copy)
    labels = pq.read_table(copy / "labels.parquet")
    split = {
        int(row): name for name in ("train", "val", "test") for row in dataset.split_people(name)
    }
    users = dataset.people["user_id"].to_pylist()
    known = {
        user
        for row, (user, code) in enumerate(zip(users, dataset.person_groups(), strict=True))
        if keep(DEFAULT_GROUPS.names[code], split[row])
    }
    pq.write_table(
        labels.filter(pa.array([user in known for user in labels["user_id"].to_pylist()])),
        copy / "labels.parquet",
    )
    return copy


def finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    return (
        all(map(finite, value))
        if isinstance(value, list)
        else not isinstance(value, float) or math.isfinite(value)
    )


def check_near_floor(standing: ModelScores, label: str = "ours") -> None:
    """Samples of the right people differ from the floor by chance only."""
    for metric in NAMES:
        ours, floor = (standing.intervals[each][metric] for each in (label, "floor"))
        error = math.hypot(ours.spread, floor.spread)
        # Trips and flows of few people have nothing in common: both are at most 1.
        assert abs(ours.estimate - floor.estimate) < 4 * error + 0.01, metric


def test_training_people_of_a_group_are_near_the_floor(
    dataset: TrajectoryDataset, evaluation: Evaluation
) -> None:
    assert evaluation.groups is not None
    check_near_floor(evaluation.groups, "strong")
    check_near_floor(evaluation.everybody, "strong")
    members = group_members(dataset, "test")
    assert evaluation.groups.sizes == {name: len(rows) for name, rows in members.items()}


def test_the_floor_compares_equally_many_training_people(
    dataset: TrajectoryDataset, evaluation: Evaluation
) -> None:
    assert evaluation.groups is not None
    training = real_groups(dataset, "train")
    floor = compare_models(
        MetricSpec.of(dataset),
        real_groups(dataset, "test"),
        {"floor": training},
        reference=training,
    )
    there, here = evaluation.groups.scores["floor"], floor.scores["floor"]
    assert (there.groups, there.sizes, there.people) == (here.groups, here.sizes, here.people)
    assert there.excess == pytest.approx(here.excess, abs=1e-6)
    assert there.standard_error == pytest.approx(here.standard_error, abs=1e-6)
    test = [dataset.person[rows] for rows in group_members(dataset, "test").values()]
    assert list(floor.scores["floor"].people.values()) == [len(set(each)) for each in test]


def test_other_training_people_are_near_the_floor(
    dataset: TrajectoryDataset, training: tuple[Trajectories, list[str]], tmp_path: Path
) -> None:
    trajectories, groups = training
    order = np.random.default_rng(0).permutation(len(trajectories))[: len(trajectories) // 2]
    half = write(
        tmp_path / "half.parquet", dataset, trajectories.take(order), [groups[row] for row in order]
    )
    standing = evaluate(half, dataset.path).groups
    assert standing is not None and set(standing.scores) == {"ours", "floor"}
    check_near_floor(standing)
    assert standing.gap_closed_floor == standing.gap_closed_strong == {}


def test_the_baseline_closes_no_gap_and_strong_all_of_it(
    dataset: TrajectoryDataset, files: dict[str, Path]
) -> None:
    options: dict[str, Any] = {"baseline": files["everybody"], "strong": files["real"]}
    for name, share in (("everybody", 0.0), ("real", 1.0)):
        standing = evaluate(files[name], dataset.path, **options).groups
        assert standing is not None
        # Training people without names are not exactly the floor, which has as many people.
        for closed, tolerance in (
            (standing.gap_closed_strong, 1e-6),
            (standing.gap_closed_floor, 0.4),
        ):
            shares = [one.share for one in closed.values() if one.share is not None]
            assert shares == pytest.approx([share] * len(shares), abs=tolerance)
            assert closed["poi"].share == pytest.approx(share, abs=min(tolerance, 0.2))
            assert all((one.share is None) != (one.reason is None) for one in closed.values())


def test_a_gap_within_three_standard_errors_has_no_share(evaluation: Evaluation) -> None:
    assert evaluation.groups is not None
    for metric, one in evaluation.groups.gap_closed_strong.items():
        baseline, strong = (
            evaluation.groups.intervals[label][metric] for label in ("baseline", "strong")
        )
        gap = baseline.estimate - strong.estimate
        # Both models are compared with the same people, so errors are mostly shared.
        apart = math.hypot(baseline.spread, strong.spread)
        if gap > 4 * apart:
            assert one.share is not None, metric
        if one.share is not None:
            assert gap > 0 and one.reason is None
        elif gap <= 0:
            assert one.reason == "the baseline is no worse than strong"
        else:
            assert one.reason is not None
            found = re.fullmatch(
                r"the gap from baseline to strong is (\S+), less than 3 standard errors of (\S+)",
                one.reason,
            )
            assert found is not None
            assert float(found[1]) == pytest.approx(gap, abs=1e-4)
            assert float(found[1]) <= 3 * float(found[2]) + 1e-3
    assert {one.reason is None for one in evaluation.groups.gap_closed_strong.values()} == {
        True,
        False,
    }
    assert all(
        one.low <= one.estimate <= one.high for one in evaluation.groups.intervals["ours"].values()
    )


def test_calibrated_samples_of_strong_are_the_ceiling_beside_strong(
    dataset: TrajectoryDataset, files: dict[str, Path]
) -> None:
    calibrated = evaluate(
        files["wrong"],
        dataset.path,
        baseline=files["everybody"],
        strong=files["everybody"],
        strong_calibrated=files["real"],
    )
    label = "strong, calibrated"
    assert calibrated.files[label]["path"] == str(files["real"])
    assert calibrated.groups is not None
    for standing in (calibrated.groups, calibrated.everybody):
        assert list(standing.scores) == ["baseline", "ours", "strong", label, "floor"]
        assert set(standing.intervals) == set(standing.scores)
        check_near_floor(standing, label)
    assert calibrated.everybody.scores[label].diversity is not None
    # The paper's gap is that of strong as it is.
    assert {one.share for one in calibrated.groups.gap_closed_strong.values()} == {None}
    average, everybody, diversity = evaluation_tables(calibrated)
    for table in (average, everybody):
        assert table.columns.index("ceiling") == table.columns.index("strong") + 1
        assert "Strong, calibrated to labelled means, is a reference (ceiling)." in table.note
    page = io.StringIO()
    Console(file=page, width=80).print(average.as_rich())
    head = page.getvalue().partition("\u2500")[0]
    assert "…" not in head, "no header of the terminal is cut"
    assert "ceiling" in head and "to floor" in head
    assert label in [row[0] for row in diversity.rows]
    plain = evaluate(files["wrong"], dataset.path, strong=files["everybody"])
    assert "ceiling" not in evaluation_tables(plain)[0].columns
    assert "ceiling" not in evaluation_tables(plain)[0].note


def test_tables_show_the_excess_and_both_gaps(evaluation: Evaluation) -> None:
    assert evaluation.groups is not None
    table = scores_table(evaluation.as_dict()["groups"], "")
    ours = ("ours", "low", "high", "excess")
    gaps = ("gap closed to floor", "gap closed to strong")
    assert table.columns == ("metric", "baseline", *ours, "strong", "floor", *gaps)
    row = dict(
        zip(
            table.columns, next(row for row in table.rows if row[0] == "POI frequency"), strict=True
        )
    )
    scores = evaluation.groups.scores
    assert row["excess"] == scores["ours"].excess["poi"]
    assert row["baseline"] == scores["baseline"].average["poi"]
    assert row[gaps[0]] == evaluation.groups.gap_closed_floor["poi"].share
    assert row[gaps[1]] == evaluation.groups.gap_closed_strong["poi"].share
    assert "A dash there means that the gap is below three standard errors." in table.note


def test_samples_of_the_wrong_group_are_worse_than_the_baseline(evaluation: Evaluation) -> None:
    assert evaluation.groups is not None
    share = evaluation.groups.gap_closed_floor["poi"].share
    assert share is not None and share < 0
    assert (
        evaluation.groups.scores["ours"].average["poi"]
        > evaluation.groups.scores["baseline"].average["poi"]
    )


def test_samples_without_groups_are_compared_with_every_group(
    dataset: TrajectoryDataset, files: dict[str, Path]
) -> None:
    evaluation = evaluate(files["everybody"], dataset.path)
    assert (
        evaluation.groups is not None
        and evaluation.left_out == {}
        and not evaluation.files["ours"]["by_group"]
    )
    assert list(evaluation.groups.sizes) == list(DEFAULT_GROUPS.names)
    check_near_floor(evaluation.everybody)  # they are the training people


def test_groups_are_mixed_in_equal_proportions_on_all_sides(
    dataset: TrajectoryDataset,
    training: tuple[Trajectories, list[str]],
    files: dict[str, Path],
    tmp_path: Path,
) -> None:
    trajectories, groups = training
    rows = np.array(
        [row for row, name in enumerate(groups) for _ in range(9 if name == "<30, M" else 1)]
    )
    most = write(
        tmp_path / "most.parquet", dataset, trajectories.take(rows), [groups[row] for row in rows]
    )
    evaluation = evaluate(most, dataset.path, baseline=files["everybody"])
    assert evaluation.groups is not None
    assert evaluation.everybody.sizes == {EVERYBODY: sum(evaluation.groups.sizes.values())}
    ours, floor = (evaluation.everybody.intervals[label]["poi"] for label in ("ours", "floor"))
    assert abs(ours.estimate - floor.estimate) < 3 * math.hypot(ours.spread, floor.spread)


def test_all_sides_are_as_small_as_the_smallest(
    dataset: TrajectoryDataset,
    training: tuple[Trajectories, list[str]],
    files: dict[str, Path],
    tmp_path: Path,
) -> None:
    few = write(tmp_path / "few.parquet", dataset, training[0].take(np.arange(6)))
    standing = evaluate(files["real"], dataset.path, baseline=few).groups
    assert standing is not None
    assert {tuple(scores.sizes.values()) for scores in standing.scores.values()} == {(6,) * 8}


def test_diversity_is_compared_with_that_of_real_people(evaluation: Evaluation) -> None:
    ours = evaluation.everybody.scores["ours"].diversity
    assert ours is not None and ours["copies"] == 1.0 > ours["held_out"]["copies"]
    assert evaluation.everybody.scores["floor"].diversity is None


def test_without_labels_all_people_are_compared_together(
    dataset: TrajectoryDataset, files: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(
        dataset.path, tmp_path / "dataset", ignore=shutil.ignore_patterns("labels.parquet")
    )
    evaluation = evaluate(files["wrong"], tmp_path / "dataset", baseline=files["everybody"])
    assert evaluation.groups is None and evaluation.left_out == {}
    assert [warning.count("has no labels") for warning in evaluation.warnings] == [1]
    check_near_floor(evaluation.everybody)
    assert evaluation.everybody.scores["ours"].sizes == {EVERYBODY: len(dataset.split("test"))}


def test_groups_without_people_or_samples_are_named_and_not_averaged(
    dataset: TrajectoryDataset, training: tuple[Trajectories, list[str]], tmp_path: Path
) -> None:
    trajectories, groups = training
    group_labels = [None if name == "40-50, F" else name for name in groups]
    ours = write(tmp_path / "ours.parquet", dataset, trajectories, group_labels)
    hidden = {("<30, M", "test"), ("<30, F", "train")}
    copy = relabelled(
        dataset, tmp_path / "dataset", lambda group, split: (group, split) not in hidden
    )
    evaluation = evaluate(ours, copy)
    assert evaluation.groups is not None
    assert evaluation.left_out == {
        "<30, M": "has no people in split 'test'",
        "<30, F": "has no people in split 'train', which the floor needs",
        "40-50, F": f"has no trajectory in {ours}",
    }
    scores = evaluation.groups.scores["ours"]
    assert len(scores.groups) == 5 and not set(scores.groups) & set(evaluation.left_out)
    assert scores.average["poi"] == pytest.approx(
        np.mean([row["poi"] for row in scores.groups.values()])
    )
    assert any(
        f"{group_labels.count(None):,} of {len(group_labels):,} trajectories have no group" in each
        for each in evaluation.warnings
    )


@pytest.mark.parametrize("which", ["one", "identical"])
def test_few_and_identical_trajectories_give_finite_numbers(
    dataset: TrajectoryDataset, training: tuple[Trajectories, list[str]], tmp_path: Path, which: str
) -> None:
    trajectories, groups = training
    rows = np.zeros(1 if which == "one" else 400, dtype=np.int64)
    group_labels = [groups[0]] if which == "one" else list(DEFAULT_GROUPS.names) * 50
    ours = write(tmp_path / "ours.parquet", dataset, trajectories.take(rows), group_labels)
    everybody = write(tmp_path / "everybody.parquet", dataset, trajectories.take(rows))
    evaluation = evaluate(ours, dataset.path, baseline=everybody, strong=ours)
    assert finite(json.loads(json.dumps(evaluation.as_dict(), allow_nan=False)))
    assert evaluation.groups is not None and len(evaluation.groups.sizes) == (
        1 if which == "one" else 8
    )


def test_a_hundred_thousand_trajectories_take_seconds(
    dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    real, groups = people(dataset, "test")
    rows = np.arange(100_000) % len(real)
    ours = write(tmp_path / "many.parquet", dataset, real.take(rows), [groups[row] for row in rows])
    start = time.process_time()  # of this process alone: the machine may have other things to do
    evaluation = evaluate(ours, dataset.path)
    assert time.process_time() - start < 10
    assert evaluation.files["ours"]["trajectories"] == 100_000


def test_a_file_of_generate_is_read_as_it_was_written(
    dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    from mobatlas.sampling.generate import generate
    from tests.worlds import FAMILY, keep

    groups = dataset.groups
    assert groups is not None
    model = keep(tmp_path / "model", fresh(FAMILY, dataset).with_groups(groups, 1), dataset)
    generate(model, tmp_path / "made.parquet", 40, SampleRequest(group="30-40, F"))
    read = read_samples(tmp_path / "made.parquet", dataset.vocabulary, groups)
    table = pq.read_table(tmp_path / "made.parquet")
    poi_ids = [dataset.vocabulary.poi_ids[token] for token in read.trajectories.tokens]
    assert poi_ids == table["poi_id"].to_pylist()
    assert read.trajectories.owner.tolist() == table["trajectory"].to_pylist()
    assert read.groups is not None
    names = [groups.names[code] for code in read.groups[read.trajectories.owner]]
    assert names == table["group"].to_pylist()
    assert read.warnings == ()
    evaluation = evaluate(tmp_path / "made.parquet", dataset.path)
    assert (
        evaluation.groups is not None
        and list(evaluation.groups.sizes) == ["30-40, F"]
        and len(evaluation.left_out) == 7
    )


def test_the_command_prints_models_side_by_side(
    dataset: TrajectoryDataset, files: dict[str, Path], evaluation: Evaluation
) -> None:
    command = [
        "evaluate",
        str(files["wrong"]),
        "--dataset",
        str(dataset.path),
        "--baseline",
        str(files["everybody"]),
    ]
    command += ["--strong", str(files["real"])]
    printed = CliRunner().invoke(app, command, catch_exceptions=False)
    assert printed.exit_code == 0
    words = " ".join(printed.output.split())
    assert re.search(r"baseline +ours +± +excess +strong +floor", printed.output)
    assert "Gap closed is the share of the gap in excess from the baseline to the floor." in words
    plain = json.loads(json.dumps(evaluation.as_dict(), allow_nan=False))
    as_json = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    assert json.loads(as_json.stdout) == plain


def changed(files: dict[str, Path], out: Path, **columns: Any) -> Path:
    """The training people of each group, with other columns; None drops one."""
    table = pq.read_table(files["real"])
    for name, value in columns.items():
        place = table.schema.get_field_index(name)
        if value is None:
            table = table.remove_column(place)
        else:
            table = table.set_column(
                place, name, pa.array(value if isinstance(value, list) else [value] * len(table))
            )
    pq.write_table(table, out)
    return out


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"poi_id": None}, "column 'poi_id' is missing (columns: "),
        ({"trajectory": None}, "column 'trajectory' is missing"),
        ({"trajectory": pa.scalar(None, pa.int64())}, "column 'trajectory' is empty in"),
        ({"trajectory": [[1]]}, "column 'trajectory' cannot be read"),
        ({"position": "first"}, "column 'position' cannot be read"),
        ({"position": 0}, "has one position twice; give trajectories new numbers"),
        (
            {"group": "30-40 F"},
            "column 'group': group '30-40 F' does not exist; did you mean '30-40, F'?",
        ),
        (
            {"trajectory": 7, "position": None},
            "trajectory 7 has two groups; give trajectories new numbers",
        ),
        ({"home_lat": 95.0}, "column 'home_lat' is 95, outside -90..90; give degrees"),
        ({"work_lon": "west"}, "column 'work_lon' cannot be read"),
    ],
    ids=str,
)
def test_a_column_that_cannot_be_used_is_named(
    dataset: TrajectoryDataset,
    files: dict[str, Path],
    tmp_path: Path,
    columns: dict[str, Any],
    sentence: str,
) -> None:
    if isinstance(columns.get("trajectory"), list):
        columns = {"trajectory": columns["trajectory"] * pq.read_metadata(files["real"]).num_rows}
    bad = changed(files, tmp_path / "bad.parquet", **columns)
    with pytest.raises(MobatlasError) as caught:
        evaluate(bad, dataset.path)
    assert (
        str(bad) in str(caught.value)
        and sentence in str(caught.value)
        and "\n" not in str(caught.value)
    )


def test_a_file_that_is_not_readable_parquet_is_refused(
    dataset: TrajectoryDataset, files: dict[str, Path], tmp_path: Path
) -> None:
    empty, text, cut = (
        tmp_path / name for name in ("empty.parquet", "text.parquet", "cut.parquet")
    )
    pq.write_table(pq.read_table(files["real"]).slice(0, 0), empty)
    text.write_text("trajectory,poi_id\n0,park\n")
    cut.write_bytes(files["real"].read_bytes()[:-100])
    for path, sentence in (
        (empty, "the file has no rows; give a file with at least one trajectory"),
        (text, "this is not a readable Parquet file"),
        (cut, "this is not a readable Parquet file"),
        (tmp_path, "this is a folder; give one Parquet file"),
        (tmp_path / "nowhere", "no such file"),
    ):
        for samples, baseline in ((path, None), (files["real"], path)):
            with pytest.raises(MobatlasError) as caught:
                evaluate(samples, dataset.path, baseline=baseline)
            assert str(caught.value).startswith(f"{path}: {sentence}")


def test_a_split_that_cannot_be_compared_with_is_refused(
    dataset: TrajectoryDataset, files: dict[str, Path], tmp_path: Path
) -> None:
    for split, sentence in (
        ("tests", "--split tests does not exist"),
        ("train", "--split train: models are trained on these people"),
    ):
        with pytest.raises(MobatlasError, match=sentence):
            evaluate(files["real"], dataset.path, split=split)
    unlabelled = relabelled(dataset, tmp_path / "nobody", lambda group, split: split != "test")
    with pytest.raises(
        MobatlasError,
        match=r"no group can be compared: '<30, M' has no people in split 'test'; give",
    ):
        evaluate(files["real"], unlabelled)
    shares = {"split": {"val": 0.0, "test": 0.2}}
    prepare(dataset.path.parent / "city", tmp_path / "two parts", preset="small", values=shares)
    with pytest.raises(
        MobatlasError, match=r"--split val: .*two parts has no people in this split"
    ):
        evaluate(files["real"], tmp_path / "two parts", split="val")


def test_bad_input_is_one_sentence_and_exit_code_2(
    dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    (tmp_path / "text.parquet").write_text("no table")
    command = [
        sys.executable,
        "-m",
        "mobatlas",
        "evaluate",
        "text.parquet",
        "--dataset",
        str(dataset.path),
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith("mobatlas: text.parquet: this is not a readable Parquet file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.parquet"]
