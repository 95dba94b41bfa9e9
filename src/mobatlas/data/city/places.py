"""The map of the simulated city: districts and their people, jobs, and points of interest."""

from dataclasses import dataclass

import numpy as np

from mobatlas.config import CityConfig
from mobatlas.data.arrays import Floats, Ints
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
