"""Links, bombs, altered folders, full devices and broken terminals are refused in one sentence."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mobatlas import MobatlasError, TrajectoryDataset
from mobatlas.config import load_values, parse_assignments
from mobatlas.data.samples import read_samples
from mobatlas.generators.store import load_model
from mobatlas.io.limits import refuse_bomb
from mobatlas.io.manifest import MANIFEST, read_manifest, write_atomic
from mobatlas.io.output import is_complete, new_file, new_folder, resumable_folder
from mobatlas.regions.store import RegionsFolder
from tests.commands import ENVIRONMENT
from tests.faults import SMALL_FILES, World, tiny_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return tiny_world(tmp_path_factory.getbasetemp())


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "victim"
    path.parent.mkdir()
    path.write_text("precious")
    return path


def write_folder(out: Path) -> None:
    with new_folder(out, "thing") as folder:
        (folder.path / "file.json").write_text("{}")


def write_file(out: Path) -> None:
    with new_file(out, overwrite=False) as path:
        path.write_text("new")


def resume(out: Path) -> None:
    with resumable_folder(out, "thing", names=["file.json"], resume=True) as folder:
        (folder.path / "file.json").write_text("{}")


WRITERS: dict[str, Callable[[Path], None]] = {
    "folder": write_folder,
    "file": write_file,
    "resumed": resume,
}


@pytest.mark.parametrize("suffix", ["lock", "partial", "replaced"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_link_beside_an_output_is_refused(
    tmp_path: Path, victim: Path, writer: str, suffix: str
) -> None:
    link = tmp_path / f".out.{suffix}"
    link.symlink_to(victim)
    with pytest.raises(MobatlasError, match=rf"\.out\.{suffix}: this is a symbolic link"):
        WRITERS[writer](tmp_path / "out")
    assert victim.read_text() == "precious" and link.is_symlink()
    assert not (tmp_path / "out").exists()


def test_a_link_in_place_of_a_partial_file_is_refused(tmp_path: Path, victim: Path) -> None:
    (tmp_path / ".steps.json.partial").symlink_to(victim)
    with pytest.raises(MobatlasError, match="this is a symbolic link"):
        write_atomic(tmp_path / "steps.json", b"new")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["training", "file.json"])
def test_a_link_inside_an_unfinished_folder_is_refused(
    tmp_path: Path, victim: Path, name: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(ZeroDivisionError), resumable_folder(out, "thing") as folder:
        (folder.path / "training" / "step-1").touch()
        raise ZeroDivisionError
    if name == "training":
        (out / "training").rename(tmp_path / "moved")
        (victim.parent / "unfinished.json").write_text("{}")
    (out / name).symlink_to(victim.parent if name == "training" else victim)
    with pytest.raises(MobatlasError, match=rf"{name}: this is a symbolic link"):
        resume(out)
    assert victim.read_text() == "precious"


def test_leftovers_behind_a_link_are_not_removed(tmp_path: Path, victim: Path) -> None:
    write_folder(tmp_path / "out")
    (victim.parent / "unfinished.json").write_text("{}")
    (tmp_path / "out" / "training").symlink_to(victim.parent)
    with pytest.raises(MobatlasError, match="training: this is a symbolic link"):
        is_complete(tmp_path / "out")
    assert victim.read_text() == "precious"


FOLDERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "dataset": ("dataset", TrajectoryDataset.open),
    "model": ("baseline", load_model),
    "regions": ("regions/demogroups", RegionsFolder.open),
}


@pytest.mark.parametrize("listed", ["nothing", "all but one"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_manifest_lists_every_file(world: World, tmp_path: Path, kind: str, listed: str) -> None:
    name, open_folder = FOLDERS[kind]
    copy = tmp_path / kind
    subprocess.run(["cp", "-r", world.run / name, copy], check=True)
    open_folder(copy)
    values = json.loads((copy / MANIFEST).read_text())
    kept = {} if listed == "nothing" else dict(list(values["files"].items())[:-1])
    altered = sorted(set(values["files"]) - set(kept))[-1]
    (copy / MANIFEST).write_text(
        json.dumps(values | {"files": kept, "unlisted": list(values["files"])})
    )
    with pytest.raises(MobatlasError, match=r"does not list this file, so it may have been alt"):
        open_folder(copy)
    assert (copy / altered).exists()


def test_a_manifest_of_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"format": 2, "kind": "thing", "files": {}}')
    with pytest.raises(MobatlasError, match=r"manifest\.json: it lists no files"):
        read_manifest(tmp_path, "thing")


def test_notes_of_the_user_stay_in_a_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("mine")
    assert list(read_manifest(tmp_path / "out", "thing").files) == ["file.json"]


HEADER = b"user_id,poi_id,lat,lon,arrival\n"


def write_bomb(path: Path) -> Path:
    """A few hundred kilobytes of 20 million equal rows, or of text for a gigabyte of them."""
    if path.suffix == ".gz":
        block = b"a,p,40.0,-74.0,2024-03-04 08:00:00\n" * 2**15
        path.write_bytes(gzip.compress(HEADER, 9) + gzip.compress(block * 2**5, 9) * 2**5)
        return path
    names = ["user_id", "poi_id", "lat", "lon", "arrival", "trajectory"]
    zeros = pa.array(np.zeros(2**20, np.int8))
    schema = pa.schema([(name, pa.int8()) for name in names])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for _ in range(20):
            writer.write_table(pa.table(dict.fromkeys(names, zeros), schema=schema))
    return path


@pytest.mark.parametrize("name", ["visits.csv.gz", "visits.parquet", "people.csv.gz"])
def test_a_bomb_is_refused_before_it_unpacks(world: World, tmp_path: Path, name: str) -> None:
    (tmp_path / "visits.csv").write_bytes(HEADER + b"a,p,40.0,-74.0,2024-03-04 08:00:00\n")
    bomb = write_bomb(tmp_path / name)
    if name.startswith("visits"):
        (tmp_path / "visits.csv").unlink()
    help_ = world.warm.run("prepare", "--help")
    refused = world.warm.run("prepare", tmp_path, "--out", tmp_path.parent / "bombed")
    assert refused.code == 2, refused.err
    assert f"{bomb}: " in refused.said and "all nearly equal" in refused.said
    assert refused.peak_mb < help_.peak_mb + 300
    assert not (tmp_path.parent / "bombed").exists()


def test_a_bomb_of_samples_is_refused(world: World, tmp_path: Path) -> None:
    dataset = TrajectoryDataset.open(world.run / "dataset")
    with pytest.raises(MobatlasError, match="20,971,520 rows, all nearly equal"):
        read_samples(write_bomb(tmp_path / "samples.parquet"), dataset.vocabulary)


def test_anchors_that_exhaust_the_memory_are_refused(world: World, tmp_path: Path) -> None:
    block = b"1.5,2.5,3.5,4.5\n" * 2**16
    header = b"home_lat,home_lon,work_lat,work_lon\n"
    path = tmp_path / "anchors.csv.gz"
    path.write_bytes(gzip.compress(header) + gzip.compress(block * 2**6) * 2**4)
    help_ = world.warm.run("generate", "--help")
    options = ["--anchors", path, "--out", tmp_path / "samples.parquet", "--quiet"]
    refused = world.warm.run("generate", world.run / "baseline", *options)
    assert refused.code == 2, refused.err
    assert f"{path}: the table is larger than" in refused.said
    assert refused.peak_mb < help_.peak_mb + 300


def test_well_packed_visits_are_no_bomb(tmp_path: Path) -> None:
    """A fix every ten minutes, and nobody ever moves."""
    numbers = np.arange(300_000)
    times = np.datetime64("2024-03-04", "s") + numbers % 3_000 * np.timedelta64(600, "s")
    rows = pd.DataFrame({"user_id": numbers // 3_000, "poi_id": "p", "lat": 40.0, "lon": -74.0})
    rows.assign(arrival=times).to_csv(tmp_path / "visits.csv.gz", index=False)
    rows.assign(arrival=times).to_parquet(tmp_path / "visits.parquet")
    refuse_bomb(tmp_path)


def test_a_full_disk_in_training_has_the_exit_code_of_other_full_disks(
    world: World, tmp_path: Path
) -> None:
    failed = world.warm.run(
        *("train", world.run / "dataset", "--out", tmp_path / "model", "--config", world.config),
        *("--checkpoint-seconds", 0.01, "--quiet"),
        before=SMALL_FILES.format(size=3_000),
    )
    assert failed.code == 1, failed.err
    assert "could not be written (File too large)" in failed.said or "disk is full" in failed.said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("seed: 1\ntitle: a\nseed: 2\n", r"not valid YAML at line 3 \(the key 'seed' is repeated"),
        ("prepare:\n  window: {days: 1, days: 2}\n", r"at line 2 \(the key 'days' is repeated"),
    ],
)
def test_a_repeated_key_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(MobatlasError, match=sentence):
        load_values(tmp_path / "run.yaml")


def test_merged_keys_are_no_repetition(tmp_path: Path) -> None:
    text = "train: {options: {a: &a {x: 1, y: 2}, b: {<<: *a, y: 3}}}\n"
    (tmp_path / "run.yaml").write_text(text)
    assert load_values(tmp_path / "run.yaml")["train"]["options"]["b"] == {"x": 1, "y": 3}
    assert parse_assignments(["a={x: 1}"]) == {"a": {"x": 1}}


def test_a_narrow_terminal_shows_every_number(world: World) -> None:
    arguments = ["diagnose", str(world.run / "regions" / "demogroups")]
    done = subprocess.run(
        [sys.executable, "-m", "mobatlas", *arguments],
        env=ENVIRONMENT | {"COLUMNS": "20"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "condition number" in done.stdout and "people in a region" in done.stdout


@pytest.mark.parametrize("options", [["--json"], []])
def test_a_full_device_for_stdout_says_that_the_result_is_complete(
    world: World, tmp_path: Path, options: list[str]
) -> None:
    out = tmp_path / "city"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mobatlas", "simulate", "--out", out, "--users", "20", *options],
            env=ENVIRONMENT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "mobatlas: the result is complete, but could not be printed (No space left on device)"
    )
    assert (out / MANIFEST).exists() and [path.name for path in tmp_path.iterdir()] == ["city"]


def test_a_dataset_whose_folder_was_removed_says_so(world: World, tmp_path: Path) -> None:
    copy = tmp_path / "dataset"
    subprocess.run(["cp", "-r", world.run / "dataset", copy], check=True)
    dataset = TrajectoryDataset.open(copy)
    subprocess.run(["rm", "-r", copy], check=True)
    with pytest.raises(MobatlasError, match="dataset: the dataset folder was removed"):
        dataset.labels()
    with pytest.raises(MobatlasError, match="dataset: the dataset folder was removed"):
        dataset.person_groups()
