"""The groups of the simulated city differ as configured, in visits and in homes."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from mobatlas.config import CityConfig, load_run
from mobatlas.data.city import City, expected_poi_distribution, simulate
from mobatlas.groups import Groups
from tests.cities import (
    Array,
    codes,
    groups_of,
    jsd,
    mean_jsd,
    pairwise,
    small_city,
    visit_counts,
    window_lengths,
)


def assert_pairs_as_in_the_paper(city: City, config: CityConfig) -> None:
    pairs = pairwise(visit_counts(city, config))
    assert min(pairs.values()) >= 0.40
    assert max(pairs.values()) <= 0.54
    age = Groups.of(config.attributes).level_codes[:, 0]
    by_age = [
        np.mean([v for (a, b), v in pairs.items() if abs(age[a] - age[b]) == apart])
        for apart in (0, 1, 2, 3)
    ]
    assert by_age[1] < by_age[2] < by_age[3]
    assert by_age[0] < np.median(list(pairs.values()))  # same age, opposite gender
    youngest_against_oldest = {pair for pair in pairs if abs(age[pair[0]] - age[pair[1]]) == 3}
    assert max(pairs, key=lambda pair: pairs[pair]) in youngest_against_oldest


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pairs_of_groups_differ_as_in_the_paper(seed: int) -> None:
    assert_pairs_as_in_the_paper(small_city(seed), CityConfig())


@pytest.mark.parametrize("divergence", [0.1, 0.44, 0.8])
def test_the_knob_is_the_mean_pairwise_divergence_of_expected_visits(divergence: float) -> None:
    expected = expected_poi_distribution(CityConfig(users=10, divergence=divergence), 3)
    np.testing.assert_allclose(expected.sum(1), 1)
    assert mean_jsd(expected) == pytest.approx(divergence, abs=0.002)


def test_realised_visits_follow_the_expected_distribution() -> None:
    counts = visit_counts(small_city(0), CityConfig())
    expected = expected_poi_distribution(CityConfig(), 0)
    for group in range(len(counts)):
        distances = [jsd(counts[group], other) for other in expected]
        assert distances[group] < 0.03
        assert sorted(distances)[1] > 0.3


def test_a_larger_knob_sets_realised_groups_further_apart() -> None:
    realised = []
    for divergence in (0.0, 0.15, 0.3, 0.6):
        config = CityConfig(users=1_500, divergence=divergence)
        realised.append(mean_jsd(visit_counts(simulate(config, 4), config)))
    assert np.all(np.diff(realised) > 0.1)


def test_groups_without_preferences_differ_by_sampling_noise_alone() -> None:
    config = CityConfig(divergence=0, segregation=0)
    city = simulate(config, 5)
    group = groups_of(city, config)
    real = mean_jsd(visit_counts(city, config, group))
    shuffled = [
        mean_jsd(visit_counts(city, config, np.random.default_rng(i).permutation(group)))
        for i in range(5)
    ]
    assert real < 1.15 * np.mean(shuffled)


def test_without_preferences_home_geography_alone_sets_groups_hardly_apart() -> None:
    assert 0 < mean_jsd(expected_poi_distribution(CityConfig(users=10, divergence=0), 0)) < 0.02


def contingency(config: CityConfig, seed: int) -> Array:
    city = simulate(config, seed)
    district = codes(city.people["home_district"])
    group = groups_of(city, config)
    table = np.zeros((district.max() + 1, len(Groups.of(config.attributes))))
    np.add.at(table, (district, group), 1)
    return table


def test_districts_differ_in_composition_unless_segregation_is_zero() -> None:
    segregated = contingency(CityConfig(days=1), 1)
    assert chi2_contingency(segregated).pvalue < 1e-50
    for attribute in (segregated.reshape(16, 4, 2).sum(2), segregated.reshape(16, 4, 2).sum(1)):
        assert chi2_contingency(attribute).pvalue < 1e-10
    assert chi2_contingency(contingency(CityConfig(days=1, segregation=0), 1)).pvalue > 0.001


@pytest.mark.parametrize(
    "attributes",
    [
        {"income": ("low", "middle", "high")},
        {"only": ("everybody",)},
        {"sex": ("f", "m")},
        {"age": ("a", "b", "c", "d", "e"), "sex": ("f", "m"), "one": ("x",), "car": ("yes", "no")},
    ],
)
def test_any_table_of_attributes_makes_a_city(attributes: dict[str, tuple[str, ...]]) -> None:
    config = CityConfig(users=2_000, days=14, attributes=attributes)
    city = simulate(config, 0)
    assert np.bincount(groups_of(city, config), minlength=len(Groups.of(attributes))).min() > 0
    pairs = pairwise(expected_poi_distribution(config, 0))
    if pairs:
        assert np.mean(list(pairs.values())) == pytest.approx(config.divergence, abs=0.002)
    for name, levels in attributes.items():
        assert set(city.people[name].to_pylist()) == set(levels)


def test_neighbouring_levels_of_an_ordered_attribute_are_alike() -> None:
    pairs = pairwise(
        expected_poi_distribution(CityConfig(users=10, attributes={"income": tuple("12345")}), 1)
    )
    apart = [
        np.mean([value for (a, b), value in pairs.items() if b - a == distance])
        for distance in (1, 2, 3, 4)
    ]
    assert np.all(np.diff(apart) > 0.005)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_paper_preset_has_the_papers_lengths_and_divergences(seed: int) -> None:
    run = load_run(preset="paper")
    city = simulate(run.simulate, seed)
    assert_pairs_as_in_the_paper(city, run.simulate)
    lengths, passing = window_lengths(city, run)
    median, p95 = np.percentile(lengths, [50, 95])
    assert 30 <= median <= 34
    assert 62 <= p95 <= 74
    assert passing >= 0.8
