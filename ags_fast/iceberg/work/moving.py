"""Move the files of a table to new keys and new paths, by tasks on an engine: what `rekey` and `encrypt` share.

A job writes its plan first, so that a second run takes up what the first has written. The commit is the last step. If
other commits came meanwhile, the files that they added are moved, too, and the commit is tried again.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ags_fast.dataset.names import new_job_id
from ags_fast.errors import ConcurrentChangeError
from ags_fast.iceberg import rewriting
from ags_fast.iceberg.commit import edit, raw_metadata, table_io
from ags_fast.iceberg.locations import open_cost
from ags_fast.iceberg.manifests import DATA, Known
from ags_fast.iceberg.work.heads import Writer, read_head
from ags_fast.iceberg.work.plans import Plan, begin_plan
from ags_fast.iceberg.work.tasks import OLD_KEY, FileTask
from ags_fast.jobs.engines.base import Engine, checked
from ags_fast.jobs.engines.local import LocalEngine, client_for
from ags_fast.jobs.results import JobResult, Row
from ags_fast.keys.metadata import StandardKeyMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pyiceberg.table import Table

    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.work.heads import Head, Manifest

__all__ = ["Mover", "move_files", "plan_files"]

ATTEMPTS = 5  # rounds in which other commits added files
JOB_ID = "ags-fast.job-id"  # of a snapshot's summary
SUFFIXES = {"PARQUET": "parquet", "AVRO": "avro", "PUFFIN": "puffin"}


class _FilesLeftError(ConcurrentChangeError):
    """The newest snapshot has files that were not moved yet."""


class _TaskError(Exception):
    """A file could not be moved, so that there is nothing to commit."""


class Mover:
    """A job that moves the files of a table's newest snapshot.

    Args:
        table: The table.
        op: The operation.
        engine: Runs the tasks; None: `LocalEngine`.
        master: The master key of the job's KEK.
        key_length: Bytes of a new key.
    """

    def __init__(self, table: Table, op: str, engine: Engine | None, master: str, key_length: int) -> None:
        self.table, self.io, self.op = table, table_io(table), op
        self.rows: dict[str, Row] = {}
        self.moved: dict[str, Known] = {}
        self._engine: Engine = checked(engine) or LocalEngine()
        self._key_length, self._master = key_length, master
        self._kms = client_for(self._engine, self.io.session.kms)
        self.plan: Plan | None = None

    def begin(self, raw: Raw, *, fresh: bool = False) -> Plan:
        """Return the plan, read or made. fresh: made, whatever there is."""
        if self.plan is None or fresh:
            options: Any = {"kms": self._kms, "wrapping_key_id": self._master, "fresh": fresh}
            self.plan = begin_plan(self.io, raw, self.op, new_job_id(), **options)
        return self.plan

    def move(self, raw: Raw, files: Iterable[Known]) -> None:
        """Move all files that are not moved yet. `moved` has them afterwards, by their old path.

        Raises:
            _TaskError: A file could not be moved; `rows` say why.
        """
        todo = {file.path: file for file in files if file.path not in self.moved}
        plan = self.begin(raw)
        fresh = [file for file in todo.values() if file.path not in plan.files]
        begun = todo.keys() - {file.path for file in fresh} if plan.resumed else set()
        for file in fresh:
            plan.add(file.path, self._to(raw, file, plan.context.job_id), self._key_length)
        if fresh:
            plan.save()
        renamed = {old: one.to for old, one in plan.files.items()}
        by_file = self._referenced(files)
        tasks = []
        for file in todo.values():
            planned = plan.files[file.path]
            vectors = tuple((old, renamed[old]) for old in by_file.get(file.path, ()) if old in renamed)
            key = plan.context.wrap(file.key_metadata, OLD_KEY, file.path)
            task = FileTask(file.path, file.format or "", file.length, key, planned.to, planned.key, vectors)
            tasks.append(task._replace(begun=file.path in begun))

        def report(rows: list[Row]) -> None:
            self.rows.update((row.src, row) for row in rows)

        if tasks:
            self._engine.run(plan.context, tasks, open_cost(task.path for task in tasks), report)
        for path, file in todo.items():
            row = self.rows[path]
            if row.status != "ok":
                raise _TaskError
            assert row.dst is not None and row.file_length is not None
            key_metadata = plan.key(path)
            whole = StandardKeyMetadata(key_metadata.encryption_key, key_metadata.aad_prefix, row.file_length)
            self.moved[path] = Known(row.dst, row.file_length, whole, file.content, file.format, file.record_count)

    def changed(self, one: Manifest, entries: list[rewriting.Record]) -> None:
        """Let entries of a manifest name the moved files.

        Raises:
            _FilesLeftError: A file was not moved yet.
        """
        for entry in entries:
            file = entry["data_file"]
            moved = self.moved.get(file["file_path"])
            if moved is None:
                raise _FilesLeftError(f"another commit added {file['file_path']}")
            assert moved.key_metadata is not None
            if moved.length != file["file_size_in_bytes"]:  # else each module has the length and place that it had
                file["split_offsets"] = None
            file["file_path"], file["file_size_in_bytes"] = moved.path, moved.length
            file["key_metadata"] = moved.key_metadata.encode()
            referenced = file.get("referenced_data_file")
            if referenced in self.moved:
                file["referenced_data_file"] = self.moved[referenced].path

    def summary(self, head: Head) -> dict[str, Any]:
        """Return what the summary of a snapshot says in which all live files have moved."""
        files = {one.path: one for one in head.files()}
        data = [one for one in files.values() if one.content == DATA]
        deletes = [one for one in head.files() if one.content != DATA]
        rows = sum(one.record_count for one in data)
        return {
            JOB_ID: self.plan.context.job_id if self.plan else None,
            "added-data-files": len(data),
            "deleted-data-files": len(data),
            "added-delete-files": len(deletes),
            "removed-delete-files": len(deletes),
            "added-records": rows,
            "deleted-records": rows,
            "added-files-size": sum(self.moved[path].length for path in files if path in self.moved),
            "removed-files-size": sum(one.length for one in files.values()),
        }

    def result(self, warnings: Iterable[str] = ()) -> JobResult:
        """Return the result: a row for each file."""
        job_id = self.plan.context.job_id if self.plan else new_job_id()
        made = JobResult(job_id, self.op, self.table.location(), None, list(self.rows.values()))
        made.warnings.extend(warnings)
        return made

    def was_committed(self, raw: Raw, head: Head) -> bool:
        """Tell whether an earlier run came as far as its commit. Then nothing is left to do but to delete its plan.

        Only the commit of a plan names the new files of that plan. If the table was rolled back since, or other files
        have taken their place, the keys in the plan were in use: it is given up, and the files get keys of their own.
        """
        plan = self.begin(raw)
        if not plan.resumed:
            return False
        if not {one.to for one in plan.files.values()} & {one.path for one in head.files()}:
            jobs = {(one.get("summary") or {}).get(JOB_ID) for one in raw.get("snapshots") or ()}
            if plan.context.job_id in jobs:
                self.begin(raw, fresh=True)
            return False
        self.rows = {path: Row(path, one.to, "ok") for path, one in plan.files.items()}
        return True

    def resume_committed(self, raw: Raw) -> bool:
        """End the plan of an earlier run that came as far as its commit. Returns whether there was one."""
        head = read_head(self.io, raw)
        if head is None or not self.was_committed(raw, head):
            return False
        self.end()
        return True

    def end(self) -> None:
        """Delete the plan. New files of an earlier run that no entry has taken stay as orphans."""
        if self.plan is not None:
            with suppress(OSError):
                self.plan.end()

    @staticmethod
    def _referenced(files: Iterable[Known]) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for file in files:
            if file.referenced_data_file is not None:
                found.setdefault(file.path, []).append(file.referenced_data_file)
        return found

    def _to(self, raw: Raw, file: Known, job_id: str) -> str:
        """Return the path of a new file: beside the old one if that is in the table's own folder."""
        name = f"{uuid.uuid4()}-{job_id}.{SUFFIXES[file.format or '']}"
        if file.path.startswith(raw["location"].rstrip("/") + "/"):
            return f"{file.path.rpartition('/')[0]}/{name}"
        return Writer(self.io, raw).location(name, data=True)


