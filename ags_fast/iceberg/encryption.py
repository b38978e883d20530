"""Make an encrypted table of one in plaintext, in a new snapshot, without decoding its files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.errors import PolicyError
from ags_fast.iceberg import policy, rewriting
from ags_fast.iceberg.commit import pinned, raw_metadata, table_io
from ags_fast.iceberg.manifests import DATA, Known
from ags_fast.iceberg.rekeying import rewritten
from ags_fast.iceberg.work.moving import Mover, move_files
from ags_fast.iceberg.work.upgrading import upgraded_head, upgraded_metadata
from ags_fast.iceberg.work.vectors import POSITION_DELETES, VectorFile, read_deletes
from ags_fast.jobs.results import JobResult, counted
from ags_fast.keys.kek import KEY_NBYTES
from ags_fast.keys.kms import check_key_id
from ags_fast.puffin.vectors import DeletionVector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyiceberg.table import Table

    from ags_fast.engines.base import Engine
    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.reading import Node
    from ags_fast.iceberg.work.heads import Head, Writer

__all__ = ["encrypt"]


@counted
@pinned
def encrypt(
    table: Table,
    *,
    wrapping_key_id: str,
    data_key_length: int = 16,
    engine: Engine | None = None,
    dry_run: bool = False,
) -> JobResult:
    """Make a table in plaintext an encrypted one of version 3, in a new ``replace`` snapshot of its main branch.

    Parquet, Avro and Puffin files are encrypted without being decoded, under new paths. Row ids and sequence numbers
    stay; versions 1 and 2 get row ids. Files of position deletes name data files by path, so deletion vectors take
    their place. Statistics files are not encrypted, and stay as they are.

    **What is in plaintext stays so** until `expire` removes the snapshots before: their files, and other branches and
    tags. Until then the table's property ``encryption.plaintext-snapshots`` names these snapshots; `expire` removes it
    with the last. The result's warnings name them, too. They are read only if the client's own configuration has
    ``encryption.plaintext-files=allow``.

    A plan is written first into the table's folder of metadata, encrypted. If the job dies, a second run goes on with
    the files that the first has not written. Run one such job at a time. Files that other commits add meanwhile are
    encrypted, too. Writers that do not know of encryption must stop before the last commit.

    Args:
        table: A table of a catalog of ags_fast.iceberg, with a KMS. Afterwards it is the new version.
        wrapping_key_id: The master key of the table, in the catalog's KMS.
        data_key_length: Bytes of the table's keys: 16, 24 or 32.
        engine: Runs the tasks, one a file; None: `LocalEngine`.
        dry_run: Write nothing; the rows have the status "planned", and no ``dst``.

    Returns:
        A row for each file: ``src`` is in plaintext, ``dst`` is encrypted. If a file failed, nothing was committed, and
        a second run does only what is left. "skipped": an earlier run died after its commit, and nothing was left.

    Raises:
        PolicyError: The table is encrypted already, has ORC files, or properties that name a client's setting. Nothing
            was written.
        TypeError: The KMS client cannot be sent to the engine's workers.
        KeyAccessError: The KMS refuses, or there is none.
        FormatError: A manifest, or a file of position deletes, is malformed.
        ConcurrentChangeError: Other commits came first, again and again.
        ValueError: An argument is malformed.
    """
    check_key_id(wrapping_key_id)
    if data_key_length not in KEY_NBYTES:
        raise ValueError(f"data_key_length must be 16, 24 or 32 bytes, not {data_key_length}")
    io = table_io(table)
    io.session.check_writes()
    io.table.upgrading = True
    try:
        table.refresh()
        raw = raw_metadata(table)
        mover = Mover(table, "encrypt", engine, wrapping_key_id, data_key_length)
        if policy.is_encrypted(raw) and not dry_run and mover.end_committed(raw):
            return mover.result(_warnings(raw))
        upgraded_metadata(raw, wrapping_key_id, data_key_length)
        work = _Encryption(mover, wrapping_key_id, data_key_length)
        made = move_files(mover, work.chosen, work.change, dry_run=dry_run)
    finally:
        io.table.upgrading = False
    return mover.result(_warnings(made) if made is not None else ())


def _warnings(raw: Raw) -> Iterator[str]:
    if plain := [str(one["snapshot-id"]) for one in raw.get("snapshots") or () if not one.get("key-id")]:
        yield (
            f"these snapshots, and the files that they name, stay in plaintext: {', '.join(plain)}. `expire` "
            "removes them"
        )
    if statistics := [one["statistics-path"] for one in raw.get("statistics") or ()]:
        yield f"statistics files stay in plaintext: {', '.join(statistics)}"


class _Encryption:
    """What the job encrypts, and the snapshot that it makes."""

    def __init__(self, mover: Mover, master: str, key_length: int) -> None:
        self._mover, self._master, self._key_length = mover, master, key_length
        self._deletes: dict[str, dict[str, DeletionVector]] = {}  # by file of position deletes, by data file

    def chosen(self, raw: Raw, head: Head) -> list[Known]:
        """Return the files of a snapshot that are to be encrypted."""
        found = upgraded_head(head).files()
        for one in found:
            if one.format == "ORC":
                raise PolicyError(f"{one.path} is an ORC file, which has no encryption: write its rows as Parquet")
            if one.key_metadata is not None:
                raise PolicyError(f"{one.path} has a key, in a table that is not encrypted: its owner must look")
        self._vectors(found)
        return [one for one in found if not _is_replaced(one)]

    def change(self, raw: Raw, head: Head | None, writer: Writer) -> Raw:
        """Return the metadata of the encrypted table. Writes what they name."""
        made = writer.use(upgraded_metadata(raw, self._master, self._key_length))
        if head is None:
            policy.check_master(self._mover.io.session.kms, self._master)
            return made
        head = upgraded_head(head)
        files = head.files()
        vectors = self._vectors(files)
        moved = self._mover.moved
        puffin = VectorFile(writer, vectors, {path: moved[path].path for path in vectors if path in moved})
        summary = self._mover.summary(head)
        gone = {one.path: one for one in files if _is_replaced(one)}
        if gone:
            summary["added-delete-files"] += len(vectors) - len(gone)
            summary["added-dvs"] = len(vectors)
            summary["added-position-deletes"] = sum(map(len, vectors.values()))
            summary["removed-position-deletes"] = sum(one.record_count for one in gone.values())
            summary["added-files-size"] += puffin.length

        def changed(one: Node, entries: list[rewriting.Record]) -> None:
            entries[:] = [entry for entry in entries if entry["data_file"]["file_path"] not in gone]
            if one.known.content == DATA:
                puffin.note(one, entries)
            self._mover.changed(one, entries)

        return rewritten(made, head, writer, summary, changed, puffin.write_manifests)

    def _vectors(self, files: list[Known]) -> dict[str, DeletionVector]:
        """Return the deletion vector of each data file in which files of position deletes delete rows."""
        data = {one.path: one.sequence_number or 0 for one in files if one.content == DATA}
        has_vector = {one.referenced_data_file for one in files if one.format == "PUFFIN"}
        found: dict[str, DeletionVector] = {}
        for one in files:
            if not _is_replaced(one):
                continue
            if one.path not in self._deletes:
                opened: Any = self._mover.io.inner(one.path).new_input(one.path).open()
                with opened as file:
                    self._deletes[one.path] = read_deletes(file, one)
            for path, vector in self._deletes[one.path].items():
                if path in data and path not in has_vector and data[path] <= (one.sequence_number or 0):
                    found[path] = found[path] | vector if path in found else vector
        return found


def _is_replaced(one: Known) -> bool:
    return one.content == POSITION_DELETES and one.format != "PUFFIN"
