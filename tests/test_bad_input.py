"""Bad input gives exit code 2 and one sentence that names the file, column or option."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mobatlas import MobatlasError, prepare
from mobatlas.data.prepare.people import PeopleColumns
from tests.logs import VISITS, Visit, write_visits

VALUES: dict[str, Any] = {
    "window": {"days": 1, "stride": 1},
    "quality": {"min_coverage": 0.0},
    "anchors": {"infer": "never", "require_both": False},
}
HEADER = "user_id,poi_id,lat,lon,arrival,departure"
GOOD = "a,p,40.0,-74.0,2024-03-04 08:00:00,2024-03-04 09:00:00"


def refused(tmp_path: Path, lines: list[str], header: str = HEADER, **changes: Any) -> str:
    """The sentence with which a CSV file is refused, after a check that nothing was written."""
    source = tmp_path / "visits.csv"
    source.write_text("\n".join([header, *lines]) + "\n")
    with pytest.raises(MobatlasError) as caught:
        prepare(source, tmp_path / "dataset", values=VALUES | changes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["visits.csv"]
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("engine", ["duckdb", "spark"])
def test_a_missing_file_is_refused_before_an_engine_starts(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mobatlas.data.prepare.pipeline.open_engine", lambda *_: pytest.fail("it started")
    )
    with pytest.raises(MobatlasError, match=r"nowhere\.parquet: no such file or folder"):
        prepare(tmp_path / "nowhere.parquet", tmp_path / "dataset", engine=engine)


def test_a_folder_without_visits(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    with pytest.raises(MobatlasError, match=r"contains no visits\.parquet or visits\.csv"):
        prepare(tmp_path / "raw", tmp_path / "dataset")


def test_a_missing_column_names_the_nearest(tmp_path: Path) -> None:
    sentence = refused(tmp_path, [GOOD], header=HEADER.replace("poi_id", "poiid"))
    assert "visits.csv: column 'poi_id' is missing; did you mean 'poiid'?" in sentence


@pytest.mark.parametrize(
    "time", ["yesterday", "2024-02-30 10:00:00", "2024-03-04 08:00:00Z", "04/03/2024", "1709539200"]
)
def test_an_unparsable_time_is_shown(tmp_path: Path, time: str) -> None:
    sentence = refused(tmp_path, [GOOD, f"b,p,40.0,-74.0,{time},"])
    assert "'arrival'" in sentence
    assert f"arrival '{time}'" in sentence
    assert "1 of 2 rows" in sentence


def test_latitude_95(tmp_path: Path) -> None:
    sentence = refused(tmp_path, [GOOD, "b,p,95,-74.0,2024-03-04 08:00:00,"])
    assert "column 'lat' is outside -90..90" in sentence
    assert "lat '95'" in sentence


def test_an_infinite_longitude(tmp_path: Path) -> None:
    assert "column 'lon' is outside" in refused(tmp_path, [GOOD, "b,p,40,inf,2024-03-04 08:00:00,"])


def test_a_coordinate_that_is_a_word(tmp_path: Path) -> None:
    assert "'lat' and 'lon' are not numbers" in refused(
        tmp_path, [GOOD, "b,p,north,-74,2024-03-04 08:00:00,"]
    )


def test_a_departure_before_arrival(tmp_path: Path) -> None:
    sentence = refused(tmp_path, [GOOD, "b,p,40,-74,2024-03-04 08:00:00,2024-03-04 07:59:59"])
    assert "column 'departure' is before 'arrival'" in sentence
    assert "user_id 'b'" in sentence


def test_a_stay_of_a_thousand_years(tmp_path: Path) -> None:
    assert "longer than max_stay_days = 60" in refused(
        tmp_path, ["b,p,40,-74,2024-03-04 08:00:00,3024-03-04 08:00:00"]
    )


def test_a_row_without_a_user_or_a_time(tmp_path: Path) -> None:
    assert "column 'user_id' is empty" in refused(
        tmp_path, [GOOD, ",p,40,-74,2024-03-04 08:00:00,"]
    )
    assert "column 'arrival' is empty" in refused(tmp_path, [GOOD, "b,p,40,-74,,"])


def test_coordinates_missing_above_a_share(tmp_path: Path) -> None:
    missing = ["b,p,nan,-74,2024-03-04 08:00:00,", "b,p,40,,2024-03-04 08:00:00,"]
    sentence = refused(tmp_path, [GOOD, *missing])
    assert "missing in 2 of 3 rows" in sentence
    assert "max_missing_coordinates = 0.2" in sentence


def test_coordinates_missing_below_the_share_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [
        Visit("a", "p", f"2024-03-{day:02d} 08:00", lat=float("nan") if day == 9 else 40.0)
        for day in range(1, 11)
    ]
    summary = prepare(write_visits(tmp_path / "raw", rows), tmp_path / "dataset", values=VALUES)
    assert summary.rows.missing_coordinates == 1
    assert summary.windows.kept == 9


def test_invalid_rows_can_be_dropped_and_counted(tmp_path: Path) -> None:
    source = tmp_path / "visits.csv"
    source.write_text(
        "\n".join([HEADER, GOOD, "b,p,95,-74,2024-03-04 08:00:00,", "b,p,40,-74,noon,"]) + "\n"
    )
    summary = prepare(source, tmp_path / "dataset", values=VALUES | {"invalid_rows": "drop"})
    assert (summary.rows.invalid, summary.windows.kept) == (2, 1)


def test_rows_that_are_not_pois_are_dropped_and_counted(tmp_path: Path) -> None:
    source = tmp_path / "visits.csv"
    source.write_text("\n".join([HEADER, GOOD, "b,,40,-74,2024-03-04 08:00:00,"]) + "\n")
    summary = prepare(source, tmp_path / "dataset", values=VALUES)
    assert summary.rows.not_poi == 1


def test_an_empty_result_says_why_with_counts_and_what_to_do(tmp_path: Path) -> None:
    sentence = refused(tmp_path, [GOOD], quality={})
    assert "no window passed the quality rule: 1 windows of 1 days were dropped" in sentence
    assert "1 with too few well-covered days" in sentence
    assert "lower quality.min_coverage" in sentence
    check_ins = refused(
        tmp_path, ["a,p,40.0,-74.0,2024-03-04 08:00:00,"], quality={"min_coverage": 0.2}
    )
    assert "the source has no departures: set quality.min_coverage=0" in check_ins
    lonely = refused(tmp_path, [GOOD], anchors={"infer": "never"})
    assert "anchors.require_both=false" in lonely


def test_every_row_is_counted_once(tmp_path: Path) -> None:
    rows = [
        GOOD,
        GOOD,
        "b,p,north,-74,2024-03-04 08:00:00,",
        "b,,40,-74,2024-03-04 08:00:00,2024-03-04 07:00:00",
    ]
    rows += ["b,p,,-74,2024-03-04 08:00:00,", "b,,40,-74,2024-03-04 08:00:00,"]
    source = tmp_path / "visits.csv"
    source.write_text("\n".join([HEADER, *rows]) + "\n")
    summary = prepare(source, tmp_path / "dataset", values=VALUES | {"invalid_rows": "drop"})
    counted = summary.rows
    assert (counted.rows, counted.invalid, counted.missing_coordinates, counted.not_poi) == (
        6,
        2,
        1,
        1,
    )
    assert summary.duplicates == 1


@pytest.mark.parametrize("word", ["HOME", "OTHER", "<pad>"])
def test_a_place_may_not_be_called_like_a_token(tmp_path: Path, word: str) -> None:
    assert "'poi_id' uses a reserved word" in refused(
        tmp_path, [GOOD, f"b,{word},40,-74,2024-03-04 08:00:00,"]
    )


def test_a_flag_that_is_neither_true_nor_false(tmp_path: Path) -> None:
    sentence = refused(tmp_path, [f"{GOOD},oui"], header=f"{HEADER},is_home")
    assert "'is_home' and 'is_work' are neither true nor false" in sentence
    assert "is_home 'oui'" in sentence


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_csv_is_read_alike_however_it_is_separated_and_wherever_it_is_quoted(
    tmp_path: Path, separator: str
) -> None:
    lines = [separator.join(HEADER.split(","))]
    lines += [
        separator.join(f"a,p,40,-74,2024-03-{day:02d} 08:00:00,".split(",")) for day in range(1, 29)
    ] * 100
    lines.append(
        separator.join(
            ["a", f'"caf\u00e9{separator} ""bar"""', "40", "-74", "2024-03-29 08:00:00", ""]
        )
    )
    source = tmp_path / "visits.csv"
    source.write_bytes(("\ufeff" + "\r\n".join(lines) + "\r\n").encode())
    prepare(
        source, tmp_path / "dataset", values=VALUES | {"split": {"train": 1, "val": 0, "test": 0}}
    )
    names = pq.read_table(tmp_path / "dataset" / "vocabulary.parquet")["poi_id"].to_pylist()
    assert names[7:] == ["p", f'caf\u00e9{separator} "bar"']


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (f"{HEADER}\n{GOOD}\na,p,40\n".encode(), "not a readable CSV file.*Line: 3"),
        (
            f"{HEADER}\n{GOOD}\nb,caf\u00e9,40,-74,2024-03-04,\n".encode("latin-1"),
            "not a readable CSV file in UTF-8",
        ),
        (f"{HEADER}\n{GOOD}\n".encode("utf-16"), "not a readable CSV file in UTF-8"),
        (b"\n", "the first line has no column names"),
        (b"user_id,user_id\n", "two columns are called 'user_id'"),
    ],
)
def test_a_broken_csv_is_named(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "visits.csv").write_bytes(content)
    with pytest.raises(MobatlasError, match=rf"visits\.csv: .*{sentence}"):
        prepare(tmp_path / "visits.csv", tmp_path / "dataset", values=VALUES)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"anchors": {"night": [30, 6]}}, "less than or equal to 24"),
        ({"quality": {"max_day_km": float("inf")}}, "finite number"),
        ({"memory_limit": "1MB"}, "memory_limit '1MB' is too little"),
    ],
)
def test_values_that_cannot_work_are_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(MobatlasError, match=sentence):
        prepare(
            write_visits(tmp_path / "raw", [Visit("a", "p", "2024-03-04 08:00")]),
            tmp_path / "ds",
            values=VALUES | changes,
        )


