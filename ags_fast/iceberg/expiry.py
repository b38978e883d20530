"""Expire snapshots of an encrypted table, and remove what only they needed: keys, files, older metadata files.

`expired` decides on the raw metadata, `unreachable` on what lists and manifests name; neither writes. `expire` commits
first, and afterwards deletes what `Garbage` lets go. So whatever dies on the way leaves only files that nothing names,
never a snapshot that lacks a file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from pyiceberg.catalog.rest import RestCatalog

from ags_fast.dataset.names import new_job_id
from ags_fast.engines.base import Engine, checked
from ags_fast.engines.local import LocalEngine
from ags_fast.errors import ConcurrentChangeError, PolicyError
from ags_fast.iceberg import policy
from ags_fast.iceberg.commit import edit, pinned, raw_metadata, table_io
from ags_fast.iceberg.garbage import STATISTICS, THREADS, Garbage, unreachable
from ags_fast.iceberg.locations import open_cost
from ags_fast.iceberg.reading import MANIFEST, Node, error_of
from ags_fast.iceberg.walk import Tree
from ags_fast.iceberg.work.removing import Gone, RemovalContext
from ags_fast.jobs.arguments import milliseconds
from ags_fast.jobs.results import JobResult, Row, counted, describe
from ags_fast.keys.iceberg import read_encryption_keys, write_encryption_keys
from ags_fast.metadata.retention import retained
from ags_fast.metadata.unused import unused_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyiceberg.table import Table

    from ags_fast.iceberg.io import FileIO
    from ags_fast.iceberg.metadata import Raw
    from ags_fast.keys.iceberg import EncryptedKey

__all__ = ["ALL_STAY", "GC", "NEWEST_STAY", "Expired", "check_gc", "expire", "expire_by", "expired", "forced"]

GC = "gc.enabled"
ALL_STAY, NEWEST_STAY = "all-stay", "newest-stay"

PLAINTEXT = (
    "the snapshot is in plaintext, so nothing proves which files are the table's. Load the catalog with "
    f"{policy.PLAINTEXT_FILES}=allow, and expire again"
)
LEFT = "{} files or snapshots stay: the rows with the status skipped say why"
SERVERS_METADATA = (
    "{} older metadata files stay, in which keys are wrapped as before the last rotation: on a REST catalog they are "
    "the server's. With the table's properties write.metadata.delete-after-commit.enabled=true and "
    "write.metadata.previous-versions-max=1 a server like Iceberg Java's deletes them with the next commits"
)

Snapshot = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Expired:
    """What an expiry makes of a table's metadata: the new ones, and what goes."""

    raw: Raw  # the very object that was given, if nothing changes
    snapshots: list[Snapshot] = field(default_factory=list)
    refs: dict[str, str] = field(default_factory=dict)  # "branch" or "tag", by name
    keys: list[EncryptedKey] = field(default_factory=list)
    statistics: list[str] = field(default_factory=list)  # locations
    metadata: list[str] = field(default_factory=list)  # locations of older files, which `raw` no longer names
    left: list[Snapshot] = field(default_factory=list)  # in plaintext, which would go if the client allowed plaintext

    def rows(self, status: str) -> Iterator[Row]:
        """Yield a row for each snapshot, branch, tag and key."""
        for one in self.snapshots:
            yield Row(str(one["snapshot-id"]), None, status, format="snapshot", key_id=one.get("key-id"))
        for one in self.left:
            yield Row(str(one["snapshot-id"]), None, "skipped", "Plaintext", PLAINTEXT, format="snapshot")
        for name, kind in self.refs.items():
            yield Row(name, None, status, format=kind)
        for key in self.keys:
            kind = "kek" if key.is_kek else "manifest-list-key"
            yield Row(key.key_id, None, status, format=kind, key_id=key.encrypted_by_id)


def check_gc(raw: Mapping[str, Any]) -> None:
    """Refuse to expire a table whose files another table may need. PolicyError."""
    if str((raw.get("properties") or {}).get(GC)).lower() == "false":
        raise PolicyError(f"the table has {GC}=false: another table may need its files, so nothing is deleted")


