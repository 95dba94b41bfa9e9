"""Samples that are spread over posterior draws show the error bars of the estimated means."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from mobatlas import (
    Atlas,
    MobatlasError,
    RegionsOptions,
    SampleRequest,
    SuperviseOptions,
    Trajectories,
    TrajectoryDataset,
    build_feature,
    build_regions,
    generate,
    load_model,
    load_regions,
    posterior_intervals,
    prepare,
    read_samples,
    recover,
    supervise,
)
from mobatlas.config import CityConfig
from mobatlas.data.city import write_city_folder
from mobatlas.data.samples import Samples
from mobatlas.data.types import ANCHORS, Floats
from mobatlas.generators.store import save_model
from mobatlas.io.manifest import METADATA
from mobatlas.io.output import new_folder
from mobatlas.regions.types import Families, Posterior
from mobatlas.supervision.calibration import PIECE
from mobatlas.supervision.store import load_moments, load_posterior
from mobatlas.training.loop import Execution
from tests.outcomes import refused, run
from tests.tiny import fitted, with_other_labels
from tests.written import generate_with

GROUP = "30-40, F"
COARSE = SuperviseOptions("resample", values={"calibration": {"pool": 256, "candidates": 4}})
AVERAGE = "For all other behaviour samples show the average of the population."


@dataclass(frozen=True)
class World:
    """A city, a generator that copies training trajectories, and models of groups."""

    root: Path
    dataset: TrajectoryDataset

    @property
    def model(self) -> Path:
        """Phase 1: a pool of training trajectories."""
        out = self.root / "model"
        if not out.exists():
            with new_folder(out, "model") as folder:
                external = fitted("external", self.dataset)
                save_model(folder.path, external, "external", self.dataset)
                folder.details["dataset"] = {
                    "path": str(self.dataset.path),
                    "hash": self.dataset.manifest.content_hash,
                }
        return out

    def regions(self, name: str) -> Path:
        """A partition with categories, or districts with transitions and labelled people."""
        out = self.root / f"regions-{name}"
        if not out.exists():
            options = RegionsOptions(partition=name, features=("category",))
            if name == "districts":
                options = RegionsOptions(
                    by="home_district", features=("category", "poi"), labelled_sample=80
                )
            build_regions(self.dataset.path, out, options)
        return out

    def supervised(self, name: str) -> Path:
        """The model of some regions."""
        return self._supervise(name, f"model-{name}", SuperviseOptions("resample"))

    @property
    def coarse(self) -> Path:
        """A model whose calibrations take less than a second."""
        return self._supervise("hot16", "coarse", COARSE)

    def _supervise(self, regions: str, name: str, options: SuperviseOptions) -> Path:
        out = self.root / name
        if not out.exists():
            quiet = Execution(quiet=True)
            supervise(self.model, out, self.regions(regions), options, execution=quiet)
        return out


def make_world(root: Path, seed: int) -> World:
    city = CityConfig(users=500, pois=60, districts=6, days=15)
    write_city_folder(root / "city", city, seed=seed)
    prepare(root / "city", root / "dataset", preset="small")
    return World(root, TrajectoryDataset.open(root / "dataset"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("posterior"), seed=1)


def true_means(dataset: TrajectoryDataset, feature: str) -> tuple[Floats, Floats]:
    """Means over the people of each group (groups, bins), and the number of visits behind them."""
    groups = dataset.person_groups()
    assert dataset.groups is not None
    everyone = Trajectories.of(dataset, np.arange(len(dataset)))
    counts = build_feature(feature, dataset.vocabulary).counts(everyone).toarray()
    table = pd.DataFrame(counts).groupby(dataset.person).mean()
    means = table.groupby(groups[table.index]).mean()
    assert means.index.tolist() == list(range(len(dataset.groups)))
    visits = pd.DataFrame(counts).groupby(groups[dataset.person]).sum()
    return means.to_numpy(), visits.to_numpy()


def naive_intervals(samples: Samples, feature: Any) -> tuple[Floats, Floats]:
    """The textbook: mean plus and minus 1.645 standard errors of independent samples."""
    ends = []
    assert samples.groups is not None
    for group in np.unique(samples.groups):
        counts = feature.counts(samples.of_group(int(group))).toarray()
        reach = 1.645 * counts.std(0, ddof=1) / np.sqrt(len(counts))
        ends.append((counts.mean(0) - reach, counts.mean(0) + reach))
    low, high = zip(*ends, strict=True)
    return np.array(low), np.array(high)


@pytest.mark.parametrize("name", ["hot16", "districts"])
def test_intervals_from_posterior_samples_cover_the_means_of_groups_and_naive_ones_do_not(
    world: World, tmp_path: Path, name: str
) -> None:
    model = world.supervised(name)
    every: dict[str, Any] = {"group": "all", "seed": 1}
    generate(model, tmp_path / "plain", 1_000, SampleRequest(calibrate=True, **every))
    generate(model, tmp_path / "drawn", 1_000, SampleRequest(posterior=True, **every))
    plain, drawn = (
        read_samples(tmp_path / each, world.dataset.vocabulary, world.dataset.groups)
        for each in ("plain", "drawn")
    )
    covered, naive = [], []
    for each in load_regions(world.regions(name)).details["features"]:
        truth, visits = true_means(world.dataset, each)
        frequent = visits >= 20
        feature = build_feature(each, world.dataset.vocabulary)
        intervals = posterior_intervals(drawn, feature, level=0.9)
        assert (intervals.low <= intervals.mean).all() and (intervals.mean <= intervals.high).all()
        low, high = naive_intervals(plain, feature)
        covered.append(((intervals.low <= truth) & (truth <= intervals.high))[frequent])
        naive.append(((low <= truth) & (truth <= high))[frequent])
    assert len(np.concatenate(covered)) >= 40
    assert np.concatenate(covered).mean() >= 0.85
    assert np.concatenate(naive).mean() <= np.concatenate(covered).mean() - 0.25


def test_posterior_intervals_are_not_much_wider_than_those_of_the_recovery(
    world: World, tmp_path: Path
) -> None:
    generate(
        world.supervised("hot16"),
        tmp_path / "drawn",
        2_000,
        SampleRequest(group="all", posterior=True, seed=2),
    )
    feature = build_feature("category", world.dataset.vocabulary)
    samples = read_samples(tmp_path / "drawn", world.dataset.vocabulary, world.dataset.groups)
    intervals = posterior_intervals(samples, feature)
    regions = load_regions(world.regions("hot16"))
    recovery = recover(regions, parents=world.dataset.vocabulary.parents, quiet=True)
    low, high = recovery.interval(0.9)
    rows = [list(feature.bins).index(each) for each in recovery.features]
    frequent = recovery.means > 0.1
    width = np.log(intervals.high[:, rows][frequent] / intervals.low[:, rows][frequent])
    expected = 2 * 1.645 * recovery.log_sd[frequent]
    assert 0.8 < np.median(width / expected) < 1.4
    inside = (low <= intervals.mean[:, rows]) & (intervals.mean[:, rows] <= high)
    assert inside[frequent].mean() > 0.9


def test_samples_take_turns_in_draws_and_their_number_changes_none(
    world: World, tmp_path: Path
) -> None:
    model = world.coarse
    options: dict[str, Any] = {"group": [GROUP, "<30, M"], "posterior": True, "draws": 12}
    generate(model, tmp_path / "many", PIECE + 50, SampleRequest(**options))
    generate(model, tmp_path / "few", 100, SampleRequest(**options))
    many, few = (pd.read_parquet(tmp_path / name) for name in ("many", "few"))
    assert pq.read_schema(tmp_path / "few").field("draw").type == "int32"
    first = few[few.trajectory < 100]
    pd.testing.assert_frame_equal(first, many.iloc[: len(first)])
    number = few.drop_duplicates("trajectory").trajectory.to_numpy() % 100
    assert few.drop_duplicates("trajectory").draw.to_numpy().tolist() == (number % 12).tolist()


def test_draws_differ_as_their_means_do(world: World, tmp_path: Path) -> None:
    """The mean of the samples of a draw follows the mean that was drawn."""
    model = world.supervised("hot16")
    request = SampleRequest(group=GROUP, posterior=True, draws=10, seed=4)
    generate(model, tmp_path / "drawn", 4_000, request)
    samples = read_samples(tmp_path / "drawn", world.dataset.vocabulary)
    loaded = load_model(model)
    moments = load_moments(loaded)
    posterior = load_posterior(loaded)
    assert moments is not None and posterior is not None and samples.draws is not None
    group = moments.groups.index(GROUP)
    means = posterior.draws(10, seed=4)[:, group]  # (draws, features)
    phi = moments.phi.counts(samples.trajectories)[:, : means.shape[1]]
    reached = np.array([phi[samples.draws == draw].mean(0) for draw in range(10)])
    scale = np.sqrt(np.maximum(means.mean(0), 0.05))
    wanted = ((means - means.mean(0)) / scale).ravel()
    shown = ((reached - reached.mean(0)) / scale).ravel()
    assert 0.7 < (wanted @ shown) / (wanted @ wanted) < 1.2


@pytest.fixture
def homes(world: World, tmp_path: Path) -> Path:
    table = pd.DataFrame(world.dataset.anchors[:40], columns=list(ANCHORS))
    table.assign(group=[GROUP, "<30, M"] * 20).to_csv(tmp_path / "homes.csv", index=False)
    return tmp_path / "homes.csv"


def test_shards_and_processes_write_the_same_samples(
    world: World, homes: Path, tmp_path: Path
) -> None:
    model = world.coarse
    kinds: dict[str, dict[str, Any]] = {
        "population": {"n": PIECE + 300, "group": GROUP},
        "anchors": {"n": 520, "anchors": homes},
        "region": {"n": 520, "region": "R3"},
    }
    for name, options in kinds.items():
        folder = tmp_path / name
        folder.mkdir()
        common = {**options, "posterior": True, "draws": 10, "seed": 3}
        generate_with(model, folder / "whole", **common)
        if name == "population":
            generate_with(model, folder / "two", devices=2, **common)
            assert (folder / "whole").read_bytes() == (folder / "two").read_bytes()
        for number in (1, 2):
            generate_with(model, folder / f"{number}", shard=f"{number}/2", **common)
        whole, *parts = (pd.read_parquet(folder / each) for each in ("whole", "1", "2"))
        assert all(len(part) for part in parts)
        pd.testing.assert_frame_equal(pd.concat(parts, ignore_index=True), whole)
        assert whole.draw.nunique() == 10


def test_the_file_says_what_the_evidence_informs(world: World, tmp_path: Path) -> None:
    model = world.supervised("districts")
    command = ("generate", model, "--n", 40, "--group", GROUP, "--out", tmp_path / "a.parquet")
    done = run(*command, "--posterior")
    assert done.code == 0 and AVERAGE in " ".join(done.out.split())
    facts = json.loads(pq.read_schema(tmp_path / "a.parquet").metadata[METADATA])
    assert facts["posterior"]["draws"] == 20 and facts["posterior"]["joint"] is True
    assert set(facts["posterior"]["spread"]) >= {"category", "poi"}
    regions = load_regions(world.regions("districts"))
    recovery = recover(regions, parents=world.dataset.vocabulary.parents, quiet=True)
    # By hand: 1 - assumption, weighted by the visits of all people.
    weight = recovery.shares[:, None] * recovery.means
    for name in ("category", "poi"):
        own = [number for number, each in enumerate(recovery.features) if each.startswith(name)]
        left = (weight * recovery.sources["assumption"])[:, own].sum() / weight[:, own].sum()
        assert facts["informed"]["evidence"][name] == pytest.approx(1 - left, abs=1e-3)
        assert (name in facts["informed"]["features"]) == (left <= 0.5)
    assert facts["informed"]["others"].endswith(AVERAGE)
    everyone = generate(model, tmp_path / "b.parquet", 20)
    assert everyone.informed is None, "samples of the population have no group to be informed of"


def test_python_has_the_draws_and_the_metadata_too(world: World) -> None:
    table = Atlas.open(world.coarse).sample(40, GROUP, posterior=True)
    facts = json.loads(table.schema.metadata[METADATA])
    assert facts["informed"]["evidence"].keys() == {"category"}
    assert sorted(set(table["draw"].to_pylist())) == list(range(20))


def test_without_a_posterior_there_are_no_draws(world: World, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out.parquet")
    drawn = ("--n", 100, "--posterior", *out)
    assert "needs groups; pass --group" in refused("generate", world.model, *drawn)
    model = world.coarse
    few = ("generate", model, "--group", GROUP, "--posterior", *out)
    assert "39 trajectories are too few for 20 draws; give --n 40" in refused(*few, "--n", 39)
    assert "--draws 4: give at least 10" in refused(*few, "--n", 100, "--draws", 4)
    strong = tmp_path / "strong"  # a calibration to labelled means has no error bars
    with new_folder(strong, "model") as folder:
        for file in model.iterdir():
            if file.name not in ("manifest.json", "group_means.parquet"):
                (folder.path / file.name).write_bytes(file.read_bytes())
        means = pq.read_table(model / "group_means.parquet")
        columns = ["group", "feature", "mean", "population"]
        pq.write_table(means.select(columns), folder.path / "group_means.parquet")
        manifest = load_model(model).manifest
        folder.details |= manifest.details
    sentence = refused("generate", strong, "--group", GROUP, *drawn)
    assert "has no posterior of group means" in sentence
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("change", ["shuffled", "deleted"])
def test_labels_do_not_change_posterior_samples(world: World, tmp_path: Path, change: str) -> None:
    """Labels may change or go once the regions are built."""
    dataset = with_other_labels(world.dataset, tmp_path / "dataset", change)
    regions = world.regions("districts")
    quiet = Execution(quiet=True)
    for name, source in (("first", world.dataset.path), ("changed", dataset)):
        supervise(
            world.model, tmp_path / f"m-{name}", regions, COARSE, dataset=source, execution=quiet
        )
        request = SampleRequest(group=GROUP, posterior=True)
        generate(tmp_path / f"m-{name}", tmp_path / name, 60, request, dataset=source)
    assert (tmp_path / "changed").read_bytes() == (tmp_path / "first").read_bytes()


# ---- draws


def covariances(seed: int, rows: int, scale: float) -> Floats:
    root = np.random.default_rng(seed).normal(size=(rows, 2, 2))
    return np.asarray(scale * root @ root.transpose(0, 2, 1))


def family_posterior() -> Posterior:
    """Two categories; the first has many small places, the second two."""
    features = ("category:a", "category:b", *(f"poi:{k}" for k in range(62)), "distance:near")
    parents = {f"poi:{k}": "category:a" if k < 60 else "category:b" for k in range(62)}
    shared = covariances(0, 2, 0.02)
    own = covariances(1, 62, 0.01)
    inherited = shared[[0] * 60 + [1] * 2]
    covariance = np.concatenate([shared, own + inherited, covariances(2, 1, 0.05)])
    medians = np.ones((2, 65))
    medians[:, 2:62] = 1 / 60
    medians[:, 62:64] = 0.5
    return Posterior(features, medians, covariance, Families.of(features, covariance, parents))


def test_draws_have_the_covariance_of_the_posterior_and_places_that_of_their_category() -> None:
    posterior = family_posterior()
    logs = np.log(posterior.draws(20_000, seed=1) / posterior.medians)  # (draws, groups, features)
    for feature in (0, 1, 5, 30, 62, 63, 64):
        found = np.cov(logs[:, :, feature].T)
        assert found == pytest.approx(posterior.log_covariance[feature], abs=2.5e-3)
    between = np.cov(logs[:, 0, 5], logs[:, 0, 0])[0, 1]
    assert between == pytest.approx(posterior.log_covariance[0, 0, 0], abs=2e-3)
    assert abs(np.cov(logs[:, 0, 5], logs[:, 0, 1])[0, 1]) < 2e-3


def test_draws_of_places_have_the_spread_of_their_intervals(world: World) -> None:
    """Also of a place that makes up most of its category."""
    regions = load_regions(world.regions("districts"))
    recovery = recover(regions, parents=world.dataset.vocabulary.parents, quiet=True)
    places = [k for k, name in enumerate(recovery.features) if name.startswith("poi:")]
    seen = recovery.means[:, places] > 0
    logs = np.log(recovery.draws(1_500, seed=3)[:, :, places][:, seen])
    assert logs.std(0) / recovery.log_sd[:, places][seen] == pytest.approx(1, abs=0.08)


def test_transitions_follow_the_categories_at_both_ends() -> None:
    """Without errors of their own, transitions from a category change in proportion to it."""
    names = ("a", "b>c")  # the separator is escaped in names of pairs
    written = ("a", r"b\>c")
    features = (
        *(f"category:{name}" for name in names),
        *(f"transitions:{first}>{second}" for first in written for second in written),
    )
    medians = np.array([[3.0, 1.0, 2.0, 0.5, 0.5, 0.4]])
    variances = np.array([[0.05], [0.05], [0.0], [0.0], [0.0], [0.0]])
    draws = Posterior(features, medians, variances).draws(30, seed=0)[:, 0]
    for category, pairs in ((0, [2, 3]), (1, [4, 5])):
        growth = draws[:, category] / medians[0, category]
        followed = draws[:, pairs].sum(1) / medians[0, pairs].sum()
        assert np.corrcoef(growth, followed)[0, 1] > 0.95


def test_more_draws_do_not_change_the_first_ones() -> None:
    posterior = family_posterior()
    assert np.array_equal(posterior.draws(3, seed=5), posterior.draws(9, seed=5)[:3])
    assert not np.array_equal(posterior.draws(3, seed=5), posterior.draws(3, seed=6))


# ---- intervals


def simulated(
    rng: np.random.Generator, draws: int, n: int, sd: float, noise: float
) -> tuple[Samples, Floats]:
    """Samples of one group whose draws have normal means with a standard deviation."""
    means = rng.normal(0, sd, draws)
    number = np.arange(draws * n) % draws
    values = means[number] + rng.normal(0, noise, draws * n)
    offsets = np.arange(draws * n + 1)
    trajectories = Trajectories(
        np.full(draws * n, 4, dtype=np.int32), offsets, np.zeros((draws * n, 4))
    )
    return Samples(Path("x"), trajectories, None, number), values


def known(values: Floats) -> Callable[[Trajectories], Floats]:
    """A statistic with these values."""
    return lambda _: values


@pytest.mark.parametrize("noise", [0.1, 1.0, 8.0])
def test_intervals_have_the_width_of_the_posterior_whatever_the_sampling_noise(
    noise: float,
) -> None:
    """Truth and draws come from one posterior, so that 90 % of intervals contain the truth."""
    rng = np.random.default_rng(0)
    covered = []
    widths = []
    for _ in range(400):
        samples, values = simulated(rng, 20, 40, 1.0, noise)
        truth = rng.normal()
        intervals = posterior_intervals(samples, known(values))
        covered.append(intervals.low[0, 0] <= truth <= intervals.high[0, 0])
        widths.append(intervals.high[0, 0] - intervals.low[0, 0])
    assert 0.86 <= np.mean(covered) <= 0.97
    # 2 x 1.645 standard deviations; W is 1.6 of the posterior variance with the most noise.
    assert 3.0 < np.mean(widths) < (4.2 if noise < 8 else 5.0)


def test_without_posterior_spread_intervals_show_little_more_than_sampling_noise() -> None:
    rng = np.random.default_rng(1)
    widths = []
    for _ in range(100):
        samples, values = simulated(rng, 20, 50, 0.0, 1.0)
        intervals = posterior_intervals(samples, known(values))
        widths.append(intervals.high[0, 0] - intervals.low[0, 0])
    expected = 2 * 1.645 / np.sqrt(20 * 50)
    assert 1.0 < np.mean(widths) / expected < 3.5


def test_a_share_of_the_spread_widens_the_intervals_of_its_feature_map_alone() -> None:
    rng = np.random.default_rng(2)
    samples, values = simulated(rng, 20, 50, 1.0, 0.1)

    class Map:
        name = "category"

        def counts(self, _: Trajectories) -> Floats:
            return values

    plain = posterior_intervals(samples, Map())
    halved = replace(samples, posterior={"spread": {"category": 0.5}})
    wide = posterior_intervals(halved, Map())
    assert (wide.high - wide.low) / (plain.high - plain.low) == pytest.approx(2, rel=0.02)
    other = posterior_intervals(halved, known(values))
    assert np.array_equal(other.high, plain.high)


def test_samples_without_draws_have_no_posterior_intervals(world: World, tmp_path: Path) -> None:
    request = SampleRequest(group=GROUP, calibrate=True)
    generate(world.coarse, tmp_path / "plain", 30, request)
    samples = read_samples(tmp_path / "plain", world.dataset.vocabulary)
    feature = build_feature("category", world.dataset.vocabulary)
    with pytest.raises(MobatlasError, match="has no column 'draw'"):
        posterior_intervals(samples, feature)
    few = replace(samples, draws=np.arange(len(samples.trajectories)) % 5)
    with pytest.raises(MobatlasError, match="at least 10 draws"):
        posterior_intervals(few, feature)
