"""What a REST server makes of a commit, known before the commit is sent: the seal is of that state."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from pyiceberg.table.metadata import TableMetadataUtil
from pyiceberg.table.update import TableUpdate, update_table_metadata

from ags_fast.errors import IntegrityError
from ags_fast.iceberg import metadata
from ags_fast.seals.guard import DO
from ags_fast.seals.seal import seal_of
from ags_fast.seals.state import differences, digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ags_fast.iceberg.metadata import Raw

__all__ = ["check_made", "predicted"]

UPDATES: TypeAdapter[Any] = TypeAdapter(list[TableUpdate])
SHOWN = 5  # items that an error names
OF_PROPERTIES = ("set-properties", "remove-properties")


def predicted(base: Raw, sent: list[Raw], after: Mapping[str, Any], new: list[Raw]) -> Raw:
    """Return the metadata that a server makes of a commit: as PyIceberg does, with what PyIceberg does not know.

    Args:
        base: What the commit changes.
        sent: The updates, as PyIceberg sends them.
        after: ``properties``, ``encryption-keys`` and ``next-row-id`` after the commit.
        new: The new snapshots, with their keys and row ids.
    """
    facade = TableMetadataUtil.parse_obj(metadata.facade(base))
    others = [one for one in sent if one["action"] not in OF_PROPERTIES]  # the facade does not have all properties
    made = update_table_metadata(facade, tuple(UPDATES.validate_python(others)))
    known = {one["snapshot-id"]: one for one in new}

    def complete(raw: Raw, fresh: list[Raw]) -> None:
        raw.update(after)
        for one in fresh:
            one.update(known[one["snapshot-id"]])

    return metadata.merge(base, json.loads(made.model_dump_json()), complete)


def check_made(stored: Raw, state: Raw, *, requires: bool) -> None:
    """See that what a server has made of a commit is the state that was sealed. The commit was made, and stays.

    IntegrityError if not, and if this client `requires` a seal; else a warning.
    """
    ours = seal_of(state)
    if ours is not None and seal_of(stored) == ours and digest(stored) == ours.state:
        return
    names = list(differences(state, stored)) or ["the seal"]
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    why = (
        "the commit was made, and the table is no longer sealed: the server has stored other metadata than were sent. "
        f"These differ: {', '.join(names[:SHOWN])}{more}. Another client came first, or the server adds to what it is "
        f"sent. {DO}"
    )
    if requires:
        raise IntegrityError(why)
    warnings.warn(why, stacklevel=4)
