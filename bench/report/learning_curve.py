"""The table of a learning curve: the paper's metrics after each snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.checkpoints import MODEL
from bench.score_models import FLOOR
from mobatlas.evaluation.metrics import PAPER_METRICS
from mobatlas.features.maps import FEATURES
from mobatlas.report.tables import Cell, Table


def learning_curve_table(result: Mapping[str, Any]) -> Table:
    """Return mean JSD and excess over seeds of each step, then the floor."""
    rows: list[tuple[Cell, ...]] = []
    for step in dict.fromkeys(row["step"] for row in result["rows"]):
        own = [row for row in result["rows"] if row["step"] == step]
        rows.append((str(step), *_cells([row[MODEL] for row in own])))
    rows.append((FLOOR, *_cells([row[FLOOR] for row in result["rows"]])))
    titles = [FEATURES[name].title for name in PAPER_METRICS]
    columns = [name for title in titles for name in (title, f"excess, {title}")]
    note = "Excess is the JSD beyond that of two equally large samples of the same people."
    caption = f"{result['model']}, {result['stage']}: {result['measure']}."
    return Table(("step", *columns), tuple(rows), caption, note=note)


def _cells(points: list[Mapping[str, Any]]) -> list[Cell]:
    return [
        float(np.mean([point[metric][kind] for point in points]))
        for metric in PAPER_METRICS
        for kind in ("jsd", "excess")
    ]
