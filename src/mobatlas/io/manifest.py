"""What a folder says of itself in manifest.json, and the JSON and Parquet files that folders are made of."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mobatlas.errors import MobatlasError, out_of_memory

FORMAT = 2  # of the folders; a folder of another format is refused, not guessed at
MANIFEST = "manifest.json"
METADATA = b"mobatlas"  # the key under which a Parquet file of ours says what made it
LIBRARIES = (
    "mobatlas",
    "diffusers",
    "duckdb",
    "ibis-framework",
    "numpy",
    "pyarrow",
    "torch",
    "transformers",
)
HASHED_ON_LOAD = 256 * 2**20  # larger files are checked by size alone when they are opened
ROWS_PER_GROUP = 262_144


@dataclass(frozen=True)
class Manifest:
    """What a folder holds and what made it."""

    kind: str
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)  # what this kind of folder says of itself
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> {sha256, bytes}
    versions: dict[str, str] = field(default_factory=dict)
    unlisted: tuple[
        str, ...
    ] = ()  # files that may change or go without making the folder another one

    @property
    def content_hash(self) -> str:
        """One hash of all files: the identity of the folder's content."""
        lines = "\n".join(f"{name} {entry['sha256']}" for name, entry in sorted(self.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()


def read_manifest(folder: Path, kind: str) -> Manifest:
    """The manifest of a folder of that kind, after a check that its files are the ones it lists."""
    if not folder.exists():
        raise MobatlasError(f"{folder}: no such {kind} folder")
    try:
        values = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise MobatlasError(f"{folder}: not a {kind} folder, it has no {MANIFEST}") from None
    except (OSError, ValueError, RecursionError):
        raise MobatlasError(
            f"{folder / MANIFEST}: not a valid manifest; make the folder again"
        ) from None
    if not _is_manifest(values):
        raise MobatlasError(f"{folder / MANIFEST}: not a valid manifest; make the folder again")
    if values["format"] != FORMAT:
        version = (values.get("versions") or {}).get("mobatlas", "unknown")
        raise MobatlasError(
            f"{folder}: made by another version (mobatlas {version}, folder format {values['format']}; this one reads "
            f"format {FORMAT}); make it again"
        )
    if values.get("kind") != kind:
        raise MobatlasError(f"{folder}: is a {values.get('kind')} folder, not a {kind} folder")
    _check_files(folder, values["files"])
    return Manifest(
        kind=kind,
        seed=values.get("seed"),
        config=values.get("config") or {},
        details=values.get("details") or {},
        files=values["files"],
        versions=values.get("versions") or {},
        unlisted=tuple(values.get("unlisted") or ()),
    )


@contextmanager
def refuse_corrupt(path: Path) -> Iterator[None]:
    """Read what mobatlas wrote; what somebody else made of it is refused in one sentence, whatever reading trips over."""
    try:
        yield
    except OSError as error:
        if error.errno is not None or out_of_memory(
            error
        ):  # of the disk or the machine, not of Arrow
            raise
        raise _meddled(path) from error
    except (
        pa.ArrowException,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        if out_of_memory(error):
            raise
        raise _meddled(path) from error


def _meddled(path: Path) -> MobatlasError:
    return MobatlasError(f"{path}: does not hold what mobatlas writes there; make it again")


def _is_manifest(values: Any) -> bool:
    """Whether it has the parts of a manifest, each of its type."""
    types = {
        "files": dict,
        "config": dict,
        "details": dict,
        "versions": dict,
        "unlisted": list,
        "seed": int,
    }
    return (
        isinstance(values, dict)
        and {"files", "format"} <= values.keys()
        and all(isinstance(values.get(name), (kind, type(None))) for name, kind in types.items())
        and values["files"] is not None
        and all(isinstance(name, str) for name in values.get("unlisted") or ())
    )


def write_manifest(folder: Path, manifest: Manifest, names: frozenset[str] | None = None) -> None:
    """Write the manifest of a folder that holds the files of these names, or all there are."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        if names is not None and name.parts[0] not in names:
            continue
        sync(path)
        if name.as_posix() not in manifest.unlisted:
            files[name.as_posix()] = {"sha256": file_hash(path), "bytes": path.stat().st_size}
    write_json(
        folder / MANIFEST,
        {
            "format": FORMAT,
            "kind": manifest.kind,
            "versions": library_versions(),
            "seed": manifest.seed,
            "config": manifest.config,
            "details": manifest.details,
            "files": files,
            "unlisted": list(manifest.unlisted),
        },
    )


def write_json(path: Path, value: Any) -> None:
    """Pretty, stable JSON, on disk before it has its name."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str)
    write_atomic(path, f"{text}\n".encode())


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all, even if the machine stops."""
    partial = beside(path, "partial")
    try:
        with partial.open("wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def read_parquet(
    path: Path, columns: Sequence[str] | None = None, *, memory_map: bool = False
) -> pa.Table:
    """A Parquet file without Arrow's threads: where memory does not suffice to start one, its scanner waits for ever."""
    with pq.ParquetFile(path, memory_map=memory_map) as file:
        table = file.read(columns=None if columns is None else list(columns), use_threads=False)
    # in their order; one that is missing is a KeyError
    return table if columns is None else table.select(list(columns))


def write_parquet(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    """Stream batches to Parquet in row groups of one size, so that equal rows give equal bytes however they came."""
    rows = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in rechunk(batches, schema, ROWS_PER_GROUP):
            writer.write_table(table, row_group_size=ROWS_PER_GROUP)
            rows += table.num_rows
    return rows


def rechunk(batches: Iterable[pa.RecordBatch], schema: pa.Schema, rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of exactly `rows`, the last one shorter."""
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        waiting.append(batch)
        count += batch.num_rows
        if count >= rows:
            table = pa.Table.from_batches(waiting, schema)
            whole = count - count % rows
            for start in range(0, whole, rows):
                yield table.slice(start, rows).combine_chunks()
            waiting = table.slice(whole).to_batches()
            count -= whole
    if count:
        yield pa.Table.from_batches(waiting, schema).combine_chunks()


def library_versions() -> dict[str, str]:
    """What made a folder or a figure."""
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in LIBRARIES
    }


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def beside(path: Path, what: str) -> Path:
    """The hidden sibling where what is half-written, replaced or locked is kept."""
    return path.with_name(f".{path.name}.{what}")


def sync(path: Path) -> None:
    """Wait until the disk has it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_files(folder: Path, files: dict[str, Any]) -> None:
    for name, entry in files.items():
        path = folder / name
        if (
            not isinstance(entry, dict)
            or {"sha256", "bytes"} - entry.keys()
            or ".." in Path(name).parts
            or Path(name).is_absolute()
        ):
            raise MobatlasError(f"{folder / MANIFEST}: not a valid manifest; make the folder again")
        try:
            there = path.is_file()
        except OSError:  # no file can have such a name
            there = False
        if not there:
            raise MobatlasError(
                f"{folder}: the file {name[:100]} is missing; make the folder again"
            )
        size = path.stat().st_size
        if size != entry["bytes"] or (
            size <= HASHED_ON_LOAD and file_hash(path) != entry["sha256"]
        ):
            raise MobatlasError(
                f"{path}: is not the file that {MANIFEST} lists (changed or cut short); make the folder again"
            )
