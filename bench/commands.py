"""The commands of `python -m bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bench import recovery as recovery_benchmark
from bench import reweight as reweight_benchmark
from bench import speed as speed_benchmark
from bench.report.console import cost_table, phase1_table, phase2_table, speed_table
from bench.report.files import write_tables
from bench.runner import Experiment
from mobatlas.cli.options import Assignments, Json, Out, Overwrite, Quiet, show
from mobatlas.config import DEFAULT_GENERATOR, parse_assignments
from mobatlas.progress import track
from mobatlas.report.tables import Table

app = typer.Typer(help="Reproducible benchmarks.", no_args_is_help=True)

Folder = Annotated[
    Path, typer.Option("--out", help="Folder to fill; the same command resumes in it.")
]
Seeds = Annotated[int, typer.Option(min=1, help="Number of seeds, each with its own data.")]
FirstSeed = Annotated[int, typer.Option(min=0, help="The first seed.")]
ProfileSeeds = Annotated[
    int | None, typer.Option(min=1, help="Number of seeds; by default 1 in quick, 3 in full.")
]
Profile = Annotated[
    str, typer.Option("--profile", help="quick (two cores, preset small) or full (preset paper).")
]
Census = Annotated[
    Path | None, typer.Option("--census", help="Composition of regions from another source.")
]
Survey = Annotated[
    Path, typer.Option("--data", help="A folder of labelled people in the canonical tables.")
]
Split = Annotated[str, typer.Option(help="People to compare with: test, or val to choose options.")]
Family = Annotated[str, typer.Option(help="The family of generators.")]


@app.command("recovery")
def recovery(
    out: Folder,
    seeds: Seeds = 20,
    first_seed: FirstSeed = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the error of recovered group means, and the coverage of their error bars."""
    result = recovery_benchmark.run(Experiment(out, seeds, first_seed, quiet))
    show(result, json, Table.from_records(result["rows"], "recovery").as_rich())


@app.command("phase1")
def phase1(
    out: Folder,
    seeds: Seeds = 1,
    first_seed: FirstSeed = 0,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Also train strong from new weights.")
    ] = False,
    assignments: Assignments = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare baseline and strong with the sampling floor of real training people."""
    from bench import phase1 as phase1_benchmark

    experiment = Experiment(out, seeds, first_seed, quiet)
    values = parse_assignments(assignments or [])
    result = phase1_benchmark.run(experiment, values, from_scratch=from_scratch)
    show(result, json, phase1_table(result))


@app.command("phase2")
def phase2(
    out: Folder,
    seeds: Seeds = 3,
    first_seed: FirstSeed = 0,
    partition: Annotated[
        list[str] | None, typer.Option(help="A controlled partition; may be repeated.")
    ] = None,
    assignments: Assignments = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the gap from baseline to floor that each strategy of phase 2 closes."""
    from bench import phase2 as phase2_benchmark
    from bench.report.phase2 import write_phase2

    experiment = Experiment(out, seeds, first_seed, quiet)
    values = parse_assignments(assignments or [])
    result = phase2_benchmark.run(experiment, partition or (), values)
    write_phase2(out, result)
    show(result, json, phase2_table(result))


def _register_question(name: str, description: str) -> None:
    @app.command(name, help=description)
    def question(
        out: Folder,
        profile: Profile = "quick",
        seeds: ProfileSeeds = None,
        first_seed: FirstSeed = 0,
        generator: Family = "latent-diffusion",
        strategy: Annotated[
            list[str] | None, typer.Option(help="A strategy; may be repeated. All by default.")
        ] = None,
        without_rest: Annotated[
            bool,
            typer.Option("--without-rest", help="Leave out people whom a partition leaves out."),
        ] = False,
        assignments: Assignments = None,
        json: Json = False,
        quiet: Quiet = False,
    ) -> None:
        from bench import questions

        count = seeds or questions.get_profile(profile).seeds
        experiment = Experiment(out, count, first_seed, quiet)
        values = parse_assignments(assignments or [])
        choice = questions.Choice(generator, strategy or (), without_rest)
        result = questions.run(name, experiment, profile, values, choice=choice)
        _show_question(out, result, json)


