"""The point process: probabilities of durations, order of visits in time, hours after training."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from mobatlas import TrajectoryDataset, build_regions, evaluate, generate, supervise
from mobatlas.cli import main
from mobatlas.config import build
from mobatlas.data.dataset import Trajectories
from mobatlas.data.samples import read_samples
from mobatlas.data.types import BOS, DAY, EOS, FIRST_POI, HOME, PAD, Vocabulary
from mobatlas.errors import MobatlasError
from mobatlas.features.divergences import jsd
from mobatlas.features.maps import build_feature
from mobatlas.generators.network_generator import SequenceGenerator
from mobatlas.generators.point_process import (
    Durations,
    PointProcess,
    PointProcessConfig,
    Spans,
    TimedTokenCodec,
    bin_starts,
)
from mobatlas.generators.protocol import UNKNOWN
from mobatlas.generators.vae import PRESETS, VariationalAutoencoder
from mobatlas.groups import DEFAULT_GROUPS
from mobatlas.pipeline.models import SuperviseOptions
from mobatlas.regions.build import RegionsOptions
from mobatlas.sampling.chunks import SampleRequest
from mobatlas.training.loop import Execution
from tests.networks import chance, stirred
from tests.test_autoregressive_supervised import VALUES
from tests.tiny import OPTIONS, fitted, fresh, small_city

NAME = "point-process"
DAYS = 3
GROUP = "30-40, F"
WINDOW = DAYS * DAY
BRIEF = {
    "steps": 4,
    "validate_every": 4,
    "validation_samples": 64,
    "validation_regions": 4,
}  # of finetuning
PARTS = ("log_probabilities", "starts", "remaining", "width")  # of spans, a row each


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_city(tmp_path_factory.mktemp("city"), users=200, pois=20)


@pytest.fixture(scope="module")
def model(dataset: TrajectoryDataset) -> SequenceGenerator:
    """After a little training."""
    return cast(
        SequenceGenerator,
        fitted(NAME, dataset, training=OPTIONS[NAME]["training"] | {"steps": 100}),
    )


def durations(*, until: bool, days: int = DAYS) -> Durations:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cast(Durations, stirred(Durations(8, FIRST_POI + 3, days, to_window_end=until)))


def spans(begins: int, *, until: bool, n: int = 1) -> Spans:
    """n equal spans that start `begins` seconds after the window, on a Wednesday."""
    hidden = torch.randn(1, 8, generator=chance(3))
    start = torch.tensor([2 * DAY])
    one = durations(until=until)(hidden, torch.tensor([HOME]), start + begins, start)
    rows = {name: getattr(one, name).expand(n, *getattr(one, name).shape[1:]) for name in PARTS}
    return replace(one, **rows)


# ---- how long


@pytest.mark.parametrize("days", [1, 3, 14])
def test_bins_are_in_order_and_none_is_longer_than_an_hour(days: int) -> None:
    edges = np.array([*bin_starts(days), days * DAY])
    assert (
        edges[:2].tolist() == [0, 1]
        and (np.diff(edges) > 0).all()
        and np.diff(edges).max() <= 3_600
    )


@pytest.mark.parametrize("until", [False, True])
@pytest.mark.parametrize("left", [1, 50, 5_000, 90_000])
def test_probabilities_of_the_remaining_seconds_sum_to_1(left: int, until: bool) -> None:
    found = spans(WINDOW - left, until=until, n=left + until)
    total = (-found.nats(torch.arange(left + until)).double()).exp().sum()
    assert float(total) == pytest.approx(1, abs=1e-4)


def test_durations_have_the_frequencies_of_their_probabilities() -> None:
    n = 20_000
    left = 7_200
    found = spans(WINDOW - left, until=True, n=n)
    drawn = found.draw(torch.rand(n, generator=chance(1)))
    assert int(drawn.min()) >= 0 and int(drawn.max()) == left
    one = spans(WINDOW - left, until=True, n=left + 1)
    expected = (-one.nats(torch.arange(left + 1))).exp().numpy()
    for low, high in ((0, 1), (1, 300), (300, 3_000), (3_000, left), (left, left + 1)):
        share = float(((drawn >= low) & (drawn < high)).double().mean())
        assert share == pytest.approx(float(expected[low:high].sum()), abs=0.015)


def test_probabilities_of_hours_are_sums_over_seconds() -> None:
    begins = 2 * DAY - 3 * 3_600 + 1_234
    found = spans(begins, until=False, n=1).hours()[0]
    seconds = torch.arange(WINDOW - begins)
    likely = (-spans(begins, until=False, n=len(seconds)).nats(seconds).double()).exp()
    hour = (2 * DAY + begins + seconds) // 3_600 % 24
    expected = torch.zeros(24, dtype=torch.float64).scatter_add(0, hour, likely)
    assert len(seconds) > DAY, "every hour, and bins of a whole one"
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-3)


# ---- what it reads


def test_visits_are_read_with_their_times_and_end_before_the_next(
    dataset: TrajectoryDataset,
) -> None:
    some = dataset.split("train")[:50]
    visits = TimedTokenCodec(DAYS).read_dataset(dataset, some, 24)
    real = Trajectories.of(dataset, some)
    assert real.arrivals is not None and real.stays is not None
    assert (visits[:, 0, 0] == BOS).all() and bool(((visits[:, 0, 1] % DAY) == 0).all())
    made = TimedTokenCodec(DAYS).to_trajectories(
        torch.where(visits == EOS, PAD, visits), real.anchors
    )
    assert made.arrivals is not None and made.stays is not None
    assert np.array_equal(made.tokens, real.tokens) and np.array_equal(made.arrivals, real.arrivals)
    assert (made.stays <= real.stays).all()
    first = visits[:, 0, 1].numpy()
    assert (real.arrivals >= np.repeat(first, np.diff(real.offsets))).all()
    assert (real.arrivals + real.stays <= np.repeat(first, np.diff(real.offsets)) + WINDOW).all()


def test_the_day_of_the_week_is_that_of_the_dataset(dataset: TrajectoryDataset) -> None:
    real = Trajectories.of(dataset)
    stamps = pd.Series(dataset.all_times()[0] * 10**9).astype("datetime64[ns]")
    assert real.arrivals is not None
    assert np.array_equal(real.arrivals // DAY % 7, stamps.dt.dayofweek)
    assert set(dataset.first_days.tolist()) >= {int(stamps.min().timestamp()) // DAY}


def test_a_dataset_of_other_windows_is_refused(dataset: TrajectoryDataset) -> None:
    with pytest.raises(MobatlasError, match="windows have 3 days, those of the model 2"):
        TimedTokenCodec(2).read_dataset(dataset, dataset.split("train")[:2], 12)
    with pytest.raises(MobatlasError, match="days is 5"):
        fresh(NAME, dataset, days=5)
    with pytest.raises(MobatlasError, match="carry no times"):
        TimedTokenCodec(DAYS).read_trajectories(
            Trajectories(np.array([HOME]), np.array([0, 1]), np.zeros((1, 4))), 12
        )


# ---- its likelihood


def network() -> VariationalAutoencoder:
    config = build(PointProcessConfig, OPTIONS[NAME] | {"days": DAYS}, NAME)
    vocabulary = cast(Vocabulary, range(FIRST_POI + 3))  # only its length matters
    model = PointProcess(config, vocabulary, DEFAULT_GROUPS)
    return cast(VariationalAutoencoder, stirred(model.network))


def test_predictions_do_not_depend_on_later_visits(dataset: TrajectoryDataset) -> None:
    net = network()
    visits = TimedTokenCodec(DAYS).read_dataset(
        dataset, dataset.split("train")[:8], 12
    ) % torch.tensor([FIRST_POI + 3, 2**40, 2**40])
    condition = torch.randn(8, OPTIONS[NAME]["network"]["width"], generator=chance(2))
    changed = visits.clone()
    changed[:, 3:] += torch.tensor([0, 900, 1_800])
    one_prediction, other_prediction = (
        net.decoder.predict(rows[:, :-1], rows[:, :1, 1], condition) for rows in (visits, changed)
    )
    for one, other in zip(one_prediction, other_prediction, strict=True):
        torch.testing.assert_close(one[:, :3], other[:, :3])
        assert not torch.equal(one[:, 3:], other[:, 3:])


def test_a_sample_has_the_likelihood_it_was_drawn_with(
    model: SequenceGenerator, dataset: TrajectoryDataset
) -> None:
    """Samples are likelier than the same tokens at the times of others."""
    made = model.sample(200, anchors=dataset.anchors[np.arange(200) % 100], seed=3)
    assert made.arrivals is not None
    own = model.log_likelihood(made)
    assert np.isfinite(own).all()
    late = np.minimum(made.arrivals + 5 * 3_600, made.arrivals // DAY * DAY + DAY - 1)
    changed = Trajectories(
        made.tokens, made.offsets, made.anchors, np.maximum.accumulate(late), made.stays
    )
    assert np.median(own) > np.median(model.log_likelihood(changed)) + 1


# ---- what it writes


def check_times(made: Trajectories) -> None:
    assert made.arrivals is not None and made.stays is not None
    same = made.owner[1:] == made.owner[:-1]
    leaves = made.arrivals + made.stays
    assert (made.stays >= 0).all()
    assert (made.arrivals[1:] >= leaves[:-1])[same].all(), "nobody is in two places"
    first = (
        made.arrivals[made.offsets[:-1]] // DAY
    )  # at the earliest, the day on which the window begins
    assert (leaves[made.offsets[1:] - 1] - DAY * first <= WINDOW).all()
    assert (made.arrivals >= 0).all()


def test_times_are_ordered_within_the_window_and_do_not_overlap(
    model: SequenceGenerator, dataset: TrajectoryDataset
) -> None:
    check_times(model.sample(300, anchors=np.resize(dataset.anchors, (300, 4)), seed=1))
    check_times(fresh(NAME, dataset).sample(300, seed=1))


def test_times_depend_on_the_seed_and_not_on_the_number_of_samples(
    model: SequenceGenerator,
) -> None:
    many = model.sample(300, seed=4)
    few = model.sample(20, seed=4)
    middle = model.sample(30, seed=4, first=250)
    for name in ("tokens", "arrivals", "stays"):
        all_of_them = getattr(many, name)
        assert np.array_equal(all_of_them[: few.offsets[-1]], getattr(few, name))
        assert np.array_equal(
            all_of_them[many.offsets[250] : many.offsets[280]], getattr(middle, name)
        )


def test_a_trained_model_has_the_arrival_hours_of_the_dataset(
    model: SequenceGenerator, dataset: TrajectoryDataset
) -> None:
    feature = build_feature("hour", dataset.vocabulary)
    real = Trajectories.of(dataset, dataset.split("train"))

    def hours(some: Trajectories) -> np.ndarray:
        return np.asarray(feature.counts(some).sum(0), dtype=np.float64)

    anchors = np.resize(dataset.anchors, (512, 4))
    trained = jsd(hours(real), hours(model.sample(512, anchors=anchors)))
    untrained = jsd(hours(real), hours(fresh(NAME, dataset).sample(512, anchors=anchors)))
    assert trained < 0.5 * min(untrained, jsd(hours(real), np.ones(24)))


def test_soft_hours_have_the_means_of_samples(
    model: SequenceGenerator, dataset: TrajectoryDataset
) -> None:
    n = 256
    seed = 5
    groups = np.full(n, UNKNOWN)
    anchors = np.resize(dataset.anchors, (n, 4))
    made = model.sample(n, anchors=anchors, seed=seed)
    soft = model.soft_sample(groups, anchors, seed)
    for mask in ((), ("HOME",)):
        feature = build_feature("hour", dataset.vocabulary, mask)
        counts = np.asarray(feature.counts(made).sum(0))
        expected = feature.soft(soft).sum(0).detach().numpy()
        assert expected.sum() == pytest.approx(counts.sum(), rel=1e-3)
        assert np.abs(counts - expected).sum() / counts.sum() < 0.15
    gap: Tensor = model.network.decoder.gap.clock.weight
    (slope,) = torch.autograd.grad(
        build_feature("hour", dataset.vocabulary).soft(soft)[:, 8].sum(), gap
    )
    assert float(slope.abs().sum()) > 0


# ---- as a user meets it


@pytest.fixture(scope="module")
def trained(dataset: TrajectoryDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a user types it."""
    out = tmp_path_factory.mktemp("models") / "model"
    argv = sys.argv
    options = OPTIONS[NAME] | {"training": OPTIONS[NAME]["training"] | {"steps": 40, "batch": 32}}
    settings = [
        f"{part}.{key}={value}"
        for part in ("network", "training")
        for key, value in options[part].items()
    ]
    sys.argv = [
        "mobatlas",
        "train",
        str(dataset.path),
        "--generator",
        NAME,
        "--out",
        str(out),
        "--quiet",
    ]
    sys.argv += [word for setting in ("length=12", *settings) for word in ("--set", setting)]
    try:
        main()
    except SystemExit as end:
        assert not end.code
    finally:
        sys.argv = argv
    return out


