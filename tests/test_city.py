"""The simulated city keeps its promises: groups differ as the knob says, and days look like days."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2_contingency

from mobatlas.config import CityConfig, RunConfig, load_run
from mobatlas.data.city import City, expected_poi_distribution, simulate, simulate_visits, write_city, write_city_folder
from mobatlas.data.city import simulation as city_module
from mobatlas.errors import MobatlasError
from mobatlas.groups import Groups

Array = NDArray[Any]
DAY = 86_400


@functools.cache
def small_city(seed: int) -> City:
    return simulate(CityConfig(), seed)


def codes(column: Any) -> Array:
    """Strings as the ranks of their sorted values."""
    return np.unique(column.to_numpy(), return_inverse=True)[1]


def persons(city: City) -> Array:
    """The row in the people table of every visit."""
    return np.searchsorted(city.people["user_id"].to_numpy(), city.visits["user_id"].to_numpy())


def seconds(city: City, column: str) -> Array:
    """Whole seconds since the first midnight."""
    times = city.visits[column].to_numpy()
    midnight = city.visits["arrival"].to_numpy().min().astype("datetime64[D]")
    return (times - midnight).astype("timedelta64[us]").astype(np.int64) // 1_000_000


def groups_of(city: City, config: CityConfig) -> Array:
    groups = Groups.of(config.attributes)
    return groups.codes({name: city.people[name].to_pylist() for name in groups.attribute_names})


def at_pois(city: City) -> Array:
    return ~(city.visits["is_home"].to_numpy() | city.visits["is_work"].to_numpy())


def poi_numbers(city: City) -> Array:
    """The row in the pois table of every visit to a POI."""
    return np.searchsorted(city.pois["poi_id"].to_numpy(), city.visits["poi_id"].to_numpy()[at_pois(city)])


def visit_counts(city: City, config: CityConfig, group: Array | None = None) -> Array:
    """Visits of every group to every POI, (groups, pois)."""
    group = groups_of(city, config) if group is None else group
    counts = np.zeros((len(Groups.of(config.attributes)), config.pois))
    np.add.at(counts, (group[persons(city)[at_pois(city)]], poi_numbers(city)), 1)
    return counts


def jsd(p: Array, q: Array) -> float:
    """Jensen-Shannon divergence in bits, from counts or shares."""
    p, q = p / p.sum(), q / q.sum()
    middle = (p + q) / 2
    kl = [float((a[a > 0] * np.log2(a[a > 0] / middle[a > 0])).sum()) for a in (p, q)]
    return (kl[0] + kl[1]) / 2


def pairwise(rows: Array) -> dict[tuple[int, int], float]:
    return {(a, b): jsd(rows[a], rows[b]) for a, b in itertools.combinations(range(len(rows)), 2)}


def mean_jsd(rows: Array) -> float:
    return float(np.mean(list(pairwise(rows).values())))


def km(lat: Array, lon: Array, other_lat: Array, other_lon: Array) -> Array:
    east = (lon - other_lon) * np.cos(np.radians(37.54))
    return np.asarray(np.hypot(east, lat - other_lat) * 111.195)


def covered(city: City, config: CityConfig) -> Array:
    """Observed share of every person's every day, (people, days)."""
    since, until, person = seconds(city, "arrival"), seconds(city, "departure"), persons(city)
    share = np.zeros((config.users, config.days))
    for later in range(config.days):
        day = since // DAY + later
        inside = np.minimum(until, (day + 1) * DAY) - np.maximum(since, day * DAY)
        reaches = (inside > 0) & (day < config.days)
        np.add.at(share, (person[reaches], day[reaches]), inside[reaches] / DAY)
    return share


