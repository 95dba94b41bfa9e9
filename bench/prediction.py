"""The paper's third research question: does it help somebody who predicts where people of a group go next?

Under fullrank, as in the paper: predictors that learnt from real training people, from the baseline, from strong, and from
models of phase 2, one predictor a group, tested on real test people of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.cells import (
    BASELINE,
    STRONG,
    Bench,
    Job,
    Place,
    command_of,
    in_one_folder,
    read_cell,
    write_cell,
)
from bench.downstream import ByGroup, compare_predictors
from bench.next_poi import NEXT_POI_METRICS, NextPoiConfig, next_poi_config, with_two_visits
from bench.options import check_options
from bench.questions import profile_named
from bench.real import DEALT
from bench.summary import write_result
from bench.survey import check_survey, divided_people, said_files
from mobatlas.config import format_assignments
from mobatlas.data.trajectories import Trajectories
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.comparison import gap_closed, group_members, real_groups
from mobatlas.generators.protocol import Generator
from mobatlas.generators.store import load_model
from mobatlas.io.manifest import library_versions
from mobatlas.progress import track
from mobatlas.supervision.samplers import PlainSampler, Sampler

PARTITION, REAL, FAMILY = "fullrank", "real", "latent-diffusion"
POI, TUNED = (
    ("poi",),
    ("js", "tv"),
)  # on simulated cities; real people are measured without finetuning
SIZES: Mapping[str, int] = {
    "quick": 8_000,
    "full": 30_000,
}  # trajectories of all groups together; the paper's
SPARE = 1.1  # times as many samples are made: some have fewer than two visits, which teach nothing
BLOCK = 1_024  # samples made at a time
STREAM = 1_000  # of random numbers
LESS_IS_BETTER = ("geo_error_km",)


@dataclass(frozen=True)
class Material:
    """What predictors learn from, and the name of its cell."""

    label: str
    make: Callable[[Place, int], ByGroup]  # of so many trajectories a group

    @property
    def cell(self) -> str:
        return f"rq3-{self.label.replace(', ', '-')}"


@dataclass(frozen=True)
class Asked:
    """How predictors learn."""

    size: int  # trajectories of all groups together
    predictor: NextPoiConfig

    def as_dict(self) -> dict[str, Any]:
        return {"size": self.size, "predictor": self.predictor.model_dump(mode="json")}


def materials(features: tuple[str, ...] = POI, tuned: Sequence[str] = TUNED) -> list[Material]:
    """In the order of the tables; `features` are what regions tell, `tuned` the divergences of finetuning."""

    def real(place: Place, n: int) -> ByGroup:
        return real_groups(place.dataset)

    def plain(path: Callable[[Place], Path]) -> Callable[[Place, int], ByGroup]:
        return lambda place, n: sampled(place, load_model(path(place)).generator, n)

    def supervised(job: Job, label: str) -> Callable[[Place, int], ByGroup]:
        return lambda place, n: sampled(place, place.samplers(job)[label], n)

    jobs = [Job(PARTITION, "finetune", divergence) for divergence in tuned]
    return [
        Material(REAL, real),
        Material(BASELINE, plain(Place.baseline)),
        Material(STRONG, plain(Place.strong)),
        Material(
            "tilt, calibrated",
            supervised(Job(PARTITION, "tilt", features=features), "tilt, calibrated"),
        ),
        *(Material(f"finetune, {job.divergence}", supervised(job, "finetune")) for job in jobs),
    ]


def sampled(place: Place, model: Generator | Sampler, n: int) -> ByGroup:
    """n samples of each group with the homes and workplaces of its training people."""
    dataset = place.dataset
    sampler = model if isinstance(model, Sampler) else PlainSampler(model, dataset.anchors)
    made = {}
    for number, (name, rows) in enumerate(group_members(dataset, "train").items()):
        group = number if sampler.groups is None else sampler.groups.index(name)
        rng = np.random.default_rng([place.seed, STREAM, number])
        homes = dataset.anchors[dataset.person[rng.choice(rows, n, replace=len(rows) < n)]]
        groups, seed = np.full(n, group, dtype=np.int64), place.seed + STREAM + number
        blocks = [slice(start, start + BLOCK) for start in range(0, n, BLOCK)]
        parts = [
            sampler.sample_at_anchors(groups[some], homes[some], seed, first=some.start)
            for some in blocks
        ]
        made[name] = Trajectories.joined(parts)
    return made


def run(
    out: Path,
    profile: str = "quick",
    *,
    seeds: int | None = None,
    first_seed: int = 0,
    size: int | None = None,
    data: Path | None = None,
    generator: str = FAMILY,
    prepared: Mapping[str, Any] | None = None,
    predictor: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    city: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Fill `out`, write rq3.json there; `values` and `city` change the preset of the profile, `predictor` the LSTM.

    `data` is a folder of labelled real people, whose models lie where `python -m bench real` has them and are shared with it, and
    whose result is rq3-real-FAMILY.json; `prepared` changes how it is prepared.
    """
    chosen, config = profile_named(profile), next_poi_config(profile, predictor)
    check_options(generator, chosen.preset, values or {})  # refused before anything is prepared
    if data is None and generator != FAMILY:
        raise MobatlasError(
            f"--generator {generator} goes with --data; simulated cities are measured with {FAMILY}"
        )
    if data is not None:
        check_survey(data, prepared=prepared)
    numbers = range(first_seed, first_seed + (chosen.seeds if seeds is None else seeds))
    asked = Asked(SIZES[profile] if size is None else size, config)
    options = {
        "--profile": [profile],
        "--size": [] if size is None else [str(size)],
        "--data": [] if data is None else [said_files(data, None)[0]],
        "--generator": [] if generator == FAMILY else [generator],
        "--set": list(format_assignments(values or {})),
    }
    said = command_of("rq3", options)
    people = None if data is None else divided_people(data, out, prepared=prepared)[0]
    manner: dict[str, Any] = {
        "preset": chosen.preset,
        "quiet": quiet,
        "generator": generator,
        "data": people,
    }
    command = f"{said} --seeds 1 --first-seed {{seed}} --out {out.name}"
    bench = Bench(command, values or {}, city or {}, **manner)
    folder, name = (out, "rq3") if data is None else (out / generator, f"rq3-real-{generator}")
    told = materials() if data is None else materials(DEALT, ())
    plan = [
        (Place(folder / f"seed-{seed}", seed, bench), material)
        for seed in numbers
        for material in told
    ]
    with (
        in_one_folder(),
        track("rq3", len(plan), quiet=True) as tracker,
    ):  # lines: what it is made of has bars of its own
        for done, (place, material) in enumerate(plan):
            tracker.step(done, f"seed {place.seed}, {material.label}")
            if not _made(place, material, asked):
                place.baseline()
                _cell(place, material, asked)
    result = {
        "command": f"{said.format()} --seeds {len(numbers)} --first-seed {first_seed} --out {out.name}",
        "question": "rq3",
        "name": name,
        "profile": profile,
        "seed": first_seed,
        "versions": library_versions(),
        "partition": PARTITION,
        "predictor": config.model_dump(mode="json"),
        "measure": "of the next visit of real test people of a group, by a predictor that learnt from each material, as many "
        "trajectories of each; average over groups; spread: standard deviation between seeds; gap_closed: the share of the way "
        "from the baseline to real training people",
        **summarise(folder, numbers, told),
    }
    write_result(out, name, result)
    return result


