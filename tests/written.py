"""Trajectories written as a file of samples, and read back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from mobatlas import SampleRequest, Trajectories, TrajectoryDataset, generate
from mobatlas.data.types import ANCHORS
from mobatlas.sampling.generate import Generated


def table_of(
    trajectories: Trajectories, words: pa.Array, groups: Sequence[str | None] | None = None
) -> pa.Table:
    """As `generate` writes it, without what is of no use here."""
    owner = trajectories.owner
    labels = (
        pa.nulls(len(owner), pa.string())
        if groups is None
        else pa.array(groups, pa.string()).take(pa.array(owner))
    )
    columns = {
        "trajectory": pa.array(owner),
        "position": pa.array(
            (np.arange(len(owner)) - trajectories.offsets[owner]).astype(np.int32)
        ),
        "poi_id": words.take(pa.array(trajectories.tokens)),
        "group": labels,
    }
    anchors = {
        name: pa.array(trajectories.anchors[owner, k], from_pandas=True)
        for k, name in enumerate(ANCHORS)
    }
    return pa.table(columns | anchors)


def write(
    path: Path,
    dataset: TrajectoryDataset,
    trajectories: Trajectories,
    groups: Sequence[str | None] | None = None,
) -> Path:
    pq.write_table(
        table_of(trajectories, dataset.vocabulary.table["poi_id"].combine_chunks(), groups), path
    )
    return path


def sequences(path: Path) -> list[tuple[str, ...]]:
    """The places of each trajectory."""
    visits = pd.read_parquet(path).groupby("trajectory", sort=False)["poi_id"]
    return [tuple(places) for _, places in visits]


def generate_with(model: Path, out: Path, **options: Any) -> Generated:
    """Call `generate` with its own arguments and those of the request in one mapping."""
    own = {name: options.pop(name) for name in ("dataset", "overwrite") if name in options}
    return generate(model, out, options.pop("n", None), SampleRequest(**options), **own)
