"""The simulated city: its map, and the preferences and rhythm of its groups.

A group's preference is an exponential tilt of the popularity of POIs. The scale of the tilts is
chosen so that the expected visit distributions of groups differ by the requested divergence. These
distributions include home geography.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mobatlas.config import CityConfig
from mobatlas.data.types import Floats, Ints
from mobatlas.errors import MobatlasError
from mobatlas.groups import Groups

RADIUS_KM = 12.0
CELL_KM = 1.5  # resolution of trip origins; finer cells cost memory without a visible effect
LAT = 37.54
LON = -77.44
KM_PER_DEGREE = 111.195  # rounded; another value would move every simulated POI

# Share of the POIs in each category.
CATEGORIES = {
    "food": 0.20,
    "coffee": 0.09,
    "grocery": 0.10,
    "shopping": 0.12,
    "gym": 0.06,
    "education": 0.05,
    "nightlife": 0.06,
    "park": 0.07,
    "health": 0.07,
    "worship": 0.04,
    "entertainment": 0.06,
    "services": 0.08,
}


@dataclass(frozen=True)
class Places:
    """Everything with a position; coordinates are km east and north of the centre."""

    cells: Floats  # (cells, 2) centres
    district_sizes: Floats  # (districts,) shares of the population
    composition: Floats  # (districts, groups) p(group | district)
    home_cells: Floats  # (districts, cells) p(home cell | district)
    work_cells: Floats  # (cells, cells) p(work cell | home cell)
    pois: Floats  # (pois, 2)
    category: Ints  # (pois,) ascending, so that a category is a slice
    popularity: Floats  # (pois,)

    @property
    def group_home_cells(self) -> Floats:
        """p(home cell | group): (groups, cells)."""
        joint = self.district_sizes[:, None] * self.composition  # (districts, groups)
        return np.asarray((joint / joint.sum(0)).T @ self.home_cells)

    @property
    def category_bounds(self) -> Ints:
        """First POI of each category, and the end: (categories + 1,)."""
        return np.searchsorted(self.category, np.arange(len(CATEGORIES) + 1))


def build_places(config: CityConfig, rng: np.random.Generator) -> Places:
    """Draw a city."""
    steps = np.arange(-RADIUS_KM + CELL_KM / 2, RADIUS_KM, CELL_KM)
    square = np.stack(np.meshgrid(steps, steps), -1).reshape(-1, 2)
    cells = square[np.hypot(*square.T) <= RADIUS_KM]  # (cells, 2)
    radius = np.hypot(*cells.T)  # (cells,)
    # Work centres: downtown, and three around it.
    angles = rng.uniform(0, 2 * np.pi) + np.arange(3) * 2 * np.pi / 3
    around = rng.uniform(5, 8, 3) * np.array([np.cos(angles), np.sin(angles)])  # (2, 3)
    centres = np.concatenate([np.zeros((1, 2)), around.T])

    density = np.exp(-radius / 9) * rng.lognormal(0, 0.3, len(cells))  # (cells,) of homes
    home_cells, sizes = _districts(config.districts, cells, density, rng)

    near = np.exp(-(distance(cells, centres) ** 2) / (2 * 1.3**2))  # (cells, centres)
    jobs = near @ np.array([1.0, 0.4, 0.4, 0.4]) + 0.01
    work_cells = jobs * np.exp(-distance(cells, cells) / 10)
    work_cells /= work_cells.sum(1, keepdims=True)

    attraction = np.exp(-radius / 8) + 0.5 * near.sum(1)
    poi_cells = rng.choice(len(cells), config.pois, p=attraction / attraction.sum())
    return Places(
        cells=cells,
        district_sizes=sizes,
        composition=_composition(config, sizes, rng),
        home_cells=home_cells,
        work_cells=work_cells,
        pois=scatter(cells[poi_cells], rng),
        category=np.repeat(np.arange(len(CATEGORIES)), _poi_counts(config.pois)),
        popularity=rng.lognormal(0, 0.6, config.pois),
    )


def scatter(centres: Floats, rng: np.random.Generator) -> Floats:
    """A uniform position in each of the cells with these centres: (n, 2)."""
    return centres + rng.uniform(-CELL_KM / 2, CELL_KM / 2, centres.shape)


def coordinates(positions: Floats) -> tuple[Floats, Floats]:
    """Latitudes and longitudes of positions in km, to a decimetre."""
    lat = LAT + positions[:, 1] / KM_PER_DEGREE
    lon = LON + positions[:, 0] / (KM_PER_DEGREE * np.cos(np.radians(LAT)))
    return lat.round(6), lon.round(6)


def distance(a: Floats, b: Floats) -> Floats:
    """Kilometres between all positions of two lists: (a, b)."""
    return np.asarray(np.hypot(a[:, None, 0] - b[None, :, 0], a[:, None, 1] - b[None, :, 1]))


def _districts(
    count: int, cells: Floats, density: Floats, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """p(home cell | district), (districts, cells), and population shares, (districts,)."""
    # A sunflower pattern covers the disc evenly for any number of districts.
    turn = np.arange(count) * np.pi * (3 - np.sqrt(5))
    reach = RADIUS_KM * np.sqrt((np.arange(count) + 0.5) / count)
    centres = np.stack([reach * np.cos(turn), reach * np.sin(turn)], 1)
    km = distance(centres, cells)  # (districts, cells)
    member = np.zeros_like(km)
    member[km.argmin(0), np.arange(len(cells))] = 1
    # With more districts than cells, some share a cell.
    empty = np.flatnonzero(member.sum(1) == 0)
    member[empty, km[empty].argmin(1)] = 1
    homes = member * density
    sizes = homes.sum(1) * rng.lognormal(0, 0.2, count)
    return homes / homes.sum(1, keepdims=True), sizes / sizes.sum()


def _composition(config: CityConfig, sizes: Floats, rng: np.random.Generator) -> Floats:
    """p(group | district): districts lean towards levels of each attribute."""
    levels = Groups.of(config.attributes).level_codes  # (groups, attributes)
    lean = 0.15 * rng.standard_normal((config.districts, len(levels)))
    for attribute, names in enumerate(config.attributes.values()):
        if len(names) == 1:
            continue
        position = 2 * levels[:, attribute] / (len(names) - 1) - 1  # (groups,) from -1 to 1
        # Zero mean and unit spread across districts, so that every seed gives segregation.
        draws = rng.standard_normal((2, config.districts))
        draws -= draws.mean(1, keepdims=True)
        tilt, middle = draws / np.maximum(draws.std(1, keepdims=True), 1e-12)
        if len(names) > 2:
            lean += 0.8 * np.outer(tilt, position) + 0.4 * np.outer(middle, position**2)
        else:
            lean += 0.4 * np.outer(tilt, position)
    shares = np.exp(config.segregation * lean)
    shares /= shares.sum(1, keepdims=True)
    # Raked to groups of about equal size; otherwise the first and last levels would be favoured.
    population = rng.lognormal(0, 0.07, len(levels))
    population /= population.sum()
    for _ in range(50):
        shares *= population / (sizes @ shares)
        shares /= shares.sum(1, keepdims=True)
    return np.asarray(shares)


def _poi_counts(pois: int) -> Ints:
    """POIs of each category: at least one, the rest by share."""
    shares = np.cumsum(list(CATEGORIES.values()))
    ends = np.round(shares * (pois - len(CATEGORIES))).astype(np.int64)
    return 1 + np.diff(ends, prepend=0)


class Slot(NamedTuple):
    """An opportunity to go out, once a day."""

    hour: float  # mean time of arrival
    spread: float  # hours
    stay: float  # median, minutes
    rate: float  # outings a day of an average person
    appetite: dict[str, float]  # relative demand by category


WORKDAY = (
    Slot(
        7.4,
        0.4,
        20,
        0.11,
        {"coffee": 4, "gym": 2, "education": 2, "park": 1, "services": 1, "grocery": 0.5},
    ),
    Slot(
        12.4,
        0.4,
        35,
        0.20,
        {"food": 6, "coffee": 2, "shopping": 1, "services": 1.5, "park": 0.7, "health": 0.7},
    ),
    Slot(
        17.6,
        0.5,
        35,
        0.28,
        {"grocery": 4, "gym": 2, "shopping": 2, "education": 1, "health": 1, "services": 1.5},
    ),
    Slot(
        19.6,
        0.6,
        75,
        0.20,
        {"food": 4, "entertainment": 2, "gym": 1, "park": 1, "worship": 0.5, "shopping": 1},
    ),
    Slot(22.0, 0.6, 100, 0.04, {"nightlife": 6, "entertainment": 1, "food": 1}),
)
FREE_DAY = (
    Slot(
        9.6,
        0.8,
        50,
        0.26,
        {"worship": 2.5, "park": 2, "coffee": 2.5, "grocery": 2, "gym": 1.5, "health": 2},
    ),
    Slot(
        12.4,
        0.6,
        50,
        0.28,
        {"food": 4, "shopping": 2, "grocery": 2, "health": 1, "services": 1.5, "education": 1.5},
    ),
    Slot(
        15.4,
        0.8,
        60,
        0.32,
        {"shopping": 3, "park": 2, "entertainment": 1.5, "coffee": 1.5, "services": 1, "gym": 1},
    ),
    Slot(
        18.8,
        0.7,
        75,
        0.28,
        {"food": 4, "entertainment": 2, "grocery": 2, "gym": 1, "education": 0.5},
    ),
    Slot(22.2, 0.7, 120, 0.06, {"nightlife": 6, "entertainment": 1, "food": 1}),
)
SLOTS = (FREE_DAY, WORKDAY)  # indexed by whether the person works that day
MIDDAY = 1
NIGHT = 4
NIGHT_BY_WEEKDAY = np.array([0.5, 0.5, 0.6, 0.8, 2.0, 2.2, 0.6])  # Monday first
WORK_BY_WEEKDAY = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.15, 0.1])

ACTIVITY_SPREAD = 0.76  # standard deviation of a person's log activity
ATTENDANCE = (4.0, 2.2)  # Beta parameters of the chance of going to work on a weekday
RANGE_KM = 4.0
MAX_SCALE = 128.0
TOLERANCE = 2e-5  # bits
MAX_PAIR_GAP = 0.01  # relative to the mean divergence
MAX_ROUNDS = 12  # of equalising pairs
MAX_GROUPS = 24  # whose pairs are equalised; a round costs in proportion to the pairs

# Shares of the variance of a group's preference in common with groups of similar attributes. Most
# is its own: the paper's pairwise JSDs, 0.40 to 0.54 bits, differ by a tenth from their mean.
ORDERED_SHARE = 0.12
BINARY_SHARE = 0.01
ARC = 2 * np.pi / 3
# Share of a preference factor that the POIs of a category have in common. It is larger for factors
# that groups share, so that attributes explain differences between categories.
SHARED_BY_CATEGORY = 0.6
OWN_BY_CATEGORY = 0.1
# How the first ordered attribute (age, by default) shifts preference between categories.
LIFE_COURSE = {
    "nightlife": 1.5,
    "gym": 1.0,
    "education": 0.8,
    "coffee": 0.6,
    "entertainment": 0.4,
    "food": 0.3,
    "shopping": 0.0,
    "services": -0.3,
    "grocery": -0.5,
    "park": -0.7,
    "worship": -1.3,
    "health": -1.3,
}


@dataclass(frozen=True)
class Habits:
    """Reach, activity and employment of groups."""

    range_km: Floats  # (groups,) of the exponential distance decay
    activity: Floats  # (groups,) factor on the rate of outings
    employed: Floats  # (groups,) share of people with a work location


@dataclass(frozen=True)
class Behaviour:
    """Behaviour that differs between groups."""

    habits: Habits
    tilt: Floats  # (groups, pois) factor on popularity
    appetite: Floats  # (groups, 2, slots, categories) p(category | free day or workday, slot)
    expected: Floats  # (groups, pois) expected distribution of POI visits


def build_behaviour(config: CityConfig, places: Places, rng: np.random.Generator) -> Behaviour:
    """Draw preferences and scale them to the divergence of the configuration."""
    groups = Groups.of(config.attributes)
    habits = _habits(config, groups)
    visits = _ExpectedVisits(config, places, habits)
    without_tilt = visits(np.ones((len(groups), config.pois)))  # (groups, pois)
    preferences = _Preferences(groups, places, without_tilt.mean(0), rng)
    ranks = preferences(np.zeros((len(groups), len(groups))))  # (groups, pois)
    scale = _calibrate(config, visits, ranks)
    if scale and len(groups) <= MAX_GROUPS:
        ranks = _equalise_pairs(preferences, visits, ranks, scale)
        scale = _calibrate(config, visits, ranks)
    tilt = np.exp(scale * (ranks - 1))
    return Behaviour(habits, tilt, visits.appetite(tilt), visits(tilt))


def slot_rates() -> Floats:
    """Outings per day of an average person: (2, weekdays, slots), free days first."""
    rates = np.array([[slot.rate for slot in slots] for slots in SLOTS])  # (2, slots)
    by_weekday = np.repeat(rates[:, None], 7, 1)  # (2, 7, slots)
    by_weekday[:, :, NIGHT] *= NIGHT_BY_WEEKDAY
    return by_weekday


def weekdays(config: CityConfig) -> Ints:
    """The weekday of every simulated day, Monday 0: (days,)."""
    return (config.start.weekday() + np.arange(config.days)) % 7


def decay(places: Places, range_km: float) -> Floats:
    """exp(-distance / range) from every cell to every POI: (cells, pois)."""
    return np.asarray(np.exp(-distance(places.cells, places.pois) / range_km))


def pairwise_jsd(rows: Floats) -> Floats:
    """Jensen-Shannon divergence in bits of every pair of distributions: (rows, rows)."""
    entropies = _entropy(rows)  # (rows,)
    divergences = np.zeros((len(rows), len(rows)))
    for first, row in enumerate(rows[:-1]):
        rest = slice(first + 1, None)
        divergences[first, rest] = (
            _entropy((row + rows[rest]) / 2) - (entropies[first] + entropies[rest]) / 2
        )
    return divergences + divergences.T


def mean_pairwise_jsd(rows: Floats) -> float:
    """The mean over pairs of different rows."""
    return float(pairwise_jsd(rows).sum() / max(1, len(rows) * (len(rows) - 1)))


def _entropy(rows: Floats) -> Floats:
    return np.asarray(-(rows * np.log2(np.maximum(rows, 1e-300))).sum(-1))


def _habits(config: CityConfig, groups: Groups) -> Habits:
    """Habits by the first ordered attribute (age, by default): activity falls with its level."""
    positions = (
        codes / (len(levels) - 1)  # (groups,) from 0 at the first level to 1 at the last
        for (_, levels), codes in zip(groups.attributes, groups.level_codes.T, strict=True)
        if len(levels) > 2
    )
    level = next(positions, np.full(len(groups), 0.5))
    # Groups with equal preferences have equal reach and activity too.
    strength = min(1.0, config.divergence / 0.25)
    range_km = RANGE_KM * np.exp(strength * 0.6 * (0.5 - level))
    return Habits(
        # Half kilometres, so that groups share distance tables.
        range_km=np.round(2 * range_km) / 2,
        activity=np.exp(strength * 0.2 * (0.5 - level)),
        employed=0.96 - 0.08 * (1 - level) ** 4 - 0.16 * level**4,
    )


class _ExpectedVisits:
    """The distribution of POI visits under a tilt, from the tables that the simulation samples.

    Returns do not change it: they go to a uniformly drawn earlier visit of the same category.
    """

    def __init__(self, config: CityConfig, places: Places, habits: Habits) -> None:
        self.places = places
        self.range_km = habits.range_km
        self.bounds = places.category_bounds
        self.homes = places.group_home_cells  # (groups, cells)
        self.works = self.homes @ places.work_cells  # (groups, cells)
        self.demand = _demand(config, habits)  # (groups, 2, slots)
        self.base_appetite = np.array(
            [[[s.appetite.get(c, 0) for c in CATEGORIES] for s in slots] for slots in SLOTS]
        )  # (2, slots, categories)
        self.decays = {r: decay(places, r) for r in np.unique(habits.range_km)}

    def appetite(self, tilt: Floats) -> Floats:
        """p(category | kind of day, slot): (groups, 2, slots, categories)."""
        popularity = self.places.popularity
        # A category is as attractive as its POIs on average: without geography a tilt then acts
        # on POIs only.
        total = np.add.reduceat(popularity * tilt, self.bounds[:-1], 1)  # (groups, categories)
        average = total / np.add.reduceat(popularity, self.bounds[:-1])
        appetite = self.base_appetite * average[:, None, None]  # (groups, 2, slots, categories)
        return np.asarray(appetite / appetite.sum(-1, keepdims=True))

    def __call__(self, tilt: Floats) -> Floats:
        visits = self.demand[..., None] * self.appetite(tilt)  # (groups, 2, slots, categories)
        from_work = visits[:, 1, MIDDAY]  # (groups, categories)
        from_home = visits.sum((1, 2)) - from_work
        expected = np.empty_like(tilt)
        for group, weights in enumerate(self.places.popularity * tilt):
            near = self.decays[self.range_km[group]]  # (cells, pois)
            for category, (start, end) in enumerate(pairwise(self.bounds)):
                pois = slice(start, end)
                origins = (
                    self.homes[group] * from_home[group, category]
                    + self.works[group] * from_work[group, category]
                )  # (cells,)
                share = origins / (near[:, pois] @ weights[pois])
                expected[group, pois] = weights[pois] * (share @ near[:, pois])
        return np.asarray(expected / expected.sum(1, keepdims=True))


def _demand(config: CityConfig, habits: Habits) -> Floats:
    """Expected outings by group, kind of day and slot: (groups, 2, slots)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    person = np.exp(ACTIVITY_SPREAD * nodes - ACTIVITY_SPREAD**2 / 2) * config.activity  # (nodes,)
    activity = habits.activity[:, None] * person  # (groups, nodes)
    # (groups, 2, 7, slots, nodes)
    going = 1 - np.exp(-activity[:, None, None, None] * slot_rates()[..., None])
    outings = going @ (weights / weights.sum())  # (groups, 2, 7, slots)
    attendance = habits.employed[:, None] * (ATTENDANCE[0] / sum(ATTENDANCE))
    at_work = attendance * WORK_BY_WEEKDAY  # (groups, 7) share of people
    # (groups, 2, 7)
    days = np.bincount(weekdays(config), minlength=7) * np.stack([1 - at_work, at_work], 1)
    return np.asarray((outings * days[..., None]).sum(2))