def plan_files(mover: Mover, chosen: Callable[[Raw, Head], list[Known]]) -> JobResult:
    """Return the result of a dry run: a row for each file that would move. Nothing is written.

    Args:
        mover: The job.
        chosen: As for `move_files`.
    """
    raw = raw_metadata(mover.table)
    head = read_head(mover.io, raw)
    for one in chosen(raw, head) if head is not None else ():
        mover.rows[one.path] = Row(one.path, None, "planned", file_length=one.length, format=one.format)
    return mover.result()


def move_files(
    mover: Mover, chosen: Callable[[Raw, Head], list[Known]], change: Callable[[Raw, Head, Writer], Raw]
) -> Raw | None:
    """Move files, and commit a snapshot that names them.

    Args:
        mover: The job.
        chosen: Returns the files of the newest snapshot that are to move, or refuses.
        change: Returns the new metadata, after it has written what they name.

    Returns:
        The new metadata; None if a file could not be moved, and nothing was committed.

    Raises:
        ConcurrentChangeError: Other commits added files again and again.
    """
    for _ in range(ATTEMPTS):
        mover.table.refresh()
        raw = raw_metadata(mover.table)
        head = read_head(mover.io, raw)
        if mover.resume_committed(raw):
            return raw
        if head is not None:
            try:
                mover.move(raw, chosen(raw, head))
            except _TaskError:
                return None
        attempt = _Attempt(mover, change)
        try:
            made = edit(mover.table, attempt.change)
        except _FilesLeftError:
            attempt.clean()
            continue
        except BaseException:
            attempt.abandon()
            raise
        mover.end()
        return made
    raise ConcurrentChangeError(f"other commits added files, {ATTEMPTS} times in a row: run it again to go on")


class _Attempt:
    """One commit, which may be tried on several metadata."""

    def __init__(self, mover: Mover, change: Callable[[Raw, Head, Writer], Raw]) -> None:
        self._mover, self._change = mover, change
        self._writer: Writer | None = None

    def change(self, raw: Raw) -> Raw:
        """Return the new metadata."""
        self.clean()
        head: Any = read_head(self._mover.io, raw)
        self._writer = Writer(self._mover.io, raw)
        return self._change(raw, head, self._writer)

    def abandon(self) -> None:
        """After an error, delete what was written, unless the catalog may have made the commit all the same."""
        if self._writer is not None:
            self._writer.abandon()

    def clean(self) -> None:
        """Delete what was written for metadata that were not committed."""
        if self._writer is not None:
            self._writer.clean()
