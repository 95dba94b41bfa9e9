"""POI tokens: specials first, then HOME / WORK / OTHER, then the most frequent POIs with their coordinates and categories."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import ibis
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from ibis import ir

from mobatlas.data.columns import nearest_whole

# The first four are for models (padding, start, end, masked span) and never occur in a dataset.
PAD: Final = 0
BOS: Final = 1
EOS: Final = 2
MASK: Final = 3
HOME: Final = 4
WORK: Final = 5
OTHER: Final = 6
FIRST_POI: Final = 7
SPECIALS: Final = ("<pad>", "<bos>", "<eos>", "<mask>", "HOME", "WORK", "OTHER")

SCHEMA = pa.schema(
    [
        ("token", pa.int32()),
        ("poi_id", pa.string()),
        (
            "lat",
            pa.float64(),
        ),  # null for specials: HOME and WORK are where the person lives and works, OTHER is nowhere
        ("lon", pa.float64()),
        ("category", pa.string()),
        ("visits", pa.int64()),  # of training people
    ]
)
DEGREES = (
    10_000_000  # coordinates are averaged as whole 1e-7 degrees (1 cm): sums of integers do not depend on their order
)


@dataclass(frozen=True)
class Vocabulary:
    """The table of tokens, ordered by token."""

    table: pa.Table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def poi_ids(self) -> list[str]:
        return list(self.table["poi_id"].to_pylist())

    @cached_property
    def coordinates(self) -> npt.NDArray[np.float64]:
        """Latitude and longitude of each token, NaN where it has none."""
        columns = [self.table[name].to_numpy(zero_copy_only=False).astype(np.float64) for name in ("lat", "lon")]
        return np.stack(columns, axis=1)  # (tokens, 2)

    @cached_property
    def categories(self) -> list[str | None]:
        return list(self.table["category"].to_pylist())


def count_places(visits: ir.Table) -> ir.Table:
    """Visits of training people to each POI, its mean coordinates and its most frequent category."""
    pois = visits.filter(visits.train & ~visits.home & ~visits.work)
    places = pois.group_by("poi_id").aggregate(
        visits=pois.count(), lat_sum=whole(pois.lat).sum(), lon_sum=whole(pois.lon).sum()
    )
    named = pois.filter(pois.category.notnull()).group_by(["poi_id", "category"]).aggregate(n=lambda t: t.count())
    order = ibis.window(group_by="poi_id", order_by=[named.n.desc(), named.category])
    modal = (
        named.mutate(rank=ibis.row_number().over(order)).filter(lambda t: t["rank"] == 0).select("poi_id", "category")
    )
    return places.left_join(modal, "poi_id").select(
        "poi_id",
        "visits",
        "category",
        lat=places.lat_sum.cast("float64") / places.visits / DEGREES,
        lon=places.lon_sum.cast("float64") / places.visits / DEGREES,
    )


def whole(degrees: ir.Value) -> ir.Value:
    """Whole 1e-7 degrees."""
    return nearest_whole(degrees * DEGREES)


def most_frequent(places: ir.Table, size: int) -> ir.Table:
    """The rows of the vocabulary; ties in frequency are settled by the id."""
    return places.order_by([places.visits.desc(), places.poi_id]).limit(size)


def build_vocabulary(places: pa.Table) -> Vocabulary:
    """Tokens for the places, in the order given, after the specials."""
    specials = pa.table(
        {
            "token": pa.array(range(FIRST_POI), pa.int32()),
            "poi_id": pa.array(SPECIALS, pa.string()),
            "lat": pa.nulls(FIRST_POI, pa.float64()),
            "lon": pa.nulls(FIRST_POI, pa.float64()),
            "category": pa.array([None] * HOME + ["home", "work", "other"], pa.string()),
            "visits": pa.nulls(FIRST_POI, pa.int64()),
        }
    )
    tokens = pa.array(range(FIRST_POI, FIRST_POI + places.num_rows), pa.int32())
    pois = places.append_column("token", tokens).select(SCHEMA.names)
    return Vocabulary(pa.concat_tables([specials.cast(SCHEMA), pois.cast(SCHEMA)]).combine_chunks())