def summarise(out: Path, seeds: Sequence[int], told: Sequence[Material]) -> dict[str, Any]:
    """Means over seeds, on average and by group, and what is closed of the way from the baseline to real people.

    Groups count that every material taught as much as real people did, in every seed; the others are in `left_out`.
    """
    cells = {each.label: [read_cell(out, seed, each.cell) for seed in seeds] for each in told}
    left_out: dict[str, str] = {}
    for label, found in cells.items():
        for cell, real in zip(found, cells[REAL], strict=True):
            left_out |= {name: f"{label}: {reason}" for name, reason in cell["left_out"].items()}
            less = [name for name, n in real["sizes"].items() if cell["sizes"].get(name, n) < n]
            left_out |= dict.fromkeys(less, f"{label}: too few samples have two visits")
    names = [name for name in cells[REAL][0]["groups"] if name not in left_out]
    groups = {
        label: {name: _mean([cell["groups"][name] for cell in found]) for name in names}
        for label, found in cells.items()
    }
    average = {label: _mean(list(each.values())) for label, each in groups.items()}
    spread = {
        label: _spread([_mean([cell["groups"][name] for name in names]) for cell in some])
        for label, some in cells.items()
    }
    rows = []
    first, last = average[BASELINE], average[REAL]
    for label, reached in average.items():
        closed = {
            metric: _closed(
                metric, reached[metric], first[metric], last[metric], spread[BASELINE][metric]
            )
            for metric in NEXT_POI_METRICS
        }
        row = {"material": label, "average": reached, "spread": spread[label], "gap_closed": closed}
        rows.append(row | {"groups": groups[label]})
    sizes = {name: cells[REAL][0]["sizes"][name] for name in names}
    return {"seeds": list(seeds), "sizes": sizes, "left_out": left_out, "rows": rows}


