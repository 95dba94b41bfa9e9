"""What the people of the simulated city like, when they go out, and how the divergence between groups is set.

A group's preference is an exponential tilt of the POIs' popularity. The scale of the tilts is searched for so that the
groups' expected visit distributions, home geography included, differ by the divergence that was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mobatlas.config import CityConfig
from mobatlas.data.city.places import CATEGORIES, Floats, Ints, Places, distance
from mobatlas.errors import MobatlasError
from mobatlas.groups import Groups


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
NIGHT, MIDDAY = 4, 1
NIGHT_BY_WEEKDAY = np.array([0.5, 0.5, 0.6, 0.8, 2.0, 2.2, 0.6])  # Monday first
WORK_BY_WEEKDAY = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.15, 0.1])

ACTIVITY_SPREAD = 0.76  # standard deviation of a person's log activity
ATTENDANCE = (
    4.0,
    2.2,
)  # Beta parameters of the chance that a person with a job goes there on a weekday
RANGE_KM = 4.0
MAX_SCALE = 128.0
TOLERANCE = 2e-5  # bits
EVEN_ENOUGH, EVEN_OUT_ROUNDS, EVEN_OUT_GROUPS = 0.01, 12, 24

# Shares of the variance of a group's preference that it has in common with groups of like attributes. Most is its own:
# the paper's pairwise JSDs, 0.40 to 0.54 bits, are all large, and differ by a tenth from their mean.
ORDERED_SHARE, BINARY_SHARE = 0.12, 0.01
ARC = 2 * np.pi / 3
# Share of a preference factor that the POIs of a category have in common: more of what attributes share than of what is a
# group's own, so that categories tell a story of attributes.
SHARED_BY_CATEGORY, OWN_BY_CATEGORY = 0.6, 0.1
# How the first ordered attribute (age, by default) turns from one category to another.
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
    """What a group does, whatever it likes."""

    range_km: Floats  # (groups,) of the exponential distance decay
    activity: Floats  # (groups,) factor on the rate of outings
    employed: Floats  # (groups,) share of people with a work location


@dataclass(frozen=True)
class Behaviour:
    """What sets groups apart."""

    habits: Habits
    tilt: Floats  # (groups, pois) factor on popularity
    appetite: Floats  # (groups, 2, slots, categories) p(category | free day or workday, slot)
    expected: Floats  # (groups, pois) expected distribution of POI visits


def build_behaviour(config: CityConfig, places: Places, rng: np.random.Generator) -> Behaviour:
    """Draw preferences and scale them to the divergence of the configuration."""
    groups = Groups.of(config.attributes)
    habits = _habits(config, groups)
    visits = _Expectation(config, places, habits)
    indifferent = visits(np.ones((len(groups), config.pois)))  # (groups, pois)
    taste = _Taste(groups, places, indifferent.mean(0), rng)
    liking = taste(np.zeros((len(groups), len(groups))))  # (groups, pois)
    scale = _calibrate(config, visits, liking)
    # Among many groups no pair is looked at on its own, and every round costs in proportion to the pairs.
    if scale and len(groups) <= EVEN_OUT_GROUPS:
        liking = _even_out(taste, visits, liking, scale)
        scale = _calibrate(config, visits, liking)
    tilt = np.exp(scale * (liking - 1))
    return Behaviour(habits, tilt, visits.appetite(tilt), visits(tilt))


def slot_rates() -> Floats:
    """Outings a day of an average person: (2, weekdays, slots), free days first."""
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
    """The Jensen-Shannon divergence in bits of every pair of rows, each a distribution: (rows, rows)."""
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
    """The first ordered attribute (age, by default) decides: its last level goes out less, less far, and works less."""
    standing = np.full(len(groups), 0.5)  # (groups,) from 0 at the first level to 1 at the last
    for (_, levels), codes in zip(groups.attributes, groups.level_codes.T, strict=True):
        if len(levels) > 2:
            standing = codes / (len(levels) - 1)
            break
    # Groups that do not differ in preference do not differ in reach or activity either.
    strength = min(1.0, config.divergence / 0.25)
    reach = RANGE_KM * np.exp(strength * 0.6 * (0.5 - standing))
    return Habits(
        range_km=np.round(2 * reach)
        / 2,  # half kilometres, so that groups share a few tables of distances
        activity=np.exp(strength * 0.2 * (0.5 - standing)),
        employed=0.96 - 0.08 * (1 - standing) ** 4 - 0.16 * standing**4,
    )


class _Expectation:
    """The distribution of POI visits that a tilt leads to, from the tables that the simulation samples from.

    Returns leave it unchanged: they are made within a category, to a uniformly drawn earlier visit.
    """

    def __init__(self, config: CityConfig, places: Places, habits: Habits) -> None:
        self.places = places
        self.range_km = habits.range_km
        self.bounds = places.category_bounds
        self.homes = places.group_home_cells  # (groups, cells)
        self.works = self.homes @ places.work_cells  # (groups, cells)
        self.demand = _demand(config, habits)  # (groups, 2, slots)
        self.wanted = np.array(
            [[[s.appetite.get(c, 0) for c in CATEGORIES] for s in slots] for slots in SLOTS]
        )
        self.decays = {r: decay(places, r) for r in np.unique(habits.range_km)}

    def appetite(self, tilt: Floats) -> Floats:
        """p(category | kind of day, slot): (groups, 2, slots, categories)."""
        popularity, starts = self.places.popularity, self.bounds[:-1]
        # A category is as attractive as its POIs on average, so that without geography a tilt acts on POIs alone.
        average = np.add.reduceat(popularity * tilt, starts, 1) / np.add.reduceat(
            popularity, starts
        )
        wanted = self.wanted * average[:, None, None]  # (groups, 2, slots, categories)
        return np.asarray(wanted / wanted.sum(-1, keepdims=True))

    def __call__(self, tilt: Floats) -> Floats:
        visits = self.demand[..., None] * self.appetite(tilt)  # (groups, 2, slots, categories)
        from_work = visits[:, 1, MIDDAY]  # (groups, categories)
        from_home = visits.sum((1, 2)) - from_work
        expected = np.empty_like(tilt)
        for group, row in enumerate(self.places.popularity * tilt):
            near = self.decays[self.range_km[group]]  # (cells, pois)
            for kind, (start, end) in enumerate(
                zip(self.bounds[:-1], self.bounds[1:], strict=True)
            ):
                slice_ = near[:, start:end]
                origins = (
                    self.homes[group] * from_home[group, kind]
                    + self.works[group] * from_work[group, kind]
                )
                expected[group, start:end] = row[start:end] * (
                    (origins / (slice_ @ row[start:end])) @ slice_
                )
        return np.asarray(expected / expected.sum(1, keepdims=True))


def _demand(config: CityConfig, habits: Habits) -> Floats:
    """Expected outings by group, kind of day and slot: (groups, 2, slots)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    person = np.exp(ACTIVITY_SPREAD * nodes - ACTIVITY_SPREAD**2 / 2) * config.activity  # (nodes,)
    activity = habits.activity[:, None] * person  # (groups, nodes)
    going = 1 - np.exp(
        -activity[:, None, None, None] * slot_rates()[None, ..., None]
    )  # (groups, 2, 7, slots, nodes)
    outings = going @ (weights / weights.sum())  # (groups, 2, 7, slots)
    at_work = (
        habits.employed[:, None] * (ATTENDANCE[0] / sum(ATTENDANCE)) * WORK_BY_WEEKDAY
    )  # (groups, 7)
    calendar = np.bincount(weekdays(config), minlength=7) * np.stack(
        [1 - at_work, at_work], 1
    )  # (groups, 2, 7)
    return np.asarray((outings * calendar[..., None]).sum(2))


