"""An audit passes samples of other people, fails copies, and measures the share of copies."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from mobatlas import (
    Audit,
    CityConfig,
    MobatlasError,
    Trajectories,
    TrajectoryDataset,
    audit,
    prepare,
    write_city_folder,
)
from mobatlas.cli.commands import app
from mobatlas.config import Coarsening
from mobatlas.data import types as data_types
from mobatlas.data.samples import read_samples
from mobatlas.data.types import HOME
from mobatlas.evaluation.comparison import Interval
from mobatlas.evaluation.privacy.audit import (
    AMBER,
    ANCHORS,
    CHECKS,
    GREEN,
    GROUPS,
    MEMBERSHIP,
    MEMORISATION,
    RED,
    UNDECIDED,
    UNTESTED,
    Check,
)
from mobatlas.evaluation.privacy.measures import (
    area,
    attacks,
    distances,
    hit_rate,
    infer,
    log_likelihood,
    number_grams,
    shingles,
)
from mobatlas.report.console import audit_table
from mobatlas.sampling.chunks import SampleRequest, coarsen_anchors
from mobatlas.sampling.generate import generate
from tests.small_town import walks
from tests.tiny import fitted
from tests.worlds import keep, remade
from tests.written import write

FAR = Coarsening("disc", 5.0)
SHARES = {"train": 0.6, "val": 0.1, "test": 0.3}
SMALL: dict[str, Any] = {
    "length": 16,
    "network": {"depth": 2, "width": 48, "heads": 2, "embedding": 8},
    "training": {"batch": 32, "learning_rate": 4e-3, "warmup": 10},
}
FEW = {"train": 0.06, "val": 0.04, "test": 0.9}


class Town:
    """A dataset of most people of a city; the others are the samples of a perfect model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_city_folder(
            folder / "city", CityConfig(users=1_500, pois=80, districts=4, days=15), seed=3
        )
        users = pq.read_table(folder / "city" / "people.parquet")["user_id"]
        for name, some in (("known", users[:1_000]), ("fresh", users[1_000:])):
            (folder / name).mkdir()
            for file in ("visits.parquet", "people.parquet", "pois.parquet"):
                table = pq.read_table(folder / "city" / file)
                chosen_rows = (
                    table.filter(pc.is_in(table["user_id"], some))
                    if "user_id" in table.column_names
                    else table
                )
                pq.write_table(chosen_rows, folder / name / file)
        self.dataset = self.prepared("dataset", SHARES)
        prepare(folder / "fresh", folder / "others", preset="small")
        others = TrajectoryDataset.open(folder / "others")
        self.fresh = write(folder / "fresh.parquet", others, Trajectories.of(others))

    def prepared(self, name: str, shares: dict[str, float]) -> TrajectoryDataset:
        """The same people, split in another way."""
        prepare(self.folder / "known", self.folder / name, preset="small", values={"split": shares})
        return TrajectoryDataset.open(self.folder / name)

    def copies(self, name: str, noise: float = 0.0, exact_homes: bool = False) -> Path:
        """Training trajectories of which a share of visits was replaced by others'."""
        rng = np.random.default_rng(0)
        rows = self.dataset.split("train")
        real = Trajectories.of(self.dataset, rows)
        tokens = np.where(
            rng.random(len(real.tokens)) < noise, rng.permutation(real.tokens), real.tokens
        )
        homes = real.anchors if exact_homes else coarsen_anchors(real.anchors, FAR, real.anchors)
        copies_with_noise = Trajectories(tokens, real.offsets, homes)
        return write(self.folder / f"{name}.parquet", self.dataset, copies_with_noise)


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Town:
    return Town(tmp_path_factory.mktemp("town"))


@pytest.fixture(scope="module")
def passed(town: Town) -> Audit:
    return audit(town.fresh, town.dataset.path)


def measured(result: Audit, name: str) -> Any:
    (check,) = (check for check in result.checks if check.name == name)
    return check.measured