def window_lengths(city: City, run: RunConfig) -> tuple[Array, float]:
    """Tokens in every window that passes the coverage rule, and the share of windows that do: an independent count."""
    config, window = run.simulate, run.prepare.window
    person, home, work = persons(city), *(city.visits[c].to_numpy() for c in ("is_home", "is_work"))
    poi = np.full(len(person), -1)
    poi[at_pois(city)] = poi_numbers(city)
    visits = np.bincount(poi[poi >= 0], minlength=config.pois)
    frequent = np.zeros(config.pois, bool)
    frequent[np.argsort(-visits, kind="stable")[: run.prepare.vocabulary_size]] = True
    token = np.select([home, work, frequent[poi]], [-1, -2, poi], -3)
    first_day = seconds(city, "arrival") // DAY
    last_day = np.maximum(first_day, (seconds(city, "departure") - 1) // DAY)
    good = covered(city, config) >= run.prepare.quality.min_coverage  # (people, days)
    lengths, passing = [], []
    for start in range(0, config.days - window.days + 1, window.stride):
        inside = (first_day < start + window.days) & (last_day >= start)
        who, what = person[inside], token[inside]
        begins = np.r_[True, (who[1:] != who[:-1]) | (what[1:] != what[:-1])]
        passes = good[:, start : start + window.days].mean(1) >= run.prepare.quality.min_high_quality
        lengths.append(np.bincount(who[begins], minlength=config.users)[passes])
        passing.append(passes.mean())
    return np.concatenate(lengths), float(np.mean(passing))


def assert_pairs_as_in_the_paper(city: City, config: CityConfig) -> None:
    pairs = pairwise(visit_counts(city, config))
    assert min(pairs.values()) >= 0.40
    assert max(pairs.values()) <= 0.54
    age = Groups.of(config.attributes).level_codes[:, 0]
    by_age = [np.mean([v for (a, b), v in pairs.items() if abs(age[a] - age[b]) == apart]) for apart in (0, 1, 2, 3)]
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
    counts, expected = visit_counts(small_city(0), CityConfig()), expected_poi_distribution(CityConfig(), 0)
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
    shuffled = [mean_jsd(visit_counts(city, config, np.random.default_rng(i).permutation(group))) for i in range(5)]
    assert real < 1.15 * np.mean(shuffled)


def test_without_preferences_home_geography_alone_sets_groups_hardly_apart() -> None:
    assert 0 < mean_jsd(expected_poi_distribution(CityConfig(users=10, divergence=0), 0)) < 0.02


def contingency(config: CityConfig, seed: int) -> Array:
    city = simulate(config, seed)
    district, group = codes(city.people["home_district"]), groups_of(city, config)
    table = np.zeros((district.max() + 1, len(Groups.of(config.attributes))))
    np.add.at(table, (district, group), 1)
    return table


def test_districts_differ_in_composition_unless_segregation_is_zero() -> None:
    segregated = contingency(CityConfig(days=1), 1)
    assert chi2_contingency(segregated).pvalue < 1e-50
    for attribute in (segregated.reshape(16, 4, 2).sum(2), segregated.reshape(16, 4, 2).sum(1)):
        assert chi2_contingency(attribute).pvalue < 1e-10
    assert chi2_contingency(contingency(CityConfig(days=1, segregation=0), 1)).pvalue > 0.001


def test_visits_of_a_person_never_overlap_and_stay_within_the_horizon() -> None:
    city = small_city(0)
    person, since, until = persons(city), seconds(city, "arrival"), seconds(city, "departure")
    same = person[1:] == person[:-1]
    assert np.all(np.diff(person) >= 0)
    assert np.all(since[1:][same] >= until[:-1][same])
    assert np.all(until > since)
    assert since.min() >= 0
    assert until.max() <= 28 * DAY
    assert np.all(city.visits["arrival"].to_numpy().astype(np.int64) % 1_000_000 == 0)


def test_travel_takes_time() -> None:
    city = small_city(0)
    person, since, until = persons(city), seconds(city, "arrival"), seconds(city, "departure")
    lat, lon = city.visits["lat"].to_numpy(), city.visits["lon"].to_numpy()
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
    heard = CityConfig(users=800, dropout=0)
    silent = CityConfig(users=800, dropout=0.25)
    assert covered(simulate(heard, 0), heard).min() > 0.2
    shares = covered(simulate(silent, 0), silent)
    # A day is also empty when the stay that would cover it began on a silent day.
    assert 0.25 < np.mean(shares == 0) < 0.4


def test_a_group_of_shorter_range_stays_nearer_to_home() -> None:
    city = small_city(1)
    person = persons(city)
    home = {name: city.people[name].to_numpy()[person] for name in ("home_lat", "home_lon")}
    away = km(city.visits["lat"].to_numpy(), city.visits["lon"].to_numpy(), home["home_lat"], home["home_lon"])
    age = groups_of(city, CityConfig())[person] // 2
    means = [away[at_pois(city) & (age == level)].mean() for level in range(4)]
    assert means[3] < 0.85 * means[0]
    pois = city.pois
    anywhere = km(pois["lat"].to_numpy(), pois["lon"].to_numpy(), *(home[c][:1] for c in ("home_lat", "home_lon")))
    assert max(means) < anywhere.mean()


def test_people_return_to_their_favourite_places() -> None:
    config = CityConfig(users=1_000, pois=1_000, days=56)
    city = simulate(config, 2)
    person, poi = persons(city)[at_pois(city)], poi_numbers(city)
    group, category = groups_of(city, config)[person], codes(city.visits["category"])[at_pois(city)]
    # Independent visits: POIs change hands among the people of a group, within a category.
    kind = group * 20 + category
    exchanged = np.empty_like(poi)
    exchanged[np.argsort(kind, kind="stable")] = poi[np.lexsort((np.random.default_rng(0).random(len(poi)), kind))]

    def favourite_share(visited: Array) -> float:
        counts = np.zeros((config.users, config.pois))
        np.add.at(counts, (person, visited), 1)
        busy = counts[counts.sum(1) >= 20]
        return float((busy.max(1) / busy.sum(1)).mean())

    assert favourite_share(poi) > 2 * favourite_share(exchanged)


def test_the_day_has_a_rhythm() -> None:
    city = small_city(0)
    hour, weekday = seconds(city, "arrival") // 3600 % 24, seconds(city, "arrival") // DAY % 7
    category = city.visits["category"].to_numpy()
    assert np.mean((hour[category == "nightlife"] >= 19) | (hour[category == "nightlife"] < 3)) > 0.99
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
    young, old = (np.isin(category, kinds) for kinds in (("nightlife", "gym", "education"), ("health", "worship")))
    odds = [young[age == level].sum() / old[age == level].sum() for level in range(4)]
    assert odds[0] > 1.5 * odds[3]


def test_no_handful_of_pois_dominates() -> None:
    shares = np.sort(visit_counts(small_city(0), CityConfig()).sum(0))[::-1]
    shares /= shares.sum()
    assert shares[0] < 0.05
    assert 0.2 < shares[:24].sum() < 0.5
    assert np.all(shares > 0)


def test_most_people_work_and_only_they_have_work_visits() -> None:
    people, visits = small_city(0).people, small_city(0).visits
    idle = set(people.filter(pc.is_null(people["work_lat"]))["user_id"].to_pylist())
    assert 0.85 <= 1 - len(idle) / 4_000 <= 0.90
    assert people["work_lon"].null_count == len(idle)
    assert not idle & set(visits.filter(visits["is_work"])["user_id"].to_pylist())


def test_rows_carry_the_coordinates_of_their_place() -> None:
    city = small_city(0)
    person, lat = persons(city), city.visits["lat"].to_numpy()
    for flag, column in (("is_home", "home_lat"), ("is_work", "work_lat")):
        here = city.visits[flag].to_numpy()
        np.testing.assert_array_equal(lat[here], city.people[column].to_numpy()[person[here]])
    np.testing.assert_array_equal(lat[at_pois(city)], city.pois["lat"].to_numpy()[poi_numbers(city)])
    first = city.visits.slice(0, 1).to_pylist()[0]
    assert (first["user_id"], first["poi_id"], first["category"]) == ("u000001", "home:u000001", "home")
    assert {"D01", "D16"} <= set(city.people["home_district"].to_pylist())


def test_trajectories_of_the_small_preset_are_short_and_well_covered() -> None:
    lengths, passing = window_lengths(small_city(0), load_run(preset="small"))
    median, p95 = np.percentile(lengths, [50, 95])
    assert 6 <= median <= 9
    assert p95 < 18
    assert passing >= 0.8


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    config = CityConfig(users=300)
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        (tmp_path / name).mkdir()
        write_city(config, seed, tmp_path / name)
    first, again, other = (files(tmp_path / name) for name in "abc")
    assert set(first) == {"visits.parquet", "people.parquet", "pois.parquet"}
    assert first == again
    assert all(first[name] != other[name] for name in first)


def test_streamed_written_and_in_memory_visits_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(city_module, "CHUNK_PEOPLE", 300)
    config = CityConfig(users=1_000, days=9)
    progress: list[tuple[int, int]] = []
    facts = write_city(config, 2, tmp_path, on_progress=lambda done, total: progress.append((done, total)))
    assert progress == [(300, 1_000), (600, 1_000), (900, 1_000), (1_000, 1_000)]
    city = simulate(config, 2)
    batches = list(simulate_visits(config, 2))
    assert len(batches) == 4
    assert pa.Table.from_batches(batches).equals(city.visits)
    for name in ("visits", "people", "pois"):
        assert pq.read_table(tmp_path / f"{name}.parquet").equals(getattr(city, name))
    assert facts["visits"] == city.visits.num_rows


def test_tables_that_are_not_kept_give_the_same_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CityConfig(users=500, days=7)
    kept = simulate(config, 1).visits
    monkeypatch.setattr("mobatlas.data.city.days.Tables.KEEP_BYTES", 0)
    assert simulate(config, 1).visits.equals(kept)


def test_a_city_folder_has_a_manifest_and_is_not_overwritten_unasked(tmp_path: Path) -> None:
    config = CityConfig(users=50, days=3)
    facts = write_city_folder(tmp_path / "city", config, 0)
    assert pq.read_metadata(tmp_path / "city" / "visits.parquet").num_rows == facts["visits"]
    assert (tmp_path / "city" / "manifest.json").is_file()
    with pytest.raises(MobatlasError, match="overwrite"):
        write_city_folder(tmp_path / "city", config, 0)


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
    pairs = pairwise(expected_poi_distribution(CityConfig(users=10, attributes={"income": tuple("12345")}), 1))
    apart = [np.mean([value for (a, b), value in pairs.items() if b - a == distance]) for distance in (1, 2, 3, 4)]
    assert np.all(np.diff(apart) > 0.005)


@pytest.mark.parametrize(
    "options",
    [
        {"users": 1},
        {"users": 5, "districts": 300},
        {"days": 1},
        {"pois": 12},
        {"dropout": 0.99},
        {"activity": 5},
        {"activity": 0.001, "dropout": 0},
        {"segregation": 10, "districts": 2},
    ],
)
def test_extreme_cities_work(options: dict[str, Any]) -> None:
    city = simulate(CityConfig(**({"users": 200} | options)), 0)
    assert city.people.num_rows == options.get("users", 200)
    assert city.visits.schema == city_module.VISITS_SCHEMA
    assert city.visits.num_rows > 0
    assert all(city.visits[name].null_count == 0 for name in city.visits.column_names)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"attributes": {"age": ("under 30, student", "30+")}}, "comma"),
        ({"attributes": {"age": ("x", "x")}}, "each level once"),
        ({"attributes": {}}, "at least one attribute"),
        ({"attributes": {"home_district": ("x", "y")}}, "already a column"),
        ({"pois": 12, "divergence": 0.89}, "cannot be reached with 12 POIs"),
        ({"attributes": {f"a{i}": ("0", "1") for i in range(13)}}, "too much together"),
    ],
)
def test_bad_cities_are_refused_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MobatlasError, match=sentence):
        simulate(CityConfig(**({"users": 20} | options)), 0)


def test_a_negative_seed_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MobatlasError, match="seed"):
        simulate(CityConfig(users=1), -1)
    with pytest.raises(MobatlasError, match="no such folder"):
        write_city(CityConfig(users=1), 0, tmp_path / "nowhere")


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


@pytest.mark.slow
def test_ten_million_visits_are_written_in_bounded_memory(tmp_path: Path) -> None:
    program = (
        "import resource, sys; from pathlib import Path; from mobatlas.config import CityConfig; "
        "from mobatlas.data.city import write_city; "
        "facts = write_city(CityConfig(users=155_000), 0, Path(sys.argv[1])); "
        "print(facts['visits'], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    visits, peak = map(int, run.stdout.split())
    assert visits > 10_000_000
    assert peak * (1 if sys.platform == "darwin" else 1024) < 1.5e9
