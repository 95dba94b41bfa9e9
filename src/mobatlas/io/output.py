"""Output folders and files that appear complete or not at all.

A new folder is written as a hidden sibling and renamed when it is complete. A resumable folder is
filled in place, and several processes may continue it one after another. A lock file next to
the output keeps other processes out. The lock is released when its process ends or is killed.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from mobatlas.errors import MobatlasError, log
from mobatlas.io.manifest import (
    MANIFEST,
    METADATA,
    Manifest,
    create_file,
    hidden_sibling,
    is_manifest,
    refuse_links,
    sync,
    write_json,
    write_manifest,
)

MARKER = "unfinished.json"  # in the checkpoint folder, while an output folder is unfinished
SCRATCH = ".scratch"
EXISTS = "this output exists already; choose another --out or pass --overwrite"
FOREIGN = (
    "this was not written by mobatlas, or an older version left it unfinished; "
    "delete it yourself or choose another --out"
)


@dataclass
class NewFolder:
    """A folder that is being written, with the `details` and `unlisted` of its manifest."""

    path: Path
    details: dict[str, Any] = field(default_factory=dict)
    unlisted: set[str] = field(default_factory=set)

    def scratch(self) -> Path:
        """A folder for intermediate files; it is deleted when the output is complete."""
        scratch = self.path / SCRATCH
        scratch.mkdir(exist_ok=True)
        return scratch

    def manifest(self, kind: str, seed: int | None, config: dict[str, Any] | None) -> Manifest:
        """The manifest of the complete folder."""
        return Manifest(
            kind, seed, config or {}, self.details, unlisted=tuple(sorted(self.unlisted))
        )


@contextmanager
def new_folder(
    out: Path,
    kind: str,
    *,
    seed: int | None = None,
    config: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> Iterator[NewFolder]:
    """Write a folder that appears as `out` when the block ends without an error."""
    out = _absolute(out)
    _check_replaceable(out, kind, overwrite)
    with lock_output(out):
        _restore_backup(out)
        _check_replaceable(out, kind, overwrite)
        partial = hidden_sibling(out, "partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            folder = NewFolder(partial)
            yield folder
            shutil.rmtree(partial / SCRATCH, ignore_errors=True)
            write_manifest(partial, folder.manifest(kind, seed, config))
            _check_replaceable(out, kind, overwrite)
            _backup(out)
            partial.rename(out)
            sync(out.parent)
            _delete_backup(out)
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
    """Write a folder in place; an interrupted process leaves checkpoints to resume from.

    Without an error, the manifest is written and the checkpoints are deleted. After an error
    without any checkpoint, the folder is removed and an overwritten one restored.

    Parameters
    ----------
    out
        The folder to write.
    names
        The files and folders that belong to it. Others are reported and never deleted.
    kind, seed, config
        Entries of the manifest.
    resume
        Continue an unfinished folder.
    overwrite
        Replace a folder of this kind, finished or not.
    """
    out = _absolute(out)
    known_names = frozenset(names)
    with lock_output(out):
        _check_place(out)
        _restore_backup(out)
        _remove_unmarked_attempt(out)
        is_unfinished = _marker(out).is_file()
        if not is_unfinished:
            _check_replaceable(out, kind, overwrite)
        elif not resume:
            _check_unfinished(out, known_names, overwrite)
        if not (is_unfinished and resume):
            _backup(out)
        folder = NewFolder(out)
        try:
            checkpoint_folder(out).mkdir(parents=True, exist_ok=True)
            write_json(_marker(out), {"kind": kind})
            yield folder
            for name in _foreign_names(out, known_names):
                log.warning("%s: %s is not part of the %s and is left as it is", out, name, kind)
            write_manifest(out, folder.manifest(kind, seed, config), known_names)
        except BaseException as error:
            if _is_empty_attempt(out, known_names):
                shutil.rmtree(out, ignore_errors=True)
                _restore_backup(out)
            else:
                _delete_backup(out)
                if isinstance(error, KeyboardInterrupt):
                    raise MobatlasError("stopped; continue with --resume") from None
            raise
        _remove_checkpoints(out)


@contextmanager
def new_file(out: Path, overwrite: bool, starts: tuple[bytes, ...] = ()) -> Iterator[Path]:
    """Write a file that appears as `out` when the block ends without an error.

    `overwrite` replaces a Parquet file of mobatlas, or a file with one of these starts.
    """
    out = _absolute(out)
    check_replaceable_file(out, overwrite, starts)
    with lock_output(out):
        partial = hidden_sibling(out, "partial")
        create_file(partial)
        try:
            yield partial
            sync(partial)
            check_replaceable_file(out, overwrite, starts)
            partial.replace(out)
            sync(out.parent)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def lock_output(out: Path) -> Iterator[None]:
    """Keep other processes from writing `out`; create its parents, and remove them if unused."""
    out = _absolute(out)
    lock = hidden_sibling(out, "lock")
    refuse_links(*(hidden_sibling(out, suffix) for suffix in ("lock", "partial", "replaced")))
    created = [parent for parent in out.parents if not parent.exists()]
    try:
        with _acquire(out, lock):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
    finally:
        for parent in created:
            with suppress(OSError):  # the folder is in use
                parent.rmdir()


def _acquire(out: Path, lock: Path) -> TextIO:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        handle = os.fdopen(descriptor, "w")
    except OSError as error:
        raise MobatlasError(
            f"--out {out}: {out.parent} cannot be created or written to ({error.strerror})"
        ) from None
    with suppress(OSError):  # another process holds the lock
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last owner may have deleted the file between our open and our lock.
        if os.path.samestat(lock.stat(), os.fstat(handle.fileno())):
            return handle
    handle.close()
    raise MobatlasError(
        f"{out}: another mobatlas process is writing it; wait for it or choose another --out"
    )


def checkpoint_folder(out: Path) -> Path:
    """The folder of the checkpoints of a resumable folder."""
    return out / "training"


def is_complete(out: Path) -> bool:
    """Whether a resumable folder is complete; also removes leftovers of a killed process."""
    out = _absolute(out)
    if not (out / MANIFEST).is_file():
        return False
    leftovers = [hidden_sibling(out, "lock"), hidden_sibling(out, "replaced")]
    if any(path.exists() for path in (checkpoint_folder(out), *leftovers)):
        with lock_output(out):
            _remove_checkpoints(out)
    return True


def refuse_overlap(source: Path, out: Path) -> None:
    """Refuse an output that contains its source or is inside it."""
    read = source.resolve()
    written = out.resolve()
    if read == written or written in read.parents or read in written.parents:
        raise MobatlasError(
            f"{out}: this output overlaps with the source {source}; choose another --out"
        )


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100


def _marker(out: Path) -> Path:
    return checkpoint_folder(out) / MARKER


def _check_place(out: Path) -> None:
    if out.is_symlink():
        raise MobatlasError(f"{out}: this is a symbolic link; give the folder itself as --out")
    if Path.cwd() == out or out in Path.cwd().parents:
        raise MobatlasError(
            f"{out}: this is the current folder or one of its parents; choose another --out"
        )
    refuse_links(*out.rglob("*"))


def _check_replaceable(out: Path, kind: str, overwrite: bool) -> None:
    """Refuse an existing folder unless `overwrite` is set and mobatlas wrote all its files."""
    _check_place(out)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise MobatlasError(f"{out}: {EXISTS}")
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        manifest = None
    if not is_manifest(manifest):
        raise MobatlasError(f"{out}: {FOREIGN}")
    if manifest.get("kind") != kind:
        raise MobatlasError(
            f"{out}: this is a {manifest.get('kind')} folder, not a {kind} folder, so --overwrite "
            "does not replace it; choose another --out"
        )
    known = {MANIFEST, *manifest["files"], *(manifest.get("unlisted") or ())}
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    _refuse_foreign_files(out, [name for name in files if name not in known])


def _check_unfinished(out: Path, names: frozenset[str], overwrite: bool) -> None:
    """Refuse an unfinished folder unless `overwrite` is set and mobatlas wrote all its files."""
    if not overwrite:
        raise MobatlasError(
            f"{out}: this folder is unfinished; pass --resume to continue it or --overwrite to "
            "start over"
        )
    _refuse_foreign_files(out, _foreign_names(out, names))


def check_replaceable_file(out: Path, overwrite: bool, starts: tuple[bytes, ...] = ()) -> None:
    """Refuse an existing file unless `overwrite` is set and mobatlas wrote the file."""
    if out.is_dir():
        raise MobatlasError(
            f"{out}: this is a folder; give a file, such as {out / 'samples.parquet'}, as --out"
        )
    if not out.exists():
        return
    if not overwrite:
        raise MobatlasError(f"{out}: {EXISTS}")
    with out.open("rb") as file:
        if file.read(max(map(len, starts), default=0)).startswith(starts):
            return
    try:
        metadata = pq.read_metadata(out).metadata or {}
    except (OSError, pa.ArrowInvalid):
        metadata = {}
    if METADATA not in metadata:
        raise MobatlasError(f"{out}: {FOREIGN}")


def _refuse_foreign_files(out: Path, foreign: list[str]) -> None:
    if foreign:
        raise MobatlasError(
            f"{out}: the folder contains {foreign[0]}, which mobatlas did not write; move it "
            "elsewhere before you pass --overwrite"
        )


def _foreign_names(out: Path, names: frozenset[str]) -> list[str]:
    """The files and folders in an unfinished folder that are not part of it."""
    known = names | {MANIFEST, checkpoint_folder(out).name}
    known |= {hidden_sibling(out / name, "partial").name for name in known}
    return sorted(path.name for path in out.iterdir() if path.name not in known)


def _is_empty_attempt(out: Path, names: frozenset[str]) -> bool:
    """Whether an unfinished folder has no checkpoint and no foreign file."""
    visible = checkpoint_folder(out).glob("[!.]*")  # hidden files are partial
    return all(path.name == MARKER for path in visible) and not (
        out.exists() and _foreign_names(out, names)
    )


def _remove_unmarked_attempt(out: Path) -> None:
    """Remove the empty folders of a process that was killed before it wrote the marker."""
    if not _marker(out).is_file():
        with suppress(OSError):  # they do not exist or are not empty
            hidden_sibling(_marker(out), "partial").unlink(missing_ok=True)
            checkpoint_folder(out).rmdir()
            out.rmdir()


def _backup(out: Path) -> None:
    """Rename an existing folder, so that it can be restored."""
    if out.exists():
        _delete_backup(out)
        out.rename(hidden_sibling(out, "replaced"))


def _restore_backup(out: Path) -> None:
    if not out.exists():
        with suppress(FileNotFoundError):
            hidden_sibling(out, "replaced").rename(out)


def _delete_backup(out: Path) -> None:
    shutil.rmtree(hidden_sibling(out, "replaced"), ignore_errors=True)


def _remove_checkpoints(out: Path) -> None:
    """Remove files that only an unfinished folder needs.

    The marker is removed last, so that the next run can finish the removal after a kill.
    """
    _delete_backup(out)
    folder = checkpoint_folder(out)
    refuse_links(folder)
    if _marker(out).is_file():
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path != _marker(out):
                path.unlink()
        _marker(out).unlink()
    with suppress(OSError):  # it is gone, or contains foreign files
        folder.rmdir()
