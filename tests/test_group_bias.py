"""The token bias of groups, which sets the places that a group prefers before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mobatlas import TrajectoryDataset, build_regions
from mobatlas.data.dataset import Trajectories
from mobatlas.data.types import FIRST_POI, HOME, Floats
from mobatlas.features.divergences import js
from mobatlas.generators.layers import GroupTokenBias, has_group_bias, set_group_bias
from mobatlas.generators.protocol import UNKNOWN, Generator
from mobatlas.groups import Groups
from mobatlas.regions.build import RegionsOptions
from mobatlas.supervision.evidence import gather_evidence
from mobatlas.supervision.tilt import fit_group_tilts, token_shifts
from tests.networks import LATENT, LENGTH, chance, new_model
from tests.tiny import OPTIONS, fresh, small_city

SEQUENCE_FAMILIES = ("autoregressive", "vae", "point-process")
PLACE = FIRST_POI + 3
SHIFT = 4.0


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_city(tmp_path_factory.mktemp("city"))


def groups_of(dataset: TrajectoryDataset) -> Groups:
    assert dataset.groups is not None
    return dataset.groups


def with_preferred_place(model: Generator, dataset: TrajectoryDataset) -> Generator:
    """A copy with groups, of which the first prefers one place."""
    groups = groups_of(dataset)
    conditioned = model.with_groups(groups, 0, equal_groups=True)
    shifts = np.zeros((len(groups), len(dataset.vocabulary)))
    shifts[0, PLACE] = SHIFT
    assert has_group_bias(conditioned.network) and not has_group_bias(model.network)
    set_group_bias(conditioned.network, shifts)
    return conditioned


@pytest.mark.parametrize("name", SEQUENCE_FAMILIES)
def test_a_sequence_generator_visits_more_often_the_place_that_a_group_prefers(
    name: str, dataset: TrajectoryDataset
) -> None:
    network: dict[str, Any] = OPTIONS[name]["network"] | {"distance_curves": 2, "group_bias": True}
    model = fresh(name, dataset, network=network)
    conditioned = with_preferred_place(model, dataset)
    n = 400
    anchors = dataset.anchors[:1].repeat(n, 0)
    tokens = [
        conditioned.sample(n, np.full(n, group), anchors, 3).tokens for group in (0, 1, UNKNOWN)
    ]
    shares = [float(np.mean(each == PLACE)) for each in tokens]
    assert shares[0] > 5 * max(shares[1:]) > 0
    assert np.array_equal(tokens[2], model.sample(n, anchors=anchors, seed=3).tokens), (
        "an unknown group has no bias"
    )


def test_a_denoiser_adds_the_bias_of_a_group_to_its_logits_of_tokens(
    dataset: TrajectoryDataset,
) -> None:
    options = OPTIONS["latent-diffusion"]["denoiser"] | {"distance_curves": 2, "group_bias": True}
    conditioned = with_preferred_place(new_model(dataset, denoiser=options), dataset)
    noisy = torch.randn(3, LENGTH, LATENT, generator=chance())
    t = torch.full((3,), 500)
    anchors = torch.from_numpy(dataset.anchors[:3]).float()
    codes = torch.from_numpy(groups_of(dataset).level_codes[[0, 1]] + 1)
    levels = torch.cat((codes, torch.zeros_like(codes[:1])))
    with torch.no_grad():
        words = conditioned.network(noisy, t, anchors, levels).words
    expected = torch.zeros_like(words)
    expected[0, :, PLACE] = SHIFT
    torch.testing.assert_close(words, expected)  # an untrained denoiser has no other logits


def test_every_group_has_a_row_of_its_own(dataset: TrajectoryDataset) -> None:
    groups = groups_of(dataset)
    group_bias = GroupTokenBias(groups, 5)
    codes = torch.from_numpy(groups.level_codes) + 1
    set_group_bias(group_bias, np.arange(5.0 * len(groups)).reshape(-1, 5))
    bias = group_bias(torch.cat((codes, torch.zeros_like(codes[:1]))), len(groups) + 1)
    assert bias.flatten().tolist() == [*map(float, range(5 * len(groups))), *[0.0] * 5]
    assert group_bias(None, 2).abs().max() == 0


@pytest.mark.parametrize(
    "features", [("poi", "category"), ("category", "transitions"), ("transitions",)]
)
def test_token_shifts_bring_the_population_closer_to_the_tilted_visits(
    features: tuple[str, ...], dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    build_regions(
        dataset.path, tmp_path / "groups", RegionsOptions(partition="demogroups", features=features)
    )
    evidence = gather_evidence(dataset, tmp_path / "groups")
    tilts = fit_group_tilts(evidence, dataset)
    shifts = token_shifts(tilts, dataset, by_place="poi" in features)
    assert np.abs(shifts[:, :FIRST_POI]).max() == 0 < np.abs(shifts).max() and HOME < FIRST_POI
    trajectories = Trajectories.of(dataset, tilts.indices)
    out = trajectories.tokens >= FIRST_POI

    def shares(weights: Floats) -> Floats:
        counts = np.bincount(
            trajectories.tokens[out], weights[trajectories.owner[out]], len(dataset.vocabulary)
        )
        return np.asarray(counts / counts.sum())

    population = shares(tilts.base)
    for shift, weights in zip(shifts, tilts.weights, strict=True):
        assert population @ np.exp(shift) == pytest.approx(1), "the odds of going out stay"
        tilted = shares(weights)
        distance = float(js(population * np.exp(shift), tilted))
        assert distance < 0.8 * float(js(population, tilted)), "closer than the population"
