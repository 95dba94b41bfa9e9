"""Commands that make, describe and judge data: simulate, prepare, regions, diagnose, evaluate, audit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mobatlas.cli.options import (
    Assignments,
    Config,
    Json,
    Out,
    Overwrite,
    Preset,
    Quiet,
    show,
)
from mobatlas.config import CityConfig, build, load_run, load_values, merge, parse_assignments
from mobatlas.data.city import write_city_folder
from mobatlas.data.prepare.pipeline import STEPS, prepare
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.evaluate import evaluate as run_evaluation
from mobatlas.evaluation.privacy.audit import STEPS as AUDIT_STEPS
from mobatlas.evaluation.privacy.audit import audit as run_audit
from mobatlas.progress import track
from mobatlas.regions.composition import read_composition
from mobatlas.regions.disclosure import Disclosure
from mobatlas.regions.identifiability import diagnose as run_diagnosis
from mobatlas.regions.store import RegionsFolder, build_regions
from mobatlas.report.console import (
    city_table,
    diagnosis_table,
    evaluation_table,
    regions_table,
    summary_table,
)
from mobatlas.report.figures import diagnosis_figure
from mobatlas.report.privacy import audit_table, write_audit
from mobatlas.report.tables import write_evaluation

app = typer.Typer()


@app.command()
def simulate(
    out: Out,
    users: Annotated[int | None, typer.Option(help="People.")] = None,
    pois: Annotated[int | None, typer.Option(help="Places.")] = None,
    districts: Annotated[int | None, typer.Option(help="Districts of the city.")] = None,
    days: Annotated[int | None, typer.Option(help="Days of visits.")] = None,
    divergence: Annotated[
        float | None,
        typer.Option(
            help="How strongly groups differ: mean pairwise JSD (bits) of their POI visits."
        ),
    ] = None,
    segregation: Annotated[
        float | None, typer.Option(help="How much the districts' compositions differ.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same city.")] = None,
    preset: Preset = None,
    config: Config = None,
    assignments: Assignments = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Simulate a city of people with known groups: visits, people and pois."""
    run = load_run(config, preset)
    options = {
        "users": users,
        "pois": pois,
        "districts": districts,
        "days": days,
        "divergence": divergence,
        "segregation": segregation,
    }
    given = {key: value for key, value in options.items() if value is not None}
    values = merge(run.simulate.model_dump(), parse_assignments(assignments or []), given)
    city = build(CityConfig, values, "simulate")
    with track("simulating", city.users, quiet) as tracker:
        facts = write_city_folder(
            out, city, run.seed if seed is None else seed, overwrite=overwrite, tracker=tracker
        )
    show(facts, json, city_table(facts, out))


