"""Readers: each turns one source's published layout into the canonical tables."""

from __future__ import annotations

from mobatlas.data.readers.base import Reader, Source

__all__ = ["READERS", "Reader", "Source", "reader_named"]

from mobatlas.data.readers import embee, foursquare, geolife, plain, veraset, yjmob100k
from mobatlas.errors import MobatlasError, suggestion

READERS: dict[str, Reader] = {
    reader.name: reader
    for reader in (
        plain.READER,
        embee.READER,
        veraset.READER,
        foursquare.READER,
        yjmob100k.READER,
        geolife.READER,
    )
}


def reader_named(name: str) -> Reader:
    """The reader of that name."""
    if name not in READERS:
        raise MobatlasError(
            f"--format {name} does not exist{suggestion(name, READERS)} (known: {', '.join(READERS)})"
        )
    return READERS[name]