class _Taste:
    """How much a group likes a POI, as its rank from 0 to 1 among all visits.

    Ranks bound the preference: at equal divergence they leave a group more favourites than a Gaussian would.
    """

    def __init__(
        self, groups: Groups, places: Places, visits: Floats, rng: np.random.Generator
    ) -> None:
        self.visits = visits  # (pois,) shares without preferences
        self.shared, life_course = _shared_loadings(groups)  # (groups, shared factors)
        factors = self.shared.shape[1] + len(groups)
        kinds = rng.standard_normal((len(CATEGORIES), factors))
        if life_course is not None:
            kinds[:, life_course] = [LIFE_COURSE[name] for name in CATEGORIES]
        own = rng.standard_normal((len(visits), factors))
        common = np.full(factors, OWN_BY_CATEGORY)
        common[: self.shared.shape[1]] = SHARED_BY_CATEGORY
        raw = (
            np.sqrt(common) * kinds[places.category] + np.sqrt(1 - common) * own
        )  # (pois, factors)
        raw -= visits @ raw
        root = np.sqrt(visits)[:, None]
        # Orthonormal under the visits, so that loadings decide how far apart two groups are, whatever the seed.
        self.factors = raw  # (pois, factors)
        if factors < len(visits):
            orthonormal, triangle = np.linalg.qr(raw * root)
            self.factors = orthonormal * np.sign(np.diag(triangle)) / root

    @property
    def likeness(self) -> Floats:
        """The designed correlation of the tastes of every two groups: (groups, groups)."""
        common = self.shared @ self.shared.T
        return np.asarray(common + np.diag(1 - np.diag(common)))

    def __call__(self, correction: Floats) -> Floats:
        """Ranks (groups, pois) at the designed likeness plus a correction, (groups, groups)."""
        own = self.likeness + correction - self.shared @ self.shared.T
        values, vectors = np.linalg.eigh(own)
        loadings = np.concatenate(
            [self.shared, vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T], 1
        )
        taste = loadings @ self.factors.T  # (groups, pois)
        order = taste.argsort(1)
        ranked = self.visits[order]
        ranks = np.empty_like(taste)
        np.put_along_axis(ranks, order, ranked.cumsum(1) - ranked / 2, 1)
        return ranks


