"""Wrapped KEKs in the memory of a process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import builtins
    from collections.abc import Collection, Mapping


class MemoryKeyStore:
    """A key store that ends with its process, for tests. Threads may share it."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], bytes] = {}

    def get(self, dataset_id: str, names: Collection[str]) -> dict[str, bytes]:
        """See `KeyResolver`."""
        return {name: self._rows[dataset_id, name] for name in names if (dataset_id, name) in self._rows}

    def put(self, dataset_id: str, rows: Mapping[str, bytes]) -> None:
        """See `KeyStore`."""
        for name, wrapped in rows.items():
            self._rows.setdefault((dataset_id, name), wrapped)

    def list(self, dataset_id: str) -> builtins.list[str]:
        """See `KeyStore`."""
        return [name for owner, name in tuple(self._rows) if owner == dataset_id]

    def remove(self, dataset_id: str, names: builtins.list[str]) -> None:
        """See `KeyStore`."""
        for name in names:
            self._rows.pop((dataset_id, name), None)

    def __repr__(self) -> str:
        return f"<MemoryKeyStore of {len(self._rows)} rows>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a key store in memory stays in its process: send the keys that are needed, in an Envelope")
