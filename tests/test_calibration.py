"""Calibrated samples are nearer to the estimated means; chunks and labels do not change them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, sparse, special

from mobatlas import MobatlasError, TrajectoryDataset, build_regions
from mobatlas.data.dataset import Trajectories
from mobatlas.data.types import Floats
from mobatlas.evaluation.comparison import diversity
from mobatlas.generators.protocol import UNKNOWN, Generator, uniforms
from mobatlas.groups import Groups
from mobatlas.regions.build import RegionsOptions
from mobatlas.supervision.calibration import (
    CalibratedSampler,
    Calibration,
    CalibrationConfig,
    PlainSampler,
    Sampler,
    fit_calibration,
)
from mobatlas.supervision.evidence import Evidence, gather_evidence, labelled_moments
from mobatlas.supervision.store import load_calibration, save_calibration
from mobatlas.supervision.strategies import (
    STRATEGIES,
    StrategyOptions,
    Supervised,
    build_options,
)
from mobatlas.supervision.tilt import (
    fit_capped_tilt,
    fit_fixed_anchor_tilt,
    fit_tilt,
    fixed_anchor_weights,
)
from mobatlas.training.loop import Execution, Trainer
from tests.tiny import OPTIONS, fitted, small_city, with_other_labels

SIX = 5  # a group, "40-50, F"
POOL = 1_024
BRIEF: dict[str, Any] = {
    "autoencoder": OPTIONS["latent-diffusion"]["autoencoder"]
    | {"steps": 80, "learning_rate": 5e-3},
    "denoiser": OPTIONS["latent-diffusion"]["denoiser"] | {"steps": 60},
}


@dataclass(frozen=True)
class World:
    """A city, a baseline, and the evidence of its regions."""

    dataset: TrajectoryDataset
    regions: Path
    evidence: Evidence
    model: Generator  # of phase 1
    resampled: Calibration

    @property
    def sampler(self) -> CalibratedSampler:
        return CalibratedSampler.of(self.model, self.resampled, self.evidence.anchors)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("city")
    dataset = small_city(root)
    build_regions(
        dataset.path,
        root / "regions",
        RegionsOptions(partition="demogroups", features=("category",)),
    )
    evidence = gather_evidence(dataset, root / "regions")
    model = fitted("latent-diffusion", dataset, **BRIEF)
    return World(dataset, root / "regions", evidence, model, calibrate(model, evidence, pool=POOL))


@pytest.fixture(scope="module")
def grouped(world: World) -> tuple[Generator, Calibration]:
    """A model with groups, and its calibration."""
    model = world.model.with_groups(world.evidence.groups, seed=1)
    return model, calibrate(model, world.evidence, pool=256, candidates=4)


def calibrate(model: Generator, evidence: Evidence, **options: Any) -> Calibration:
    return fit_calibration(model, evidence.moments, CalibrationConfig(**options))


def counts(seed: int, rows: int = 60, features: int = 3) -> tuple[sparse.csr_array, Floats]:
    """Rows of counts, and a target near their mean."""
    rng = np.random.default_rng(seed)
    phi = rng.poisson(1.5, (rows, features)).astype(float)
    return sparse.csr_array(phi), rng.dirichlet(np.full(rows, 6.0)) @ phi


def same(a: Trajectories, b: Trajectories) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("tokens", "offsets", "anchors")
    )


def distance(world: World, made: Trajectories, group: int) -> float:
    means = np.asarray(world.evidence.phi.counts(made).mean(0)).ravel()
    return world.evidence.aggregate_moments.distance(means, world.evidence.means[group])["scaled"]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), cap=st.sampled_from([2.0, 5.0]))
def test_a_capped_tilt_has_mean_one_and_meets_the_target_below_its_cap(
    seed: int, cap: float
) -> None:
    phi, target = counts(seed)
    coefficients, offset, converged = fit_capped_tilt(phi, target, cap, ridge=0)
    weights = np.exp(np.minimum(phi @ coefficients - offset, np.log(cap)))
    assert converged and weights.max() <= cap * (1 + 1e-12)
    assert weights.mean() == pytest.approx(1, abs=1e-8)
    assert phi.T @ weights / len(weights) == pytest.approx(target, abs=1e-7)


def test_a_capped_tilt_is_the_nearest_distribution_below_its_cap() -> None:
    """SLSQP solves min KL(w | uniform) subject to the moments and w <= cap."""
    phi, target = counts(3, rows=12, features=2)
    dense = phi.toarray()
    cap = 1.08
    minimise: Any = optimize.minimize
    solved = minimise(
        lambda w: float(np.sum(w * np.log(np.maximum(w, 1e-300) * 12))),
        np.full(12, 1 / 12),
        jac=lambda w: np.log(np.maximum(w, 1e-300) * 12) + 1,
        bounds=[(1e-12, cap / 12)] * 12,
        constraints=[
            {"type": "eq", "fun": lambda w: w.sum() - 1},
            {"type": "eq", "fun": lambda w: dense.T @ w - target},
        ],
        method="SLSQP",
        options={"maxiter": 1_000, "ftol": 1e-14},
    )
    assert solved.success
    coefficients, offset, _ = fit_capped_tilt(phi, target, cap, ridge=0)
    weights = np.exp(np.minimum(phi @ coefficients - offset, np.log(cap))) / 12
    assert (weights > cap / 12 - 1e-9).any()  # the cap matters here
    assert weights == pytest.approx(solved.x, abs=1e-5)


def test_a_cap_that_nothing_reaches_leaves_the_plain_tilt_and_a_cap_of_one_none() -> None:
    phi, target = counts(5)
    plain = fit_tilt(phi, target, ridge=0.02)
    coefficients, offset, _ = fit_capped_tilt(phi, target, 1e6, ridge=0.02)
    assert coefficients == pytest.approx(plain.coefficients, abs=1e-6)
    assert np.exp(phi @ coefficients - offset) / 60 == pytest.approx(plain.weights, abs=1e-8)
    assert not fit_capped_tilt(phi, target, 1.0)[0].any()


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_the_dual_with_a_partition_for_each_anchor_agrees_with_brute_force(seed: int) -> None:
    phi, target = counts(seed, rows=40)
    k = 4
    ridge = 0.05
    coefficients, converged = fit_fixed_anchor_tilt(phi, target, k, ridge)
    dense = phi.toarray().reshape(-1, k, 3)  # (anchors, K, features)
    scale = np.sqrt(phi.toarray().mean(0))

    def objective(x: Floats) -> float:
        partition = special.logsumexp(dense @ x, axis=1) - np.log(k)
        return float(partition.mean() - x @ target + ridge / 2 * ((x * scale) ** 2).sum())

    minimise: Any = optimize.minimize
    solved = minimise(
        objective,
        np.zeros(3),
        method="Nelder-Mead",
        options={"xatol": 1e-10, "fatol": 1e-14, "maxiter": 9_999},
    )
    assert converged
    assert objective(coefficients) <= solved.fun + 1e-12
    assert coefficients == pytest.approx(solved.x, abs=1e-5)
    weights = special.softmax(dense @ coefficients, axis=1)  # (anchors, K)
    reached = np.einsum("ak,akf->f", weights, dense) / len(dense)
    assert target - reached == pytest.approx(ridge * scale**2 * coefficients, abs=1e-7)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), ratio=st.floats(0.9, 1.1))
def test_with_fixed_anchors_the_mean_visits_of_each_anchor_change_by_a_common_ratio(
    seed: int, ratio: float
) -> None:
    """At the optimum, moments are met up to the ridge, and mean visits of anchors exactly."""
    phi, target = counts(seed, rows=160)
    k = 8
    ridge = 0.05
    visits = np.random.default_rng(seed).integers(1, 9, 160).astype(float)
    coefficients, converged = fit_fixed_anchor_tilt(phi, target, k, ridge, visits, ratio)
    assert converged
    numbers = visits.reshape(-1, k)
    weights = fixed_anchor_weights(
        (phi @ coefficients).reshape(-1, k), numbers, ratio
    )  # (anchors, K)
    least = numbers.min(1)
    most = numbers.max(1)
    goal = np.clip(ratio * numbers.mean(1), least + (most - least) / 16, most - (most - least) / 16)
    assert (weights * numbers).sum(1) == pytest.approx(goal, abs=1e-8)
    assert weights.sum(1) == pytest.approx(1)
    reached = phi.T @ weights.ravel() / len(weights)
    scale = np.sqrt(phi.toarray().mean(0))
    assert target - reached == pytest.approx(ridge * scale**2 * coefficients, abs=1e-6)
    # without a tilt, all candidates have equal weights
    assert fixed_anchor_weights(np.zeros((20, k)), numbers, 1.0) == pytest.approx(1 / k)


def test_accepted_samples_are_nearer_to_their_group_than_the_models_own(world: World) -> None:
    own = world.model.sample(
        256, anchors=world.evidence.anchors[np.arange(256) % len(world.evidence.anchors)], seed=77
    )
    for group in (0, SIX):
        made = world.sampler.sample(256, group, seed=1)
        fit = world.resampled.population[group]
        assert distance(world, made.trajectories, group) < 0.5 * distance(world, own, group)
        assert fit.after["scaled"] < fit.before["scaled"] and fit.after["js"] < fit.before["js"]
        assert 256 / made.drawn == pytest.approx(1 / fit.cap, rel=0.25)
        assert len(made.trajectories) == len(made.numbers) == len(set(made.numbers.tolist())) == 256


def test_calibrated_samples_at_fixed_anchors_are_nearer_too(world: World) -> None:
    anchors = world.evidence.anchors[np.arange(256) % len(world.evidence.anchors)]
    own = world.model.sample(256, anchors=anchors, seed=77)
    for group in (0, SIX):
        made = world.sampler.sample_at_anchors(np.full(256, group), anchors, seed=1)
        assert np.array_equal(made.anchors, anchors, equal_nan=True)
        assert distance(world, made, group) < 0.5 * distance(world, own, group)


def test_a_model_with_groups_is_calibrated_group_by_group(
    world: World, grouped: tuple[Generator, Calibration]
) -> None:
    model, calibration = grouped
    sampler: Sampler = CalibratedSampler.of(model, calibration, world.evidence.anchors)
    assert calibration.conditioned and not world.resampled.conditioned
    assert (
        len({each.before["js"] for each in calibration.population}) == 8
    )  # each has a pool of its own
    made = sampler.sample(256, SIX, seed=2)
    own = model.sample(256, np.full(256, SIX), made.trajectories.anchors, seed=3)
    assert distance(world, made.trajectories, SIX) < distance(world, own, SIX)


def test_the_output_does_not_depend_on_chunks(world: World) -> None:
    sampler = world.sampler
    whole = sampler.sample(120, SIX, seed=4)
    assert same(whole.trajectories, sampler.sample(120, SIX, seed=4, block=150).trajectories)
    first = sampler.sample(50, SIX, seed=4)
    rest = sampler.sample(70, SIX, seed=4, first=first.next_candidate)
    assert np.array_equal(whole.numbers, np.concatenate([first.numbers, rest.numbers]))
    assert np.array_equal(
        whole.trajectories.tokens, np.concatenate([p.trajectories.tokens for p in (first, rest)])
    )
    assert (first.next_candidate, first.drawn + rest.drawn) == (first.numbers[-1] + 1, whole.drawn)
    groups = np.arange(60) % 8
    anchors = world.evidence.anchors[:60]
    given = sampler.sample_at_anchors(groups, anchors, seed=4)
    parts = [
        sampler.sample_at_anchors(groups[a:b], anchors[a:b], seed=4, first=a)
        for a, b in ((0, 17), (17, 60))
    ]
    assert np.array_equal(given.tokens, np.concatenate([part.tokens for part in parts]))


def test_the_first_of_several_draws_equals_a_single_draw(world: World) -> None:
    groups = np.arange(60) % 8
    anchors = world.evidence.anchors[:60]
    samplers: list[Sampler] = [
        world.sampler,
        PlainSampler(world.sampler.model, world.evidence.anchors),
    ]
    for sampler in samplers:
        one, three = (
            sampler.sample_at_anchors(groups, anchors, seed=4, draws=draws) for draws in (1, 3)
        )
        draws = [three.take(np.arange(60 * draw, 60 * (draw + 1))) for draw in range(3)]
        assert len(three) == 180 and same(draws[0], one)
        assert not same(draws[1], one) and not same(draws[1], draws[2])
        assert all(np.array_equal(draw.anchors, anchors) for draw in draws)
    made = world.sampler.sample_at_anchors(groups, anchors, seed=4, draws=40)
    days = {tuple(made.take(np.array([60 * draw])).tokens) for draw in range(40)}
    assert 1 < len(days) <= world.sampler.calibration.candidates, (
        "all draws choose among the same candidates"
    )


def test_seeds_and_groups_have_candidates_of_their_own(world: World) -> None:
    sampler = world.sampler
    one, again, seed, group = (
        sampler.sample(40, g, seed=s).trajectories for g, s in ((1, 0), (1, 0), (1, 9), (2, 0))
    )
    assert same(one, again) and not same(one, seed) and not same(one, group)


@given(st.integers(0, 2**62), st.integers(0, 10**12), st.integers(0, 9), st.integers(0, 9))
def test_random_numbers_can_start_at_any_sample(
    seed: int, start: int, some: int, more: int
) -> None:
    whole = uniforms(seed, start, start + some + more)
    assert np.array_equal(uniforms(seed, start + some, start + some + more), whole[some:])


def test_without_a_tilt_everything_is_accepted_and_any_candidate_will_do(world: World) -> None:
    none = [
        replace(each, coefficients=0 * each.coefficients, offset=0.0, cap=1.0)
        for each in world.resampled.population
    ]
    sampler = replace(world.sampler, calibration=replace(world.resampled, population=tuple(none)))
    assert sampler.sample(30, 0).numbers.tolist() == list(range(30))
    unknown = world.sampler.sample_at_anchors(np.full(30, UNKNOWN), world.evidence.anchors[:30])
    assert len(unknown) == 30


def test_a_pool_too_small_for_its_features_does_no_harm(world: World) -> None:
    """A tilt to noisy means is chosen only if it helps samples that it was not fitted on."""
    found = calibrate(world.model, world.evidence, pool=32, candidates=2)
    for each in (*found.population, *found.fixed_anchors):
        assert each.after["scaled"] <= each.before["scaled"] + 1e-9


def test_a_calibration_is_read_as_it_was_written(world: World, tmp_path: Path) -> None:
    assert load_calibration(tmp_path) is None
    save_calibration(tmp_path, world.resampled)
    read = load_calibration(tmp_path)
    assert read is not None
    assert json.dumps(read.as_dict(), allow_nan=False) == json.dumps(world.resampled.as_dict())
    assert all(
        np.array_equal(read.tensors()[name], table)
        for name, table in world.resampled.tensors().items()
    )
    ours, theirs = (
        CalibratedSampler.of(world.model, each, world.evidence.anchors)
        for each in (read, world.resampled)
    )
    assert same(ours.sample(20, SIX).trajectories, theirs.sample(20, SIX).trajectories)
    report = json.loads(json.dumps(read.report(), allow_nan=False))
    assert report["groups"]["40-50, F"]["population"]["cap"] == read.population[SIX].cap
    (tmp_path / "calibration.safetensors").write_bytes(b"cut")
    with pytest.raises(MobatlasError, match=r"calibration\.json: this is not a calibration"):
        load_calibration(tmp_path)
    save_calibration(tmp_path, world.resampled)
    values = json.loads((tmp_path / "calibration.json").read_text()) | {
        "features": ["category:home"]
    }
    (tmp_path / "calibration.json").write_text(json.dumps(values))
    with pytest.raises(MobatlasError, match="belongs to another one"):
        load_calibration(tmp_path)


@pytest.mark.parametrize("missing", ["cap", "converged", "after", "js"])
def test_an_incomplete_calibration_is_refused(world: World, tmp_path: Path, missing: str) -> None:
    save_calibration(tmp_path, world.resampled)
    values = json.loads((tmp_path / "calibration.json").read_text())
    weighting = values["population"][0]
    del (weighting["before"] if missing == "js" else weighting)[missing]
    (tmp_path / "calibration.json").write_text(json.dumps(values))
    with pytest.raises(MobatlasError, match=r"calibration\.json: this is not a calibration"):
        load_calibration(tmp_path)


def strong(dataset: TrajectoryDataset, model: Generator, **section: Any) -> Supervised:
    """The model of labels with the given features, calibrated with a small pool."""
    strategy = STRATEGIES["strong"]
    values = {"strong": section, "calibration": {"pool": POOL, "candidates": 4}}
    options = build_options(strategy, values, StrategyOptions(quiet=True))
    return strategy.run(model, dataset, None, Trainer(None, Execution(quiet=True)), options)


def test_calibrated_samples_of_strong_are_nearer_to_labelled_people(world: World) -> None:
    made = strong(world.dataset, world.model, features=["category"])
    moments = made.moments
    assert moments is not None and made.calibration is not None
    names = {name.partition(":")[0] for name in moments.phi.features}
    assert names == {"category", "visits"}
    sampler = CalibratedSampler.of(made.generator, made.calibration, moments.anchors)
    anchors = moments.anchors[np.arange(256) % len(moments.anchors)]
    distances = []
    for group in range(len(moments.groups)):
        plain = made.generator.sample(256, np.full(256, group), anchors, seed=7)
        calibrated = sampler.sample(256, group, seed=8).trajectories
        reached = [
            np.asarray(moments.phi.counts(each).mean(0)).ravel() for each in (plain, calibrated)
        ]
        distances.append([np.abs(mean - moments.means[group]).sum() for mean in reached])
    before, after = np.mean(distances, axis=0)
    assert after < 0.7 * before


def test_strong_alone_reads_labels(world: World, tmp_path: Path) -> None:
    assert {name for name, each in STRATEGIES.items() if each.reads_labels} == {"strong"}
    copy = with_other_labels(world.dataset, tmp_path / "copy", "shuffled")
    shuffled = labelled_moments(TrajectoryDataset.open(copy), ["category"])
    known = labelled_moments(world.dataset, ["category"])
    assert np.array_equal(shuffled.baseline, known.baseline)
    assert np.abs(shuffled.means - known.means).max() > 0.01
    other = with_other_labels(world.dataset, tmp_path / "bare", "deleted")
    with pytest.raises(MobatlasError, match="this dataset has no labels"):
        strong(TrajectoryDataset.open(other), world.model)


def test_the_means_of_labelled_people_weight_each_person_equally(world: World) -> None:
    dataset = world.dataset
    moments = labelled_moments(dataset, ["category", "visits"], ["HOME"])
    assert len(set(moments.phi.features)) == len(moments.phi.features)
    train = dataset.split("train")
    phi = moments.phi.counts(Trajectories.of(dataset, train)).toarray()
    group = dataset.person_groups()
    for number in range(len(moments.groups)):
        people = [
            phi[dataset.person[train] == person].mean(0)
            for person in np.unique(dataset.person[train]).tolist()
            if group[person] == number
        ]
        assert moments.means[number] == pytest.approx(np.mean(people, axis=0))
    home = [name for name in moments.phi.features if name.lower().startswith("category:home")]
    assert home == []


@pytest.mark.parametrize("change", ["shuffled", "deleted"])
def test_labels_change_nothing_after_the_regions_were_built(
    world: World, tmp_path: Path, change: str
) -> None:
    copy = with_other_labels(world.dataset, tmp_path / "copy", change)
    evidence = gather_evidence(TrajectoryDataset.open(copy), world.regions)
    again = calibrate(world.model, evidence, pool=POOL)
    assert json.dumps(again.as_dict()) == json.dumps(world.resampled.as_dict())
    assert all(
        again.tensors()[name].tobytes() == t.tobytes()
        for name, t in world.resampled.tensors().items()
    )
    sampler = CalibratedSampler.of(world.model, again, evidence.anchors)
    assert same(sampler.sample(50, 2).trajectories, world.sampler.sample(50, 2).trajectories)
    groups = np.arange(20) % 8
    anchors = evidence.anchors[:20]
    assert same(
        sampler.sample_at_anchors(groups, anchors), world.sampler.sample_at_anchors(groups, anchors)
    )


def test_features_that_samples_lack_are_left_out_with_a_warning(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_regions(
        world.dataset.path,
        tmp_path / "r",
        RegionsOptions(partition="demogroups", features=("category", "hour")),
    )
    found = calibrate(
        world.model, gather_evidence(world.dataset, tmp_path / "r"), pool=64, candidates=2
    )
    assert not any(name.startswith("hour:") for name in found.features)
    assert "samples of this model have no times" in caplog.text


def test_too_few_accepted_candidates_are_reported_in_a_sentence(world: World) -> None:
    far = replace(world.resampled.population[SIX], offset=50.0, cap=8.0)
    population = (*world.resampled.population[:SIX], far, *world.resampled.population[SIX + 1 :])
    sampler = replace(world.sampler, calibration=replace(world.resampled, population=population))
    sentence = r"group '40-50, F': 0 of 1,\d+ candidates were accepted where 12% were expected"
    with pytest.raises(MobatlasError, match=sentence):
        sampler.sample(10, SIX)


def test_bad_input_is_refused_in_a_sentence(
    world: World, grouped: tuple[Generator, Calibration]
) -> None:
    model = world.model
    evidence = world.evidence
    with pytest.raises(ValueError, match="a pool of 10 is too small for 8 candidates"):
        CalibrationConfig(pool=10)
    others = world.model.with_groups(Groups.of({"sex": ("M", "F")}), seed=0)
    with pytest.raises(MobatlasError, match=r"the groups of the model \(M; F\) are not those of"):
        calibrate(others, evidence, pool=64)
    run = STRATEGIES["resample"].run
    with pytest.raises(MobatlasError, match="this model already has groups"):
        run(
            grouped[0],
            world.dataset,
            evidence,
            Trainer(None, Execution(quiet=True)),
            StrategyOptions(),
        )
    for other in (model, others):
        with pytest.raises(MobatlasError, match="its groups are not those of the model"):
            CalibratedSampler.of(other, grouped[1], evidence.anchors)
    with pytest.raises(MobatlasError, match="n is 5 and group is -1"):
        world.sampler.sample(5, UNKNOWN)


def test_diversity_counts_distinct_trajectories_and_copies(world: World) -> None:
    def made(*rows: list[int]) -> Trajectories:
        offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows])))
        return Trajectories(
            np.concatenate(rows).astype(np.int32), offsets, np.zeros((len(rows), 4))
        )

    training = made([7, 8, 9], [8, 9], [7, 8, 9, 9])
    found = diversity(made([7, 8, 9], [7, 8, 9], [9, 8], [8]), training, made([8, 9], [9, 9], [9]))
    assert found == {
        "n": 3,
        "distinct": 2 / 3,
        "copies": 2 / 3,
        "held_out": {"n": 3, "distinct": 1.0, "copies": 1 / 3},
    }
    whole = diversity(made([7, 8, 9], [7, 8, 9], [9, 8], [8]), training)
    assert whole == {"n": 4, "distinct": 0.75, "copies": 0.5}
    samples = world.sampler.sample(100, SIX).trajectories
    real = [Trajectories.of(world.dataset, world.dataset.split(name)) for name in ("train", "test")]
    assert 0 < diversity(samples, *real)["distinct"] <= 1


def test_a_pool_has_the_homes_of_its_group(world: World) -> None:
    """Homes of the first row alone: every sample of the pool, and of the sampler, has them."""
    residence = np.zeros((len(world.evidence.anchors), len(world.evidence.groups)))
    residence[0, SIX] = 1
    residence[1, :SIX] = 1
    residence[1, SIX + 1 :] = 1
    moments = replace(world.evidence.moments, residence=residence)
    calibration = fit_calibration(world.model, moments, CalibrationConfig(pool=64))
    sampler = CalibratedSampler.of(world.model, calibration, moments.anchors, residence)
    for group, row in ((SIX, 0), (0, 1)):
        made = sampler.sample(5, group).trajectories.anchors
        assert np.array_equal(made, np.tile(moments.anchors[row], (5, 1)), equal_nan=True)
    assert calibration.population[SIX].before != calibration.population[0].before


def test_a_group_of_a_later_draw_is_still_a_sample_of_that_group(
    world: World, grouped: tuple[Generator, Calibration]
) -> None:
    """With equal tilts in both draws, the draw changes nothing at given anchors."""
    model, calibration = grouped
    twice = replace(
        calibration,
        population=2 * calibration.population,
        fixed_anchors=2 * calibration.fixed_anchors,
    )
    one, two = (
        CalibratedSampler.of(model, each, world.evidence.anchors) for each in (calibration, twice)
    )
    size = len(calibration.groups)
    groups = np.array([0, SIX, UNKNOWN, size - 1])
    later = np.where(groups == UNKNOWN, UNKNOWN, groups + size)
    anchors = world.evidence.anchors[:4]
    expected = one.sample_at_anchors(groups, anchors, 3)
    assert same(two.sample_at_anchors(later, anchors, 3), expected)
    # Of the population, draws have candidates of their own, with the group's acceptance.
    drawn = [two.sample(200, SIX + draw * size, 3) for draw in (0, 1)]
    assert same(drawn[0].trajectories, one.sample(200, SIX, 3).trajectories)
    assert not same(drawn[0].trajectories, drawn[1].trajectories)
    gaps = [distance(world, each.trajectories, SIX) for each in drawn]
    assert gaps[1] == pytest.approx(gaps[0], rel=0.5)
