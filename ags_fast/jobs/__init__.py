"""Jobs over directories of files: encrypt them into a dataset, decrypt, verify and re-key it.

A job plans, makes the plan durable, does it, and commits a new version of the dataset; whatever dies on the way, the
plan has every data key, and the version before stays as it is. The format is in docs/dataset-format.md.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from ags_fast.ags1 import DEFAULT_BLOCK_SIZE, check_block_size, encrypted_length
from ags_fast.errors import AgsError, ConcurrentChangeError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.fs import Store
from ags_fast.jobs.dataset import (
    HIDDEN,
    MANIFESTS,
    PLANS,
    SLACK_USES,
    Dataset,
    FileEntry,
    Uses,
    Version,
    Want,
    chosen_files,
    object_name,
    wrapped_by,
)
from ags_fast.jobs.local import LocalEngine, client_for
from ags_fast.jobs.plan import (
    Choice,
    Plan,
    Task,
    aad_prefixes,
    check_names,
    clear,
    is_dead,
    list_sources,
    new_job_id,
    open_plans,
    orphan_manifests,
)
from ags_fast.jobs.policy import Policy
from ags_fast.jobs.results import JobError, JobResult, Row, counted, shown, shown_counts
from ags_fast.jobs.rotation import apply_retention, expire, finish_expiry, restore_keys, rotate
from ags_fast.jobs.task import (
    Context,
    SourceChangedError,
    describe,
    encrypted_already,
    equal,
    failed_row,
    is_there,
    make_row,
    planned_row,
)
from ags_fast.keys.envelope import UnknownKeyError
from ags_fast.keys.kms import KmsClient, as_kms, check_key_id

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Sequence

    from ags_fast.fs import Entry
    from ags_fast.jobs.key_audit import audit, key_status
    from ags_fast.keys.envelope import Envelope
    from ags_fast.stream import AgsReader

__all__ = [
    "Dataset",
    "JobError",
    "JobResult",
    "Policy",
    "Row",
    "audit",
    "copy_file",
    "decrypt_files",
    "encrypt_files",
    "expire",
    "key_status",
    "open_file",
    "rekey_files",
    "remove_files",
    "restore_keys",
    "rotate",
    "set_policy",
    "sweep",
    "verify_files",
]


def __getattr__(name: str) -> Any:
    if name in ("audit", "key_status"):  # imported when asked for: no worker needs them
        from ags_fast.jobs import key_audit

        return getattr(key_audit, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


FORMATS = ("ags1", "parquet")
MISSING_ROWS = 10_000  # of one verify, before they are told by gaps
COPY_NBYTES = 1 << 20  # at a time
LOCAL_OPEN_COST = 512 << 10  # bytes that could be done in the time that opening a file takes
STORE_OPEN_COST = 4 << 20


class Engine(Protocol):
    """What does the files of a job: LocalEngine, or ags_fast.spark.SparkEngine."""

    def run(
        self, context: Context, tasks: Sequence[Task], open_cost: int, report: Callable[[list[Row]], None]
    ) -> None: ...


# ------------------------------------------------------------------------------------------------------------- encrypt


@counted
def encrypt_files(
    src: Any,
    dataset: Any,
    *,
    kms: KmsClient | Mapping[str, str],
    wrapping_key_id: str,
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
    progress: Any = None,
    key_store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Encrypt every file under `src` into `dataset`, and make a version of it that has them.

    src, dataset: folders, local or fsspec URLs; the tree is kept. kms: the properties of a KMS, or a client. Workers
    make their own from its properties: TypeError for a client that has none, unless the engine is ``LocalEngine(0)``.
    wrapping_key_id: the master key there. double_wrap: a key of the dataset wraps the data keys and the master key
    wraps that one, so that a process asks the KMS once; else the KMS wraps every data key. dek_length, block_size:
    bytes. aad_prefix: None, 16 random bytes for each file; or a template such as ``"customers.part{n}"``, which makes
    the new files a numbered set: it is committed whole or, if one of them fails, not at all. overwrite: replace files
    that the dataset has and whose source has changed. resume: continue a job that died on this source: "length" takes
    what has its planned length as finished, "verify" checks its tags first. fsync: the version is committed when the
    files are on the disk. verify_after: read every file back before it counts. delete_sources: when, after the commit,
    every file has been read back from storage intact; also what an earlier run encrypted, if the bytes are the same.
    dry_run: only plan; the rows say "planned". policy: how the dataset's KEKs are shared and what is kept of old
    versions, from now on; None leaves what it has. progress: None shows a bar on a terminal, False none, and a callable
    gets rows as they come. pin, min_version: the dataset must be there, and its newest version must descend from the
    one that `JobResult.pin` named, or have at least this number: else IntegrityError (PolicyError for min_version), and
    nothing is written or deleted. ValueError for a malformed pin.

    format: "ags1" makes an AGS1 stream of every file, whatever it is. "parquet" encrypts Parquet files as such, under
    their own names (Parquet Modular Encryption), and what is none fails: run the job again with "ags1", which takes
    what is left. column_keys: {dotted path: master key} of columns, or of groups of them, that get data keys of their
    own, which only who may use that master key can open; a file that lacks such a column fails. resume="length" takes
    a Parquet file as finished if its footer, which is written last, opens under the planned key.

    hidden: also take files whose name, or a folder's on the way, begins with ``.`` or ``_``, and checksums (``x.crc``),
    which no reader of such folders looks at. include: take only what one of these patterns matches; exclude: leave out
    what one matches. A pattern (of `fnmatch`, whose ``*`` also matches "/") that matches a folder stands for all in it.
    links: symbolic links that stay inside `src` are taken as what they lead to. Those that lead out are left out
    ("skip") or followed ("follow"); "error" refuses them, and those that lead nowhere, before anything is begun.

    A file that fails is a row. on_error="raise" stops at the first, max_failures after more than so many: JobError,
    and the plan stays for `resume`. Sources that the dataset has unchanged, and those that are encrypted already, are
    rows with the status "skipped"; so is all that is left out, with the kind as `error_class`: "HiddenFile",
    "Excluded", "OutsideLink", "DanglingLink", "LinkLoop", "SpecialFile" (pipes, sockets, devices),
    "EmptyFolder", "ReservedName" (`_ags`), "TemporaryFile". `JobResult.left_out` counts them. If that leaves nothing
    at all, there is a UserWarning.

    Kept are names, content, permission bits and the time of the last change. Not kept are owners, ACLs, extended
    attributes, setuid, setgid and sticky bits, empty folders, the identity of hard links, and holes in sparse files.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be {' or '.join(map(repr, FORMATS))}, not {format!r}")
    if column_keys is not None and format != "parquet":
        raise ValueError("column_keys are for format='parquet'")
    masters = _check_columns(column_keys or {})
    if dek_length not in (16, 24, 32):
        raise ValueError(f"dek_length must be 16, 24 or 32 bytes, not {dek_length}")
    check_block_size(block_size)
    options = _Options(engine, resume, on_error, max_failures, progress)
    choice = Choice.of(hidden, include, exclude, links)
    source = Store(src, storage_options, follow=links == "follow")
    target = Store(dataset, storage_options)
    _check_apart(source, target)
    if source.local and not source.exists():
        raise FileNotFoundError(f"there is no folder {source.url}")
    listed, left_out = list_sources(source, choice)
    skipped = [Row(source.full_path(path), None, "skipped", kind, reason) for path, kind, reason in left_out]
    if not listed and not left_out and not source.exists():
        raise FileNotFoundError(f"there is no folder {source.url}")
    counts = Counter(kind for _, kind, _ in left_out)
    if not listed and counts.keys() - {"EmptyFolder"}:
        warnings.warn(
            f"nothing of {source.url} is encrypted: all of it is left out ({shown_counts(counts)})", stacklevel=3
        )
    client = client_for(options.engine, kms, source, target)
    facts = {"operation": "encrypt", "source": shown(source.url)}
    with ExitStack() as held:
        plan, base, opened = None, None, None
        known = pin is not None or bool(min_version)  # that it is there
        if dry_run or known:
            try:
                opened = Dataset.open(target, client, key_store=key_store, pin=pin, min_version=min_version)
            except FileNotFoundError:
                if known:
                    raise
                # else it would be created
        if not dry_run:
            target.check_writable()
            opened = opened or Dataset.open_or_create(target, client, wrapping_key_id, key_store)
        entries: list[FileEntry] = []
        if opened is not None:
            base, entries = opened.load(writes=True)
            plan = Plan.resume(opened, facts, held) if options.resume and not dry_run else None
            if plan is not None and plan.committed() is not None:  # it died between its commit and its end
                plan.end()
                plan = None
                base, entries = opened.load()
        number, pinned = (base.number, base.pin) if base else (None, None)
        present = {entry.path: entry for entry in entries}
        job_id = plan.job_id if plan else new_job_id()
        if aad_prefix is not None:
            listed, encrypted = _without_encrypted(source, listed, present, format)
            skipped += encrypted
        planned = plan.entries() if plan is not None else []
        entries, same = _new_entries(listed, present, overwrite, format, block_size, job_id, aad_prefix)
        if opened is not None and plan is not None and _numbering(planned, job_id) != _numbering(entries, job_id):
            plan.end()  # a set with other members is another set
            plan = None
            job_id = new_job_id()
            entries, same = _new_entries(listed, present, overwrite, format, block_size, job_id, aad_prefix)
        skipped += [_unchanged(source, target, entry) for entry in same]
        replaced = {entry.path: present[entry.path].file for entry in entries if entry.path in present}
        check_names(entries, [entry for path, entry in present.items() if path not in replaced])
        if opened is None or dry_run:
            rows = [planned_row(source.full_path(e.source), target.full_path(e.file), e) for e in entries]
            return JobResult(job_id, "encrypt", target.url, number, rows + skipped, pinned)
        if not entries:
            if plan is not None:
                plan.end()
            result = JobResult(job_id, "encrypt", target.url, number, skipped, pinned)
            if delete_sources:
                _delete_unchanged(opened, source, same, result)
            return result

        laid_down = policy or (base.policy if base else Policy())
        entries = _reserve(opened, laid_down, job_id, wrapping_key_id, double_wrap, entries, [masters] * len(entries))
        if plan is None:
            plan, entries = _begin(opened, held, job_id, entries, dek_length, base=number or 0, **facts)
        else:
            entries = _continue(opened, plan, planned, entries, dek_length)
        context = Context(
            "encrypt",
            job_id,
            opened.id,
            target,
            _envelope(opened, entries),
            source,
            fsync=fsync,
            verify_after=verify_after,
            resume=options.resume,
        )
        rows = _run(context, [Task(entry) for entry in entries], options, plan)
        if any(row.status == "failed" for row in rows) and any(entry.set_id == job_id for entry in entries):
            return JobResult(job_id, "encrypt", target.url, number, _held_back(rows) + skipped, pinned)
        result = _commit(opened, plan, context, entries, rows, base, replaced, policy)
        if delete_sources:
            _delete_sources(opened, source, entries, result, options)
        result.rows += skipped
        if delete_sources:
            _delete_unchanged(opened, source, same, result)
        return result


def _new_entries(
    listed: Sequence[Entry],
    present: Mapping[str, FileEntry],
    overwrite: bool,
    format: str,
    block_size: int,
    job_id: str,
    template: str | bytes | None,
) -> tuple[list[FileEntry], list[FileEntry]]:
    """What is to be made, without keys yet, and what is there already. FileExistsError for what may not be replaced."""
    new, same, changed = [], [], []
    for found in listed:
        old = present.get(found.path)
        if old is None:
            new.append(found)
        elif (old.plain_length, old.stamp) == (found.size, found.stamp):
            same.append(old)
        else:
            changed.append((found, old))
    if changed and not overwrite:
        more = f" and {len(changed) - 1} more files" if len(changed) > 1 else ""
        raise FileExistsError(
            f"the dataset has {changed[0][0].path!r}{more} from sources that have changed since: "
            "pass overwrite=True to replace them in a new version"
        )

    def shape(found: Entry, *marks: str) -> dict[str, Any]:
        """The fields of an entry that depend on the format."""
        ags1 = format == "ags1"
        return {
            "file": object_name(found.path, *marks, format=format),
            "format": format,
            "plain_length": found.size,
            "file_length": encrypted_length(found.size, block_size) if ags1 else 0,
            "block_size": block_size if ags1 else 0,
        }

    made = []
    for n, (found, prefix) in enumerate(zip(new, aad_prefixes(template, len(new)), strict=True)):
        made.append(
            FileEntry(
                path=found.path,
                **shape(found),
                key_id="",
                wrapped_dek=b"",
                column_keys=None,
                aad_prefix=prefix,
                job_id=job_id,
                set_id=None if template is None else job_id,
                part=None if template is None else n,
                parts=None if template is None else len(new),
                source=found.path,
                stamp=found.stamp,
                mode=found.mode,
                mtime_ns=found.mtime_ns,
            )
        )
    for found, old in changed:  # a member of a set stays that member
        made.append(
            old._replace(
                **shape(found, job_id),
                aad_prefix=os.urandom(16) if old.set_id is None else old.aad_prefix,
                job_id=job_id,
                source=found.path,
                stamp=found.stamp,
                mode=found.mode,
                mtime_ns=found.mtime_ns,
            )
        )
    return made, same


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
            raise ValueError(f"column_keys names {column!r}, which is no column's path")
        check_key_id(key_id)
    return dict(column_keys)


def _masters(dataset: Dataset, entry: FileEntry) -> dict[str, str]:
    """The master key of each column that has a key of its own."""
    return {key["column"]: dataset.keys.get(key["key_id"]).wrapping_key_id for key in entry.column_keys or ()}


def _reserve(
    dataset: Dataset,
    policy: Policy,
    job_id: str,
    wrapping_key_id: str | None,
    double_wrap: bool,
    entries: Sequence[FileEntry],
    masters: Sequence[Mapping[str, str]],
) -> list[FileEntry]:
    """The entries with the ids of the keys that will wrap theirs. masters: for each, {column: its master key}."""
    while True:
        main = wrapping_key_id or dataset.main_key().wrapping_key_id
        try:
            return _reserve_under(main, dataset, policy, job_id, double_wrap, entries, masters)
        except PolicyError:
            if wrapping_key_id is not None or dataset.main_key().wrapping_key_id == main:
                raise  # otherwise a rotation has left it just now


def _reserve_under(
    main: str,
    dataset: Dataset,
    policy: Policy,
    job_id: str,
    double_wrap: bool,
    entries: Sequence[FileEntry],
    masters: Sequence[Mapping[str, str]],
) -> list[FileEntry]:
    scopes = policy.scopes([entry.path for entry in entries], job_id) if double_wrap else [None] * len(entries)

    def want(scope: str | None, master: str = main) -> Want:
        # Under the master key of the rest, a column needs no key apart: one call of the KMS opens both.
        return Want(master, double_wrap, master != main, scope)

    wraps: Counter[Want] = Counter()
    for scope, columns in zip(scopes, masters, strict=True):
        wraps[want(scope)] += 1
        wraps.update(want(scope, master) for master in columns.values())
    uses = {kind: Uses(count, spare=count) for kind, count in wraps.items()}  # where a name is taken, wrapped again
    own = uses.get(Want(main), Uses())
    uses[Want(main)] = own._replace(spare=own.spare + SLACK_USES + len(entries) // 1000)  # documents and tables
    keys = dataset.reserve(uses, policy)
    return [
        entry._replace(
            key_id=keys[want(scope)].key_id,
            column_keys=tuple(
                {"column": column, "key_id": keys[want(scope, master)].key_id, "wrapped_dek": b""}
                for column, master in columns.items()
            )
            or None,
        )
        for entry, scope, columns in zip(entries, scopes, masters, strict=True)
    ]


def _with_keys(dataset: Dataset, entries: Sequence[FileEntry], dek_length: int) -> list[FileEntry]:
    """The entries with new data keys, wrapped by the keys that they name."""
    wraps = [entry.wraps(dataset.id) for entry in entries]
    random = memoryview(os.urandom(dek_length * sum(map(len, wraps))))
    todo: dict[str, list[tuple[bytes, bytes]]] = {}  # of each key, at once
    at = 0
    for key_id, _, bound in chain.from_iterable(wraps):
        todo.setdefault(key_id, []).append((bytes(random[at : at + dek_length]), bound))
        at += dek_length
    envelope = dataset.envelope
    done = {key_id: iter(envelope.wrap_many(key_id, items)) for key_id, items in todo.items()}
    return [
        entry.with_wraps([(key_id, next(done[key_id])) for key_id, _, _ in those])
        for entry, those in zip(entries, wraps, strict=True)
    ]


def _without_encrypted(
    source: Store, listed: Sequence[Entry], present: Mapping[str, FileEntry], format: str
) -> tuple[list[Entry], list[Row]]:
    """What is not encrypted already, and rows of what is: a set would lack the numbers of files that are skipped."""
    left, rows = [], []
    for found in listed:
        head = bytearray(8)
        if found.path not in present and found.size >= len(head):
            try:
                with source.open(found.path) as file:
                    file.readinto(head)
            except (OSError, PolicyError):
                pass  # to be its row, when it is its turn
        reason = encrypted_already(bytes(head))
        if reason is None and format == "parquet" and head[:4] == b"PAR1" and found.path not in present:
            from ags_fast.jobs import parquet

            reason = parquet.encrypted_already(source, found)
        if reason is not None:
            name = source.full_path(found.path)
            rows.append(Row(name, None, "skipped", "AlreadyEncryptedError", reason, found.size))
        else:
            left.append(found)
    return left, rows


def _numbering(entries: Sequence[FileEntry], job_id: str) -> dict[str, tuple[Any, ...]]:
    return {entry.path: (entry.aad_prefix, entry.part, entry.parts) for entry in entries if entry.set_id == job_id}


def _held_back(rows: Sequence[Row]) -> list[Row]:
    """The rows of a set that is not committed, since it is not whole."""
    why = "another file of its numbered set failed, so none of them is in the dataset: run the job again with resume"
    return [
        row._replace(status="failed", error_class="IncompleteSetError", error=why) if row.status == "ok" else row
        for row in rows
    ]


def _begin(
    dataset: Dataset,
    held: ExitStack,
    job_id: str,
    entries: Sequence[FileEntry],
    dek_length: int,
    **facts: Any,
) -> tuple[Plan, list[FileEntry]]:
    """A new plan, ours until `held` is closed, and the entries as it has them."""
    entries = _with_keys(dataset, entries, dek_length)
    plan = Plan.create(dataset, job_id, entries, **facts)
    held.callback(plan.release)
    return plan, plan.claim(entries)


def _continue(
    dataset: Dataset,
    plan: Plan,
    planned: Sequence[FileEntry],
    entries: Sequence[FileEntry],
    dek_length: int,
) -> list[FileEntry]:
    """The entries as the plan has them; those it does not have, or of which the source has changed, planned anew."""
    if not plan.running:  # it died before it was sure of its names
        planned = plan.claim(planned)
    known = {entry.path: entry for entry in planned}
    same = []
    anew = []
    for entry in entries:
        old = known.get(entry.path)
        if old is not None and _what(dataset, old) == _what(dataset, entry):
            same.append(old)
        else:  # a name that no attempt has written to: what is under the old one has another key
            file = object_name(entry.path, plan.job_id, plan.number, format=entry.format)
            anew.append(entry._replace(file=file))
    if anew:
        anew = _with_keys(dataset, anew, dek_length)
        plan.extend(anew)
    return same + anew


def _what(dataset: Dataset, entry: FileEntry) -> tuple[Any, ...]:
    """What a planned file must have in common with one that would be planned now, to be as good."""
    return entry.format, entry.plain_length, entry.stamp, entry.block_size, _masters(dataset, entry)


# ----------------------------------------------------------------------------------------------- decrypt, verify, rekey


@counted
def decrypt_files(
    dataset: Any,
    dst: Any,
    *,
    kms: KmsClient | Mapping[str, str],
    engine: Engine | None = None,
    version: int | None = None,
    min_version: int | None = None,
    pin: str | None = None,
    paths: str | Sequence[str] | None = None,
    overwrite: bool = False,
    missing: str = "error",
    resume: str | None = None,
    on_error: str = "row",
    max_failures: int | None = None,
    fsync: bool = True,
    dry_run: bool = False,
    preserve: bool = True,
    progress: Any = None,
    key_store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Decrypt a version of `dataset` into the folder `dst`, the tree as it was.

    version: None is the newest. min_version: refuse (PolicyError) a dataset whose newest is older, for storage alone
    does not show that somebody took newer ones away. pin: refuse (IntegrityError) a dataset whose newest version does
    not descend from the one that `JobResult.pin` named, whatever its number. paths: only files whose path matches one
    of these patterns; FileNotFoundError if a pattern matches none. overwrite: replace what is there, else such a file
    is a failed row. IntegrityError if no version has been committed. resume: leave what is there and has the right
    length ("length"), or the right bytes ("verify"); of Parquet the bytes count always, since the length of what it
    decrypts to is not known. missing: a Parquet file with a column whose master key the KMS does not give is a failed
    row ("error"), or is decrypted without these columns ("drop"), and its row says so. The other arguments are those
    of `encrypt_files`.

    preserve: give each local file the permission bits and the time of the last change that its source had. Without it,
    and where the source had no mode, as in an object store, the umask says the mode of a new file.

    A file appears in `dst` only when every tag of it has passed; before that it has mode 0600 and a temporary name.
    Links in `dst` that lead out of it are not followed (PolicyError), also if they come while the job runs.
    """
    if missing not in ("error", "drop"):
        raise ValueError(f"missing must be 'error' or 'drop', not {missing!r}")
    options = _Options(engine, resume, on_error, max_failures, progress)
    kms = client_for(options.engine, kms, dataset, dst)
    opened, head, entries = _opened(dataset, kms, key_store, storage_options, version, min_version, pin, paths)
    destination = Store(dst, storage_options)
    _check_apart(destination, opened.store)
    job_id = new_job_id()
    context = Context(
        "decrypt",
        job_id,
        opened.id,
        opened.store,
        _envelope(opened, entries),
        destination,
        fsync=fsync,
        overwrite=overwrite,
        resume=options.resume,
        without=_denied(opened, entries) if missing == "drop" else frozenset(),
        preserve=preserve,
    )
    tasks = [Task(entry) for entry in entries]
    if dry_run:
        rows = [make_row(context, task)._replace(status="planned") for task in tasks]
    else:
        destination.check_writable()
        rows = _without_alarm(opened, head, _run(context, tasks, options, None))
        if fsync:
            made = {row.src for row in rows if row.status == "ok"}
            destination.sync_folders(e.path for e in entries if opened.store.full_path(e.file) in made)
        destination.sweep()  # of earlier runs too: this is no dataset, whose sweep would do it
    return JobResult(job_id, "decrypt", opened.store.url, head.number, rows, head.pin)


