"""Write a table's newest snapshot anew under new data keys: its manifests alone, or its files, too."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ags_fast._types import Rekeyed, check_choice
from ags_fast.errors import PolicyError
from ags_fast.iceberg import policy, rewriting
from ags_fast.iceberg.commit import pinned, raw_metadata, table_io
from ags_fast.iceberg.expiry import NEWEST_STAY, check_gc, forced
from ags_fast.iceberg.manifests import Known
from ags_fast.iceberg.work.moving import Mover, move_files
from ags_fast.iceberg.work.plans import JOB_ID
from ags_fast.iceberg.work.vectors import POSITION_DELETES
from ags_fast.jobs.results import JobResult, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pyiceberg.table import Table

    from ags_fast.engines.base import Engine
    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.reading import Node
    from ags_fast.iceberg.session import Session
    from ags_fast.iceberg.work.heads import Head, Writer

__all__ = ["rekey", "rewritten"]

OLD_FILES = (
    "the snapshots before still name the files under the old keys, and older metadata files hold the keys of their "
    "manifest lists: `expire` removes both"
)
OLD_REFS = "these branches and tags still name files under the old keys: {}. Remove them, and `expire`"


@counted
@pinned
def rekey(
    table: Table,
    *,
    what: Rekeyed = "manifests",
    engine: Engine | None = None,
    force_expire: bool = False,
    dry_run: bool = False,
) -> JobResult:
    """Write the newest snapshot of the main branch anew under new data keys, and commit that as one ``replace``.

    No row changes: row ids, sequence numbers, partitions and statistics stay. Other branches and older snapshots stay
    as they are, under their old keys, until `expire` removes them: so **run `expire` afterwards** if a key was exposed.

    A plan is written first into the table's folder of metadata, encrypted. If the job dies before its commit, a second
    run goes on by the plan, and ``"data"`` does only the files that the first has not written. Run one such job at a
    time. What other commits add meanwhile is done, too.

    Args:
        table: An encrypted table of a catalog of ags_fast.iceberg. Afterwards it is the new version.
        what: ``"manifests"``: manifests and their list get new keys; data files stay, with their keys. ``"data"``: data
            files and delete files get new keys and new paths, too, without being decoded.
        engine: Runs the tasks, one a file or manifest. None: `LocalEngine`, and for manifests threads of this process.
        force_expire: Then remove at once, and for good, all snapshots but those that branches and tags name, of
            whatever age, with older metadata files and what only they needed. The result of this is the result's
            ``expired``. A warning names branches and tags under old keys.
        dry_run: Write nothing; the rows have the status "planned", and no ``dst``.

    Returns:
        A row for each file or manifest: ``src`` is the old one, ``dst`` the new one. If one failed, nothing was
        committed, and a second run goes on.

    Raises:
        PolicyError: The table or a manifest is in plaintext, or ``"data"`` and the table has position-delete files, ORC
            files, or files in plaintext; or `force_expire` and the table's ``gc.enabled`` is false.
        TypeError: The KMS client cannot be sent to the engine's workers.
        KeyAccessError: The KMS refuses, or a key is lost.
        IntegrityError, FormatError: The manifest list was changed, or for ``"data"`` a manifest.
        ConcurrentChangeError: Other commits came first, again and again.
        ValueError: `what` is neither.
    """
    check_choice("what", what, Rekeyed)
    session = table_io(table).session
    session.check_writes()
    table.refresh()
    raw = raw_metadata(table)
    if not policy.is_encrypted(raw):
        raise PolicyError("the table is in plaintext and has no keys: use ags_fast.iceberg.encrypt")
    if force_expire:
        check_gc(raw)
    properties, manifests = raw["properties"], what == "manifests"
    key_length = int(properties.get(policy.KEY_LENGTH, "16"))
    mover = Mover(table, "rekey", engine, properties[policy.KEY_ID], key_length, manifests=manifests)
    chosen = partial(_manifests, session) if manifests else _movable
    made = move_files(mover, chosen, partial(_relisted if manifests else _renamed, mover), dry_run=dry_run)
    if made is None or not mover.rows:
        return mover.result()
    if not force_expire:
        return mover.result([OLD_FILES])
    newest, refs = made["current-snapshot-id"], made["refs"]
    old = [name for name, ref in refs.items() if ref["snapshot-id"] != newest]
    result = mover.result([OLD_REFS.format(", ".join(old))] if old else ())
    result.expired = forced(table, NEWEST_STAY, engine)
    return result


def rewritten(
    raw: Raw,
    head: Head,
    writer: Writer,
    summary: dict[str, Any],
    changed: Callable[[Node, list[rewriting.Record]], object],
    added: Callable[[Raw], Iterable[rewriting.Record]] = lambda snapshot: (),
) -> Raw:
    """Write all manifests of a snapshot anew, and return metadata with the new snapshot.

    `changed` changes the entries of a manifest, in place. `added` writes more manifests for the new snapshot, and
    returns what the list says of them.
    """
    kept = []
    for one in head.manifests:
        container = one.container()
        entries = rewriting.entries(container, one.known)
        changed(one, entries)
        if entries:
            kept.append((one, container, entries))
    counts = {"manifests-created": len(kept), "manifests-replaced": len(head.named)}
    snapshot = writer.begin({**summary, **counts})
    records = []
    for one, container, entries in kept:
        record = writer.write_manifest(container, entries, one.known.content, like=one.record, snapshot=snapshot)
        # The row ids of all entries are values of their own by now: the manifest takes no others.
        records.append({**record, "first_row_id": one.known.first_row_id})
    return writer.commit(snapshot, head.listed, [*records, *added(snapshot)])


def _renamed(mover: Mover, raw: Raw, head: Head | None, writer: Writer) -> Raw:
    """Return metadata with a new snapshot, whose manifests name the moved files."""
    if head is None or not head.named:
        return raw
    return rewritten(raw, head, writer, mover.summary(head), mover.changed)


def _relisted(mover: Mover, raw: Raw, head: Head | None, writer: Writer) -> Raw:
    """Return metadata with a new snapshot, whose list names the moved manifests."""
    if head is None:
        return raw
    moved = [(one, mover.moved_to(one.path)) for one in head.named if rewriting.live_counts(one.known)[0]]
    counts = {"manifests-created": len(moved), "manifests-replaced": len(head.named)}
    snapshot = writer.begin({JOB_ID: mover.job_id, **counts})
    records = [rewriting.moved_record(one.known, now, like=one.record, snapshot=snapshot) for one, now in moved]
    return writer.commit(snapshot, head.listed, records)


def _manifests(session: Session, raw: Raw, head: Head) -> list[Known]:
    """Return the manifests of a snapshot that have live files. PolicyError if one is in plaintext."""
    for one in head.named:
        if one.known.key_metadata is None:
            session.check_plaintext(one.path)
    return [one.known for one in head.named if rewriting.live_counts(one.known)[0]]


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
