"""Weights of training trajectories by group, and a fit on them that reads no labels."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from bench import survey
from mobatlas import MobatlasError, TrajectoryDataset, build_regions, prepare
from mobatlas.config import build
from mobatlas.data.dataset import Trajectories
from mobatlas.data.types import Floats
from mobatlas.io.manifest import MANIFEST
from mobatlas.io.output import new_folder
from mobatlas.regions.build import RegionsOptions
from mobatlas.supervision.evidence import Evidence, gather_evidence, tilt_to_mean
from mobatlas.supervision.tilt import (
    GroupTilts,
    TiltConfig,
    fit_group_tilts,
    fit_tilt,
    fit_weighted,
    tilted_draw,
)
from mobatlas.training.checkpoints import WEIGHTS
from mobatlas.training.loop import Execution, Trainer
from tests.tiny import fresh, small_city, with_other_labels

DIARY = survey.DIARY | {"vocabulary_size": 20}
GROUPS = ("<30, M", "<30, F", ">50, M", ">50, F")


@dataclass(frozen=True)
class World:
    """A city, its groups as regions, and its districts as regions."""

    dataset: TrajectoryDataset
    groups: Path
    districts: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("city")
    dataset = small_city(root, users=600)
    build_regions(
        dataset.path,
        root / "groups",
        RegionsOptions(partition="demogroups", features=("poi", "category")),
    )
    build_regions(
        dataset.path,
        root / "districts",
        RegionsOptions(by="home_district", features=("category", "hour")),
    )
    return World(dataset, root / "groups", root / "districts")


@pytest.fixture(scope="module")
def evidence(world: World) -> Evidence:
    return gather_evidence(world.dataset, world.groups)


@pytest.fixture(scope="module")
def tilts(world: World, evidence: Evidence) -> GroupTilts:
    return fit_group_tilts(evidence, world.dataset)


def remade(source: Path, out: Path, name: str, change: Callable[[pa.Table], pa.Table]) -> Path:
    """A REGIONS folder with one changed table and a valid manifest."""
    manifest = json.loads((source / MANIFEST).read_text())
    with new_folder(out, manifest["kind"]) as folder:
        shutil.copytree(
            source, folder.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST)
        )
        folder.details |= manifest["details"]
        pq.write_table(change(pq.read_table(source / name)), folder.path / name)
    return out


def redetailed(source: Path, out: Path, **details: Any) -> Path:
    """A REGIONS folder with changed details in its manifest."""
    shutil.copytree(source, out)
    manifest = json.loads((out / MANIFEST).read_text())
    manifest["details"] |= details
    (out / MANIFEST).write_text(json.dumps(manifest))
    return out


def with_column(name: str, change: Callable[[pd.DataFrame], Any]) -> Callable[[pa.Table], pa.Table]:
    def apply(table: pa.Table) -> pa.Table:
        values = pa.array(np.asarray(change(table.to_pandas()), dtype=np.float64))
        return table.set_column(table.schema.get_field_index(name), name, values)

    return apply


@dataclass(frozen=True)
class Example2:
    """P(x|d) ~ P(x) prod_t delta(x_t, d) over sequences of 2-4 of 5 places, none twice in a row."""

    sequences: tuple[tuple[int, ...], ...]
    counts: Floats  # (sequences, places)
    base: Floats  # P(x) (sequences,)
    factors: Floats  # log delta (groups, places)

    @classmethod
    def make(cls) -> Example2:
        rng = np.random.default_rng(4)
        every = itertools.chain.from_iterable(
            itertools.product(range(5), repeat=length) for length in (2, 3, 4)
        )
        kept = tuple(x for x in every if all(a != b for a, b in itertools.pairwise(x)))
        counts = np.array([np.bincount(x, minlength=5) for x in kept], dtype=np.float64)
        return cls(
            kept,
            counts,
            rng.dirichlet(np.full(len(kept), 0.8)),
            rng.normal(0, 0.5, (len(GROUPS), 5)),
        )

    def of(self, group: int) -> Floats:
        weights = self.base * np.exp(self.counts @ self.factors[group])
        return np.asarray(weights / weights.sum())


def test_example_2_is_recovered_exactly_from_its_means() -> None:
    """The tilt of P(x) to the means of P(x|d) is P(x|d)."""
    world = Example2.make()
    for group in range(len(GROUPS)):
        target = world.counts.T @ world.of(group)
        tilt = fit_tilt(sparse.csr_array(world.counts), target, ridge=0, prior=world.base)
        assert tilt.unmet == pytest.approx(np.zeros(5), abs=1e-8)
        assert tilt.weights == pytest.approx(world.of(group), abs=1e-8)
        assert tilt.coefficients == pytest.approx(world.factors[group], abs=1e-5)


def test_example_2_is_recovered_from_sampled_people_within_sampling_error(tmp_path: Path) -> None:
    world = Example2.make()
    people = 5_000
    drawn = np.random.default_rng(0).choice(len(world.base), people, p=world.base)
    rows = [
        (
            f"u{person}",
            f"p{place}",
            40 + place / 100,
            10.0,
            pd.Timestamp("2024-01-01") + pd.Timedelta(hours=6 + 2 * at),
        )
        for person, number in enumerate(drawn.tolist())
        for at, place in enumerate(world.sequences[number])
    ]
    (tmp_path / "source").mkdir()
    visits = pd.DataFrame(rows, columns=["user_id", "poi_id", "lat", "lon", "arrival"])
    visits.to_parquet(tmp_path / "source" / "visits.parquet", index=False)
    prepare(tmp_path / "source", tmp_path / "dataset", format="plain", values=DIARY)
    dataset = TrajectoryDataset.open(tmp_path / "dataset")
    truth = np.stack(
        [world.counts.T @ world.of(group) for group in range(len(GROUPS))]
    )  # (groups, places)
    names = [f"poi:p{place}" for place in range(5)]
    regions = [f"r{group}" for group in range(len(GROUPS))]
    composition = {"region": regions, "group": GROUPS, "count": 1_000}
    pd.DataFrame(composition).to_csv(tmp_path / "p.csv", index=False)
    aggregates = {
        "region": np.repeat(regions, 5),
        "feature": names * len(GROUPS),
        "value": truth.ravel(),
        "n": 1_000,
    }
    pd.DataFrame(aggregates).to_csv(tmp_path / "v.csv", index=False)
    build_regions(
        dataset.path,
        tmp_path / "r",
        RegionsOptions(composition=tmp_path / "p.csv", aggregates=tmp_path / "v.csv"),
    )
    found = gather_evidence(
        dataset, tmp_path / "r", visits=False
    )  # here a group does spread its visits otherwise
    assert found.groups.names == GROUPS and found.region is None
    exact = replace(found, recovery=replace(found.recovery, means=truth, targets=None))
    tilts = fit_group_tilts(exact, dataset, TiltConfig(ridge=0))
    place = {tuple(f"p{token}" for token in x): number for number, x in enumerate(world.sequences)}
    poi = dataset.vocabulary.poi_ids
    which = [
        place[tuple(poi[token] for token in dataset.trajectory(index))]
        for index in tilts.indices.tolist()
    ]
    for group in range(len(GROUPS)):
        reached = np.bincount(
            which, weights=tilts.weights[group], minlength=len(world.base)
        )  # (sequences,)
        error = world.of(group) / np.sqrt(
            len(which) * world.base
        )  # standard error of the weight of each sequence
        z = (reached - world.of(group)) / error
        assert np.abs(reached - world.of(group)).sum() < 1.15 * np.sqrt(2 / np.pi) * error.sum()
        assert np.mean(z**2) < 1.3
        assert tilts.tilts[group].coefficients == pytest.approx(world.factors[group], abs=0.12)


def test_weights_are_distributions_that_reach_the_recovered_means(
    world: World, evidence: Evidence, tilts: GroupTilts
) -> None:
    phi = evidence.moments.phi.counts(Trajectories.of(world.dataset, tilts.indices))
    assert tilts.weights.shape == (8, len(world.dataset.split("train")))
    assert tilts.weights.sum(1) == pytest.approx(np.ones(8)) and (tilts.weights >= 0).all()
    assert tilts.weights @ phi == pytest.approx(evidence.moments.means - tilts.unmet)
    assert all(tilt.converged for tilt in tilts.tilts)
    assert all(tilt.effective_sample_size < len(tilts.indices) for tilt in tilts.tilts)


def test_the_mean_of_the_base_weights_is_the_population_mean(
    world: World, evidence: Evidence, tilts: GroupTilts
) -> None:
    """People differ in their number of windows, and V is a mean over people."""
    assert len(np.unique(tilts.base)) > 1
    phi = evidence.phi.counts(Trajectories.of(world.dataset, tilts.indices))
    assert phi.T @ tilts.base == pytest.approx(evidence.recovery.baseline, rel=1e-12)
    everybody = np.tile(phi.T @ tilts.base, (8, 1))
    recovery = replace(evidence.recovery, means=everybody, targets=None)
    level = replace(evidence, recovery=recovery, visits=None)
    found = fit_group_tilts(level, world.dataset).weights
    assert found == pytest.approx(np.tile(tilts.base, (8, 1)), rel=1e-6)


def test_membership_under_demogroups_leaves_no_weight_outside_the_region(
    world: World, evidence: Evidence, caplog: pytest.LogCaptureFixture
) -> None:
    assert evidence.region is not None
    tilts = fit_group_tilts(evidence, world.dataset, membership=True)
    region = evidence.region[np.searchsorted(evidence.people, world.dataset.person[tilts.indices])]
    for group, weights in enumerate(tilts.weights):
        assert not weights[region != group].any() and weights[region == group].all()
    assert "can reveal the label itself" in caplog.text
    assert tilts.report(evidence)["membership"] is True


def test_people_without_a_region_have_the_shares_of_the_population(
    world: World, evidence: Evidence
) -> None:
    assert evidence.region is not None
    unknown = replace(
        evidence, region=np.where(np.arange(len(evidence.people)) == 3, -1, evidence.region)
    )
    assert unknown.membership()[3] == pytest.approx(np.delete(evidence.membership(), 3, 0).mean(0))
    assert np.delete(unknown.membership(), 3, 0) == pytest.approx(
        np.delete(evidence.membership(), 3, 0)
    )


def test_draws_are_a_function_of_seed_and_step(tilts: GroupTilts) -> None:
    draw = tilted_draw(tilts, 3)
    again = tilted_draw(tilts, 3)
    other = tilted_draw(tilts, 4)
    one = draw(64, 7)
    draw(64, 8)
    assert np.array_equal(one.indices, again(64, 7).indices) and np.array_equal(
        one.groups, again(64, 7).groups
    )
    assert not np.array_equal(one.indices, draw(64, 8).indices)
    assert not np.array_equal(one.indices, other(64, 7).indices)
    assert np.array_equal(np.bincount(one.groups), np.full(8, 8))
    assert (
        len(np.unique(one.groups[:16])) > 4
    )  # not group by group: a stage may assign noise levels by position


def test_draws_follow_the_weights(tilts: GroupTilts) -> None:
    draw = tilted_draw(tilts, 0)
    steps = 400
    size = 256
    drawn = [draw(size, step) for step in range(steps)]
    indices, groups = (
        np.concatenate([getattr(each, name) for each in drawn]) for name in ("indices", "groups")
    )
    place = np.searchsorted(tilts.indices, indices)
    for group, weights in enumerate(tilts.weights):
        n = int((groups == group).sum())
        assert n == steps * size / 8
        counts = np.bincount(place[groups == group], minlength=len(weights))
        assert not counts[weights == 0].any()
        z = (counts - n * weights) / np.sqrt(np.maximum(n * weights, 1e-9))
        assert (
            np.mean(z[n * weights > 1] ** 2) < 1.1
        )  # stratified: less than the 1 of independent draws


def test_several_maps_are_read(world: World, evidence: Evidence) -> None:
    assert [each.name for each in evidence.phi.maps] == ["poi", "category"]
    assert evidence.aggregate_moments.distance(evidence.means[0], evidence.means[0]) == {
        "scaled": 0.0,
        "js": 0.0,
    }
    assert evidence.region is not None and (evidence.region >= 0).all()


def test_tilts_keep_the_spread_of_the_number_of_visits(
    world: World, evidence: Evidence, tilts: GroupTilts
) -> None:
    """Tilts to counts alone prefer trajectories with very many or very few visits."""
    number = world.dataset.lengths[tilts.indices].astype(np.float64)

    def spread(weights: Floats) -> Floats:
        mean = weights @ number
        return np.asarray(np.sqrt(weights @ number**2 - mean**2))

    free = fit_group_tilts(
        gather_evidence(world.dataset, world.groups, visits=False), world.dataset
    )
    usual = spread(tilts.base)
    assert np.mean(np.abs(spread(tilts.weights) - usual)) < 0.5 * np.mean(
        np.abs(spread(free.weights) - usual)
    )
    assert evidence.visits is not None
    is_place = np.array([name.startswith("poi:") for name in evidence.phi.features])
    visits = evidence.means[:, is_place].sum(1)  # (groups,)
    rank = evidence.visits.means @ np.arange(len(evidence.visits.baseline))
    assert (np.argsort(rank) == np.argsort(visits)).all(), (
        "who makes more visits has them in later bins"
    )
    assert evidence.visits.means.sum(1) == pytest.approx(np.ones(8))


@given(st.floats(0.6, 1.5), st.integers(0, 5))
def test_the_number_of_visits_is_tilted_to_the_target_mean(level: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    number = rng.poisson(8, 400).astype(np.float64)
    weights = rng.dirichlet(np.ones(400))
    found = tilt_to_mean(weights, number, level)
    assert found.sum() == pytest.approx(1) and found @ number == pytest.approx(
        level * (weights @ number)
    )
    ratio = np.log(found / weights)
    slope = np.polyfit(number, ratio, 1)
    assert np.polyval(slope, number) == pytest.approx(
        ratio, abs=1e-6
    )  # an exponential tilt of the number alone


def test_an_unreachable_mean_number_of_visits_takes_the_steepest_tilt() -> None:
    number = np.array([1.0, 2.0, 3.0])
    assert tilt_to_mean(np.full(3, 1 / 3), number, 50.0) @ number > 2.8
    assert tilt_to_mean(np.full(3, 1 / 3), number, 0.0) @ number < 1.2


def test_moments_without_times_have_the_other_features(world: World) -> None:
    both = gather_evidence(world.dataset, world.districts, visits=False)
    held = gather_evidence(world.dataset, world.districts, visits=False, groups_explain=1e-6)
    assert (
        np.abs(held.means - held.recovery.baseline).max()
        < 0.1 * np.abs(both.means - both.recovery.baseline).max()
    )
    one = both.moments.without_times(world.dataset.vocabulary)
    assert {name.partition(":")[0] for name in one.phi.features} == {"category"}
    real = Trajectories.of(world.dataset, world.dataset.split("train")[:50])
    assert np.array_equal(
        one.phi.counts(real).toarray(), both.phi.counts(real).toarray()[:, : len(one.phi.features)]
    )
    assert one.means == pytest.approx(both.means[:, : len(one.phi.features)])
    assert one.scale == pytest.approx(both.aggregate_moments.scale[: len(one.phi.features)])
    hours = replace(both.phi, maps=tuple(each for each in both.phi.maps if each.name == "hour"))
    with pytest.raises(MobatlasError, match="'hour' is the only feature"):
        replace(both.moments, phi=hours).without_times(world.dataset.vocabulary)


def test_the_report_is_json_with_the_uncertainty_of_each_group(
    evidence: Evidence, tilts: GroupTilts
) -> None:
    report = json.loads(json.dumps(tilts.report(evidence), allow_nan=False))
    row = report["groups"]["30-40, F"]
    assert row["information"] == pytest.approx(evidence.information()["30-40, F"], abs=1e-3)
    assert (
        0 < row["relative_size"] < 1
        and row["unmet"]["bin"] in evidence.phi.features
        and row["converged"]
    )


@pytest.mark.parametrize("change", ["shuffled", "deleted"])
def test_labels_change_nothing_after_the_regions_were_built(
    world: World, tmp_path: Path, change: str
) -> None:
    copy = with_other_labels(world.dataset, tmp_path / "copy", change)
    weights = []
    drawn = []
    saved = []
    for number, dataset in enumerate((world.dataset, TrajectoryDataset.open(copy))):
        evidence = gather_evidence(dataset, world.groups)
        tilts = fit_group_tilts(evidence, dataset)
        weights.append(tilts.weights.tobytes())
        drawn.append(tilted_draw(tilts, 1)(128, 3).indices.tobytes())
        model = fresh("latent-diffusion", dataset, weighted_fit={"steps": 2, "warmup": 1})
        trainer = Trainer(None, Execution(quiet=True))
        fitted, _ = fit_weighted(model, dataset, evidence, tilts, trainer)
        (tmp_path / f"{number}").mkdir()
        fitted.save(tmp_path / f"{number}")
        saved.append((tmp_path / f"{number}" / WEIGHTS).read_bytes())
    assert weights[0] == weights[1] and drawn[0] == drawn[1] and saved[0] == saved[1]


def test_limits_of_the_regions_are_reported(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few = world.groups
    for name in ("composition.parquet", "aggregates.parquet"):
        few = remade(
            few,
            tmp_path / name,
            name,
            lambda t: t.filter(pc.is_in(t["region"], pa.array(["R1", "R2"]))),
        )
    mixed = with_column("share", lambda rows: np.full(len(rows), 1 / 8))
    gather_evidence(world.dataset, remade(few, tmp_path / "mixed", "composition.parquet", mixed))
    assert "2 regions for 8 groups" in caplog.text
    assert "not identified by these regions" in caplog.text
    assert "the evidence says little about" in caplog.text


def test_a_feature_that_every_region_suppresses_is_left_out(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hide = with_column("value", lambda rows: rows["value"].mask(rows["feature"] == "poi:HOME"))
    found = gather_evidence(
        world.dataset, remade(world.groups, tmp_path / "r", "aggregates.parquet", hide)
    )
    assert (
        "poi:HOME" not in found.phi.features
        and "1 features are suppressed in every region" in caplog.text
    )
    assert found.means.shape[1] == len(found.phi.features)


def test_regions_of_another_dataset_pass_if_they_count_the_same_places(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = redetailed(world.groups, tmp_path / "r", dataset={"content_hash": "another"})
    assert np.array_equal(
        gather_evidence(world.dataset, other).means,
        gather_evidence(world.dataset, world.groups).means,
    )
    assert "belong to another dataset" in caplog.text
    fewer = redetailed(world.districts, tmp_path / "d", dataset={"content_hash": "another"})
    for name in ("aggregates", "spread"):
        without = tmp_path / f"fewer-{name}"
        fewer = remade(
            fewer,
            without,
            f"{name}.parquet",
            lambda t: t.filter(pc.not_equal(t["feature"], "hour:23")),
        )
    with pytest.raises(MobatlasError, match="with other places"):
        gather_evidence(world.dataset, fewer)


def test_regions_that_cannot_be_used_are_refused_in_a_sentence(
    world: World, tmp_path: Path
) -> None:
    def broken(name: str, table: str, column: str, change: Callable[[pd.DataFrame], Any]) -> Path:
        return remade(world.groups, tmp_path / name, table, with_column(column, change))

    zero = broken("zero", "aggregates.parquet", "value", lambda rows: np.zeros(len(rows)))
    with pytest.raises(MobatlasError, match="zero: every value of the aggregates is zero"):
        gather_evidence(world.dataset, zero)
    hidden = broken(
        "hidden", "aggregates.parquet", "value", lambda rows: np.full(len(rows), np.nan)
    )
    with pytest.raises(MobatlasError, match="hidden: every value of the aggregates is suppressed"):
        gather_evidence(world.dataset, hidden)
    absent = broken(
        "absent",
        "composition.parquet",
        "share",
        lambda rows: np.where(rows["group"] == "30-40, F", 0, rows["share"]),
    )
    with pytest.raises(MobatlasError, match="no region has people of group '30-40, F'"):
        gather_evidence(world.dataset, absent)
    masked = redetailed(world.groups, tmp_path / "masked", mask=["HOME"])
    with pytest.raises(
        MobatlasError, match=r"another dataset .*feature 'poi:HOME' is not in the vocabulary"
    ):
        gather_evidence(world.dataset, masked)
    with pytest.raises(MobatlasError, match="no such regions folder"):
        gather_evidence(world.dataset, tmp_path / "nowhere")
    with pytest.raises(MobatlasError, match="is a dataset folder, not a regions folder"):
        gather_evidence(world.dataset, world.dataset.path)


def test_bad_options_are_refused_in_a_sentence(world: World, evidence: Evidence) -> None:
    with pytest.raises(MobatlasError, match="'ridge' is wrong: input should be greater than"):
        build(TiltConfig, {"ridge": -1}, "tilt")
    with pytest.raises(MobatlasError, match=r"--membership: .* does not assign people to regions"):
        fit_group_tilts(replace(evidence, region=None), world.dataset, membership=True)
    with pytest.raises(
        MobatlasError, match="no training person lives in a region with people of group '<30, M'"
    ):
        lost = replace(evidence, region=np.ones(len(evidence.people), dtype=np.int64))
        fit_group_tilts(lost, world.dataset, membership=True)
