"""`regions` and `diagnose` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mobatlas import CityConfig, MobatlasError, load_regions, prepare, recover, write_city_folder
from mobatlas.cli.commands import app
from mobatlas.regions.partitions import PAPER
from mobatlas.report.console import summarise
from tests.outcomes import refused

GROUPS = ("<30, M", "<30, F", "30-40, M", "30-40, F", "40-50, M", "40-50, F", ">50, M", ">50, F")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("city")
    write_city_folder(root / "city", CityConfig(users=800, days=12), seed=2)
    prepare(root / "city", root / "dataset", preset="small")
    return root / "dataset"


def paper_table(folder: Path, name: str) -> Path:
    lines = ["region,group,share"]
    for number, row in enumerate(PAPER[name]):
        lines += [
            f'R{number},"{group}",{share:.6f}' for group, share in zip(GROUPS, row, strict=True)
        ]
    path = folder / f"{name}.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("name", "rank", "effective"), [("fullrank", 8, 7), ("rankdef", 7, 5), ("messy", 4, 4)]
)
def test_the_papers_matrices_are_seen_through(
    tmp_path: Path, name: str, rank: int, effective: int
) -> None:
    output = json.loads(
        run("diagnose", "--composition", str(paper_table(tmp_path, name)), "--n", "1000", "--json")
    )
    assert (output["rank"], output["effective_rank"]) == (rank, effective)
    gender = next(
        contrast
        for contrast in output["contrasts"]
        if contrast["name"] == "gender, averaged over age"
    )
    assert not gender["identified"]
    if name == "fullrank":
        assert output["sigma_min"] == pytest.approx(5.05e-5, rel=0.02)


def test_a_diagnosis_reads_well(tmp_path: Path) -> None:
    table = paper_table(tmp_path, "fullrank")
    said = " ".join(run("diagnose", "--composition", str(table), "--n", "1000").split())
    assert said.startswith("These 8 regions can distinguish age groups. They cannot distinguish ")
    assert "women from men. They identify 7 of 8 independent combinations of groups." in said
    assert "of the visits (90 % interval)" in said
    assert "not identified by these regions" in said


def test_a_diagnosis_without_n_says_whose_number_it_took(tmp_path: Path) -> None:
    table = tmp_path / "census.csv"
    table.write_text("region,age,count\na,<30,90000\na,30+,10000\nb,<30,20000\nb,30+,70000\n")
    sentence = "without --n, we assume that all people of the census are observed"
    assert sentence in run("diagnose", "--composition", str(table))
    assert sentence not in run("diagnose", "--composition", str(table), "--n", "500")


def test_regions_are_made_diagnosed_and_recovered_from(dataset: Path, tmp_path: Path) -> None:
    details = json.loads(
        run(
            "regions",
            str(dataset),
            "--out",
            str(tmp_path / "r"),
            "--partition",
            "demogroups",
            "--json",
        )
    )
    assert (details["separation"], details["diagnosis"]["effective_rank"]) == (
        "controlled partition",
        8,
    )
    sentence = "These 8 regions can distinguish all 8 groups."
    output = run("diagnose", str(tmp_path / "r"))
    assert "8, 8 of 8" in output and sentence in output
    again = ("regions", str(dataset), "--out", str(tmp_path / "r"), "--overwrite")
    assert sentence in run(*again, "--partition", "demogroups")
    recovered = recover(load_regions(tmp_path / "r"))
    assert recovered.means.shape == (8, len(recovered.features))


def test_real_regions_say_how_they_were_separated(dataset: Path, tmp_path: Path) -> None:
    details = json.loads(
        run(
            "regions", str(dataset), "--out", str(tmp_path / "r"), "--by", "home_district", "--json"
        )
    )
    assert details["separation"] == "disjoint halves"
    assert all(
        feature.startswith("category:")
        for feature in load_regions(tmp_path / "r").aggregates.features
    )


def test_regions_without_the_rest_have_no_population(dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "alone"
    run("regions", str(dataset), "--out", str(out), "--partition", "fullrank", "--without-rest")
    assert load_regions(out).population is None
    assert not (out / "population.parquet").exists()
    again = ("regions", str(dataset), "--out", str(out), "--overwrite")
    run(*again, "--partition", "fullrank")
    assert load_regions(out).population is not None


def test_real_regions_cannot_leave_out_the_rest(dataset: Path, tmp_path: Path) -> None:
    command = ("regions", dataset, "--by", "home_district", "--without-rest")
    sentence = refused(*command, "--out", tmp_path / "r")
    assert sentence == "mobatlas: --without-rest needs --partition NAME; remove it"
    assert not (tmp_path / "r").exists()


def test_diagnose_wants_one_thing(tmp_path: Path) -> None:
    with pytest.raises(MobatlasError, match="either a regions folder or --composition"):
        CliRunner().invoke(app, ["diagnose"], catch_exceptions=False)
    with pytest.raises(MobatlasError, match="--n is only for --composition"):
        CliRunner().invoke(app, ["diagnose", str(tmp_path), "--n", "5"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("regions", "sentence"),
    [
        (1, "This region identifies 1 of 2 independent combinations of groups."),
        (3, "These 3 regions identify 1 of 2 independent combinations of groups."),
    ],
)
def test_a_summary_counts_regions_in_the_right_number(regions: int, sentence: str) -> None:
    diagnosis = {"groups": ["A", "B"], "regions": regions, "effective_rank": 1}
    result = {"diagnosis": diagnosis, "information": {}, "evaluation": {"groups": None}}
    assert summarise({"city": result}, labelled=False)[0] == f"city: {sentence}"
