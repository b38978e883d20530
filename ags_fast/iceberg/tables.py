"""Load catalogs, open tables without one, and list a table's files for other engines."""

from __future__ import annotations

import importlib
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.typedef import Properties
from pyiceberg.utils.config import Config

from ags_fast.errors import AgsError, FormatError, PolicyError
from ags_fast.iceberg import manifests, policy
from ags_fast.iceberg.commit import raw_metadata, table_io
from ags_fast.iceberg.handles import FileTable
from ags_fast.iceberg.io import FileIO
from ags_fast.iceberg.reading import LIST, MANIFEST
from ags_fast.iceberg.session import IO_IMPL, SESSION, Session, client_session
from ags_fast.iceberg.snapshots import snapshot_of
from ags_fast.iceberg.walk import Tree
from ags_fast.metadata.shape import understood

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

    from ags_fast.iceberg.reading import Node
    from ags_fast.keys import StandardKeyMetadata
    from ags_fast.keys.kms import Kms

__all__ = ["TableFile", "files", "load_catalog", "open_table"]

CATALOGS = {"sql": "Sql", "rest": "Rest", "hive": "Hive", "glue": "Glue", "dynamodb": "DynamoDb"}


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file of a snapshot. It holds a key, which its repr does not show, and refuses to be pickled.

    Attributes:
        path: Its location.
        kind: ``manifest-list``, ``manifest``, ``data``, ``position-deletes``, ``equality-deletes`` or
            ``deletion-vector``.
        format: ``AVRO``, ``PARQUET``, ``ORC`` or ``PUFFIN``.
        key_metadata: Its key, AAD prefix and length; None if the file is in plaintext.
        length: Bytes on storage.
        record_count: Its rows, or deleted positions; of a manifest or list 0.
        referenced_data_file: Of a deletion vector: the data file that it belongs to.
        content_offset: Of a deletion vector: where its blob begins, in bytes of the decrypted Puffin file.
        content_size: Of a deletion vector: bytes of its blob.
    """

    path: str
    kind: str
    format: str
    key_metadata: StandardKeyMetadata | None = field(repr=False)
    length: int
    record_count: int = 0
    referenced_data_file: str | None = None
    content_offset: int | None = None
    content_size: int | None = None


def load_catalog(name: str | None = None, *, kms: Kms | None = None, **properties: Any) -> Catalog:
    """Load a catalog of PyIceberg, whose encrypted tables are read and written like others.

    Args:
        name: A catalog in PyIceberg's configuration; None is its default.
        kms: A KMS client or its properties (see `ags_fast.load_kms`); None takes them from the catalog's properties.
        **properties: The catalog's properties, over those of the configuration. ``type`` is sql, rest, hive, glue or
            dynamodb, or ``py-catalog-impl`` is the class, such as ``ags_fast.iceberg.SqlCatalog``. See there for
            ``encryption.plaintext-files``.

    Raises:
        ValueError: The type of the catalog is missing or unknown.
        ImportError: A module that the catalog needs is missing.
        NoSuchTableError: A pin names a table that is not there.
    """
    config = Config()
    name = name or config.get_default_catalog_name()
    conf: Properties = {**(config.get_catalog_config(name) or {}), **properties}
    kind = _kind_by_class(conf.pop("py-catalog-impl", None)) or conf.get("type") or _kind(conf)
    if kind not in CATALOGS:
        raise ValueError(f"the property type of a catalog is one of {', '.join(CATALOGS)}, not {kind!r}")
    catalog = getattr(importlib.import_module("ags_fast.iceberg"), f"{CATALOGS[kind]}Catalog")
    made: Catalog = catalog(name, kms=kms, **conf)
    for one in conf.get("pins") or ():  # a pin of a mistyped name would guard nothing
        with suppress(AgsError):  # of a table that is there: whoever loads the table hears of it
            if not made.table_exists(one):
                raise NoSuchTableError(f"there is a pin of {one}, and no such table")
    return made


def _kind_by_class(catalog_impl: Any) -> str | None:
    """Return the type of the catalog of one of our classes; None if there is no class."""
    if catalog_impl is None:
        return None
    found = {f"ags_fast.iceberg.{class_name}Catalog": kind for kind, class_name in CATALOGS.items()}
    if catalog_impl not in found:
        raise ValueError(f"py-catalog-impl={catalog_impl!r}: give one of {', '.join(found)}")
    return found[catalog_impl]


def _kind(conf: Properties) -> str | None:
    """Return the type of a catalog that its URI tells, as PyIceberg infers it."""
    scheme = str(conf.get("uri", "")).split("://")[0].split("+")[0]
    return {"http": "rest", "https": "rest", "thrift": "hive", "sqlite": "sql", "postgresql": "sql"}.get(scheme)


def open_table(metadata_location: str, *, kms: Kms, **properties: Any) -> Table:
    """Open a table to read it, without a catalog.

    Args:
        metadata_location: Where its metadata are: a path or URL of a ``.metadata.json``.
        kms: A KMS client or its properties.
        **properties: Of PyIceberg's FileIO, such as ``s3.endpoint``. With ``encryption.plaintext-files=allow`` files in
            plaintext are read, and tables in plaintext.

    Raises:
        FormatError, PolicyError: The metadata are malformed, or refused.
    """
    if "pins" in properties:
        raise ValueError("pins are of a catalog's tables: compare this one by check_pin(table, pin)")
    session = client_session(kms, properties, writes=False)
    settings = {**properties, "py-io-impl": IO_IMPL, SESSION: session.token}
    with understood():
        table = FileTable.from_metadata(metadata_location, settings)
    table.io = FileIO({**table.metadata.properties, **settings})  # keeps the session alive
    table.io.belongs(table.metadata.table_uuid, table.metadata.location)
    return table


def files(table: Table, *, snapshot_id: int | None = None) -> Iterator[TableFile]:
    """Return the files of a snapshot, for an engine that opens them by itself: manifest list, manifests, then files.

    Args:
        table: A table of `load_catalog` or `open_table`.
        snapshot_id: Which snapshot; None is the current one. A table without one has no files.

    Raises:
        ValueError: The table does not have that snapshot.
        PolicyError: The table is in plaintext, or has a file without a key, and the client's configuration does not
            have ``encryption.plaintext-files=allow``; or the table was not loaded by a catalog of ags_fast.iceberg.
        KeyAccessError: A key is lost, or the KMS refuses.
        IntegrityError, FormatError: A manifest or the list was changed.
    """
    io, raw = table_io(table), raw_metadata(table)
    if not policy.is_encrypted(raw):
        raise PolicyError(f"the table has no {policy.KEY_ID}: it is in plaintext")
    wanted = raw.get("current-snapshot-id") if snapshot_id is None else snapshot_id
    if snapshot_id is None and wanted in (None, -1):
        return iter(())
    snapshot = snapshot_of(raw, wanted)
    if snapshot is None:
        error = FormatError if snapshot_id is None else ValueError
        raise error(f"the table has no snapshot {wanted}")
    return _files(io.session, Tree.of(io.session, io.inner, raw).walk([snapshot]))


def _files(session: Session, nodes: Iterator[Node]) -> Iterator[TableFile]:
    for node in nodes:
        if node.kind == LIST:
            key = node.known.key_metadata
            yield TableFile(node.path, LIST, "AVRO", key, key.file_length or 0 if key else 0)
            yield from (TableFile(one.path, MANIFEST, "AVRO", one.key_metadata, one.length) for one in node.named)
            continue
        for one in node.named:
            if one.status == manifests.DELETED:
                continue
            if one.key_metadata is None:
                session.check_plaintext(one.path)
            vector = one.referenced_data_file, one.content_offset, one.content_size
            yield TableFile(
                one.path, one.kind, one.format or "", one.key_metadata, one.length, one.record_count, *vector
            )
