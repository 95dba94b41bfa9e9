"""Networks that can be told which places a group prefers before anything is taught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mobatlas import TrajectoryDataset, build_regions
from mobatlas.data.arrays import Floats
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import FIRST_POI, HOME
from mobatlas.features.divergences import js
from mobatlas.generators.layers import GroupTokenBias, has_group_bias, set_group_bias
from mobatlas.generators.protocol import UNKNOWN, Generator
from mobatlas.groups import Groups
from mobatlas.regions.build import RegionsOptions
from mobatlas.supervision.evidence import gather_evidence
from mobatlas.supervision.group_tilts import TiltConfig, fit_group_tilts, token_shifts
from tests.networks import LATENT, LENGTH, chance, new_model
from tests.tiny import OPTIONS, fresh, small_city

WRITERS, PLACE, SHIFT = ("autoregressive", "vae", "point-process"), FIRST_POI + 3, 4.0


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_city(tmp_path_factory.mktemp("city"))


def groups_of(dataset: TrajectoryDataset) -> Groups:
    assert dataset.groups is not None
    return dataset.groups


def told(model: Generator, dataset: TrajectoryDataset) -> Generator:
    """That its first group prefers one place."""
    groups = groups_of(dataset)
    made = model.with_groups(groups, 0, alike=True)
    shifts = np.zeros((len(groups), len(dataset.vocabulary)))
    shifts[0, PLACE] = SHIFT
    assert has_group_bias(made.network) and not has_group_bias(model.network)
    set_group_bias(made.network, shifts)
    return made


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_with_a_map_visits_what_its_group_prefers(
    name: str, dataset: TrajectoryDataset
) -> None:
    network: dict[str, Any] = OPTIONS[name]["network"] | {"distance_curves": 2, "group_bias": True}
    model = fresh(name, dataset, network=network)
    made, n = told(model, dataset), 400
    anchors = dataset.anchors[:1].repeat(n, 0)
    visits = [made.sample(n, np.full(n, group), anchors, 3).tokens for group in (0, 1, UNKNOWN)]
    often = [float(np.mean(tokens == PLACE)) for tokens in visits]
    assert often[0] > 5 * max(often[1:]) > 0
    assert np.array_equal(visits[2], model.sample(n, anchors=anchors, seed=3).tokens), (
        "nobody's taste is nothing"
    )


def test_a_denoiser_adds_the_tastes_of_a_group_to_what_it_thinks_of_tokens(
    dataset: TrajectoryDataset,
) -> None:
    options = OPTIONS["latent-diffusion"]["denoiser"] | {"distance_curves": 2, "group_bias": True}
    made = told(new_model(dataset, denoiser=options), dataset)
    noisy, t = torch.randn(3, LENGTH, LATENT, generator=chance()), torch.full((3,), 500)
    codes = torch.from_numpy(groups_of(dataset).level_codes[[0, 1]] + 1)
    levels = torch.cat((codes, torch.zeros_like(codes[:1])))
    with torch.no_grad():
        words = made.network(noisy, t, torch.from_numpy(dataset.anchors[:3]).float(), levels).words
    wanted = torch.zeros_like(words)
    wanted[0, :, PLACE] = SHIFT
    torch.testing.assert_close(words, wanted)  # a new denoiser thinks nothing else of them


def test_every_group_has_a_row_of_its_own(dataset: TrajectoryDataset) -> None:
    groups = groups_of(dataset)
    group_bias = GroupTokenBias(groups, 5)
    codes = torch.from_numpy(groups.level_codes) + 1
    set_group_bias(group_bias, np.arange(5.0 * len(groups)).reshape(-1, 5))
    found = group_bias(torch.cat((codes, torch.zeros_like(codes[:1]))), len(groups) + 1)
    assert found.flatten().tolist() == [*map(float, range(5 * len(groups))), *[0.0] * 5]
    assert group_bias(None, 2).abs().max() == 0


@pytest.mark.parametrize("unit", ["trajectory", "person"])
@pytest.mark.parametrize(
    "features", [("poi", "category"), ("category", "transitions"), ("transitions",)]
)
def test_what_tilts_say_of_places_is_what_the_people_do_whom_they_weigh(
    features: tuple[str, ...], unit: str, dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    build_regions(
        dataset.path, tmp_path / "groups", RegionsOptions(partition="demogroups", features=features)
    )
    evidence = gather_evidence(dataset, tmp_path / "groups")
    tilts = fit_group_tilts(evidence, dataset, TiltConfig.model_validate({"unit": unit}))
    shifts = token_shifts(tilts, dataset, by_place="poi" in features)
    assert np.abs(shifts[:, :FIRST_POI]).max() == 0 < np.abs(shifts).max() and HOME < FIRST_POI
    trajectories = Trajectories.of(dataset, tilts.indices)
    out = trajectories.tokens >= FIRST_POI

    def shares(weights: Floats) -> Floats:
        counted = np.bincount(
            trajectories.tokens[out], weights[trajectories.owner[out]], len(dataset.vocabulary)
        )
        return np.asarray(counted / counted.sum())

    everybody = shares(tilts.base)
    for shift, weights in zip(shifts, tilts.weights, strict=True):
        assert everybody @ np.exp(shift) == pytest.approx(1), "the odds of going out stay"
        wanted = shares(weights)
        told = float(js(everybody * np.exp(shift), wanted))
        assert told < 0.8 * float(js(everybody, wanted)), "nearer than everybody is"
