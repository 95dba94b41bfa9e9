"""The research questions: their jobs, cells, tables and figures."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import prediction, questions
from bench.cells import ANCHORS, PHASE1, Job, Setup, model_cells
from bench.gaps import summarise
from bench.next_poi import NEXT_POI_METRICS
from bench.questions import PROFILES, Choice, rq1_jobs, rq2_jobs
from bench.report.files import as_markdown
from bench.report.questions import question_tables, write_page, write_question
from bench.runner import Command, Experiment, Runner
from mobatlas import MobatlasError
from mobatlas.evaluation.metrics import metrics
from mobatlas.groups import DEFAULT_GROUPS
from mobatlas.io.manifest import write_json
from tests.outcomes import refused, run
from tests.test_phase2_benchmark import CITY, VALUES, scored

PNG = b"\x89PNG"


def test_quick_finetunes_two_partitions_and_full_all_of_them() -> None:
    quick = rq1_jobs(PROFILES["quick"])
    full = rq1_jobs(PROFILES["full"])
    assert {job.partition for job in quick} == {
        "demogroups",
        "hot16",
        "fullrank",
        "rankdef",
        "messy",
    }
    tuned = [(job.partition, job.divergence) for job in quick if job.strategy == "finetune"]
    assert tuned == [
        ("demogroups", "js"),
        ("demogroups", "tv"),
        ("fullrank", "js"),
        ("fullrank", "tv"),
    ]
    assert len([job for job in full if job.strategy == "finetune"]) == 10
    assert set(quick) < set(full)
    jobs = {*full, *rq2_jobs(PROFILES["full"])}
    assert len({job.name for job in jobs}) == len(jobs), "names are unique"
    with pytest.raises(MobatlasError, match=r"--profile fulll does not exist.*full"):
        questions.get_profile("fulll")


def row(job: Job | None, model: str, value: float, anchors: str) -> dict[str, Any]:
    metric = {
        "baseline": 0.4,
        "strong": 0.2,
        "floor": 0.1,
        "spread": 0.0,
        "excess": 0.1,
        "gap_closed_strong": 0.5,
        "by_seed": [0.5],
    }
    metric |= {"jsd": value, "gap_closed_floor": (0.4 - value) / 0.3}
    return {
        "anchors": anchors,
        "partition": job and job.partition,
        "divergence": job.divergence if job and job.strategy == "finetune" else None,
        "features": job and list(job.features),
        "model": model,
        "metrics": {each.name: metric for each in metrics()},
        "groups": {
            name: {each.name: [value, 0.01] for each in metrics()} for name in DEFAULT_GROUPS.names
        },
    }


def result_of(question: str, seeds: int = 1) -> dict[str, Any]:
    """A result of that form, with two jobs."""
    jobs = [Job("messy", "tilt"), Job("messy", "finetune", "tv")]
    rows = [
        one
        for anchors in ANCHORS
        for one in (
            row(None, "baseline", 0.4, anchors),
            row(None, "strong", 0.2, anchors),
            row(jobs[0], "tilt, calibrated", 0.13, anchors),
            row(jobs[1], "finetune", 0.43, anchors),
        )
    ]
    curve = [
        {"step": s, "validation": 0.3, "js average": 0.2}
        | {f"js {g}": 0.2 for g in DEFAULT_GROUPS.names}
        for s in (0, 5)
    ]
    distances = {
        each.name: [[0.0 if a == b else 0.4 for a in range(8)] for b in range(8)]
        for each in metrics()
    }
    header = {
        "command": "python -m bench",
        "versions": {"mobatlas": "1"},
        "seeds": list(range(seeds)),
    }
    return header | {
        "question": question,
        "rows": rows,
        "curves": {"a": curve},
        "between_groups": distances,
    }


def test_a_question_measures_the_chosen_strategies_alone() -> None:
    jobs = rq1_jobs(PROFILES["quick"])
    assert Choice().jobs(jobs) == jobs
    tilts = Choice(strategies=["tilt"]).jobs(jobs)
    assert tilts == [job for job in jobs if job.strategy == "tilt"] and len(tilts) == 5
    alone = Choice(strategies=("resample", "tilt"), without_rest=True).jobs(jobs)
    assert {(job.strategy, job.rest) for job in alone} == {("tilt", False), ("resample", False)}
    assert len({job.name for job in [*alone, *jobs]}) == len(alone) + len(jobs)
    assert not {job.regions for job in alone} & {job.regions for job in jobs}


def test_an_unknown_strategy_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    sentence = r"--strategy tlt is not measured here.*'tilt'.*known: tilt, resample, finetune"
    with pytest.raises(MobatlasError, match=sentence):
        questions.run("rq1", Experiment(tmp_path / "out"), choice=Choice(strategies=["tlt"]))
    missing = refused("bench", "rq2", "--strategy", "resample", "--out", tmp_path / "out")
    assert "--strategy resample is not measured here" in missing and "known: tilt" in missing
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        (Choice(), "rq1"),
        (Choice("latent-diffusion", ("tilt",)), "rq1"),
        (Choice("vae"), "rq1-vae"),
        (Choice(without_rest=True), "rq1-without-rest"),
        (Choice("autoregressive", without_rest=True), "rq1-autoregressive-without-rest"),
    ],
)
def test_a_result_is_named_after_what_differs_from_the_defaults(choice: Choice, name: str) -> None:
    assert choice.name("rq1") == name


def test_the_page_has_a_section_for_each_choice_of_a_question(tmp_path: Path) -> None:
    for name in ("rq1", "rq1-autoregressive-without-rest"):
        text = json.dumps(result_of("rq1") | {"name": name})
        (tmp_path / f"{name}.json").write_text(text)
    write_page(tmp_path, tmp_path / "page.md")
    titles = [
        line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("## ")
    ]
    assert titles == [
        "## RQ1: how groups are mixed in regions",
        "## RQ1: how groups are mixed in regions, autoregressive, without rest",
    ]
    assert (tmp_path / "page" / "rq1-autoregressive-without-rest-bars.png").exists()


def test_a_result_of_earlier_definitions_has_a_page_without_trips(tmp_path: Path) -> None:
    result = result_of("rq1") | {"definitions": 1}
    for each in result["rows"]:
        del each["metrics"]["trip"]
    (tmp_path / "rq1.json").write_text(json.dumps(result))
    write_page(tmp_path, tmp_path / "page.md", all_tables=True)
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "what was called Trip then is Flows now" in page
    average = question_tables(result)["average"]
    place = average.columns.index("Trip")
    assert {line[place] for line in average.texts()} == {"-"}
    assert "groups-trip" not in question_tables(result)


def test_cells_that_are_finished_are_read_and_not_computed(tmp_path: Path) -> None:
    tilt = scored({"tilt": 0.3, "tilt, calibrated": 0.2, "floor": 0.1})
    phase1 = scored({"baseline": 0.4, "strong": 0.2, "floor": 0.1})
    phase1["between_groups"] = {"poi": [[0.0]]}
    experiment = Experiment(tmp_path)
    cells = model_cells(tmp_path, Setup(), rq2_jobs(PROFILES["quick"]), [0])
    finished = [
        replace(cell, compute=partial(dict, phase1 if cell.name == PHASE1 else tilt))
        for cell in cells
    ]
    Runner(experiment, "another benchmark", Command("rq2")).run(finished)
    result = questions.run("rq2", experiment)
    assert [each["features"] for each in result["rows"] if each["model"] == "tilt"][:3] == [
        ["poi"],
        ["category"],
        ["transitions"],
    ]
    assert result["between_groups"] == {"poi": [[0.0]]}
    assert result["curves"] == {}
    assert json.loads((tmp_path / "rq2.json").read_text())["command"] == (
        "python -m bench rq2 --profile quick --generator latent-diffusion "
        f"--seeds 1 --first-seed 0 --out {tmp_path.name}"
    )


def test_tables_show_baseline_strong_floor_and_the_numbers_of_the_paper() -> None:
    tables = question_tables(result_of("rq1"))
    lines = [line for line in tables["average"].as_csv().splitlines() if line]
    assert [line.split(",")[:2] for line in lines[1:4]] == [
        ["", "baseline"],
        ["", "strong"],
        ["", "floor"],
    ]
    texts = {line[1]: line for line in tables["average"].texts()}
    assert texts["tilt, calibrated"][2:4] == ["0.130", "90%"]
    assert texts["floor"][2:4] == ["0.100", "-"]
    assert tables["average"].columns[2:4] == ("Spatial", "gap closed to floor, Spatial")
    assert tables["gap"].columns == ("partition", "model", *tables["average"].columns[2::2])
    assert {line[2] for line in tables["gap"].texts()} == {"50%"}, "that to strong"
    assert texts["finetune, tv"][3] == "\N{MINUS SIGN}10%"
    assert "0.130" in as_markdown(tables["groups-poi"])
    assert ">50, F" in tables["groups-poi"].columns
    assert "0.130 ± 0.010" in as_markdown(question_tables(result_of("rq1", seeds=3))["groups-poi"])
    published = tables["published-virginia"]
    assert "proprietary" in published.caption
    assert [line[2:] for line in published.texts() if line[1] == "baseline"] == [
        ["0.105", "0.382", "0.157", "0.304"]
    ]


def test_the_page_shows_the_results_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    missing = refused("bench", "results", tmp_path / "results", "--out", tmp_path / "results.md")
    assert "rq1.json" in missing
    assert not (tmp_path / "results.md").exists()
    (tmp_path / "results" / "rq1.json").write_text(json.dumps(result_of("rq1")))
    done = run("bench", "results", tmp_path / "results", "--out", tmp_path / "docs" / "page.md")
    assert done.code == 0, done.err
    page = (tmp_path / "docs" / "page.md").read_text(encoding="utf-8")
    assert "messy 90%" in page
    assert "RQ2" not in page
    for name in ("bars", "curves", "groups"):
        assert f"(page/rq1-{name}.png)" in page
        assert (tmp_path / "docs" / "page" / f"rq1-{name}.png").read_bytes()[:4] == PNG
    (tmp_path / "results" / "rq1.json").write_text("{")
    assert "rq1.json" in refused(
        "bench", "results", tmp_path / "results", "--out", tmp_path / "page.md"
    )


def test_predictors_are_compared_on_one_city_and_a_run_resumes(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    small = {"embedding": 8, "hidden": 8, "steps": 6, "validate_every": 3}
    experiment = Experiment(out, first_seed=3, quiet=True)
    options = prediction.PredictionOptions(size=160, predictor=small, values=VALUES)
    third = prediction.run(experiment, options, CITY)
    labels = ["real", "baseline", "strong", "tilt, calibrated", "finetune, js", "finetune, tv"]
    assert [each["material"] for each in third["rows"]] == labels
    assert set(third["sizes"].values()) == {20}
    assert set(third["sizes"]).isdisjoint(third["left_out"])
    assert len(third["sizes"]) + len(third["left_out"]) == 8
    real = third["rows"][0]
    baseline = third["rows"][1]
    assert set(real["groups"]) == set(third["sizes"])
    assert 0 <= real["average"]["accuracy"] <= 1
    assert set(baseline["gap_closed_real"].values()) == {None}, "one seed shows no clear gap"
    written = {path.name: path.stat().st_mtime_ns for path in (out / "seed-3").glob("*.json")}
    assert prediction.run(experiment, options, CITY)["rows"] == third["rows"]
    assert written == {
        path.name: path.stat().st_mtime_ns for path in (out / "seed-3").glob("*.json")
    }
    write_question(out, third)
    assert (out / "rq3-tables" / "average.tex").exists()
    assert "rq3" in write_page(out, tmp_path / "results.md")
    assert "rq3" in write_page(out, tmp_path / "results.md"), "a page is written over itself"
    (tmp_path / "notes.md").write_text("my own")
    with pytest.raises(MobatlasError, match=r"notes\.md: was not written by"):
        write_page(out, tmp_path / "notes.md")
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert f"real {real['average']['accuracy']:.3f}" in page
    assert "HR@10" in page
    job = Job("demogroups", "resample", features=("category",))
    setup = Setup(VALUES, CITY, quiet=True)
    Runner(experiment, "features", Command("rq2")).run(model_cells(out, setup, [job], [3]))
    rows = [each for each in summarise(out, [3], [job])["rows"] if each["anchors"] == "group"]
    assert [(each["model"], each["features"]) for each in rows] == [
        ("baseline", None),
        ("strong", None),
        ("strong, calibrated", None),
        ("resample", ["category"]),
    ]


def test_a_gap_of_predictors_below_three_standard_errors_has_no_share(tmp_path: Path) -> None:
    accuracy = {
        "real": (0.5, 0.5),
        "baseline": (0.3, 0.5),
        "strong": (0.5, 0.6),
        "tilt, calibrated": (0.4, 0.4),
    }
    clear = {"real": (0.6, 0.6), "baseline": (0.3, 0.34)}
    materials = prediction.materials(divergences=())
    for seed in (0, 1):
        (tmp_path / f"seed-{seed}").mkdir()
        for material in materials:
            scores = dict.fromkeys(NEXT_POI_METRICS, accuracy[material.label][seed]) | {
                "ndcg10": clear.get(material.label, (0.45, 0.45))[seed]
            }
            cell = {"sizes": {"a": 9}, "left_out": {}, "groups": {"a": scores}}
            write_json(tmp_path / f"seed-{seed}" / f"{material.cell}.json", cell)
    rows = {
        row["material"]: row for row in prediction.summarise(tmp_path, [0, 1], materials)["rows"]
    }
    assert rows["baseline"]["spread"]["accuracy"] == pytest.approx(0.02**0.5, abs=1e-4)
    assert rows["tilt, calibrated"]["spread"]["accuracy"] == 0
    shares = rows["tilt, calibrated"]["gap_closed_real"]
    assert shares["accuracy"] is None, "the gap is 0.1, and its standard error over seeds 0.1"
    assert shares["ndcg10"] == pytest.approx(0.13 / 0.28, abs=1e-3), "0.28 with an error of 0.02"
    once = prediction.summarise(tmp_path, [1], materials)["rows"]
    assert {share for row in once for share in row["gap_closed_real"].values()} == {None}


def test_a_group_that_one_material_cannot_teach_is_left_out_of_all(tmp_path: Path) -> None:
    for name in ("seed-0", "seed-1"):
        (tmp_path / name).mkdir()
    for number, material in enumerate(prediction.materials()):
        scores = dict.fromkeys(NEXT_POI_METRICS, 0.1 * number)
        sizes = {"a": 9, "b": 8 if material.label == "strong" else 9, "c": 9}
        left_out = {}
        if material.label == "baseline":
            left_out["c"] = "no people"
            del sizes["c"]
        cell = {"sizes": sizes, "left_out": left_out, "groups": dict.fromkeys(sizes, scores)}
        for name in ("seed-0", "seed-1"):
            write_json(tmp_path / name / f"{material.cell}.json", cell)
    summary = prediction.summarise(tmp_path, [0, 1], prediction.materials())
    assert list(summary["sizes"]) == ["a"]
    assert set(summary["left_out"]) == {"b", "c"}
    strong = summary["rows"][2]
    assert strong["average"]["accuracy"] == pytest.approx(0.2)
    assert strong["gap_closed_real"]["geo_error_km"] == pytest.approx(-1.0), (
        "0.2 km, baseline 0.1, real 0"
    )
    assert strong["gap_closed_real"]["accuracy"] is None, (
        "real people are no better than the baseline here"
    )
