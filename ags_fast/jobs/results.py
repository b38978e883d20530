"""What a job did: one row a file."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeAlias

from ags_fast.errors import AgsError
from ags_fast.keys.kms import count_calls

if TYPE_CHECKING:
    from collections.abc import Sequence


def describe(error: BaseException) -> str:
    """An error in one line. Never an exception's arguments: some libraries put what they were given into them."""
    if isinstance(error, OSError) and error.strerror:
        named = isinstance(error.filename, (str, bytes))  # it may be a descriptor
        return f"{error.strerror}: {os.fsdecode(error.filename)!r}" if named else error.strerror
    if isinstance(error, (AgsError, OSError, ValueError, ImportError)) and str(error):
        return str(error).splitlines()[0][:1000]
    return f"an unexpected {type(error).__name__} in {_origin(error)}"


def _origin(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "native code" if trace is None else f"{trace.tb_frame.f_globals.get('__name__')}, line {trace.tb_lineno}"


P = ParamSpec("P")
Progress: TypeAlias = "bool | Callable[[list[Row]], object] | None"  # None: a bar on a terminal; else rows as they come
TAKEN_BEFORE = ("Unchanged", "AlreadyThere")  # why a file is skipped that is where it should be


class Row(NamedTuple):
    """What became of one file. Holds no key, wrapped or not."""

    src: str
    dst: str | None
    status: str  # "ok", "skipped" or "failed"; of a dry run "planned"
    error_class: str | None = None  # why it failed, or was skipped
    error: str | None = None
    plain_length: int | None = None  # bytes
    file_length: int | None = None  # bytes, encrypted
    block_size: int | None = None  # bytes
    format: str | None = None
    key_id: str | None = None
    seconds: float = 0.0
    attempt: int = 0  # 0 is the first
    host: str | None = None


class JobError(AgsError):
    """A job had failures that its caller does not accept. `result` says which; what was finished is not lost."""

    def __init__(self, message: str, result: JobResult) -> None:
        super().__init__(message)
        self.result = result


class JobResult:
    """What a job did.

    op: "encrypt", "decrypt", "verify", "rekey", "remove", "sweep", "rotate" or "expire". version: the dataset's version
    that the job made, or read. pin: that version and the SHA-256 of its document, as a text to keep outside of the
    storage and to pass as ``pin=`` the next time; None if there is no version. rows: a Row for each file, and for what
    else the job deals with. expired: what was expired when it was done, because of force_expire or of the policy.
    kms_calls: how often the job has called a KMS, ``{(provider, operation): calls}``, in all its processes and with
    what was expired. What a process had not reported when it was killed is not in it, nor are attempts of tasks that
    failed on Spark. warnings: what the caller should know though no file failed, a sentence each. still_in:
    the numbers of older versions that still have files which `remove_files` has removed.
    """

    def __init__(
        self, job_id: str, op: str, dataset: str, version: int | None, rows: Sequence[Row], pin: str | None = None
    ) -> None:
        self.job_id = job_id
        self.op = op
        self.dataset = dataset
        self.version = version
        self.pin = pin
        self.rows = list(rows)
        self.expired: JobResult | None = None
        self.warnings: list[str] = []
        self.still_in: list[int] = []
        self.kms_calls: Counter[tuple[str, str]] = Counter()

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        return f"<JobResult {self.op} {self.job_id}, version {self.version}: {counts or 'no files'}>"

    @property
    def counts(self) -> dict[str, int]:
        """How many rows have each status; "ok", "skipped" and "failed" are always there."""
        return {"ok": 0, "skipped": 0, "failed": 0, **Counter(row.status for row in self.rows)}

    @property
    def left_out(self) -> dict[str, int]:
        """What `encrypt_files` did not take, by kind: the `error_class` of rows with the status "skipped"."""
        if self.op != "encrypt":
            return {}
        skipped = (row.error_class or "" for row in self.rows if row.status == "skipped")
        return dict(sorted(Counter(kind for kind in skipped if kind not in TAKEN_BEFORE).items()))

    @property
    def extra_files(self) -> int:
        """How many files `verify_files` found in the tree that no version and no open job of the dataset knows."""
        return sum(row.error_class == "ExtraFile" for row in self.rows)

    @property
    def left_out_all(self) -> bool:
        """Whether `encrypt_files` left out every file that there was, and there was one."""
        kinds = self.left_out
        if sum(kinds.values()) < len(self.rows) or "AlreadyEncryptedError" in kinds:
            return False
        return not kinds.keys() <= {"EmptyFolder"}

    @property
    def table(self) -> Any:
        """The rows as a pyarrow Table, with the fields of Row as columns."""
        import pyarrow as pa

        text, number = pa.string(), pa.int64()
        types = [text, text, text, text, text, number, number, number, text, text, pa.float64(), pa.int32(), text]
        schema = pa.schema(list(zip(Row._fields, types, strict=True)))
        columns = list(zip(*self.rows, strict=True)) or [()] * len(types)
        columns = [tuple(s and shown(s) for s in c) if t == text else c for c, t in zip(columns, types, strict=True)]
        return pa.table([pa.array(c, t) for c, t in zip(columns, types, strict=True)], schema=schema)

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.status == "failed"]

    def raise_for_failures(self) -> None:
        """JobError if a file failed."""
        failed = self.failed
        if failed:
            first = failed[0]
            more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
            raise JobError(f"{self.op} of {first.src} failed: {first.error_class}: {first.error}{more}", self)


def counted(job: Callable[P, JobResult]) -> Callable[P, JobResult]:
    """The job, with the calls of the KMS in its result."""

    @functools.wraps(job)
    def run(*args: P.args, **options: P.kwargs) -> JobResult:
        with count_calls() as calls:
            try:
                result = job(*args, **options)
            except JobError as error:
                error.result.kms_calls = calls
                raise
        result.kms_calls = calls
        return result

    return run


def shown_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))


def shown(name: str) -> str:
    """A file's name as a text, which it need not be: as a table or a document can have it."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
