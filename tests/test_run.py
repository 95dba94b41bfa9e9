"""A whole run: every step once, unchanged steps from the cache, and a self-contained report."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from markupsafe import escape
from typer.testing import CliRunner

from mobatlas import MobatlasError, TrajectoryDataset, build_regions
from mobatlas.cli.commands import app
from mobatlas.config import build_run
from mobatlas.io.manifest import read_manifest, write_manifest
from mobatlas.pipeline.run import refuse_foreign_folder, run
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.store import load_regions
from mobatlas.report.html import write_report
from tests.disclosure import found
from tests.runs import VALUES, finished_run


@pytest.fixture(scope="module")
def finished() -> Path:
    return finished_run()


def test_models_samples_and_report_hold_no_home_no_workplace_and_no_id(finished: Path) -> None:
    dataset = TrajectoryDataset.open(finished / "dataset")
    for name in ("baseline", "strong", "models", "samples", "evaluation", "report.html"):
        assert (finished / name).exists() and found(finished / name, dataset) == []
    people = found(finished / "dataset" / "people.parquet", dataset)
    assert len(people) == dataset.people.num_rows, "the search finds people where they are"
    manifest = json.loads((finished / "baseline" / "manifest.json").read_text())
    assert manifest["discloses"].startswith("No home, workplace, id")


def times(folder: Path) -> dict[str, int]:
    """When each step was computed."""
    names = (
        "dataset",
        "baseline",
        "strong",
        "models/hot16",
        "regions/hot16",
        "samples/hot16.parquet",
    )
    return {name: (folder / name).stat().st_mtime_ns for name in names}


def test_a_run_goes_from_a_city_to_a_report(finished: Path) -> None:
    facts = json.loads((finished / "run.json").read_text())
    chapter = facts["regions"]["hot16"]
    evaluation = json.loads((finished / chapter["evaluation"]).read_text())
    assert set(evaluation["groups"]["scores"]) == {
        "baseline",
        "ours",
        "strong",
        "strong, calibrated",
        "floor",
    }
    files = {name: Path(file["path"]).name for name, file in evaluation["files"].items()}
    assert files["strong"] == "strong.parquet"
    assert files["strong, calibrated"] == "strong-calibrated.parquet"
    assert facts["models"]["strong, calibrated"] == "strong", "one model, calibrated or not"
    assert set(evaluation["regional"]["held_out_regions"]) == {
        "regions",
        "by_groups",
        "by_everybody",
        "better_in",
    }
    samples = pd.read_parquet(finished / chapter["samples"])
    each = samples.groupby("group")["trajectory"].nunique()
    assert len(each) == 8 and (each == 20).all() and samples["trajectory"].nunique() == 160
    assert not list(finished.rglob(".*partial*")) and not [
        path for path in (finished / "samples").iterdir() if path.is_dir()
    ]


def test_only_steps_whose_inputs_changed_are_computed_again(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    before = times(folder)
    run(build_run(VALUES), folder, quiet=True)
    assert times(folder) == before
    run(build_run(VALUES | {"samples": {"each": 12}}), folder, quiet=True)
    after = times(folder)
    assert (
        after.pop("samples/hot16.parquet") != before.pop("samples/hot16.parquet")
        and after == before
    )
    (folder / "steps.json").write_text("{")  # without the cache everything is computed again
    run(build_run(VALUES | {"samples": {"each": 12}, "strong": False}), folder, quiet=True)
    assert times(folder)["dataset"] != before["dataset"]


def test_the_command_ends_with_the_verdict_of_the_audit(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    path = tmp_path / "run.yaml"
    shutil.copytree(finished, folder)
    path.write_text(yaml.safe_dump(VALUES))
    answer = json.loads((folder / "audit" / "hot16.json").read_text())["answer"]
    command = ["run", str(path), "--out", str(folder), "--quiet"]
    printed = CliRunner().invoke(app, command, catch_exceptions=False)
    assert printed.exit_code == 0
    end = f"report.html hot16: {answer}"  # a long path is broken anywhere
    assert "".join(printed.stdout.split()).endswith("".join(end.split()))
    report = (folder / "report.html").read_text()
    assert escape(answer) in report.partition('aria-label="Summary"')[0]
    as_json = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    assert json.loads(as_json.stdout)["regions"]["hot16"]["answer"] == answer
    path.write_text(yaml.safe_dump(VALUES | {"audit": False}))
    without_audit = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "safe to share" not in without_audit.stdout
    assert "was not audited" in (folder / "report.html").read_text()


class _Page(HTMLParser):
    """The links of a page, and whether its tags close."""

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.refers: list[str] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.refers += [
            value or "" for name, value in attrs if name in ("src", "href", "action", "data")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_report_fetches_nothing_and_summarises_the_results(finished: Path) -> None:
    page = _Page()
    source = (finished / "report.html").read_text()
    page.feed(source)
    assert not page.open
    assert all(each.startswith(("#", "data:image/png;base64,")) for each in page.refers)
    assert not re.search(r"https?://(?!www\.w3\.org)", source)
    text = " ".join(page.text)
    assert (
        "A tiny <city>" in text
        and "Strategy: " in text
        and "bits from those of held-out people" in text
    )
    for name in ("<30, M", ">50, F", "everybody"):
        assert name in text
    assert "What the evidence informs" in text
    assert "For all other behaviour samples show the average of the population." in text


def test_a_run_without_labels_says_what_cannot_be_measured(finished: Path, tmp_path: Path) -> None:
    city = tmp_path / "city"
    shutil.copytree(finished / "city", city)
    (city / "manifest.json").unlink()
    people = pd.read_parquet(city / "people.parquet").drop(columns=["age", "gender"])
    people.to_parquet(city / "people.parquet")
    known = build_regions(
        finished / "dataset",
        tmp_path / "known",
        RegionsOptions(by="home_district", features=("category",)),
    )
    composition = known.composition
    seen = known.aggregates
    shares = pd.DataFrame(
        composition.shares * 1_000, columns=list(composition.groups.names)
    ).round()
    census = shares.assign(region=composition.regions).melt(
        "region", var_name="group", value_name="count"
    )
    census.to_csv(tmp_path / "census.csv", index=False)
    means = pd.DataFrame(seen.values, columns=list(seen.features)).assign(region=seen.regions, n=50)
    means.melt(["region", "n"], var_name="feature").to_csv(tmp_path / "seen.csv", index=False)
    rest = {key: value for key, value in VALUES.items() if key != "simulate"}
    regions = {"census": {"composition": "census.csv", "aggregates": "seen.csv"}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(rest | {"source": {"path": "city"}, "regions": regions}))
    result = run(path, tmp_path / "run", quiet=True)
    assert "No person in this dataset has a label" in result.report.read_text()
    with pytest.raises(MobatlasError, match="strong: the people of this dataset have no labels"):
        run(
            build_run(rest | {"source": {"path": str(city)}, "strong": True}),
            tmp_path / "no",
            quiet=True,
        )
    with pytest.raises(
        MobatlasError, match="label"
    ):  # a controlled partition is of labelled people
        run(build_run(rest | {"source": {"path": str(city)}}), tmp_path / "no", quiet=True)
    assert not (tmp_path / "no" / "baseline").exists()


def test_ages_of_a_census_are_split_if_the_configuration_says_so(
    finished: Path, tmp_path: Path
) -> None:
    people = pd.read_parquet(finished / "city" / "people.parquet")[["home_district", "gender"]]
    ages = np.where(np.arange(len(people)) % 2, "<35", "35+")  # 30-40 is in both
    counted = (
        people.assign(age=ages, count=1)
        .groupby(["home_district", "age", "gender"], as_index=False)
        .sum()
    )
    counted.rename(columns={"home_district": "region"}).to_csv(tmp_path / "census.csv", index=False)
    source = {
        "by": "home_district",
        "composition": str(tmp_path / "census.csv"),
        "features": ["category"],
    }
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    values = VALUES | {"strong": False, "audit": False}
    with pytest.raises(
        MobatlasError, match=r"census.csv: age range .* straddles .*straddle: uniform in a config"
    ):
        run(build_run(values | {"regions": {"census": source}}), folder, quiet=True)
    run(
        build_run(values | {"regions": {"census": source | {"straddle": "uniform"}}}),
        folder,
        quiet=True,
    )
    composition = load_regions(folder / "regions" / "census").composition
    ages = composition.shares.reshape(len(composition.regions), 4, 2).sum(
        2
    )  # <30, 30-40, 40-50, >50
    assert np.allclose(ages.sum(1), 1) and (ages[:, 1] > 0.05).all(), (
        "of both ranges some are 30 to 40"
    )
    with pytest.raises(MobatlasError, match="straddle applies to the age ranges of a composition"):
        build_run(VALUES | {"regions": {"c": {"partition": "hot16", "straddle": "uniform"}}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"regions": {}}, "regions: the configuration has none"),
        ({"source": {"path": "nowhere"}}, "nowhere: this path does not exist"),
        (
            {"regions": {"strong": {"partition": "hot16"}}},
            r"regions\.strong: .* choose another name",
        ),
        ({"regions": {"../x": {"partition": "hot16"}}}, r"regions\.\.\./x: .* choose another name"),
        ({"regions": {"c": {"partition": "hot17"}}}, "hot17"),
        (
            {"regions": {"c": {"composition": "no.csv", "aggregates": "no.csv"}}},
            r"no.csv: this path does not exist; `regions.c.composition`",
        ),
    ],
)
def test_a_bad_configuration_is_refused_before_anything_is_trained(
    finished: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("baseline", "strong", "models"))
    with pytest.raises(MobatlasError, match=message):
        run(build_run(VALUES | changes), folder, quiet=True)
    assert not (folder / "baseline").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_other_files_is_refused_and_left_unchanged(
    finished: Path, tmp_path: Path, overwrite: bool
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for folder in (tmp_path / "mine", finished / "dataset"):
        before = sorted(path.name for path in folder.iterdir())
        with pytest.raises(
            MobatlasError,
            match=f"{folder}: the folder contains files that are not from a run of this version;",
        ):
            run(build_run(VALUES), folder, overwrite=overwrite, quiet=True)
        assert sorted(path.name for path in folder.iterdir()) == before


def test_a_run_killed_before_its_first_step_can_be_started_again(tmp_path: Path) -> None:
    (tmp_path / ".steps.json.partial").write_text("{")
    refuse_foreign_folder(tmp_path)
    (tmp_path / "city").mkdir()
    with pytest.raises(
        MobatlasError, match="contains files that are not from a run of this version"
    ):
        refuse_foreign_folder(tmp_path)
    (tmp_path / "steps.json").write_text("{}")
    refuse_foreign_folder(tmp_path)
    refuse_foreign_folder(tmp_path / "nowhere")


def test_a_report_needs_a_run_and_overwrites_no_file(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(MobatlasError, match=r"has no run\.json"):
        write_report(tmp_path, tmp_path / "page.html")
    (tmp_path / "page.html").write_text("mine")
    with pytest.raises(MobatlasError, match="exists already"):
        write_report(finished, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == "mine"


def test_the_report_shows_finetuning_curves(tmp_path: Path) -> None:
    shutil.copytree(finished_run(), tmp_path / "run")
    rows = [
        {"step": step, "validation": 0.3 - step / 100, "js <30, M": 0.2, "js average": 0.2}
        for step in (0, 5, 10)
    ]
    model = (
        tmp_path
        / "run"
        / json.loads((tmp_path / "run" / "run.json").read_text())["regions"]["hot16"]["model"]
    )
    manifest = read_manifest(model, "model")
    (model / "curve.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (model / "manifest.json").unlink()
    write_manifest(model, manifest)
    page = write_report(tmp_path / "run", tmp_path / "report.html").read_text(encoding="utf-8")
    assert (
        "Finetuning hot16: regional loss" in page and "Finetuning hot16: JSD of each group" in page
    )
    assert "What samples disclose about training people" in page and "Home and work, unique" in page
    plain = (finished_run() / "report.html").read_text(encoding="utf-8")
    assert "Finetuning" not in plain
