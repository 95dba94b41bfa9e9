"""The cost of places with at least ten people, and of rejecting copies of training trajectories."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.runner import Cell, Command, Experiment, Runner
from bench.summary import write_result
from mobatlas.config import CityConfig
from mobatlas.data.city import write_city_folder
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.evaluation.evaluate import evaluate
from mobatlas.pipeline.models import train
from mobatlas.sampling.chunks import SampleRequest
from mobatlas.sampling.generate import generate
from mobatlas.training.loop import Execution

USERS = 4_000
PLACES = (240, 2_000)  # in the city; nearly all have a token of their own
LEAST = (0, 10)  # people per place
SAMPLES = 4_000
STEPS = 600  # of training
NETWORK = {"distance_curves": 0, "group_bias": False}  # trains fastest, as in the demo
METRICS = ("poi", "spatial", "travel_distance", "trip", "flows", "length")
MEASURE = (
    "JSD in bits between samples of the model without groups and held-out people, whose rare "
    "places keep their tokens; seconds of sampling; rejected: copies per sample"
)


def run(
    experiment: Experiment,
    users: int = USERS,
    steps: int = STEPS,
    samples: int = SAMPLES,
    places: Sequence[int] = PLACES,
) -> dict[str, Any]:
    """Train with and without rare places, sample with and without copies; write privacy.json."""
    command = Command("privacy")
    size = {"users": users, "steps": steps, "samples": samples}
    cells = [
        Cell(seed, f"privacy-{n}", size | {"places": n}, partial(_city, size, n, seed))
        for seed in experiment.numbers
        for n in places
    ]
    results = Runner(experiment, "privacy", command).run(cells)
    rows = [row for each in results for row in each["rows"]]
    result = command.header(experiment) | size | {"measure": MEASURE, "rows": rows}
    write_result(experiment.out, "privacy", result)
    return result


def _city(size: dict[str, int], places: int, seed: int) -> dict[str, Any]:
    """The rows of one city: for each least number of people, all samples and without copies."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="mobatlas-privacy-") as scratch:
        folder = Path(scratch)
        city = CityConfig(users=size["users"], pois=places)
        write_city_folder(folder / "city", city, seed)
        for least in LEAST:
            dataset = folder / f"dataset-{least}"
            values = {"vocabulary_size": places, "min_people_per_place": least}
            rare = prepare(folder / "city", dataset, preset="small", values=values).rare
            model = folder / f"model-{least}"
            training = {"training": {"steps": size["steps"]}, "network": NETWORK}
            quiet = Execution(quiet=True)
            train(dataset, model, preset="small", values=training, seed=seed, execution=quiet)
            for reject in (False, True):
                case = {"seed": seed, "places": places, "min_people": least, "reject": reject}
                other = {"became_other": round(rare["share_of_visits"], 4)}
                rows.append(case | other | _score(folder, model, size["samples"], reject))
    return {"rows": rows}


def _score(folder: Path, model: Path, n: int, reject: bool) -> dict[str, Any]:
    out = folder / f"{model.name}-{reject}.parquet"
    generated = generate(model, out, n, SampleRequest(seed=1, reject_copies=reject))
    evaluation = evaluate(out, folder / f"dataset-{LEAST[0]}", resamples=20)
    scores = evaluation.everybody.scores["ours"].average
    copies = generated.copies or {"rejected": 0, "left_out": 0}
    return {
        **{name: round(scores[name], 4) for name in METRICS},
        "seconds": round(generated.seconds, 1),
        "rejected": round(copies["rejected"] / n, 4),
        "left_out": copies["left_out"],
    }
