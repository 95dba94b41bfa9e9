"""The command that recovers group means: recover."""

from pathlib import Path
from typing import Annotated

import typer

from mobatlas.cli.options import Json, Overwrite, show

app = typer.Typer()


@app.command()
def recover(
    folder: Annotated[Path, typer.Argument(metavar="REGIONS", help="A regions folder.")],
    level: Annotated[
        float,
        typer.Option(help="Probability of each interval; of the verdicts, 1 - LEVEL may be wrong."),
    ] = 0.9,
    by: Annotated[
        str | None,
        typer.Option(metavar="ATTRIBUTE", help="Show the levels of an attribute, such as age."),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B", help="Compare two levels of an attribute, such as F M, or two groups."
        ),
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(
            "--feature", metavar="MAP", help="A feature map of the regions; may be repeated."
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(min=1, help="Features in the table and in the figure, most certain first."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write all numbers to this file (.csv, .parquet or .json)."
        ),
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Also write a figure to this PNG file.")
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Estimate visits per person by group, with intervals and differences from the average."""
    from mobatlas.io.output import refuse_overlap
    from mobatlas.regions.recovery.recover import recover as run_recovery
    from mobatlas.regions.recovery.summary import summarise_recovery
    from mobatlas.regions.store import load_regions
    from mobatlas.report.recovery import (
        check_suffix,
        draw_recovery,
        recovery_table,
        write_recovery,
    )

    if out is not None:
        check_suffix(out)
        refuse_overlap(folder, out)
    regions = load_regions(folder)
    summary = summarise_recovery(
        run_recovery(regions, quiet=True), level=level, by=by, compare=compare, features=feature
    )
    if out is not None:
        write_recovery(out, summary, overwrite=overwrite)
    maps = feature or ()
    if figure is not None:
        draw_recovery(figure, summary, regions, maps=maps, top=top)
    table = recovery_table(summary, regions, maps=maps, top=top)
    show(summary.as_dict(), json, table)
