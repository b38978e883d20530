"""What the tasks of a job have in common, and what a task is. Both travel to every worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.dataset.contents import Contents
from ags_fast.dataset.stream_files import view
from ags_fast.errors import AgsError

if TYPE_CHECKING:
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.fs import NewFile, NewObject, Store
    from ags_fast.keys.envelope import Envelope
    from ags_fast.stream import AgsReader


class Task(NamedTuple):
    """What a worker does with one file."""

    entry: FileEntry  # what is made, or read
    old: FileEntry | None = None  # rekey: what it is made from


class SourceChangedError(AgsError):
    """A source is not what was planned. The next run, or a resumed one, plans it anew, with a new key."""


class AlreadyEncryptedError(AgsError):
    """A source is encrypted as it is: it is skipped. To open it needs its own key, not the dataset's."""


@dataclass(frozen=True)
class Context:
    """What all files of a job have in common. It goes to every worker, and so holds no key: the KMS is named only by
    its properties, and data keys are wrapped."""

    op: str
    job_id: str
    dataset_id: str
    dataset: Store
    envelope: Envelope
    other: Store | None = None  # the source of an encryption, the destination of a decryption
    threads: int | None = None
    fsync: bool = True
    verify_after: bool = False
    overwrite: bool = False
    resume: str | None = None
    moves: Mapping[str, str] = field(default_factory=dict)  # rotate: the keys to leave, and those to go to
    ready: Mapping[tuple[str, bytes], bytes] = field(default_factory=dict)  # rotate: what the KMS has wrapped anew
    concurrency: int = 1  # rotate: calls of the KMS at once
    isolate: bool = False  # run each file in a process of its own: one of them kills its worker
    without: frozenset[str] = frozenset()  # keys that are not to be had; of Parquet, their columns are left out
    preserve: bool = True  # decrypt: give files the modes and times that their sources had

    @cached_property
    def contents(self) -> Contents:
        """What opens and seals the dataset's files."""
        return Contents(self.dataset_id, self.dataset, self.envelope, self.threads, self.without)

    def dek(self, entry: FileEntry) -> bytes:
        """Unwrap the data key of a file."""
        return self.contents.dek(entry)

    def give_restored(self, entry: FileEntry, plain: bytes) -> bool:
        """Write a small decrypted file in one step. False if that cannot be, or if a file is there."""
        assert self.other is not None
        mode, mtime_ns = (entry.mode, entry.mtime_ns) if self.preserve else (None, None)
        return self.other.give(entry.path, plain, fsync=self.fsync, mode=mode, mtime_ns=mtime_ns)

    def restored(self, entry: FileEntry) -> NewFile | NewObject:
        """The file that an entry is decrypted to, in the making. Until it is complete, nobody else may read it."""
        assert self.other is not None
        mode, mtime_ns = (entry.mode, entry.mtime_ns) if self.preserve else (None, None)
        return self.other.new(entry.path, tag=self.job_id, private=True, fsync=self.fsync, mode=mode, mtime_ns=mtime_ns)

    def reader(self, entry: FileEntry, file: str | None = None) -> AgsReader:
        """Open the plaintext of `entry`, or of `file` in its place."""
        return view(self.contents, entry, file)


class Outcome(NamedTuple):
    """What became of a file."""

    status: str  # "ok" or "skipped"; a failure is an exception
    error_class: str | None = None
    error: str | None = None
    file_length: int = 0  # bytes of the encrypted file
    plain_length: int | None = None  # bytes that reading gives; None: as planned
