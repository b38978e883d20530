"""What a table or a plan keeps about each file."""

from __future__ import annotations

import fnmatch
import glob
import hmac
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ags_fast.ags1 import encrypted_length
from ags_fast.errors import IntegrityError
from ags_fast.keys.envelope import binding

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

Patterns: TypeAlias = str | Sequence[str] | None  # of `fnmatch`; None: all files
NEAR_NAMES = 10_000  # files whose names are searched for one that is close to a mistyped name


class FileEntry(NamedTuple):
    """One file of a dataset: as a table keeps it, or as a plan keeps it before the file exists."""

    path: str  # its path in the dataset, as in the tree that it came from
    file: str  # the object that holds it
    format: str  # "ags1" or "parquet"
    plain_length: int  # bytes of plaintext (Parquet: of the plaintext view); in a plan, bytes of the source
    file_length: int  # bytes of the object: the trusted length; 0 for Parquet in a plan, as it is not known yet
    block_size: int  # bytes; 0 for Parquet
    key_id: str  # the key that wraps the DEK
    wrapped_dek: bytes  # for Parquet, the footer key
    column_keys: (
        tuple[dict[str, Any], ...] | None
    )  # Parquet: {column, key_id, wrapped_dek} of each column with its own key
    aad_prefix: bytes
    job_id: str  # the job that wrote it
    set_id: str | None  # the job that numbered it as a member of a set, by an aad_prefix template
    part: int | None  # its number in that set
    parts: int | None  # the number of files in that set
    source: str  # the path it was made from, in the source or (rekey) in the dataset
    stamp: str  # identifies the content of the source: its time of change or etag, as the storage tells it
    mode: int | None = None  # permission bits of the source (0o777); None without a mode, as in an object store
    mtime_ns: int | None = None  # last change of the source, ns since the epoch; None if not known
    # Parquet: {column, wrapping_key_id, master_version, wrapped_dek} of each DEK, as the file itself has it for the key
    # tools of Parquet; the column of the footer key is "". Empty: not made yet. None: the file has no key material.
    key_material: tuple[dict[str, Any], ...] | None = None
    source_length: int | None = None  # bytes of the source; None: as `plain_length`
    # What else the source was, where the storage tells:
    ctime_ns: int | None = None  # last change of the source or its attributes, ns since the epoch
    inode: int | None = None
    etag: str | None = None
    checksum: bytes | None = None  # HMAC-SHA-256 of its bytes, under a key that the data keys make: `source_mac_key`

    def is_of(self, size: int, stamp: str) -> bool:
        """Return whether the file was made from a source of this size in bytes, with this stamp of the storage."""
        return (self.nbytes, self.stamp) == (size, stamp)

    @property
    def nbytes(self) -> int:
        """Bytes of its source, which are its size for users: the plaintext view of a Parquet file is longer."""
        return self.plain_length if self.source_length is None else self.source_length

    def key_ids(self) -> set[str]:
        """Return the ids of the keys that wrap its DEKs."""
        return {self.key_id, *(key["key_id"] for key in self.column_keys or ())}

    def wraps(self, dataset_id: str) -> list[tuple[str, bytes, bytes]]:
        """Return (key id, wrapped DEK, binding) of the file, then of each column with a key of its own."""
        columns = [(k["key_id"], k["wrapped_dek"], _column_use(k["column"])) for k in self.column_keys or ()]
        return [
            (key_id, wrapped, binding(dataset_id, use, self.file))
            for key_id, wrapped, use in ((self.key_id, self.wrapped_dek, "dek"), *columns)
        ]

    def with_wraps(self, wraps: Sequence[tuple[str, bytes]]) -> FileEntry:
        """Return a copy with these key ids and wrapped DEKs, in the order of the method `wraps`."""
        columns = self.column_keys
        if columns:
            columns = tuple(
                {**key, "key_id": key_id, "wrapped_dek": wrapped}
                for key, (key_id, wrapped) in zip(columns, wraps[1:], strict=True)
            )
        return self._replace(key_id=wraps[0][0], wrapped_dek=wraps[0][1], column_keys=columns)