def test_samples_of_people_outside_the_dataset_pass(passed: Audit) -> None:
    assert passed.verdict == GREEN and passed.advice == ()
    of_samples = [name for name in CHECKS if not name.startswith(("model", "group"))]
    assert [check.name for check in passed.checks] == of_samples
    assert passed.answer.startswith("Are these samples safe to share? Yes, with a reservation: ")
    assert measured(passed, "pairs_of_one").estimate == 0


def test_noisy_copies_of_training_people_fail_though_their_homes_are_moved(town: Town) -> None:
    result = audit(town.copies("noisy", noise=0.1), town.dataset.path)
    assert result.subjects == {MEMORISATION: RED, MEMBERSHIP: RED, ANCHORS: GREEN}
    assert {check.name for check in result.checks if check.verdict == RED} >= {
        "grams_of_one",
        "closest",
        "membership_auc",
    }
    assert [line.partition(":")[0] for line in result.advice] == [MEMORISATION, MEMBERSHIP]
    assert result.answer.startswith(
        "Are these samples safe to share? Not yet: they repeat trajectories of training people, "
        "reveal who is in the dataset, because '"
    )


def test_samples_with_real_homes_fail(town: Town) -> None:
    table = pq.read_table(town.fresh)
    rng = np.random.default_rng(0)
    dataset = town.dataset
    names = ("home_lat", "home_lon", "work_lat", "work_lon")
    real = dataset.anchors[np.unique(dataset.person[dataset.split("train")])]
    chosen = real[rng.integers(len(real), size=table["trajectory"].to_numpy().max() + 1)][
        table["trajectory"].to_numpy()
    ]
    for homes, verdict in ((chosen, RED), (coarsen_anchors(chosen, FAR, real), GREEN)):
        for k, name in enumerate(names):
            table = table.set_column(
                table.schema.get_field_index(name), name, pa.array(homes[:, k])
            )
        pq.write_table(table, town.folder / "homes.parquet")
        result = audit(town.folder / "homes.parquet", dataset.path)
        assert result.subjects == {MEMORISATION: GREEN, MEMBERSHIP: GREEN, ANCHORS: verdict}
        estimate = measured(result, "pairs_of_one").estimate
        assert estimate == pytest.approx(float(verdict == RED))


def test_the_measured_share_of_copies_is_the_true_one(town: Town) -> None:
    fresh = pq.read_table(town.fresh)
    copies = pq.read_table(town.copies("copies", exact_homes=True))
    firsts = [
        table.filter(pc.less(table["trajectory"], n)) for table, n in ((fresh, 900), (copies, 100))
    ]
    firsts[1] = firsts[1].set_column(0, "trajectory", pc.add(firsts[1]["trajectory"], 900))
    pq.write_table(pa.concat_tables(firsts), town.folder / "tenth.parquet")
    result = audit(town.folder / "tenth.parquet", town.dataset.path)
    assert measured(result, "pairs_of_one").estimate == pytest.approx(0.1)
    for name in ("near_homes", "near_works", "trajectories", "grams"):
        interval = measured(result, name)
        assert interval.low < 0.1 < interval.high, name
    assert result.verdict == RED


@pytest.mark.parametrize(
    ("people", "steps", "verdict"),
    [
        ("few", 200, RED),
        ("many", 80, GREEN),
    ],
)
def test_a_model_that_learnt_few_people_by_heart_fails_and_one_of_many_passes(
    town: Town, people: str, steps: int, verdict: str
) -> None:
    dataset = town.dataset if people == "many" else town.prepared("few", FEW)
    training = SMALL["training"] | {"steps": steps}
    model = fitted("autoregressive", dataset, **SMALL | {"training": training})
    name = f"model of {people}, {steps}"
    keep(town.folder / name, model, dataset, "autoregressive")
    generate(town.folder / name, town.folder / f"{name}.parquet", 1_000, SampleRequest(seed=1))
    by_likelihood = audit(town.folder / name, dataset.path)
    assert [check.name for check in by_likelihood.checks] == ["model_auc", "model_tpr"]
    assert by_likelihood.verdict == verdict
    real = dataset.anchors[np.unique(dataset.person[dataset.split("train")])]
    homes = pa.table(dict(zip(data_types.ANCHORS, real.T, strict=True)))
    with_homes = remade(
        town.folder / name,
        town.folder / f"{name}, with homes",
        lambda folder: pq.write_table(homes, folder / "homes.parquet"),
    )
    assert audit(with_homes, dataset.path).subjects[ANCHORS] == RED
    result = audit(town.folder / f"{name}.parquet", dataset.path).subjects
    assert {result[MEMORISATION], result[MEMBERSHIP]} == {verdict}
    assert people == "few" or result[ANCHORS] == GREEN  # anchors are synthetic


