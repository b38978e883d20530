"""PyIceberg's catalogs, with encrypted tables.

Each class is PyIceberg's own with the same few methods in front: they give the catalog a session, choose the FileIO,
and refuse what would lose keys before PyIceberg acts on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from pyiceberg.catalog import Catalog
from pyiceberg.table import TableProperties
from pyiceberg.table.update import AssertCreate, RemovePropertiesUpdate, SetPropertiesUpdate, UpgradeFormatVersionUpdate

from ags_fast.errors import PolicyError
from ags_fast.iceberg import metadata, policy
from ags_fast.iceberg.handles import handle
from ags_fast.iceberg.session import SESSION, Session, kms_properties

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyiceberg.catalog import PropertiesUpdateSummary as PropertiesUpdateSummary
    from pyiceberg.table import CommitTableResponse, CreateTableTransaction, Table
    from pyiceberg.table.update import TableRequirement, TableUpdate
    from pyiceberg.typedef import Identifier

    from ags_fast.keys.kms import KmsClient

__all__ = ["IO_IMPL", "EncryptedCatalog"]

IO_IMPL = "ags_fast.iceberg.FileIO"


class EncryptedCatalog(Catalog):
    """What stands in front of each of PyIceberg's catalogs.

    Args:
        name: The catalog's name.
        kms: A KMS client or its properties; None takes them from the catalog's properties.
        **properties: The catalog's properties.
    """

    def __init__(self, name: str, kms: KmsClient | Mapping[str, str] | None = None, **properties: Any) -> None:
        self._session = Session(kms if kms is not None else kms_properties(properties))
        properties.pop("py-catalog-impl", None)
        super().__init__(name, **{**properties, "py-io-impl": IO_IMPL, SESSION: self._session.token})

    def __reduce__(self) -> NoReturn:
        raise TypeError("a catalog of ags_fast.iceberg holds keys and is never pickled: load it where it is used")

    @property
    def session(self) -> Session:
        """What this catalog knows of its tables."""
        return self._session

    def create_table(self, *args: Any, **named: Any) -> Table:
        """Create a table, which is encrypted if its properties name a master key. See PyIceberg's method."""
        return handle(super().create_table(*args, **_checked(args, named)))  # type: ignore[safe-super]

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
        return super().create_table_transaction(*args, **_checked(args, named))  # type: ignore[safe-super]

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Commit updates to a table. See PyIceberg's method."""
        _check_updates(updates)
        if not any(isinstance(one, AssertCreate) for one in requirements):
            _check_key_id(table, updates)
        return super().commit_table(table, requirements, updates)  # type: ignore[safe-super]


PROPERTIES = 5  # the place of `properties` among the arguments of create_table, after `self`


def _checked(args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return the named arguments of create_table, if PyIceberg may have them."""
    properties = dict(args[PROPERTIES] if len(args) > PROPERTIES else named.get("properties") or {})
    if policy.KEY_ID not in properties:
        policy.check_settings((name for name in properties if name.lower() in policy.CLASSES), "the table")
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