def with_lengths(
    entry: FileEntry, file_length: int, plain_length: int | None = None, checksum: bytes = b""
) -> FileEntry:
    """Return the entry with what is known of the file that was made: its lengths in bytes, a checksum of its source.

    plain_length None: the planned length.
    """
    if checksum:
        entry = entry._replace(checksum=checksum)
    lengths = file_length, entry.plain_length if plain_length is None else plain_length
    if lengths == (entry.file_length, entry.plain_length):
        return entry  # no copy of what a plan has
    return entry._replace(file_length=lengths[0], plain_length=lengths[1])


def source_mac_key(deks: Sequence[bytes]) -> bytes:
    """Return the key of the checksum of a source, from all data keys of its file in the order of `FileEntry.wraps`.

    So who may not open a column cannot try what the column may hold.
    """
    return hmac.digest(b"".join(deks), b"ags_fast source checksum", "sha256")


def _column_use(column: str) -> str:
    """Return the use of a column's DEK, as its binding names it."""
    return f"column:{column}"


def column_binding(dataset_id: str, column: str, file: bytes) -> bytes:
    """Return the binding of a column's DEK. `file` is the object's name as tables have it."""
    return binding(dataset_id, _column_use(column), file.decode("utf-8", "surrogateescape"))


def wrapped_by(entries: Iterable[FileEntry]) -> Counter[str]:
    """Count the DEKs of these files that each key wraps."""
    counts: Counter[str] = Counter()
    for entry in entries:
        counts[entry.key_id] += 1
        counts.update(key["key_id"] for key in entry.column_keys or ())
    return counts


def check_lengths(entries: Iterable[FileEntry]) -> None:
    """Raise IntegrityError if the length of an AGS1 file does not fit its plaintext length and block size."""
    for entry in entries:
        if entry.format == "ags1" and entry.file_length != _stream_length(entry):
            raise IntegrityError(
                f"{entry.file} is said to have {entry.file_length} bytes, and to hold {entry.plain_length} in blocks "
                f"of {entry.block_size}: that cannot be"
            )


def _stream_length(entry: FileEntry) -> int | None:
    """Return the length in bytes of the AGS1 stream of an entry; None if the entry's numbers are impossible."""
    try:
        return encrypted_length(entry.plain_length, entry.block_size)
    except ValueError:
        return None


def exact_first(pattern: str, names: Container[str]) -> str:
    """Return a pattern of `fnmatch` that matches only the name if it is one of the names."""
    return glob.escape(pattern) if pattern in names else pattern


def chosen_files(entries: Sequence[FileEntry], paths: Patterns, exclude: Patterns = None) -> list[FileEntry]:
    """Return the files whose path is one of `paths`, or matches it as a pattern of `fnmatch` if there is no such file.

    None takes all of them. What `exclude` has, or matches, is left out.

    Raises:
        FileNotFoundError: A pattern matches no file: it may be a typo.
        ValueError: `paths` is empty.
    """
    names = {entry.path for entry in entries}
    patterns, out = ([one] if isinstance(one, str) else [*(one or ())] for one in (paths, exclude))
    chosen: dict[str, FileEntry] = {}
    for pattern in patterns:
        wanted = exact_first(pattern, names)
        found = [entry for entry in entries if fnmatch.fnmatchcase(entry.path, wanted)]
        if not found:
            from difflib import get_close_matches

            near = get_close_matches(pattern, [entry.path for entry in entries[:NEAR_NAMES]], 1, 0.5)
            if any(entry.path.startswith(pattern.rstrip("/") + "/") for entry in entries):
                near = [pattern.rstrip("/") + "/*"]
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise FileNotFoundError(f"no file of the dataset matches {pattern!r}{hint}")
        chosen |= {entry.path: entry for entry in found}
    if paths is not None and not patterns:
        raise ValueError("paths is an empty list, which matches no file: None takes all of them")
    out = [exact_first(pattern, names) for pattern in out]
    left = [entry for entry in entries if paths is None or entry.path in chosen]
    return [entry for entry in left if not any(fnmatch.fnmatchcase(entry.path, one) for one in out)]
