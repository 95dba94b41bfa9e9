"""The population behind regions: who everybody is and what everybody does, and the rest whom no region counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.features.maps import FeatureMap
from mobatlas.groups import Groups
from mobatlas.io.manifest import read_parquet
from mobatlas.regions.aggregates import aggregates_from_dataset
from mobatlas.regions.composition import composition_from_labels
from mobatlas.regions.types import Composition, Population, Regions

REST = "rest"
MIN_REST, MIN_REST_SHARE = (
    30,
    0.01,
)  # people, and of the population: fewer are noise, and rounding shows in them
SCHEMA = pa.schema(
    [("of", pa.string()), ("name", pa.string()), ("value", pa.float64()), ("n", pa.float64())]
)


def population_from_labels(
    dataset: TrajectoryDataset,
    maps: Sequence[FeatureMap],
    labels: npt.NDArray[np.int64],
    groups: Groups,
    people: npt.NDArray[np.int64],
) -> Population:
    """The composition of these training people, and the mean of phi over the same."""
    everybody = np.full(len(labels), -1, dtype=np.int64)
    everybody[people[labels[people] >= 0]] = 0
    counted = composition_from_labels(labels, everybody, groups, ("population",))
    seen = aggregates_from_dataset(dataset, maps, everybody, "train", ("population",))
    return Population(counted.shares[0], seen.values[0], float(seen.n[0]))


def with_rest(regions: Regions) -> Regions:
    """The regions and, as one more, those people of the population whom no region counts.

    Both its composition and its mean are the population's less the regions'. Only where people were dealt to regions at
    random: then those left over are a random part of their groups as everybody else is, and there is no region effect. People
    outside of regions that others chose live somewhere else. What one region suppresses is unknown of the rest as well, and
    with noise on the published values, or shares instead of counts, there is nothing to subtract.
    """
    p, v, known = regions.composition, regions.aggregates, regions.population
    if known is None or not regions.randomised or v.pooled or v.noise is not None:
        return regions
    n = known.n - float(v.n.sum())
    if n < max(MIN_REST, MIN_REST_SHARE * known.n):
        return regions
    people = np.maximum(
        known.n * known.shares - v.n @ p.shares, 0
    )  # (groups,); rounding may leave less than nobody
    values = np.maximum(known.n * known.values - v.n @ v.values, 0) / n  # (features,)
    names = (*p.regions, REST)
    return replace(
        regions,
        composition=Composition(
            p.groups, names, np.vstack([p.shares, people / people.sum()]), np.append(p.n, n)
        ),
        aggregates=replace(
            v, regions=names, values=np.vstack([v.values, values]), n=np.append(v.n, n)
        ),
        population=None,  # the regions are now all of it
    )


def write_population(
    path: Path, population: Population, groups: Groups, features: Sequence[str]
) -> None:
    """One row a group with its share, then one row a feature with its mean: of, name, value, n."""
    rows = {
        "of": ["composition"] * len(groups) + ["aggregates"] * len(features),
        "name": [*groups.names, *features],
        "value": np.concatenate([population.shares, population.values]),
        "n": np.full(len(groups) + len(features), population.n),
    }
    pq.write_table(pa.table(rows, SCHEMA), path)


def load_population(path: Path) -> Population | None:
    """What `write_population` wrote; None where nothing was."""
    if not path.exists():
        return None
    table = read_parquet(path)
    values, of_groups = (
        table["value"].to_numpy(),
        np.array(table["of"].to_pylist()) == "composition",
    )
    return Population(values[of_groups], values[~of_groups], float(table["n"][0].as_py()))