class _Preferences:
    """How much a group prefers a POI, as its rank from 0 to 1 among all visits.

    Ranks are bounded. At equal divergence, a group prefers more POIs than with Gaussian scores.
    """

    def __init__(
        self, groups: Groups, places: Places, visits: Floats, rng: np.random.Generator
    ) -> None:
        self.visits = visits  # (pois,) shares without preferences
        self.shared, life_course = _shared_loadings(groups)  # (groups, shared factors)
        factors = self.shared.shape[1] + len(groups)
        by_category = rng.standard_normal((len(CATEGORIES), factors))
        if life_course is not None:
            by_category[:, life_course] = [LIFE_COURSE[name] for name in CATEGORIES]
        by_poi = rng.standard_normal((len(visits), factors))
        common = np.full(factors, OWN_BY_CATEGORY)
        common[: self.shared.shape[1]] = SHARED_BY_CATEGORY
        raw = np.sqrt(common) * by_category[places.category] + np.sqrt(1 - common) * by_poi
        self.factors = raw - visits @ raw  # (pois, factors)
        # Orthonormal under the visits, so that loadings alone set the distance of two groups.
        if factors < len(visits):
            root = np.sqrt(visits)[:, None]
            orthonormal, triangle = np.linalg.qr(self.factors * root)
            self.factors = orthonormal * np.sign(np.diag(triangle)) / root

    @property
    def similarity(self) -> Floats:
        """The designed correlation of the preferences of every two groups: (groups, groups)."""
        common = self.shared @ self.shared.T
        return np.asarray(common + np.diag(1 - np.diag(common)))

    def __call__(self, correction: Floats) -> Floats:
        """Ranks (groups, pois) at the designed similarity plus a correction, (groups, groups)."""
        own = self.similarity + correction - self.shared @ self.shared.T
        values, vectors = np.linalg.eigh(own)
        own_loadings = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
        scores = np.concatenate([self.shared, own_loadings], 1) @ self.factors.T  # (groups, pois)
        order = scores.argsort(1)
        sorted_visits = self.visits[order]
        ranks = np.empty_like(scores)
        np.put_along_axis(ranks, order, sorted_visits.cumsum(1) - sorted_visits / 2, 1)
        return ranks


