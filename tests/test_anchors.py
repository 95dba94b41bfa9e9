"""Synthetic homes and workplaces: k people behind every cell, and what samples need of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.anchors import distances
from mobatlas import TrajectoryDataset, load_regions
from mobatlas.data.anchors import BANDS, AnchorModel, Residents
from mobatlas.data.types import Flags, Floats, Ints, haversine_km
from mobatlas.generators.store import save_model
from mobatlas.supervision.evidence import gather_evidence
from tests.disclosure import found
from tests.tiny import fresh, with_other_labels
from tests.worlds import World, small_world

TOWNS = np.array([[37.5, -77.4], [37.65, -77.6]])
K = 10


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return small_world(tmp_path_factory.getbasetemp())


def people(n: int = 600, seed: int = 0) -> tuple[Floats, Ints]:
    """People of two towns, of whom 90 % work in their own; the last tenth has no work."""
    rng = np.random.default_rng(seed)
    town = rng.integers(2, size=n)
    other = rng.random(n) < 0.1
    home = TOWNS[town] + rng.normal(0, 0.02, (n, 2))
    work = TOWNS[town ^ other] + rng.normal(0, 0.01, (n, 2))
    work[-n // 10 :] = np.nan
    return np.hstack([home, work]), town.astype(np.int64)


def inside(boxes: Floats, places: Floats) -> Flags:
    """Whether each place (n, 2) is in each box (boxes, 4)."""
    return np.asarray(((boxes[:, None, :2] <= places) & (places <= boxes[:, None, 2:])).all(2))


@settings(max_examples=5)
@given(st.integers(60, 400), st.integers(0, 99), st.integers(2, 35))
def test_at_least_k_people_are_behind_every_cell_and_no_boundary_is_a_coordinate(
    n: int, seed: int, k: int
) -> None:
    anchors, town = people(n, seed)
    anchors[: n // 3] = anchors[0]  # many live in one house
    model = AnchorModel.fit(anchors, town, ("south", "north"), k)
    counts = np.bincount(town, minlength=2)
    few = counts[counts < k].sum()  # in regions that are too small
    assert model.home_people.min() >= k and model.people == n
    assert model.home_people.sum() == n - few * (few < k)
    for boxes, places in ((model.home_cells, anchors[:, :2]), (model.work_cells, anchors[:, 2:])):
        assert not set(boxes.ravel().tolist()) & set(places.ravel().tolist())
        dyadic = boxes / np.array([180, 360, 180, 360]) * 2**30
        assert np.array_equal(dyadic, np.round(dyadic))
        assert (boxes[:, 2:] - boxes[:, :2]).min() > 0.0008  # degrees: not below 100 m
    own = inside(model.home_cells, anchors[:, :2])
    # The others are outliers, counted at the nearest cell, or too few in their region.
    assert own.any(0).sum() > 0.6 * model.home_people.sum()


def test_no_person_is_emitted_and_the_same_call_gives_the_same_people() -> None:
    anchors, town = people()
    model = AnchorModel.fit(anchors, town, ("south", "north"))
    again = AnchorModel.of(json.loads(json.dumps(model.as_dict())))
    drawn = model.population()
    assert all(
        one.tobytes() == other.tobytes()
        for one, other in zip(drawn, again.population(), strict=True)
    )
    assert len(drawn.anchors) == 20_000
    for part in (slice(0, 2), slice(2, 4)):
        real, ours = anchors[:, part], drawn.anchors[:, part]
        assert not set(real.ravel().tolist()) & set(ours[~np.isnan(ours)].tolist())
    assert not np.array_equal(model.draw(50, 1).anchors, model.draw(50, 2).anchors)


def test_regions_distances_flows_and_shares_without_work_are_met() -> None:
    anchors, town = people(3_000)
    model = AnchorModel.fit(anchors, town, ("south", "north"))
    drawn = model.population()
    nearest = haversine_km(drawn.anchors[:, None, :2], TOWNS).argmin(1)
    assert np.array_equal(nearest, drawn.region)
    north = model.population(region=1)
    assert set(north.region) == {1} and len(north.anchors) == len(drawn.anchors)
    assert np.bincount(drawn.region) / len(nearest) == pytest.approx(
        np.bincount(town) / len(town), abs=0.01
    )
    assert np.isnan(drawn.anchors[:, 2]).mean() == pytest.approx(0.1, abs=0.01)

    def commutes(each: Floats) -> tuple[Floats, float]:
        known = each[~np.isnan(each).any(1)]
        km = haversine_km(known[:, :2], known[:, 2:])
        return np.histogram(km, [0, *BANDS])[0] / len(km), float((km > 12).mean())

    (shares, far), (expected, really) = commutes(drawn.anchors), commutes(anchors)
    assert np.abs(shares - expected).sum() < 0.15 and far == pytest.approx(really, abs=0.01)


def test_the_only_resident_of_a_district_cannot_be_found() -> None:
    anchors, town = people()
    alone = np.array([[37.8, -77.1, 37.79, -77.12]])
    anchors = np.vstack([anchors, alone])
    for region in (None, np.append(town, 1), np.append(town, 2), np.append(town, -1)):
        model = AnchorModel.fit(anchors, region, ("south", "north", "alone"))
        for boxes, place in ((model.home_cells, alone[:, :2]), (model.work_cells, alone[:, 2:])):
            assert not inside(boxes, place).any()
        drawn = model.population().anchors
        assert np.nanmin(haversine_km(drawn[:, :2], alone[:, :2])) > 5
        assert not len(model.population(region=2).anchors)


@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_anchors_that_fewer_than_k_people_have_are_not_drawn(known: int) -> None:
    anchors, _ = people(40)
    few = K - 1
    if known & 1:  # few homes
        anchors[few:, :2] = np.nan
    if known & 2:  # few workplaces
        anchors[few:, 2:] = np.nan
    drawn = AnchorModel.fit(anchors).draw(500).anchors
    assert np.isnan(drawn[:, :2]).all() == bool(known & 1)
    assert np.isnan(drawn[:, 2:]).all() == bool(known & 2)
    assert np.isnan(AnchorModel.fit(anchors[:0]).draw(5).anchors).all()
    same = anchors.copy()
    same[:, 2:] = same[:, :2]
    drawn = AnchorModel.fit(same).draw(500).anchors
    assert np.array_equal(drawn[:, :2], drawn[:, 2:], equal_nan=True)


@pytest.mark.parametrize("change", ["shuffled", "deleted"])
def test_labels_do_not_reach_anchors_after_the_regions_were_built(
    world: World, tmp_path: Path, change: str
) -> None:
    copy = TrajectoryDataset.open(with_other_labels(world.dataset, tmp_path / "copy", change))
    before, after = (gather_evidence(each, world.regions) for each in (world.dataset, copy))
    assert before.anchor_model.as_dict() == after.anchor_model.as_dict()
    assert set(before.anchor_model.regions) == set(load_regions(world.regions).composition.regions)


def test_the_model_of_a_pool_of_real_people_holds_no_home(world: World, tmp_path: Path) -> None:
    generator = fresh("external", world.dataset)
    save_model(tmp_path, generator, "external", world.dataset)
    assert found(tmp_path, world.dataset) == []
    pool = world.dataset.path.with_suffix(".pool.parquet")
    assert len(found(pool, world.dataset)) > 50  # the search finds them where they are


def test_the_benchmark_finds_people_whose_homes_are_emitted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.anchors.EMITTED", 20_000)
    near = "home within 30 m"
    measured = distances(world.dataset, 0)
    assert measured["planted"]["nearest_km"] > 5
    assert measured["pair within 30 m"]["training"] < 0.01
    assert measured[near]["training"] < 3 * measured[near]["held_out"] + 1
    train = world.dataset.anchors[world.dataset.split_people("train")]
    copies = Residents(np.tile(train, (3, 1)), np.zeros(3 * len(train), dtype=np.int64))
    monkeypatch.setattr(AnchorModel, "draw", lambda *_: copies)
    copied = distances(world.dataset, 0)
    assert copied[near]["training"] >= 1 and not copied[near]["contains_zero"]
    assert copied["pair within 30 m"]["training"] >= 1
