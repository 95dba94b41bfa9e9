"""manifest.json of a folder, and the JSON and Parquet files in it."""

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

FORMAT = 2  # of folders; other formats are refused
FORMATS = {"model": 3}  # where it differs; before 3, models held the homes of people
DISCLOSES = {
    "dataset": "Everything: people with their ids, homes, workplaces, trajectories and labels.",
    "regions": "Counts and means by region; where known, the ids of people with their regions.",
    "model": "No home, workplace, id or trajectory of a person, unless the pool of an external "
    "generator has them; cells of homes and workplaces with 10 or more people each, means of "
    "groups, and weights, which may have learnt rare behaviour: audit samples before sharing.",
}
MANIFEST = "manifest.json"
METADATA = b"mobatlas"  # the key of our metadata in a Parquet file
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
HASHED_ON_LOAD = 256 * 2**20  # bytes; of larger files only the size is checked on load
ROWS_PER_GROUP = 262_144
# Files that mobatlas may read, unlike a user's notes: the manifest lists them, except for those
# that people may change (labels) or that nothing reads (logs, and what a killed process left).
READ_SUFFIXES = frozenset({".json", ".jsonl", ".parquet", ".arrow", ".safetensors"})
MAY_CHANGE = {"dataset": ("labels.parquet",), "model": ("metrics.jsonl", "training")}
SNAPSHOTS = "snapshots"  # weights of a model during training; they are checked, but not content
_TYPES = {
    "format": int,
    "files": dict,
    "config": dict,
    "details": dict,
    "versions": dict,
    "unlisted": list,
    "seed": int,
}


@dataclass(frozen=True)
class Manifest:
    """The contents of a folder and their origin."""

    kind: str
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)  # facts specific to this kind of folder
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> {sha256, bytes}
    versions: dict[str, str] = field(default_factory=dict)
    unlisted: tuple[str, ...] = ()  # files that are not hashed, such as logs

    @property
    def content_hash(self) -> str:
        """One hash of all files, which identifies the content of the folder."""
        lines = "\n".join(
            f"{name} {entry['sha256']}"
            for name, entry in sorted(self.files.items())
            if not name.startswith(f"{SNAPSHOTS}/")
        )
        return hashlib.sha256(lines.encode()).hexdigest()


def read_manifest(folder: Path, kind: str) -> Manifest:
    """Read the manifest of a folder and check its kind, its format and its files."""
    if not folder.exists():
        raise MobatlasError(f"{folder}: no such {kind} folder")
    try:
        values = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise MobatlasError(f"{folder}: this is not a {kind} folder (no {MANIFEST})") from None
    except (OSError, ValueError, RecursionError):
        values = None
    if not is_manifest(values):
        raise _invalid(folder)
    if values["format"] != (known := FORMATS.get(values.get("kind"), FORMAT)):
        version = (values.get("versions") or {}).get("mobatlas", "unknown")
        raise MobatlasError(
            f"{folder}: this folder was written by another version (mobatlas {version}, folder "
            f"format {values['format']}), and this version reads format {known}; create the "
            "folder again"
        )
    if values.get("kind") != kind:
        raise MobatlasError(f"{folder}: this is a {values.get('kind')} folder, not a {kind} folder")
    _check_files(folder, values["files"])
    _check_complete(folder, kind, values["files"])
    return Manifest(
        kind=kind,
        seed=values.get("seed"),
        config=values.get("config") or {},
        details=values.get("details") or {},
        files=values["files"],
        versions=values.get("versions") or {},
        unlisted=tuple(values.get("unlisted") or ()),
    )


def is_manifest(values: Any) -> bool:
    """Whether a JSON value has the parts of a manifest, each of the right type."""
    return (
        isinstance(values, dict)
        and all(isinstance(values.get(name), (kind, type(None))) for name, kind in _TYPES.items())
        and values.get("files") is not None
        and values.get("format") is not None
        and all(isinstance(name, str) for name in values.get("unlisted") or ())
    )


def _invalid(folder: Path) -> MobatlasError:
    return MobatlasError(
        f"{folder / MANIFEST}: this is not a valid manifest; create the folder again"
    )


def _check_files(folder: Path, files: dict[str, Any]) -> None:
    for name, entry in files.items():
        path = folder / name
        if (
            not isinstance(entry, dict)
            or {"sha256", "bytes"} - entry.keys()
            or ".." in Path(name).parts
            or Path(name).is_absolute()
        ):
            raise _invalid(folder)
        if name.startswith(f"{SNAPSHOTS}/") and not path.exists():
            continue  # the user may delete them
        if not os.path.isfile(path):  # noqa: PTH113 - False for a name that no file can have
            raise MobatlasError(
                f"{folder}: the file {name[:100]} is missing; create the folder again"
            )
        size = path.stat().st_size
        if size != entry["bytes"] or (
            size <= HASHED_ON_LOAD and file_hash(path) != entry["sha256"]
        ):
            raise MobatlasError(
                f"{path}: the file differs from its entry in {MANIFEST} (it was changed or "
                "truncated); create the folder again"
            )


