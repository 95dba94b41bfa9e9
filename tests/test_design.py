"""`design` predicts the intervals that `recover` reports once the evidence is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from mobatlas import (
    CityConfig,
    MobatlasError,
    build_regions,
    load_regions,
    plan_evidence,
    prepare,
    recover,
    write_city_folder,
)
from mobatlas.data.types import Floats
from mobatlas.groups import DEFAULT_GROUPS, Groups
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.recovery.design import Action, EvidencePlan
from mobatlas.regions.types import Aggregates, Composition, GroupEvidence, Recovery, Regions
from tests.outcomes import refused, run

D = len(DEFAULT_GROUPS)
EVEN = np.full(D, 1 / D)
RARE = np.append(np.full(D - 1, 0.98 / (D - 1)), 0.02)
SEEDS = range(4)


def simulate(
    seed: int,
    *,
    randomised: bool = True,
    shares: Floats = EVEN,
    people: float = 60.0,
    bins: int = 25,
    identity: bool = False,
    divided: bool = False,
) -> tuple[Regions, Floats]:
    """Forty regions, and their true group means.

    Without random assignment, regions also differ for reasons other than composition. Divided
    regions have parts that differ from them as any other region does from the mean.
    """
    rng = np.random.default_rng(seed)
    p = np.eye(D) if identity else rng.dirichlet(5 * D * shares, 40)
    mean = rng.lognormal(-1, 1, bins)
    ratio = rng.normal(0, 0.2, (D, bins))
    for codes in DEFAULT_GROUPS.level_codes.T:
        ratio += rng.normal(0, 0.3, (codes.max() + 1, bins))[codes]
    means = mean * np.exp(ratio)
    n = np.full(len(p), people)
    if divided:
        other = (p - p.mean(0))[rng.permutation(len(p))]
        part = people * p * (1 + np.clip(other / p, -1, 1)) / 2
        counts = np.vstack([part, people * p - part])
        n = counts.sum(1)
        p = counts / n[:, None]
    q = p @ means
    if not randomised:
        q = p @ (means * np.exp(rng.normal(0, 0.6, means.shape)))
        q = q * np.exp(rng.normal(0, 0.15, q.shape))
    values = rng.poisson(q * n[:, None]) / n[:, None]
    names = tuple(f"R{number}" for number in range(len(p)))
    features = tuple(f"category:{number}" for number in range(bins))
    composition = Composition(DEFAULT_GROUPS, names, p, np.full(len(p), np.inf))
    return Regions(
        composition, Aggregates(names, features, values, n, spread=mean), randomised
    ), means


def observed(
    regions: Regions, means: Floats, shares: Floats, n: Floats, seed: int, kind: str = "labelled"
) -> Regions:
    """The regions with means over n people of each composition (rows, groups)."""
    rng = np.random.default_rng(1_000 + seed)
    rows = np.round(n) > 0
    size = np.round(n[rows]).astype(float)
    q = shares[rows] @ means
    if kind == "table":  # its groups deviate from ours
        q = shares[rows] @ (means * np.exp(rng.normal(0, 0.15, means.shape)))
    values = rng.poisson(q * size[:, None]) / size[:, None]
    name = "labelled people" if kind == "labelled" else "trips.csv"
    source = GroupEvidence(
        name,
        "labelled" if kind == "labelled" else "table",
        shares[rows],
        regions.aggregates.features,
        values,
        size,
        spread=regions.aggregates.spread,
    )
    return replace(regions, evidence=(*regions.evidence, source))


def reported(recovery: Recovery) -> float:
    """The mean half-width of 90 % intervals of log ratios of groups to the average."""
    assert recovery.log_covariance is not None
    total = recovery.shares @ recovery.means  # (features,)
    widths = []
    for bin_, covariance in enumerate(recovery.log_covariance):
        share = recovery.shares * recovery.means[:, bin_] / total[bin_]
        contrast = np.eye(len(share)) - share
        widths.append(np.sqrt(np.einsum("ab,bc,ac->a", contrast, covariance, contrast)).mean())
    return float(stats.norm.ppf(0.95) * np.average(widths, weights=recovery.baseline))


def now(plan: EvidencePlan) -> float:
    return float(np.mean(list(plan.now.values())))


def expected(action: Action) -> float:
    return float(np.mean(list(action.half_widths.values())))


def find(plan: EvidencePlan, words: str) -> Action:
    return next(each for each in plan.actions if words in each.name)


def people_of(allocation: Mapping[str, int]) -> Floats:
    return np.array([allocation.get(name, 0) for name in DEFAULT_GROUPS.names], dtype=float)


@pytest.mark.parametrize("randomised", [True, False])
def test_the_present_width_is_the_one_that_recover_reports(randomised: bool) -> None:
    regions, means = simulate(0, randomised=randomised)
    for each in (regions, observed(regions, means, np.eye(D), np.full(D, 15.0), 0)):
        assert now(plan_evidence(each, 50)) == pytest.approx(reported(recover(each, quiet=True)))


@pytest.mark.parametrize("randomised", [True, False])
@pytest.mark.parametrize("budget", [80, 400])
def test_the_width_with_labelled_people_is_the_one_that_recover_then_reports(
    randomised: bool, budget: int
) -> None:
    predicted, actual, before = [], [], []
    for seed in SEEDS:
        regions, means = simulate(seed, randomised=randomised)
        plan = plan_evidence(regions, budget)
        action = find(plan, "chosen by group")
        people = people_of(action.allocation)
        assert people.sum() == budget
        more = observed(regions, means, np.eye(D), people, seed)
        before.append(now(plan))
        predicted.append(expected(action))
        actual.append(reported(recover(more, quiet=True)))
    assert np.mean(actual) < 0.85 * np.mean(before)
    assert np.mean(predicted) == pytest.approx(np.mean(actual), rel=0.15)


@pytest.mark.parametrize("randomised", [True, False])
def test_the_width_with_smaller_regions_is_the_one_that_recover_then_reports(
    randomised: bool,
) -> None:
    predicted, actual = [], []
    for seed in SEEDS:
        plan = plan_evidence(simulate(seed, randomised=randomised)[0], 50)
        predicted.append(expected(find(plan, "divide each region into 2")))
        other = simulate(seed, randomised=randomised, divided=True)[0]
        actual.append(reported(recover(other, quiet=True)))
    assert np.mean(predicted) == pytest.approx(np.mean(actual), rel=0.15)


def test_many_labelled_people_have_their_sampling_error() -> None:
    regions, _ = simulate(1, people=5_000.0)
    recovery = recover(regions, quiet=True)
    n = 1_000_000 / D
    dispersion = np.asarray(regions.aggregates.spread) / recovery.baseline
    variance = dispersion / (n * recovery.means)  # (groups, features)
    share = recovery.shares[:, None] * recovery.means / recovery.baseline
    contrast = np.eye(D)[:, :, None] - share  # (rows, groups, features)
    sd = np.sqrt((contrast**2 * variance).sum(1)).mean(0)
    exact = stats.norm.ppf(0.95) * np.average(sd, weights=recovery.baseline)
    action = find(plan_evidence(regions, 1_000_000), "at random")
    assert expected(action) == pytest.approx(exact, rel=0.03)


def test_with_a_rare_group_the_chosen_allocation_is_better_than_a_random_sample() -> None:
    gains = []
    for seed in SEEDS:
        regions, means = simulate(seed, shares=RARE)
        plan = plan_evidence(regions, 200)
        chosen = find(plan, "chosen by group")
        at_random = find(plan, "at random")
        n = people_of(chosen.allocation)
        assert n.sum() == 200 and n[-1] > 3 * 200 * RARE[-1]
        assert chosen.reduction > at_random.reduction + 0.01
        # Expected, and true: the rare group is where the difference is made.
        sampled = np.maximum(np.round(200 * RARE), 2)
        widths = [
            reported(recover(observed(regions, means, np.eye(D), each, seed), quiet=True))
            for each in (n, sampled)
        ]
        gains.append(widths[1] - widths[0])
    assert np.mean(gains) > 0


def test_a_larger_budget_never_helps_less() -> None:
    for randomised in (True, False):
        regions, _ = simulate(2, randomised=randomised, shares=RARE)
        before: dict[str, float] = {}
        for budget in (2, 20, 100, 500, 5_000):
            plan = plan_evidence(regions, budget)
            current = {
                each.name.replace(f" {budget:,} ", " N "): expected(each) for each in plan.actions
            }
            assert all(0 <= each.reduction < 1 for each in plan.actions)
            for name, width in before.items():
                assert current[name] <= width + 1e-6, name
            before = current


def test_present_evidence_lowers_the_benefit_of_more() -> None:
    regions, means = simulate(3)
    more = observed(regions, means, np.eye(D), np.full(D, 100.0), 3)
    without, with_labels = (find(plan_evidence(each, 100), "at random") for each in (regions, more))
    assert with_labels.reduction < without.reduction / 2
    assert expected(with_labels) < expected(without)


def test_regions_of_one_group_each_cannot_be_divided_usefully() -> None:
    regions, _ = simulate(4, identity=True, people=500.0)
    plan = plan_evidence(regions, 100)
    assert find(plan, "divide each region into 4").reduction == pytest.approx(0, abs=1e-6)


def test_actions_are_sorted_and_simple_ones_precede_equally_helpful_ones() -> None:
    regions, _ = simulate(5)
    plan = plan_evidence(regions, 100)
    reductions = [each.reduction for each in plan.actions]
    assert reductions == pytest.approx(sorted(reductions, reverse=True), abs=5e-3)
    simple, chosen = (find(plan, words) for words in ("at random", "chosen by group"))
    assert chosen.reduction - simple.reduction == pytest.approx(0, abs=5e-3)
    assert plan.actions.index(simple) < plan.actions.index(chosen)


def test_a_sample_of_many_places_has_the_mean_of_all() -> None:
    rng = np.random.default_rng(6)
    regions, _ = simulate(6, bins=1_500)
    names = tuple(f"poi:{number}" for number in range(1_500))
    parents = {name: f"category:{rng.integers(8)}" for name in names}
    places = replace(
        regions, aggregates=replace(regions.aggregates, features=names), parents=parents
    )
    plan = plan_evidence(places, 100)
    assert now(plan) == pytest.approx(reported(recover(places, quiet=True)), rel=0.05)
    assert plan.features == {"poi": 1_500} and list(plan.maps) == ["poi"]
    assert "category" not in plan.uninformed and "hour" in plan.uninformed


def test_what_cannot_be_computed_is_left_out_with_a_reason() -> None:
    regions, _ = simulate(7, bins=5)
    v = regions.aggregates
    noisy = replace(regions, aggregates=replace(v, noise=np.full(v.values.shape, 0.01)))
    plan = plan_evidence(noisy, 50)
    assert {each.kind for each in plan.actions} == {"labelled people"}
    assert "noise is not known" in plan.left_out[0]
    single = plan_evidence(regions.select(np.array([0])), 50)
    assert "smaller regions" not in {each.kind for each in single.actions}
    assert "one region" in single.left_out[0]


@pytest.mark.parametrize("budget", [-5, 0, 1, 1_000_001])
def test_an_impossible_budget_is_refused(budget: int) -> None:
    with pytest.raises(MobatlasError, match=f"--budget {budget}: give a number of people from 2"):
        plan_evidence(simulate(0, bins=2)[0], budget)


def test_one_group_and_no_probability_are_refused() -> None:
    regions, _ = simulate(0, bins=2)
    with pytest.raises(MobatlasError, match="give a probability between 0 and 1"):
        plan_evidence(regions, level=90)
    one = Composition(Groups.of({"sex": ("F",)}), ("R0",), np.ones((1, 1)), np.ones(1))
    v = Aggregates(("R0",), ("poi:a",), np.ones((1, 1)), np.ones(1))
    with pytest.raises(MobatlasError, match="there is only one group"):
        plan_evidence(Regions(one, v, randomised=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A REGIONS folder of districts, with places and categories."""
    root = tmp_path_factory.mktemp("city")
    write_city_folder(root / "city", CityConfig(users=400, pois=40, days=15), seed=3)
    prepare(root / "city", root / "dataset", preset="small")
    options = RegionsOptions(by="home_district", features=["poi", "category"])
    build_regions(root / "dataset", root / "regions", options)
    return root / "regions"


