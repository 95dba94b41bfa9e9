from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mobatlas.data.readers.geolife import cluster_places, detect_stays, place_centres
from mobatlas.data.types import Floats, haversine_km

METRE = 1 / 111_195.08  # degrees of longitude on the equator
MINUTE = 60.0


def track(*points: tuple[float, float]) -> tuple[Floats, Floats]:
    """Coordinates (points, 2) and seconds from (minute, metres east) on the equator."""
    minutes, east = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return np.column_stack([np.zeros(len(east)), east * METRE]), minutes * MINUTE


def stays_of(
    points: Sequence[tuple[float, float]], gap_minutes: float = math.inf
) -> list[tuple[float, float, float]]:
    """(arrival minute, departure minute, metres east) of stays of 20 minutes within 200 m."""
    stays = detect_stays(
        *track(*points), metres=200, min_seconds=20 * MINUTE, max_gap=gap_minutes * MINUTE
    )
    rows = zip(stays.arrival / MINUTE, stays.departure / MINUTE, stays.lon / METRE, strict=True)
    return [(float(a), float(d), round(float(x), 3)) for a, d, x in rows]


def test_half_an_hour_at_one_spot_is_a_stay_and_the_walk_to_it_is_not() -> None:
    walk = [(minute, minute * 80.0) for minute in range(10)]
    there = [(10 + minute, 1_000.0 + (minute % 2) * 10) for minute in range(0, 31, 5)]
    assert stays_of(walk + there) == [(10, 40, round(1_000 + 30 / 7, 3))]


def test_a_stay_of_exactly_the_least_duration_counts_and_one_second_less_does_not() -> None:
    assert stays_of([(0, 0), (20, 0)]) == [(0, 20, 0)]
    assert stays_of([(0, 0), (20 - 1 / 60, 0)]) == []


def test_points_beyond_the_radius_of_the_first_point_end_the_stay() -> None:
    assert stays_of([(0, 0), (15, 190), (25, 150), (30, 210), (35, 215), (55, 220)]) == [
        (0, 25, round(340 / 3, 3)),
        (30, 55, 215),
    ]


def test_silence_at_the_same_spot_is_part_of_the_stay() -> None:
    assert stays_of([(0, 0), (480, 30)], gap_minutes=720) == [(0, 480, 15)]


def test_silence_longer_than_the_limit_ends_the_stay() -> None:
    points = [(0, 0.0), (25, 0.0), (1_000, 0.0), (1_030, 0.0)]
    assert stays_of(points, gap_minutes=720) == [(0, 25, 0), (1_000, 1_030, 0)]
    assert stays_of(points) == [(0, 1_030, 0)]


def test_silence_that_ends_somewhere_else_is_no_stay() -> None:
    assert stays_of([(0, 0), (120, 5_000)]) == []


def test_a_person_without_points_has_no_stays() -> None:
    assert stays_of([]) == []


def test_a_long_stay_is_found_whole() -> None:
    points = [(minute / 10, float(minute % 7)) for minute in range(14_400)]
    stays = detect_stays(*track(*points), metres=200, min_seconds=1_200)
    assert stays.points.tolist() == [14_400]


def stays_by_plain_search(points: Floats, seconds: Floats, gap: float) -> list[tuple[float, float]]:
    """Li et al. 2008, one point at a time."""
    stays = []
    anchor = 0
    while anchor < len(seconds):
        end = anchor + 1
        while (
            end < len(seconds)
            and haversine_km(points[anchor], points[end]) <= 0.2
            and seconds[end] - seconds[end - 1] <= gap
        ):
            end += 1
        if seconds[end - 1] - seconds[anchor] >= 1_200:
            stays.append((float(seconds[anchor]), float(seconds[end - 1])))
            anchor = end
        else:
            anchor += 1
    return stays


steps = st.lists(st.tuples(st.integers(0, 40), st.integers(-150, 150)), max_size=80)


@given(steps=steps, gap=st.sampled_from([15 * MINUTE, 30 * MINUTE, math.inf]))
@settings(deadline=None)
def test_the_fast_search_finds_what_the_plain_search_finds(
    steps: list[tuple[int, int]], gap: float
) -> None:
    moves = np.cumsum(np.array(steps, dtype=np.float64).reshape(-1, 2), axis=0)
    points, seconds = track(*map(tuple, moves.tolist()))
    stays = detect_stays(points, seconds, 200, 1_200, gap)
    bounds = list(zip(stays.arrival.tolist(), stays.departure.tolist(), strict=True))
    assert bounds == stays_by_plain_search(points, seconds, gap)


def test_distance_agrees_with_a_published_pair() -> None:
    paris = np.array([48.8566, 2.3522])
    new_york = np.array([40.7128, -74.0060])
    assert haversine_km(paris, new_york) == pytest.approx(5_837, rel=1e-3)


def test_stays_within_reach_of_each_other_are_one_place_and_its_centre_is_their_mean() -> None:
    lat = np.zeros(4)
    lon = np.array([0.0, 90.0, 180.0, 500.0]) * METRE
    labels = cluster_places(lat, lon, metres=100)
    assert labels.tolist() == [0, 0, 0, 1]
    _, centres = place_centres(lat, lon, labels)
    assert centres / METRE == pytest.approx([90, 500])


def test_a_degree_of_longitude_shrinks_to_the_north() -> None:
    lat = np.full(2, 60.0)
    lon = np.array([0.0, 150 * METRE])  # 75 m apart
    assert cluster_places(lat, lon, metres=100).tolist() == [0, 0]
