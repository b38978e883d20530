"""Encrypt a tree of files into a dataset."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ags_fast.ags1 import DEFAULT_BLOCK_SIZE, check_block_size, encrypted_length
from ags_fast.dataset.access import Access
from ags_fast.dataset.entries import FileEntry, source_stamp
from ags_fast.dataset.key_material import check_key_material
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.names import FORMATS, new_job_id, object_name
from ags_fast.dataset.open_jobs import resume_plan
from ags_fast.dataset.planning import begin_plan, continue_plan, reserve_keys
from ags_fast.dataset.policy import Policy
from ags_fast.errors import AgsError, PolicyError
from ags_fast.fs import Store
from ags_fast.jobs.engines.local import client_for
from ags_fast.jobs.results import JobResult, Row, counted, describe, result_of, shown, shown_counts
from ags_fast.jobs.run import Options, check_apart, commit_files, envelope_for, run_tasks
from ags_fast.jobs.sources import Choice, aad_prefixes, check_names, list_sources, names_around
from ags_fast.jobs.work.context import Context, SourceChangedError, Task, encrypted_already
from ags_fast.jobs.work.dispatch import work_on
from ags_fast.jobs.work.rows import planned_row
from ags_fast.keys.kms import KmsClient, check_key_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ags_fast._types import FilePath
    from ags_fast.dataset.access import KeyPlace
    from ags_fast.dataset.plan import Plan
    from ags_fast.dataset.versions import Version
    from ags_fast.fs import Entry
    from ags_fast.jobs.engines.base import Engine
    from ags_fast.jobs.results import Progress


@counted
def encrypt_files(  # noqa: PLR0913 the contract's arguments
    src: FilePath,
    dataset: FilePath,
    *,
    kms: KmsClient | Mapping[str, str],
    wrapping_key_id: str | None = None,
    engine: Engine | None = None,
    format: str = "ags1",
    double_wrap: bool = True,
    dek_length: int = 16,
    block_size: int = DEFAULT_BLOCK_SIZE,
    aad_prefix: str | bytes | None = None,
    column_keys: Mapping[str, str] | None = None,
    overwrite: bool = False,
    resume: str | None = None,
    on_error: str = "row",
    max_failures: int | None = None,
    fsync: bool = True,
    verify_after: bool = False,
    delete_sources: bool = False,
    dry_run: bool = False,
    policy: Policy | None = None,
    min_version: int | None = None,
    pin: str | None = None,
    hidden: bool = False,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    links: str = "skip",
    progress: Progress = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
    key_material: str | None = None,
) -> JobResult:
    """Encrypt every file under `src` into `dataset`, and commit a version with these files.

    The tree is kept. Also kept are the content, the permission bits and the time of the last change of each file. Not
    kept are owners, ACLs, extended attributes, setuid, setgid and sticky bits, empty folders, the identity of hard
    links, and holes in sparse files.

    A file that fails is a failed row. A source that the dataset has unchanged, or that is encrypted already, is a row
    with the status "skipped". So is each source that is left out, with the kind as `error_class`: "HiddenFile",
    "Excluded", "OutsideLink", "DanglingLink", "LinkLoop", "SpecialFile" (pipes, sockets, devices), "EmptyFolder",
    "ReservedName" (`_ags`), "TemporaryFile". `JobResult.left_out` counts these sources. If every source is left out,
    the job gives a UserWarning.

    Args:
        src: The folder of the sources: a local path or an fsspec URL.
        dataset: The folder of the dataset: a local path or an fsspec URL.
        kms: The properties of a KMS, or a client. Workers make clients of their own from the client's properties.
        wrapping_key_id: The id of the master key in the KMS. A new dataset needs one; None: the master key in use.
        engine: What runs the tasks; None: `LocalEngine`.
        format: "ags1" makes an AGS1 stream of every file, whatever the file is. "parquet" encrypts Parquet files as
            such, under their own names (Parquet Modular Encryption); any other file fails. A second run with "ags1"
            then takes the files that are left.
        double_wrap: True: a KEK of the dataset wraps the data keys, and the master key wraps the KEK, so that a process
            asks the KMS once. False: the KMS wraps every data key.
        dek_length: Bytes of a data key: 16, 24 or 32.
        block_size: Bytes of plaintext in a block of an AGS1 stream.
        aad_prefix: None: 16 random bytes for each file. A template such as ``"customers.part{n}"`` makes the new files
            a numbered set: the set is committed whole or, if one of its files fails, not at all.
        column_keys: For "parquet": {dotted path: master key} of columns, or of groups of columns. These columns get
            data keys of their own, which only a user of that master key can open. A file without such a column fails.
        overwrite: Replace files that the dataset has and whose source has changed.
        resume: Continue a dead job on this source. "length" takes a file of the planned length as finished; "verify"
            also checks the file's tags. "length" takes a Parquet file as finished if its footer, which is written last,
            opens under the planned key.
        on_error: "row": a file that fails is a row. "raise": stop at the first file that fails.
        max_failures: Stop after more than this number of failed files; None: never.
        fsync: Commit the version only when its files are on the disk.
        verify_after: Read each file back before the file counts as written.
        delete_sources: Delete the sources after the commit, if every file was read back from storage intact. Sources
            that an earlier run encrypted are deleted too, if their bytes are the same.
        dry_run: Only plan; the rows have the status "planned".
        policy: From now on, how the dataset's KEKs are shared and which old versions are kept; None keeps the
            dataset's policy.
        min_version: The dataset must exist, and its newest version must have at least this number.
        pin: The dataset must exist, and its newest version must descend from the version that this pin (see
            `JobResult.pin`) names.
        hidden: Also take files whose name, or the name of a folder above them, begins with ``.`` or ``_``, and
            checksums (``x.crc``). Readers of such folders skip these files.
        include: Take only what one of these patterns of `fnmatch` matches. ``*`` also matches "/". A pattern that
            matches a folder stands for everything in the folder.
        exclude: Leave out what one of these patterns matches.
        links: What to do with symbolic links that lead out of `src`: "skip" leaves them out, "follow" follows them, and
            "error" refuses them, and links that lead nowhere, before the job begins. A link that stays inside `src` is
            taken as the file or folder that the link leads to.
        progress: None shows a bar on a terminal. "lines" does, too, and prints a line every 30 s to a standard error
            that is not a terminal. True always shows a bar, and False nothing. A callable gets rows as they come.
        key_store: Where the dataset's keys are; None: in the dataset.
        storage_options: Options for fsspec.
        key_material: For "parquet": "keytools" lets Parquet's own key tools (parquet-java in Spark, pyarrow) open the
            new files, too: the KMS wraps each data key once more, and the file stores that wrap and its AAD prefix.
            docs/keys.md says what this costs. None: only the dataset's manifests open the files.

    Returns:
        A row for each source, and the version.

    Raises:
        JobError: More files failed than `on_error` and `max_failures` allow. The plan stays for `resume`.
        IntegrityError: The dataset does not descend from the pin. Nothing is written or deleted.
        PolicyError: The dataset is older than `min_version`. Nothing is written or deleted.
        FileExistsError: A source of a file in the dataset has changed, and `overwrite` is False.
        FileNotFoundError: There is no folder `src`, or no dataset although `pin` or `min_version` is given.
        TypeError: `kms` is a client without properties, and the engine is not ``LocalEngine(0)``.
        ValueError: An argument, such as the pin, is malformed.
    """
    wish = _Encryption(
        source=Store(src, storage_options, follow=links == "follow"),
        target=Store(dataset, storage_options),
        wrapping_key_id=wrapping_key_id,
        format=_checked_format(format, column_keys, key_material),
        masters=_check_columns(column_keys or {}),
        double_wrap=double_wrap,
        dek_length=_checked_dek_length(dek_length),
        block_size=check_block_size(block_size),
        template=aad_prefix,
        overwrite=overwrite,
        options=Options(engine, resume, on_error, max_failures, progress),
        fsync=fsync,
        verify_after=verify_after,
        delete_sources=delete_sources,
        dry_run=dry_run,
        policy=policy,
        key_material=key_material,
    )
    check_key_material(key_material, dek_length)
    choice = Choice.of(hidden, include, exclude, links)
    check_apart(wish.source, wish.target)
    listed, skipped = _list(wish.source, choice)
    client = client_for(wish.options.engine, kms, wish.source, wish.target)
    access = Access(wish.target, client, key_store, storage_options, None, min_version, pin)
    with ExitStack() as held:
        opened = _open(wish, access)
        found = _look(wish, opened, listed, held)
        del listed  # a million files take some memory
        found.skipped = skipped + found.skipped
        if opened is None or dry_run:
            planned = [
                planned_row(wish.source.full_path(entry.source), wish.target.full_path(entry.file), entry)
                for entry in found.entries
            ]
            return found.result(wish, planned)
        return _encrypt(wish, opened, found, held) if found.entries else _nothing_new(wish, opened, found)


@dataclass(frozen=True)
class _Encryption:
    """The arguments of `encrypt_files`, checked."""

    source: Store
    target: Store
    wrapping_key_id: str | None
    format: str
    masters: dict[str, str]  # master keys of columns
    double_wrap: bool
    dek_length: int
    block_size: int
    template: str | bytes | None  # for AAD prefixes
    overwrite: bool
    options: Options
    fsync: bool
    verify_after: bool
    delete_sources: bool
    dry_run: bool
    policy: Policy | None
    key_material: str | None

    @property
    def facts(self) -> dict[str, str]:
        """Return what a resumed job must share with the first job."""
        return {"operation": "encrypt", "source": shown(self.source.url)}


@dataclass
class _Found:
    """The files to do, and those that need nothing."""

    job_id: str
    base: Version | None  # the version that the job is planned on
    plan: Plan | None  # the plan of a dead job, to resume
    planned: list[FileEntry]  # the files of that plan
    entries: list[FileEntry]  # files to make, without keys yet
    same: list[FileEntry]  # files that the dataset has, and whose sources have not changed
    replaced: dict[str, FileEntry]  # the files that new ones replace, by path
    skipped: list[Row]

    def result(self, wish: _Encryption, rows: list[Row]) -> JobResult:
        """Return a result without a new version."""
        return result_of(wish.target, "encrypt", self.job_id, self.base, rows + self.skipped)


def _checked_format(format: str, column_keys: Mapping[str, str] | None, key_material: str | None) -> str:
    if format not in FORMATS:
        raise ValueError(f"format must be {' or '.join(map(repr, FORMATS))}, not {format!r}")
    if column_keys is not None and format != "parquet":
        raise ValueError("column_keys are for format='parquet'")
    if key_material is not None and format != "parquet":
        raise ValueError("key_material is for format='parquet'")
    return format


def _checked_dek_length(dek_length: int) -> int:
    if dek_length not in (16, 24, 32):
        raise ValueError(f"dek_length must be 16, 24 or 32 bytes, not {dek_length}")
    return dek_length


def _list(source: Store, choice: Choice) -> tuple[list[Entry], list[Row]]:
    """List the files to take, and a row for each thing that is left out. Raises FileNotFoundError without a folder."""
    if source.local and not source.exists():
        if os.path.isfile(source.url):
            raise NotADirectoryError(
                f"{source.url} is a file, and a job takes a folder: AgsWriter, or `ags-fast stream encrypt`, encrypts "
                "one file"
            )
        raise FileNotFoundError(f"there is no folder {source.url}")
    listed, left_out = list_sources(source, choice)
    if not listed and not left_out and not source.exists():
        raise FileNotFoundError(f"there is no folder {source.url}")
    counts = Counter(kind for _, kind, _ in left_out)
    if not listed and counts.keys() - {"EmptyFolder"}:
        warnings.warn(
            f"no file of {source.url} is encrypted: all of them are left out ({shown_counts(counts)})", stacklevel=4
        )
    return listed, [Row(source.full_path(path), None, "skipped", kind, reason) for path, kind, reason in left_out]


def _open(wish: _Encryption, access: Access) -> Ledger | None:
    """Open the dataset, or create it. Returns None in a dry run without a dataset."""
    known = access.pin is not None or bool(access.min_version)  # then the dataset must exist
    opened = None
    if wish.dry_run or known or wish.wrapping_key_id is None:
        try:
            opened = access.open()
        except FileNotFoundError:
            if known:
                raise
            if wish.wrapping_key_id is None:
                raise ValueError(f"{wish.target.url} is a new dataset: name its master key, wrapping_key_id") from None
    if not wish.dry_run:
        wish.target.check_writable()
        if opened is None:
            assert wish.wrapping_key_id is not None
            opened = access.create(wish.wrapping_key_id)
    return opened


def _look(wish: _Encryption, opened: Ledger | None, listed: list[Entry], held: ExitStack) -> _Found:
    """Compare the source with the dataset, and with the plan of a dead job if one is to be resumed."""
    plan, base, present = None, None, dict[str, FileEntry]()  # entries of the dataset at the listed names
    around = partial(names_around, listed, wish.format)
    if opened is not None:
        base, present = opened.load_around(around, writes=True)
        plan = resume_plan(opened, wish.facts, held) if wish.options.resume and not wish.dry_run else None
        if plan is not None and plan.committed() is not None:  # the job died between its commit and its end
            plan.end()
            plan = None
            base, present = opened.load_around(around)
    job_id = plan.job_id if plan else new_job_id()
    skipped: list[Row] = []
    if wish.template is not None:
        listed, skipped = _without_encrypted(wish.source, listed, present, wish.format)
    planned = plan.entries() if plan is not None else []
    entries, same = _new_entries(wish, listed, present, job_id)
    if plan is not None and _numbering(planned, job_id) != _numbering(entries, job_id):
        plan.end()  # a set with other members is another set
        plan = None
        job_id = new_job_id()
        entries, same = _new_entries(wish, listed, present, job_id)
    skipped += [_unchanged(wish.source, wish.target, entry) for entry in same]
    replaced = {entry.path: present[entry.path] for entry in entries if entry.path in present}
    check_names(entries, [entry for path, entry in present.items() if path not in replaced])
    return _Found(job_id, base, plan, planned, entries, same, replaced, skipped)


def _nothing_new(wish: _Encryption, opened: Ledger, found: _Found) -> JobResult:
    if found.plan is not None:
        found.plan.end()
    result = found.result(wish, [])
    if wish.delete_sources:
        _delete_unchanged(opened, wish.source, found.same, result)
    return result


def _encrypt(wish: _Encryption, opened: Ledger, found: _Found, held: ExitStack) -> JobResult:
    """Give the files keys, make the plan durable, write the files, commit them."""
    job_id, base, plan = found.job_id, found.base, found.plan
    laid_down = wish.policy or (base.policy if base else Policy())
    masters = [wish.masters] * len(found.entries)
    entries = reserve_keys(
        opened,
        laid_down,
        job_id,
        wish.wrapping_key_id,
        wish.double_wrap,
        found.entries,
        masters,
        begins=plan is None,
    )
    if plan is None:
        number = base.number if base else 0
        plan, entries = begin_plan(opened, held, job_id, entries, wish.dek_length, base=number, **wish.facts)
    else:
        entries = continue_plan(opened, plan, found.planned, entries, wish.dek_length)
    context = Context(
        "encrypt",
        job_id,
        opened.id,
        wish.target,
        envelope_for(opened, entries),
        wish.source,
        fsync=wish.fsync,
        verify_after=wish.verify_after,
        resume=wish.options.resume,
    )
    rows = run_tasks(context, [Task(entry) for entry in entries], wish.options, plan)
    if any(row.status == "failed" for row in rows) and any(entry.set_id == job_id for entry in entries):
        return found.result(wish, _held_back(rows))
    result = commit_files(plan, context, entries, rows, base, found.replaced, wish.policy)
    if wish.delete_sources:
        _delete_sources(opened, wish.source, entries, result, wish.options)
    result.rows += found.skipped
    if wish.delete_sources:
        _delete_unchanged(opened, wish.source, found.same, result)
    return result


def _new_entries(
    wish: _Encryption, listed: Sequence[Entry], present: Mapping[str, FileEntry], job_id: str
) -> tuple[list[FileEntry], list[FileEntry]]:
    """Return the entries to make, without keys yet, and the unchanged ones. FileExistsError if overwrite is needed."""
    new, same, changed = [], [], []
    for found in listed:
        old = present.get(found.path)
        if old is None:
            new.append(found)
        elif old.is_of(found.size, found.stamp):
            same.append(old)
        else:
            changed.append((found, old))
    if changed and not wish.overwrite:
        more = f" and {len(changed) - 1} more files" if len(changed) > 1 else ""
        raise FileExistsError(
            f"the dataset has {changed[0][0].path!r}{more} from sources that have changed since: "
            "pass overwrite=True to replace them in a new version"
        )
    numbered = wish.template is not None
    made = [
        FileEntry(
            path=found.path,
            **_shape(wish, found),
            key_id="",
            wrapped_dek=b"",
            column_keys=None,
            aad_prefix=prefix,
            job_id=job_id,
            set_id=job_id if numbered else None,
            part=n if numbered else None,
            parts=len(new) if numbered else None,
        )
        for n, (found, prefix) in enumerate(zip(new, aad_prefixes(wish.template, len(new)), strict=True))
    ]
    for found, old in changed:  # a member of a set keeps its number
        prefix = os.urandom(16) if old.set_id is None else old.aad_prefix
        made.append(old._replace(**_shape(wish, found, job_id), aad_prefix=prefix, job_id=job_id))
    return made, same


def _shape(wish: _Encryption, found: Entry, *marks: str) -> dict[str, Any]:
    """Return the fields of an entry that come from its source and its format."""
    ags1 = wish.format == "ags1"
    return {
        "file": object_name(found.path, *marks, format=wish.format),
        "format": wish.format,
        "plain_length": found.size,
        "file_length": encrypted_length(found.size, wish.block_size) if ags1 else 0,
        "block_size": wish.block_size if ags1 else 0,
        "source": found.path,
        "stamp": source_stamp(wish.format, found.size, found.stamp),
        "mode": found.mode,
        "mtime_ns": found.mtime_ns,
        "key_material": None if wish.key_material is None else (),
    }


def _unchanged(source: Store, target: Store, entry: FileEntry) -> Row:
    return Row(
        source.full_path(entry.path),
        target.full_path(entry.file),
        "skipped",
        "Unchanged",
        "the dataset has it, and the source has not changed since",
        entry.plain_length,
        entry.file_length,
        entry.block_size or None,
        entry.format,
        entry.key_id,
    )


def _check_columns(column_keys: Mapping[str, str]) -> dict[str, str]:
    for column, key_id in column_keys.items():
        if not isinstance(column, str):
            raise TypeError(f"column_keys names columns by dotted paths, not by {type(column).__name__}")
        if not column or "\0" in column:
            raise ValueError(f"column_keys names {column!r}, which is not a column's path")
        check_key_id(key_id)
    return dict(column_keys)


def _without_encrypted(
    source: Store, listed: Sequence[Entry], present: Mapping[str, FileEntry], format: str
) -> tuple[list[Entry], list[Row]]:
    """Split off, before a numbered set counts its files, those that are encrypted already. Returns rest and rows."""
    left, rows = [], []
    for found in listed:
        head = bytearray(8)
        if found.path not in present and found.size >= len(head):
            try:
                with source.open_once(found.path) as file:
                    file.readinto(head)
            except (OSError, PolicyError):
                pass  # the task reports the error as the row of the file
        reason = encrypted_already(bytes(head))
        if reason is None and format == "parquet" and head[:4] == b"PAR1" and found.path not in present:
            from ags_fast.jobs.work import parquet

            reason = parquet.source_encrypted_already(source, found)
        if reason is not None:
            name = source.full_path(found.path)
            rows.append(Row(name, None, "skipped", "AlreadyEncryptedError", reason, found.size))
        else:
            left.append(found)
    return left, rows


def _numbering(entries: Sequence[FileEntry], job_id: str) -> dict[str, tuple[Any, ...]]:
    return {entry.path: (entry.aad_prefix, entry.part, entry.parts) for entry in entries if entry.set_id == job_id}


def _held_back(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a set that is not committed because it is incomplete."""
    why = "another file of its numbered set failed, so none of them is in the dataset: run the job again with resume"
    return [
        row._replace(status="failed", error_class="IncompleteSetError", error=why) if row.status == "ok" else row
        for row in rows
    ]