def _shared_loadings(groups: Groups) -> tuple[Floats, int | None]:
    """Loadings that similar groups share, (groups, shared factors), and the life-course column."""
    columns: list[Floats] = []
    life_course: int | None = None
    divisor = max(1.0, len(groups.attributes) / 4)  # many attributes divide what is shared
    for (_, levels), codes in zip(groups.attributes, groups.level_codes.T, strict=True):
        if len(levels) == 2:
            columns.append(np.sqrt(BINARY_SHARE / divisor) * (2 * codes - 1))
        elif len(levels) > 2:
            # Levels lie on an arc: similarity depends on how far apart two levels are.
            width = np.sqrt(ORDERED_SHARE / divisor)
            angle = ARC * (0.5 - codes / (len(levels) - 1))  # (groups,)
            life_course = len(columns) if life_course is None else life_course
            columns += [width * np.sin(angle), width * np.cos(angle)]
    return np.stack(columns, 1) if columns else np.empty((len(groups), 0)), life_course


def _equalise_pairs(
    preferences: _Preferences, visits: _ExpectedVisits, ranks: Floats, scale: float
) -> Floats:
    """Correct preferences until pairwise divergences are in their designed proportions.

    With few POIs, chance and geography move a pair by a tenth; the paper's pairs differ
    from their mean by at most a seventh.
    """
    distances = 1 - preferences.similarity  # (groups, groups) proportional to the divergences
    correction = np.zeros_like(distances)
    best = ranks
    best_gap = np.inf
    for _ in range(MAX_ROUNDS):
        divergences = pairwise_jsd(visits(np.exp(scale * (ranks - 1))))
        designed = distances * (divergences.sum() / distances.sum())
        gap = (designed - divergences) / divergences.mean()
        np.fill_diagonal(gap, 0)
        if np.abs(gap).max() < best_gap:
            best = ranks
            best_gap = float(np.abs(gap).max())
        if best_gap < MAX_PAIR_GAP:
            break
        correction -= 0.7 * gap
        ranks = preferences(correction)
    return best


