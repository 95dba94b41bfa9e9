from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mobatlas import MobatlasError
from mobatlas.io.manifest import read_manifest, rechunk
from mobatlas.io.output import checkpoint_folder, is_complete, new_folder, resumable_folder


def write(out: Path, text: str = "hello", overwrite: bool = False) -> None:
    with new_folder(out, "thing", seed=7, config={"a": 1}, overwrite=overwrite) as folder:
        (folder.path / "file.txt").write_text(text)
        (folder.scratch() / "heavy.tmp").write_text("gone in the end")
        folder.details["answer"] = 42


def test_a_folder_appears_with_its_manifest_and_without_scratch(tmp_path: Path) -> None:
    write(tmp_path / "out")
    manifest = read_manifest(tmp_path / "out", "thing")
    assert (manifest.seed, manifest.config, manifest.details) == (7, {"a": 1}, {"answer": 42})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "file.txt",
        "manifest.json",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "out", "thing") as folder:
        (folder.path / "file.txt").write_text("half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_the_same_content_has_the_same_manifest(tmp_path: Path) -> None:
    write(tmp_path / "one")
    write(tmp_path / "two")
    assert (tmp_path / "one" / "manifest.json").read_bytes() == (
        tmp_path / "two" / "manifest.json"
    ).read_bytes()


def test_an_existing_folder_needs_overwrite(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    with pytest.raises(MobatlasError, match=r"exists already.*--overwrite"):
        write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "file.txt").read_text() == "old"
    write(tmp_path / "out", "new", overwrite=True)
    assert (tmp_path / "out" / "file.txt").read_text() == "new"


def test_overwrite_never_deletes_what_mobatlas_did_not_write(tmp_path: Path) -> None:
    precious = tmp_path / "home" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("years of work")
    with pytest.raises(MobatlasError, match="not written by mobatlas"):
        write(tmp_path / "home", overwrite=True)
    assert precious.read_text() == "years of work"


def test_overwrite_leaves_another_programs_manifest_alone(tmp_path: Path) -> None:
    (tmp_path / "webapp").mkdir()
    (tmp_path / "webapp" / "manifest.json").write_text('{"name": "my web app"}')
    with pytest.raises(MobatlasError, match="not written by mobatlas"):
        write(tmp_path / "webapp", overwrite=True)


def test_overwrite_leaves_a_folder_of_another_kind_or_with_other_files_alone(
    tmp_path: Path,
) -> None:
    write(tmp_path / "out")
    with (
        pytest.raises(MobatlasError, match="is a thing folder, not a model folder"),
        new_folder(tmp_path / "out", "model", overwrite=True),
    ):
        pass
    (tmp_path / "out" / "notes.md").write_text("mine")
    with pytest.raises(MobatlasError, match=r"contains notes\.md, which mobatlas did not write"):
        write(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "notes.md").read_text() == "mine"


def test_the_folder_one_stands_in_and_a_link_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(MobatlasError, match="is the current folder"):
        write(Path())
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MobatlasError, match="symbolic link"):
        write(tmp_path / "link")


def test_a_failure_takes_new_parent_folders_away_again(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "new" / "deep" / "out", "thing"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "new" / "deep" / "out")
    assert (tmp_path / "new" / "deep" / "out" / "file.txt").exists()


def test_an_error_during_overwrite_keeps_the_old_folder(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "out", "thing", overwrite=True):
        raise ZeroDivisionError
    assert (tmp_path / "out" / "file.txt").read_text() == "old"


def fill(
    out: Path, text: str = "new", failure: BaseException | None = None, at: str = "", **options: Any
) -> None:
    """Fill a folder that can be resumed, or fail after the checkpoint of that name."""
    with resumable_folder(out, "thing", names=["file.txt"], **options) as folder:
        if at:
            (checkpoint_folder(out) / at).write_text("for going on")
        if failure:
            raise failure
        (folder.path / "file.txt").write_text(text)