@pytest.mark.parametrize(
    ("metres", "near", "pairs"), [(0.0, RED, RED), (20.0, RED, GREEN), (400.0, GREEN, GREEN)]
)
def test_homes_within_30_metres_of_training_people_fail(
    town: Town, metres: float, near: str, pairs: str
) -> None:
    """Moved a little, homes and workplaces equal nobody's, but still point at their people."""
    dataset = town.dataset
    real = dataset.anchors[np.unique(dataset.person[dataset.split("train")])]
    fresh = read_samples(town.fresh, dataset.vocabulary).trajectories
    homes = real[np.arange(len(fresh)) % len(real)] + [metres / 111_195, 0, metres / 111_195, 0]
    path = write(town.folder / "near.parquet", dataset, replace(fresh, anchors=homes))
    verdicts = {check.name: check.verdict for check in audit(path, dataset.path).checks}
    found = {verdicts["near_homes"], verdicts["near_works"]}
    assert found <= ({RED} if near == RED else {GREEN, UNDECIDED})
    assert verdicts["pairs_of_one"] == pairs


@pytest.mark.parametrize(("copied", "verdict"), [(True, RED), (False, GREEN)])
def test_samples_that_reveal_the_groups_of_training_people_fail(
    town: Town, copied: bool, verdict: str
) -> None:
    """Copies with the groups and homes of their people; and the same with shuffled groups."""
    dataset = town.dataset
    assert dataset.groups is not None
    rows = dataset.split("train")
    codes = dataset.person_groups()[dataset.person[rows]]
    if not copied:
        codes = np.random.default_rng(0).permutation(codes)
    names = [dataset.groups.names[code] for code in codes]
    path = town.folder / "groups.parquet"
    result = audit(
        write(path, dataset, Trajectories.of(dataset, rows), names).absolute(), dataset.path
    )
    assert {check.verdict for check in result.checks if check.spec.subject == GROUPS} <= (
        {verdict} if copied else {GREEN, UNDECIDED}
    )
    assert [check.name for check in result.checks[-2:]] == ["group_by_trajectory", "group_by_home"]


def test_choosing_the_best_of_many_attacks_does_not_raise_the_auc() -> None:
    corrected = []
    naive = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        member = (np.arange(400) < 300).astype(np.int64)
        scores = {f"{number}": rng.random(400) for number in range(20)}
        corrected.append(infer(scores, member, rng, resamples=2).auc.estimate)
        naive.append(max(attack.auc for attack in attacks(scores, member)))
    error = np.std(corrected) / np.sqrt(len(corrected))
    assert abs(np.mean(corrected) - 0.5) < 3 * error < 0.03
    assert np.mean(naive) > 0.55


def test_a_perfect_attack_identifies_every_member() -> None:
    member = (np.arange(500) < 300).astype(np.int64)
    result = infer(
        {"oracle": member.astype(np.float64), "blind": np.zeros(500)},
        member,
        np.random.default_rng(0),
    )
    assert (result.auc.low, result.auc.high, result.tpr.low, result.chosen) == (
        1.0,
        1.0,
        1.0,
        ("oracle", "oracle"),
    )


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
)
def test_the_area_is_the_chance_that_a_member_scores_higher(
    members: list[int], others: list[int]
) -> None:
    wins = [(a > b) + (a == b) / 2 for a in members for b in others]
    assert area(np.array(members, float), np.array(others, float)) == pytest.approx(np.mean(wins))


