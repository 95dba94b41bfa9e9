"""Figures as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mobatlas.regions.identifiability import Diagnosis
from mobatlas.regions.types import Composition

SHOWN_REGIONS = 60
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"  # told apart by colour-blind people
COLOURS = {"identified": BLUE, "partly identified": ORANGE, "not identified": GREY}


def diagnosis_figure(diagnosis: Diagnosis, composition: Composition, path: Path) -> None:
    """Composition, singular values and what each contrast is known to, side by side."""
    plt = load_pyplot()
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(15, 5), layout="constrained", width_ratios=(3, 2, 3)
    )
    shown = composition.shares[:SHOWN_REGIONS]
    image = left.imshow(
        shown, aspect="auto", cmap="cividis", vmin=0, vmax=max(float(shown.max()), 1e-9)
    )
    left.set_xticks(range(len(diagnosis.groups)), diagnosis.groups, rotation=60, ha="right")
    left.set_yticks(
        range(len(shown)), composition.regions[:SHOWN_REGIONS], fontsize=8 if len(shown) < 30 else 4
    )
    more = (
        f" (first {SHOWN_REGIONS} of {diagnosis.regions})"
        if diagnosis.regions > SHOWN_REGIONS
        else ""
    )
    left.set_title(f"composition P{more}")
    figure.colorbar(image, ax=left, label="share of people")

    order = np.arange(1, len(diagnosis.singular_values) + 1)
    middle.bar(order, np.maximum(diagnosis.singular_values, 1e-12), color=BLUE)
    middle.axhline(
        1 / np.sqrt(diagnosis.people[1]),
        color=ORANGE,
        linestyle="--",
        label="noise of a median region",
    )
    middle.set_yscale("log")
    middle.set_xticks(order)
    middle.set_title(
        f"singular values: rank {diagnosis.rank}, effective {diagnosis.effective_rank}"
    )
    middle.legend()

    rows = list(diagnosis.contrasts)[::-1]
    right.barh(
        [row.name for row in rows],
        [row.share_identified for row in rows],
        color=[COLOURS[row.verdict] for row in rows],
    )
    right.set_xlim(0, 1)
    right.set_xlabel("share of the contrast that these regions know")
    right.set_title("contrasts")
    right.tick_params(axis="y", labelsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def load_pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import (
        pyplot,  # here, because it takes a second to import and few commands need it
    )

    return pyplot
