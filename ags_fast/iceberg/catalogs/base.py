"""PyIceberg's catalogs, with encrypted tables.

Each class is PyIceberg's own with the same few methods in front: they give the catalog a session, choose the FileIO,
and refuse what would lose keys before PyIceberg acts on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from pyiceberg.catalog import Catalog, delete_files
from pyiceberg.table import CreateTableTransaction, TableProperties
from pyiceberg.table.update import AssertCreate, RemovePropertiesUpdate, SetPropertiesUpdate, UpgradeFormatVersionUpdate
from pyiceberg.utils.config import Config

from ags_fast.errors import IntegrityError, PolicyError
from ags_fast.iceberg import metadata, policy
from ags_fast.iceberg.commit import raw_metadata, table_io
from ags_fast.iceberg.handles import NewTable, handle
from ags_fast.iceberg.reading import read_list, read_manifest
from ags_fast.iceberg.session import SESSION, Session, kms_properties

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from pyiceberg.table import CommitTableResponse, Table
    from pyiceberg.table.update import TableRequirement, TableUpdate
    from pyiceberg.typedef import Identifier

    from ags_fast.keys.kms import KmsClient

__all__ = ["IO_IMPL", "LOCATION", "EncryptedCatalog", "check_commit", "check_stored", "set_stored"]

IO_IMPL, CATALOG_IMPL = "ags_fast.iceberg.FileIO", "py-catalog-impl"
PROPERTIES = 5  # the place of `properties` among the arguments of create_table, after `self`


class EncryptedCatalog(Catalog):
    """What stands in front of each of PyIceberg's catalogs.

    Args:
        name: The catalog's name.
        kms: A KMS client or its properties; None takes them from the catalog's properties.
        **properties: The catalog's properties. With ``py-io-impl`` the FileIO of that class opens files as they are
            stored, behind the one that decrypts; a table's property never chooses it. With
            ``encryption.plaintext-files=allow`` files of encrypted tables that are in plaintext are read; with
            ``refuse`` tables in plaintext are refused, too.
    """

    def __init__(self, name: str, kms: KmsClient | Mapping[str, str] | None = None, **properties: Any) -> None:
        if properties.pop(CATALOG_IMPL, None) is not None:
            # PyIceberg's load_catalog has chosen this class, and passes nothing of its configuration.
            properties = {**(Config().get_catalog_config(name) or {}), **properties}
            properties.pop(CATALOG_IMPL, None)
        chosen = properties.pop("py-io-impl", None)
        self._encryption = Session(  # PyIceberg's RestCatalog has a `_session`
            kms if kms is not None else kms_properties(properties),
            io_impl=None if chosen == IO_IMPL else chosen,
            plaintext=policy.plaintext_setting(properties),
        )
        super().__init__(name, **{**properties, "py-io-impl": IO_IMPL, SESSION: self._encryption.token})

    def __reduce__(self) -> NoReturn:
        raise TypeError("a catalog of ags_fast.iceberg holds keys and is never pickled: load it where it is used")

    @property
    def session(self) -> Session:
        """What this catalog knows of its tables."""
        return self._encryption

    def create_table(self, *args: Any, **named: Any) -> Table:
        """Create a table, which is encrypted if its properties name a master key. See PyIceberg's method."""
        return handle(super().create_table(*args, **self._checked(args, named)))  # type: ignore[safe-super]

    def load_table(self, identifier: str | Identifier) -> Table:
        """Load a table. See PyIceberg's method."""
        return handle(super().load_table(identifier))  # type: ignore[safe-super]

    def register_table(self, *args: Any, **named: Any) -> Table:
        """Give existing metadata a name. See PyIceberg's method."""
        return handle(super().register_table(*args, **named))  # type: ignore[safe-super]

    def rename_table(self, from_identifier: str | Identifier, to_identifier: str | Identifier) -> Table:
        """Rename a table. See PyIceberg's method."""
        return handle(super().rename_table(from_identifier, to_identifier))  # type: ignore[safe-super]

    def create_table_transaction(self, *args: Any, **named: Any) -> CreateTableTransaction:
        """Begin to create a table. See PyIceberg's method."""
        made = super().create_table_transaction(*args, **self._checked(args, named))  # type: ignore[safe-super]
        staged: Any = vars(made)["_table"]
        return CreateTableTransaction(NewTable(**{name.removeprefix("_"): one for name, one in vars(staged).items()}))

    def _checked(self, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """Return the named arguments of create_table, if PyIceberg may have them."""
        properties = dict(args[PROPERTIES] if len(args) > PROPERTIES else named.get("properties") or {})
        if policy.KEY_ID not in properties:
            policy.check_raw({"properties": properties}, "create_table", self._encryption.plaintext)
            return named
        policy.check_change(None, properties, {})
        version = str(properties.pop(TableProperties.FORMAT_VERSION, "3"))
        if version != "3":
            raise PolicyError(
                f"{policy.KEY_ID} with {TableProperties.FORMAT_VERSION}={version}: only version 3 has encryption"
            )
        if len(args) > PROPERTIES:
            raise TypeError("pass properties= by name")
        # PyIceberg writes version 2, which the FileIO makes version 3.
        return {**named, "properties": properties}

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Commit updates to a table. See PyIceberg's method."""
        check_commit(table, requirements, updates)
        return super().commit_table(table, requirements, updates)  # type: ignore[safe-super]

    def purge_table(self, identifier: str | Identifier) -> None:
        """Drop a table, and delete all files that its metadata reach. See PyIceberg's method.

        Raises:
            KeyAccessError, IntegrityError: A manifest does not open, so its files are not known. Nothing has changed:
                drop the table instead.
        """
        table = self.load_table(identifier)
        if not table_io(table).encrypted:
            super().purge_table(identifier)  # type: ignore[safe-super]
            return
        found = _reachable(table)
        self.drop_table(identifier)
        for kind, paths in found.items():
            delete_files(table.io, paths, kind)


def check_commit(table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]) -> None:
    """Refuse updates that would lose keys, or configure clients. PolicyError."""
    _check_updates(updates)
    if not any(isinstance(one, AssertCreate) for one in requirements):
        _check_key_id(table, updates)