@pytest.mark.parametrize("others", [30, 99, 120, 250])
def test_a_random_score_identifies_one_member_in_a_hundred(others: int) -> None:
    rng = np.random.default_rng(0)
    result = [hit_rate(rng.random(200), rng.random(others)) for _ in range(2_000)]
    assert np.mean(result) == pytest.approx(0.01, abs=4 * np.std(result) / np.sqrt(len(result)))


steps = st.lists(st.integers(HOME, HOME + 3), min_size=1, max_size=7)


@given(st.lists(steps, min_size=1, max_size=5), st.lists(steps, min_size=1, max_size=5))
def test_the_distance_counts_common_tokens_and_pairs(
    first: list[list[int]], second: list[list[int]]
) -> None:
    def things(walk: list[int]) -> Counter[Any]:
        return Counter(walk) + Counter(pairwise(walk))

    table = shingles(walks(*first, *second))
    result = np.concatenate(
        [block for _, block in distances(table[: len(first)], table[len(first) :])]
    )
    expected = [
        [1 - (things(a) & things(b)).total() / (things(a) | things(b)).total() for b in second]
        for a in first
    ]
    assert result == pytest.approx(np.array(expected), abs=1e-6)


@given(st.lists(steps, min_size=1, max_size=5), steps)
def test_likelihoods_are_those_of_witten_and_bell(
    learnt: list[list[int]], asked: list[int]
) -> None:
    words = HOME + 4
    order = 3

    def chance(context: tuple[int, ...], token: int, n: int) -> float:
        if n == 0:
            return 1 / words
        recent = context[len(context) - (n - 1) :]
        after = Counter(
            walk[k]
            for walk in ([1] * order + each for each in learnt)
            for k in range(order, len(walk))
            if tuple(walk[k - n + 1 : k]) == recent
        )
        shorter = chance(context, token, n - 1)
        different = len(after)
        total = after.total()
        return (after[token] + different * shorter) / (total + different) if total else shorter

    everything = walks(*learnt, asked)
    marked = everything.owner < len(learnt)
    result = np.exp(log_likelihood(number_grams(everything, order), marked, words))[~marked]
    padded = [1] * order + asked
    assert result == pytest.approx(
        [chance(tuple(padded[:k]), padded[k], order) for k in range(order, len(padded))]
    )


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.772, 1.317, UNDECIDED),
        (-0.01, 0.051, UNDECIDED),
        (-0.01, 0.05, GREEN),
        (0.011, 0.9, AMBER),
        (0.051, 0.9, RED),
    ],
)
def test_a_check_is_green_only_if_red_is_excluded(low: float, high: float, verdict: str) -> None:
    check = Check("closest", measured=Interval((low + high) / 2, low, high, (high - low) / 4))
    assert check.verdict == verdict
    assert (check.explanation is not None) == (verdict == UNDECIDED)
    assert check.as_dict()["reason"] == check.explanation


def together(passed: Audit, *verdicts: str) -> Audit:
    """An audit whose five checks of memorisation have these verdicts, and all others are green."""
    ends = {GREEN: (0.0, 0.0), UNDECIDED: (0.0, 1.0), AMBER: (0.02, 0.03), RED: (0.9, 1.0)}
    given = dict(zip(CHECKS, verdicts, strict=False))
    checks = [
        Check(name) if each == UNTESTED else Check(name, measured=Interval(0.0, *ends[each], 0.1))
        for name in (check.name for check in passed.checks)
        for each in (given.get(name, GREEN),)
    ]
    return replace(passed, checks=tuple(checks))


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        ((GREEN, GREEN, GREEN, UNDECIDED, UNTESTED), GREEN),
        ((GREEN, GREEN, UNTESTED, UNDECIDED, UNDECIDED), UNDECIDED),
        ((UNTESTED,) * 5, UNDECIDED),
        ((AMBER, *[UNDECIDED] * 4), AMBER),
        ((AMBER, RED, *[GREEN] * 3), RED),
    ],
)
def test_a_subject_is_green_if_half_of_its_checks_are(
    passed: Audit, verdicts: tuple[str, ...], verdict: str
) -> None:
    result = together(passed, *verdicts)
    assert result.subjects == {MEMORISATION: verdict, MEMBERSHIP: GREEN, ANCHORS: GREEN}
    assert result.verdict == result.as_dict()["verdict"] == verdict


