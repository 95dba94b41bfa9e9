"""Readers: each turns the published layout of one source into the canonical tables."""

from __future__ import annotations

from mobatlas.data.readers import embee, foursquare, geolife, plain, veraset, yjmob100k
from mobatlas.data.readers.base import Reader
from mobatlas.registry import Registry

READERS = Registry[Reader]("reader", "--format")
for _module in (plain, embee, veraset, foursquare, yjmob100k, geolife):
    READERS.register(_module.READER.name, _module.READER)
