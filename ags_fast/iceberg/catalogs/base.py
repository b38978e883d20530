"""PyIceberg's catalogs, with encrypted tables.

Each class is PyIceberg's own with the same few methods in front: they give the catalog a session, choose the FileIO,
and refuse what would lose keys before PyIceberg acts on it.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NoSuchIcebergTableError,
    NoSuchPropertyException,
    NoSuchTableError,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.table import CommitTableResponse, CreateTableTransaction, TableProperties
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertCreate,
    RemovePropertiesUpdate,
    SetPropertiesUpdate,
    UpgradeFormatVersionUpdate,
)
from pyiceberg.typedef import EMPTY_DICT
from pyiceberg.utils.config import Config
from pyiceberg.utils.properties import property_as_bool

from ags_fast.errors import AgsError, IntegrityError, PolicyError
from ags_fast.iceberg import metadata, policy
from ags_fast.iceberg.commit import edit, raw_metadata, table_io
from ags_fast.iceberg.garbage import NOT_DELETED, Garbage, place, statistics_of, unreachable
from ags_fast.iceberg.handles import NewTable, handle
from ags_fast.iceberg.io import LookedUpError, looking_up
from ags_fast.iceberg.properties import GONE
from ags_fast.iceberg.session import (
    IO_IMPL,
    SESSION,
    Base,
    Session,
    client_session,
    committing,
    forget_encrypted,
    signs,
)
from ags_fast.iceberg.snapshots import check_texts
from ags_fast.iceberg.walk import Tree
from ags_fast.iceberg.work.removing import Gone, remove
from ags_fast.metadata.outcome import attempted, was_made
from ags_fast.metadata.shape import understood
from ags_fast.seals.guard import SEALED, Sealed, registering
from ags_fast.seals.state import PROPERTY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping

    import pyarrow as pa
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.update import TableRequirement, TableUpdate
    from pyiceberg.typedef import Identifier, Properties

    from ags_fast.keys.kms import Kms

__all__ = ["LOCATION", "EncryptedCatalog", "check_stored", "response", "set_stored"]

CATALOG_IMPL = "py-catalog-impl"


class EncryptedCatalog(Catalog):
    """What stands in front of each of PyIceberg's catalogs.

    Args:
        name: The catalog's name.
        kms: A KMS client or its properties; None takes them from the catalog's properties.
        **properties: The catalog's properties. With ``py-io-impl`` the FileIO of that class opens files as they are
            stored, behind the one that decrypts; a table's property never chooses it.
            ``encryption.plaintext-tables`` says what is done with tables in plaintext: ``refuse`` (the default with a
            KMS), ``read`` or ``write`` (the default without). With ``encryption.plaintext-files=allow`` files of
            encrypted tables that are in plaintext are read.
    """

    def __init__(self, name: str, kms: Kms | None = None, **properties: Any) -> None:
        pins = {self.pinned(one): pin for one, pin in (properties.pop("pins", None) or {}).items()}
        if properties.pop(CATALOG_IMPL, None) is not None:
            # PyIceberg's load_catalog has chosen this class, and passes nothing of its configuration.
            properties = {**(Config().get_catalog_config(name) or {}), **properties}
            properties.pop(CATALOG_IMPL, None)
        self._encryption = client_session(kms, properties, pins=pins)  # PyIceberg's RestCatalog has a `_session`
        self._encrypted: dict[Identifier, set[str]] = {}  # the signs of tables that were encrypted under a name
        super().__init__(name, **{**properties, "py-io-impl": IO_IMPL, SESSION: self._encryption.token})

    def __reduce__(self) -> NoReturn:
        raise TypeError("a catalog of ags_fast.iceberg holds keys and is never pickled: load it where it is used")

    def pinned(self, identifier: str | Identifier) -> str:
        """Return the name of a table by which a pin of it is known."""
        return ".".join(self.identifier_to_tuple(identifier))

    @property
    def session(self) -> Session:
        """What this catalog knows of its tables."""
        return self._encryption

    def create_table(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> Table:
        """Create a table, which is encrypted if its properties name a master key. See PyIceberg's method."""
        given = identifier, schema, location, partition_spec, sort_order, self._checked(properties)
        return handle(super().create_table(*given))  # type: ignore[safe-super]

    def load_table(self, identifier: str | Identifier) -> Table:
        """Load a table. PolicyError or IntegrityError if it is in plaintext and may not be. See PyIceberg's method."""
        name = self.identifier_to_tuple(identifier)
        with self._encryption.guard.loading(self.pinned(name)), understood():
            table = handle(super().load_table(identifier))  # type: ignore[safe-super]
        if table_io(table).encrypted:
            self._encrypted[name] = signs(table.metadata.table_uuid, table.metadata.location, table.metadata_location)
        elif name in self._encrypted:
            raise IntegrityError(
                f"{'.'.join(name)} is in plaintext, and was encrypted when this catalog read it before: its metadata "
                "were changed. If the table's owner did that, drop the table first, or load the catalog again"
            )
        return table

    def drop_table(self, identifier: str | Identifier) -> None:
        """Drop a table, whose name another may have afterwards. See PyIceberg's method."""
        super().drop_table(identifier)  # type: ignore[safe-super]
        forget_encrypted(self._encrypted.pop(self.identifier_to_tuple(identifier), ()))

    def register_table(self, identifier: str | Identifier, metadata_location: str, overwrite: bool = False) -> Table:
        """Give existing metadata a name. See PyIceberg's method. What a server sealed is sealed anew in its file."""
        more: Any = {"overwrite": True} if overwrite else {}  # since PyIceberg 0.12
        with self._encryption.guard.loading(self.pinned(identifier)), registering():
            table = handle(super().register_table(identifier, metadata_location, **more))  # type: ignore[safe-super]
            raw, guard, found = raw_metadata(table), self._encryption.guard, Sealed("")
            with suppress(AgsError):  # else whoever reads or changes the table hears of it
                found = guard.look(raw, table.metadata_location) if guard.setting != "off" else found
            if found.verdict == SEALED and found.seal is not None and found.seal.file is None and not guard.served:
                edit(table, lambda newest: {**newest} if newest == raw else newest)
        return table

    def rename_table(self, from_identifier: str | Identifier, to_identifier: str | Identifier) -> Table:
        """Rename a table. See PyIceberg's method."""
        renamed = handle(super().rename_table(from_identifier, to_identifier))  # type: ignore[safe-super]
        self._encrypted.pop(self.identifier_to_tuple(from_identifier), None)
        return renamed

    def create_table_transaction(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> CreateTableTransaction:
        """Begin to create a table. See PyIceberg's method."""
        given = identifier, schema, location, partition_spec, sort_order, self._checked(properties)
        staged: Any = vars(super().create_table_transaction(*given))["_table"]  # type: ignore[safe-super]
        table_io(staged).belongs(staged.metadata.table_uuid, staged.metadata.location)
        return CreateTableTransaction(NewTable(**{name.removeprefix("_"): one for name, one in vars(staged).items()}))

    def _checked(self, given: Properties) -> Properties:
        """Return the properties of a new table, as PyIceberg may have them."""
        properties = dict(given or {})
        policy.check_given(properties, {})
        if policy.KEY_ID not in properties:
            self._encryption.check_plaintext_table("the new table")
            return properties
        policy.check_change(None, properties, {})
        policy.check_master(self._encryption.kms, properties[policy.KEY_ID])
        version = str(properties.pop(TableProperties.FORMAT_VERSION, "3"))
        if version != "3":
            raise PolicyError(
                f"{policy.KEY_ID} with {TableProperties.FORMAT_VERSION}={version}: only version 3 has encryption"
            )
        return properties  # PyIceberg writes version 2, which the FileIO makes version 3

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Commit updates to a table. See PyIceberg's method.

        Raises:
            CommitFailedException: The newest metadata show that the commit was not made: its files may be deleted.
            CommitStateUnknownException: It is not known whether it was made. So it is after most other errors.
        """
        check_commit(table, requirements, updates)
        is_new = any(isinstance(one, AssertCreate) for one in requirements)
        at, raw, guard = table.metadata_location or "", None if is_new else raw_metadata(table), self._encryption.guard
        base = committing.set(Base(raw, table_io(table), at))
        token = attempted.set(None)
        try:
            with guard.loading(self.pinned(table.name()), (raw, at)):
                done = self._commit(table, requirements, updates)
                if (made := attempted.get()) is not None:
                    guard.made(made.made, made.location or "")
                return done
        except Exception as error:
            there = self._made(table, error)
            if there is None:
                raise
            return response(there)
        finally:
            attempted.reset(token)
            committing.reset(base)

    def _commit(self, *args: Any, **named: Any) -> CommitTableResponse:
        return super().commit_table(*args, **named)  # type: ignore[safe-super]

    def _made(self, table: Table, error: Exception) -> Table | None:
        """Return the newest table if a commit was made though it ended with an error; else None."""
        attempt, made = attempted.get(), None
        if attempt is None:  # the catalog got nothing
            return None
        with suppress(Exception):  # of any catalog, storage or network: then nothing is known
            there = self.load_table(table.name())
            made = was_made(attempt, raw_metadata(there), there.metadata_location)
        if made is None and isinstance(error, CommitFailedException):
            raise CommitStateUnknownException(f"it is not known whether the commit was made: {error}") from error
        return there if made else None

    def purge_table(self, identifier: str | Identifier) -> None:
        """Drop a table, and delete its files. A warning says which of those that its metadata reach stay, and why.

        Raises:
            KeyAccessError, IntegrityError: A manifest does not open, so its files are not known. Nothing has changed:
                drop the table instead.
            PolicyError: The catalog has the same table under another name.
        """
        table = self.load_table(identifier)
        io = table_io(table)
        if not io.encrypted:
            super().purge_table(identifier)  # type: ignore[safe-super]
            return
        raw, named = raw_metadata(table), table.metadata_location
        read = Tree.of(io.session, io.inner, raw, plaintext=True).read
        files = unreachable(read, raw.get("snapshots") or (), (), statistics_of(raw))
        older = {one["metadata-file"]: None for one in raw.get("metadata-log") or ()}
        files += [Gone(path, "metadata") for path in older if place(path) != place(named)]
        garbage = Garbage(io, self, raw["table-uuid"], named, name=table.name())
        if (other := garbage.other_name()) is not None:
            raise PolicyError(f"the catalog's {other} is the same table: drop one of the two names instead")
        files, left = garbage.split(files)
        self.drop_table(identifier)
        left += [remove(io.inner(one.path), one) for one in (*files, Gone(named, "metadata"))]
        if left := [row for row in left if row.status == "failed" or row.error_class == NOT_DELETED]:
            warnings.warn(f"{len(left)} files stay, such as {left[0].src}: {left[0].error}", stacklevel=2)

    def _delete_old_metadata(  # type: ignore[override]  # PyIceberg's own is a static method
        self, io: Any, base: TableMetadata, metadata: TableMetadata
    ) -> None:
        """Delete the metadata files that a commit takes out of the log, as the table's property asks for.

        Raises:
            PolicyError: One may not be the table's. PyIceberg makes a warning of that.
        """
        log = [one.metadata_file for one in metadata.metadata_log]
        name = TableProperties.METADATA_DELETE_AFTER_COMMIT_ENABLED
        if not log or not property_as_bool(metadata.properties, name, False):
            return
        gone = [Gone(one.metadata_file, "metadata") for one in base.metadata_log if one.metadata_file not in log]
        # The last entry of the log is not the table's word: the commit has made it of what the catalog named.
        files, left = Garbage(io, self, metadata.table_uuid, log[-1], keep=log).split(gone)
        for one in files:
            remove(io.inner(one.path), one)
        if left:
            raise PolicyError(f"{len(left)} files stay, such as {left[0].src}: {left[0].error}")

    def other_tables(self, name: Identifier) -> Iterator[tuple[str, str | None]]:
        """Yield the catalog's other tables, and the metadata file of each; None if the catalog does not say."""
        spaces = list(self.list_namespaces())
        for space in spaces:
            spaces += self.list_namespaces(space)
            for one in self.list_tables(space):
                token, found = looking_up.set(True), None
                try:
                    found = super().load_table(one).metadata_location  # type: ignore[safe-super]
                except LookedUpError as seen:
                    found = str(seen)
                except (NoSuchTableError, NoSuchIcebergTableError, NoSuchPropertyException):
                    continue
                except Exception:  # of any catalog
                    found = None
                finally:
                    looking_up.reset(token)
                if one != name:
                    yield ".".join(one), found


def response(table: Table) -> CommitTableResponse:
    """Return the answer to a commit whose table this is."""
    return CommitTableResponse(metadata=table.metadata, metadata_location=table.metadata_location)  # type: ignore[call-arg]


def check_commit(table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]) -> None:
    """Refuse updates that would lose keys, or configure clients, before anything is written. PolicyError."""
    is_new = any(isinstance(one, AssertCreate) for one in requirements)
    has = {} if is_new else table.metadata.properties
    for update in updates:
        if isinstance(update, SetPropertiesUpdate):
            kept = {name: value for name, value in update.updates.items() if value != GONE or name == PROPERTY}
            given = {name: value for name, value in kept.items() if name != metadata.MARK}
            policy.check_given(given, has)
            if policy.KEY_ID in given and not is_new:
                policy.check_key_id(has, given)
        elif isinstance(update, RemovePropertiesUpdate):
            if policy.KEY_ID in update.removals:
                raise PolicyError(f"{policy.KEY_ID} is never removed: the table's keys would be lost")
        elif isinstance(update, AddSnapshotUpdate):
            check_texts(update.snapshot.summary.additional_properties if update.snapshot.summary else {})
        elif isinstance(update, UpgradeFormatVersionUpdate) and update.format_version > 2:
            raise PolicyError("the table has format version 3 already, of which PyIceberg is shown version 2")