def test_the_command_recommends_and_explains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = run("design", folder, "--budget", 150)
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines())) <= 80
    text = " ".join(done.out.split())
    plan = plan_evidence(load_regions(folder), 150)
    best = plan.actions[0]
    low, high = np.exp([-expected(best), expected(best)])
    assert text.startswith(f"The most helpful: {best.name}. Expected interval of a group: ratio")
    assert f"ratio {low:.2f} to {high:.2f} instead of {np.exp(-now(plan)):.2f} to" in text
    assert "Labelled people: we assume that they behave as others of their group do." in text
    assert "Smaller regions: we assume that parts of a region differ" in text
    assert "average behaviour in them: transitions, distance, hour, visits." in text
    assert "default: 200" in text


def test_json_has_every_number_of_the_plan(folder: Path) -> None:
    values = json.loads(run("design", folder, "--json").out)
    plan = plan_evidence(load_regions(folder))
    assert values["budget"] == 200 and values["kind"] == "plan" and values["level"] == 0.9
    assert [each["action"] for each in values["actions"]] == [each.name for each in plan.actions]
    for each, action in zip(values["actions"], plan.actions, strict=True):
        assert each["reduction"] == pytest.approx(action.reduction)
        low, high = each["expected"]["mean"]
        assert np.log(high) == pytest.approx(expected(action)) and low * high == pytest.approx(1)
        assert set(each["expected"]["feature_maps"]) == {"poi", "category"}
    assert len(values["now"]["groups"]) == D
    chosen = next(each for each in values["actions"] if "chosen" in each["action"])
    assert sum(chosen["allocation"].values()) == 200


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--budget", 0], "--budget 0: give a number of people from 2 to 1,000,000"),
        (["--budget", "-3"], "--budget -3: give a number of people"),
        (["--budget", 10**12], "--budget 1000000000000: give a number of people"),
        (["--budget", "many"], "invalid value for '--budget'"),
        (["--budget", "2.5"], "invalid value for '--budget'"),
    ],
)
def test_bad_budgets_are_refused_in_a_sentence(
    folder: Path, options: list[object], sentence: str
) -> None:
    assert sentence in refused("design", folder, *options)


def test_a_folder_without_regions_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "not a regions folder" in refused("design", tmp_path)
    assert "dataset" in refused("design", folder.parent / "dataset")
    assert refused("design", tmp_path / "nothing")