def test_a_preset_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(MobatlasError, match="did you mean 'small'"):
        prepare(tmp_path, tmp_path / "ds", preset="smal")


def test_the_source_is_never_written_over(tmp_path: Path) -> None:
    raw = write_visits(tmp_path / "raw", [Visit("a", "p", "2024-03-04 08:00")])
    for source, out in ((raw, raw), (raw / "visits.parquet", raw), (raw, raw / "inside")):
        with pytest.raises(MobatlasError, match="overlaps with the source"):
            prepare(source, out, values=VALUES, overwrite=True)
    assert (raw / "visits.parquet").exists()


def test_an_empty_table(tmp_path: Path) -> None:
    assert "visits.csv: the table has no rows" in refused(tmp_path, [])


def test_a_time_zone_is_refused(tmp_path: Path) -> None:
    table = pa.table(
        {
            "user_id": ["a"],
            "poi_id": ["p"],
            "lat": [1.0],
            "lon": [1.0],
            "arrival": pa.array([datetime(2024, 3, 4)], pa.timestamp("us", "UTC")),
        }
    )
    pq.write_table(table, tmp_path / "visits.parquet")
    with pytest.raises(
        MobatlasError, match="'arrival' has the time zone UTC; convert it to naive local time"
    ):
        prepare(tmp_path / "visits.parquet", tmp_path / "dataset", values=VALUES)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "the file is empty"), (b"PAR1 not really", "not a readable Parquet file")],
)
def test_a_file_that_is_not_parquet(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "visits.parquet").write_bytes(content)
    with pytest.raises(MobatlasError, match=sentence):
        prepare(tmp_path / "visits.parquet", tmp_path / "dataset", values=VALUES)