# --------------------------------------------------------------------------------- what metastores store of properties

LOCATION = "metadata_location"
OWN = ("EXTERNAL", "table_type", LOCATION, "previous_metadata_location", "metadata_hash")


def set_stored(session: Session, parameters: MutableMapping[str, str]) -> None:
    """Set what a metastore stores of a table's properties to those of its raw metadata.

    PyIceberg stores the properties of the facade, in which an edit is not yet made. `parameters` are what it is about
    to store, with the location of the metadata; they are changed.
    """
    for name in [name for name, value in parameters.items() if name == metadata.MARK or value == GONE]:
        del parameters[name]
    raw = session.raw(parameters.get(LOCATION, "")) or {}
    parameters.update({name: str(value) for name, value in (raw.get("properties") or {}).items() if name not in OWN})


def check_stored(session: Session, parameters: Mapping[str, str], table: Table) -> Table:
    """Return a table that was loaded, if its metastore has the same master key and key length as its metadata.

    A metastore is harder to change than the storage. A table that a writer registered without properties is as it is.

    Raises:
        IntegrityError: Somebody changed the metadata file, for example into that of a table in plaintext.
    """
    raw = session.raw(table.metadata_location)
    properties = table.metadata.properties if raw is None else raw.get("properties") or {}
    for name in (policy.KEY_ID, policy.KEY_LENGTH, *({PROPERTY} & parameters.keys())):  # DynamoDB has none at first
        if policy.KEY_ID in parameters and parameters.get(name) != properties.get(name):
            raise IntegrityError(
                f"{table.metadata_location} was changed: the catalog has {name}={parameters.get(name)}, "
                f"the metadata have {properties.get(name)}"
            )
    return table
