"""Commands for data: simulate, prepare, regions, diagnose, recover, design, evaluate, audit."""

from pathlib import Path
from typing import Annotated

import typer

import mobatlas
from mobatlas.cli.options import (
    AggregatesTable,
    Assignments,
    By,
    ByAttribute,
    CensusTables,
    Compare,
    Config,
    Epsilon,
    FeatureMaps,
    Features,
    Figure,
    GroupTables,
    HomePanel,
    JointPrior,
    Json,
    LabelledPath,
    LabelledSample,
    Level,
    Mask,
    MaxVisits,
    MinPeople,
    NumbersFile,
    Out,
    Overwrite,
    Partition,
    Per,
    Polygons,
    Preset,
    Quiet,
    Rename,
    Rounding,
    SamePeople,
    ShuffleRegions,
    SplitAges,
    Top,
    WithoutRest,
    parse_periods,
    show,
)
from mobatlas.config import (
    MIN_PEOPLE,
    CityConfig,
    build,
    load_run,
    load_values,
    merge,
    parse_assignments,
    parse_renames,
)
from mobatlas.errors import MobatlasError
from mobatlas.progress import track

# Commands import their modules when they run, so that `mobatlas --help` is fast.
app = typer.Typer()


@app.command()
def simulate(
    out: Out,
    users: Annotated[int | None, typer.Option(help="Number of people.")] = None,
    pois: Annotated[int | None, typer.Option(help="Number of places.")] = None,
    districts: Annotated[int | None, typer.Option(help="Number of districts.")] = None,
    days: Annotated[int | None, typer.Option(help="Number of simulated days.")] = None,
    divergence: Annotated[
        float | None,
        typer.Option(
            help="How strongly groups differ: mean Jensen-Shannon divergence (bits) between the "
            "POI visits of two groups."
        ),
    ] = None,
    segregation: Annotated[
        float | None,
        typer.Option(help="How much districts differ in their groups: from 0 (equal) to 10."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same city.")] = None,
    preset: Preset = None,
    config: Config = None,
    assignments: Assignments = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Simulate a city: tables of visits, of people with their groups, and of places."""
    from mobatlas.report.console import city_table

    run = load_run(config, preset)
    options = {
        "users": users,
        "pois": pois,
        "districts": districts,
        "days": days,
        "divergence": divergence,
        "segregation": segregation,
    }
    chosen = {key: value for key, value in options.items() if value is not None}
    city = build(
        CityConfig,
        merge(run.simulate.model_dump(), parse_assignments(assignments or []), chosen),
        "simulate",
    )
    with track("simulating", city.users, quiet) as tracker:
        facts = mobatlas.write_city_folder(
            out, city, run.seed if seed is None else seed, overwrite=overwrite, tracker=tracker
        )
    show(facts, json, city_table(facts, out))


@app.command("prepare")
def prepare_command(
    source: Annotated[
        Path, typer.Argument(help="The raw data: a file or a folder, depending on its format.")
    ],
    out: Out,
    format: Annotated[  # noqa: A002
        str,
        typer.Option(
            "--format",
            help="Layout of the source: plain, embee, veraset, foursquare, yjmob100k or geolife.",
        ),
    ] = "plain",
    engine: Annotated[str, typer.Option("--engine", help="duckdb or spark.")] = "duckdb",
    rename: Rename = None,
    min_people_per_place: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Places that fewer training people have visited become OTHER; 0 keeps all.  "
            "[default: 10]",
        ),
    ] = None,
    config: Config = None,
    preset: Preset = None,
    assignments: Assignments = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn raw visits into a dataset folder of trajectories."""
    from mobatlas.data.prepare.pipeline import STEPS
    from mobatlas.report.console import summary_table

    values = load_values(config, preset).get("prepare", {})
    fewest = min_people_per_place
    with track("preparing", STEPS, quiet) as tracker:
        summary = mobatlas.prepare(
            source,
            out,
            format=format,
            values=merge(
                values,
                parse_assignments(assignments or []),
                {"rename": parse_renames(rename or ())},
                {} if fewest is None else {"min_people_per_place": fewest},
            ),
            engine=engine,
            overwrite=overwrite,
            tracker=tracker,
        )
    show(summary.as_dict(), json, summary_table(summary.as_dict(), out))


@app.command()
def regions(
    dataset: Annotated[Path, typer.Argument(help="A dataset folder.")],
    out: Out,
    partition: Partition = None,
    by: By = None,
    composition: CensusTables = None,
    joint_prior: JointPrior = None,
    aggregates: AggregatesTable = None,
    feature: Features = None,
    mask: Mask = None,
    shuffle_regions: ShuffleRegions = False,
    without_rest: WithoutRest = False,
    same_people: SamePeople = False,
    split_ages: SplitAges = False,
    suppress: Annotated[int, typer.Option(help="Suppress cells with fewer people than this.")] = 0,
    min_people: MinPeople = MIN_PEOPLE,
    rounding: Rounding = 0.0,
    epsilon: Epsilon = None,
    max_visits: MaxVisits = None,
    group_table: GroupTables = None,
    labelled: LabelledPath = None,
    labelled_sample: LabelledSample = None,
    rename: Rename = None,
    per: Per = None,
    home_panel: HomePanel = None,
    polygons: Polygons = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Build two tables by region: composition P (its groups) and aggregates V (its mean visits)."""
    from mobatlas.regions.disclosure import Disclosure
    from mobatlas.regions.store import RegionsFolder
    from mobatlas.report.console import regions_table

    options = mobatlas.RegionsOptions(
        partition=partition,
        by=by,
        composition=composition or None,
        joint_prior=joint_prior,
        aggregates=aggregates,
        features=feature,
        mask=mask or (),
        min_people=min_people,
        shuffle_regions=shuffle_regions,
        same_people=same_people,
        straddle="uniform" if split_ages else "refuse",
        rest=not without_rest,
        disclosure=Disclosure(suppress, rounding, epsilon, max_visits),
        group_tables=group_table or (),
        labelled=labelled,
        labelled_sample=labelled_sample,
        per=parse_periods(per, aggregates),
        rename=parse_renames(rename or ()),
        home_panel=home_panel,
        polygons=polygons,
    )
    built = mobatlas.build_regions(dataset, out, options, seed=seed, overwrite=overwrite)
    result = RegionsFolder.open(out).diagnosis
    show(built.details | {"diagnosis": result.as_dict()}, json, regions_table(built, result, out))


@app.command()
def diagnose(
    folder: Annotated[
        Path | None, typer.Argument(metavar="REGIONS", help="A regions folder.")
    ] = None,
    composition: CensusTables = None,
    joint_prior: JointPrior = None,
    n: Annotated[
        float | None, typer.Option("--n", help="People per region, with --composition.")
    ] = None,
    split_ages: SplitAges = False,
    rename: Rename = None,
    json: Json = False,
) -> None:
    """Show which differences between groups the evidence can identify, and how well."""
    from mobatlas.regions.identifiability import diagnose_regions
    from mobatlas.regions.margins import Census
    from mobatlas.report.console import diagnosis_table

    if (folder is None) == (composition is None):
        raise MobatlasError(
            "diagnose: give either a regions folder or --composition FILE, not both"
        )
    if folder is not None:
        if n is not None:
            raise MobatlasError(
                "--n is only for --composition; a regions folder contains its numbers of people"
            )
        built = mobatlas.load_regions(folder)
        result = diagnose_regions(built)
    else:
        assert composition is not None
        straddle = "uniform" if split_ages else "refuse"
        notes: list[str] = []
        census = Census(composition, joint_prior, straddle, parse_renames(rename or ()))
        table = census.read(n=n, notes=notes)
        typer.echo("".join(f"{note}\n" for note in notes), err=True, nl=False)
        result = mobatlas.diagnose(table, n)
    show(result.as_dict(), json, diagnosis_table(result))


@app.command()
def recover(
    folder: Annotated[Path, typer.Argument(metavar="REGIONS", help="A regions folder.")],
    level: Level = 0.9,
    by: ByAttribute = None,
    compare: Compare = None,
    feature: FeatureMaps = None,
    top: Top = None,
    out: NumbersFile = None,
    figure: Figure = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Estimate visits per person by group, with intervals and differences from the average."""
    from mobatlas.report.recovery import check_output

    if out is not None:
        check_output(out, overwrite, folder)
    regions = mobatlas.load_regions(folder)
    recovery = mobatlas.recover(regions, quiet=True)
    summary = mobatlas.summarise_recovery(
        recovery, level=level, by=by, compare=compare, features=feature
    )
    view = mobatlas.RecoveryView(summary, regions, feature or (), top)
    if out is not None:
        mobatlas.write_recovery(out, summary, overwrite=overwrite)
    if figure is not None:
        view.draw(figure)
    show(summary.as_dict(), json, view.as_rich())


@app.command()
def design(
    folder: Annotated[Path, typer.Argument(metavar="REGIONS", help="A regions folder.")],
    budget: Annotated[
        int, typer.Option(help="People who could be labelled, or counted in a table.")
    ] = 200,
    json: Json = False,
) -> None:
    """Compare what more labelled people, a group table or other regions would do to intervals."""
    from mobatlas.report.console import plan_table

    plan = mobatlas.plan_evidence(mobatlas.load_regions(folder), budget)
    show(plan.as_dict(), json, plan_table(plan))


@app.command()
def evaluate(
    samples: Annotated[
        Path,
        typer.Argument(
            metavar="SYNTHETIC", help="A Parquet file of samples, as `generate` writes it."
        ),
    ],
    dataset: Annotated[
        Path, typer.Option("--dataset", help="The dataset folder with the real people.")
    ],
    split: Annotated[
        str, typer.Option("--split", help="Compare with these people: test or val.")
    ] = "test",
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="FILE", help="Samples of the model without groups."),
    ] = None,
    strong: Annotated[
        Path | None,
        typer.Option("--strong", metavar="FILE", help="Samples of the model trained on labels."),
    ] = None,
    strong_calibrated: Annotated[
        Path | None,
        typer.Option(
            "--strong-calibrated",
            metavar="FILE",
            help="Calibrated samples of the model trained on labels.",
        ),
    ] = None,
    rename: Rename = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    json: Json = False,
) -> None:
    """Measure how close samples are to real people, by group and overall."""
    from mobatlas.report.console import evaluation_table

    result = mobatlas.evaluate(
        samples,
        dataset,
        split=split,
        baseline=baseline,
        strong=strong,
        strong_calibrated=strong_calibrated,
        seed=seed,
        rename=parse_renames(rename or ()),
    )
    show(result.as_dict(), json, evaluation_table(result))


@app.command()
def audit(
    samples: Annotated[
        Path,
        typer.Argument(
            metavar="SYNTHETIC",
            help="A Parquet file of samples, as `generate` writes it, or a MODEL folder.",
        ),
    ],
    dataset: Annotated[
        Path, typer.Option("--dataset", help="The dataset folder that the model was trained on.")
    ],
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure what samples or a model disclose about training people: is it safe to share them?"""
    from mobatlas.evaluation.privacy.audit import STEPS
    from mobatlas.report.console import audit_table

    with track("auditing", STEPS, quiet) as tracker:
        result = mobatlas.audit(samples, dataset, seed=seed, tracker=tracker)
    show(result.as_dict(), json, audit_table(result))