def expired(
    raw: Raw,
    *,
    keep: int = 1,
    older_than_ms: int | None = None,
    now_ms: int | None = None,
    plaintext: bool = True,
    force: str | None = None,
) -> Expired:
    """Return the metadata without expired snapshots, and without whatever only they needed.

    With the snapshots go their statistics, the history before them, keys that no snapshot names, KEKs that wrap
    nothing and are not the newest, and the names of older metadata files, which hold keys as they were wrapped before.
    These go from the age `older_than_ms` on; None: at any age. The arguments are those of `retained`, and `plaintext`:
    whether snapshots in plaintext go. `force` takes the place of the rules of `retained`: `ALL_STAY` keeps every
    snapshot, and `NEWEST_STAY` those that branches and tags name.

    Raises:
        PolicyError: The table's ``gc.enabled`` is false, or a property is malformed.
    """
    check_gc(raw)
    now = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    if force is None:
        ids, refs = retained(raw, keep=keep, older_than_ms=older_than_ms, now_ms=now)
    else:
        refs = set(raw.get("refs") or ())
        stay = raw.get("snapshots") or () if force == ALL_STAY else (raw.get("refs") or {}).values()
        ids = {one["snapshot-id"] for one in (*stay, {"snapshot-id": raw.get("current-snapshot-id")})}
    made = dict(raw)
    goes = [one for one in raw.get("snapshots") or () if one["snapshot-id"] not in ids]
    snapshots = [one for one in goes if plaintext or one.get("key-id")]
    staying = [one for one in goes if one not in snapshots]
    ids.update(one["snapshot-id"] for one in staying)
    gone = {one["snapshot-id"] for one in snapshots}
    gone_refs = {name: ref.get("type", "branch") for name, ref in (raw.get("refs") or {}).items() if name not in refs}
    statistics = []
    if gone:
        made["snapshots"] = [one for one in raw["snapshots"] if one["snapshot-id"] in ids]
        if "snapshot-log" in raw:
            made["snapshot-log"] = _history(raw["snapshot-log"] or [], ids)
        for name in STATISTICS:
            if raw.get(name):
                made[name] = [one for one in raw[name] if one.get("snapshot-id") not in gone]
                statistics += [one["statistics-path"] for one in raw[name] if one.get("snapshot-id") in gone]
        statistics = _not_named(statistics, made)
        made = _without_plaintext(made)
    if gone_refs:
        made["refs"] = {name: ref for name, ref in raw["refs"].items() if name in refs}
    keys = unused_keys(made, gone={one.get("key-id") for one in snapshots})
    if keys:
        unused = {key.key_id for key in keys}
        left = [key for key in read_encryption_keys(raw["encryption-keys"]) if key.key_id not in unused]
        made["encryption-keys"] = write_encryption_keys(left)
    older = _superseded(raw, None if older_than_ms is None else now - older_than_ms)
    if older:
        made["metadata-log"] = [one for one in raw["metadata-log"] if one["metadata-file"] not in older]
    changed = gone or gone_refs or keys or older
    return Expired(made if changed else raw, snapshots, gone_refs, keys, statistics, older, staying)