def _made(place: Place, material: Material, asked: Asked) -> bool:
    """Whether the cell is there, as it is asked for now; files of before do not say how they were."""
    if not place.scored(material.cell):
        return False
    cell = read_cell(place.path.parent, place.seed, material.cell)
    return bool(cell.get("asked", asked.as_dict()) == asked.as_dict())


def _cell(place: Place, material: Material, asked: Asked) -> None:
    """As many trajectories of each group as asked for, or as real training people have."""
    dataset = place.dataset
    real = {name: len(with_two_visits(each)) for name, each in real_groups(dataset).items()}
    sizes = {name: min(n, asked.size // len(real)) for name, n in real.items()}
    made = material.make(place, int(SPARE * max(sizes.values())) + 1)
    manner: dict[str, Any] = {
        "size": sizes,
        "seed": place.seed,
        "quiet": place.bench.quiet,
        "fewest": 1,
    }
    found = compare_predictors(dataset, {material.label: made}, asked.predictor, **manner)
    scores = found.pop("materials")[material.label]
    write_cell(place, material.cell, found | scores | {"asked": asked.as_dict()})


def _mean(found: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Of each metric; None where one of them has none, or where there are none at all."""
    values = {metric: [each[metric] for each in found] for metric in NEXT_POI_METRICS}
    return {
        metric: None
        if not some or any(each is None for each in some)
        else round(float(np.mean(some)), 4)
        for metric, some in values.items()
    }


def _spread(averages: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Standard deviation between seeds of each metric; None where there is one seed, or nothing to compare."""
    values = {metric: [each[metric] for each in averages] for metric in NEXT_POI_METRICS}
    return {
        metric: None
        if len(some) < 2 or None in some
        else round(float(np.std(np.array(some, float), ddof=1)), 4)
        for metric, some in values.items()
    }


def _closed(
    metric: str,
    ours: float | None,
    baseline: float | None,
    real: float | None,
    spread: float | None,
) -> float | None:
    """More is better but for distances, and `gap_closed` is about what should fall; None where seeds differ by more."""
    if ours is None or baseline is None or real is None:
        return None
    sign = 1 if metric in LESS_IS_BETTER else -1
    share = gap_closed(sign * ours, sign * baseline, sign * real, spread or 0.0)
    return None if share is None else round(share, 3)
