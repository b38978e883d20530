"""The content of a dataset's files: which key opens a file, and what reads or writes each format.

A format is one module with the functions of `Format`. `format_of` finds the module.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from ags_fast.errors import FormatError, KeyAccessError
from ags_fast.keys.envelope import binding

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from ags_fast._cursor import Cursor
    from ags_fast._types import Buffer, WritableFile
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.fs import NewFile, NewObject, Store
    from ags_fast.keys.envelope import Envelope


@dataclass(frozen=True, repr=False, eq=False)
class Contents:
    """What opens and seals files of one dataset. Tasks get it by pickle, so it holds only wrapped keys."""

    dataset_id: str  # to which wrapped keys are bound
    store: Store
    envelope: Envelope  # the KEKs of the files, and the KMS that unwraps them
    threads: int | None = None  # for one file; None: as for AgsCodec
    without: frozenset[str] = frozenset()  # KEKs that the caller may not use: Parquet columns under them are left out
    nulls: bool = False  # whether views show these columns as nulls

    def dek(self, entry: FileEntry) -> bytes:
        """Unwrap the data key of a file."""
        return self.envelope.unwrap(entry.key_id, entry.wrapped_dek, binding(self.dataset_id, "dek", entry.file))


class Format(Protocol):
    """What the module of a format offers."""

    def view(self, contents: Contents, entry: FileEntry) -> Cursor:
        """Open the plaintext of a file for reading at any position."""

    def copy(self, contents: Contents, entry: FileEntry, target: WritableFile) -> None:
        """Decrypt a file to anything that takes bytes. Each piece is written after its tag has passed."""

    def write(self, contents: Contents, entry: FileEntry, new: NewFile | NewObject) -> FormatWriter:
        """Begin a file. `finish` publishes the file."""


class FormatWriter(Protocol):
    """A file of a dataset in the making, in one format."""

    def write(self, data: Buffer, /) -> int:
        """Take all of `data`."""

    def tell(self) -> int:
        """Return the bytes of plaintext written so far."""

    def finish(self) -> tuple[int, int, int | None]:
        """Publish the file. Return its plaintext length, its file length, and its `FileEntry.source_length`."""

    def abort(self) -> None:
        """Discard the file. After `finish`, do nothing."""


# A module is imported when a file first needs it: importing Parquet's takes longer than reading a small dataset.
MODULES = {"ags1": "ags_fast.dataset.files.stream", "parquet": "ags_fast.dataset.files.parquet"}


def settled(format: str, path: str, ends: tuple[bytes, bytes] | None = None) -> str:
    """Return the format of a new file: for "auto" by how it begins and ends, or by its name if that is yet unknown."""
    is_parquet = path.endswith(".parquet") if ends is None else ends[0][:4] == ends[1][-4:] == b"PAR1"
    return format if format != "auto" else "parquet" if is_parquet else "ags1"


def format_of(entry: FileEntry) -> Format:
    """Return the module of a file's format. Raises FormatError for a format of a newer ags_fast."""
    if entry.format not in MODULES:
        raise FormatError(f"a newer ags_fast made this file: its format is {entry.format!r}")
    return cast("Format", import_module(MODULES[entry.format]))


def closing(source: Any) -> AbstractContextManager[Any]:
    """Use a store's source: a path, or a file, which is closed afterwards."""
    return contextlib.closing(source) if hasattr(source, "close") else contextlib.nullcontext(source)


def denied_keys(contents: Contents, entries: Iterable[FileEntry]) -> frozenset[str]:
    """Return the ids of the column keys that the KMS refuses. Each key is tried once, for all files."""
    wraps = {wrap[0]: wrap for row in entries if row.column_keys for wrap in row.wraps(contents.dataset_id)[1:]}
    denied = set()
    for wrap in wraps.values():
        try:
            contents.envelope.unwrap(*wrap)
        except KeyAccessError:
            denied.add(wrap[0])
    return frozenset(denied)
