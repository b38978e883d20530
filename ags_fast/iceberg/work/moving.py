"""Move files and manifests of a table to new keys and new paths, by tasks on an engine: for `rekey` and `encrypt`.

A job writes its plan first, so that a second run takes up what the first has written. The commit is the last step. If
other commits came meanwhile, the files that they added are moved, too, and the commit is tried again.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from ags_fast.dataset.names import new_job_id
from ags_fast.engines.base import Engine, checked
from ags_fast.engines.local import LocalEngine, client_for
from ags_fast.errors import ConcurrentChangeError
from ags_fast.iceberg import rewriting
from ags_fast.iceberg.commit import raw_metadata, table_io
from ags_fast.iceberg.container import codec_of
from ags_fast.iceberg.garbage import THREADS
from ags_fast.iceberg.locations import open_cost
from ags_fast.iceberg.manifests import DATA, Known
from ags_fast.iceberg.reading import MANIFEST
from ags_fast.iceberg.work.heads import Writer, commit, read_head
from ags_fast.iceberg.work.plans import JOB_ID, Plan, begin_plan
from ags_fast.iceberg.work.tasks import OLD_KEY, FileTask
from ags_fast.jobs.results import JobResult, Row, describe
from ags_fast.keys.metadata import StandardKeyMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pyiceberg.table import Table

    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.reading import Node
    from ags_fast.iceberg.work.heads import Head

__all__ = ["Mover", "move_files"]

ATTEMPTS = 5  # rounds in which other commits added files
SUFFIXES = {"PARQUET": "parquet", "AVRO": "avro", "PUFFIN": "puffin"}


class _FilesLeftError(ConcurrentChangeError):
    """The newest snapshot has files that were not moved yet."""


class _TaskError(Exception):
    """A file could not be moved, so that there is nothing to commit."""


class Mover:
    """A job that moves the files of a table's newest snapshot, or its manifests, to keys of `key_length` bytes.

    `master` is the master key of the job's KEK. Manifests are small: without an engine threads move them.
    """

    def __init__(
        self, table: Table, op: str, engine: Engine | None, master: str, key_length: int, *, manifests: bool = False
    ) -> None:
        self.table, self.io, self.op = table, table_io(table), op
        self._plans = f"{op}-manifests" if manifests else op
        self._at_once = THREADS if manifests else None
        self.rows: dict[str, Row] = {}
        self.moved: dict[str, Known] = {}
        self._engine: Engine = checked(engine) or LocalEngine(0 if manifests else None)
        self._key_length, self._master = key_length, master
        self._kms = client_for(self._engine, self.io.session.kms)
        self.plan: Plan | None = None
        self._warnings: list[str] = []

    @property
    def job_id(self) -> str | None:
        """The id of the job, once it has begun."""
        return self.plan.context.job_id if self.plan else None

    def begin(self, raw: Raw) -> Plan:
        """Return the plan of an earlier run that did not come as far as its commit, or else a new one."""
        if self.plan is None:
            self._codec = codec_of(raw.get("properties") or {})  # else the commit fails when all files have moved
            there = self._begun(raw)
            self.plan = there if there.goes_on(raw) else self._begun(raw, fresh=True)
        return self.plan

    def _begun(self, raw: Raw, *, fresh: bool = False) -> Plan:
        options: Any = {"kms": self._kms, "wrapping_key_id": self._master, "files_at_once": self._at_once}
        return begin_plan(self.io, raw, self._plans, new_job_id(), fresh=fresh, **options)

    def move(self, raw: Raw, files: Iterable[Known]) -> None:
        """Move all files that are not moved yet. `moved` has them afterwards, by their old path.

        If one could not be moved, this raises a _TaskError, and `rows` say why.
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
            old = file.key_metadata  # None: in plaintext
            key = None if old is None else plan.context.wrap(old, OLD_KEY, file.path)
            task = FileTask(file.path, file.format or MANIFEST, file.length, key, planned.to, planned.key, vectors)
            listed = (file.content, file.first_row_id, file.snapshot_id, file.sequence_number, file.counts, self._codec)
            tasks.append(task._replace(begun=file.path in begun, listed=() if file.format else listed))

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

    def moved_to(self, path: str) -> Known:
        """Return what an old path has become. _FilesLeftError if it was not moved yet."""
        if path not in self.moved:
            raise _FilesLeftError(f"another commit added {path}")
        return self.moved[path]

    def changed(self, one: Node, entries: list[rewriting.Record]) -> None:
        """Let entries of a manifest name the moved files. _FilesLeftError if one was not moved yet."""
        for entry in entries:
            file = entry["data_file"]
            moved = self.moved_to(file["file_path"])
            assert moved.key_metadata is not None
            if moved.length != file["file_size_in_bytes"]:  # else each module has the length and place that it had
                file["split_offsets"] = self._split_offsets(moved, file.get("split_offsets"))
            file["file_path"], file["file_size_in_bytes"] = moved.path, moved.length
            file["key_metadata"] = moved.key_metadata.encode()
            referenced = file.get("referenced_data_file")
            if referenced in self.moved:
                file["referenced_data_file"] = self.moved[referenced].path

    def _split_offsets(self, moved: Known, before: list[int] | None) -> list[int] | None:
        """Return where the row groups of a moved file begin, if its entry said it. One alone begins where it did."""
        if moved.split_offsets is None and before and len(before) > 1:
            with self.io.open_known(moved) as file:  # in the plaintext view each page is where it is in the file
                footer = pq.read_metadata(file)
            first = [footer.row_group(i).column(0) for i in range(footer.num_row_groups)]
            moved.split_offsets = [one.dictionary_page_offset or one.data_page_offset for one in first]
        return moved.split_offsets or before

    def summary(self, head: Head) -> dict[str, Any]:
        """Return what the summary of a snapshot says in which all live files have moved."""
        files = {one.path: one for one in head.files()}
        data = [one for one in files.values() if one.content == DATA]
        deletes = [one for one in head.files() if one.content != DATA]
        rows = sum(one.record_count for one in data)
        return {
            JOB_ID: self.job_id,
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
        made = JobResult(self.job_id or new_job_id(), self.op, self.table.location(), None, list(self.rows.values()))
        made.warnings.extend([*warnings, *self._warnings])
        return made

    def end_committed(self, raw: Raw) -> bool:
        """End the plan of an earlier run that came as far as its commit. Returns whether there was one."""
        plan = self._begun(raw)
        if not plan.was_committed(raw):
            return False
        why = ("AlreadyThere", "an earlier run has committed it")
        self.plan, self.rows = plan, {path: Row(path, one.to, "skipped", *why) for path, one in plan.files.items()}
        self.end()
        return True

    def end(self) -> None:
        """Delete the plan. New files of an earlier run that no entry has taken stay as orphans."""
        if self.plan is not None:
            try:
                self.plan.end()
            except FileNotFoundError:
                pass  # no file had to move
            except Exception as error:  # of any storage: the commit is made all the same
                self._warnings.append(
                    f"the plan {self.plan.location} could not be deleted, and no later run will use it: "
                    f"{describe(error)}. Delete it"
                )

    @staticmethod
    def _referenced(files: Iterable[Known]) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for file in files:
            if file.referenced_data_file is not None:
                found.setdefault(file.path, []).append(file.referenced_data_file)
        return found

    def _to(self, raw: Raw, file: Known, job_id: str) -> str:
        """Return the path of a new file: beside the old one if that is in the table's own folder."""
        if file.format is None:
            return Writer(self.io, raw).location(f"{uuid.uuid4()}-m0.avro")
        name = f"{uuid.uuid4()}-{job_id}.{SUFFIXES[file.format]}"
        if file.path.startswith(raw["location"].rstrip("/") + "/"):
            return f"{file.path.rpartition('/')[0]}/{name}"
        return Writer(self.io, raw).location(name, data=True)


def move_files(
    mover: Mover,
    chosen: Callable[[Raw, Head], list[Known]],
    change: Callable[[Raw, Head | None, Writer], Raw],
    *,
    dry_run: bool = False,
) -> Raw | None:
    """Move files, and commit a snapshot that names them. Returns the new metadata.

    `chosen` returns the files or manifests of the newest snapshot that are to move, or refuses. `change` is as for
    `commit`. If one could not be moved, and if `dry_run`, nothing is committed, and None is returned.
    """
    for _ in range(ATTEMPTS):
        mover.table.refresh()
        raw = raw_metadata(mover.table)
        head = read_head(mover.io, raw)
        if dry_run:
            for one in chosen(raw, head) if head is not None else ():
                row = Row(one.path, None, "planned", file_length=one.length, format=one.format or MANIFEST)
                mover.rows[one.path] = row
            return None
        if head is not None:
            mover.begin(raw)  # first of all, since the KMS may refuse
            try:
                mover.move(raw, chosen(raw, head))
            except _TaskError:
                return None
        try:
            made = commit(mover.table, change, known=(raw, head))
        except _FilesLeftError:
            continue
        mover.end()
        return made
    raise ConcurrentChangeError(f"other commits added files, {ATTEMPTS} times in a row: run it again to go on")
