"""Rare places borrow from their category; frequent ones keep their own differences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mobatlas.data.types import Floats
from mobatlas.regions.recovery.recover import recover
from mobatlas.regions.types import Regions
from tests.regional import FOUR, dirichlet, error, regions_of
from tests.test_beliefs import of_bars

CATEGORIES = 3
PLACES = 40  # places of each category
PARENTS = {f"poi:{c}.{p}": f"category:{c}" for c in range(CATEGORIES) for p in range(PLACES)}


def world(seed: int = 0, own: float = 0.0, people: float = 300.0) -> tuple[Regions, Floats]:
    """Groups differ in visits of a category, and by `own` in its places; Poisson counts."""
    rng = np.random.default_rng(seed)
    base = rng.dirichlet(np.ones(PLACES), CATEGORIES).ravel() * 2  # (places,) visits of everybody
    likes = np.exp(rng.normal(0, 0.4, (len(FOUR), CATEGORIES))).repeat(PLACES, 1)
    means = base * likes * np.exp(rng.normal(0, own, (len(FOUR), len(base))))  # M
    shares = dirichlet(12, len(FOUR), seed=seed)
    places = rng.poisson(people * shares @ means) / people
    categories = places.reshape(len(shares), CATEGORIES, PLACES).sum(2)
    simulated = regions_of(shares, np.hstack([places, categories]), people, FOUR)
    features = (*PARENTS, *(f"category:{c}" for c in range(CATEGORIES)))
    return replace(simulated, aggregates=replace(simulated.aggregates, features=features)), means


def test_rare_places_borrow_from_their_category() -> None:
    for seed in range(3):
        regions, means = world(seed)
        alone = recover(regions)
        nested = recover(regions, parents=PARENTS)
        places = slice(0, len(PARENTS))
        assert error(nested.means[:, places], means) < 0.6 * error(alone.means[:, places], means)
        assert nested.means[:, len(PARENTS) :] == pytest.approx(alone.means[:, len(PARENTS) :])


def test_a_place_that_is_unlike_its_category_is_found_where_people_are_many() -> None:
    regions, means = world(own=0.5, people=200_000.0)
    nested = recover(regions, parents=PARENTS).means[:, : len(PARENTS)]
    assert error(nested, means) < 0.1 * error(np.tile(means.mean(0), (len(FOUR), 1)), means)


@pytest.mark.parametrize(
    ("own", "people"), [(0.5, 30_000.0), (1.0, 3_000.0), (1.5, 300.0), (1.5, 30_000.0)]
)
def test_places_that_are_nothing_like_their_category_lose_nothing(
    own: float, people: float
) -> None:
    alone: list[float] = []
    nested: list[float] = []
    for seed in range(3):
        regions, means = world(seed, own, people)
        for parents, errors in ((None, alone), (PARENTS, nested)):
            recovery = recover(regions, parents=parents)
            errors.append(error(recovery.means[:, : len(PARENTS)], means))
            assert recovery.shares @ recovery.means == pytest.approx(
                recovery.baseline, rel=1e-6, abs=1e-9
            )
    assert np.mean(nested) < 1.02 * np.mean(alone)


def test_a_place_that_a_group_never_visits_may_be_of_a_category_that_it_likes() -> None:
    shares = dirichlet(30, len(FOUR))
    people = 20_000.0
    places = np.array([[0.0, 3.0], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    values = np.random.default_rng(0).poisson(people * shares @ places) / people
    simulated = regions_of(shares, np.column_stack([values, values.sum(1)]), people, FOUR)
    features = ("poi:a", "poi:b", "category:c")
    regions = replace(simulated, aggregates=replace(simulated.aggregates, features=features))
    recovery = recover(regions, parents={"poi:a": "category:c", "poi:b": "category:c"})
    assert recovery.means[:, :2] == pytest.approx(places, abs=0.03)


def test_what_is_not_ascribed_to_groups_is_not_ascribed_to_their_places_either() -> None:
    """A category of one place, in chosen regions: both slopes exceed the limit of groups."""
    bars = of_bars(1.0)
    identified = replace(bars.aggregates, values=np.tile(bars.aggregates.values, 2), spread=None)
    regions = replace(
        bars,
        aggregates=replace(identified, features=("poi:bar", "poi:home", *bars.aggregates.features)),
    )
    parents = {"poi:bar": "category:bar", "poi:home": "category:home"}
    recovery = recover(regions, parents=parents, quiet=True)
    assert recovery.means[:, 0] == pytest.approx(recovery.means[:, 2], abs=0.05)


def test_suppressed_cells_leave_the_groups_together_the_population() -> None:
    regions, _ = world(people=3_000.0)
    values = regions.aggregates.values.copy()
    values[values * 3_000 < 5] = np.nan
    hidden = replace(regions, aggregates=replace(regions.aggregates, values=values))
    recovery = recover(hidden, parents=PARENTS)
    assert np.isnan(values).any() and recovery.shares @ recovery.means == pytest.approx(
        recovery.baseline, rel=1e-6, abs=1e-9
    )


def test_intervals_of_places_cover_the_truth() -> None:
    measured = []
    for seed in range(4):
        regions, means = world(seed, own=0.2)
        low, high = recover(regions, parents=PARENTS).interval(0.9)
        measured.append(
            np.mean((means >= low[:, : len(PARENTS)]) & (means <= high[:, : len(PARENTS)]))
        )
    assert np.mean(measured) > 0.85


def test_a_place_is_no_more_certain_than_its_category() -> None:
    """Places differ between groups only as their category does, so the category says it all."""
    regions, _ = world(people=30.0)
    recovery = recover(regions, parents=PARENTS)
    visited = np.flatnonzero(recovery.baseline[: len(PARENTS)] > 0)
    category = len(PARENTS) + visited // PLACES
    assert (recovery.log_sd[:, visited] > recovery.log_sd[:, category]).all()


def test_categories_that_regions_do_not_list_are_the_sums_of_their_places() -> None:
    regions, _ = world()
    listed = recover(regions, parents=PARENTS)
    places = regions.aggregates.select_features(np.arange(len(PARENTS)))
    summed = recover(replace(regions, aggregates=places), parents=PARENTS)
    assert summed.features == tuple(PARENTS)
    assert summed.means == pytest.approx(listed.means[:, : len(PARENTS)])
    assert summed.log_sd == pytest.approx(listed.log_sd[:, : len(PARENTS)])


def test_parents_of_other_places_change_nothing() -> None:
    regions, _ = world()
    alone = recover(regions)
    other = recover(regions, parents={"poi:elsewhere": "category:elsewhere"})
    assert np.array_equal(alone.means, other.means)
    assert np.array_equal(alone.covariance, other.covariance)


def test_intervals_of_places_hold_where_regions_chose_their_people() -> None:
    """The same places, whose regions also differ by chance."""
    inside = []
    for seed in range(4):
        regions, means = world(seed, own=0.2, people=1_000.0)
        rng = np.random.default_rng(seed)
        values = regions.aggregates.values * np.exp(
            rng.normal(0, 0.05, regions.aggregates.values.shape)
        )
        chosen = replace(
            regions, randomised=False, aggregates=replace(regions.aggregates, values=values)
        )
        recovery = recover(chosen, parents=PARENTS, quiet=True)
        low, high = (each[:, : len(PARENTS)] for each in recovery.interval(0.9))
        inside.append(np.mean((means >= low) & (means <= high)))
    assert np.mean(inside) > 0.85
