"""An audit as tables: on the screen, and as a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from mobatlas.evaluation.privacy.audit import AMBER, AUC, GREEN, PLACES, RED, REPEATS, TPR, Audit
from mobatlas.io.manifest import write_json
from mobatlas.io.output import new_folder, refuse_overlap
from mobatlas.report.console import plain_table
from mobatlas.report.tables import Cell, Table, write_tables

KIND = "audit"
STYLES = {GREEN: "bold green", AMBER: "bold yellow", RED: "bold red"}
SHARES = ".1%"
LIMITS = {"repeats": REPEATS, "rare places": PLACES, "AUC": AUC, "TPR": TPR}
NOTE = (
    "Train, held-out: what samples have that equally many people of either side have too; of one: that only one person has. "
    "Measured, with its 95 % interval: the share of samples that repeat a training person beyond chance, of rare places that "
    "samples know beyond chance, the AUC of the best attack on membership (chance: 0.5), the TPR: whom it finds while it "
    "suspects 1 % of others (chance: 0.01). Amber, red: the lower end is above "
    + ", ".join(f"{amber:.2f}, {red:.2f} ({name})" for name, (amber, red) in LIMITS.items())
    + ". Green: the upper end is not above red. Otherwise it is not decided."
)


def audit_tables(found: Audit) -> dict[str, Table]:
    """The checks with their verdicts, and every attack by itself."""
    rows: list[tuple[Cell, ...]] = []
    for check in found.checks:
        one = check.measured
        measured = (None, None, None) if one is None else (one.estimate, one.low, one.high)
        limits = (check.spec.amber, check.spec.red)
        rows.append(
            (check.spec.title, check.train, check.held_out, *measured, *limits, check.verdict)
        )
    columns = ("check", "train", "held-out", "measured", "low", "high", AMBER, RED, "verdict")
    formats = {"train": SHARES, "held-out": SHARES, AMBER: ".2f", RED: ".2f"}
    title = f"Privacy of {found.trajectories:,} samples: {found.verdict}."
    by = [
        (f"by {what}", one.name, one.auc, one.tpr)
        for what, each in found.attacks.items()
        for one in each
    ]
    attacked = (
        "Attacks on membership, each on everybody and not corrected for the choice of the best."
    )
    return {
        "checks": Table(columns, tuple(rows), title, formats, NOTE),
        "attacks": Table(("membership", "attack", "AUC", "TPR at 1 % FPR"), tuple(by), attacked),
    }


def audit_table(found: Audit) -> RenderableType:
    """The checks, and in words what is behind them."""
    checks, attacked = audit_tables(found).values()
    people, compared = found.people, found.compared
    lines = [
        checks.note,
        f"compared: {people['train']:,} training and {people['test']:,} held-out people; an attacker knows {people['val']:,} "
        f"others; distances of {compared['samples']:,} samples and {compared['people']:,} people",
        *(
            f"{check.spec.title}: {check.verdict}, {check.explanation}"
            for check in found.checks
            if check.explanation
        ),
        *(f"warning: {warning}" for warning in found.warnings),
        *found.advice,
    ]
    verdict = Text.assemble("verdict: ", (found.verdict, STYLES.get(found.verdict, "bold")))
    return Group(
        plain_table(_without(checks, (AMBER, RED))),
        plain_table(attacked),
        Text("\n".join(lines)),
        verdict,
    )


def _without(table: Table, names: tuple[str, ...]) -> Table:
    """Narrow enough for 80 characters."""
    kept = [place for place, name in enumerate(table.columns) if name not in names]
    rows = tuple(tuple(row[place] for place in kept) for row in table.rows)
    return replace(table, columns=tuple(table.columns[place] for place in kept), rows=rows)


def write_audit(out: Path | str, found: Audit, *, overwrite: bool = False) -> None:
    """A folder of its tables, and all of it as audit.json; it appears whole or not at all."""
    for source in (found.dataset, found.samples):
        refuse_overlap(Path(source), Path(out))
    with new_folder(Path(out), KIND, seed=found.seed, overwrite=overwrite) as folder:
        write_tables(folder.path, audit_tables(found))
        write_json(folder.path / "audit.json", found.as_dict())
