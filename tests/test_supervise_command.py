"""Phase 2 as a user types it: every strategy, calibrated samples, and what a model keeps."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from bench.score_models import FLOOR, score_groups
from mobatlas import (
    Atlas,
    MetricSpec,
    MobatlasError,
    generate,
    load_model,
    load_sampler,
)
from mobatlas.data.dataset import Trajectories
from mobatlas.data.types import ANCHORS
from mobatlas.generators.protocol import Generator
from mobatlas.io.manifest import MANIFEST, read_manifest
from mobatlas.pipeline.models import SuperviseOptions, train
from mobatlas.regions.store import RegionsFolder
from mobatlas.sampling.chunks import SampleRequest
from mobatlas.supervision.calibration import Sampler
from mobatlas.training.loop import Execution
from tests.commands import Warm, wait_until
from tests.disclosure import found
from tests.outcomes import refused, run
from tests.supervised import BRIEF, GROUP, HOW, SMALL, World, made_world, remade
from tests.tiny import with_other_labels
from tests.written import generate_with

BESIDES = ("anchors.json", "composition.parquet", "group_means.parquet")
CALIBRATION = ("calibration.json", "calibration.safetensors")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return made_world(tmp_path_factory.mktemp("world"))


def supervision(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_manifest(model, "model").details["supervision"]
    return found


def bytes_of(model: Path) -> dict[str, bytes]:
    """Everything that must not differ between two models."""
    own = (MANIFEST, "metrics.jsonl")
    return {
        path.name: path.read_bytes() for path in sorted(model.iterdir()) if path.name not in own
    }


def firsts(path: Path) -> pd.DataFrame:
    """One row a trajectory."""
    return pd.read_parquet(path).groupby("trajectory", sort=False).head(1)


# ---- what a strategy leaves


@pytest.mark.parametrize("strategy", HOW)
def test_every_strategy_makes_a_model_that_samples_groups_and_regions(
    world: World, tmp_path: Path, strategy: str
) -> None:
    model = world.supervised(strategy)
    said = supervision(model)
    assert said["strategy"] == ("tilt" if strategy == "auto" else strategy) and said["reason"]
    assert said["regions"]["hash"] == read_manifest(world.groups, "regions").content_hash
    assert said["membership"] is False and isinstance(said["warnings"], list)
    kept = [*BESIDES, *(CALIBRATION if strategy != "finetune" else ("curve.jsonl",))]
    assert set(kept) <= set(bytes_of(model))
    asked = ("--group", GROUP), ("--region", "R4")
    for number, option in enumerate(asked):
        out = tmp_path / f"{number}.parquet"
        assert run("generate", model, "--n", 20, *option, "--out", out).code == 0
        assert len(firsts(out)) == 20
        assert set(firsts(out)["group"]) == {GROUP}, "R4 is the fourth group of demogroups"


def test_the_command_says_what_it_chose_and_why(world: World, tmp_path: Path) -> None:
    done = run("supervise", world.model, world.groups, *SMALL, "--out", tmp_path / "new", "--quiet")
    assert done.code == 0, done.err
    assert "supervised by tilt (the default for generators" in " ".join(done.out.split())
    again = run(
        "supervise",
        world.model,
        world.groups,
        *SMALL,
        "--out",
        tmp_path / "new",
        "--resume",
        "--json",
    )
    report = json.loads(again.out)
    assert report == read_manifest(tmp_path / "new", "model").details["report"]
    assert report["tilt"]["groups"][GROUP]["effective_sample_size"] > 1
    assert report["calibration"]["groups"][GROUP]["population"]["before"]["js"] >= 0
    other = refused(
        "supervise", world.model, world.districts, *SMALL, "--out", tmp_path / "new", "--resume"
    )
    assert "another configuration" in other
    assert bytes_of(tmp_path / "new") == bytes_of(world.supervised("tilt")), (
        "auto is tilt, and the same seed the same bytes"
    )


def test_a_run_file_says_how_to_supervise_and_options_go_over_it(
    world: World, tmp_path: Path
) -> None:
    options = "{calibration: {pool: 64, candidates: 2}, weighted_fit: {steps: 3}}"
    path = tmp_path / "run.yaml"
    path.write_text(f"seed: 4\nsupervise:\n  strategy: tilt\n  options: {options}\n")
    done = run(
        "supervise",
        world.model,
        world.groups,
        "--config",
        path,
        "--set",
        "tilt.ridge=0.01",
        "--out",
        tmp_path / "m",
    )
    assert done.code == 0, done.err
    manifest = read_manifest(tmp_path / "m", "model")
    assert (
        manifest.seed,
        manifest.config["strategy"],
        manifest.config["weighted_fit"]["steps"],
    ) == (
        4,
        "tilt",
        3,
    )
    assert manifest.config["supervise"]["calibration"]["pool"] == 64
    assert manifest.config["supervise"]["tilt"]["ridge"] == 0.01
    path.write_text("supervise:\n  stratgy: tilt\n")
    assert "strategy" in refused(
        "supervise", world.model, world.groups, "--config", path, "--out", tmp_path / "n"
    )


def test_a_model_keeps_recovered_means_and_nobodys_name(
    world: World,
) -> None:
    model = world.supervised("tilt")
    dataset = world.dataset
    means = pd.read_parquet(model / "group_means.parquet")
    drawn = ["median", "parent", "parent_covariance"]  # for posterior samples
    columns = ["group", "feature", "mean", "population", "sd", "covariance", "tilt", *drawn]
    assert list(means) == columns and dataset.groups is not None
    assert means.drop(columns=["sd", *drawn]).notna().all().all()
    assert means["parent"].isna().all(), "only places have parents"
    estimated = ~means["feature"].str.startswith(
        "visits:"
    )  # which is not recovered from regions, and has no error bar
    assert (means["median"].notna() == estimated).all()
    assert (
        (means["sd"][estimated] >= 0).all()
        and means["sd"][~estimated].isna().all()
        and (~estimated).any()
    )
    assert tuple(means["group"].unique()) == dataset.groups.names
    for _, rows in means[estimated].groupby("feature"):
        covariance = np.stack(rows["covariance"].to_list())  # (groups, groups)
        assert (
            np.allclose(covariance, covariance.T) and np.linalg.eigvalsh(covariance).min() > -1e-9
        )
        assert np.allclose(np.sqrt(np.diag(covariance)), rows["sd"])
    assert pq.read_table(model / "composition.parquet").column_names == [
        "region",
        "group",
        "share",
        "believed",
    ]
    said = supervision(model)
    assert set(said["effective_sample_size"]) == set(dataset.groups.names)
    for each in (world.model, *map(world.supervised, ("tilt", "resample", "finetune"))):
        assert found(each, dataset) == [], "a home, a workplace or an id"


def test_a_supervised_model_needs_its_dataset_no_more(world: World, tmp_path: Path) -> None:
    model = world.supervised("tilt")
    here = world.dataset.path
    there = world.root / "elsewhere"
    here.rename(there)
    try:
        assert (
            run(
                "generate",
                model,
                "--n",
                5,
                "--group",
                GROUP,
                "--calibrate",
                "--out",
                tmp_path / "a",
            ).code
            == 0
        )
    finally:
        there.rename(here)


def test_finetuning_leaves_its_learning_curve_and_goes_on_from_a_tilted_model(
    world: World, tmp_path: Path
) -> None:
    curve = [
        json.loads(line)
        for line in (world.supervised("finetune") / "curve.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in curve] == [0, 2, 4][: len(curve)] and len(curve) >= 2
    assert world.dataset.groups is not None
    for row in curve:
        groups = [row[f"js {name}"] for name in world.dataset.groups.names]
        assert all(0 <= each <= 1 for each in groups) and row["js average"] == pytest.approx(
            np.mean(groups)
        )
    tilted = world.supervised("tilt")
    command = (
        "--strategy",
        "finetune",
        *HOW["finetune"],
        "--divergence",
        "tv",
        "--out",
        tmp_path / "both",
        "--json",
    )
    done = run("supervise", tilted, world.groups, *command)
    assert done.code == 0, done.err
    assert json.loads(done.out)["finetune"]["from_tilted"] is True
    assert (
        read_manifest(tmp_path / "both", "model").config["supervise"]["finetune"]["divergence"]
        == "tv"
    )


def test_strong_notes_that_it_does_not_read_regions_and_nothing_goes_on_from_it(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strong = tmp_path / "strong"
    command = ["supervise", world.model, world.groups, "--strategy", "strong", *SMALL]
    assert run(*command, "--out", strong).code == 0
    assert "needs no regions" in caplog.text
    assert set(BESIDES) & set(bytes_of(strong)) == {"anchors.json", "group_means.parquet"}
    assert set(CALIBRATION) < set(bytes_of(strong)), "the means of labelled people are known"
    tuning = ("--strategy", "finetune", *HOW["finetune"], "--out", tmp_path / "new")
    assert "learnt groups from labels" in refused("supervise", strong, world.groups, *tuning)
    calibrated = ("--n", 5, "--group", GROUP, "--calibrate", "--out", tmp_path / "a")
    assert run("generate", strong, *calibrated).code == 0
    without = tmp_path / "without"
    plain = ("--set", "strong.features=[]", "--out", without)
    assert run("supervise", world.model, "--strategy", "strong", *plain).code == 0
    assert not {*BESIDES[1:], *CALIBRATION} & set(bytes_of(without))
    said = refused("generate", without, *calibrated[:-1], tmp_path / "b")
    assert "has no estimated group means" in said


def test_membership_is_said_wherever_it_is_on(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "new"
    done = run(
        "supervise",
        world.model,
        world.groups,
        "--strategy",
        "tilt",
        "--membership",
        *SMALL,
        "--out",
        out,
    )
    assert done.code == 0 and "membership: the composition of" in done.out
    assert "with a controlled partition, --membership can reveal the label itself" in caplog.text
    assert supervision(out)["membership"] is True
    caplog.clear()
    tuned = (
        "supervise",
        out,
        world.groups,
        "--strategy",
        "finetune",
        *HOW["finetune"],
        "--out",
        tmp_path / "tuned",
    )
    assert run(*tuned).code == 0 and supervision(tmp_path / "tuned")["membership"] is True
    assert run("generate", out, "--n", 5, "--group", GROUP, "--out", tmp_path / "a").code == 0
    assert "was supervised with --membership" in caplog.text


@pytest.mark.parametrize("calibrate", [(), ("--calibrate",)])
def test_with_membership_samples_of_a_group_have_homes_of_its_regions(
    world: World, tmp_path: Path, calibrate: tuple[str, ...]
) -> None:
    """Each region is one group, so samples of a group have homes of its region only."""
    theirs = tmp_path / "theirs"
    anybodys = world.supervised("tilt")
    assert (
        run("supervise", world.model, world.groups, "--membership", *SMALL, "--out", theirs).code
        == 0
    )
    shares = pd.read_parquet(theirs / "composition.parquet")
    [own] = shares[(shares["group"] == GROUP) & (shares["believed"] == 1)]["region"]
    people = load_model(theirs).population
    number = shares["region"].unique().tolist().index(own)
    elsewhere = set(people.anchors[people.region != number, 0])
    homes = []
    for count, model in enumerate((theirs, anybodys)):
        out = tmp_path / f"{count}.parquet"
        assert (
            run("generate", model, "--n", 40, "--group", GROUP, *calibrate, "--out", out).code == 0
        )
        homes.append(set(pd.read_parquet(out)["home_lat"]))
    assert not homes[0] & elsewhere
    everyone = load_model(anybodys).population
    assert homes[1] & set(everyone.anchors[everyone.region != number, 0])
    region = RegionsFolder.open(world.groups).assignment or {}
    table = world.dataset.people.to_pandas()
    real = set(table.home_lat[table.user_id.map(region) == own])
    for request in (
        SampleRequest(anchors="observed", group=GROUP),
        SampleRequest(anchors="observed", region=own),
    ):
        generate(theirs, tmp_path / "observed.parquet", 20, request, overwrite=True)
        assert set(pd.read_parquet(tmp_path / "observed.parquet")["home_lat"]) <= real


def test_fewer_regions_than_groups_go_on_and_say_what_is_not_identified(
    world: World, tmp_path: Path
) -> None:
    done = run(
        "supervise", world.model, world.districts, *SMALL, "--out", tmp_path / "new", "--json"
    )
    assert done.code == 0, done.err
    said = " ".join(json.loads(done.out)["warnings"])
    assert "not identified" in said and "the evidence says little about" in said


@pytest.mark.parametrize("strategy", ["tilt", "finetune"])
def test_suppressed_cells_are_no_hindrance(world: World, tmp_path: Path, strategy: str) -> None:
    holes = remade(
        world.groups,
        tmp_path / "holes",
        "aggregates.parquet",
        "value",
        lambda rows: rows["value"].where(np.arange(len(rows)) % 7 > 0),
    )
    done = run(
        "supervise",
        world.model,
        holes,
        "--strategy",
        strategy,
        *HOW[strategy],
        "--out",
        tmp_path / "new",
    )
    assert done.code == 0, done.err


# ---- calibrated samples


@pytest.fixture
def homes(world: World, tmp_path: Path) -> Path:
    table = pd.DataFrame(world.dataset.anchors[:40], columns=list(ANCHORS))
    table.assign(group=[GROUP, "<30, M"] * 20).to_csv(tmp_path / "homes.csv", index=False)
    return tmp_path / "homes.csv"


@pytest.mark.parametrize("strategy", ["tilt", "resample"])
def test_calibrated_samples_are_the_same_bytes_whatever_the_chunk(
    world: World, homes: Path, tmp_path: Path, strategy: str
) -> None:
    model = world.supervised(strategy)
    forms: dict[str, dict[str, Any]] = {
        "population": {"n": 300, "group": GROUP, "coarsen": 0.5},
        "fixed_anchors": {"n": 300, "anchors": homes},
    }
    for form, options in forms.items():
        made = [
            generate_with(
                model, tmp_path / f"{form}{k}", calibrate=True, chunk=k, seed=3, **options
            )
            for k in (1, 2)
        ]
        assert (tmp_path / f"{form}1").read_bytes() == (tmp_path / f"{form}2").read_bytes()
        rate = made[0].acceptance_rate
        found = made[0].calibration
        assert found is not None and found["form"] == form and rate == made[1].acceptance_rate
        assert rate == 0.5 if form == "fixed_anchors" else 0 < (rate or 0) <= 1
        assert set(found["groups"]) == ({GROUP} if form == "population" else {GROUP, "<30, M"})
        assert all({"before", "after"} == set(each) for each in found["groups"].values())


def test_given_anchors_stay_as_they_are(world: World, homes: Path, tmp_path: Path) -> None:
    done = run(
        "generate",
        world.supervised("tilt"),
        "--anchors",
        homes,
        "--calibrate",
        "--out",
        tmp_path / "a",
        "--json",
    )
    assert done.code == 0 and json.loads(done.out)["calibration"]["form"] == "fixed_anchors"
    made = firsts(tmp_path / "a")
    assert made[list(ANCHORS)].to_numpy() == pytest.approx(world.dataset.anchors[:40])
    assert made["group"].tolist() == [GROUP, "<30, M"] * 20


def test_the_command_prints_the_acceptance_rate_and_both_distances(
    world: World, tmp_path: Path
) -> None:
    done = run(
        "generate",
        world.supervised("resample"),
        "--n",
        30,
        "--group",
        GROUP,
        "--out",
        tmp_path / "a",
    )
    said = " ".join(done.out.split())
    assert "calibrated, population:" in said and "of the candidates were accepted" in said
    assert f"{GROUP}: JSD to the estimated means" in said, "for resample it is implied"


def test_a_resampled_model_without_a_group_is_the_baseline(world: World, tmp_path: Path) -> None:
    made = generate(world.supervised("resample"), tmp_path / "a", 10)
    assert made.acceptance_rate is None and firsts(tmp_path / "a")["group"].isna().all()


# ---- labels


@pytest.mark.parametrize("change", ["shuffled", "deleted"])
def test_labels_change_no_weight_and_no_sample_once_the_regions_are_there(
    world: World, tmp_path: Path, change: str
) -> None:
    copy = with_other_labels(world.dataset, tmp_path / "copy", change)
    quiet = Execution(quiet=True)
    train(copy, tmp_path / "model", generator="latent-diffusion", values=BRIEF, execution=quiet)
    assert bytes_of(tmp_path / "model") == bytes_of(world.model)
    for strategy in ("tilt", "resample", "finetune"):
        out = tmp_path / strategy
        whole = world.supervised(strategy)
        command = ("--strategy", strategy, *HOW[strategy], "--out", out)
        assert run("supervise", tmp_path / "model", world.groups, *command).code == 0
        assert bytes_of(out) == bytes_of(whole)
        generate(
            out, tmp_path / f"{strategy}.parquet", 20, SampleRequest(group=GROUP, calibrate=True)
        )
        assert (tmp_path / f"{strategy}.parquet").read_bytes() == world.samples(
            strategy
        ).read_bytes()


# ---- stopped and continued


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tilt", "finetune"])
def test_killed_and_resumed_it_ends_in_the_same_bytes(
    world: World, tmp_path: Path, strategy: str
) -> None:
    longer = ("--set", "weighted_fit.steps=60", "--set", "finetune.steps=12")[
        0 if strategy == "tilt" else 2 :
    ][:2]
    command: list[object] = [
        "supervise",
        world.model,
        world.groups,
        "--strategy",
        strategy,
        *HOW[strategy],
        *longer,
    ]
    assert run(*command, "--out", tmp_path / "whole").code == 0
    warm = Warm(tmp_path)
    out = tmp_path / "killed"
    running = warm.start(*command, "--out", out, "--checkpoint-seconds", 0)
    wait_until(lambda: any((out / "training").glob(f"{strategy}-0*.safetensors")), "a checkpoint")
    assert running.signal(signal.SIGKILL).code == -signal.SIGKILL
    warm.close()
    assert not (out / MANIFEST).exists()
    assert run(*command, "--out", out, "--resume").code == 0
    assert bytes_of(out) == bytes_of(tmp_path / "whole")


# ---- from Python


def test_atlas_fits_supervises_samples_saves_and_opens(world: World, tmp_path: Path) -> None:
    fitted = Atlas("latent-diffusion", values=BRIEF, execution=Execution(quiet=True)).fit(
        world.dataset
    )
    assert fitted.groups is None and bytes_of(fitted.path) == bytes_of(world.model)
    values = {"calibration": {"pool": 64, "candidates": 2}}
    model = fitted.supervise(world.groups, SuperviseOptions(values=values))
    assert model.report["strategy"] == "tilt" and model.groups == world.dataset.groups
    table = model.sample(20, GROUP)
    assert table["trajectory"].unique().to_pylist() == list(range(20))
    assert set(table.to_pandas()["group"]) == {GROUP}
    saved = model.save(tmp_path / "kept")
    assert Atlas.open(tmp_path / "kept").sample(n=20, group=GROUP).equals(table)
    assert not saved.sample(20, GROUP, calibrate=False).equals(table), (
        "samples of a group are calibrated by default"
    )
    homes = world.dataset.anchors[:6]
    assert saved.sample(group=GROUP, anchors=homes)["trajectory"].unique().to_pylist() == list(
        range(6)
    )
    with pytest.raises(MobatlasError, match="give rows of home_lat"):
        saved.sample(group=GROUP, anchors=homes[:, :2])
    place = model.path
    del model, fitted
    assert not place.exists(), "a temporary model goes with its last use"


def test_calibrated_models_are_scored_beside_the_others_in_both_forms(world: World) -> None:
    baseline = load_model(world.model).generator
    tilted = load_model(world.supervised("tilt"))
    models: dict[str, Generator | Sampler] = {
        "baseline": baseline,
        "tilt": tilted.generator,
        "calibrated": load_sampler(tilted),
    }
    spec = MetricSpec.of(world.dataset)
    for anchors in ("group", "population"):
        scores = score_groups(world.dataset, spec, models, split="train", anchors=anchors)
        assert set(scores) == {*models, FLOOR}
        assert all(0 <= value <= 1 for each in scores.values() for value in each.average.values())
    with pytest.raises(MobatlasError, match="anchors 'people' do not exist"):
        score_groups(world.dataset, spec, models, anchors="people")


def test_a_sampler_makes_what_generate_writes(world: World, tmp_path: Path) -> None:
    loaded = load_model(world.supervised("tilt"))
    made: Trajectories = load_sampler(loaded).sample(25, 3, seed=4).trajectories
    generate(loaded.path, tmp_path / "a", 25, SampleRequest(group=GROUP, calibrate=True, seed=4))
    written = pd.read_parquet(tmp_path / "a")["poi_id"].tolist()
    assert written == [loaded.generator.vocabulary.poi_ids[token] for token in made.tokens]
