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

from mobatlas.data.prepare.columns import nearest_whole

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
DEGREES = 10_000_000  # coordinates are averaged as whole 1e-7 degrees (1 cm): sums of integers do not depend on their order


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
        columns = [
            self.table[name].to_numpy(zero_copy_only=False).astype(np.float64)
            for name in ("lat", "lon")
        ]
        return np.stack(columns, axis=1)  # (tokens, 2)

    @cached_property
    def categories(self) -> list[str | None]:
        return list(self.table["category"].to_pylist())

    @cached_property
    def parents(self) -> dict[str, str]:
        """The bin of each place, and that of its category where it has one, as features are named."""
        named = zip(self.poi_ids, self.categories, strict=True)
        return {
            f"poi:{place}": f"category:{category}"
            for place, category in named
            if category is not None
        }


def most_frequent(visits: ir.Table, places: ir.Table, size: int) -> ir.Table:
    """The POIs that training people visit most, with their coordinates; ties are settled by the id."""
    of_pois = visits.filter(visits.train & ~visits.home & ~visits.work)
    counted = of_pois.group_by("poi").aggregate(visits=of_pois.count())
    frequent = counted.order_by([counted.visits.desc(), counted.poi]).limit(size)
    return frequent.join(places, "poi").select("poi", "poi_id", "visits", "lat", "lon")


def modal_categories(visits: ir.Table, frequent: ir.Table) -> ir.Table:
    """The most frequent category of each of these POIs; ties are settled by name."""
    named = visits.filter(visits.category.notnull()).semi_join(frequent, "poi_id")
    counted = named.group_by(["poi_id", "category"]).aggregate(n=lambda t: t.count())
    order = ibis.window(group_by="poi_id", order_by=[counted.n.desc(), counted.category])
    ranked = counted.mutate(rank=ibis.row_number().over(order))
    return ranked.filter(ranked["rank"] == 0).select("poi_id", "category")


def whole(degrees: ir.Value) -> ir.Value:
    """Whole 1e-7 degrees."""
    return nearest_whole(degrees * DEGREES)


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