def _shared_loadings(groups: Groups) -> tuple[Floats, int | None]:
    """What groups of like attributes share, (groups, shared factors), and the column of the life course."""
    columns: list[Floats] = []
    life_course: int | None = None
    crowd = max(
        1.0, len(groups.attributes) / 4
    )  # many attributes divide among them what can be shared
    for (_, levels), codes in zip(groups.attributes, groups.level_codes.T, strict=True):
        if len(levels) == 1:
            continue
        level = codes / (len(levels) - 1)  # (groups,) from 0 to 1
        if len(levels) > 2:
            # Levels lie on an arc: likeness depends on how far apart two are, and falls ever faster towards the ends.
            width, angle = np.sqrt(ORDERED_SHARE / crowd), ARC * (0.5 - level)
            life_course = len(columns) if life_course is None else life_course
            columns += [width * np.sin(angle), width * np.cos(angle)]
        else:
            columns.append(np.sqrt(BINARY_SHARE / crowd) * (2 * level - 1))
    return np.stack(columns, 1) if columns else np.empty((len(groups), 0)), life_course


def _even_out(taste: _Taste, visits: _Expectation, liking: Floats, scale: float) -> Floats:
    """Correct the tastes until pairwise divergences are in the proportions of their design.

    With few POIs, chance and geography move a pair by a tenth; the paper's pairs lie within a seventh of their mean.
    """
    unlike = 1 - taste.likeness  # (groups, groups), and so the designed divergences up to a factor
    correction = np.zeros_like(unlike)
    best, best_gap = liking, np.inf
    for _ in range(EVEN_OUT_ROUNDS):
        divergences = pairwise_jsd(visits(np.exp(scale * (liking - 1))))
        designed = unlike * (divergences.sum() / unlike.sum())
        gap = (designed - divergences) / divergences.mean()
        np.fill_diagonal(gap, 0)
        if np.abs(gap).max() < best_gap:
            best, best_gap = liking, float(np.abs(gap).max())
        if best_gap < EVEN_ENOUGH:
            break
        correction -= 0.7 * gap
        liking = taste(correction)
    return best


def _calibrate(config: CityConfig, visits: _Expectation, liking: Floats) -> float:
    """The scale of the preferences at which the mean pairwise divergence is the one asked for."""

    def excess(scale: float) -> float:
        return mean_pairwise_jsd(visits(np.exp(scale * (liking - 1)))) - config.divergence

    # Where people live already sets groups apart a little; below that there is nothing to add.
    if len(liking) == 1 or config.divergence == 0:
        return 0.0
    low, high = 0.0, 8.0
    below, above = excess(low), excess(high)
    if below >= 0:
        return 0.0
    while above < 0 and high < MAX_SCALE:
        low, below, high = high, above, 2 * high
        above = excess(high)
    if above < 0:
        raise MobatlasError(
            f"simulate.divergence: {config.divergence:g} bits cannot be reached with {config.pois} POIs; "
            f"ask for at most {above + config.divergence:.2f}, or for more POIs"
        )
    # False position in its Illinois form: an evaluation goes over all cells and POIs, and bisection takes twice as many.
    scale, now, before = high, above, 0.0
    while abs(now) > TOLERANCE and high - low > 1e-9:
        scale = high - above * (high - low) / (above - below)
        now = excess(scale)
        if now < 0:
            low, below, above = scale, now, above / 2 if before < 0 else above
        else:
            high, above, below = scale, now, below / 2 if before > 0 else below
        before = now
    # Rounded, so that the last bits of a linear algebra library do not change the visits.
    return round(scale, 4)