def _check_updates(updates: tuple[TableUpdate, ...]) -> None:
    for update in updates:
        if isinstance(update, SetPropertiesUpdate):
            named = [name for name in update.updates if name != metadata.MARK]
            policy.check_settings(named, "the change")
        elif isinstance(update, RemovePropertiesUpdate):
            if policy.KEY_ID in update.removals:
                raise PolicyError(f"{policy.KEY_ID} is never removed: the table's keys would be lost")
        elif isinstance(update, UpgradeFormatVersionUpdate) and update.format_version > 2:
            raise PolicyError("the table has format version 3 already, of which PyIceberg is shown version 2")


def _check_key_id(table: Table, updates: tuple[TableUpdate, ...]) -> None:
    """Refuse another master key before anything is written, whoever writes the metadata."""
    for update in updates:
        if isinstance(update, SetPropertiesUpdate) and policy.KEY_ID in update.updates:
            policy.check_key_id(table.metadata.properties, update.updates)


def _reachable(table: Table) -> dict[str, set[str]]:
    """Return the paths of all files that a table's metadata reach, by kind, those that name others last."""
    io, raw = table_io(table), raw_metadata(table)
    found: dict[str, set[str]] = {"data": set(), "manifest": set(), "manifest list": set(), "statistics": set()}
    for snapshot in raw.get("snapshots") or ():
        path = snapshot["manifest-list"]
        inner = io.inner(path)
        for manifest in read_list(io.session, path, inner, plaintext=True):
            if manifest.path not in found["manifest"]:
                named = read_manifest(io.session, manifest, inner, plaintext=True)
                found["data"].update(one.path for one in named)
                found["manifest"].add(manifest.path)
        found["manifest list"].add(path)
    for name in ("statistics", "partition-statistics"):
        found["statistics"].update(one["statistics-path"] for one in raw.get(name) or ())
    found["metadata"] = {one["metadata-file"] for one in raw.get("metadata-log") or ()} | {table.metadata_location}
    return found


# --------------------------------------------------------------------------------- what metastores store of properties

LOCATION = "metadata_location"
OWN = ("EXTERNAL", "table_type", LOCATION, "previous_metadata_location", "metadata_hash")


def set_stored(session: Session, parameters: MutableMapping[str, str]) -> None:
    """Set what a metastore stores of a table's properties to those of its raw metadata.

    PyIceberg stores the properties of the facade, in which an edit is not yet made.

    Args:
        session: Has written or read the metadata.
        parameters: What PyIceberg is about to store, with the location of the metadata; changed.
    """
    parameters.pop(metadata.MARK, None)
    raw = session.raw(parameters.get(LOCATION, ""))
    if raw is not None and policy.is_encrypted(raw):
        parameters.update({name: str(value) for name, value in raw["properties"].items() if name not in OWN})


def check_stored(session: Session, parameters: Mapping[str, str], table: Table) -> Table:
    """Return a table that was loaded, if its metastore has the same master key and key length as its metadata.

    A metastore is harder to change than the storage. A table that a writer registered without properties is as it is.

    Raises:
        IntegrityError: Somebody changed the metadata file, for example into that of a table in plaintext.
    """
    raw = session.raw(table.metadata_location)
    properties = table.metadata.properties if raw is None else raw.get("properties") or {}
    for name in (policy.KEY_ID, policy.KEY_LENGTH):
        if policy.KEY_ID in parameters and parameters.get(name) != properties.get(name):
            raise IntegrityError(
                f"{table.metadata_location} was changed: the catalog has {name}={parameters.get(name)}, "
                f"the metadata have {properties.get(name)}"
            )
    return table
