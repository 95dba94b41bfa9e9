"""The contract that every family of generators keeps."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from mobatlas import generate, load_model, train
from mobatlas.config import Section
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.types import FIRST_POI, HOME, Vocabulary
from mobatlas.errors import MobatlasError
from mobatlas.features.maps import build_feature
from mobatlas.generators.protocol import (
    GENERATORS,
    UNKNOWN,
    Family,
    Generator,
    draw_rows,
    family_of,
    register_generator,
    uniforms,
    unlabelled,
)
from mobatlas.groups import DEFAULT_GROUPS
from mobatlas.sampling.chunks import SampleRequest
from mobatlas.supervision.strategies import fit_labels, labelled_draw
from mobatlas.training.checkpoints import WEIGHTS
from mobatlas.training.loop import Execution, Trainer
from tests.tiny import fitted, fresh, small_city

TRAINABLE = [name for name in GENERATORS if family_of(name).trainable]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_city(tmp_path_factory.mktemp("city"))


@pytest.fixture(scope="module")
def models(dataset: TrajectoryDataset) -> Callable[[str], Generator]:
    return functools.cache(lambda name: fitted(name, dataset))


@pytest.fixture(scope="module", params=GENERATORS)
def model(request: pytest.FixtureRequest, models: Callable[[str], Generator]) -> Generator:
    return models(request.param)


@pytest.fixture(scope="module", params=TRAINABLE)
def trainable(request: pytest.FixtureRequest, models: Callable[[str], Generator]) -> Generator:
    return models(request.param)


@pytest.fixture(scope="module")
def conditioned(trainable: Generator, dataset: TrajectoryDataset) -> Generator:
    return fit_labels(trainable, dataset, Trainer(None, Execution(quiet=True)))[0]


def _anchors(dataset: TrajectoryDataset, n: int) -> np.ndarray:
    return dataset.anchors[dataset.person[dataset.split("train")[:n]]]


def _same(a: Trajectories, b: Trajectories) -> bool:
    return bool(np.array_equal(a.tokens, b.tokens) and np.array_equal(a.offsets, b.offsets))


def test_samples_are_trajectories_of_the_vocabulary(
    model: Generator, dataset: TrajectoryDataset
) -> None:
    made = model.sample(100, anchors=_anchors(dataset, 100))
    assert len(made) == 100
    lengths = np.diff(made.offsets)
    assert lengths.min() >= 1 and lengths.max() <= model.max_length
    assert made.tokens.min() >= HOME and made.tokens.max() < len(dataset.vocabulary)


def test_a_seed_determines_the_samples(model: Generator) -> None:
    assert _same(model.sample(50, seed=1), model.sample(50, seed=1))
    assert not _same(model.sample(50, seed=1), model.sample(50, seed=2))


def test_a_sample_does_not_depend_on_the_number_of_samples(
    model: Generator, dataset: TrajectoryDataset
) -> None:
    n = model.tile + 40
    anchors = _anchors(dataset, n)
    whole = model.sample(n, anchors=anchors, seed=4)
    few = model.sample(30, anchors=anchors[:30], seed=4)
    middle = model.sample(
        50, anchors=anchors[model.tile - 20 : model.tile + 30], seed=4, first=model.tile - 20
    )
    assert np.array_equal(whole.tokens[: few.offsets[-1]], few.tokens)
    start = whole.offsets[model.tile - 20]
    stop = whole.offsets[model.tile + 30]
    assert np.array_equal(whole.tokens[start:stop], middle.tokens)


def test_zero_samples_can_be_drawn(model: Generator) -> None:
    assert len(model.sample(0)) == 0


def test_a_model_of_phase_1_refuses_groups(model: Generator) -> None:
    assert model.groups is None
    with pytest.raises(MobatlasError, match="not conditioned on groups"):
        model.sample(3, groups=np.zeros(3, dtype=np.int64))


@pytest.mark.parametrize("name", [name for name in GENERATORS if name not in TRAINABLE])
@pytest.mark.parametrize("member", ["network", "with_groups", "weighted_fit_stage", "soft_sample"])
def test_a_family_that_cannot_be_trained_names_the_strategies_to_use(
    name: str, member: str, models: Callable[[str], Generator]
) -> None:
    with pytest.raises(MobatlasError, match=r"cannot be trained.*--strategy"):
        getattr(models(name), member)()


def test_a_copy_with_groups_samples_unknown_groups_as_before(
    trainable: Generator, dataset: TrajectoryDataset
) -> None:
    model = trainable
    grouped = model.with_groups(DEFAULT_GROUPS, seed=1)
    anchors = _anchors(dataset, 40)
    assert _same(grouped.sample(40, anchors=anchors), model.sample(40, anchors=anchors))
    with pytest.raises(MobatlasError, match="already"):
        grouped.with_groups(DEFAULT_GROUPS, seed=1)


def test_alike_groups_start_with_the_same_samples(
    trainable: Generator, dataset: TrajectoryDataset
) -> None:
    model = trainable
    anchors = _anchors(dataset, 40)
    groups = np.arange(40) % len(DEFAULT_GROUPS)
    grouped = model.with_groups(DEFAULT_GROUPS, seed=1, equal_groups=True)
    assert _same(grouped.sample(40, groups, anchors), model.sample(40, anchors=anchors))
    assert not _same(
        model.with_groups(DEFAULT_GROUPS, seed=1).sample(40, groups, anchors),
        model.sample(40, anchors=anchors),
    )


def test_samples_depend_on_the_group(conditioned: Generator, dataset: TrajectoryDataset) -> None:
    anchors = _anchors(dataset, 64)
    first = conditioned.sample(64, np.zeros(64, dtype=np.int64), anchors)
    last = conditioned.sample(64, np.full(64, len(DEFAULT_GROUPS) - 1), anchors)
    assert not _same(first, last)


def test_soft_samples_have_the_means_of_samples(
    conditioned: Generator, dataset: TrajectoryDataset
) -> None:
    """Counts of tokens agree with the counts that the soft sample expects."""
    n = 200
    groups = np.arange(n) % len(DEFAULT_GROUPS)
    anchors = _anchors(dataset, n)
    feature = build_feature("category", dataset.vocabulary)
    counts = feature.counts(conditioned.sample(n, groups, anchors, seed=9)).sum(0)
    soft = conditioned.soft_sample(groups, anchors, seed=9)
    expected = feature.soft(soft).sum(0).detach().numpy()
    assert soft.tokens.sum(-1).max() <= 1 + 1e-5
    assert np.abs(counts - expected).sum() / counts.sum() < 0.1


def test_early_soft_samples_have_the_means_of_samples(
    conditioned: Generator, dataset: TrajectoryDataset
) -> None:
    """A soft sample has the mean of samples at any step; the seed determines the step."""
    n = 256
    groups = np.arange(n) % len(DEFAULT_GROUPS)
    anchors = _anchors(dataset, n)
    feature = build_feature("category", dataset.vocabulary)
    counts = feature.counts(conditioned.sample(n, groups, anchors, seed=9)).sum(0)
    shares = []
    for seed in range(6):
        soft = conditioned.soft_sample(groups, anchors, seed, early=True)
        assert torch.equal(
            soft.tokens, conditioned.soft_sample(groups, anchors, seed, early=True).tokens
        )
        assert soft.tokens.sum(-1).max() <= 1 + 1e-5
        expected = feature.soft(soft).sum(0).detach().numpy()
        shares.append(expected / expected.sum())
    assert np.abs(np.mean(shares, 0) - counts / counts.sum()).sum() < 0.25


@pytest.mark.parametrize("early", [False, True])
def test_soft_samples_have_gradients_in_the_network(
    conditioned: Generator, dataset: TrajectoryDataset, early: bool
) -> None:
    feature = build_feature("poi", dataset.vocabulary)
    soft = conditioned.soft_sample(
        np.arange(16) % len(DEFAULT_GROUPS), _anchors(dataset, 16), seed=2, early=early
    )
    feature.soft(soft)[:, 3].sum().backward()
    gradients = [p.grad for p in conditioned.network.parameters() if p.grad is not None]
    assert any(float(gradient.abs().sum()) > 0 for gradient in gradients)
    conditioned.network.zero_grad()


def test_a_saved_model_draws_the_same_samples(
    conditioned: Generator, dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    conditioned.save(tmp_path)
    name = next(name for name in GENERATORS if type(conditioned.config) is family_of(name).config)
    again = family_of(name).load(
        tmp_path, conditioned.config, dataset.vocabulary, conditioned.groups
    )
    groups = np.arange(30) % len(DEFAULT_GROUPS)
    assert _same(again.sample(30, groups, seed=3), conditioned.sample(30, groups, seed=3))


def test_weights_of_another_configuration_are_refused(
    model: Generator, dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    model.save(tmp_path)
    name = next(name for name in GENERATORS if type(model.config) is family_of(name).config)
    with pytest.raises(MobatlasError, match=r"do not fit config\.json"):
        family_of(name).load(tmp_path, model.config, dataset.vocabulary, DEFAULT_GROUPS)


@pytest.mark.parametrize("content", [b"", b"cut", b"\x80\x04cposix\nsystem\n"])
def test_a_file_that_is_not_safetensors_is_refused(
    model: Generator, dataset: TrajectoryDataset, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / WEIGHTS).write_bytes(content)
    name = next(name for name in GENERATORS if type(model.config) is family_of(name).config)
    with pytest.raises(MobatlasError, match="not a readable safetensors file"):
        family_of(name).load(tmp_path, model.config, dataset.vocabulary, None)


@pytest.mark.parametrize("name", GENERATORS)
def test_phase_1_does_not_depend_on_labels(
    name: str, dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    """Identical weights with labels, with shuffled ones and with none."""
    found = []
    for change in ("kept", "shuffled", "deleted"):
        copy = tmp_path / change
        shutil.copytree(dataset.path, copy)
        labels = pq.read_table(copy / "labels.parquet")
        if change == "shuffled":
            order = np.random.default_rng(0).permutation(labels.num_rows)
            mixed = labels.take(order).set_column(0, "user_id", labels["user_id"])
            pq.write_table(mixed, copy / "labels.parquet")
        if change == "deleted":
            (copy / "labels.parquet").unlink()
        other = TrajectoryDataset.open(copy)
        (tmp_path / f"{change}.model").mkdir()
        fitted(name, other).save(tmp_path / f"{change}.model")
        found.append((tmp_path / f"{change}.model" / WEIGHTS).read_bytes())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", TRAINABLE)
def test_the_seed_determines_the_weights(name: str, dataset: TrajectoryDataset) -> None:
    one, two = (fresh(name, dataset, seed) for seed in (0, 1))
    pairs = list(
        zip(one.network.state_dict().values(), two.network.state_dict().values(), strict=True)
    )
    assert any(not torch.equal(a, b) for a, b in pairs)


def test_strong_draws_pairs_of_a_trajectory_and_its_group(dataset: TrajectoryDataset) -> None:
    draw = labelled_draw(dataset, seed=5)
    examples = draw(64, 7)
    assert np.array_equal(
        examples.groups, dataset.person_groups()[dataset.person[examples.indices]]
    )
    assert np.array_equal(draw(64, 7).indices, examples.indices)
    assert set(unlabelled(dataset, 5)(64, 7).groups) == {UNKNOWN}


def test_strong_can_train_new_weights(trainable: Generator, dataset: TrajectoryDataset) -> None:
    anew, _ = fit_labels(
        trainable, dataset, Trainer(None, Execution(quiet=True)), from_scratch=True
    )
    assert not _same(anew.sample(20), trainable.sample(20))


def test_strong_without_labels_is_refused(
    model: Generator, dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    shutil.copytree(dataset.path, tmp_path / "bare")
    (tmp_path / "bare" / "labels.parquet").unlink()
    with pytest.raises(MobatlasError, match="no labels"):
        fit_labels(
            model, TrajectoryDataset.open(tmp_path / "bare"), Trainer(None, Execution(quiet=True))
        )


def test_an_unknown_family_is_refused_with_a_suggestion() -> None:
    with pytest.raises(MobatlasError, match="latent-diffusion"):
        family_of("latent-difusion")
    with pytest.raises(MobatlasError, match="exists already"):
        register_generator("latent-diffusion", lambda: family_of("latent-diffusion"))


class UniformConfig(Section):
    """Options of a generator that is not part of the package."""

    max_length: int = 1


class UniformPlaces:
    """Visits one place, all equally likely; the members that a family without network needs."""

    groups = None
    tile = 64
    max_length = 1

    def __init__(self, config: UniformConfig, vocabulary: Vocabulary) -> None:
        self.config = config
        self.vocabulary = vocabulary

    def fit(self, dataset: TrajectoryDataset, trainer: Trainer) -> dict[str, Any]:
        return {"places": len(self.vocabulary) - FIRST_POI}

    def sample(
        self,
        n: int,
        groups: Any = None,
        anchors: Any = None,
        seed: int = 0,
        *,
        first: int = 0,
    ) -> Trajectories:
        places = len(self.vocabulary) - FIRST_POI
        rows = draw_rows(uniforms(seed, first, first + n)[:, 0], places)
        anchors = np.full((n, 4), np.nan) if anchors is None else anchors
        return Trajectories((rows + FIRST_POI).astype(np.int32), np.arange(n + 1), anchors)

    def to(self, device: str) -> None:
        """There is nothing to move."""

    def save(self, folder: Path) -> None:
        """There is nothing to write."""


def test_a_generator_from_outside_the_package_is_trained_loaded_and_sampled(
    dataset: TrajectoryDataset, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def create(config: UniformConfig, dataset: TrajectoryDataset, seed: int) -> Any:
        return UniformPlaces(config, dataset.vocabulary)

    def load(folder: Path, config: UniformConfig, vocabulary: Vocabulary, groups: Any) -> Any:
        return UniformPlaces(config, vocabulary)

    family = Family("uniform", UniformConfig, {"small": {}}, create, load, trainable=False)
    request.addfinalizer(lambda: GENERATORS.pop("uniform"))
    register_generator("uniform", lambda: family)
    assert "uniform" in GENERATORS
    quiet = Execution(quiet=True)
    train(dataset.path, tmp_path / "model", generator="uniform", execution=quiet)
    model = load_model(tmp_path / "model")
    assert model.name == "uniform" and len(set(model.generator.sample(500).tokens.tolist())) > 10
    generate(tmp_path / "model", tmp_path / "samples.parquet", 30, SampleRequest(seed=1))
    assert pq.read_table(tmp_path / "samples.parquet").num_rows == 30
