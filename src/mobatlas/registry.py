"""Named extensions: feature maps, metrics, generators, strategies, readers and divergences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from mobatlas.errors import MobatlasError, suggestion

Entry = TypeVar("Entry")


class Registry(Mapping[str, Entry], Generic[Entry]):
    """Entries by name, in order of registration.

    Parameters
    ----------
    kind
        What an entry is, for error messages: "generator".
    option
        The option that a user chooses one with: "--generator".

    Examples
    --------
    >>> sizes = Registry[int]("size", "--size")
    >>> sizes.register("small", 1)
    >>> sizes.get_entry("small")
    1
    """

    def __init__(self, kind: str, option: str, entries: Mapping[str, Entry] | None = None) -> None:
        self._kind = kind
        self._option = option
        self._entries: dict[str, Entry] = dict(entries or {})

    def register(self, name: str, entry: Entry) -> None:
        """Add an entry; a name that is taken is refused."""
        if name in self._entries:
            raise MobatlasError(f"{self._kind} '{name}' exists already; choose another name")
        self._entries[name] = entry

    def get_entry(self, name: str) -> Entry:
        """The entry of that name; an unknown name is refused with the nearest known one."""
        if name not in self._entries:
            known = ", ".join(self._entries)
            raise MobatlasError(
                f"{self._option} {name} does not exist{suggestion(name, self._entries)} "
                f"(known: {known})"
            )
        return self._entries[name]

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
