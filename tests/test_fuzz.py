"""Damaged and hostile files of every format: read, or refused in one sentence, and never run."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mobatlas.config import load_run, parse_assignments
from mobatlas.data.prepare.tables import csv_header
from mobatlas.errors import MobatlasError
from mobatlas.io.manifest import read_manifest, refuse_corrupt
from mobatlas.pipeline.run import StepCache
from tests.breaking import ALIASES, MARK, RUNS, YAML
from tests.faults import VALUES, World, tiny_world
from tests.fuzz import FAULTY, GUARD, MEMORY, SECONDS, TARGETS, attempt
from tests.malice import Malice

numbers = st.integers(0, 2**32)
bounded = settings(
    max_examples=2,
    derandomize=True,
    phases=[Phase.generate],
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return tiny_world(tmp_path_factory.getbasetemp())


def check(world: World, name: str, number: int) -> None:
    with TemporaryDirectory(prefix="mobatlas-case-") as here:
        _, wrong = attempt(world, TARGETS[name], number, Path(here))
    assert wrong is None, f"{name}, case {number}: {wrong}"


@pytest.mark.parametrize("name", TARGETS)
@bounded
@given(number=numbers)
def test_a_broken_file_is_read_or_refused(world: World, name: str, number: int) -> None:
    check(world, name, number)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@settings(bounded, max_examples=30)
@given(number=numbers)
def test_many_broken_files_are_read_or_refused(world: World, name: str, number: int) -> None:
    check(world, name, number)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("json: run, evaluation, audit, metrics", 6),  # an interval without its estimate
        ("parquet: visits, people, pois", 7),  # a page that does not decompress
        ("parquet: samples", 8),  # a column twice
        ("csv: embee", 12),  # nobody
        ("plt: geolife", 17),  # bytes that are no text
        ("parquet: visits, people, pois", 22),  # times where numbers are due
        ("json, safetensors: model folder", 26),  # weights that are no numbers
        ("parquet: regions folder", 29),  # words where numbers are due
        ("parquet: regions folder", 30),  # tables that do not fit each other
        ("manifest: dataset", 31),  # a word where a number is due
        ("parquet: composition, aggregates", 2_460_485_812),  # bytes that are no text
        (
            "json, safetensors: model folder",
            362_770,
        ),  # a calibration that does not say how far its means were
        ("json, safetensors: model folder", 45_726),  # and one whose features are no names
    ],
)
def test_what_was_once_not_refused(world: World, name: str, number: int) -> None:
    check(world, name, number)


HARM = {
    "pickle.find_class": f"import pickle; pickle.loads({pickle.dumps(Malice(Path(MARK)))!r})",
    "os.system": "os.system('true')",
    "subprocess.Popen": "import subprocess; subprocess.run('true')",
    "compile": f"eval({RUNS!r})",
}


@pytest.mark.parametrize("event", HARM)
def test_the_guard_of_these_tests_sees_code_that_runs(
    world: World, tmp_path: Path, event: str
) -> None:
    before = GUARD.format(
        more=MEMORY, seconds=SECONDS, workdir=str(tmp_path), mark=MARK, faulty=FAULTY
    )
    ended = world.warm.run("--version", before=before + HARM[event])
    assert (ended.code, event in ended.err) == (FAULTY, True), ended.err
    assert list(tmp_path.iterdir()) == []


def test_the_guard_of_these_tests_sees_a_hang_and_a_memory_blow_up(
    world: World, tmp_path: Path
) -> None:
    before = GUARD.format(more=2**26, seconds=1, workdir=str(tmp_path), mark=MARK, faulty=FAULTY)
    assert world.warm.run("--version", before=before + "while True: pass").code < 0
    assert world.warm.run("--version", before=before + "bytearray(2**30)").code != 0


@pytest.mark.parametrize(
    "text", [pytest.param(text, id=str(n)) for n, text in enumerate(YAML) if text != ALIASES]
)
def test_hostile_yaml_is_refused_before_anything_is_made_of_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(MobatlasError) as caught:
        load_run(tmp_path / "run.yaml")
    assert "\n" not in str(caught.value) and "run.yaml" in str(caught.value)
    assert not Path(MARK).exists()


@pytest.mark.parametrize("value", ["!!bool x", "[" * 3_000, "&a [*a]", "!!python/name:os.system"])
def test_hostile_yaml_in_an_option_is_refused(value: str) -> None:
    with pytest.raises(MobatlasError, match="not a value that YAML can read"):
        parse_assignments([f"window.days={value}"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b"x" * 2**20),
        ("a.csv.gz", gzip.compress(b"x" * 2**26)),
        ("a.csv.gz", gzip.compress(b"a,b\n1,2\n")[:12]),
        ("a.csv.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + bytes(range(200))),
        ("a.csv", b'"' + b"x" * 200_000),
    ],
    ids=["endless", "a bomb", "cut short", "no deflate", "a quote"],
)
def test_a_first_line_without_an_end_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MobatlasError, match=name):
        csv_header(tmp_path / name)


@pytest.mark.parametrize(
    "change",
    [
        {"config": []},
        {"details": "x"},
        {"unlisted": 3},
        {"unlisted": [{}]},
        {"versions": []},
        {"seed": "0"},
        {"files": None},
    ],
)
def test_a_manifest_of_other_types_is_refused(
    world: World, tmp_path: Path, change: dict[str, Any]
) -> None:
    shutil.copytree(world.run / "regions" / "demogroups", tmp_path / "regions")
    manifest = tmp_path / "regions" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    with pytest.raises(MobatlasError, match="not a valid manifest"):
        read_manifest(tmp_path / "regions", "regions")


def test_a_manifest_that_lists_an_impossible_name_is_refused(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.run / "regions" / "demogroups", tmp_path / "regions")
    manifest = tmp_path / "regions" / "manifest.json"
    values = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(values | {"files": {"x" * 5_000: {"sha256": "", "bytes": 0}}}))
    with pytest.raises(MobatlasError, match="is missing"):
        read_manifest(tmp_path / "regions", "regions")


@pytest.mark.parametrize("text", ["[]", '{"dataset": 3}', "[" * 100_000, "\x00"])
def test_stages_that_cannot_be_read_are_made_again(tmp_path: Path, text: str) -> None:
    (tmp_path / "steps.json").write_text(text)
    made: list[bool] = []
    StepCache(tmp_path).run("dataset", tmp_path / "dataset", {}, made.append)
    assert made == [False]


def test_what_goes_wrong_in_a_folder_of_ours_is_one_sentence_and_a_full_disk_is_not_taken_for_it(
    tmp_path: Path,
) -> None:
    for error in (
        KeyError("x"),
        pa.ArrowInvalid("x"),
        OSError("of Arrow"),
        IndexError(),
        RecursionError(),
    ):
        with (
            pytest.raises(MobatlasError, match="is damaged or was not written by mobatlas"),
            refuse_corrupt(tmp_path),
        ):
            raise error
    with pytest.raises(OSError, match="No space"), refuse_corrupt(tmp_path):
        raise OSError(28, "No space left on device")


SCRIPT, IMAGE, GROUP = (
    "<script>alert('poi')</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(2)>',
)
WAY, REGION = "<b onmouseover=alert(3)>", "<iframe src=javascript:alert(4)>"


class Elements(HTMLParser):
    """Which elements a page has, and with which attributes."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: set[tuple[str, str]] = set()
        self.scripts, self.text = 0, ""
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.found |= {(tag, name) for name, _ in attrs} | {(tag, "")}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_names_from_data_are_text_in_the_report(world: World, tmp_path: Path) -> None:
    """Of places, categories, groups, regions, ways to know them, and the run itself."""
    (tmp_path / "city").mkdir()
    for name in ("visits", "people", "pois"):
        table = pq.read_table(world.run / "city" / f"{name}.parquet").to_pandas()
        if "poi_id" in table:
            table["poi_id"] = table["poi_id"].where(
                table["poi_id"].isna(), table["poi_id"].astype(str) + SCRIPT
            )
            table["category"] = IMAGE
        if "gender" in table:
            table["gender"] = table["gender"].replace("M", GROUP)
            table["home_district"] = REGION + table["home_district"].astype(str)
        table.to_parquet(tmp_path / "city" / f"{name}.parquet")
    values = {key: value for key, value in VALUES.items() if key != "simulate"} | {
        "title": f"</title>{SCRIPT}",
        "source": {"path": "city"},
        "regions": {WAY: {"by": "home_district"}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    done = world.warm.run("run", tmp_path / "run.yaml", "--out", tmp_path / "out", "--quiet")
    assert done.code == 0, done.err
    usual, hostile = Elements(world.run / "report.html"), Elements(tmp_path / "out" / "report.html")
    assert hostile.found <= usual.found
    assert hostile.scripts == usual.scripts
    for name in (SCRIPT, GROUP, WAY):
        assert name in hostile.text