@counted
def verify_files(
    dataset: Any,
    *,
    kms: KmsClient | Mapping[str, str],
    engine: Engine | None = None,
    version: int | None = None,
    min_version: int | None = None,
    pin: str | None = None,
    paths: str | Sequence[str] | None = None,
    on_error: str = "row",
    max_failures: int | None = None,
    progress: Any = None,
    key_store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Check every tag of every file of a version, and of numbered sets that each member is there, once, in its place.

    A missing, cut, changed or swapped file is a failed row; so is a missing member of a set. A file in the tree that no
    version and no open job knows is a row with the status "skipped" and the class "ExtraFile"; `JobResult.extra_files`
    counts these, and a warning says so. IntegrityError if no version has been committed. The other arguments are those
    of `decrypt_files`.
    """
    options = _Options(engine, None, on_error, max_failures, progress)
    kms = client_for(options.engine, kms, dataset)
    opened, head, entries = _opened(dataset, kms, key_store, storage_options, version, min_version, pin, paths)
    job_id = new_job_id()
    context = Context("verify", job_id, opened.id, opened.store, _envelope(opened, entries))
    rows = _without_alarm(opened, head, _run(context, [Task(entry) for entry in entries], options, None))
    rows = _name_swaps(context, entries, rows)
    if paths is None:
        rows += _missing_members(opened, entries)
        rows += _extra_files(opened, head, entries)
    result = JobResult(job_id, "verify", opened.store.url, head.number, rows, head.pin)
    if extra := result.extra_files:
        files = "1 file is" if extra == 1 else f"{extra} files are"
        result.warnings.append(
            f"{files} in the dataset's folder that no version and no open job knows: somebody else put them there, or "
            "a job left them"
        )
    return result


@counted
def rekey_files(
    dataset: Any,
    *,
    kms: KmsClient | Mapping[str, str],
    wrapping_key_id: str | None = None,
    engine: Engine | None = None,
    double_wrap: bool | None = None,
    dek_length: int = 16,
    paths: str | Sequence[str] | None = None,
    resume: str | None = None,
    on_error: str = "row",
    max_failures: int | None = None,
    fsync: bool = True,
    verify_after: bool = False,
    dry_run: bool = False,
    min_version: int | None = None,
    pin: str | None = None,
    progress: Any = None,
    key_store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Write files of `dataset` anew, each under a new data key, and make a version that has these.

    The version before, and its files, stay readable until they are expired. paths: only files whose path matches one
    of these patterns. wrapping_key_id: None takes the master key in use. The other arguments are those of
    `encrypt_files`.
    """
    if dek_length not in (16, 24, 32):
        raise ValueError(f"dek_length must be 16, 24 or 32 bytes, not {dek_length}")
    options = _Options(engine, resume, on_error, max_failures, progress)
    kms = client_for(options.engine, kms, dataset)
    opened, base, chosen = _opened(dataset, kms, key_store, storage_options, None, min_version, pin, paths, writes=True)
    target = opened.store
    facts = {"operation": "rekey", "source": shown(target.url)}
    with ExitStack() as held:
        plan = Plan.resume(opened, facts, held) if options.resume and not dry_run else None
        if plan is not None and (made := plan.committed()) is not None:
            rows = [planned_row(e.file, e.file, e, "ok") for e in opened.entries(made) if e.job_id == plan.job_id]
            plan.end()
            return JobResult(plan.job_id, "rekey", target.url, made.number, rows, made.pin)
        job_id = plan.job_id if plan else new_job_id()
        prefixes = aad_prefixes(None, len(chosen))
        entries = [
            entry._replace(
                file=object_name(entry.path, job_id, format=entry.format),
                file_length=entry.file_length if entry.format == "ags1" else 0,
                job_id=job_id,
                aad_prefix=prefix if entry.set_id is None else entry.aad_prefix,
            )
            for entry, prefix in zip(chosen, prefixes, strict=True)
        ]
        old = {entry.path: entry for entry in chosen}
        if dry_run or not entries:
            rows = [planned_row(target.full_path(old[e.path].file), target.full_path(e.file), e) for e in entries]
            return JobResult(job_id, "rekey", target.url, base.number, rows, base.pin)
        target.check_writable()
        if double_wrap is None:
            double_wrap = all(opened.keys.get(key_id).double_wrap for key_id in wrapped_by(chosen))
        columns = [_masters(opened, entry) for entry in chosen]
        entries = _reserve(opened, base.policy, job_id, wrapping_key_id, double_wrap, entries, columns)
        if plan is None:
            plan, entries = _begin(opened, held, job_id, entries, dek_length, base=base.number, **facts)
        else:
            entries = _continue(opened, plan, plan.entries(), entries, dek_length)
        replaced = {entry.path: entry.file for entry in chosen}
        try:
            envelope = _envelope(opened, entries, *chosen)
        except UnknownKeyError:
            plan.end()
            raise ConcurrentChangeError(
                "what was to get new keys was replaced and expired while the job was planned: run it again"
            ) from None
        context = Context(
            "rekey",
            job_id,
            opened.id,
            target,
            envelope,
            fsync=fsync,
            verify_after=verify_after,
            resume=options.resume,
        )
        rows = _run(context, [Task(entry, old[entry.path]) for entry in entries], options, plan)
        rows = _without_alarm(opened, base, rows)
        return _commit(opened, plan, context, entries, rows, base, replaced)


# ------------------------------------------------------------------------------------------------------ read, and clean


def open_file(
    dataset: Any,
    path: str,
    *,
    kms: KmsClient | Mapping[str, str],
    version: int | None = None,
    min_version: int | None = None,
    pin: str | None = None,
    missing: str = "error",
    threads: int | None = None,
    key_store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> AgsReader | io.RawIOBase:
    """One file of a dataset as a seekable binary file; `path` as it was in the tree that was encrypted.

    Of a Parquet file it is what `ags_fast.parquet.open_plain` makes: a plaintext Parquet file to any reader, decrypted
    as far as it is read. missing: columns whose master key the KMS does not give are an "error", or "hide" them.
    """
    if missing not in ("error", "hide"):
        raise ValueError(f"missing must be 'error' or 'hide', not {missing!r}")
    context, entry = _one_file(
        dataset, path, kms, key_store, storage_options, version, min_version, pin, threads, missing == "hide"
    )
    if entry.format != "parquet":
        return context.reader(entry)
    from ags_fast.jobs import parquet

    return parquet.view(context, entry)


def copy_file(
    dataset: Any,
    path: str,
    target: BinaryIO,
    *,
    kms: KmsClient | Mapping[str, str],
    version: int | None = None,
    min_version: int | None = None,
    pin: str | None = None,
    threads: int | None = None,
    key_store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Decrypt one file of a dataset to a file open for writing, which need not seek. What is written passed its tag."""
    context, entry = _one_file(
        dataset, path, kms, key_store, storage_options, version, min_version, pin, threads, False
    )
    if entry.format == "parquet":
        from ags_fast.jobs import parquet

        parquet.write_plain(context, entry, target)
        return
    with context.reader(entry) as reader:
        chunk = memoryview(bytearray(max(COPY_NBYTES, reader.block_size)))
        while got := reader.readinto(chunk):
            target.write(chunk[:got])


def _one_file(
    dataset: Any,
    path: str,
    kms: KmsClient | Mapping[str, str],
    key_store: Any,
    storage_options: Mapping[str, Any] | None,
    version: int | None,
    min_version: int | None,
    pin: str | None,
    threads: int | None,
    hide: bool,
) -> tuple[Context, FileEntry]:
    opened = Dataset.open(dataset, as_kms(kms), storage_options, key_store, pin=pin)
    while True:
        head = opened.committed(opened.current(version=version, min_version=min_version))
        try:
            entry = opened.find(head, path)
            break
        except ConcurrentChangeError:
            if version is not None:
                raise
    if entry is None:
        raise FileNotFoundError(f"the dataset's version {head.number} has no {path!r}")
    envelope = _envelope(opened, [entry])
    without = _denied(opened, [entry]) if hide else frozenset()
    return Context("verify", "", opened.id, opened.store, envelope, threads=threads, without=without), entry


@counted
def remove_files(
    dataset: Any,
    paths: str | Sequence[str],
    *,
    kms: KmsClient | Mapping[str, str],
    dry_run: bool = False,
    min_version: int | None = None,
    pin: str | None = None,
    progress: Any = None,
    key_store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Make a version of `dataset` without the files whose path matches one of these patterns.

    FileNotFoundError, and nothing is done, if a pattern matches no file. A row for each file. One that another job has
    replaced meanwhile stays, and is a failed row.

    **This deletes nothing yet.** Older versions have the files: `JobResult.still_in` has their numbers, and a warning
    says so. `expire` removes these versions, and with them the objects of the files, the manifests that name them, and
    KEKs that nothing else needs (`force=True`: without waiting for their grace). Copies of the dataset, and what the
    storage keeps of deleted objects, are not touched by anything here.

    What is left of a numbered set (`aad_prefix`) is no longer checked to be whole. A path that was removed may be
    encrypted again. dry_run, pin, min_version, progress: as `encrypt_files` has them.
    """
    opened, head, chosen = _opened(
        dataset, as_kms(kms), key_store, storage_options, None, min_version, pin, paths, writes=True
    )
    store, job_id = opened.store, new_job_id()
    stays: set[str] = set()
    if not dry_run:
        store.check_writable()
        _reserve(opened, head.policy, job_id, None, True, [], [])  # for what seals the manifests
        with ExitStack() as held:
            facts = {"operation": "remove", "source": shown(store.url)}
            plan = Plan.create(opened, job_id, [], "running", base=head.number, **facts)
            held.callback(plan.release)
            head, refused = opened.commit_removal(job_id, chosen)
            plan.end()
        stays = {entry.path for entry in refused}
    rows = [planned_row(store.full_path(entry.file), None, entry, "planned" if dry_run else "ok") for entry in chosen]
    why = "another job has put another file of this path into the dataset meanwhile: run the job again"
    rows = [
        row._replace(status="failed", error_class="ConcurrentChangeError", error=why) if entry.path in stays else row
        for entry, row in zip(chosen, rows, strict=True)
    ]
    if callable(progress):
        progress(rows)
    result = JobResult(job_id, "remove", store.url, head.number, rows, head.pin)
    if not dry_run:
        apply_retention(opened, result)
    result.still_in = _versions_with(opened, {entry.path for entry in chosen} - stays, 0 if dry_run else head.number)
    text = "Copies of the dataset, and what the storage keeps of deleted objects, still have the files."
    if result.still_in:
        text = f"Still in {_numbers(result.still_in)}, until expire removes that. {text}"
    result.warnings.append(text)
    return result


def _versions_with(opened: Dataset, paths: set[str], but: int) -> list[int]:
    """The numbers of the versions that have a file at one of these paths; without the number `but`."""
    opened.keys.refresh()
    known: dict[str, bool] = {}  # of each manifest, whether it has one
    found = []
    for version in opened.versions():
        if version.number == but or not paths:
            continue
        try:
            for ref in version.manifests:
                if ref.path not in known:
                    entries = opened.open_table(ref, opened.envelope)
                    known[ref.path] = not paths.isdisjoint(entry.path for entry in entries)
        except (IntegrityError, UnknownKeyError):
            if version.number in opened.version_numbers():
                raise
            continue  # it was expired meanwhile
        if any(known[ref.path] for ref in version.manifests):
            found.append(version.number)
    return sorted(found)


def _numbers(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"version {numbers[0]}"
    if len(numbers) == numbers[-1] - numbers[0] + 1:
        return f"versions {numbers[0]} to {numbers[-1]}"
    return f"versions {', '.join(map(str, numbers))}"


@counted
def sweep(
    dataset: Any,
    *,
    kms: KmsClient | Mapping[str, str] | None = None,
    older_than: timedelta | None = None,
    min_version: int | None = None,
    pin: str | None = None,
    key_store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Remove what jobs that died have left behind; a row for each thing removed.

    Without a KMS that is what can be told from names alone: temporary files that no living process holds, and uploads
    that were begun and not completed. With one it is also the plans of dead jobs, so that they can no longer be
    resumed, with the files that only they name, and manifests of no version; what a dead expiry had begun is finished.

    On local files a lock tells whether a job lives. Object stores have none: there, what is younger than `older_than`,
    by default a day, may be a living job's and stays. Given, it counts on local files too.

    With a KMS nothing is removed before all versions that are there were seen to be of one history, and of that of the
    pin: IntegrityError otherwise. ValueError for a pin or min_version without a KMS, which cannot be checked.
    """
    store = Store(dataset, storage_options)
    age = None if older_than is None else older_than.total_seconds()
    opened = None
    if kms is not None:
        opened = Dataset.open(store, as_kms(kms), key_store=key_store, pin=pin, min_version=min_version)
        opened.check_history()
    elif pin is not None or min_version:
        raise ValueError("a pin, and min_version, are checked with a KMS: pass kms")
    rows = [Row(store.full_path(path), None, "ok", format="temporary") for path in store.sweep(older_than=age)]
    head = None
    if opened is not None:
        for job_id in open_plans(store, begun=True):
            if not is_dead(store, job_id, age):
                continue
            plan = Plan.take(opened, job_id)
            if plan is not None:
                finish_expiry(opened, plan, rows)
                for path in plan.end():
                    kind = "manifest" if path.startswith(MANIFESTS) else "file"
                    rows.append(Row(store.full_path(path), None, "ok", format=kind))
            elif any(store.list(f"{PLANS}{job_id}/")):  # it lives
                continue
            rows.append(Row(store.full_path(f"{PLANS}{job_id}"), None, "ok", format="plan"))
        for path in orphan_manifests(opened, age):
            store.delete(path)
            rows.append(Row(store.full_path(path), None, "ok", format="manifest"))
        clear(opened, age)  # of the keys, where they are elsewhere; and folders that are empty by now
        head = opened.current()
        for path in opened.chain_orphans():
            store.delete(path)
            rows.append(Row(store.full_path(path), None, "ok", format="chain"))
    number, pinned = (head.number, head.pin) if head else (None, None)
    return JobResult(new_job_id(), "sweep", store.url, number, rows, pinned)


def set_policy(
    dataset: Any,
    policy: Policy,
    *,
    kms: KmsClient | Mapping[str, str],
    min_version: int | None = None,
    pin: str | None = None,
    key_store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Policy:
    """Lay down `policy` for later jobs on `dataset`, by a version that has the same files; returns what was before."""
    opened = Dataset.open(dataset, as_kms(kms), storage_options, key_store, pin=pin, min_version=min_version)
    opened.store.check_writable()
    while True:
        head = opened.current(writes=True)
        try:
            opened.succeed(head, "policy", new_job_id(), head.manifests if head else (), policy=policy)
        except FileExistsError:
            continue
        return head.policy if head else Policy()


# ------------------------------------------------------------------------------------------------------ what jobs share


class _Options:
    """The arguments that say how a job is run."""

    def __init__(
        self, engine: Engine | None, resume: str | None, on_error: str, max_failures: int | None, progress: Any
    ) -> None:
        if resume not in (None, "length", "verify"):
            raise ValueError(f"resume must be None, 'length' or 'verify', not {resume!r}")
        if on_error not in ("row", "raise"):
            raise ValueError(f"on_error must be 'row' or 'raise', not {on_error!r}")
        if max_failures is not None and max_failures < 0:
            raise ValueError(f"max_failures must not be negative, not {max_failures}")
        self.engine: Engine = LocalEngine() if engine is None else engine
        self.resume = resume
        self.max_failures = 0 if on_error == "raise" else max_failures
        self.progress = progress


def _check_apart(one: Store, other: Store) -> None:
    a, b = ((os.path.realpath(s.url) if s.local else s.url).rstrip("/") + "/" for s in (one, other))
    if a.startswith(b) or b.startswith(a):
        raise ValueError(f"{one.url} and {other.url}: neither may be the other, or inside it")


def _opened(
    dataset: Any,
    kms: KmsClient | Mapping[str, str],
    key_store: Any,
    storage_options: Mapping[str, Any] | None,
    version: int | None,
    min_version: int | None,
    pin: str | None,
    paths: str | Sequence[str] | None,
    writes: bool = False,
) -> tuple[Dataset, Version, list[FileEntry]]:
    opened = Dataset.open(dataset, as_kms(kms), storage_options, key_store, pin=pin)
    head, entries = opened.load(version, min_version, writes=writes)
    return opened, opened.committed(head), entries if paths is None else chosen_files(entries, paths)


def _envelope(dataset: Dataset, entries: Sequence[FileEntry], *more: FileEntry) -> Envelope:
    """What opens these, and nothing else, to be sent to workers."""
    return dataset.envelope.subset({key_id for entry in (*entries, *more) for key_id in entry.key_ids()})


def _denied(dataset: Dataset, entries: Sequence[FileEntry]) -> frozenset[str]:
    """The keys of columns that cannot be had. Each is asked for once, and here: all files are to lack the same."""
    envelope = dataset.envelope
    denied: dict[str, bool] = {}
    for entry in entries:
        for wrap in entry.wraps(dataset.id)[1:] if entry.column_keys else ():
            if wrap[0] in denied:
                continue
            try:
                envelope.unwrap(*wrap)
                denied[wrap[0]] = False
            except KeyAccessError:
                denied[wrap[0]] = True
    return frozenset(key_id for key_id, refused in denied.items() if refused)


def _run(context: Context, tasks: Sequence[Task], options: _Options, plan: Plan | None) -> list[Row]:
    """Do the files, in whatever order; their rows. JobError if there are more failures than allowed."""
    rows: list[Row] = []
    todo = tasks
    finished: list[Task] = []
    if plan is not None and context.resume == "length":  # one listing, and not a look at every file
        there = {entry.path: entry.size for entry in context.dataset.list() if not entry.path.startswith(HIDDEN)}
        finished = [t for t in tasks if t.entry.file_length and there.get(t.entry.file) == t.entry.file_length]
        done = {task.entry.path for task in finished}
        todo = [task for task in tasks if task.entry.path not in done]
    refused = []
    if context.op == "decrypt" and context.other is not None and not context.overwrite and not context.resume:
        # Asked here, once, and not by the workers: one of them may have another attempt of the same file beside it.
        taken = {entry.path for entry in context.other.list()}
        refused = [task for task in todo if task.entry.path in taken]
        todo = [task for task in todo if task.entry.path not in taken]
    failures = 0
    callback = options.progress if callable(options.progress) else None
    with _bar(context.op, sum(task.entry.plain_length for task in tasks), options.progress) as bar:

        def report(more: list[Row]) -> None:
            nonlocal failures
            rows.extend(more)
            failures += sum(row.status == "failed" for row in more)
            bar.update(sum(row.plain_length or 0 for row in more))
            if callback is not None:
                callback(more)
            if options.max_failures is not None and failures > options.max_failures:
                raise _TooManyError

        local = context.dataset.local and (context.other is None or context.other.local)
        try:
            if finished:
                report([make_row(context, task) for task in finished])
            if refused:
                report([failed_row(context, t, 0, "FileExistsError", is_there(t.entry.path)) for t in refused])
            options.engine.run(context, todo, LOCAL_OPEN_COST if local else STORE_OPEN_COST, report)
        except BaseException as error:
            # What was finished stays, for the plan knows it; what was not, goes.
            _sweep_job(context, tasks)
            if not isinstance(error, _TooManyError):
                raise
            result = JobResult(context.job_id, context.op, context.dataset.url, None, rows)
            first = result.failed[0]
            raise JobError(
                f"stopped after {failures} failed files, of which the first is {first.src}: "
                f"{first.error_class}: {first.error}",
                result,
            ) from None
    return rows


def _without_alarm(dataset: Dataset, version: Version, rows: list[Row]) -> list[Row]:
    """What is missing of a version that was expired while its files were read was not taken by a stranger."""
    if version.number in dataset.version_numbers():
        return rows
    why = f"version {version.number} was expired while its files were read: run the job again"
    return [
        row._replace(error_class="ConcurrentChangeError", error=why) if row.error_class == "IntegrityError" else row
        for row in rows
    ]


class _TooManyError(Exception):
    pass


def _sweep_job(context: Context, tasks: Sequence[Task]) -> None:
    if context.op == "decrypt" and context.other is not None:
        context.other.sweep(context.job_id, paths={task.entry.path for task in tasks})
    elif context.op != "verify":
        context.dataset.sweep(context.job_id, paths={task.entry.file for task in tasks})


def _bar(op: str, total: int, progress: Any) -> Any:
    from tqdm import tqdm

    # None: only where stderr is a terminal.
    disable = None if progress is None else not progress or callable(progress)
    return tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc=op, disable=disable)


def _commit(
    dataset: Dataset,
    plan: Plan,
    context: Context,
    entries: Sequence[FileEntry],
    rows: list[Row],
    base: Version | None,
    replaced: Mapping[str, str],
    policy: Policy | None = None,
) -> JobResult:
    """Make the version with what succeeded, and end the job."""
    by_name = {context.dataset.full_path(entry.file): entry for entry in entries}
    made = [(by_name[row.dst], row.file_length) for row in rows if row.status == "ok" and row.dst is not None]
    good = [entry if entry.file_length else entry._replace(file_length=length or 0) for entry, length in made]
    good.sort(key=lambda entry: entry.path)
    version = base
    refused: list[FileEntry] = []
    if good:
        if context.fsync:
            dataset.store.sync_folders(entry.file for entry in good)
        version, refused = dataset.commit(
            context.op,
            context.job_id,
            good,
            base=base,
            replaced={entry.path: replaced[entry.path] for entry in good if entry.path in replaced},
            policy=policy,
        )
    if refused:
        names = {context.dataset.full_path(entry.file) for entry in refused}
        why = "another job has put a file of this path into the dataset meanwhile: run the job again"
        rows = [
            row._replace(status="failed", error_class="ConcurrentChangeError", error=why) if row.dst in names else row
            for row in rows
        ]
    plan.end({entry.file for entry in good}.difference(entry.file for entry in refused))
    number, pinned = (version.number, version.pin) if version is not None else (None, None)
    result = JobResult(context.job_id, context.op, dataset.store.url, number, rows, pinned)
    if good:
        apply_retention(dataset, result)
    return result


def _delete_sources(
    dataset: Dataset, source: Store, entries: Sequence[FileEntry], result: JobResult, options: _Options
) -> None:
    """Delete what was encrypted, when all of it has been read back from storage."""
    made = {dataset.store.full_path(entry.file): entry for entry in entries}
    good = [made[row.dst] for row in result.rows if row.status == "ok" and row.dst in made]
    context = Context("verify", result.job_id, dataset.id, dataset.store, _envelope(dataset, good))
    checked = {row.src: row for row in _run(context, [Task(entry) for entry in good], options, None)}
    for i, row in enumerate(result.rows):
        check = checked.get(row.dst or "")
        if check is not None and check.status != "ok":
            result.rows[i] = row._replace(status="failed", error_class=check.error_class, error=check.error)
    if result.failed:
        return
    _delete(dataset, source, good, result, lambda entry: True)


def _delete_unchanged(dataset: Dataset, source: Store, same: Sequence[FileEntry], result: JobResult) -> None:
    """Delete what an earlier run encrypted and did not come to delete. Since that may be long ago, the bytes decide."""
    if result.failed or not same:
        return
    context = Context("decrypt", result.job_id, dataset.id, dataset.store, _envelope(dataset, same), source)

    def may_go(entry: FileEntry) -> bool:
        if entry.format != "parquet":
            return equal(context, entry)
        from ags_fast.jobs import parquet

        return parquet.same_as_source(context, entry)

    _delete(dataset, source, same, result, may_go)


def _delete(
    dataset: Dataset,
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
            if (there.size, there.stamp) != (entry.plain_length, entry.stamp):
                raise SourceChangedError("it has changed since")
            if not may_go(entry):
                raise SourceChangedError("it has other bytes, though the same size and time of change")
            source.delete_read(there)
        except (AgsError, OSError) as error:  # it is in the dataset, and so are others whose sources are gone by now
            i = rows[dataset.store.full_path(entry.file)]
            why = f"it is in the dataset, but its source was not deleted: {describe(error)}"
            result.rows[i] = result.rows[i]._replace(status="failed", error_class=type(error).__name__, error=why)


# ------------------------------------------------------------------------------------------------- what verify adds


def _name_swaps(context: Context, entries: Sequence[FileEntry], rows: list[Row]) -> list[Row]:
    """Say of files that fail their tags if they are each other's."""
    bad = {row.src: i for i, row in enumerate(rows) if row.error_class in ("IntegrityError", "FormatError")}
    suspects = [entry for entry in entries if context.dataset.full_path(entry.file) in bad]
    if len(suspects) > 100:  # every one is tried as every other
        return rows
    for entry in suspects:
        for other in suspects:
            if other is entry or not _holds(context, entry, other):
                continue
            i = bad[context.dataset.full_path(entry.file)]
            what = other.path if other.part is None else f"{other.path}, part {other.part}"
            rows[i] = rows[i]._replace(error=f"swapped: {entry.file} holds what belongs to {what}")
    return rows


def _holds(context: Context, entry: FileEntry, other: FileEntry) -> bool:
    if entry.format != other.format:
        return False
    try:
        if other.format == "parquet":
            from ags_fast.jobs import parquet

            return parquet.holds(context, other, entry.file)
        with context.reader(other, file=entry.file) as reader:
            reader.read(1)
    except (AgsError, OSError):
        return False
    return True


def _missing_members(dataset: Dataset, entries: Sequence[FileEntry]) -> list[Row]:
    """A failed row for each number that a set of files lacks, or has twice; of many that are missing, for each gap."""
    sets: dict[tuple[str, int], list[FileEntry]] = {}
    rows: list[Row] = []
    for entry in entries:
        if entry.set_id is not None and entry.part is not None and entry.parts is not None:
            sets.setdefault((entry.set_id, entry.parts), []).append(entry)
    for (set_id, parts), members in sets.items():
        numbers = Counter(entry.part for entry in members)
        there = sorted(number for number in numbers if number is not None and 0 <= number < parts)
        for before, after in pairwise([-1, *there, parts]):
            gap: list[Any] = [f"{before + 1} to {after - 1}"] if after > before + 1 else []
            if after - before < MISSING_ROWS - len(rows):  # how many there are to be is only what manifests say
                gap = list(range(before + 1, after))
            for n in gap:
                text = f"part {n} of the {parts} files that job {set_id} numbered is missing"
                rows.append(Row(f"{dataset.store.url}#{set_id}/{n}", None, "failed", "IntegrityError", text))
        for entry in members:
            if entry.part is not None and (numbers[entry.part] > 1 or not 0 <= entry.part < parts):
                text = f"part {entry.part} of the {parts} files that job {set_id} numbered is one too many"
                name = dataset.store.full_path(entry.file)
                rows.append(Row(name, None, "failed", "IntegrityError", text))
    return rows


def _extra_files(dataset: Dataset, head: Version, entries: Sequence[FileEntry]) -> list[Row]:
    """Files that no version and no job has. `entries`: of the version `head`, which has been read.

    In this order: a file whose job had a plan when it was listed is in the plan still, or in a version by then.
    """
    listed = [entry for entry in dataset.store.list() if not entry.path.startswith(HIDDEN)]
    known = {entry.file for entry in entries}
    for job_id in open_plans(dataset.store):
        known |= Plan.names(dataset, job_id)
    seen = {ref.path for ref in head.manifests}
    for version in dataset.versions():
        for ref in version.manifests:
            if ref.path not in seen:
                seen.add(ref.path)
                known.update(entry.file for entry in dataset.open_table(ref, dataset.envelope))
    return [
        Row(
            dataset.store.full_path(entry.path),
            None,
            "skipped",
            "ExtraFile",
            "no version and no open job of the dataset knows this file",
            file_length=entry.size,
        )
        for entry in listed
        if entry.path not in known
    ]
