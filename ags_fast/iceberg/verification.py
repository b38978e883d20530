"""Check every tag of every file of an encrypted table, and what else can be wrong with one.

The walk goes from metadata to manifest lists, manifests and files. It holds the files of a few manifests at a time.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from pyiceberg.catalog.rest import RestCatalog

from ags_fast._types import OrAllow, check_choice
from ags_fast.dataset.names import new_job_id
from ags_fast.engines.base import Engine, checked
from ags_fast.engines.local import client_for
from ags_fast.errors import AgsError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.iceberg import metadata, policy
from ags_fast.iceberg.checks import Item, check_file, check_node, items_of
from ags_fast.iceberg.commit import pinned, raw_metadata, table_io
from ags_fast.iceberg.garbage import STATISTICS, own_folders, roots_of, within
from ags_fast.iceberg.locations import is_encrypted, normal, open_cost
from ags_fast.iceberg.manifests import DELETED, Known
from ags_fast.iceberg.orphans import Stored, not_named, stored_files
from ags_fast.iceberg.reading import LIST, show_metadata
from ags_fast.iceberg.snapshots import head_of
from ags_fast.iceberg.walk import Tree, ahead, keep
from ags_fast.iceberg.work.checking import CheckContext, task_of
from ags_fast.jobs.results import JobResult, Row, counted, describe
from ags_fast.keys.iceberg import read_encryption_keys
from ags_fast.metadata.unused import unused_keys
from ags_fast.seals.guard import DO, SEALED, WHY
from ags_fast.seals.state import PROPERTY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyiceberg.table import Table

    from ags_fast.iceberg.io import FileIO
    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.reading import Node

__all__ = ["verify"]

THREADS = 8  # that read and check files; AES is so fast that they mostly wait for the storage
DAY_MS = 86_400_000  # by which clocks may differ
PLACES = ("write.data.path", "write.metadata.path", "write.object-storage.path", "write.folder-storage.path")
BATCH = 20_000  # tasks for an engine
FILES_AHEAD = 4 * THREADS
PLAIN_STATISTICS = (
    "the statistics are in plaintext: Iceberg has no keys for them. statistics='allow' lists them as skipped"
)
ORPHAN = "no snapshot names this file: a writer or an expiry that died left it, or a writer is about to commit it"
PLAN = (
    "the plan of a rekey or an encrypt that died, or that is running: start the operation again, and it goes on by the "
    "plan. Keys in the plan are wrapped"
)
PLAIN_ORPHAN = (
    "the file is in plaintext, and no snapshot names it: a writer that knows nothing of encryption may have failed "
    "after it wrote the file. Delete the file if no writer needs it"
)


@counted
@pinned
def verify(
    table: Table,
    *,
    snapshots: Literal["all", "current"] | Sequence[int] = "all",
    statistics: OrAllow = "refuse",
    orphans: bool = False,
    engine: Engine | None = None,
    only: Callable[[str], bool] = bool,
) -> JobResult:
    """Check every tag of every file that snapshots of a table reach, each file once.

    Checked are the metadata file, manifest lists, manifests, data files, delete files and deletion vectors: all tags,
    the trusted length of each against the storage, what a list says of the files and rows of a manifest, and that
    nothing is in plaintext. An error of one file does not stop the others. The table is checked as it was loaded.
    Of a table that was sealed, each metadata file of its log has a row, too: "skipped" with the class "Changed",
    "Unsealed" or "Foreign" if its seal does not hold.

    Args:
        table: A table of a catalog of ags_fast.iceberg, or of `open_table`. Load it within `inspecting()` if its
            properties are refused.
        snapshots: ``"all"``, ``"current"``, or ids of snapshots.
        statistics: Statistics files are in plaintext, since Iceberg has no keys for them. ``"refuse"`` lets them fail;
            ``"allow"`` lists them as skipped.
        orphans: Whether to list the files below the table's location, and to tell those that neither a snapshot nor an
            older metadata file names. Those in plaintext fail; others are skipped, with the class "Orphan". While a
            writer works, its files are among them.
        engine: Runs the checks of data and delete files, one task a file. Workers get keys wrapped by a KEK of the job,
            which the table's master key wraps. None: threads of this process.
        only: Tells by its location whether to check a data or delete file. Lists and manifests are always checked.

    Returns:
        A row for each file. ``src`` is its location, ``format`` its kind. Errors: IntegrityError or FormatError if it
        was changed, PolicyError if it is in plaintext, KeyAccessError if its key is lost, FileNotFoundError if it is
        not there. Files in plaintext are "skipped" if only snapshots from before the encryption name them; a warning
        has the ids of these snapshots. Nothing proves that they are old: readers refuse them. Other warnings name what
        an attacker may have changed in the metadata, and its owner may have, too: keys, and places of files.

    Raises:
        PolicyError: The table is in plaintext, or was not loaded by a catalog of ags_fast.iceberg.
        KeyAccessError: With an `engine`, the KMS refuses to wrap the KEK of the job.
        TypeError: The KMS client cannot be sent to the engine's workers.
        ValueError: An argument is malformed, or the table does not have a snapshot.
    """
    check_choice("statistics", statistics, OrAllow)
    io, raw = table_io(table), raw_metadata(table)
    if not policy.is_encrypted(raw):
        raise PolicyError(f"the table has no {policy.KEY_ID}: it is in plaintext")
    chosen = _chosen(raw, snapshots)
    with ThreadPoolExecutor(THREADS) as pool:
        walk = _Walk(io, raw, chosen, pool, engine, names=orphans)
        walk.only = only
        result = JobResult(walk.job_id, "verify", table.location(), None, [])
        result.rows.append(_metadata_row(table, io, raw))
        result.rows += walk.run()
        result.rows += walk.statistics(refuse=statistics == "refuse")
        if _seals(io, raw):
            log = dict.fromkeys(one["metadata-file"] for one in raw.get("metadata-log") or ())
            result.rows += filter(None, pool.map(partial(_earlier_row, io), log))
        if orphans:
            walk.name_older(raw, table.metadata_location)
            result.rows += walk.orphans(table.location())
    result.warnings += [*_warnings(raw, walk, result.rows), *_doubts(table, raw, chosen, result.rows)]
    return result


def _chosen(raw: Raw, snapshots: str | Sequence[int]) -> set[int]:
    there = {one["snapshot-id"] for one in raw.get("snapshots") or ()}
    if snapshots == "all":
        return there
    if snapshots == "current":
        head = head_of(raw)
        return set() if head is None else {head["snapshot-id"]}
    if isinstance(snapshots, str):
        raise ValueError(f"snapshots must be 'all', 'current' or ids, not {snapshots!r}")
    chosen = set(snapshots)
    if missing := chosen - there:
        raise ValueError(f"the table has no snapshot {min(missing)}")
    return chosen


def _metadata_row(table: Table, io: FileIO, raw: Raw) -> Row:
    """Check that the metadata file is as it was when the table was loaded, and what its catalog knows of it."""
    location = table.metadata_location

    def check() -> int | None:
        if _seals(io, raw):
            io.session.guard.look(raw, location)
        if isinstance(table.catalog, RestCatalog):  # the server's answer is the metadata
            io.session.check_metadata(raw, location)
            return None
        data = metadata.read(io.inner(location).new_input(location))
        if metadata.parse(data, location) != raw:
            raise IntegrityError("the metadata file was changed after the table was loaded: such a file never changes")
        show_metadata(io.session, data, location)
        return len(data)

    return _attempt(location, "metadata", check)[0]


def _seals(io: FileIO, raw: Raw) -> bool:
    """Tell whether a table was ever sealed, and this client looks at seals."""
    return PROPERTY in raw["properties"] and io.session.guard.setting != "off"


def _earlier_row(io: FileIO, location: str) -> Row | None:
    """Return what the seal of an earlier metadata file says; None if the file was expired.

    Nobody reads the table by that file, so none fails.
    """
    try:
        data = metadata.read(io.inner(location).new_input(location))
        verdict = io.session.guard.look(metadata.parse(data, location), location, keep=False).verdict
    except FileNotFoundError:
        return None
    except (AgsError, OSError) as error:
        return _failed(location, "metadata", error)._replace(status="skipped")
    if verdict != SEALED:
        return Row(location, None, "skipped", verdict.capitalize(), f"the file {WHY[verdict]}", format="metadata")
    return Row(location, None, "ok", format="metadata", file_length=len(data))


def _attempt(path: str, kind: str, work: Callable[[], int | None], **more: Any) -> tuple[Row, bool]:
    """Return the row of one check, and whether it passed."""
    begun = time.perf_counter()
    try:
        length = work()
    except Exception as error:  # of any storage: the other files are checked all the same
        return _failed(path, kind, error, **more), False
    seconds = round(time.perf_counter() - begun, 6)
    return Row(path, None, "ok", format=kind, seconds=seconds, **{"file_length": length, **more}), True


def _failed(path: str, kind: str, error: Exception, **more: Any) -> Row:
    return Row(path, None, "failed", type(error).__name__, describe(error), format=kind, **more)


def _judged(row: Row, *, before: bool) -> Row:
    """Return the row of a file that may be in plaintext, if only snapshots from before the encryption name it."""
    if before and row.error_class == "PolicyError":
        return row._replace(status="skipped", error_class="Plaintext")
    return row


def _said(known: Known) -> int:
    key = known.key_metadata
    return hash((known.length, None if key is None else key.encode()))


class _Walk:
    """One verification."""

    def __init__(
        self, io: FileIO, raw: Raw, chosen: set[int], pool: ThreadPoolExecutor, engine: Engine | None, *, names: bool
    ) -> None:
        self.only: Callable[[str], bool] = bool
        self.job_id, self._engine = new_job_id(), checked(engine)
        self._shared: CheckContext | None = None
        self._io, self._raw, self._chosen, self._pool = io, raw, chosen, pool
        self._walking: dict[str, Any] = {"plaintext": True, "counts": True, "failed": keep, "pool": pool, "seen": {}}
        self.before = policy.from_before(raw) & chosen  # snapshots from before the encryption
        # Paths that have a row, and a hash of what is said of each: what is said otherwise elsewhere is checked, too.
        self._seen: dict[str, int] = {}
        self._named: set[str] | None = set() if names else None
        self._rows: list[Row] = []
        self.untrusted: list[str] = []  # lists without a trusted length
        self.unread: list[str] = []  # lists and manifests that could not be read: what only they name is not known

    # ------------------------------------------------------------------------------------------------------ the walk

    def run(self) -> list[Row]:
        """Return the rows of all files of the chosen snapshots: lists and manifests first."""
        files: list[Row] = []
        if self._engine is None:
            for rows in ahead(self._pool, self._check_file, self._items(), FILES_AHEAD):
                files += rows
        else:
            self._run_on(self._engine, files)
        return self._rows + files

    def _run_on(self, engine: Engine, files: list[Row]) -> None:
        """Check the files by tasks on an engine, some ten thousand at a time."""
        before: set[str] = set()  # the files that only snapshots from before the encryption name

        def report(rows: list[Row]) -> None:
            files.extend(_judged(row, before=row.src in before) for row in rows)

        items = self._items()
        while batch := list(islice(items, BATCH)):
            before.update(item.known.path for item in batch if item.before and not item.again)
            context = self._context(engine)
            tasks = [task_of(context, item) for item in batch if not item.again]
            if tasks:
                engine.run(context, tasks, open_cost(task.path for task in tasks), report)
            for item in batch:
                if item.again:
                    files += self._check_file(item)

    def _context(self, engine: Engine) -> CheckContext:
        if self._shared is None:
            fields: Any = {"table_uuid": self._raw["table-uuid"], "settings": self._io.settings, "threads": 1}
            kms, master = client_for(engine, self._io.session.kms), self._raw["properties"][policy.KEY_ID]
            self._shared = CheckContext.begin("verify", self.job_id, kms=kms, wrapping_key_id=master, **fields)
        return self._shared

    def _items(self) -> Iterator[Item]:
        """Yield the files of the chosen snapshots, each once."""
        snapshots = self._snapshots(self._raw, chosen=True)
        snapshots.sort(key=lambda one: one["snapshot-id"] in self.before)  # what others name, too, is judged as theirs
        for node in Tree.of(self._io.session, self._io.inner, self._raw, **self._walking).walk(snapshots):
            self._check_node(node)
            for item in self._items_of(node):
                path = item.known.path
                self._name(path)
                if not self.only(path):
                    continue
                said, item.again = _said(item.known), path in self._seen
                if self._seen.get(path) == said:
                    item.whole = False
                    if not item.vectors or item.known.key_metadata is None:
                        continue
                self._seen[path] = said
                yield item

    def _snapshots(self, raw: Raw, *, chosen: bool) -> list[Raw]:
        return [one for one in raw.get("snapshots") or () if (one["snapshot-id"] in self._chosen) == chosen]

    def _items_of(self, node: Node) -> list[Item]:
        return [] if node.kind == LIST else items_of(node, before=node.snapshot["snapshot-id"] in self.before)

    def _name(self, path: str) -> None:
        if self._named is not None:
            self._named.add(normal(path))

    def _check_node(self, node: Node) -> None:
        """Keep the row of a list or manifest."""
        self._name(node.path)
        key, seconds = node.known.key_metadata, node.seconds or 0.0
        if node.error is not None:
            self.unread.append(node.path)
        elif node.kind == LIST and key is not None and key.file_length is None:
            self.untrusted.append(node.path)
        row = Row(node.path, None, "ok", format=node.kind, seconds=seconds, file_length=node.nbytes)
        try:
            if node.error is not None:
                raise node.error
            check_node(node)
        except Exception as error:  # of any storage: the other files are checked all the same
            row = _failed(node.path, node.kind, error)
        self._rows.append(_judged(row, before=node.snapshot["snapshot-id"] in self.before))

    def _check_file(self, item: Item) -> list[Row]:
        known, lengths = item.known, []

        def check() -> int:
            lengths.append(check_file(self._io.inner(known.path), item))
            return known.length

        row, passed = _attempt(known.path, known.kind, check)
        if passed and not item.whole:
            return []  # its row is there already
        row = row._replace(plain_length=lengths[0] if lengths else None, file_length=known.length)
        return [_judged(row, before=item.before)]

    # --------------------------------------------------------------------------------------------------- statistics

    def statistics(self, *, refuse: bool) -> list[Row]:
        """Return the rows of the statistics files of the chosen snapshots."""
        rows = []
        for name in STATISTICS:
            for one in self._raw.get(name) or ():
                path = one.get("statistics-path")
                if path is None or one.get("snapshot-id") not in self._chosen or path in self._seen:
                    continue
                self._seen[path] = 0
                rows.append(self._statistics_row(one, name, refuse=refuse))
        return rows

    def _statistics_row(self, one: Raw, kind: str, *, refuse: bool) -> Row:
        path = one["statistics-path"]
        try:
            source = self._io.inner(path).new_input(path)
            encrypted, nbytes = is_encrypted(source), len(source)
        except Exception as error:  # of any storage
            return _failed(path, kind, error)
        if one.get("key-metadata"):
            text = "the table's metadata, which are in plaintext, show the key of the statistics to everybody"
            return _failed(path, kind, PolicyError(text), file_length=nbytes)
        if encrypted:
            text = "the statistics are encrypted, and nothing names their key: delete them from the table"
            return _failed(path, kind, KeyAccessError(text), file_length=nbytes)
        row = _failed(path, kind, PolicyError(PLAIN_STATISTICS), file_length=nbytes)
        return row if refuse else row._replace(status="skipped", error_class="Plaintext")

    # ------------------------------------------------------------------------------------------------------ orphans

    def name_older(self, raw: Raw, location: str) -> None:
        """Collect what snapshots that were not chosen name, and what older metadata files name."""
        self._name(location)
        self._name_snapshots(raw, self._snapshots(raw, chosen=False))
        known = {one["snapshot-id"] for one in raw.get("snapshots") or ()}
        for entry in raw.get("metadata-log") or ():
            location = entry["metadata-file"]
            self._name(location)
            with suppress(AgsError, OSError):
                older = metadata.parse(metadata.read(self._io.inner(location).new_input(location)), location)
                gone = [one for one in older.get("snapshots") or () if one["snapshot-id"] not in known]
                known.update(one["snapshot-id"] for one in gone)
                self._name_statistics(older)
                self._name_snapshots(older, gone)
        self._name_statistics(raw)

    def _name_statistics(self, raw: Raw) -> None:
        for name in STATISTICS:
            for one in raw.get(name) or ():
                self._name(one.get("statistics-path") or "")

    def _name_snapshots(self, raw: Raw, snapshots: list[Raw]) -> None:
        for node in Tree.of(self._io.session, self._io.inner, raw, **self._walking).walk(snapshots):
            self._name(node.path)
            if node.error is not None and not isinstance(node.error, FileNotFoundError):  # what is gone names nothing
                self.unread.append(node.path)
            for one in node.named:
                if one.status != DELETED:
                    self._name(one.path)

    def orphans(self, location: str) -> list[Row]:
        """Return the rows of the files below the table's location that nothing names."""
        assert self._named is not None
        found = not_named(stored_files(self._io, location), self._named)
        return list(ahead(self._pool, self._orphan_row, found, FILES_AHEAD))

    def _orphan_row(self, one: Stored) -> Row:
        try:
            encrypted = is_encrypted(self._io.inner(one.path).new_input(one.path))
        except Exception as error:  # of any storage
            return _failed(one.path, "orphan", error, file_length=one.length)
        row = Row(one.path, None, "skipped", "Orphan", ORPHAN, format="orphan", file_length=one.length)
        if one.path.endswith(".plan"):
            return row._replace(error=PLAN)
        if encrypted or one.path.endswith((".metadata.json", ".metadata.json.gz", ".crc")):
            return row
        return _failed(one.path, "orphan", PolicyError(PLAIN_ORPHAN), file_length=one.length)


