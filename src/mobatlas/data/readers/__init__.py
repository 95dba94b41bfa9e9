"""Readers: each turns the published layout of one source into the canonical tables."""

from mobatlas.data.readers import embee, foursquare, geolife, plain, veraset, yjmob100k
from mobatlas.data.readers.base import Reader
from mobatlas.registry import Registry

_MODULES = (plain, embee, veraset, foursquare, yjmob100k, geolife)
READERS = Registry[Reader](
    "reader", "--format", {module.READER.name: module.READER for module in _MODULES}
)
