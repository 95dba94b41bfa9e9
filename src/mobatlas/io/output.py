"""Folders and files that appear whole or not at all, and folders that one process after another fills.

A folder is written as a hidden sibling and renamed when it is complete; a lock beside it keeps a second process out and
ends with the process, so that what a killed one left behind is simply swept away by the next.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mobatlas.errors import MobatlasError
from mobatlas.io.manifest import (
    MANIFEST,
    METADATA,
    Manifest,
    beside,
    sync,
    write_json,
    write_manifest,
)

log = logging.getLogger("mobatlas")
BEGUN = "begun.json"  # marks a folder that a process of ours began to fill


@dataclass
class NewFolder:
    """A folder being written; `details` may be filled until it is complete."""

    path: Path
    details: dict[str, Any] = field(default_factory=dict)
    unlisted: set[str] = field(default_factory=set)

    def scratch(self) -> Path:
        """A place for intermediate files, gone when the folder appears."""
        scratch = self.path / ".scratch"
        scratch.mkdir(exist_ok=True)
        return scratch


@contextmanager
def new_folder(
    out: Path,
    kind: str,
    *,
    seed: int | None = None,
    config: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> Iterator[NewFolder]:
    """Write a folder: the caller fills `path`, and `out` appears when the block ends without an error."""
    out = _absolute(out)
    _refuse_existing(out, kind, overwrite)
    with lock_output(out):
        _come_back(out)
        _refuse_existing(out, kind, overwrite)
        partial = beside(out, "partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            folder = NewFolder(partial)
            yield folder
            shutil.rmtree(partial / ".scratch", ignore_errors=True)
            manifest = Manifest(
                kind, seed, config or {}, folder.details, unlisted=tuple(sorted(folder.unlisted))
            )
            write_manifest(partial, manifest)
            _refuse_existing(out, kind, overwrite)
            _replace(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def resumable_folder(
    out: Path,
    kind: str,
    *,
    names: Iterable[str] = (),
    seed: int | None = None,
    config: dict[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Iterator[NewFolder]:
    """A folder that is filled in full view, by several processes one after the other; its manifest makes it one of its kind.

    `names` are the files and folders that it may hold; what else lies there is somebody else's. What lies in
    `checkpoint_folder(out)` is for going on, and goes when the block ends without an error. An error that leaves nothing there takes
    the folder away again, and what was overwritten comes back.
    """
    out, names = _absolute(out), frozenset(names)
    with lock_output(out):
        _come_back(out)
        _forget_unbegun(out)
        begun = (checkpoint_folder(out) / BEGUN).is_file()
        if begun and not resume:
            _refuse_begun(out, names, overwrite)
        elif not begun:
            _refuse_existing(out, kind, overwrite)
        if not (begun and resume):
            _step_aside(out)
        folder = NewFolder(out)
        try:
            checkpoint_folder(out).mkdir(parents=True, exist_ok=True)
            write_json(checkpoint_folder(out) / BEGUN, {"kind": kind})
            yield folder
            for name in _foreign(out, names):
                log.warning(
                    "%s: holds %s, which is no part of the %s and stays as it is", out, name, kind
                )
            manifest = Manifest(
                kind, seed, config or {}, folder.details, unlisted=tuple(sorted(folder.unlisted))
            )
            write_manifest(out, manifest, names)
        except BaseException as error:
            if _nothing_came_of(out, names):
                shutil.rmtree(out, ignore_errors=True)
                _come_back(out)
                raise
            shutil.rmtree(beside(out, "replaced"), ignore_errors=True)
            if isinstance(error, KeyboardInterrupt):
                raise MobatlasError("stopped; continue with --resume") from None
            raise
        _sweep(out)


@contextmanager
def new_file(out: Path, overwrite: bool) -> Iterator[Path]:
    """Write a Parquet file: the caller fills a hidden sibling, and `out` appears when the block ends without an error."""
    out = _absolute(out)
    _refuse_existing_file(out, overwrite)
    with lock_output(out):
        partial = beside(out, "partial")
        try:
            yield partial
            sync(partial)
            _refuse_existing_file(out, overwrite)
            partial.replace(out)
            sync(out.parent)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def lock_output(out: Path) -> Iterator[None]:
    """Keep a second process from writing there meanwhile; folders above are made, and go again if nothing comes of it."""
    out = _absolute(out)
    with _parents(out), _lock(out):
        yield


def checkpoint_folder(out: Path) -> Path:
    """Where a resumable folder keeps what it needs to go on."""
    return out / "training"


def is_complete(out: Path) -> bool:
    """Whether a resumable folder was filled to the end; sweeps up what a process killed at the very end left."""
    out = _absolute(out)
    if not (out / MANIFEST).is_file():
        return False
    if any(
        path.exists()
        for path in (checkpoint_folder(out), beside(out, "lock"), beside(out, "replaced"))
    ):
        with _lock(out):
            _sweep(out)
    return True


def refuse_overlap(source: Path, out: Path) -> None:
    """Refuse to write over what is being read."""
    read, written = source.resolve(), out.resolve()
    if read == written or written in read.parents or read in written.parents:
        raise MobatlasError(f"{out}: lies over the source {source}; choose an --out apart from it")


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100


def _refuse_place(out: Path) -> None:
    if out.is_symlink():
        raise MobatlasError(f"{out}: is a symbolic link; give the folder itself as --out")
    if Path.cwd() == out or out in Path.cwd().parents:
        raise MobatlasError(f"{out}: is the folder you are in, or above it; choose another --out")


def _refuse_begun(out: Path, names: frozenset[str], overwrite: bool) -> None:
    """What was begun stays, unless it is to be overwritten and nobody added to it."""
    _refuse_place(out)
    if not overwrite:
        raise MobatlasError(
            f"{out}: was begun and not finished; pass --resume to go on or --overwrite to start anew"
        )
    _refuse_foreign(out, _foreign(out, names))


def _refuse_foreign(out: Path, foreign: list[str]) -> None:
    if foreign:
        raise MobatlasError(
            f"{out}: holds {foreign[0]}, which mobatlas did not write; move it before you --overwrite"
        )


def _foreign(out: Path, names: frozenset[str]) -> list[str]:
    """What a begun folder holds beside what it should, half-written or not."""
    ours = names | {MANIFEST, checkpoint_folder(out).name}
    ours |= {beside(out / name, "partial").name for name in ours}
    return sorted(path.name for path in out.iterdir() if path.name not in ours)


def _nothing_came_of(out: Path, names: frozenset[str]) -> bool:
    """Whether a begun folder holds nothing to go on from, and nothing of somebody else's."""
    kept = checkpoint_folder(out).glob("[!.]*")  # hidden files are half-written
    return all(path.name == BEGUN for path in kept) and not (out.exists() and _foreign(out, names))


