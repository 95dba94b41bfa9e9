"""Commands that measure: `python -m bench ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bench import recovery as recovery_benchmark
from bench import reweight as reweight_benchmark
from bench import speed as speed_benchmark
from bench.report.console import cost_table, phase1_table, phase2_table, speed_table
from mobatlas.cli.options import (
    Assignments,
    Json,
    Out,
    Overwrite,
    Quiet,
    show,
)
from mobatlas.config import parse_assignments
from mobatlas.progress import track
from mobatlas.report.tables import Table

app = typer.Typer(help="Measurements that can be made again.", no_args_is_help=True)


@app.command("recovery")
def recovery(
    out: Out,
    seeds: Annotated[int, typer.Option(min=1, help="Simulated cities.")] = 20,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How near recovered group means come to the truth, and whether their error bars say so."""
    with track("recovering", seeds, quiet) as tracker:
        result = recovery_benchmark.run(
            out, seeds, first_seed, overwrite=overwrite, tracker=tracker
        )
    show(result, json, Table.from_records(result["rows"], "recovery").as_rich())


@app.command("phase1")
def phase1(
    out: Out,
    seeds: Annotated[
        int, typer.Option(min=1, help="Simulated cities, each with its own models.")
    ] = 1,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Also train strong anew.")
    ] = False,
    assignments: Assignments = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Is the generator as good as real training people, and does conditioning bite when labels are given?"""
    from bench import phase1 as phase1_benchmark

    result = phase1_benchmark.run(
        out,
        seeds,
        first_seed,
        values=parse_assignments(assignments or []),
        from_scratch=from_scratch,
        overwrite=overwrite,
        quiet=quiet,
    )
    show(result, json, phase1_table(result))


@app.command("phase2")
def phase2(
    out: Annotated[
        Path, typer.Option("--out", help="Folder to fill; one that was begun is gone on with.")
    ],
    seeds: Annotated[
        int, typer.Option(min=1, help="Simulated cities, each with its own models.")
    ] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    partition: Annotated[
        list[str] | None, typer.Option(help="How groups are mixed; may be repeated.")
    ] = None,
    assignments: Assignments = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What each strategy of phase 2 closes of the way from the baseline to the sampling floor."""
    from bench import phase2 as phase2_benchmark
    from bench.report.phase2 import write_phase2

    values = parse_assignments(assignments or [])
    result = phase2_benchmark.run(
        out, seeds, first_seed, partitions=partition or (), values=values, quiet=quiet
    )
    write_phase2(out, result)
    show(result, json, phase2_table(result))


Profile = Annotated[
    str, typer.Option("--profile", help="quick (two cores, preset small) or full (preset paper).")
]
Filled = Annotated[
    Path, typer.Option("--out", help="Folder to fill; one that was begun is gone on with.")
]
Seeds = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Simulated cities, or models of the same real people; 1 by default in quick, 3 in full.",
    ),
]
Census = Annotated[
    Path | None,
    typer.Option("--census", help="Composition of regions that does not come from these people."),
]
FirstSeed = Annotated[int, typer.Option(min=0, help="The first of them.")]


def _register(name: str, said: str) -> None:
    @app.command(name, help=said)
    def question(
        out: Filled,
        profile: Profile = "quick",
        seeds: Seeds = None,
        first_seed: FirstSeed = 0,
        assignments: Assignments = None,
        json: Json = False,
        quiet: Quiet = False,
    ) -> None:
        from bench import questions

        values = parse_assignments(assignments or [])
        result = questions.run(
            name, out, profile, seeds=seeds, first_seed=first_seed, values=values, quiet=quiet
        )
        _tell(out, result, json)


_register("rq1", "The paper's RQ1: what each strategy learns, by how groups are mixed in regions.")
_register(
    "rq2", "The paper's RQ2: what can be learnt from POIs, from categories and from transitions."
)


