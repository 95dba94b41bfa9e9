from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mobatlas import CityConfig, MobatlasError, TrajectoryDataset, prepare, write_city_folder
from mobatlas.config import SplitConfig
from mobatlas.data.dataset import split_by_hash
from mobatlas.data.prepare.sequences import PIECES, whole_trajectories
from mobatlas.data.types import FIRST_POI, HOME, PAD
from mobatlas.io.manifest import read_manifest, write_manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("city")
    write_city_folder(root / "city", CityConfig(users=400, days=14), seed=1)
    prepare(root / "city", root / "dataset", preset="small")
    return root / "dataset"


@pytest.fixture(scope="module")
def dataset(folder: Path) -> TrajectoryDataset:
    return TrajectoryDataset.open(folder)


def test_sequences_are_the_long_table(dataset: TrajectoryDataset, folder: Path) -> None:
    rows = pq.read_table(folder / "trajectories.parquet").to_pylist()
    users = dataset.people["user_id"].to_pylist()
    expected: dict[tuple[str, int], list[int]] = {}
    for row in rows:
        expected.setdefault((row["user_id"], row["window"]), []).append(row["token"])
    found = {
        (users[dataset.person[i]], int(dataset.window[i])): dataset.trajectory(i).tolist()
        for i in range(len(dataset))
    }
    assert found == expected
    assert len(dataset) > 500


def test_no_person_is_in_two_splits(dataset: TrajectoryDataset) -> None:
    people = [
        set(dataset.person[dataset.split(name)].tolist()) for name in ("train", "val", "test")
    ]
    assert not people[0] & people[1]
    assert not people[0] & people[2]
    assert not people[1] & people[2]
    assert sum(map(len, people)) == dataset.people.num_rows


def test_the_split_is_a_stable_function_of_the_user_id() -> None:
    """The hashes of bob, mallory and zoe are 62f0dcf4, d7771d8e and e7071a26.

    They are those of `md5sum` for "mobatlas:bob"; the borders are cccccccd and e6666666.
    """
    codes = split_by_hash([f"u{number:06d}" for number in range(20_000)], SplitConfig())
    shares = np.bincount(codes) / len(codes)
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.01)
    assert split_by_hash(["bob", "mallory", "zoe"], SplitConfig()).tolist() == [0, 1, 2]


def test_batches_are_a_function_of_seed_and_step(dataset: TrajectoryDataset, folder: Path) -> None:
    later = TrajectoryDataset.open(folder)
    one = dataset.order("train", 32, seed=3, step=11)
    for step in range(5):
        later.order("train", 32, seed=3, step=step)
    two = later.order("train", 32, seed=3, step=11)
    assert np.array_equal(one, two)
    assert np.array_equal(dataset.gather(one), later.gather(two))
    assert not np.array_equal(one, dataset.order("train", 32, seed=4, step=11))
    assert not np.array_equal(one, dataset.order("train", 32, seed=3, step=12))