def _refuse_existing(out: Path, kind: str, overwrite: bool) -> None:
    """What is there stays, unless it is a folder of this kind that we wrote and nobody added to."""
    _refuse_place(out)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise MobatlasError(f"{out}: exists already; choose another --out or pass --overwrite")
    try:
        old = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        ours = (
            isinstance(old, dict)
            and isinstance(old["files"], dict)
            and isinstance(old["format"], int)
        )
        known = {MANIFEST, *old["files"], *old.get("unlisted", ())}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        ours, old, known = False, {}, set()
    if not ours:
        raise MobatlasError(f"{out}: was not written by mobatlas, so --overwrite leaves it alone")
    if old.get("kind") != kind:
        raise MobatlasError(
            f"{out}: is a {old.get('kind')} folder, not a {kind} folder, so --overwrite leaves it alone"
        )
    added = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    _refuse_foreign(out, [name for name in added if name not in known])


def _refuse_existing_file(out: Path, overwrite: bool) -> None:
    """What is there stays, unless it is a file with our metadata."""
    if out.is_dir():
        raise MobatlasError(
            f"{out}: is a folder; give a file, such as {out / 'samples.parquet'}, as --out"
        )
    if out.exists() and not overwrite:
        raise MobatlasError(f"{out}: exists already; choose another --out or pass --overwrite")
    try:
        ours = not out.exists() or METADATA in (pq.read_metadata(out).metadata or {})
    except (OSError, pa.ArrowInvalid):
        ours = False
    if not ours:
        raise MobatlasError(f"{out}: was not written by mobatlas, so --overwrite leaves it alone")


@contextmanager
def _parents(out: Path) -> Iterator[None]:
    """Make the folders above; take the new ones away again if nothing comes of it."""
    missing = [parent for parent in out.parents if not parent.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MobatlasError(
            f"--out {out}: {out.parent} cannot be made ({error.strerror})"
        ) from None
    try:
        yield
    finally:
        for parent in missing:
            with suppress(OSError):  # not empty: something came of it
                parent.rmdir()


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    path = beside(out, "lock")
    try:
        handle = path.open("w")
    except OSError as error:
        raise MobatlasError(f"--out {out}: cannot be written there ({error.strerror})") from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the process that held it may have removed the file between our open and our lock
            if not path.exists() or path.stat().st_ino != os.fstat(handle.fileno()).st_ino:
                raise BlockingIOError
        except OSError:
            raise MobatlasError(
                f"{out}: another mobatlas process is writing it; wait for it or choose another --out"
            ) from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _replace(partial: Path, out: Path) -> None:
    """Rename into place; an old folder steps aside first and goes only when the new one is there."""
    _step_aside(out)
    partial.rename(out)
    sync(out.parent)
    shutil.rmtree(beside(out, "replaced"), ignore_errors=True)


def _step_aside(out: Path) -> None:
    if out.exists():
        shutil.rmtree(beside(out, "replaced"), ignore_errors=True)  # of a killed process
        out.rename(beside(out, "replaced"))


def _come_back(out: Path) -> None:
    """Undo `_step_aside`, if nothing took the place."""
    if beside(out, "replaced").exists() and not out.exists():
        beside(out, "replaced").rename(out)


def _forget_unbegun(out: Path) -> None:
    """Remove the empty folders of a process that was killed before it could say that it began."""
    if not (checkpoint_folder(out) / BEGUN).is_file():
        with suppress(OSError):  # not there, or something is in it
            beside(checkpoint_folder(out) / BEGUN, "partial").unlink(missing_ok=True)
            checkpoint_folder(out).rmdir()
            out.rmdir()


def _sweep(out: Path) -> None:
    """Remove what a finished folder does not need, the marker last: after a kill in between the next run knows it as ours."""
    shutil.rmtree(beside(out, "replaced"), ignore_errors=True)
    folder = checkpoint_folder(out)
    if (folder / BEGUN).is_file():
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != BEGUN:
                path.unlink()
        (folder / BEGUN).unlink()
    with suppress(OSError):  # gone already, or not ours
        folder.rmdir()
