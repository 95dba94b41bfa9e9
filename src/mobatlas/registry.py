"""Registries of features and metrics, generators, strategies, readers and divergences."""

from collections.abc import Collection, Mapping
from typing import TypeVar

from mobatlas.errors import MobatlasError, refuse_unknown

Entry = TypeVar("Entry")


class Registry(dict[str, Entry]):
    """Entries by name, in order of registration.

    Parameters
    ----------
    kind
        The kind of entry, for error messages: "generator".
    option
        The command-line option that selects an entry: "--generator".
    entries
        The first entries.

    Examples
    --------
    >>> sizes = Registry[int]("size", "--size")
    >>> sizes.register("small", 1)
    >>> sizes.get_entry("small")
    1
    """

    def __init__(self, kind: str, option: str, entries: Mapping[str, Entry] | None = None) -> None:
        super().__init__(entries or {})
        self._kind = kind
        self._option = option

    def register(self, name: str, entry: Entry) -> None:
        """Add an entry; refuse a name that is already in use."""
        if name in self:
            raise MobatlasError(f"{self._kind} '{name}' exists already; choose another name")
        self[name] = entry

    def get_entry(self, name: str, *, among: Collection[str] | None = None) -> Entry:
        """The entry of that name; for an unknown name, the error suggests a similar one.

        `among` are the names to choose from, by default all.
        """
        refuse_unknown(f"{self._option} {name}", name, self if among is None else among)
        return self[name]
