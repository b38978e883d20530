"""Check every tag of every file of a version, and that no file is missing."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import pairwise, permutations
from typing import TYPE_CHECKING, Any, Unpack

from ags_fast.dataset import reach
from ags_fast.dataset.access import Access
from ags_fast.dataset.columns import path_bytes
from ags_fast.dataset.kinds import clock_ms
from ags_fast.dataset.names import HIDDEN
from ags_fast.dataset.policy import DAY_MS
from ags_fast.engines.local import client_for
from ags_fast.errors import AgsError
from ags_fast.jobs.results import JobResult, Row, counted, describe
from ags_fast.jobs.run import UNREADABLE, Options, verified
from ags_fast.jobs.work.dispatch import work_on
from ags_fast.keys.envelope import binding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ags_fast._types import OnError
    from ags_fast.dataset.access import Folder
    from ags_fast.dataset.entries import FileEntry, Patterns
    from ags_fast.dataset.log import Log
    from ags_fast.dataset.snapshot import Snapshot
    from ags_fast.engines.base import Engine
    from ags_fast.jobs.arguments import Reach
    from ags_fast.jobs.results import Progress
    from ags_fast.jobs.work.context import Context


MISSING_ROWS = 10_000  # for missing members; above this number, one row for each gap


@counted
def verify_files(
    dataset: Folder,
    *,
    engine: Engine | None = None,
    version: int | None = None,
    paths: Patterns = None,
    exclude: Patterns = None,
    sample: float | None = None,
    on_error: OnError = "row",
    max_failures: int | None = None,
    progress: Progress = None,
    **at: Unpack[Reach],
) -> JobResult:
    """Check every tag of every file of a version, and that numbered sets are complete.

    A missing, cut, changed or swapped file is a failed row. Each member of a numbered set must be there once, in its
    place; a missing member is a failed row. A version knows its last 64 sets of which no member was removed. A file in
    the tree that no version and no open job knows is a row with the status "skipped" and the class "ExtraFile";
    `JobResult.extra_files` counts these files, and a warning says so.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        engine: What runs the tasks; None: `LocalEngine`.
        version: The number of the version; None: the newest.
        paths: Check only files whose path matches one of these patterns of `fnmatch`, and neither sets nor extra files;
            None: everything.
        exclude: Leave out the files whose path matches one of these patterns.
        sample: Check only this share of the files, from 0 to 1, and neither sets nor extra files. Each day has other
            files, as `maintain` has them; None: all.
        on_error: "row": a file that fails is a row. "raise": stop at the first file that fails.
        max_failures: Stop after more than this number of failed files; None: never.
        progress: How the progress is shown: see `encrypt_files`.
        **at: How the dataset is reached, and the errors if it is not: see `Reach`.

    Returns:
        A row for each file, for each missing member of a set, and for each extra file.

    Raises:
        JobError: More files failed than `on_error` and `max_failures` allow.
        ExpiredError: The version that `version` names was expired.
        FileNotFoundError: A pattern of `paths` matches no file.
        ValueError: An argument is malformed.
    """
    check_share("sample", sample or 0)
    options = Options(engine, progress, on_error, max_failures)
    at["kms"] = client_for(options.engine, at["kms"], dataset)
    snapshot, entries = Access.of(dataset, version=version, **at).files(paths, exclude)
    if sample is not None:
        entries = sampled(snapshot, entries, sample)
    log, entry = snapshot
    context, rows = verified(snapshot, entries, options)
    _name_swaps(context, entries, rows)
    if paths is None and exclude is None and sample is None:
        rows += _missing_members(snapshot, entries)
        try:
            rows += _extra_files(log)
        except UNREADABLE as error:  # of another version
            rows.append(Row(log.store.url, None, "failed", type(error).__name__, describe(error)))
    result = JobResult(context.job_id, "verify", log.store.url, entry.number, rows, entry.pin)
    if extra := result.extra_files:
        files = "1 file is" if extra == 1 else f"{extra} files are"
        result.warnings.append(
            f"{files} in the dataset's folder that no version and no open job knows: somebody else put them there, or "
            "a job left them"
        )
    return result


def _name_swaps(context: Context, entries: Sequence[FileEntry], rows: list[Row]) -> None:
    """Name in the rows the files that hold each other's content, among those whose tags fail."""
    bad = {row.src: i for i, row in enumerate(rows) if row.error_class in ("IntegrityError", "FormatError")}
    suspects = [entry for entry in entries if entry.path in bad]
    if len(suspects) > 100:  # each file is tried as each other one
        return
    for entry, other in permutations(suspects, 2):
        with suppress(AgsError, OSError):
            if entry.format == other.format and work_on(other.format).holds(context, other, entry.file):
                i, part = bad[entry.path], "" if other.part is None else f", part {other.part}"
                rows[i] = rows[i]._replace(error=f"swapped: {entry.file} holds what belongs to {other.path}{part}")