_register_question("rq1", "RQ1 of the paper: compare strategies and partitions.")
_register_question("rq2", "RQ2 of the paper: compare POIs, categories and transitions.")


@app.command("rq3")
def rq3(
    out: Folder,
    profile: Profile = "quick",
    seeds: ProfileSeeds = None,
    first_seed: FirstSeed = 0,
    size: Annotated[
        int | None, typer.Option(min=1, help="Trajectories to learn from, of all groups together.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="A folder of labelled people, instead of simulated cities."),
    ] = None,
    generator: Family = "latent-diffusion",
    assignments: Assignments = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """RQ3 of the paper: next-POI prediction by group, learnt from real and synthetic people."""
    from bench import prediction
    from bench.questions import get_profile

    experiment = Experiment(out, seeds or get_profile(profile).seeds, first_seed, quiet)
    values = parse_assignments(assignments or [])
    options = prediction.PredictionOptions(profile, size, data, generator, values=values)
    _show_question(out, prediction.run(experiment, options), json)


@app.command("families")
def families(
    out: Folder,
    generator: Annotated[
        list[str] | None, typer.Option(help="A family; may be repeated. All by default.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Training time of phase 1 for each family.")] = 600,
    seeds: Seeds = 1,
    first_seed: FirstSeed = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare families of generators at equal training time, with their sampling speed."""
    from bench import families as families_benchmark
    from bench.report.families import families_table, write_families

    experiment = Experiment(out, seeds, first_seed, quiet)
    result = families_benchmark.run(experiment, generator or (), seconds)
    write_families(out, result)
    show(result, json, families_table(result).as_rich())


@app.command("real")
def real(
    data: Survey,
    out: Folder,
    generator: Family = DEFAULT_GENERATOR,
    census: Census = None,
    partition: Annotated[
        list[str] | None,
        typer.Option(help="A controlled partition, or none; may be repeated. All by default."),
    ] = None,
    regions: Annotated[
        list[str] | None,
        typer.Option(help="A region column, or none; may be repeated. All by default."),
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(
            help="Feature maps of real regions, joined by +; may be repeated. By default "
            "category, transitions, and both."
        ),
    ] = None,
    shift: Annotated[
        str | None,
        typer.Option(
            help="A column that is false for people to leave out of training; by default weekday."
        ),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sets of samples of each model; scores are averaged. 3 by default."
        ),
    ] = None,
    labelled: Annotated[
        int,
        typer.Option(min=0, help="Measure real regions alone, with and without labelled people."),
    ] = 0,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of seeds, each with its own models.")
    ] = 3,
    first_seed: FirstSeed = 0,
    assignments: Assignments = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure real people with partitions, real regions, a census and shuffled regions."""
    from bench import real as real_benchmark
    from bench.report.real import real_tables, write_real

    options = real_benchmark.RealOptions(
        generator,
        partition or (),
        regions or (),
        [tuple(each.split("+")) for each in feature or ()] or real_benchmark.FEATURES,
        census,
        shift,
        real_benchmark.DRAWS if draws is None else draws,
        labelled,
        values=parse_assignments(assignments or []),
    )
    result = real_benchmark.run(data, Experiment(out, seeds, first_seed, quiet), options)
    write_real(out, result)
    show(result, json, next(iter(real_tables(result).values())).as_rich())


@app.command("results")
def results(
    folder: Annotated[
        Path,
        typer.Argument(help="A folder with rq1.json, rq2.json, rq3.json or real-GENERATOR.json."),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="The Markdown file to write; figures go into a folder next to it."
        ),
    ],
    real: Annotated[bool, typer.Option("--real", help="Use the results on real people.")] = False,
    all_tables: Annotated[bool, typer.Option("--all", help="Show every table.")] = False,
) -> None:
    """Write one page with the tables and figures of the research questions."""
    from bench.report.questions import write_page
    from bench.report.real import write_real_page

    write = write_real_page if real else write_page
    typer.echo(write(folder, out, all_tables=all_tables))


def _show_question(out: Path, result: dict[str, Any], json: bool) -> None:
    """Write the tables and figures next to the result, and print the first table."""
    from bench.report.questions import question_tables, write_question

    write_question(out, result)
    show(result, json, next(iter(question_tables(result).values())).as_rich())


@app.command("reweight")
def reweight(
    data: Annotated[
        Path, typer.Option("--data", help="A labelled one-day survey in the canonical tables.")
    ],
    out: Folder,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of seeds, each with its own regions.")
    ] = 3,
    first_seed: FirstSeed = 0,
    groups_explain: Annotated[
        list[float] | None,
        typer.Option(
            help="The largest share of variance between people that groups explain; may be "
            "repeated. If given, only real regions are measured."
        ),
    ] = None,
    census: Census = None,
    split: Split = "test",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Weight real training people by recovered group means, without any generator."""
    from bench.report.real import reweighting_table

    options = reweight_benchmark.ReweightOptions(groups_explain or (), census, split)
    experiment = Experiment(out, seeds, first_seed, quiet)
    result = reweight_benchmark.run(data, experiment, options)
    show(result, json, reweighting_table(result).as_rich())


@app.command("group-means")
def group_means(
    out: Folder,
    size: Annotated[
        str, typer.Option(help="The preset of simulated cities: small, or paper (Virginia's size).")
    ] = "small",
    data: Annotated[
        Path | None,
        typer.Option("--data", help="A folder of labelled people, instead of simulated cities."),
    ] = None,
    labelled: Annotated[
        list[int] | None,
        typer.Option(help="Labelled people beside the regions; may be repeated. Default: 0, 200."),
    ] = None,
    seeds: Seeds = 3,
    first_seed: FirstSeed = 0,
    split: Split = "test",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare recovered group means with held-out people, without a generator."""
    from bench import group_means as means_benchmark
    from bench.report.evidence import group_means_table

    result = means_benchmark.run(
        Experiment(out, seeds, first_seed, quiet),
        means_benchmark.Source(size, data),
        labelled or means_benchmark.LABELLED,
        split,
    )
    show(result, json, group_means_table(result).as_rich())


@app.command("evidence")
def evidence(
    data: Survey,
    out: Folder,
    seeds: Seeds = 3,
    first_seed: FirstSeed = 0,
    census: Census = None,
    split: Split = "test",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure what labelled people and group tables add to the regions of a survey."""
    from bench import evidence as evidence_benchmark
    from bench.report.evidence import evidence_table

    experiment = Experiment(out, seeds, first_seed, quiet)
    result = evidence_benchmark.run(data, experiment, census, split)
    show(result, json, evidence_table(result).as_rich())


@app.command("definitions")
def definitions(
    out: Folder,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="A folder of labelled people, instead of simulated cities."),
    ] = None,
    seeds: Seeds = 3,
    first_seed: FirstSeed = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare earlier and present definitions of floors and trips, without a generator."""
    from bench import definitions as definitions_benchmark
    from bench.report.questions import definitions_table

    result = definitions_benchmark.run(Experiment(out, seeds, first_seed, quiet), data)
    show(result, json, definitions_table(result).as_rich())


@app.command("checkpoints")
def checkpoints(
    model: Annotated[Path, typer.Argument(help="A model folder, trained with --snapshot-steps N.")],
    out: Folder,
    dataset: Annotated[
        Path | None, typer.Option("--dataset", help="The dataset folder, if it has moved.")
    ] = None,
    split: Annotated[
        str, typer.Option("--split", help="Compare with these people: test or val.")
    ] = "test",
    seeds: Seeds = 1,
    first_seed: FirstSeed = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Draw a learning curve: score the snapshots of a model on the test metrics."""
    from bench import checkpoints as checkpoints_benchmark
    from bench.report.figures import learning_curve_figure
    from bench.report.learning_curve import learning_curve_table

    experiment = Experiment(out, seeds, first_seed, quiet)
    result = checkpoints_benchmark.run(model, experiment, dataset=dataset, split=split)
    table = learning_curve_table(result)
    tables = out / "learning_curve-tables"
    tables.mkdir(exist_ok=True)
    write_tables(tables, {"learning_curve": table})
    learning_curve_figure(out / "learning_curve.png", result)
    show(result, json, table.as_rich())


@app.command("disclosure")
def disclosure(
    out: Folder,
    seeds: Seeds = 3,
    first_seed: FirstSeed = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure what suppression, rounding and differential privacy of aggregates cost."""
    from bench import disclosure as disclosure_benchmark
    from bench.report.figures import disclosure_figure

    experiment = Experiment(out, seeds, first_seed, quiet)
    result = disclosure_benchmark.run(experiment, draw=disclosure_figure)
    rows = [
        {name: value for name, value in row.items() if name != "error_by_seed"}
        for row in result["rows"]
    ]
    show(result, json, Table.from_records(rows, "disclosure").as_rich())


@app.command("privacy")
def privacy(
    out: Folder,
    seeds: Seeds = 1,
    first_seed: FirstSeed = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure what a least number of people per place and the rejection of copies cost."""
    from bench import privacy as privacy_benchmark

    result = privacy_benchmark.run(Experiment(out, seeds, first_seed, quiet))
    show(result, json, Table.from_records(result["rows"], "privacy").as_rich())


@app.command("anchors")
def anchors(
    out: Folder,
    data: Annotated[
        Path | None, typer.Option("--data", help="Measure distances from people of a dataset.")
    ] = None,
    seeds: Seeds = 3,
    first_seed: FirstSeed = 0,
    assignments: Assignments = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure what synthetic homes and workplaces cost, and what they disclose."""
    from bench import anchors as anchors_benchmark

    experiment = Experiment(out, seeds, first_seed, quiet)
    result = anchors_benchmark.run(experiment, assignments or [], data)
    rows = [
        {"seed": row["seed"], "emitted": name, **counts, "interval": str(counts["interval"])}
        for row in result["rows"]
        for name, counts in row["near"].items()
        if "interval" in counts
    ]
    show(result, json, Table.from_records(rows, "per person").as_rich())


@app.command("speed")
def speed(
    out: Out,
    profile: Annotated[
        str,
        typer.Option(
            "--profile",
            help="quick (1 million visits), full (10 million), prepare (DuckDB and Spark, up to "
            "20 million visits), processes (two against one), or regions (up to ten thousand "
            "regions, and 90 groups), or evaluation (100,000 trajectories on every side).",
        ),
    ] = "quick",
    seed: Annotated[int, typer.Option(help="Seed of the simulated city.")] = 0,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure speed relative to references measured in the same run."""
    with track("measuring", speed_benchmark.STEPS.get(profile, 1.0), quiet) as tracker:
        result = speed_benchmark.run(out, profile, seed, overwrite=overwrite, tracker=tracker)
    show(result, json, speed_table(result))


@app.command("cost")
def cost(
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="Folder to fill. A baseline that `phase2` trained there is reused."
        ),
    ],
    partition: Annotated[str, typer.Option(help="A controlled partition.")] = "demogroups",
    steps: Annotated[int, typer.Option(help="Steps of finetune.")] = 150,
    seed: Annotated[int, typer.Option(help="Seed of the simulated city and its models.")] = 0,
    assignments: Assignments = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure how long tilt and finetune take to match the regions."""
    from bench import cost as cost_benchmark

    experiment = Experiment(out, first_seed=seed, quiet=quiet)
    values = parse_assignments(assignments or [])
    result = cost_benchmark.run(experiment, partition, steps, values)
    show(result, json, cost_table(result))
