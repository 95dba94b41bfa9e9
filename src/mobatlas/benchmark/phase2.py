"""Phase 2 on simulated cities: what each strategy closes of the way from baseline to floor, by how groups are mixed in regions.

The folder is filled cell by cell; a run that stopped goes on where it was, and what is finished, as the JSON file of the cell
says, is not computed again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mobatlas.artifacts import library_versions, read_manifest, write_json
from mobatlas.benchmark.phase1 import rounded
from mobatlas.config import load_run, merge
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare import prepare
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.evaluation.comparison import floor_closed, gap_closed
from mobatlas.evaluation.metrics import Yardstick
from mobatlas.evaluation.models import FLOOR, score_groups
from mobatlas.generators.base import Generator
from mobatlas.generators.folder import load_model
from mobatlas.progress import track
from mobatlas.regions.folder import KIND as REGIONS
from mobatlas.regions.folder import build_regions
from mobatlas.supervision.kept import load_sampler
from mobatlas.supervision.resample import Sampler
from mobatlas.supervision.strategies import strategy_named
from mobatlas.training import divided, supervise, train

log = logging.getLogger("mobatlas")
SHUFFLED = "shuffled"  # demogroups whose people were exchanged between regions: there is nothing to learn
PLAN: Mapping[str, tuple[str, ...]] = {
    "demogroups": ("tilt", "resample", "finetune"),
    "hot16": ("tilt",),
    "fullrank": ("tilt",),
    "rankdef": ("tilt",),
    "messy": ("tilt",),
    SHUFFLED: ("tilt",),
}
ANCHORS = ("group", "population")
BASELINE, STRONG = "baseline", "strong"


@dataclass(frozen=True)
class Place:
    """The folder of one seed: a city, its baseline, and what is made of them."""

    path: Path
    seed: int
    generator: Mapping[str, Any]  # changes of its preset
    supervision: Mapping[str, Any]  # of what phase 2 can be told
    city: Mapping[str, Any]
    quiet: bool

    @property
    def dataset(self) -> TrajectoryDataset:
        return TrajectoryDataset.open(self.path / "dataset")

    def baseline(self) -> Path:
        """The city and the model of phase 1, made if they are not there."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / "dataset").exists():
            simulated = load_run(preset="small").simulate
            simulated = simulated.model_validate(merge(simulated.model_dump(), self.city))
            write_city_folder(self.path / "city", simulated, self.seed, overwrite=True)
            prepare(self.path / "city", self.path / "dataset", preset="small")
        made = self.path / BASELINE
        common: dict[str, Any] = {"values": self.generator, "seed": self.seed, "quiet": self.quiet, "resume": True}
        train(self.path / "dataset", made, preset="small", **common)
        return made

    def regions(self, partition: str) -> Path:
        """The folder of a partition, made if it is not there."""
        folder, shuffled = self.path / "regions" / partition, partition == SHUFFLED
        if not folder.exists():
            kind = "demogroups" if shuffled else partition
            build_regions(self.dataset.path, folder, partition=kind, shuffle_regions=shuffled, seed=self.seed)
        read_manifest(folder, REGIONS)
        return folder

    def score(
        self,
        name: str,
        models: Mapping[str, Generator | Sampler],
        asked: str = "",
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Against test people, both ways to choose anchors; the file says that the cell is finished, and how it was made."""
        yardstick, dataset = Yardstick.of(self.dataset), self.dataset
        found: dict[str, Any] = {}
        variety: dict[str, Any] = {}
        for anchors in ANCHORS:
            scores = score_groups(dataset, yardstick, models, self.seed, anchors=anchors)
            found[anchors] = {label: rounded(each.average) for label, each in scores.items()}
            variety[anchors] = {label: each.diversity for label, each in scores.items() if label != FLOOR}
        made = {
            "command": f"mobatlas benchmark phase2 --seeds 1 --first-seed {self.seed}{asked} --out {self.path.parent.name}",
            "seed": self.seed,
            "versions": library_versions(),
            "threads": torch.get_num_threads(),
        }
        write_json(self.path / f"{name}.json", made | dict(facts or {}) | {"jsd": found, "diversity": variety})

    def scored(self, name: str) -> bool:
        return (self.path / f"{name}.json").exists()


def run(
    out: Path,
    seeds: int = 3,
    first_seed: int = 0,
    *,
    partitions: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    city: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Fill `out`, write phase2.json there; `values` and `city` change the preset `small`."""
    check_partitions(partitions)
    chosen = {name: PLAN[name] for name in partitions or PLAN}
    cells = [(partition, strategy) for partition, strategies in chosen.items() for strategy in strategies]
    own, rest = divided(values or {})
    done, total = 0, seeds * (1 + len(cells))
    with track("phase 2", total, quiet=True) as tracker:  # lines: what it is made of has bars of its own
        for seed in range(first_seed, first_seed + seeds):
            place = Place(out / f"seed-{seed}", seed, rest, own, city or {}, quiet)
            tracker.step(done, f"seed {seed}, baseline and strong")
            _phase1(place)
            for number, (partition, strategy) in enumerate(cells, start=1):
                tracker.step(done + number, f"seed {seed}, {partition}, {strategy}")
                _cell(place, partition, strategy)
            done += 1 + len(cells)
    asked = "".join(f" --partition {name}" for name in partitions)
    result = {
        "command": f"mobatlas benchmark phase2 --seeds {seeds} --first-seed {first_seed}{asked} --out {out.name}",
        "seed": first_seed,
        "versions": library_versions(),
        "measure": "JSD in bits against test people of each group at equal sizes, averaged over groups; floor: training people "
        "of the group; closed: the share of baseline - floor; spread: standard deviation between seeds",
        **summarise(out, range(first_seed, first_seed + seeds), cells),
    }
    write_json(out / "phase2.json", result)
    return result


def check_partitions(names: Sequence[str]) -> None:
    """Refuse one that does not exist, before anything is trained."""
    for name in names:
        if name not in PLAN:
            raise MobatlasError(f"--partition {name} does not exist{suggestion(name, PLAN)} (known: {', '.join(PLAN)})")


def _phase1(place: Place) -> None:
    if place.scored("phase1"):
        return
    baseline = place.baseline()
    common: dict[str, Any] = {"values": place.generator, "seed": place.seed, "quiet": place.quiet, "resume": True}
    supervise(baseline, place.path / STRONG, strategy=STRONG, **common)
    models = {name: load_model(place.path / name).generator for name in (BASELINE, STRONG)}
    place.score("phase1", models)


def _cell(place: Place, partition: str, strategy: str) -> None:
    name = f"{partition}-{strategy}"
    if place.scored(name):
        return
    baseline, regions = place.baseline(), place.regions(partition)
    out, concerned = place.path / name, strategy_named(strategy).options
    values = {section: value for section, value in place.supervision.items() if f"--set {section}" in concerned}
    common: dict[str, Any] = {"seed": place.seed, "quiet": place.quiet, "resume": True}
    report = supervise(baseline, out, regions, strategy=strategy, values=values, **common)
    model = load_model(out)
    models: dict[str, Generator | Sampler] = {}
    if strategy != "resample":
        models[strategy] = model.generator
    if strategy != "finetune":
        models["resample" if strategy == "resample" else f"{strategy}, calibrated"] = load_sampler(model)
    told = {name: value for name, value in report.items() if name != "regions"}  # their place on this machine
    place.score(name, models, f" --partition {partition}", {"supervision": told})


def summarise(out: Path, seeds: Iterable[int], cells: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Means and spreads over seeds, of divergences and of what they close; `benchmark cost` measures time."""
    numbers, cells = list(seeds), list(cells)
    phase1 = [_read(out, seed, "phase1") for seed in numbers]
    found = [
        (partition, [_read(out, seed, f"{partition}-{strategy}") for seed in numbers]) for partition, strategy in cells
    ]
    rows = [
        {
            "anchors": anchors,
            "partition": partition,
            "model": model,
            "metrics": _compared(phase1, cell, anchors, model),
            "diversity": _variety(cell, anchors, model),
        }
        for anchors in ANCHORS
        for partition, cell in [(None, phase1), *found]
        for model in cell[0]["diversity"][anchors]
    ]
    threads = [each["threads"] for each in phase1]
    return {"seeds": numbers, "threads": threads, "rows": rows}


def _compared(
    phase1: Sequence[Mapping[str, Any]], cell: Sequence[Mapping[str, Any]], anchors: str, model: str
) -> dict[str, dict[str, Any]]:
    """Metric by metric over seeds; what is closed is None where baseline and floor are within the seed spread."""
    first, found = ([each["jsd"][anchors] for each in some] for some in (phase1, cell))
    metrics = {}
    for metric in first[0][BASELINE]:
        values = {name: np.array([row[name][metric] for row in first]) for name in (BASELINE, STRONG, FLOOR)}
        ours = np.array([row[model][metric] for row in found])
        mean = {name: float(each.mean()) for name, each in values.items()}
        changed = ours - values[BASELINE]
        spread = float(changed.std(ddof=1)) if len(ours) > 1 else 0.0
        metrics[metric] = {
            "jsd": round(float(ours.mean()), 4),
            **rounded(mean),
            "spread": round(spread, 4),
            "floor_closed": _rounded(floor_closed(float(ours.mean()), mean[BASELINE], mean[FLOOR], spread)),
            "gap_closed": _rounded(gap_closed(float(ours.mean()), mean[BASELINE], mean[STRONG], spread)),
            "by_seed": [
                _rounded(floor_closed(*three)) for three in zip(ours, values[BASELINE], values[FLOOR], strict=True)
            ],
        }
    return metrics


def _variety(cells: Sequence[Mapping[str, Any]], anchors: str, model: str) -> dict[str, Any]:
    """Means over seeds of the shares of distinct samples and of copies, beside those of test people."""
    found = [cell["diversity"][anchors][model] for cell in cells]
    kinds = ("distinct", "copies")
    ours = {kind: round(float(np.mean([each[kind] for each in found])), 4) for kind in kinds}
    real = {kind: round(float(np.mean([each["held_out"][kind] for each in found])), 4) for kind in kinds}
    return {**ours, "held_out": real}


def _read(out: Path, seed: int, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"seed-{seed}" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