def _missing_members(snapshot: Snapshot, entries: Sequence[FileEntry]) -> list[Row]:
    """Return a failed row for each number that a set lacks or has twice; for each gap if many numbers are missing."""
    sets = snapshot.entry.sets
    found: dict[str, list[FileEntry]] = {set_id: [] for set_id in sets}
    for entry in entries:
        if entry.set_id in found:
            found[entry.set_id].append(entry)
    store, rows = snapshot.log.store, list[Row]()
    for set_id, members in found.items():
        parts = sets[set_id]
        which = f"of the {parts} files that job {set_id} numbered"
        numbers = Counter(entry.part for entry in members)
        there = sorted(number for number in numbers if number is not None and 0 <= number < parts)
        for before, after in pairwise([-1, *there, parts]):
            gap: list[Any] = [f"{before + 1} to {after - 1}"] if after > before + 1 else []
            if after - before < MISSING_ROWS - len(rows):
                gap = list(range(before + 1, after))
            for n in gap:
                text = f"part {n} {which} is missing"
                rows.append(Row(f"{store.url}#{set_id}/{n}", None, "failed", "IntegrityError", text))
        for entry in members:
            if entry.part is None or numbers[entry.part] > 1 or not 0 <= entry.part < parts:
                text = f"part {entry.part} {which} is there twice or out of range"
                rows.append(Row(entry.path, None, "failed", "IntegrityError", text))
    return rows


def _extra_files(log: Log) -> list[Row]:
    """Return rows for files of no kept version and of no open job. What goes while this is found out is left out."""
    listed = {entry.path: entry.size for entry in log.store.list() if not entry.path.startswith(HIDDEN)}
    extra = [path for path in reach.unneeded(log, listed) if log.store.stat(path) is not None]
    why = "no version and no open job of the dataset knows this file"
    return [
        Row(log.store.full_path(path), None, "skipped", "ExtraFile", why, file_length=listed[path]) for path in extra
    ]


def check_share(name: str, share: float) -> None:
    """Raise ValueError for an argument that is no share."""
    if not 0 <= share <= 1:
        raise ValueError(f"{name} is a share of the files, from 0 to 1, not {share!r}")


def sampled(snapshot: Snapshot, files: Iterable[FileEntry], share: float) -> list[FileEntry]:
    """Return the files whose turn is today."""
    day, draw = str(clock_ms() // DAY_MS), draws(snapshot)
    return [row for row in files if draw(day, row.path) < share]


def draws(snapshot: Snapshot) -> Callable[[str, str], float]:
    """Return a function of a day and a path, to numbers from 0 to 1. Only who has the keys can foretell them."""
    if not snapshot.entry.files:
        return lambda day, path: 1.0
    table = min(snapshot.entry.files, key=lambda table: table.path)
    bound = binding(snapshot.entry.dataset_id, "table", table.path)
    secret = hashlib.sha256(b"draws" + snapshot.envelope.unwrap(table.key_id, table.wrapped, bound)).digest()
    return partial(drawn, secret)


def drawn(secret: bytes, day: str, path: str) -> float:
    """Return a number from 0 to 1 for a day and a path. Only who has the secret, of 1 to 64 bytes, can foretell it."""
    found = hashlib.blake2b(path_bytes(f"{day}/{path}"), key=secret, digest_size=8).digest()
    return int.from_bytes(found, "big") / 2**64
