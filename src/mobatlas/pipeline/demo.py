"""The demo: a run with a configuration that comes along, and what to show of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from rich.console import RenderableType
from rich.text import Text

from mobatlas.config import build_run, merge
from mobatlas.report.console import run_table
from mobatlas.report.summary import summary


def run_demo(
    out: Path,
    seed: int = 0,
    quiet: bool = False,
    *,
    overwrite: bool = False,
    values: Mapping[str, Any] | None = None,
) -> list[RenderableType]:
    """Fill `out`, and what to show of it; `values` change the configuration.

    What an earlier call finished stays, unless `overwrite`.
    """
    from mobatlas.pipeline.run import run  # what needs torch takes seconds to import

    text = resources.files("mobatlas.pipeline").joinpath("demo.yaml").read_text(encoding="utf-8")
    made = run(
        build_run(merge(yaml.safe_load(text), {"seed": seed}, values or {})),
        out,
        overwrite=overwrite,
        quiet=quiet,
    )
    return [*run_tables(made.folder, made.facts), Text(f"report: {made.report}")]


def run_tables(folder: Path, facts: Mapping[str, Any]) -> list[RenderableType]:
    """A table for each way to know regions, and what it says in a sentence."""
    found = {
        name: {
            **each,
            "evaluation": json.loads((folder / each["evaluation"]).read_text(encoding="utf-8")),
        }
        for name, each in facts["regions"].items()
    }
    labelled = any(each["evaluation"]["groups"] for each in found.values())
    tables = [run_table(name, each["evaluation"]) for name, each in found.items()]
    return [*tables, *map(Text, summary(found, labelled))]