def test_thirty_held_out_people_are_too_few_for_a_verdict(town: Town) -> None:
    result = audit(
        town.fresh, town.prepared("thirty", {"train": 0.86, "val": 0.1, "test": 0.04}).path
    )
    (closest,) = (check for check in result.checks if check.name == "closest")
    assert closest.verdict == UNDECIDED and "too few people" in str(closest.explanation)
    assert result.verdict == UNDECIDED and result.advice == ()
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(audit_table(result))
    printed = console.export_text()
    assert (
        "Closest record: not decided, there are too few people" in printed
        and "verdict: not decided" in printed
    )


def test_a_check_that_cannot_be_tested_is_named_and_is_not_green(town: Town) -> None:
    bare = town.folder / "bare.parquet"
    table = pq.read_table(town.fresh, columns=["trajectory", "position", "poi_id"])
    pq.write_table(table.filter(pc.less(table["position"], 4)), bare)
    result = audit(bare, town.prepared("two parts", {"train": 0.9, "val": 0.0, "test": 0.1}).path)
    reasons = {check.name: check.reason for check in result.checks if check.verdict == UNTESTED}
    assert set(reasons) >= {
        "grams",
        "grams_of_one",
        "membership_tpr",
        *(name for name in CHECKS if CHECKS[name].subject == ANCHORS),
    }
    assert reasons["pairs_of_one"] == "samples have no home and work"
    assert "are too few for a rate of 1 %" in str(reasons["membership_tpr"])
    assert len(result.attacks["trajectories"]) == 3 and any(
        "split 'val'" in each for each in result.warnings
    )
    assert result.verdict == result.subjects[ANCHORS] == UNDECIDED


def test_one_sample_is_audited(town: Town) -> None:
    table = pq.read_table(town.fresh)
    pq.write_table(table.filter(pc.equal(table["trajectory"], 0)), town.folder / "one.parquet")
    result = audit(town.folder / "one.parquet", town.dataset.path)
    json.dumps(result.as_dict(), allow_nan=False)
    assert result.trajectories == 1 and result.verdict in (GREEN, AMBER)


def test_the_command_prints_the_verdict_and_exits_with_0(town: Town) -> None:
    copies = town.copies("again", exact_homes=True)
    command = ["audit", str(copies), "--dataset", str(town.dataset.path)]
    printed = CliRunner().invoke(app, [*command, "--quiet"], catch_exceptions=False)
    assert (
        printed.exit_code == 0
        and "verdict: red" in printed.output
        and "Home and work, unique" in printed.output
    )
    assert (
        "generate with synthetic anchors (the default), or with --anchors observed and a larger"
        in " ".join(printed.output.split())
    )
    as_json = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    result = json.loads(as_json.stdout)
    assert result["verdict"] == RED
    assert len(result["checks"]) == len(CHECKS) - 4, "all but those of a model"


def test_bad_input_is_one_sentence_and_exit_code_2(town: Town, tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no table")
    command = [
        sys.executable,
        "-m",
        "mobatlas",
        "audit",
        "text.parquet",
        "--dataset",
        str(town.dataset.path),
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines()[-1].startswith(
        "mobatlas: text.parquet: this is not a readable Parquet file"
    )
    few = town.prepared("no test", {"train": 0.9, "val": 0.1, "test": 0.0})
    with pytest.raises(
        MobatlasError,
        match="split 'test' has 0 people, and an audit needs 20 or more; use more",
    ):
        audit(town.fresh, few.path)