@pytest.fixture(scope="module")
def regions(dataset: TrajectoryDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Told by the hours at which groups go where."""
    out = tmp_path_factory.mktemp("regions") / "groups"
    build_regions(
        dataset.path, out, RegionsOptions(partition="demogroups", features=("category", "hour"))
    )
    return out


def test_generate_fills_arrival_and_departure_and_evaluate_compares_them(
    trained: Path, dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    for name in ("made", "again"):
        generate(trained, tmp_path / f"{name}.parquet", 60, SampleRequest(seed=2))
    assert (tmp_path / "made.parquet").read_bytes() == (tmp_path / "again.parquet").read_bytes()
    table = pd.read_parquet(tmp_path / "made.parquet")
    assert list(table.columns[-2:]) == ["arrival", "departure"]
    assert (table["departure"] >= table["arrival"]).all()
    assert (table.groupby("trajectory")["arrival"].diff().dropna() >= pd.Timedelta(0)).all()
    read = read_samples(tmp_path / "made.parquet", dataset.vocabulary).trajectories
    assert read.arrivals is not None and read.hours is not None and read.stays is not None
    assert np.array_equal(read.hours, table["arrival"].dt.hour)
    assert np.array_equal(read.arrivals // DAY % 7, table["arrival"].dt.dayofweek)
    assert np.array_equal(read.stays, (table["departure"] - table["arrival"]).dt.total_seconds())
    table.drop(columns=["arrival", "departure"]).to_parquet(tmp_path / "silent.parquet")
    found = evaluate(
        tmp_path / "made.parquet", dataset.path, baseline=tmp_path / "silent.parquet", resamples=5
    )
    ours, baseline, floor = (
        found.everybody.scores[label].average for label in ("ours", "baseline", "floor")
    )
    assert 0 < floor["hour"] < ours["hour"] < 1 and 0 < floor["dwell"] < ours["dwell"] < 1
    assert "hour" not in baseline and "hour" not in found.everybody.gap_closed_floor
    assert (found.files["ours"]["times"], found.files["baseline"]["times"]) == (True, False)


@pytest.mark.parametrize("strategy", VALUES)
def test_every_strategy_learns_the_arrival_hours_of_groups(
    strategy: str, trained: Path, regions: Path, tmp_path: Path
) -> None:
    evidence = None if strategy == "strong" else regions
    values = (
        VALUES[strategy]
        if strategy != "finetune"
        else {"finetune": VALUES[strategy]["finetune"] | BRIEF}
    )
    options = SuperviseOptions(strategy, values=values)
    quiet = Execution(quiet=True)
    supervise(trained, tmp_path / "model", evidence, options, execution=quiet)
    generate(tmp_path / "model", tmp_path / "some.parquet", 20, SampleRequest(group=GROUP, seed=3))
    some = pd.read_parquet(tmp_path / "some.parquet")
    assert set(some["group"]) == {GROUP} and some["arrival"].notna().all()
    if strategy in ("tilt", "resample"):
        kept = (tmp_path / "model" / "calibration.json").read_text()
        assert '"hour:08"' in kept, "hours are calibrated too"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_validates(name: str) -> None:
    config = build(PointProcessConfig, PRESETS[name], name)
    assert build(PointProcessConfig, config.model_dump(mode="json"), name) == config
    assert (config == PointProcessConfig()) == (name == "small")
