"""Options that several commands share, and how a command prints its result."""

import json as jsonlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mobatlas.errors import MachineError

MIN_WIDTH = 72  # of a table; narrower columns would be empty

Out = Annotated[Path, typer.Option("--out", help="The folder to write.")]
Config = Annotated[Path | None, typer.Option("--config", help="A configuration file (YAML).")]
Preset = Annotated[
    str | None, typer.Option("--preset", help="Defaults: small (for a laptop) or paper.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a value of the configuration, e.g. window.days=1; may be repeated.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing output of mobatlas.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")]
Accelerator = Annotated[str, typer.Option("--accelerator", help="auto, cpu, cuda or mps.")]
Devices = Annotated[int, typer.Option("--devices", help="Number of devices; one process each.")]
Shard = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/K",
        help="Write only part I of K, for machines that share no disk.",
    ),
]
Precision = Annotated[str, typer.Option("--precision", help="auto, 32-true or bf16-mixed.")]
SnapshotSteps = Annotated[
    int | None,
    typer.Option(
        "--snapshot-steps",
        min=1,
        help="Keep the weights after every N steps, for a learning curve.",
    ),
]
CheckpointSeconds = Annotated[float, typer.Option(help="Seconds between checkpoints.")]
DatasetOverride = Annotated[
    Path | None, typer.Option("--dataset", help="The model's dataset folder, if it has moved.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print log lines instead of a progress bar.")]
TrainingSeed = Annotated[
    int | None,
    typer.Option("--seed", help="The same seed on the same machine gives the same weights."),
]
Rename = Annotated[
    list[str] | None,
    typer.Option(
        metavar="EXPECTED=THEIRS",
        help="Read a column under another name, e.g. user_id=device_id; may be repeated.",
    ),
]

# regions
Partition = Annotated[
    str | None,
    typer.Option(
        help="Assign labelled people to regions: demogroups, fullrank, rankdef, messy, hot16, "
        "dirichlet:REGIONS:ALPHA, or a composition table."
    ),
]
CensusTables = Annotated[
    list[Path] | None,
    typer.Option(
        "--composition",
        metavar="FILE",
        help="A census table: region, group, count or share. Repeat it for tables with some of "
        "the attributes each, such as one of ages and one of genders.",
    ),
]
JointPrior = Annotated[
    Path | None,
    typer.Option(
        "--joint-prior",
        metavar="FILE",
        help="With several tables of --composition: a table with the joint distribution of their "
        "attributes. By default they are independent within each region.",
    ),
]
AggregatesTable = Annotated[
    Path | None,
    typer.Option(
        "--aggregates",
        help="A table of visits by region: region, feature (or place, or category), value or "
        "visits, n; or a file or folder of Advan or SafeGraph Patterns.",
    ),
]
Per = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[FILE=]PERIOD",
        help="The period of the values of --aggregates, or of the table FILE: day, week, month, "
        'window, "10 days", "2024-03-01 to 2024-03-31", or share; may be repeated.',
    ),
]
HomePanel = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="For --aggregates without people: devices by home region, such as Advan's home panel "
        "summary.",
    ),
]
Polygons = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Regions as GeoJSON or GeoPackage; --by is the property that names a polygon.",
    ),
]
By = Annotated[str | None, typer.Option(help="The column of people that names their region.")]
Features = Annotated[
    list[str] | None,
    typer.Option(
        "--feature",
        help="What to aggregate: poi, category, transitions, distance or hour; may be repeated.",
    ),
]
Mask = Annotated[
    list[str] | None,
    typer.Option("--mask", help="A token to leave out: HOME, WORK or OTHER; may be repeated."),
]
MinPeople = Annotated[
    int,
    typer.Option(
        min=0,
        help="Leave out regions with fewer people than this behind composition or aggregates "
        "(refuse them in a partition); refuse groups with fewer.",
    ),
]
ShuffleRegions = Annotated[
    bool,
    typer.Option("--shuffle-regions", help="Shuffle regions among people, as a negative control."),
]
WithoutRest = Annotated[
    bool,
    typer.Option(
        "--without-rest",
        help="Leave out people whom the partition assigns to no region. By default they count as "
        "one more region.",
    ),
]
SamePeople = Annotated[
    bool,
    typer.Option(
        "--same-people",
        help="Count composition and aggregates on the same people; this leaks labels.",
    ),
]
SplitAges = Annotated[
    bool,
    typer.Option(
        "--split-ages",
        help="Split a census age range that spans two groups, evenly over its years.",
    ),
]
GroupTables = Annotated[
    list[Path] | None,
    typer.Option(
        "--group-table",
        metavar="FILE",
        help="A published table of mean visits by group, or by some attributes, as further "
        "evidence: group, feature, value, and n or standard_error; may be repeated.",
    ),
]
LabelledPath = Annotated[
    Path | None,
    typer.Option(
        "--labelled",
        metavar="PATH",
        help="Use people whose attributes are known as further evidence: a table of user_id and "
        "attributes for some people of the dataset, or a folder with visits and people of a "
        "separate survey.",
    ),
]
LabelledSample = Annotated[
    int | None,
    typer.Option(
        "--labelled-sample",
        metavar="N",
        help="For experiments: use the labels of N random training people as further evidence.",
    ),
]
Rounding = Annotated[
    float, typer.Option("--round", help="Round totals of visits to multiples of this.")
]
Epsilon = Annotated[
    float | None, typer.Option(help="Add private noise with this epsilon per person.")
]
MaxVisits = Annotated[
    float | None,
    typer.Option(help="With --epsilon: count at most this many visits of a person per window."),
]

