"""Days in the simulated city are plausible: people sleep, travel, work and return to places."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc
import pytest

from mobatlas.config import CityConfig, load_run
from mobatlas.data.city import simulate
from tests.cities import (
    DAY,
    Array,
    at_pois,
    codes,
    covered,
    groups_of,
    km,
    persons,
    poi_numbers,
    seconds,
    small_city,
    visit_counts,
    window_lengths,
)


def test_visits_of_a_person_never_overlap_and_stay_within_the_horizon() -> None:
    city = small_city(0)
    person = persons(city)
    since = seconds(city, "arrival")
    until = seconds(city, "departure")
    same = person[1:] == person[:-1]
    assert np.all(np.diff(person) >= 0)
    assert np.all(since[1:][same] >= until[:-1][same])
    assert np.all(until > since)
    assert since.min() >= 0
    assert until.max() <= 28 * DAY
    assert np.all(city.visits["arrival"].to_numpy().astype(np.int64) % 1_000_000 == 0)


def test_travel_takes_time() -> None:
    city = small_city(0)
    person = persons(city)
    since = seconds(city, "arrival")
    until = seconds(city, "departure")
    lat = city.visits["lat"].to_numpy()
    lon = city.visits["lon"].to_numpy()
    same = person[1:] == person[:-1]
    distance = km(lat[1:], lon[1:], lat[:-1], lon[:-1])[same]
    assert distance.max() > 10
    assert np.all((since[1:] - until[:-1])[same] / 3600 >= distance / 25.1)  # km/h


def test_nights_and_days_in_are_one_stay_at_home() -> None:
    city = small_city(0)
    home = city.visits["is_home"].to_numpy()
    midnights = ((seconds(city, "departure") - 1) // DAY - seconds(city, "arrival") // DAY)[home]
    assert np.mean(midnights >= 1) > 0.5
    assert np.mean(midnights >= 2) > 0.02
    assert set(city.visits["category"].to_numpy()[home]) == {"home"}


def test_silent_days_are_missing_from_the_visits() -> None:
    observed = CityConfig(users=800, dropout=0)
    silent = CityConfig(users=800, dropout=0.25)
    assert covered(simulate(observed, 0), observed).min() > 0.2
    shares = covered(simulate(silent, 0), silent)
    # A day is also empty when the stay that would cover it began on a silent day.
    assert 0.25 < np.mean(shares == 0) < 0.4


def test_a_group_of_shorter_range_stays_nearer_to_home() -> None:
    city = small_city(1)
    person = persons(city)
    home = {name: city.people[name].to_numpy()[person] for name in ("home_lat", "home_lon")}
    away = km(
        city.visits["lat"].to_numpy(),
        city.visits["lon"].to_numpy(),
        home["home_lat"],
        home["home_lon"],
    )
    age = groups_of(city, CityConfig())[person] // 2
    means = [away[at_pois(city) & (age == level)].mean() for level in range(4)]
    assert means[3] < 0.85 * means[0]
    pois = city.pois
    anywhere = km(
        pois["lat"].to_numpy(),
        pois["lon"].to_numpy(),
        *(home[c][:1] for c in ("home_lat", "home_lon")),
    )
    assert max(means) < anywhere.mean()


def test_people_return_to_their_favourite_places() -> None:
    config = CityConfig(users=1_000, pois=1_000, days=56)
    city = simulate(config, 2)
    person = persons(city)[at_pois(city)]
    poi = poi_numbers(city)
    group = groups_of(city, config)[person]
    category = codes(city.visits["category"])[at_pois(city)]
    # Independent visits: POIs change hands among the people of a group, within a category.
    kind = group * 20 + category
    exchanged = np.empty_like(poi)
    exchanged[np.argsort(kind, kind="stable")] = poi[
        np.lexsort((np.random.default_rng(0).random(len(poi)), kind))
    ]

    def favourite_share(visited: Array) -> float:
        counts = np.zeros((config.users, config.pois))
        np.add.at(counts, (person, visited), 1)
        busy = counts[counts.sum(1) >= 20]
        return float((busy.max(1) / busy.sum(1)).mean())

    assert favourite_share(poi) > 2 * favourite_share(exchanged)


def test_the_day_has_a_rhythm() -> None:
    city = small_city(0)
    hour = seconds(city, "arrival") // 3600 % 24
    weekday = seconds(city, "arrival") // DAY % 7
    category = city.visits["category"].to_numpy()
    assert (
        np.mean((hour[category == "nightlife"] >= 19) | (hour[category == "nightlife"] < 3)) > 0.99
    )
    assert np.mean(np.isin(weekday[category == "nightlife"], (4, 5))) > 0.45
    assert np.all((hour[category == "grocery"] >= 5) & (hour[category == "grocery"] <= 22))
    assert np.mean(weekday[category == "work"] < 5) > 0.9
    assert 8 <= np.median(hour[category == "work"]) <= 10
    lunch = hour[category == "food"]
    assert np.mean((lunch >= 11) & (lunch <= 14)) > 0.3


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_young_go_out_and_the_old_to_church_and_doctor(seed: int) -> None:
    city = small_city(seed)
    age = groups_of(city, CityConfig())[persons(city)] // 2
    category = city.visits["category"].to_numpy()
    young, old = (
        np.isin(category, kinds)
        for kinds in (("nightlife", "gym", "education"), ("health", "worship"))
    )
    odds = [young[age == level].sum() / old[age == level].sum() for level in range(4)]
    assert odds[0] > 1.5 * odds[3]


def test_no_handful_of_pois_dominates() -> None:
    shares = np.sort(visit_counts(small_city(0), CityConfig()).sum(0))[::-1]
    shares /= shares.sum()
    assert shares[0] < 0.05
    assert 0.2 < shares[:24].sum() < 0.5
    assert np.all(shares > 0)


def test_most_people_work_and_only_they_have_work_visits() -> None:
    people = small_city(0).people
    visits = small_city(0).visits
    idle = set(people.filter(pc.is_null(people["work_lat"]))["user_id"].to_pylist())
    assert 0.85 <= 1 - len(idle) / 4_000 <= 0.90
    assert people["work_lon"].null_count == len(idle)
    assert not idle & set(visits.filter(visits["is_work"])["user_id"].to_pylist())


def test_rows_carry_the_coordinates_of_their_place() -> None:
    city = small_city(0)
    person = persons(city)
    lat = city.visits["lat"].to_numpy()
    for flag, column in (("is_home", "home_lat"), ("is_work", "work_lat")):
        rows = city.visits[flag].to_numpy()
        np.testing.assert_array_equal(lat[rows], city.people[column].to_numpy()[person[rows]])
    np.testing.assert_array_equal(
        lat[at_pois(city)], city.pois["lat"].to_numpy()[poi_numbers(city)]
    )
    first = city.visits.slice(0, 1).to_pylist()[0]
    assert (first["user_id"], first["poi_id"], first["category"]) == (
        "u000001",
        "home:u000001",
        "home",
    )
    assert {"D01", "D16"} <= set(city.people["home_district"].to_pylist())


def test_trajectories_of_the_small_preset_are_short_and_well_covered() -> None:
    lengths, passing = window_lengths(small_city(0), load_run(preset="small"))
    median, p95 = np.percentile(lengths, [50, 95])
    assert 6 <= median <= 9
    assert p95 < 18
    assert passing >= 0.8