@app.command("prepare")
def prepare_command(
    source: Annotated[
        Path, typer.Argument(help="The raw data: a file or a folder, as its format has it.")
    ],
    out: Out,
    format: Annotated[  # noqa: A002
        str,
        typer.Option("--format", help="plain, embee, veraset, foursquare, yjmob100k or geolife."),
    ] = "plain",
    engine: Annotated[str, typer.Option("--engine", help="duckdb, or spark.")] = "duckdb",
    config: Config = None,
    preset: Preset = None,
    assignments: Assignments = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn raw visits into trajectories: a dataset folder."""
    values = load_values(config, preset).get("prepare", {})
    with track("preparing", STEPS, quiet) as tracker:
        summary = prepare(
            source,
            out,
            format=format,
            values=merge(values, parse_assignments(assignments or [])),
            engine=engine,
            overwrite=overwrite,
            tracker=tracker,
        )
    show(summary.as_dict(), json, summary_table(summary.as_dict(), out))


@app.command()
def regions(
    dataset: Annotated[Path, typer.Argument(help="A dataset folder.")],
    out: Out,
    partition: Annotated[
        str | None,
        typer.Option(
            help="demogroups, fullrank, rankdef, messy, hot16, dirichlet:G:alpha, or a table of P."
        ),
    ] = None,
    by: Annotated[str | None, typer.Option(help="A region column of people.")] = None,
    composition: Annotated[
        Path | None, typer.Option(help="A census table: region, group, count or share.")
    ] = None,
    aggregates: Annotated[
        Path | None, typer.Option(help="A published table: region, feature, value, n.")
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(
            "--feature", help="poi, category, transitions, distance or hour; may be repeated."
        ),
    ] = None,
    mask: Annotated[
        list[str] | None, typer.Option("--mask", help="HOME, WORK or OTHER, to leave out.")
    ] = None,
    shuffle_regions: Annotated[
        bool, typer.Option("--shuffle-regions", help="The negative control.")
    ] = False,
    same_people: Annotated[
        bool,
        typer.Option(
            "--same-people",
            help="Composition from the people of the aggregates: gives labels away.",
        ),
    ] = False,
    split_ages: Annotated[
        bool,
        typer.Option(
            "--split-ages",
            help="Spread a census age range that straddles two groups evenly over its years.",
        ),
    ] = False,
    suppress: Annotated[int, typer.Option(help="Hide cells that fewer people are behind.")] = 0,
    rounding: Annotated[
        float, typer.Option("--round", help="Round totals of visits to multiples of this.")
    ] = 0.0,
    epsilon: Annotated[
        float | None, typer.Option(help="Differentially private noise, of a person.")
    ] = None,
    max_visits: Annotated[
        float | None,
        typer.Option(help="With --epsilon: the most visits of a person in a window that count."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of assignment, halves and shuffling.")] = 0,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Composition P and aggregates V: a controlled partition, real regions, or published tables."""
    made = build_regions(
        dataset,
        out,
        partition=partition,
        by=by,
        composition=composition,
        aggregates=aggregates,
        features=feature,
        mask=mask or (),
        shuffle_regions=shuffle_regions,
        same_people=same_people,
        straddle="uniform" if split_ages else "refuse",
        disclosure=Disclosure(suppress, rounding, epsilon, max_visits),
        seed=seed,
        overwrite=overwrite,
    )
    found = run_diagnosis(
        made.composition,
        aggregates=made.aggregates,
        randomised=made.randomised,
        population=made.population,
    )
    show(made.details | {"diagnosis": found.as_dict()}, json, regions_table(made, found, out))


@app.command()
def diagnose(
    folder: Annotated[
        Path | None, typer.Argument(metavar="REGIONS", help="A regions folder.")
    ] = None,
    composition: Annotated[
        Path | None, typer.Option(help="A bare census table, before any dataset exists.")
    ] = None,
    n: Annotated[
        float | None, typer.Option("--n", help="People per region, with --composition.")
    ] = None,
    split_ages: Annotated[
        bool, typer.Option("--split-ages", help="Spread age ranges that straddle two groups.")
    ] = False,
    min_region: Annotated[
        float, typer.Option(help="People that a region should have at least.")
    ] = 50.0,
    figure: Annotated[Path | None, typer.Option(help="Also draw it, as a PNG file.")] = None,
    json: Json = False,
) -> None:
    """Can these regions tell the groups apart, and how well?"""
    if (folder is None) == (composition is None):
        raise MobatlasError("diagnose: give either a regions folder or --composition FILE")
    if folder is not None:
        if n is not None:
            raise MobatlasError("--n goes with --composition; a regions folder knows its people")
        made = RegionsFolder.open(folder).regions
        known = made.composition
        found = run_diagnosis(
            known,
            aggregates=made.aggregates,
            min_region=min_region,
            randomised=made.randomised,
            population=made.population,
        )
    else:
        assert composition is not None
        known = read_composition(composition, n=n, straddle="uniform" if split_ages else "refuse")
        found = run_diagnosis(known, n, min_region=min_region)
    if figure is not None:
        diagnosis_figure(found, known, figure)
    show(found.as_dict(), json, diagnosis_table(found))


@app.command()
def evaluate(
    samples: Annotated[
        Path,
        typer.Argument(
            metavar="SYNTHETIC", help="A Parquet file of samples, as `generate` writes it."
        ),
    ],
    dataset: Annotated[
        Path, typer.Option("--dataset", help="The dataset folder whose people it is compared with.")
    ],
    split: Annotated[
        str, typer.Option("--split", help="Which of its people: test or val.")
    ] = "test",
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="FILE", help="Samples of the model without groups."),
    ] = None,
    strong: Annotated[
        Path | None,
        typer.Option("--strong", metavar="FILE", help="Samples of the labelled upper bound."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Also write the tables, as CSV, Markdown, LaTeX and JSON."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of who is compared, and of resampling.")] = 0,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """How close do samples come to real people, by group and all together?"""
    found = run_evaluation(
        samples, dataset, split=split, baseline=baseline, strong=strong, seed=seed
    )
    if out is not None:
        write_evaluation(out, found, overwrite=overwrite)
    show(found.as_dict(), json, evaluation_table(found))


@app.command()
def audit(
    samples: Annotated[
        Path,
        typer.Argument(
            metavar="SYNTHETIC", help="A Parquet file of samples, as `generate` writes it."
        ),
    ],
    dataset: Annotated[
        Path, typer.Option("--dataset", help="The dataset folder that the model was trained on.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Also write audit.json and the tables, as CSV, Markdown, LaTeX and JSON.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of who is compared, and of resampling.")] = 0,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What do samples give away of the people that a model learnt from? Red, amber or green, with the numbers."""
    with track("auditing", AUDIT_STEPS, quiet) as tracker:
        found = run_audit(samples, dataset, seed=seed, tracker=tracker)
    if out is not None:
        write_audit(out, found, overwrite=overwrite)
    show(found.as_dict(), json, audit_table(found))