@app.command("rq3")
def rq3(
    out: Filled,
    profile: Profile = "quick",
    seeds: Seeds = None,
    first_seed: FirstSeed = 0,
    size: Annotated[
        int | None, typer.Option(min=1, help="Trajectories to learn from, of all groups together.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="A folder of labelled people in the canonical tables, not a simulated city.",
        ),
    ] = None,
    generator: Annotated[str, typer.Option(help="The family of generators.")] = "latent-diffusion",
    assignments: Assignments = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The paper's RQ3: next-POI prediction by group, learnt from real and from synthetic people."""
    from bench import prediction

    values = parse_assignments(assignments or [])
    manner: dict[str, Any] = {
        "data": data,
        "generator": generator,
        "values": values,
        "quiet": quiet,
    }
    result = prediction.run(out, profile, seeds=seeds, first_seed=first_seed, size=size, **manner)
    _tell(out, result, json)


@app.command("families")
def families(
    out: Filled,
    generator: Annotated[
        list[str] | None, typer.Option(help="A family; may be repeated, all by default.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Of training in phase 1, for each family.")
    ] = 600.0,
    seeds: Annotated[int, typer.Option(min=1, help="Simulated cities.")] = 1,
    first_seed: FirstSeed = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Families of generators at equal training time: baseline, strong, supervised, samples a second."""
    from bench import families as families_benchmark
    from bench.report.families import families_table, write_families

    result = families_benchmark.run(
        out, seeds, first_seed, generators=generator or (), seconds=seconds, quiet=quiet
    )
    write_families(out, result)
    show(result, json, families_table(result).as_rich())


@app.command("real")
def real(
    data: Annotated[
        Path, typer.Option("--data", help="A folder of labelled people in the canonical tables.")
    ],
    out: Filled,
    generator: Annotated[str, typer.Option(help="The family of generators.")] = "autoregressive",
    census: Census = None,
    partition: Annotated[
        list[str] | None,
        typer.Option(help="A controlled one, or none; may be repeated, all by default."),
    ] = None,
    regions: Annotated[
        list[str] | None,
        typer.Option(
            help="A column of people, or none; may be repeated, all region columns by default."
        ),
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(
            help="What real regions tell, maps joined by +; may be repeated. By default category, transitions, and both."
        ),
    ] = None,
    shift: Annotated[
        str | None,
        typer.Option(
            help="A column that is false for those who do not train; weekday if there is one."
        ),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of each model whose scores are averaged; 3 by default."),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Ways to deal or halve the people, each with its own models.")
    ] = 3,
    first_seed: FirstSeed = 0,
    assignments: Assignments = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Real people under controlled partitions and real regions, with a census, shuffled ones, and another kind of day."""
    from bench import real as real_benchmark
    from bench.report.real import real_tables, write_real

    found = real_benchmark.run(
        data,
        out,
        seeds,
        first_seed,
        generator=generator,
        partitions=partition or (),
        regions=regions or (),
        features=[tuple(each.split("+")) for each in feature or ()] or real_benchmark.FEATURES,
        census=census,
        shift=shift,
        draws=real_benchmark.DRAWS if draws is None else draws,
        values=parse_assignments(assignments or []),
        quiet=quiet,
    )
    write_real(out, found)
    show(found, json, next(iter(real_tables(found).values())).as_rich())


@app.command("results")
def results(
    folder: Annotated[
        Path, typer.Argument(help="Where rq1.json, rq2.json, rq3.json lie, or real-FAMILY.json.")
    ],
    out: Annotated[
        Path, typer.Option("--out", help="The Markdown file to write; its figures lie beside it.")
    ],
    real: Annotated[bool, typer.Option("--real", help="Use the results on real people.")] = False,
    all_tables: Annotated[bool, typer.Option("--all", help="Show every table.")] = False,
) -> None:
    """Write one page with the tables and figures of the research questions."""
    from bench.report.questions import write_page
    from bench.report.real import write_real_page

    write = write_real_page if real else write_page
    typer.echo(write(folder, out, all_tables=all_tables))


def _tell(out: Path, result: dict[str, Any], json: bool) -> None:
    """Write the tables and figures beside the result, and print the first of the tables."""
    from bench.report.questions import question_tables, write_question

    write_question(out, result)
    show(result, json, next(iter(question_tables(result).values())).as_rich())


@app.command("reweight")
def reweight(
    data: Annotated[
        Path, typer.Option("--data", help="A labelled one-day survey in the canonical tables.")
    ],
    out: Out,
    seeds: Annotated[int, typer.Option(min=1, help="Ways to deal or halve the people.")] = 3,
    groups_explain: Annotated[
        list[float] | None,
        typer.Option(
            help="The share of the variance between people that groups are believed to explain at most; may be repeated. Real "
            "regions alone depend on it: with this option they alone are measured, with each share."
        ),
    ] = None,
    census: Census = None,
    split: Annotated[
        str, typer.Option(help="People to compare with: test, or val, by whom to choose.")
    ] = "test",
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Real training people weighed by recovered group means, against test people of the groups; no generator."""
    from bench.report.real import reweighting_table

    manner: dict[str, Any] = {
        "groups_explain": groups_explain or (),
        "census": census,
        "split": split,
    }
    result = reweight_benchmark.run(data, out, seeds, **manner, overwrite=overwrite, quiet=quiet)
    show(result, json, reweighting_table(result).as_rich())


@app.command("disclosure")
def disclosure(
    out: Out,
    seeds: Annotated[int, typer.Option(min=1, help="Simulated cities.")] = 3,
    first_seed: FirstSeed = 0,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What small-cell suppression, rounding and differential privacy of aggregates cost; draws disclosure.png."""
    from bench import disclosure as disclosure_benchmark
    from bench.report.figures import disclosure_figure

    with track("protecting", seeds, quiet) as tracker:
        manner: dict[str, Any] = {
            "draw": disclosure_figure,
            "overwrite": overwrite,
            "tracker": tracker,
        }
        result = disclosure_benchmark.run(out, seeds, first_seed, **manner)
    rows = [
        {name: value for name, value in row.items() if name != "error_by_seed"}
        for row in result["rows"]
    ]
    show(result, json, Table.from_records(rows, "disclosure").as_rich())


@app.command("speed")
def speed(
    out: Out,
    profile: Annotated[
        str,
        typer.Option(
            "--profile",
            help="quick (1 million visits), full (10 million), or how it grows: prepare (DuckDB and Spark, to 20 million), "
            "processes (two beside one), regions (to ten thousand, and 90 groups).",
        ),
    ] = "quick",
    seed: Annotated[int, typer.Option(help="Of the simulated city.")] = 0,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How fast, each as a ratio to a reference measured in the same run."""
    with track("measuring", speed_benchmark.STEPS.get(profile, 1.0), quiet) as tracker:
        result = speed_benchmark.run(out, profile, seed, overwrite=overwrite, tracker=tracker)
    show(result, json, speed_table(result))


@app.command("cost")
def cost(
    out: Annotated[
        Path,
        typer.Option("--out", help="Folder to fill; a baseline that `phase2` made there is used."),
    ],
    partition: Annotated[str, typer.Option(help="How groups are mixed in regions.")] = "demogroups",
    steps: Annotated[int, typer.Option(help="Steps of finetuning.")] = 150,
    seed: Annotated[int, typer.Option(help="Of the simulated city and its models.")] = 0,
    assignments: Assignments = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How soon a tilt has reached the regions that finetuning reaches, as published and as here."""
    from bench import cost as cost_benchmark

    values = parse_assignments(assignments or [])
    with track(
        "measuring", cost_benchmark.STEPS, quiet=True
    ) as tracker:  # lines: what it is made of has bars of its own
        result = cost_benchmark.run(
            out, seed, partition=partition, steps=steps, values=values, quiet=quiet, tracker=tracker
        )
    show(result, json, cost_table(result))