# diagnose, recover
Figure = Annotated[Path | None, typer.Option(help="Also write a figure to this PNG file.")]
Level = Annotated[
    float,
    typer.Option(help="Probability of each interval; at most 1 - LEVEL of the verdicts are wrong."),
]
ByAttribute = Annotated[
    str | None,
    typer.Option(metavar="ATTRIBUTE", help="Show the levels of an attribute, such as age."),
]
Compare = Annotated[
    tuple[str, str] | None,
    typer.Option(
        metavar="A B", help="Compare two levels of an attribute, such as F M, or two groups."
    ),
]
FeatureMaps = Annotated[
    list[str] | None,
    typer.Option("--feature", metavar="MAP", help="A feature map to show; may be repeated."),
]
Top = Annotated[
    int | None,
    typer.Option(min=1, help="Features in the table and in the figure, most certain first."),
]
NumbersFile = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="Write all numbers to a .csv, .parquet or .json file."
    ),
]

# supervise
StrategyName = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        help="auto (default), tilt (train with weights, then calibrate), resample (select "
        "samples, no training), finetune (the paper's method), or strong (train on labels, as "
        "an upper bound).",
    ),
]
Divergence = Annotated[
    str | None,
    typer.Option("--divergence", help="For finetune: js (default), tv, kl or hellinger."),
]
Membership = Annotated[
    bool,
    typer.Option(
        "--membership",
        help="For tilt: weight each person by the composition of the person's own region.",
    ),
]
FromScratch = Annotated[
    bool,
    typer.Option(
        "--from-scratch",
        help="For strong and tilt: train from new random weights, not from those of phase 1.",
    ),
]
FinetunePreset = Annotated[
    str | None, typer.Option("--preset", help="For finetune: small or paper.")
]

# generate
Count = Annotated[
    int | None,
    typer.Option(
        "--n", help="Trajectories of each group; with --anchors FILE, one per row by default."
    ),
]
GroupNames = Annotated[
    list[str] | None,
    typer.Option("--group", help='A group, e.g. "30-40, F", or "all"; may be repeated.'),
]
Anchors = Annotated[
    str,
    typer.Option(
        metavar="synthetic|observed|FILE",
        help="Homes and workplaces: synthetic; observed, those of training people, which discloses "
        "them; or a table with home_lat, home_lon, work_lat, work_lon and, optionally, group.",
    ),
]
Coarsen = Annotated[
    str | None,
    typer.Option(
        metavar="KM",
        help="With --anchors observed or FILE: move homes and workplaces at random within a radius "
        "(1km) or to a grid (grid:500m).",
    ),
]
Calibrate = Annotated[
    bool,
    typer.Option(
        "--calibrate", help="Select samples so that group means match the regions' aggregates."
    ),
]

Posterior = Annotated[
    bool,
    typer.Option(
        "--posterior",
        help="Select samples so that group means are spread like the posterior: their error bars "
        "show in the samples. The column draw numbers the draws.",
    ),
]
RejectCopies = Annotated[
    bool,
    typer.Option(
        "--reject-copies",
        help="Redraw samples that reproduce a long or rare training trajectory; samples that still "
        "do after 5 attempts are left out.",
    ),
]
Draws = Annotated[int, typer.Option(help="With --posterior: number of draws.")]


def parse_periods(periods: list[str] | None, aggregates: Path | None) -> dict[str, str]:
    """The period of each table of `--per`, by file name."""
    name = aggregates.name if aggregates is not None else "aggregates"
    return {text.rpartition("=")[0] or name: text.rpartition("=")[2] for text in periods or ()}


def show(values: dict[str, Any], as_json: bool, table: Any) -> None:
    """Print a result as JSON or as a table; with several processes, only the first prints."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    if as_json:
        print_result(jsonlib.dumps(values, indent=2, ensure_ascii=False, default=str))
    else:
        print_result(table)


def print_result(*parts: Any) -> None:
    """Print text or tables; a terminal narrower than `MIN_WIDTH` wraps the lines."""
    try:
        for part in parts:
            if isinstance(part, str):
                typer.echo(part)
            else:
                Console(width=max(Console().width, MIN_WIDTH)).print(part)
        sys.stdout.flush()
    except OSError as error:
        # Python flushes again when it exits, and would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise MachineError(
            f"the result is complete, but could not be printed ({error.strerror})"
        ) from None
