"""The DynamoDB catalog, with encrypted tables."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from pyiceberg.catalog.dynamodb import DynamoDbCatalog as _DynamoDbCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, TableAlreadyExistsError

from ags_fast.iceberg.catalogs.base import LOCATION, EncryptedCatalog, check_stored, response, set_stored

if TYPE_CHECKING:
    from pyiceberg.table import CommitTableResponse, Table
    from pyiceberg.table.update import TableRequirement, TableUpdate

__all__ = ["DynamoDbCatalog"]

PREFIX = "p."  # of the columns with properties
PREVIOUS = "previous_metadata_location"


class DynamoDbCatalog(EncryptedCatalog, _DynamoDbCatalog):
    """PyIceberg's DynamoDbCatalog, with encrypted tables, and with commits.

    PyIceberg's own refuses every commit after the creation of a table. The commits here are those of Iceberg Java: the
    item of a table is changed on the condition that its version is still the one that was read.
    """

    def _commit(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        database, name = self.identifier_to_database_and_table(table.name(), NoSuchTableError)
        item: dict[str, Any] | None
        current: Table | None
        try:
            item = self._get_iceberg_table_item(database, name)
            current = self._convert_dynamo_table_item_to_iceberg_table(item)
        except NoSuchTableError:
            item = current = None
        staged = self._update_and_stage_table(current, table.name(), requirements, updates)
        if current is not None and staged.metadata == current.metadata:
            return response(current)
        self._write_metadata(staged.metadata, staged.io, staged.metadata_location)
        parameters = {**staged.metadata.properties, "table_type": "ICEBERG", LOCATION: staged.metadata_location}
        parameters[PREVIOUS] = "" if current is None else current.metadata_location
        set_stored(self.session, parameters)
        self._store(database, name, item, parameters)
        return response(staged)

    def _store(self, database: str, name: str, item: dict[str, Any] | None, parameters: dict[str, str]) -> None:
        """Replace the item of a table, or create it."""
        now = {"N": str(time.time_ns() // 1_000_000)}
        made = {
            "identifier": {"S": f"{database}.{name}"},
            "namespace": {"S": database},
            "created_at": now if item is None else item["created_at"],
            **{column: value for column, value in (item or {}).items() if not column.startswith(PREFIX)},
            "v": {"S": str(uuid.uuid4())},
            "updated_at": now,
            **{PREFIX + key: {"S": str(value)} for key, value in parameters.items()},
        }
        condition: dict[str, Any] = {"ConditionExpression": "attribute_not_exists(identifier)"}
        if item is not None:
            condition = {"ConditionExpression": "v = :v", "ExpressionAttributeValues": {":v": item["v"]}}
        else:
            self._ensure_namespace_exists(database)
        try:
            self.dynamodb.put_item(TableName=self.dynamodb_table_name, Item=made, **condition)
        except self.dynamodb.exceptions.ConditionalCheckFailedException:
            if item is None:
                raise TableAlreadyExistsError(f"table {database}.{name} already exists") from None
            raise CommitFailedException(f"another commit to {database}.{name} came first") from None

    def _convert_dynamo_table_item_to_iceberg_table(self, dynamo_table_item: dict[str, Any]) -> Table:
        table = super()._convert_dynamo_table_item_to_iceberg_table(dynamo_table_item)
        stored = {
            column.removeprefix(PREFIX): value["S"]
            for column, value in dynamo_table_item.items()
            if column.startswith(PREFIX) and "S" in value
        }
        return check_stored(self.session, stored, table)
