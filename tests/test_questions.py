"""The research questions: what is planned, computed, tabulated and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import prediction, questions
from bench.cells import ANCHORS, Bench, Job, fill, summarise
from bench.next_poi import NEXT_POI_METRICS
from bench.questions import PROFILES, rq1_jobs, rq2_jobs
from bench.report.questions import question_tables, write_page, write_question
from mobatlas import MobatlasError
from mobatlas.evaluation.metrics import metrics
from mobatlas.groups import DEFAULT_GROUPS
from mobatlas.io.manifest import write_json
from tests.outcomes import refused, run
from tests.test_phase2_benchmark import CITY, VALUES, written

PNG = b"\x89PNG"


def test_quick_finetunes_two_partitions_and_full_all_of_them() -> None:
    quick, full = rq1_jobs(PROFILES["quick"]), rq1_jobs(PROFILES["full"])
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
    assert len([job for job in full if job.strategy == "finetune"]) == 10 and set(quick) < set(full)
    assert len({job.name for job in (*full, *rq2_jobs(PROFILES["full"]))}) == len(
        {*full, *rq2_jobs(PROFILES["full"])}
    )
    with pytest.raises(MobatlasError, match=r"--profile fulll does not exist.*full"):
        questions.profile_named("fulll")


def row(job: Job | None, model: str, value: float, anchors: str) -> dict[str, Any]:
    metric = {
        "baseline": 0.4,
        "strong": 0.2,
        "floor": 0.1,
        "spread": 0.0,
        "gap_closed": 0.5,
        "by_seed": [0.5],
    }
    metric |= {"jsd": value, "floor_closed": (0.4 - value) / 0.3}
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


def found(question: str, seeds: int = 1) -> dict[str, Any]:
    """A result of that shape, with one job of each strategy."""
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
    apart = {
        each.name: [[0.0 if a == b else 0.4 for a in range(8)] for b in range(8)]
        for each in metrics()
    }
    made = {
        "command": "python -m bench",
        "versions": {"mobatlas": "1"},
        "seeds": list(range(seeds)),
    }
    return made | {
        "question": question,
        "rows": rows,
        "curves": {"a": curve},
        "between_groups": apart,
    }


def test_cells_that_are_finished_are_read_and_not_computed(tmp_path: Path) -> None:
    models = {"baseline": 0.4, "strong": 0.2, "floor": 0.1}
    written(tmp_path, 0, "phase1", models, between_groups={"poi": [[0.0]]})
    for job in rq2_jobs(PROFILES["quick"]):
        written(tmp_path, 0, job.name, {"tilt": 0.3, "tilt, calibrated": 0.2, "floor": 0.1})
    result = questions.run("rq2", tmp_path)
    assert [each["features"] for each in result["rows"] if each["model"] == "tilt"][:3] == [
        ["poi"],
        ["category"],
        ["transitions"],
    ]
    assert result["between_groups"] == {"poi": [[0.0]]} and result["curves"] == {}
    assert json.loads((tmp_path / "rq2.json").read_text())["command"] == (
        f"python -m bench rq2 --profile quick --seeds 1 --first-seed 0 --out {tmp_path.name}"
    )


def test_tables_stand_beside_baseline_strong_floor_and_the_paper() -> None:
    tables = question_tables(found("rq1"))
    lines = [line for line in tables["average"].as_csv().splitlines() if line]
    assert [line.split(",")[:2] for line in lines[1:4]] == [
        ["", "baseline"],
        ["", "strong"],
        ["", "floor"],
    ]
    texts = {line[1]: line for line in tables["average"].texts()}
    assert texts["tilt, calibrated"][2:4] == ["0.130", "90%"] and texts["floor"][2:4] == [
        "0.100",
        "100%",
    ]
    assert texts["finetune, tv"][3] == "\N{MINUS SIGN}10%"
    assert (
        "0.130" in tables["groups-poi"].as_markdown() and ">50, F" in tables["groups-poi"].columns
    )
    assert "0.130 ± 0.010" in question_tables(found("rq1", seeds=3))["groups-poi"].as_markdown()
    published = tables["published-virginia"]
    assert "proprietary" in published.caption
    assert [line[2:] for line in published.texts() if line[1] == "baseline"] == [
        ["0.105", "0.382", "0.157", "0.304"]
    ]


def test_the_page_and_the_figures_are_of_what_lies_there(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    missing = refused("bench", "results", tmp_path / "results", "--out", tmp_path / "results.md")
    assert "rq1.json" in missing and not (tmp_path / "results.md").exists()
    (tmp_path / "results" / "rq1.json").write_text(json.dumps(found("rq1")))
    done = run("bench", "results", tmp_path / "results", "--out", tmp_path / "docs" / "page.md")
    assert done.code == 0, done.err
    page = (tmp_path / "docs" / "page.md").read_text(encoding="utf-8")
    assert "messy 90%" in page and "RQ2" not in page
    for name in ("bars", "curves", "groups"):
        assert f"(page/rq1-{name}.png)" in page
        assert (tmp_path / "docs" / "page" / f"rq1-{name}.png").read_bytes()[:4] == PNG
    (tmp_path / "results" / "rq1.json").write_text("{")
    assert "rq1.json" in refused(
        "bench", "results", tmp_path / "results", "--out", tmp_path / "page.md"
    )


def test_predictors_are_compared_on_one_city_and_a_run_goes_on_where_it_stopped(
    tmp_path: Path,
) -> None:
    out, small = tmp_path / "out", {"embedding": 8, "hidden": 8, "steps": 6, "validate_every": 3}
    manner: dict[str, Any] = {"values": VALUES, "city": CITY, "quiet": True}
    third = prediction.run(out, size=160, predictor=small, first_seed=3, **manner)
    labels = ["real", "baseline", "strong", "tilt, calibrated", "finetune, js", "finetune, tv"]
    assert [each["material"] for each in third["rows"]] == labels
    assert set(third["sizes"].values()) == {20} and set(third["sizes"]).isdisjoint(
        third["left_out"]
    )
    assert len(third["sizes"]) + len(third["left_out"]) == 8 and third["sizes"]
    real, baseline = third["rows"][0], third["rows"][1]
    assert set(real["groups"]) == set(third["sizes"])
    assert 0 <= real["average"]["accuracy"] <= 1 and baseline["gap_closed"]["accuracy"] in (
        0.0,
        None,
    )
    kept = {path.name: path.stat().st_mtime_ns for path in (out / "seed-3").glob("*.json")}
    assert (
        prediction.run(out, size=160, predictor=small, first_seed=3, **manner)["rows"]
        == third["rows"]
    )
    assert kept == {path.name: path.stat().st_mtime_ns for path in (out / "seed-3").glob("*.json")}
    write_question(out, third)
    assert (out / "rq3-tables" / "average.tex").exists()
    assert "rq3" in write_page(out, tmp_path / "results.md")
    assert "rq3" in write_page(out, tmp_path / "results.md"), "a page is written over itself"
    (tmp_path / "notes.md").write_text("my own")
    with pytest.raises(MobatlasError, match=r"notes\.md: was not written by"):
        write_page(out, tmp_path / "notes.md")
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert f"real {real['average']['accuracy']:.3f}" in page and "HR@10" in page
    job = Job("demogroups", "resample", features=("category",))
    fill(out, "features", [job], [3], Bench("mobatlas", **manner))
    found = summarise(out, [3], [job])["rows"]
    assert [(each["model"], each["features"]) for each in found if each["anchors"] == "group"] == [
        ("baseline", None),
        ("strong", None),
        ("resample", ["category"]),
    ]


def test_what_seeds_differ_by_is_told_and_hides_what_is_less(tmp_path: Path) -> None:
    told = {
        "real": (0.5, 0.5),
        "baseline": (0.3, 0.5),
        "strong": (0.5, 0.6),
        "tilt, calibrated": (0.4, 0.4),
    }
    materials = prediction.materials(tuned=())
    for seed in (0, 1):
        (tmp_path / f"seed-{seed}").mkdir()
        for material in materials:
            scores = dict.fromkeys(NEXT_POI_METRICS, told[material.label][seed]) | {
                "hr10": 0.1 * len(material.label)
            }
            found = {"sizes": {"a": 9}, "left_out": {}, "groups": {"a": scores}}
            write_json(tmp_path / f"seed-{seed}" / f"{material.cell}.json", found)
    rows = {
        row["material"]: row for row in prediction.summarise(tmp_path, [0, 1], materials)["rows"]
    }
    assert rows["baseline"]["spread"]["accuracy"] == pytest.approx(0.02**0.5, abs=1e-4)
    assert rows["tilt, calibrated"]["spread"]["accuracy"] == 0
    assert rows["strong"]["gap_closed"]["accuracy"] is None, (
        "0.1 between baseline and real, and seeds differ by 0.14"
    )


def test_a_group_that_one_material_cannot_teach_is_left_out_of_all(tmp_path: Path) -> None:
    (tmp_path / "seed-0").mkdir()
    for number, material in enumerate(prediction.materials()):
        scores = dict.fromkeys(NEXT_POI_METRICS, 0.1 * number)
        sizes, left_out = {"a": 9, "b": 8 if material.label == "strong" else 9}, {}
        if material.label == "baseline":
            sizes, left_out = {"a": 9, "b": 9}, {"c": "nobody"}
        else:
            sizes["c"] = 9
        found = {"sizes": sizes, "left_out": left_out, "groups": dict.fromkeys(sizes, scores)}
        write_json(tmp_path / "seed-0" / f"{material.cell}.json", found)
    made = prediction.summarise(tmp_path, [0], prediction.materials())
    assert list(made["sizes"]) == ["a"] and set(made["left_out"]) == {"b", "c"}
    assert made["rows"][2]["average"]["accuracy"] == pytest.approx(0.2)
    assert made["rows"][2]["gap_closed"]["geo_error_km"] == pytest.approx(-1.0), (
        "0.2 km, baseline 0.1, real 0"
    )
    assert made["rows"][2]["gap_closed"]["accuracy"] is None, (
        "real people are no better than the baseline here"
    )