def _warnings(raw: Raw, walk: _Walk, rows: list[Row]) -> Iterator[str]:
    if plain := sum(row.error_class == "Plaintext" for row in rows):
        ids = ", ".join(map(str, sorted(walk.before))) or "none"
        yield (
            f"{plain} files are in plaintext: those of snapshots from before the encryption (ids: {ids}), which "
            "`expire` removes, and statistics if statistics='allow'"
        )
    if walk.untrusted:
        yield (
            f"{len(walk.untrusted)} manifest lists have no trusted length (iceberg-rust before 0.11 wrote none): "
            "nobody would see that blocks were cut from their ends"
        )
    if walk.unread:
        yield f"{len(walk.unread)} lists or manifests could not be read: what only they name is among the orphans"
    with suppress(AgsError):
        if unused := unused_keys(raw):
            yield f"{len(unused)} keys in the metadata are needed by nothing: `expire` removes these keys"


def _doubts(table: Table, raw: Raw, chosen: set[int], rows: list[Row]) -> Iterator[str]:
    """Yield what an attacker may have changed in the metadata, and their owner may have, too."""
    with suppress(AgsError):
        guard, location = table_io(table).session.guard, table.metadata_location
        if _seals(table_io(table), raw) and (verdict := guard.look(raw, location).verdict) != SEALED:
            yield f"{location} {WHY[verdict]}. {DO}"
    own, given = [*own_folders(table.metadata_location), *roots_of(table.catalog)], raw["properties"]
    log = [one["metadata-file"] for one in raw.get("metadata-log") or ()]
    named = dict.fromkeys((*(row.src for row in rows if "/" in row.src), *log))
    outside = [path for path in named if not any(within(path, folder) for folder in own)]
    if outside:
        yield (
            f"{len(outside)} files are not below the table's own folder, such as {outside[0]}: if the table has no "
            "files there, somebody changed its metadata"
        )
    for name, folder in {"location": raw.get("location"), **{one: given.get(one) for one in PLACES}}.items():
        if folder and not any(within(f"{folder}/x", one) for one in own):
            yield f"the table's {name}, where its next files go, is not below its own folder: {folder}"
    plain = [one["snapshot-id"] for one in raw.get("snapshots") or () if not one.get("key-id")]
    if left := sorted(set(plain) - chosen):
        yield f"snapshots in plaintext were not chosen: {', '.join(map(str, left))}"
    with suppress(AgsError):
        keks = [key for key in read_encryption_keys(raw.get("encryption-keys") or ()) if key.is_kek]
        masters = {key.encrypted_by_id for key in keks} | {given[policy.KEY_ID]}
        if len(masters) > 1:
            yield (
                f"several master keys wrap the table's KEKs, or are its {policy.KEY_ID}: {', '.join(sorted(masters))}. "
                "A rotation to another master key leaves one, once `expire` has removed the old KEKs"
            )
        if others := table_io(table).session.table_of(raw).others_keks(raw):
            yield (
                f"other processes added or wrapped KEKs after this one first loaded the table: {', '.join(others)}. "
                "Each writer adds one: if there are more than writers and rotations, somebody changed the metadata"
            )
        newest = max(keks, key=lambda key: key.created_ms, default=None)
        if newest is not None and newest.created_ms > int(raw.get("last-updated-ms") or 0) + DAY_MS:
            yield (
                f"the KEK {newest.key_id} is newer than the metadata that name it: if no clock was wrong, somebody "
                "added it to have the next files' keys wrapped under it. rotate(table) makes another one"
            )
