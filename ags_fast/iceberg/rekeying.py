"""Write a table's newest snapshot anew under new data keys: its manifests alone, or its files, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.dataset.names import new_job_id
from ags_fast.errors import PolicyError
from ags_fast.iceberg import policy, rewriting
from ags_fast.iceberg.commit import pinned, raw_metadata, table_io
from ags_fast.iceberg.manifests import Known
from ags_fast.iceberg.work.heads import commit, read_head
from ags_fast.iceberg.work.moving import Mover, move_files, plan_files
from ags_fast.iceberg.work.vectors import POSITION_DELETES
from ags_fast.jobs.results import JobResult, Row, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pyiceberg.table import Table

    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.reading import Node
    from ags_fast.iceberg.work.heads import Head, Writer
    from ags_fast.jobs.engines.base import Engine

__all__ = ["rekey", "rewritten"]

WHATS = ("manifests", "data")
OLD_FILES = (
    "the snapshots before still name the files under the old keys, and older metadata files hold the keys of their "
    "manifest lists: expire(table) removes both"
)


@counted
@pinned
def rekey(table: Table, *, what: str = "manifests", engine: Engine | None = None, dry_run: bool = False) -> JobResult:
    """Write the newest snapshot of the main branch anew under new data keys, and commit that as one ``replace``.

    No row changes: row ids, sequence numbers, partitions and statistics stay. Other branches and older snapshots stay
    as they are, under their old keys, until `expire` removes them: so **run `expire` afterwards** if a key was exposed.

    ``"data"`` first writes a plan into the table's folder of metadata, encrypted. If the job dies before its commit, a
    second run goes on with the files that the first has not written. Run one such job at a time. Files that other
    commits add meanwhile are moved, too.

    Args:
        table: An encrypted table of a catalog of ags_fast.iceberg. Afterwards it is the new version.
        what: ``"manifests"``: manifests and their list get new keys; data files stay, with their keys. ``"data"``: data
            files and delete files get new keys and new paths, too, without being decoded.
        engine: Runs the tasks of ``"data"``, one a file; None: `LocalEngine`. Manifests are written in this process.
        dry_run: Write nothing; the rows have the status "planned", and no ``dst``.

    Returns:
        A row for each file: ``src`` is the old one, ``dst`` the new one. If a file failed, nothing was committed, and a
        second run does only what is left.

    Raises:
        PolicyError: The table is in plaintext, or ``"data"`` and the table has position-delete files, ORC files, or
            files in plaintext.
        TypeError: The KMS client cannot be sent to the engine's workers.
        KeyAccessError: The KMS refuses, or a key is lost.
        IntegrityError, FormatError: A manifest was changed.
        ConcurrentChangeError: Other commits came first, again and again.
        ValueError: `what` is neither.
    """
    if what not in WHATS:
        raise ValueError(f"what must be {' or '.join(map(repr, WHATS))}, not {what!r}")
    io = table_io(table)
    io.session.check_writes()
    table.refresh()
    raw = raw_metadata(table)
    if not policy.is_encrypted(raw):
        raise PolicyError("the table is in plaintext and has no keys: use ags_fast.iceberg.encrypt")
    if what == "data":
        return _rekey_data(table, raw, engine, dry_run=dry_run)
    if not dry_run:
        return _rekey_manifests(table)
    head = read_head(io, raw)
    known = [] if head is None else [one.known for one in head.manifests]
    rows = [Row(one.path, None, "planned", file_length=one.length, format="manifest") for one in known]
    return _result(table, new_job_id(), rows)


def rewritten(
    raw: Raw,
    head: Head,
    writer: Writer,
    summary: dict[str, Any],
    changed: Callable[[Node, list[rewriting.Record]], object] = lambda one, entries: None,
    added: Callable[[Raw], Iterable[rewriting.Record]] = lambda snapshot: (),
) -> tuple[Raw, list[Row]]:
    """Write all manifests of a snapshot anew, and return metadata with the new snapshot, and a row for each manifest.

    `changed` changes the entries of a manifest, in place. `added` writes more manifests for the new snapshot, and
    returns what the list says of them.
    """
    pairs = []
    for one in head.manifests:
        container = one.container()
        kept = rewriting.entries(container, one.known)
        changed(one, kept)
        if kept:
            pairs.append((one, container, kept))
    told = {"manifests-created": len(pairs), "manifests-replaced": len(head.manifests)}
    snapshot = writer.begin({**summary, **told})
    records, rows = [], []
    for one, container, kept in pairs:
        record = writer.write_manifest(container, kept, one.known.content, like=one.record, snapshot=snapshot)
        # The row ids of all entries are values of their own by now: the manifest takes no others.
        records.append({**record, "first_row_id": one.known.first_row_id})
        path, length = record["manifest_path"], record["manifest_length"]
        rows.append(Row(one.known.path, path, "ok", file_length=length, format="manifest"))
    return writer.commit(snapshot, head.listed, [*records, *added(snapshot)]), rows


def _rekey_manifests(table: Table) -> JobResult:
    rows: list[Row] = []

    def change(raw: Raw, head: Head | None, writer: Writer) -> Raw:
        rows.clear()
        if head is None:
            return raw
        made, found = rewritten(raw, head, writer, {})
        rows.extend(found)
        return made

    commit(table, change)
    return _result(table, new_job_id(), rows)


def _result(table: Table, job_id: str, rows: list[Row]) -> JobResult:
    result = JobResult(job_id, "rekey", table.location(), None, rows)
    if any(row.status == "ok" for row in rows):
        result.warnings.append(OLD_FILES)
    return result


def _rekey_data(table: Table, raw: Raw, engine: Engine | None, *, dry_run: bool) -> JobResult:
    properties = raw["properties"]
    mover = Mover(table, "rekey", engine, properties[policy.KEY_ID], int(properties.get(policy.KEY_LENGTH, "16")))

    if dry_run:
        return plan_files(mover, _movable)

    def change(raw: Raw, head: Head | None, writer: Writer) -> Raw:
        if head is None or not head.manifests:
            return raw
        return rewritten(raw, head, writer, mover.summary(head), mover.changed)[0]

    made = move_files(mover, _movable, change)
    return mover.result([OLD_FILES] if made is not None and mover.rows else [])


def _movable(raw: Raw, head: Head) -> list[Known]:
    """Return the files of a snapshot, all of which move. PolicyError if one cannot."""
    found = head.files()
    for one in found:
        if one.format == "ORC":
            raise PolicyError(f"{one.path} is an ORC file, which has no encryption: write its rows as Parquet")
        if one.content == POSITION_DELETES and one.format != "PUFFIN":
            raise PolicyError(
                f"{one.path} is a file of position deletes, which names data files by their old paths: rewrite the "
                "data files that it belongs to, so that it goes"
            )
        if one.key_metadata is None:
            raise PolicyError(f"{one.path} has no key in its manifest: it is in plaintext, or its key is lost")
    return found