def _without_plaintext(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a table that `encrypt` encrypted: without leave to read plaintext, once none is left."""
    properties = raw.get("properties") or {}
    if policy.PLAINTEXT_SNAPSHOTS not in properties or not all(one.get("key-id") for one in raw["snapshots"]):
        return raw
    leave = (policy.PLAINTEXT_SNAPSHOTS, policy.PLAINTEXT_FILES)
    return {**raw, "properties": {name: value for name, value in properties.items() if name not in leave}}


def _history(log: list[dict[str, Any]], ids: set[int]) -> list[dict[str, Any]]:
    """Return what is left of the log of snapshots.

    All before a gap goes: otherwise a snapshot would seem to have been current in the time of one that is gone.
    """
    gap = max((place for place, one in enumerate(log) if one["snapshot-id"] not in ids), default=-1)
    return log[gap + 1 :]


def _not_named(paths: Iterable[str], raw: Mapping[str, Any]) -> list[str]:
    named = {one["statistics-path"] for name in STATISTICS for one in raw.get(name) or ()}
    return [path for path in dict.fromkeys(paths) if path not in named]


def _superseded(raw: Mapping[str, Any], cutoff: int | None) -> list[str]:
    """Return the older metadata files that go: those that were current last before `cutoff`."""
    log = list(raw.get("metadata-log") or ())
    ends = [*(one.get("timestamp-ms", 0) for one in log[1:]), raw.get("last-updated-ms", 0)]
    return [one["metadata-file"] for one, end in zip(log, ends, strict=False) if cutoff is None or end < cutoff]


# ------------------------------------------------------------------------------------------------------------- public


@counted
@pinned
def expire(
    table: Table,
    *,
    keep: int = 1,
    older_than: timedelta | None = None,
    dry_run: bool = False,
    engine: Engine | None = None,
) -> JobResult:
    """Remove old snapshots of a table, and then whatever only they needed.

    **This is final.** What goes: snapshots that no branch or tag retains (`retained` has the rules), their keys, KEKs
    that wrap nothing any more, their manifest lists, manifests, data and delete files and statistics, as far as no
    other snapshot reaches them, and older metadata files, in which keys are wrapped as before the last rotation. On a
    REST catalog metadata files are the server's, and stay: a warning says how to have the server delete them. The
    metadata file that this began on stays until the next call: another catalog may have a name for it.

    **Files that only the metadata name** (older metadata, statistics), or lists in plaintext, are deleted only below
    the table's own folders, or below those of the client's property ``encryption.delete-roots``; see docs/iceberg.md.

    The metadata are committed first, and the files are deleted afterwards. If this dies in between, files are left that
    no snapshot names and no key opens: ``verify(orphans=True)`` names them. A reader that has planned a scan of a
    removed snapshot fails. With `older_than`, readers and writers that began in that time are not disturbed.

    Args:
        table: A table of a catalog of ags_fast.iceberg. Afterwards it is the new version.
        keep: How many snapshots of each branch stay at least: 1 or more.
        older_than: Remove only snapshots, and metadata files, that are older. None: of any age, or as the table's
            properties ``history.expire.*`` say.
        dry_run: Remove nothing; the rows have the status "planned".
        engine: Deletes the files, one task a file. Lists and manifests are read in this process, so that no key leaves
            it. None: threads of this process.

    Returns:
        A row for each snapshot, branch, tag, key and file. A file that could not be deleted is "failed"; one that was
        not there, or may not be the table's, is "skipped". A list or manifest that could not be read is "failed", and
        what only it names stays.

    Raises:
        PolicyError: The table's ``gc.enabled`` is false; the table is in plaintext, or was not loaded by a catalog of
            ags_fast.iceberg.
        KeyAccessError: The key of a snapshot that stays is lost, or the KMS refuses. Nothing has changed.
        IntegrityError, FormatError: A list or manifest of a snapshot that stays was changed. Nothing has changed.
        ConcurrentChangeError: Other commits came first, again and again, or the catalog does not know whether it made
            the commit. No file was deleted.
        ValueError: `keep` is less than 1, or `older_than` is negative.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}: the newest snapshot of a branch stays")
    older_than_ms = milliseconds("older_than", older_than)
    checked(engine)
    return expire_by(table, engine, dry_run=dry_run, keep=keep, older_than_ms=older_than_ms)


def forced(table: Table, force: str, engine: Engine | None = None) -> JobResult:
    """Expire what was written under keys that a commit has just replaced, and the metadata files that hold them.

    The last of these files is that of the commit. This client has made it, so no other catalog has a name for it.
    """
    result = expire_by(table, engine, force=force)
    result.rows += expire_by(table, engine, force=ALL_STAY).rows
    return result


def expire_by(table: Table, engine: Engine | None, *, dry_run: bool = False, **rules: Any) -> JobResult:
    """Expire as `expire` does, by the rules of `expired`."""
    io = table_io(table)
    io.session.check_writes()
    work = _Work(table, io, rules)
    job_id = new_job_id()
    if dry_run:
        table.refresh()
        work.decide(raw_metadata(table))
        files, left = work.files()
        rows = [*work.rows("planned"), *(one.row("planned") for one in files), *left]
        return JobResult(job_id, "expire", table.location(), None, rows)
    raw = edit(table, work.decide)
    work.check_committed(raw)
    log = raw.get("metadata-log") or ()
    files, left = work.files(log)
    rows = [*work.rows("ok"), *_removed(io, files, job_id, engine), *left]
    result = JobResult(job_id, "expire", table.location(), None, rows)
    if left or work.made.left:
        result.warnings.append(LEFT.format(len(left) + len(work.made.left)))
    if log and isinstance(table.catalog, RestCatalog):
        result.warnings.append(SERVERS_METADATA.format(len(log)))
    return result