def _delete_sources(
    dataset: Ledger, source: Store, entries: Sequence[FileEntry], result: JobResult, options: Options
) -> None:
    """Delete the sources after every file was read back from storage."""
    made = {dataset.store.full_path(entry.file): entry for entry in entries}
    good = [made[row.dst] for row in result.rows if row.status == "ok" and row.dst in made]
    context = Context("verify", result.job_id, dataset.id, dataset.store, envelope_for(dataset, good))
    checked = {row.src: row for row in run_tasks(context, [Task(entry) for entry in good], options, None)}
    for i, row in enumerate(result.rows):
        check = checked.get(row.dst or "")
        if check is not None and check.status != "ok":
            result.rows[i] = row._replace(status="failed", error_class=check.error_class, error=check.error)
    if result.failed:
        return
    _delete(dataset, source, good, result, lambda entry: True)


def _delete_unchanged(dataset: Ledger, source: Store, same: Sequence[FileEntry], result: JobResult) -> None:
    """Delete sources that an earlier run encrypted but did not delete. Bytes are compared: that run may be long ago."""
    if result.failed or not same:
        return
    context = Context("decrypt", result.job_id, dataset.id, dataset.store, envelope_for(dataset, same), source)
    _delete(dataset, source, same, result, lambda entry: work_on(entry.format).same_as_source(context, entry))


def _delete(
    dataset: Ledger,
    source: Store,
    entries: Sequence[FileEntry],
    result: JobResult,
    may_go: Callable[[FileEntry], bool],
) -> None:
    rows = {row.dst: i for i, row in enumerate(result.rows)}
    for entry in entries:
        try:
            there = source.stat(entry.path)
            if there is None:
                continue
            if not entry.is_of(there.size, there.stamp):
                raise SourceChangedError("the source has changed since")
            if not may_go(entry):
                raise SourceChangedError("the source has other bytes, but the same size and time of change")
            source.delete_read(there)
        except (AgsError, OSError) as error:  # the file is committed, and other sources are deleted by now: only report
            i = rows[dataset.store.full_path(entry.file)]
            why = f"the file is in the dataset, but its source was not deleted: {describe(error)}"
            result.rows[i] = result.rows[i]._replace(status="failed", error_class=type(error).__name__, error=why)