def test_an_overwritten_folder_is_restored_if_the_attempt_leaves_no_checkpoint(
    tmp_path: Path,
) -> None:
    fill(tmp_path / "out", "old")
    for failure in (ZeroDivisionError(), KeyboardInterrupt()):
        with pytest.raises(type(failure)):
            fill(tmp_path / "out", failure=failure, at=".half.partial", overwrite=True)
        assert (tmp_path / "out" / "file.txt").read_text() == "old"
        assert is_complete(tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
    fill(tmp_path / "out", "new", overwrite=True)
    assert (tmp_path / "out" / "file.txt").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_overwritten_folder_is_deleted_once_there_is_a_checkpoint(tmp_path: Path) -> None:
    fill(tmp_path / "out", "old")
    with pytest.raises(MobatlasError, match="stopped; continue with --resume"):
        fill(tmp_path / "out", failure=KeyboardInterrupt(), at="step-1", overwrite=True)
    assert not is_complete(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "out",
        "step-1",
        "training",
        "unfinished.json",
    ]
    fill(tmp_path / "out", "new", resume=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file.txt", "manifest.json", "out"]


def test_a_backup_is_restored_after_a_kill(tmp_path: Path) -> None:
    fill(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / ".out.replaced")
    with pytest.raises(MobatlasError, match="exists already"):
        fill(tmp_path / "out")
    assert (tmp_path / "out" / "file.txt").read_text() == "old"


def test_a_foreign_file_in_an_unfinished_folder_is_left_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, notes = tmp_path / "out", tmp_path / "out" / "notes.md"
    with pytest.raises(ZeroDivisionError):
        fill(out, failure=ZeroDivisionError(), at="step-1")
    notes.write_text("mine")
    refused = pytest.raises(
        MobatlasError, match=r"contains notes\.md, which mobatlas did not write"
    )
    with refused:
        fill(out, overwrite=True)
    fill(out, resume=True)
    assert "notes.md is not part of the thing" in caplog.text
    assert list(read_manifest(out, "thing").files) == ["file.txt"]
    with refused:
        fill(out, overwrite=True)
    assert notes.read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "no manifest.json"),
        ("{", "not a valid manifest"),
        ("[1, 2]", "not a valid manifest"),
        (
            '{"format": 2, "kind": "thing", "files": {"../escape": {"sha256": "", "bytes": 0}}}',
            "not a valid manifest",
        ),
        (
            '{"format": 99, "kind": "thing", "files": {}, "versions": {"mobatlas": "9.0"}}',
            "another version .mobatlas 9.0",
        ),
        (
            '{"format": 1, "kind": "thing", "files": {}, "versions": {"mobatlas": "0.1.0"}}',
            "folder format 1.*this version reads format 2; create the folder again",
        ),
        ('{"format": 3, "kind": "model", "files": {}}', "is a model folder, not a thing folder"),
        (
            '{"format": 2, "kind": "model", "files": {}}',
            "folder format 2.*this version reads format 3; create the folder again",
        ),
        (
            '{"format": 2, "kind": "thing", "files": {"gone.txt": {"sha256": "", "bytes": 0}}}',
            "gone.txt is missing",
        ),
    ],
)
def test_a_folder_without_a_valid_manifest_is_refused(
    tmp_path: Path, content: str | None, sentence: str
) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(MobatlasError, match=sentence):
        read_manifest(tmp_path, "thing")


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "out", "hello")
    (tmp_path / "out" / "file.txt").write_text("hallo")
    with pytest.raises(MobatlasError, match=r"file\.txt: the file differs from its entry"):
        read_manifest(tmp_path / "out", "thing")


SLOW_WRITER = """
import sys, time
from pathlib import Path
from typing import Any
from mobatlas.io.output import new_folder
with new_folder(Path(sys.argv[1]), "thing") as folder:
    (folder.path / "file.txt").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def slow_writer(out: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, str(out)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_a_second_writer_is_refused_and_a_killed_one_leaves_no_obstacle(tmp_path: Path) -> None:
    process = slow_writer(tmp_path / "out")
    try:
        with pytest.raises(MobatlasError, match="another mobatlas process is writing it"):
            write(tmp_path / "out")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert not (tmp_path / "out").exists()
    deadline = time.monotonic() + 10
    while (tmp_path / "out").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    write(tmp_path / "out", "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_manifests_hold_no_time_and_no_path(tmp_path: Path) -> None:
    write(tmp_path / "out")
    text = (tmp_path / "out" / "manifest.json").read_text()
    assert str(tmp_path) not in text
    assert set(json.loads(text)) == {
        "format",
        "kind",
        "discloses",
        "versions",
        "seed",
        "config",
        "details",
        "files",
        "unlisted",
    }


@given(sizes=st.lists(st.integers(0, 9), max_size=12), rows=st.integers(1, 7))
def test_rechunking_keeps_the_rows_and_gives_equal_pieces(sizes: list[int], rows: int) -> None:
    schema = pa.schema([("n", pa.int64())])
    values = list(range(sum(sizes)))
    batches, start = [], 0
    for size in sizes:
        batches.append(
            pa.record_batch([pa.array(values[start : start + size], pa.int64())], schema=schema)
        )
        start += size
    tables = list(rechunk(batches, schema, rows))
    assert [value for table in tables for value in table["n"].to_pylist()] == values
    assert all(table.num_rows == rows for table in tables[:-1])
    assert all(0 < table.num_rows <= rows for table in tables)