def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    raw = write_visits(tmp_path / "raw", [Visit("a", "p", "2024-03-04 08:00")])
    table = pq.read_table(raw / "visits.parquet")
    pq.write_table(table.append_column("lat", table["lat"]), raw / "visits.parquet")
    with pytest.raises(
        MobatlasError, match=r"visits\.parquet: two columns are called 'lat'; rename one"
    ):
        prepare(raw, tmp_path / "dataset", values=VALUES)


def test_a_parquet_file_that_is_damaged_inside_is_named(tmp_path: Path) -> None:
    raw = write_visits(
        tmp_path / "raw", [Visit("a", f"p{n}", f"2024-03-04 08:{n:02}") for n in range(60)]
    )
    path = raw / "visits.parquet"
    pq.write_table(pq.read_table(path), path, compression="snappy", use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(0).column(1)
    content = bytearray(path.read_bytes())
    end = column.data_page_offset + column.total_compressed_size
    content[end - 40 : end] = b"\xff" * 40
    path.write_bytes(content)
    with pytest.raises(
        MobatlasError, match=rf"^{path}: the data is damaged or not Parquet \(.*\)$"
    ):
        prepare(raw, tmp_path / "dataset", values=VALUES)
    assert not (tmp_path / "dataset").exists()


def with_people(tmp_path: Path, people: dict[str, list[Any]]) -> Path:
    raw = write_visits(
        tmp_path / "raw", [Visit(user, "p", "2024-03-04 08:00") for user in ("a", "b")]
    )
    pq.write_table(pa.table(people), raw / "people.parquet")
    return raw


@pytest.mark.parametrize(
    ("people", "changes", "sentence"),
    [
        ({"id": ["a"]}, {}, "column 'user_id' is missing"),
        (
            {"user_id": ["A", "B"], "age": ["<30", "<30"]},
            {},
            "2 of 2 people .* another form of user_id here .people have 'A', visits have 'a'",
        ),
        (
            {"user_id": pa.array([], pa.string())},
            {},
            r"people\.parquet: the table has no rows; leave it out",
        ),
        (
            {"user_id": ["a"], "home_lat": ["n/a"]},
            {},
            "column 'home_lat' is not a valid coordinate in 1 rows",
        ),
        ({"user_id": ["a", "a"]}, {}, "'user_id' is empty or repeated"),
        ({"user_id": ["a"], "home_lat": [95.0]}, {}, "column 'home_lat' is not a valid coordinate"),
        (
            {"user_id": ["a"], "age": ["<30"]},
            {"attributes": ["agee"]},
            "no column 'agee'; did you mean 'age'",
        ),
        (
            {"user_id": ["a"], "age": ["<30"]},
            {"attributes": {"age": ["young"]}},
            "has '<30', which is not among",
        ),
        (
            {"user_id": ["a"], "age": [None]},
            {"attributes": ["age"]},
            "column 'age' is empty for all people",
        ),
        (
            {"user_id": ["a"], "age": ["x"]},
            {"attributes": ["age"], "regions": ["age"]},
            "both as an attribute and",
        ),
    ],
)
def test_a_wrong_people_table(
    tmp_path: Path, people: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(MobatlasError, match=sentence):
        prepare(with_people(tmp_path, people), tmp_path / "dataset", values=VALUES | changes)
    assert not (tmp_path / "dataset").exists()


def test_columns_without_a_declared_use_stay_with_the_labels(tmp_path: Path) -> None:
    people: dict[str, list[Any]] = {
        "user_id": ["a", "b"],
        "age": ["<30", None],
        "income": ["low", "high"],
        "home_zone": [1, 2],
    }
    summary = prepare(with_people(tmp_path, people), tmp_path / "dataset", values=VALUES)
    assert summary.columns == PeopleColumns(("age",), ("home_zone",), ("income",))
    assert "income" not in pq.read_schema(tmp_path / "dataset" / "people.parquet").names
    assert "income" in pq.read_schema(tmp_path / "dataset" / "labels.parquet").names


def mobatlas(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mobatlas", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_command_line_answers_with_one_sentence_and_code_2(tmp_path: Path) -> None:
    rows = [Visit("a", "p", "2024-03-04 08:00").row()]
    pq.write_table(pa.Table.from_pylist(rows, VISITS), tmp_path / "visits.parquet")
    options = (
        "--set",
        "window.days=1",
        "--set",
        "quality.min_coverage=0",
        "--set",
        "anchors.require_both=false",
    )
    done = mobatlas("prepare", "visits.parquet", "--out", "ds", "--json", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["windows"]["kept"] == 1

    again = mobatlas("prepare", "visits.parquet", "--out", "ds", *options, cwd=tmp_path)
    assert again.returncode == 2
    assert (
        again.stderr.strip()
        .splitlines()[-1]
        .endswith("ds: this output exists already; choose another --out or pass --overwrite")
    )

    wrong = mobatlas(
        "prepare", "visits.parquet", "--out", "x", "--format", "foursqare", cwd=tmp_path
    )
    assert (wrong.returncode, "did you mean 'foursquare'?" in wrong.stderr) == (2, True)
    assert "Traceback" not in wrong.stderr
    assert not (tmp_path / "x").exists()


def test_a_misspelt_section_is_refused_by_prepare_too(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("prepar: {window: {days: 1}}\n")
    done = mobatlas("prepare", "visits.csv", "--out", "ds", "--config", "run.yaml", cwd=tmp_path)
    assert (done.returncode, "did you mean 'prepare'?" in done.stderr) == (2, True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_tidies_up_and_says_so(tmp_path: Path, number: int, code: int) -> None:
    command = [
        sys.executable,
        "-m",
        "mobatlas",
        "simulate",
        "--out",
        "city",
        "--users",
        "2000000",
        "--quiet",
    ]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while (
        not (tmp_path / ".city.partial" / "people.parquet").exists() and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.strip().splitlines()[-1]) == (
        code,
        "mobatlas: stopped; no incomplete file was left",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_of_another_version_is_refused(tmp_path: Path) -> None:
    from mobatlas import TrajectoryDataset

    prepare(
        write_visits(tmp_path / "raw", [Visit("a", "p", "2024-03-04 08:00")]),
        tmp_path / "dataset",
        values=VALUES,
    )
    manifest = json.loads((tmp_path / "dataset" / "manifest.json").read_text())
    (tmp_path / "dataset" / "manifest.json").write_text(json.dumps(manifest | {"format": 0}))
    with pytest.raises(MobatlasError, match="written by another version"):
        TrajectoryDataset.open(tmp_path / "dataset")