def _check_complete(folder: Path, kind: str, files: dict[str, Any]) -> None:
    """Refuse a folder with a file that could be read, but is not in the manifest."""
    may_change = MAY_CHANGE.get(kind, ())
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        is_read = path.suffix in READ_SUFFIXES and not path.name.startswith(".")
        if (
            is_read
            and name.parts[0] not in (MANIFEST, *may_change)
            and name.as_posix() not in files
        ):
            raise MobatlasError(
                f"{path}: {MANIFEST} does not list this file, so it may have been altered; move it "
                "elsewhere, or create the folder again"
            )
    if not files:
        raise MobatlasError(f"{folder / MANIFEST}: it lists no files; create the folder again")


@contextmanager
def refuse_corrupt(path: Path) -> Iterator[None]:
    """Turn any error from reading a damaged file of ours into one sentence."""
    try:
        yield
    except (
        pa.ArrowException,
        OSError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        # Disk errors have an error number; Arrow's errors about content have none.
        if getattr(error, "errno", None) is not None or out_of_memory(error):
            raise
        raise MobatlasError(
            f"{path}: the data is damaged or was not written by mobatlas; create it again"
        ) from error


def write_manifest(folder: Path, manifest: Manifest, names: frozenset[str] | None = None) -> None:
    """Write the manifest of a folder; with `names`, list only these files and folders."""
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
            "format": FORMATS.get(manifest.kind, FORMAT),
            "kind": manifest.kind,
            "discloses": DISCLOSES.get(manifest.kind),
            "versions": library_versions(),
            "seed": manifest.seed,
            "config": manifest.config,
            "details": manifest.details,
            "files": files,
            "unlisted": list(manifest.unlisted),
        },
    )


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str)
    write_atomic(path, f"{text}\n".encode())


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file that appears complete or not at all, even if the machine stops."""
    partial = hidden_sibling(path, "partial")
    create_file(partial)
    try:
        partial.write_bytes(content)
        sync(partial)
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def read_parquet(
    path: Path, columns: Sequence[str] | None = None, *, memory_map: bool = False
) -> pa.Table:
    """Read a Parquet file, or some columns in the given order; a missing one is a KeyError.

    Arrow's threads are not used: its scanner hangs if there is no memory to start one.
    """
    with pq.ParquetFile(path, memory_map=memory_map) as file:
        table = file.read(columns=None if columns is None else list(columns), use_threads=False)
    return table if columns is None else table.select(list(columns))


def write_parquet(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    """Write batches to Parquet and return the number of rows.

    Row groups have one size, so that equal rows give equal bytes whatever the batches are.
    """
    rows = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in rechunk(batches, schema, ROWS_PER_GROUP):
            writer.write_table(table, row_group_size=ROWS_PER_GROUP)
            rows += table.num_rows
    return rows


def rechunk(batches: Iterable[pa.RecordBatch], schema: pa.Schema, rows: int) -> Iterator[pa.Table]:
    """The rows of batches in tables of exactly `rows` rows; the last one may be shorter."""
    pending: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        pending.append(batch)
        count += batch.num_rows
        if count >= rows:
            table = pa.Table.from_batches(pending, schema)
            complete = count - count % rows
            for start in range(0, complete, rows):
                yield table.slice(start, rows).combine_chunks()
            pending = table.slice(complete).to_batches()
            count -= complete
    if count:
        yield pa.Table.from_batches(pending, schema).combine_chunks()


def library_versions() -> dict[str, str]:
    """The versions of Python and of the libraries that results depend on."""
    libraries = {name: metadata.version(name) for name in LIBRARIES}
    return {"python": platform.python_version()} | libraries


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def hidden_sibling(path: Path, suffix: str) -> Path:
    """The hidden path next to an output for its partial, replaced or lock file."""
    return path.with_name(f".{path.name}.{suffix}")


def refuse_links(*paths: Path) -> None:
    """Refuse symbolic links where mobatlas is about to write or delete."""
    for path in paths:
        if path.is_symlink():
            raise MobatlasError(
                f"{path}: this is a symbolic link, and mobatlas writes files here; remove the link"
            )


def create_file(path: Path) -> None:
    """Create an empty file in place of what a killed process left; a link is refused."""
    refuse_links(path)
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
