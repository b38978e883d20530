"""What a job returns: one row for each file."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias

from ags_fast import telemetry
from ags_fast._extras import explaining
from ags_fast._text import printable
from ags_fast.dataset.rows import Row as Row
from ags_fast.dataset.rows import shown as shown
from ags_fast.errors import AgsError
from ags_fast.fs import without_password
from ags_fast.fs.lacking import gathered, sentences
from ags_fast.jobs.arguments import reaching
from ags_fast.keys.kms import count_calls

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa


def describe(error: BaseException) -> str:
    """Return an error in one line, without `args` of unknown exceptions: some libraries put their inputs there."""
    if isinstance(error, OSError) and error.strerror:
        named = isinstance(error.filename, (str, bytes))  # it may also be a file descriptor
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
_outermost: ContextVar[bool] = ContextVar("ags_fast_outermost_job", default=True)  # no step of another job
FAILED_IN_LOG = 1000  # the result has all of them
TAKEN_BEFORE = ("Unchanged", "AlreadyThere", "NotRemoved")  # classes of skipped files that the dataset has


# True shows a bar; None a bar on a terminal; "lines" also lines elsewhere; False nothing; a callable gets rows.
Progress: TypeAlias = bool | Literal["lines"] | Callable[[list[Row]], object] | None


class JobFailuresWarning(UserWarning):
    """A job has ended, and some of its rows failed: look at `JobResult.failed`, or call `raise_for_failures`."""


class JobError(AgsError):
    """A job had more failures than its caller accepts.

    Attributes:
        result: The rows. Files that were finished are not lost.
    """

    def __init__(self, message: str, result: JobResult) -> None:
        super().__init__(message)
        self.result = result


class JobResult:
    """The result of a job.

    Attributes:
        job_id: The id of the job.
        op: "encrypt", "decrypt", "verify", "rekey", "remove", "sweep", "rotate" or "expire".
        dataset: The URL of the dataset.
        version: The number of the dataset's version that the job made or read.
        pin: That version and the SHA-256 of its document, as a text to keep outside of the storage and to pass as
            ``pin=`` the next time; None if there is no version.
        rows: A Row for each file, and for whatever else the job deals with.
        expired: The result of the expiry that the job did, because of force_expire or of the policy; else None.
        warnings: Sentences that the caller should read although no file failed.
        still_in: The numbers of older versions that still have files which `remove_files` has removed.
        kms_calls: The calls of a KMS, ``{(provider, operation): calls}``, in all processes of the job and its expiry.
            Calls that a process had not reported when it was killed, and calls of tasks that failed on Spark, are
            missing.
        seconds: How long the job took.
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
        self.seconds = 0.0

    def __repr__(self) -> str:
        failure = f"; {self.failure}" if self.failed else ""
        return f"<JobResult {self.op} {self.job_id}, version {self.version}: {shown_counts(self.counts)}{failure}>"

    def _repr_html_(self) -> str:
        from ags_fast.markup import grid, joined, nbytes, sheet

        calls = ", ".join(f"{number:,} {name}" for (_, name), number in sorted(self.kms_calls.items()))
        done = sum(row.nbytes for row in self.rows if row.status == "ok")
        facts = [
            ("dataset", without_password(self.dataset)),
            ("job", self.job_id),
            ("version", self.version),
            ("pin", self.pin),
            *((status, f"{count:,}") for status, count in self.counts.items()),
            ("plaintext", nbytes(done)),
            ("seconds", f"{self.seconds:,.1f}"),
            ("KMS calls", calls or "none"),
            *(("warning", warning) for warning in self.warnings[:10]),
        ]
        failed = [(without_password(row.src), row.error_class or "", row.error or "") for row in self.failed]
        title = f"{self.op}: FAILED" if failed else self.op
        return joined(sheet(title, facts), grid("Failed", ("what", "error", "message"), failed))

    @property
    def counts(self) -> dict[str, int]:
        """The number of rows with each status; "ok", "skipped" and "failed" are always there."""
        return {"ok": 0, "skipped": 0, "failed": 0, **Counter(row.status for row in self.rows)}

    @property
    def left_out(self) -> dict[str, int]:
        """The number of sources that `encrypt_files` left out, by kind: the `error_class` of "skipped" rows."""
        if self.op != "encrypt":
            return {}
        skipped = (row.error_class or "" for row in self.rows if row.status == "skipped")
        return dict(sorted(Counter(kind for kind in skipped if kind not in TAKEN_BEFORE).items()))

    @property
    def extra_files(self) -> int:
        """The number of files in the tree that no version and no open job knows, as `verify_files` found them."""
        return sum(row.error_class == "ExtraFile" for row in self.rows)

    @property
    def no_sources(self) -> bool:
        """Whether `encrypt_files` found no file to take: there is none, or all of them are left out."""
        kinds = self.left_out
        return self.op == "encrypt" and sum(kinds.values()) == len(self.rows) and "AlreadyEncryptedError" not in kinds

    @property
    def table(self) -> pa.Table:
        """The rows as a pyarrow Table, with the fields of Row as columns. Needs pyarrow."""
        with explaining("JobResult.table"):
            import pyarrow as pa
        text, number = pa.string(), pa.int64()
        types = [text, text, text, text, text, number, number, number, text, text, pa.float64(), pa.int32(), text, text]
        types.append(number)
        schema = pa.schema(list(zip(Row._fields, types, strict=True)))
        columns = list(zip(*self.rows, strict=True)) or [()] * len(types)
        columns = [tuple(s and shown(s) for s in c) if t == text else c for c, t in zip(columns, types, strict=True)]
        return pa.table([pa.array(c, t) for c, t in zip(columns, types, strict=True)], schema=schema)

    @property
    def failed(self) -> list[Row]:
        """The rows of the files that failed."""
        return [row for row in self.rows if row.status == "failed"]

    def raise_for_failures(self) -> None:
        """Raise JobError if a file failed."""
        if self.failure is not None:
            raise JobError(self.failure, self)

    @property
    def failure(self) -> str | None:
        """One line about what failed: the first row, and how many others; None if nothing failed."""
        if not self.failed:
            return None
        first, *others = self.failed
        more = f", and {len(others):,} more" if others else ""
        return printable(f"{self.op} of {without_password(first.src)} failed: {first.error_class}: {first.error}{more}")


