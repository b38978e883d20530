"""The rewriting of one manifest by a rotation, as plans store it and workers get it."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast.dataset.tables import MANIFEST_ENTRIES, TableRef, whole
from ags_fast.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping


class ManifestTask(NamedTuple):
    """Write some rows of a manifest to a new manifest, with each DEK wrapped by a key in use."""

    old: TableRef  # the manifest to read
    first: int  # the first row to take
    rows: int  # the number of rows to take
    file: str  # the new manifest
    key_id: str  # the key that wraps the DEK of the new manifest
    wrapped_key: bytes
    nbytes: int  # bytes of encryption work that cost as much
    length: int = 0  # bytes of the new manifest; 0: it is not written yet

    @property
    def path(self) -> str:
        """What tells the task from the other tasks of its job."""
        return self.name(self.old, self.first)

    @staticmethod
    def name(old: TableRef, first: int) -> str:
        """Return the path of the task that begins at a row of a manifest."""
        return f"{old.path}#{first}"

    @property
    def new(self) -> TableRef:
        """The reference to the new manifest, without its keys."""
        return self.old._replace(
            path=self.file,
            length=self.length,
            entries=self.rows,
            key_id=self.key_id,
            wrapped_key=self.wrapped_key,
            keys=None,
        )

    def with_lengths(self, length: int, plain_length: int | None = None) -> ManifestTask:
        """Return a copy with the length in bytes of the manifest that was made."""
        return self._replace(length=length)

    def to_json(self) -> dict[str, Any]:
        """Return the task as a JSON object."""
        return {
            "manifest": self.old.to_json(),
            "first": self.first,
            "rows": self.rows,
            "file": self.file,
            "key_id": self.key_id,
            "wrapped_key": base64.b64encode(self.wrapped_key).decode(),
            "cost": self.nbytes,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ManifestTask:
        """Read a task from a JSON object. Raises FormatError if malformed."""
        try:
            return cls(
                TableRef.from_json(value["manifest"]),
                whole(value["first"], MANIFEST_ENTRIES),
                whole(value["rows"], MANIFEST_ENTRIES),
                str(value["file"]),
                str(value["key_id"]),
                base64.b64decode(value["wrapped_key"], validate=True),
                whole(value["cost"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"the rewriting of a manifest lacks or garbles {error}") from None
