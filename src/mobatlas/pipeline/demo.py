"""The demo: a run with a configuration that is part of the package."""

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
from mobatlas.report.summary import summarise


def run_demo(
    out: Path,
    seed: int = 0,
    quiet: bool = False,
    *,
    overwrite: bool = False,
    values: Mapping[str, Any] | None = None,
) -> list[RenderableType]:
    """Run the demo in `out` and return the tables to print; `values` change its configuration.

    Steps that an earlier call finished are not repeated, unless `overwrite`.
    """
    from mobatlas.pipeline.run import run  # torch takes seconds to import

    text = resources.files("mobatlas.pipeline").joinpath("demo.yaml").read_text(encoding="utf-8")
    result = run(
        build_run(merge(yaml.safe_load(text), {"seed": seed}, values or {})),
        out,
        overwrite=overwrite,
        quiet=quiet,
    )
    return [*run_tables(result.folder, result.facts), Text(f"report: {result.report}")]


def run_tables(folder: Path, facts: Mapping[str, Any]) -> list[RenderableType]:
    """A table for each source of regions, and a summary in sentences."""
    chapters = {
        name: {
            **each,
            "evaluation": json.loads((folder / each["evaluation"]).read_text(encoding="utf-8")),
        }
        for name, each in facts["regions"].items()
    }
    labelled = any(each["evaluation"]["groups"] for each in chapters.values())
    tables = [run_table(name, each["evaluation"]) for name, each in chapters.items()]
    return [*tables, *map(Text, summarise(chapters, labelled))]