def _calibrate(config: CityConfig, visits: _ExpectedVisits, ranks: Floats) -> float:
    """The scale of preferences at which the mean pairwise divergence is the requested one."""

    def excess(scale: float) -> float:
        return mean_pairwise_jsd(visits(np.exp(scale * (ranks - 1)))) - config.divergence

    low = 0.0
    high = 8.0
    below = excess(low)
    # Homes alone can make groups differ as much as requested; then preferences add nothing.
    if len(ranks) == 1 or config.divergence == 0 or below >= 0:
        return 0.0
    above = excess(high)
    while above < 0 and high < MAX_SCALE:
        low = high
        below = above
        high *= 2
        above = excess(high)
    if above < 0:
        raise MobatlasError(
            f"simulate.divergence: {config.divergence:g} bits cannot be reached with "
            f"{config.pois} POIs; ask for at most {above + config.divergence:.2f}, "
            "or for more POIs"
        )
    # False position in its Illinois form: bisection needs twice as many evaluations.
    scale = high
    value = above
    previous = 0.0
    while abs(value) > TOLERANCE and high - low > 1e-9:
        scale = high - above * (high - low) / (above - below)
        value = excess(scale)
        if value < 0:
            low = scale
            below = value
            above = above / 2 if previous < 0 else above
        else:
            high = scale
            above = value
            below = below / 2 if previous > 0 else below
        previous = value
    # Rounded, so that the last bits of a linear algebra library do not change the visits.
    return round(scale, 4)
