"""Encrypt a tree of files into a dataset."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from ags_fast._types import FileFormat, FilePath, KeyMaterial, Links, OnError, Resume, check_choice
from ags_fast.ags1 import DEFAULT_BLOCK_SIZE, check_block_size, encrypted_length
from ags_fast.dataset.access import Access
from ags_fast.dataset.change import Wish
from ags_fast.dataset.entries import FileEntry
from ags_fast.dataset.entry import main_key
from ags_fast.dataset.files.contents import settled
from ags_fast.dataset.job import Job
from ags_fast.dataset.key_material import check_key_material
from ags_fast.dataset.keys import check_not_left, kinds_of_files, scopes_of
from ags_fast.dataset.kinds import Want, clock_ms
from ags_fast.dataset.names import check_path, folders_above, new_job_id, written_name
from ags_fast.dataset.policy import Policy
from ags_fast.engines.base import FILES_AT_ONCE
from ags_fast.engines.local import client_for
from ags_fast.errors import PolicyError
from ags_fast.fs import TIMES_NS, Store
from ags_fast.jobs import run, sources
from ags_fast.jobs.results import JobResult, Row, counted, describe, shown_counts
from ags_fast.jobs.retention import apply_retention
from ags_fast.jobs.work.context import encrypted_already
from ags_fast.jobs.work.rows import planned_row
from ags_fast.keys.envelope import in_threads
from ags_fast.keys.kms import check_key_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ags_fast.dataset.entry import Entry as Version
    from ags_fast.dataset.snapshot import Snapshot
    from ags_fast.engines.base import Engine
    from ags_fast.fs import Entry
    from ags_fast.jobs.arguments import Reach
    from ags_fast.jobs.results import Progress


@counted
def encrypt_files(  # noqa: PLR0913 the contract's arguments
    src: FilePath,
    dataset: FilePath,
    *,
    wrapping_key_id: str | None = None,
    engine: Engine | None = None,
    format: FileFormat = "ags1",
    double_wrap: bool = True,
    dek_length: int = 16,
    block_size: int | str = DEFAULT_BLOCK_SIZE,
    aad_prefix: str | bytes | None = None,
    column_keys: Mapping[str, str] | None = None,
    overwrite: bool = False,
    ignore_ctime: bool = False,
    checksum: bool = False,
    resume: Resume | None = None,
    on_error: OnError = "row",
    max_failures: int | None = None,
    fsync: bool = True,
    verify_after: bool = False,
    delete_sources: bool = False,
    delete: bool = False,
    allow_empty: bool = False,
    dry_run: bool = False,
    policy: Policy | None = None,
    hidden: bool = False,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    links: Links = "skip",
    progress: Progress = None,
    key_material: KeyMaterial | None = None,
    **at: Unpack[Reach],
) -> JobResult:
    """Encrypt every file under `src` into `dataset`, and commit a version with these files.

    The tree is kept. Also kept are the content, the permission bits and the time of the last change of each file. Not
    kept are owners, ACLs, extended attributes, setuid, setgid and sticky bits, empty folders, the identity of hard
    links, and holes in sparse files.

    Files of the dataset whose sources are gone stay, unless `delete` is given.

    A file that fails is a failed row. So is a source whose path no dataset can have: one with an empty part, "." or
    "..", or one below the path of another source. A source that the dataset has unchanged, or that is encrypted
    already, is a row with the status "skipped". So is each source that is left out, with the kind as `error_class`:
    "HiddenFile", "Excluded", "OutsideLink", "DanglingLink", "LinkLoop", "SpecialFile" (pipes, sockets, devices),
    "EmptyFolder", "ReservedName" (`_ags`), "TemporaryFile". `JobResult.left_out` counts these sources. If every source
    is left out, the job gives a UserWarning.

    Args:
        src: The folder of the sources: a local path or an fsspec URL.
        dataset: The folder of the dataset: a local path or an fsspec URL.
        wrapping_key_id: The id of the master key in the KMS. A new dataset needs one; None: the master key in use.
        engine: What runs the tasks; None: `LocalEngine`.
        format: "ags1" makes an AGS1 stream of every file, whatever the file is. "parquet" encrypts Parquet files as
            such, under their own names (Parquet Modular Encryption); any other file fails. "auto" takes the files that
            begin and end with ``PAR1``, whatever their names, as "parquet", and all others as "ags1".
        double_wrap: True: a KEK of the dataset wraps the data keys, and the master key wraps the KEK, so that a process
            asks the KMS once. False: the KMS wraps every data key.
        dek_length: Bytes of a data key: 16, 24 or 32.
        block_size: Bytes of plaintext in a block of an AGS1 stream, as a number or as text such as ``"1M"``.
        aad_prefix: None: 16 random bytes for each file. A template such as ``"customers.part{n}"`` makes the new files
            a numbered set: the set is committed whole or, if one of its files fails, not at all.
        column_keys: For Parquet files: {dotted path: master key} of columns, or of groups of columns. These columns get
            data keys of their own, which only a user of that master key can open. A file without such a column fails.
        overwrite: Replace files that the dataset has and whose source has changed: in its size, its time of change, an
            object's etag, or, on a local disk, its ctime. If only the ctime differs, as after ``chmod -R``, the source
            is read and compared with the dataset's file, for which its keys must open, and written only if it differs.
        ignore_ctime: Take a source of the same size and time of change as unchanged, and read nothing.
        checksum: Keep a keyed digest (HMAC-SHA-256) of each source that is encrypted, for which the source is read
            twice. And compare each source whose digest is kept by its bytes alone, whatever its times or etag say: the
            source is read, and the dataset's file is not. A source without a digest is compared as without `checksum`.
        resume: Continue the newest dead job on this source. "length" takes a file of the planned length as finished;
            "verify" also checks the file's tags. "length" takes a Parquet file as finished if its footer, which is
            written last, opens under the planned key.
        on_error: "row": a file that fails is a row. "raise": stop at the first file that fails.
        max_failures: Stop after more than this number of failed files; None: never.
        fsync: Commit the version only when its files are on the disk.
        verify_after: Read each file back before the file counts as written.
        delete_sources: Delete the sources after the commit, if every file was read back from storage intact. Sources
            that an earlier run encrypted are deleted too, if their bytes are the same.
        delete: Mirror: the same version leaves out the files of the dataset whose sources are gone. Each is a row with
            the `error_class` "Removed"; older versions keep the file. What `include`, `exclude`, `hidden` or `links`
            leaves out is not gone. If a file fails, none is removed.
        allow_empty: Let `delete` remove all files because the source has none.
        dry_run: Only plan; the rows have the status "planned".
        policy: From now on, how the dataset's KEKs are shared and which old versions are kept, also if there is
            nothing to encrypt; None keeps the dataset's policy.
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
        key_material: For Parquet files: "keytools" lets Parquet's own key tools (parquet-java in Spark, pyarrow) open
            the new files, too: the KMS wraps each data key once more, and the file stores that wrap and its AAD prefix.
            docs/keys.md says what this costs. None: only the dataset's tables open the files.
        **at: How the dataset is reached, and the errors if it is not: see `Reach`. With `pin` or `min_version` the
            dataset must exist.

    Returns:
        A row for each source, and the version.

    Raises:
        JobError: More files failed than `on_error` and `max_failures` allow. The plan stays for `resume`.
        JobEndedError: Another process has ended the job, as a sweep does with a job that is silent for long.
        ConcurrentChangeError: Another job has changed a path of a numbered set: none of the set is in the dataset.
        UnknownOutcomeError: The storage does not answer: the version may be there, now or later.
        FileExistsError: A source of a file in the dataset has changed, and `overwrite` is False.
        FileNotFoundError: There is no folder `src`, no dataset although `pin` or `min_version` is given, or no source,
            so that `delete` would remove everything.
        ValueError: An argument is malformed.
    """
    _check(format, column_keys, key_material, dek_length)
    if delete and delete_sources:
        raise ValueError("delete_sources and delete: the next run would find no source, and remove all files")
    wish = _Encryption(
        source=Store(src, at.get("storage_options"), follow=links == "follow"),
        target=Store(dataset, at.get("storage_options")),
        wrapping_key_id=wrapping_key_id,
        format=format,
        masters=dict(column_keys or {}),
        double_wrap=double_wrap,
        dek_length=dek_length,
        block_size=check_block_size(block_size),
        template=aad_prefix,
        overwrite=overwrite,
        ignore_ctime=ignore_ctime,
        checksum=checksum,
        options=run.Options(engine, progress, on_error, max_failures, resume, fsync=fsync, verify_after=verify_after),
        delete_sources=delete_sources,
        policy=policy,
        key_material=key_material,
        delete=delete,
        choice=sources.Choice.of(hidden, include, exclude, links),
    )
    run.check_apart(wish.source, wish.target)
    listed, skipped = sources.list_sources(wish.source, wish.choice)
    if delete and not listed and not allow_empty:
        raise FileNotFoundError(f"{wish.source.url} has no file to encrypt: to remove all files, pass allow_empty=True")
    counts = Counter(row.error_class or "" for row in skipped)
    if not listed and counts.keys() - {"EmptyFolder"}:
        left_out = shown_counts(dict(sorted(counts.items())))
        warnings.warn(f"no file of {wish.source.url} is encrypted: all of them are left out ({left_out})", stacklevel=4)
    at["kms"] = client_for(wish.options.engine, at["kms"], wish.source, wish.target)
    access = Access.of(wish.target, **at)
    snapshot = _opened(wish, access)
    if snapshot is not None and not dry_run:
        wish.target.check_writable()
    found = _look(wish, snapshot, listed, skipped)
    del listed  # a million files take some memory
    if far := [row.path for row in found.new if row.mtime_ns in TIMES_NS]:
        shown = ", ".join(map(repr, far[:20]))
        warnings.warn(f"{len(far)} files keep the nearest time of the years 1677 to 2262: {shown}", stacklevel=4)
    if dry_run:
        return _planned(wish, snapshot, found)
    if snapshot is None and found.new:
        snapshot = _created(wish, access)
    if snapshot is None:
        return found.result(wish, None, [])
    return _encrypt(wish, snapshot, found) if found.new or found.gone else _nothing_new(wish, snapshot, found)


@dataclass(frozen=True, repr=False, eq=False)
class _Encryption:
    """The arguments of `encrypt_files`, checked."""

    source: Store
    target: Store
    wrapping_key_id: str | None
    format: FileFormat
    masters: dict[str, str]  # master keys of columns
    double_wrap: bool
    dek_length: int
    block_size: int
    template: str | bytes | None  # for AAD prefixes
    overwrite: bool
    ignore_ctime: bool
    checksum: bool
    options: run.Options
    delete_sources: bool
    policy: Policy | None
    key_material: KeyMaterial | None
    delete: bool
    choice: sources.Choice

    def kinds(self, head: Version, new: Sequence[FileEntry], job_id: str) -> list[list[Want]]:
        """Return for each new file the kinds of its KEKs: see `kinds_of_files`."""
        for master in (self.wrapping_key_id, *self.masters.values()):
            if master is not None:
                check_not_left(head.keys, master)
        main = self.wrapping_key_id or main_key(head.keys).wrapping_key_id
        scopes = scopes_of(self.policy or head.policy, [row.path for row in new], job_id, clock_ms())
        masters = [self.masters if row.format == "parquet" else {} for row in new]
        return kinds_of_files(scopes, masters, main, self.double_wrap)


@dataclass
class _Found:
    """The files to do, and those that need nothing."""

    new: list[FileEntry]  # files to make, without jobs, names and keys yet; a member of a new set has the set ""
    same: list[FileEntry]  # files that the dataset has, and whose sources have not changed
    replaced: dict[str, FileEntry]  # the files that new ones replace, by path
    others: list[Row]  # sources that are not encrypted: skipped, and those that no dataset can have
    gone: dict[str, FileEntry]  # the files to remove, by path

    def keep_if_failed(self, rows: Sequence[Row]) -> None:
        """Remove no file if one of these has failed: a file that was renamed would be lost under both names."""
        if any(row.status == "failed" for row in rows):
            self.others += [run.gone_row(path, "skipped") for path in self.gone]
            self.gone = {}

    def result(self, wish: _Encryption, version: Version | None, rows: list[Row]) -> JobResult:
        """Return a result without a new version."""
        number, pin = (None, None) if version is None else (version.number, version.pin)
        return JobResult(new_job_id(), "encrypt", wish.target.url, number, rows + self.others, pin)


def _check(format: str, column_keys: Mapping[str, str] | None, key_material: str | None, dek_length: int) -> None:
    """Raise ValueError or TypeError for arguments of `encrypt_files` that are wrong, or do not go together."""
    check_choice("format", format, FileFormat)
    for name, value in (("column_keys", column_keys), ("key_material", key_material)):
        if value is not None and format == "ags1":
            raise ValueError(f"{name} is for format='parquet' and format='auto'")
    for column, key_id in (column_keys or {}).items():
        if not isinstance(column, str):
            raise TypeError(f"column_keys names columns by dotted paths, not by {type(column).__name__}")
        if not column or "\0" in column:
            raise ValueError(f"column_keys names {column!r}, which is not a column's path")
        check_key_id(key_id)
    check_key_material(key_material, dek_length)


def _opened(wish: _Encryption, access: Access) -> Snapshot | None:
    """Open the dataset. Returns None if there is none, and it may be created."""
    try:
        return access.open()
    except FileNotFoundError:
        if access.pin is not None or access.min_version:
            raise
        if wish.wrapping_key_id is None:
            raise ValueError(f"{wish.target.url} is a new dataset: name its master key, wrapping_key_id") from None
        return None


def _created(wish: _Encryption, access: Access) -> Snapshot:
    assert wish.wrapping_key_id is not None
    try:
        return access.create(wish.wrapping_key_id, wish.policy)
    except FileExistsError:  # another job was first
        return access.open()


def _look(wish: _Encryption, snapshot: Snapshot | None, listed: Sequence[Entry], left_out: Sequence[Row]) -> _Found:
    """Compare the source with the dataset. FileExistsError if `overwrite` is needed."""
    above = {folder for entry in listed for folder in folders_above(entry.path)}
    present: dict[str, FileEntry] = {}
    gone: dict[str, FileEntry] = {}
    if snapshot is not None:
        if wish.delete:
            gone = sources.gone_files(wish.source, wish.choice, listed, left_out, snapshot.files())
        there = snapshot.find({*above, *(entry.path for entry in listed)})
        present = {path: row for path, (_, row) in there.items() if path not in gone}
    listed, others = _possible(wish, listed, above, present)
    if wish.template is not None:
        listed, skipped = _without_encrypted(wish.source, listed, present, wish.format)
        others += skipped
    fresh = [found for found in listed if found.path not in present]
    both = [(found, present[found.path]) for found in listed if found.path in present]
    is_same = _compared(wish, snapshot, both)
    same = [old for _, old in both if is_same[old.path]]
    changed = [(found, old) for found, old in both if not is_same[old.path]]
    if changed and not wish.overwrite:
        more = f" and {len(changed) - 1} more files" if len(changed) > 1 else ""
        raise FileExistsError(
            f"the dataset has {changed[0][0].path!r}{more} from sources that have changed since: "
            "pass overwrite=True to replace them in a new version"
        )
    formats = iter(_formats(wish, [*fresh, *(found for found, _ in changed)]))
    new = [
        _new_file(wish, found, next(formats), prefix, (n, len(fresh)) if wish.template is not None else None)
        for n, (found, prefix) in enumerate(zip(fresh, sources.aad_prefixes(wish.template, len(fresh)), strict=True))
    ]
    for found, old in changed:
        made = _new_file(wish, found, next(formats), os.urandom(16), None)
        if old.set_id is not None:  # a member of a set keeps its number
            made = made._replace(aad_prefix=old.aad_prefix, set_id=old.set_id, part=old.part, parts=old.parts)
        new.append(made)
    for old in same:
        row = planned_row(wish.source.full_path(old.path), old.path, old, "skipped")
        why = "the dataset has it, and the source has not changed since"
        others.append(row._replace(error_class="Unchanged", error=why))
    result = _Found(new, same, {old.path: old for _, old in changed}, others + list(left_out), gone)
    result.keep_if_failed(result.others)
    return result


def _compared(
    wish: _Encryption, snapshot: Snapshot | None, both: Sequence[tuple[Entry, FileEntry]]
) -> dict[str, bool | None]:
    """Return for each path whether its source is what the dataset has. Bytes are compared where only they tell."""
    is_same = {old.path: _is_same(wish, found, old) for found, old in both}
    touched = [old for _, old in both if is_same[old.path] is None]
    if snapshot is not None and touched:
        _, rows = run.verified(snapshot, touched, wish.options, source=wish.source)
        is_same |= {row.src: row.status == "ok" for row in rows}
    return is_same


def _formats(wish: _Encryption, files: Sequence[Entry]) -> list[str]:
    """Return the format of each new file. "auto": the files are read, at their ends."""
    if wish.format != "auto":
        return [wish.format] * len(files)
    source, at_once = wish.source, FILES_AT_ONCE if wish.source.parallel and not wish.source.local else 1
    return in_threads(lambda found: settled("auto", found.path, sources.ends_of(source, found)), files, at_once)


def _is_same(wish: _Encryption, found: Entry, old: FileEntry) -> bool | None:
    """Return whether a source is what the dataset has; None if only its bytes tell."""
    if wish.checksum and old.checksum is not None and old.nbytes == found.size:
        return None
    if not old.is_of(found.size, found.stamp):
        return False
    return wish.ignore_ctime or old.ctime_ns is None or found.ctime_ns in (None, old.ctime_ns) or None


def _possible(
    wish: _Encryption, listed: Sequence[Entry], above: set[str], present: Mapping[str, FileEntry]
) -> tuple[list[Entry], list[Row]]:
    """Split off the sources that the dataset cannot have, by what readers of a dataset check. Returns rest and rows."""
    files = above.intersection(present.keys() | {entry.path for entry in listed})  # files in the places of folders
    left, rows, job_id = [], [], new_job_id()
    for entry in listed:
        try:
            wish.target.checked(written_name(check_path(entry.path), job_id, settled(wish.format, entry.path)))
            if inside := files and files.intersection(folders_above(entry.path)):
                raise PolicyError(f"{min(inside)!r} is a file: {entry.path!r} would need a folder of that name")
        except PolicyError as error:
            name = wish.source.full_path(entry.path)
            rows.append(Row(name, None, "failed", "PolicyError", describe(error), entry.size))
        else:
            left.append(entry)
    return left, rows


def _new_file(
    wish: _Encryption, found: Entry, format: str, aad_prefix: bytes, number: tuple[int, int] | None
) -> FileEntry:
    """Return a file to make. number: its number in a new set, and how many files the set has; None: in no set."""
    ags1 = format == "ags1"
    part, parts = number or (None, None)
    row = FileEntry(
        path=found.path,
        file="",
        format=format,
        plain_length=found.size,
        file_length=encrypted_length(found.size, wish.block_size) if ags1 else 0,
        block_size=wish.block_size if ags1 else 0,
        key_id="",
        wrapped_dek=b"",
        column_keys=None,
        aad_prefix=aad_prefix,
        job_id="",
        set_id=None if number is None else "",
        part=part,
        parts=parts,
        source=found.path,
        stamp=found.stamp,
        mode=found.mode,
        mtime_ns=found.mtime_ns,
        source_length=None if ags1 else found.size,
        ctime_ns=found.ctime_ns,
        key_material=None if ags1 or wish.key_material is None else (),
    )
    return run.with_columns(row, wish.masters) if wish.masters and not ags1 else row


def _planned(wish: _Encryption, snapshot: Snapshot | None, found: _Found) -> JobResult:
    result = found.result(wish, snapshot.entry if snapshot else None, [])
    rows = [planned_row(wish.source.full_path(row.source), row.path, row) for row in found.new]
    result.rows = [*rows, *(run.gone_row(path, "planned") for path in found.gone), *result.rows]
    return result


def _nothing_new(wish: _Encryption, snapshot: Snapshot, found: _Found) -> JobResult:
    log, head = snapshot.log, snapshot.entry
    facts = run.source_fact(wish.source.url)
    if wish.options.resume and isinstance(job := run.take_up(log, head, "encrypt", facts), Job):
        job.give_up()
    if wish.policy is not None and wish.policy != head.policy:
        head = Job.begin(log, "encrypt", head=head).commit(Wish("encrypt", policy=wish.policy)).head
    result = found.result(wish, head, [])
    if wish.delete_sources:
        sources.delete_unchanged(snapshot, wish.source, found.same, result)
    apply_retention(log, head, result)
    return result


def _begun(wish: _Encryption, snapshot: Snapshot, found: _Found) -> tuple[Job, list[FileEntry]]:
    """Take up a dead job or begin one, and make the plan durable. Returns the job and its files."""
    facts, taken_up = run.source_fact(wish.source.url), None
    if wish.options.resume:
        job = run.take_up(snapshot.log, snapshot.entry, "encrypt", facts)
        if isinstance(job, Job):
            planned = {row.path: row for row in job.planned()}
            members = (row for row in planned.values() if row.set_id == job.id)
            if _numbering(members) == _numbering(row for row in found.new if row.set_id == ""):
                taken_up = job, planned
            else:
                job.give_up()  # a set with other members is another set
    return run.begin_files(
        snapshot,
        "encrypt",
        facts,
        found.new,
        lambda job_id: wish.kinds(snapshot.entry, found.new, job_id),
        wish.dek_length,
        taken_up=taken_up,
        policy=wish.policy,
    )


def _numbering(rows: Iterable[FileEntry]) -> dict[str, tuple[Any, ...]]:
    return {row.path: (row.aad_prefix, row.part, row.parts) for row in rows}


def _encrypt(wish: _Encryption, snapshot: Snapshot, found: _Found) -> JobResult:
    """Give the files keys, make the plan durable, write the files, commit them."""
    numbered = any(row.set_id == "" for row in found.new)
    if numbered and any(row.status == "failed" for row in found.others):
        rows = [planned_row(wish.source.full_path(row.source), None, row, "ok") for row in found.new]
        return found.result(wish, snapshot.entry, _held_back(rows))
    job, entries = _begun(wish, snapshot, found)
    with job:
        rows = run.write_files(job, entries, wish.options, source=wish.source, checksum=wish.checksum)
        found.keep_if_failed(rows)
        if numbered and any(row.status == "failed" for row in rows):
            result = found.result(wish, snapshot.entry, _held_back(rows))
            result.job_id = job.id
            return result
        result = run.commit_files(job, entries, rows, found.replaced, whole=numbered, gone=found.gone)
    if wish.delete_sources:
        sources.delete_sources(snapshot.log, wish.source, entries, result, wish.options)
    result.rows += found.others
    if wish.delete_sources:
        sources.delete_unchanged(snapshot, wish.source, found.same, result)
    return result


def _without_encrypted(
    source: Store, listed: Sequence[Entry], present: Mapping[str, FileEntry], format: str
) -> tuple[list[Entry], list[Row]]:
    """Split off, before a numbered set counts its files, those that are encrypted already. Returns rest and rows."""
    left, rows = [], []
    for found in listed:
        head = b"" if found.path in present else sources.ends_of(source, found)[0]
        reason = encrypted_already(head)
        if reason is None and format != "ags1" and head[:4] == b"PAR1":
            from ags_fast.jobs.work import parquet

            reason = parquet.source_encrypted_already(source, found)
        if reason is not None:
            name = source.full_path(found.path)
            rows.append(Row(name, None, "skipped", "AlreadyEncryptedError", reason, found.size))
        else:
            left.append(found)
    return left, rows


def _held_back(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a set that is not committed because it is incomplete."""
    why = "another file of its numbered set failed, so none of them is in the dataset: run the job again with resume"
    return [
        row._replace(status="failed", error_class="IncompleteSetError", error=why) if row.status == "ok" else row
        for row in rows
    ]