def test_an_epoch_shows_every_trajectory_once(dataset: TrajectoryDataset) -> None:
    members = dataset.split("val")
    size = 7
    steps = -(-2 * len(members) // size)
    seen = np.concatenate([dataset.order("val", size, seed=0, step=step) for step in range(steps)])
    assert sorted(seen[: len(members)].tolist()) == members.tolist()
    assert sorted(seen[len(members) : 2 * len(members)].tolist()) == members.tolist()


def test_a_batch_is_padded_after_the_end_and_truncated_on_request(
    dataset: TrajectoryDataset,
) -> None:
    batch = dataset.gather([0, 5, 3])
    for row, index in enumerate((0, 5, 3)):
        tokens = dataset.trajectory(index)
        assert batch[row, : len(tokens)].tolist() == tokens.tolist()
        assert (batch[row, len(tokens) :] == PAD).all()
    short = dataset.gather([0, 5, 3], max_length=2)
    assert short.shape[1] <= 2
    assert (short != PAD).sum(1).tolist() == [min(2, int(dataset.lengths[i])) for i in (0, 5, 3)]


def test_people_hold_no_attribute_and_labels_are_apart(
    dataset: TrajectoryDataset, folder: Path
) -> None:
    assert set(pq.read_schema(folder / "people.parquet").names) == {
        "user_id", "home_lat", "home_lon", "work_lat", "work_lon", "home_district",
    }  # fmt: skip
    labels = dataset.labels()
    assert labels is not None
    assert set(labels.column_names) == {"user_id", "age", "gender"}
    assert labels["user_id"].to_pylist() == dataset.people["user_id"].to_pylist()
    assert set(np.unique(dataset.person_groups())) == set(range(8))


def test_a_dataset_without_its_labels_is_the_same_dataset(
    dataset: TrajectoryDataset, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "labels.parquet").unlink()
    bare = TrajectoryDataset.open(tmp_path / "copy")
    assert bare.manifest.content_hash == dataset.manifest.content_hash
    assert bare.labels() is None
    with pytest.raises(MobatlasError, match="has no labels"):
        bare.person_groups()


def test_labels_belong_to_people_in_whatever_order_they_are_stored(
    dataset: TrajectoryDataset, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    labels = pq.read_table(folder / "labels.parquet")
    pq.write_table(labels.sort_by("age").slice(100), tmp_path / "copy" / "labels.parquet")
    groups = TrajectoryDataset.open(tmp_path / "copy").person_groups()
    assert np.count_nonzero(groups == -1) == 100
    assert np.array_equal(groups[groups >= 0], dataset.person_groups()[groups >= 0])


def test_trajectories_count_from_the_end_too_and_no_further(dataset: TrajectoryDataset) -> None:
    assert dataset.trajectory(-1).tolist() == dataset.trajectory(len(dataset) - 1).tolist()
    for index in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError):
            dataset.trajectory(index)
    with pytest.raises(IndexError):
        dataset.gather([-1])


def test_the_vocabulary_comes_from_training_people(
    dataset: TrajectoryDataset, folder: Path
) -> None:
    visits = pq.read_table(folder.parent / "city" / "visits.parquet").to_pandas()
    people = dataset.people["user_id"].to_pylist()
    everybody = sorted(set(visits["user_id"]))
    train = {
        user
        for user, code in zip(everybody, split_by_hash(everybody, SplitConfig()), strict=True)
        if code == 0
    }
    worker = {
        row["user_id"]
        for row in pq.read_table(folder.parent / "city" / "people.parquet").to_pylist()
        if row["work_lat"]
    }
    assert set(people) <= worker
    pois = visits[visits["user_id"].isin(train & worker) & ~visits["is_home"] & ~visits["is_work"]]
    counts = pois["poi_id"].value_counts()
    table = dataset.vocabulary.table.to_pandas().iloc[FIRST_POI:]
    assert table["visits"].tolist() == [int(counts[poi]) for poi in table["poi_id"]]
    assert table["visits"].is_monotonic_decreasing
    assert np.isnan(dataset.vocabulary.coordinates[HOME]).all()


def test_the_sequences_are_memory_mapped(dataset: TrajectoryDataset) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not list its maps")
    _ = dataset.trajectory(0)
    assert "sequences.arrow" in maps.read_text()


def tampered(folder: Path, tmp_path: Path, change: str) -> Path:
    """The manifest is right and the splits are wrong: only the check at load can notice."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    splits = pq.read_table(copy / "splits.parquet").to_pandas()
    if change == "moved":
        splits.loc[0, "split"] = "test" if splits.loc[0, "split"] == "train" else "train"
    else:
        splits.loc[1, "user_id"] = splits.loc[0, "user_id"]
    pq.write_table(pa.Table.from_pandas(splits, preserve_index=False), copy / "splits.parquet")
    manifest = read_manifest(folder, "dataset")
    (copy / "manifest.json").unlink()
    write_manifest(copy, manifest)
    return copy


@pytest.mark.parametrize("change", ["moved", "doubled"])
def test_a_person_in_the_wrong_split_is_noticed_at_load(
    folder: Path, tmp_path: Path, change: str
) -> None:
    with pytest.raises(MobatlasError, match="prepare the dataset again"):
        TrajectoryDataset.open(tampered(folder, tmp_path, change))


def test_the_summary_is_stored_and_adds_up(dataset: TrajectoryDataset, folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert (
        sum(split["trajectories"] for split in summary["splits"].values())
        == len(dataset)
        == summary["windows"]["kept"]
    )
    lengths = dataset.lengths[dataset.split("train")]
    train = summary["splits"]["train"]
    assert train["length_median"] == np.quantile(lengths, 0.5, method="inverted_cdf")
    assert train["length_p95"] == np.quantile(lengths, 0.95, method="inverted_cdf")
    tokens = np.concatenate([dataset.trajectory(i) for i in dataset.split("train")])
    pois = tokens[tokens >= 6]
    assert train["vocabulary_coverage"] == pytest.approx((pois > 6).mean())


def test_rows_are_cut_only_between_trajectories() -> None:
    users = [0, 0, 0, 1, 1, 2, 2, 2, 2]
    windows = [0, 0, 1, 0, 0, 0, 0, 0, 0]
    columns = [users, windows, *([0] * 9 for _ in range(3))]
    table = pa.table(
        [pa.array(values, field.type) for values, field in zip(columns, PIECES, strict=True)],
        schema=PIECES,
    )
    pieces = list(whole_trajectories(table.slice(start, 2) for start in range(0, 9, 2)))
    keys = [
        set(zip(piece["user"].to_pylist(), piece["window"].to_pylist(), strict=True))
        for piece in pieces
    ]
    assert pa.concat_tables(pieces).equals(table)
    assert sum(map(len, keys)) == 4


def test_times_go_in_step_with_tokens(dataset: TrajectoryDataset) -> None:
    arrivals, departures = dataset.all_times()
    assert len(arrivals) == len(departures) == dataset.lengths.sum()
    assert (arrivals <= departures).all()
    first = arrivals[: dataset.lengths[0]].tolist()
    assert first == sorted(first)
    some = np.arange(5)
    width = dataset.lengths[:5].max()
    padded = np.zeros((len(some), width), np.int64)
    padded[np.arange(width) < dataset.lengths[:5, None]] = arrivals[: dataset.lengths[:5].sum()]
    assert np.array_equal(dataset.gather_times(some)[0], padded)