def counted(job: Callable[P, JobResult]) -> Callable[P, JobResult]:
    """Wrap a job: its result gets the calls of the KMS, the log and OpenTelemetry are told, and failures are warned of.

    See `reaching` for what becomes of its arguments.
    """
    name = job.__name__

    @reaching
    @functools.wraps(job)
    def run(*args: P.args, **options: P.kwargs) -> JobResult:
        begun, outer = time.monotonic(), _outermost.get()
        token = _outermost.set(False)
        with count_calls() as calls, gathered() as lacks, telemetry.job_span(name) as attributes:
            try:
                result = job(*args, **options)
            except JobError as error:
                _tell(error.result, time.monotonic() - begun, calls, lacks, attributes)
                raise
            except Exception as error:
                telemetry.warning("jobs", "%s ended with %s: %s", name, type(error).__name__, describe(error))
                raise
            finally:
                _outermost.reset(token)
            _tell(result, time.monotonic() - begun, calls, lacks, attributes)
        if outer and result.failure is not None:
            text = f"{result.failure} ({shown_counts(result.counts)}). Look at failed, or call raise_for_failures()"
            warnings.warn(text, JobFailuresWarning, stacklevel=3)  # 2 is the function of `reaching`
        return result

    return run


def _tell(
    result: JobResult, seconds: float, kms_calls: Counter[tuple[str, str]], lacks: set[str], attributes: dict[str, Any]
) -> None:
    """Tell the result what it took and what file systems lack, and the log and OpenTelemetry that a job has ended."""
    result.seconds, result.kms_calls = seconds, kms_calls
    result.warnings += sentences(lacks)
    counts, calls = result.counts, sum(kms_calls.values())
    nbytes = sum(row.nbytes for row in result.rows if row.status == "ok")
    dataset = without_password(result.dataset)
    for row in result.failed[:FAILED_IN_LOG]:
        telemetry.warning(
            "jobs", "%s of %s failed: %s: %s", result.op, without_password(shown(row.src)), row.error_class, row.error
        )
    text = "%s of %s, job %s: %s; %d bytes of plaintext, %d KMS calls, %.3f s"
    telemetry.info("jobs", text, result.op, dataset, result.job_id, shown_counts(counts), nbytes, calls, seconds)
    for status, count in counts.items():
        telemetry.add("files", count, {"op": result.op, "status": status})
    telemetry.add("plaintext", nbytes, {"op": result.op})
    attributes.update({"op": result.op, "dataset": dataset, "job_id": result.job_id, "plaintext": nbytes})
    attributes.update({f"files.{status}": count for status, count in counts.items()}, **{"kms.calls": calls})
    if result.version is not None:
        attributes["version"] = result.version


def shown_counts(counts: Mapping[str, int]) -> str:
    """Return counts as a text for messages."""
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