def _removed(io: FileIO, files: list[Gone], job_id: str, engine: Engine | None) -> list[Row]:
    """Delete files, and return their rows."""
    for one in files:
        io.table.forget(one.path)
    rows: list[Row] = []
    if files:
        context = RemovalContext("expire", job_id, settings=io.settings, files_at_once=THREADS)
        (engine or LocalEngine(0)).run(context, files, open_cost(one.path for one in files), rows.extend)
    return rows


class _Work:
    """An expiry: what it decides, also again when another commit came first."""

    def __init__(self, table: Table, io: FileIO, rules: dict[str, Any]) -> None:
        self._table, self._io, self._rules = table, io, rules
        self._nodes: dict[tuple[Any, ...], Node] = {}
        self._failed: list[Row] = []
        self._gone: list[Gone] = []

    def decide(self, raw: Raw) -> Raw:
        """Return the new metadata, after it has been seen which files go."""
        if not policy.is_encrypted(raw):
            raise PolicyError("the table is in plaintext: use PyIceberg's table.maintenance.expire_snapshots()")
        plaintext = self._io.session.plaintext.files == "allow"
        self.base, self.made = raw, expired(raw, plaintext=plaintext, **self._rules)
        self._failed, self._gone, self._began = [], [], self._table.metadata_location
        tree = Tree.of(self._io.session, self._io.inner, raw, plaintext=True)
        made = self.made
        if not (made.snapshots or made.refs or made.keys):
            # The log goes on to name older metadata files: a commit would leave another one each time.
            there = [path for path in made.metadata if self._exists(path)]
            self.made = made = Expired(raw, left=made.left, metadata=there)
        if removed := [*made.snapshots, *made.left]:
            gone = {one["snapshot-id"] for one in removed}
            kept = [one for one in raw["snapshots"] if one["snapshot-id"] not in gone]
            self._gone = unreachable(partial(self._read, tree), removed, kept, made.statistics, self._fail)
        return made.raw

    def check_committed(self, raw: Raw) -> None:
        """Raise ConcurrentChangeError, before any file is deleted, if the newest metadata still have what was to go.

        A catalog may not know whether a commit was made, and another commit may have come since.
        """
        left = {one["snapshot-id"] for one in raw.get("snapshots") or ()}
        log = {one["metadata-file"] for one in raw.get("metadata-log") or ()} - {self._began}
        keeps_log = isinstance(self._table.catalog, RestCatalog) or self.made.raw is self.base
        if any(one["snapshot-id"] in left for one in self.made.snapshots) or (
            not keeps_log and not log.isdisjoint(self.made.metadata)
        ):
            raise ConcurrentChangeError("the catalog did not make the commit: no file was deleted, expire again")

    def rows(self, status: str) -> Iterator[Row]:
        """Yield the rows of what the new metadata lack, and of what could not be read."""
        yield from self.made.rows(status)
        yield from self._failed

    def files(self, log: Iterable[Raw] = ()) -> tuple[list[Gone], list[Row]]:
        """Return the files that go, metadata files last, and the rows of those that stay.

        Args:
            log: What the new metadata name of older ones; with the file that the expiry began on these stay.
        """
        table, files = self._table, list(self._gone)
        if not isinstance(table.catalog, RestCatalog):  # there metadata files are the server's
            files += [Gone(path, "metadata") for path in dict.fromkeys(self.made.metadata)]
        named = [one["metadata-file"] for one in log] if self.made.raw is not self.base else []
        keep = (self._began, table.metadata_location, *named)
        uuid, name = self.base["table-uuid"], table.name()
        return Garbage(self._io, table.catalog, uuid, self._began, keep=keep, name=name).split(files)

    def _exists(self, path: str) -> bool:
        try:
            return self._io.inner(path).new_input(path).exists()
        except Exception:  # of any storage: the row of the file says what becomes of it
            return True

    def _fail(self, node: Node) -> None:
        assert node.error is not None
        error = error_of(node, node.error)
        self._failed.append(Row(node.path, None, "failed", type(error).__name__, describe(error), format=node.kind))

    def _read(self, tree: Tree, node: Node) -> Node:
        """Return a list or manifest, read: once, also if other commits come and the decision is taken again."""
        key = node.known.key_metadata
        name = node.path, node.snapshot.get("key-id"), None if key is None else key.encode()
        if name not in self._nodes:
            tree.read(node).plain = b""
            for one in node.named if node.kind == MANIFEST else ():
                one.key_metadata = None  # that of a file opens nothing here
            if node.error is not None:
                return node
            self._nodes[name] = node
        return self._nodes[name]
