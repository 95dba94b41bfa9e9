"""Commands for models: train, supervise, generate."""

from pathlib import Path
from typing import Annotated, Any

import typer

import mobatlas
from mobatlas.cli.options import (
    Accelerator,
    Anchors,
    Assignments,
    Calibrate,
    CheckpointSeconds,
    Coarsen,
    Config,
    Count,
    DatasetOverride,
    Devices,
    Divergence,
    Draws,
    FinetunePreset,
    FromScratch,
    GroupNames,
    Json,
    Membership,
    Out,
    Overwrite,
    Posterior,
    Precision,
    Preset,
    Quiet,
    RejectCopies,
    Rename,
    Resume,
    Shard,
    SnapshotSteps,
    StrategyName,
    TrainingSeed,
    show,
)
from mobatlas.config import load_run, merge, parse_assignments, parse_renames
from mobatlas.progress import track

app = typer.Typer()


@app.command()
def train(
    dataset: Annotated[Path, typer.Argument(help="A dataset folder.")],
    out: Out,
    generator: Annotated[
        str | None,
        typer.Option(
            "--generator",
            help="autoregressive (the default), latent-diffusion, vae, point-process, external, "
            "or a registered name.",
        ),
    ] = None,
    preset: Preset = None,
    config: Config = None,
    assignments: Assignments = None,
    seed: TrainingSeed = None,
    resume: Resume = False,
    accelerator: Accelerator = "auto",
    devices: Devices = 1,
    precision: Precision = "auto",
    checkpoint_seconds: CheckpointSeconds = 30.0,
    snapshot_steps: SnapshotSteps = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Phase 1: fit a generator of trajectories without demographics."""
    from mobatlas.generators.protocol import family_of
    from mobatlas.report.console import training_table

    run = load_run(config, preset)
    name = generator or run.train.generator
    options = (
        family_of(name).resolve(run.train.options, config.parent) if config else run.train.options
    )
    saved = (checkpoint_seconds, snapshot_steps)
    execution = mobatlas.Execution(
        resume, overwrite, accelerator, devices, precision, *saved, quiet
    )
    report = mobatlas.train(
        dataset,
        out,
        generator=name,
        preset=preset or run.preset,
        values=merge(options, parse_assignments(assignments or [])),
        seed=run.seed if seed is None else seed,
        execution=execution,
    )
    show(report, json, training_table(report, out))


@app.command()
def supervise(
    model: Annotated[Path, typer.Argument(help="A model of phase 1; for finetune also of tilt.")],
    out: Out,
    regions: Annotated[
        Path | None,
        typer.Argument(metavar="REGIONS", help="A regions folder; not needed for strong."),
    ] = None,
    strategy: StrategyName = None,
    divergence: Divergence = None,
    membership: Membership = False,
    from_scratch: FromScratch = False,
    preset: FinetunePreset = None,
    dataset: DatasetOverride = None,
    config: Config = None,
    assignments: Assignments = None,
    seed: TrainingSeed = None,
    resume: Resume = False,
    accelerator: Accelerator = "auto",
    devices: Devices = 1,
    precision: Precision = "auto",
    checkpoint_seconds: CheckpointSeconds = 30.0,
    snapshot_steps: SnapshotSteps = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Phase 2: condition a model on groups so that it matches regional aggregates."""
    from mobatlas.report.console import supervised_table
    from mobatlas.supervision.strategies import STRATEGIES

    run = load_run(config)
    chosen = strategy or run.supervise.strategy
    presets = STRATEGIES[chosen].presets if chosen in STRATEGIES else {}
    saved = (checkpoint_seconds, snapshot_steps)
    device = (accelerator, devices, precision)
    execution = mobatlas.Execution(resume, overwrite, *device, *saved, quiet)
    report = mobatlas.supervise(
        model,
        out,
        regions,
        mobatlas.SuperviseOptions(
            strategy=chosen,
            divergence=divergence or run.supervise.divergence,
            membership=membership or run.supervise.membership,
            from_scratch=from_scratch,
            preset=preset or (run.preset if presets else None),
            values=merge(run.supervise.options, parse_assignments(assignments or [])),
        ),
        dataset=dataset,
        seed=run.seed if seed is None else seed,
        execution=execution,
    )
    show(report, json, supervised_table(report, out))


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    out: Annotated[
        Path,
        typer.Option("--out", help="The Parquet file to write."),
    ],
    n: Count = None,
    group: GroupNames = None,
    region: Annotated[
        str | None, typer.Option(help="Draw groups and homes from the people of this region.")
    ] = None,
    regions: Annotated[
        Path | None, typer.Option(help="The regions folder that contains --region.")
    ] = None,
    anchors: Anchors = "synthetic",
    rename: Rename = None,
    coarsen: Coarsen = None,
    calibrate: Calibrate = False,
    reject_copies: RejectCopies = False,
    posterior: Posterior = False,
    draws: Draws = 20,
    dataset: DatasetOverride = None,
    seed: Annotated[
        int, typer.Option(help="The same seed on the same machine gives the same file.")
    ] = 0,
    accelerator: Accelerator = "auto",
    devices: Devices = 1,
    shard: Shard = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Sample trajectories into a Parquet file."""
    from mobatlas.sampling.chunks import Shard as Part

    total = max(1, (n or 1) // Part.parse(shard).of) if shard is not None else n or 1
    request = mobatlas.SampleRequest(
        group=group or None,
        region=region,
        regions=regions,
        anchors=anchors,
        rename=parse_renames(rename or ()),
        coarsen=coarsen,
        calibrate=calibrate,
        posterior=posterior,
        draws=draws,
        seed=seed,
        accelerator=accelerator,
        devices=devices,
        shard=shard,
        reject_copies=reject_copies,
    )
    with track("generating", total, quiet) as tracker:
        result = mobatlas.generate(
            model, out, n, request, dataset=dataset, overwrite=overwrite, tracker=tracker
        )
    _show_samples(result.as_dict(), mobatlas.load_model(model, dataset).dataset, json)


def _show_samples(facts: dict[str, Any], dataset: Path, json: bool) -> None:
    """Print the facts of a file of samples and, beside the result, whether it is safe to share."""
    from mobatlas.evaluation.privacy.audit import quick_answer
    from mobatlas.report.console import generated_table

    show(facts, json, generated_table(facts))
    typer.echo(quick_answer(facts["path"], dataset, facts["n"]), err=True)
