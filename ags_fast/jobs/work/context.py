"""Tasks, and the context that all tasks of a job share. Both are sent to every worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ags_fast.dataset.files.contents import Contents
from ags_fast.dataset.files.stream import view
from ags_fast.engines.base import JobContext
from ags_fast.errors import AgsError, JobEndedError
from ags_fast.files.source import Source
from ags_fast.fs import NewFile
from ags_fast.keys.kms import PROVIDERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.fs import NewObject, Store
    from ags_fast.keys.envelope import Envelope
    from ags_fast.stream import AgsReader


CHUNK_NBYTES = 1 << 20  # plaintext at a time; of a stream one block for each thread if that is more


class Task(NamedTuple):
    """The work on one file."""

    entry: FileEntry  # the file to make or read
    old: FileEntry | None = None  # rekey: the file that it is made from

    @property
    def path(self) -> str:
        """What tells the task from the other tasks of its job."""
        return self.entry.path

    @property
    def nbytes(self) -> int:
        """Bytes of work."""
        return self.entry.nbytes


class SourceChangedError(AgsError):
    """A source differs from the plan. The next run, or a resumed run, plans the file again, with a new key."""


class AlreadyEncryptedError(AgsError):
    """A source is encrypted already, so it is skipped. To open the file needs its own key, not the dataset's."""


def encrypted_already(head: bytes) -> str | None:
    """Return why a file that begins with `head` need not be encrypted; None if it must be."""
    if head[:4] == b"PARE":
        return "it is a Parquet file with an encrypted footer already"
    block_size = int.from_bytes(head[4:8], "little")
    if head[:4] == b"AGS1" and len(head) >= 8 and 0 < block_size < 1 << 31:
        return f"it is an AGS1 stream with blocks of {block_size} bytes already"
    return None


def ends(source: Any) -> tuple[bytes, bytes]:
    """Return the first 8 and the last 4 bytes of a file; no last ones unless it can be a Parquet file."""
    file = Source(source)
    try:
        head = bytes(file.read(0, min(8, file.size)))
        return head, bytes(file.read(file.size - 4, file.size)) if head[:4] == b"PAR1" and file.size >= 12 else b""
    finally:
        file.close()


@dataclass(frozen=True, repr=False, eq=False)
class Context(JobContext):
    """What all tasks of a job on a dataset share. The KMS is given by properties, and data keys are wrapped.

    Attributes:
        op: "encrypt", "decrypt", "verify", "rekey" or "compare".
        dataset_id: The id of the dataset.
        dataset: The folder of the dataset.
        envelope: The KEKs that the tasks need, and the KMS.
        other: The source of an encryption or a comparison, the destination of a decryption; else None.
        fsync: Whether files must be on the disk before they count.
        verify_after: Whether to read each file back.
        overwrite: Decrypt: whether files that exist are replaced.
        resume: "length" or "verify" if a dead job is resumed.
        without: Ids of keys that the caller may not use. Parquet columns under these keys are left out.
        preserve: Decrypt: whether files get the modes and times of their sources.
        checksums: Decrypt: paths of checksums of Hadoop that are files of the dataset, so that they are restored.
        checksum: Encrypt: whether a keyed digest of each source is kept.
        plan: The path of the job's plan if workers may outlive the job: see `check_plan`. Else "".
    """

    runner: ClassVar[str] = "ags_fast.jobs.work.dispatch"

    dataset_id: str
    dataset: Store
    envelope: Envelope
    other: Store | None = None
    fsync: bool = True
    verify_after: bool = False
    overwrite: bool = False
    resume: str | None = None
    without: frozenset[str] = frozenset()
    preserve: bool = True
    checksums: frozenset[str] = frozenset()
    checksum: bool = False
    plan: str = ""

    @property
    def stores(self) -> tuple[Store | None, ...]:
        """The dataset, and the source or destination."""
        return self.dataset, self.other

    @property
    def waits(self) -> bool:
        """Whether a task waits longer than it works: for an object store, a disk, or a KMS that has each file's key."""
        asks = self.envelope.kms.waits and not all(key.double_wrap for key in self.envelope.entries.values())
        return asks or not self.local or (self.fsync and self.op not in ("verify", "compare"))

    def is_harmless(self, tasks: Sequence[Task]) -> bool:
        """Return whether no task can end the process that runs it, whatever the bytes of its file are.

        The bytes of an AGS1 stream, and of its source, go through AES and nothing else. A Parquet file is parsed. A KMS
        client of the user's own may do anything.
        """
        kms = type(self.envelope.kms)
        ours = f"{kms.__module__}:{kms.__qualname__}" in PROVIDERS.values()
        return ours and all(task.entry.format == "ags1" for task in tasks)

    @cached_property
    def contents(self) -> Contents:
        """What opens and seals the dataset's files."""
        return Contents(self.dataset_id, self.dataset, self.envelope, self.threads, self.without)

    def check_plan(self) -> None:
        """Raise JobEndedError if the job has ended: to be called before a file of the dataset is published.

        A Spark task may outlive its driver, and another process may have ended its job since.
        """
        if self.plan and self.dataset.stat(self.plan) is None:
            raise JobEndedError(f"job {self.job_id} has ended: the file is not published")

    def digest_outside(self, path: str, digest: Any, planned: FileEntry | None = None) -> bytes:
        """Return a hash, or a keyed digest, of a file outside of the dataset. planned: what its source is to be."""
        assert self.other is not None
        with self.other.open_once(path) as file:
            chunk, left = memoryview(bytearray(min(CHUNK_NBYTES, file.size + 1))), file.size + 1
            while got := file.readinto(chunk[:left]):  # no further: the file may grow for ever
                self.check_goes_on()
                digest.update(chunk[:got])
                left -= got
            if planned and (not planned.is_of(file.size, file.stamp) or file.changed()):
                raise SourceChangedError(f"{path} changed while it was read: run the job again")
        return bytes(digest.digest())

    def give_restored(self, entry: FileEntry, plain: bytes) -> bool:
        """Write a small decrypted file in one step. Returns False if that is impossible, or if the file exists."""
        assert self.other is not None
        mode, mtime_ns = (entry.mode, entry.mtime_ns) if self.preserve else (None, None)
        return self.other.write_if_new(entry.path, plain, fsync=self.fsync, mode=mode, mtime_ns=mtime_ns)

    def restored(self, entry: FileEntry) -> NewFile | NewObject:
        """Begin the file that an entry is decrypted to. Until the file is complete, only its owner can read it."""
        assert self.other is not None
        mode, mtime_ns = (entry.mode, entry.mtime_ns) if self.preserve else (None, None)
        begin = partial(self.other.begin, entry.path, tag=self.job_id, private=True)
        new = begin(fsync=self.fsync, mode=mode, mtime_ns=mtime_ns)
        folder, slash, name = entry.path.rpartition("/")
        if isinstance(new, NewFile) and f"{folder}{slash}.{name}.crc" in self.checksums:
            new.stale_sidecar = False
        return new

    def reader(self, entry: FileEntry, file: str | None = None) -> AgsReader:
        """Open the plaintext of `entry`, from the object `file` if given."""
        return view(self.contents, entry, file)


class Outcome(NamedTuple):
    """The result of a task."""

    status: str  # "ok" or "skipped"; a failure is an exception
    error_class: str | None = None
    error: str | None = None
    file_length: int = 0  # bytes of the encrypted file
    plain_length: int | None = None  # bytes of plaintext; None: as planned


Operations = dict[str, Callable[[Context, Task, int], Outcome]]
WRITTEN_EARLIER = "AlreadyThere", "an earlier run wrote it"  # why a file is skipped when its job is resumed
