"""The durable plan of a job that moves a table's files: which file goes where under which key, for a second run.

The plan is one object in the table's folder of metadata: a line of JSON with the KEK of the job as the KMS wrapped it,
then an AES GCM Stream, whose key that KEK wraps. Only who may use the master key can read, make or change a plan.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyiceberg.table.locations import load_location_provider

from ags_fast.ags1 import AgsCodec
from ags_fast.errors import AgsError, FormatError
from ags_fast.iceberg.work.tasks import NEW_KEY, table_context
from ags_fast.iceberg.writing import new_key
from ags_fast.keys.entry import KeyEntry
from ags_fast.keys.metadata import StandardKeyMetadata

if TYPE_CHECKING:
    from ags_fast.iceberg.io import FileIO
    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.work.tasks import TableContext
    from ags_fast.keys.kms import KmsClient

__all__ = ["Plan", "Planned", "begin_plan", "plan_location"]

PURPOSE = "iceberg-plan"
FORMAT = 1


@dataclass(frozen=True, slots=True, repr=False)
class Planned:
    """Where a file goes.

    Attributes:
        to: The path of the new file.
        key: Its key and AAD prefix, wrapped by the KEK of the job.
    """

    to: str
    key: bytes


@dataclass(slots=True, repr=False)
class Plan:
    """The plan of a job.

    Attributes:
        location: Where it is.
        context: The context of the job's tasks, which has the KEK.
        io: Of the table.
        files: The planned files, by the path of the old one.
        resumed: Whether an earlier run began it.
    """

    location: str
    context: TableContext
    io: FileIO
    files: dict[str, Planned] = field(default_factory=dict)
    resumed: bool = False

    def add(self, path: str, to: str, nbytes: int) -> None:
        """Plan that a file goes to another path, under a new key of `nbytes` bytes."""
        key = self.context.wrap(new_key(nbytes), NEW_KEY, to)
        assert key is not None
        self.files[path] = Planned(to, key)

    def key(self, path: str) -> StandardKeyMetadata:
        """Return the new key of an old file."""
        planned = self.files[path]
        key = self.context.unwrap(planned.key, NEW_KEY, planned.to)
        assert key is not None
        return key

    def save(self) -> None:
        """Write the plan."""
        files = {path: [one.to, _text(one.key)] for path, one in self.files.items()}
        body = json.dumps({"format": FORMAT, "job": self.context.job_id, "op": self.context.op, "files": files})
        key = new_key(32)
        sealed = AgsCodec(key.encryption_key, aad_prefix=key.aad_prefix).encrypt(body.encode())
        known = StandardKeyMetadata(key.encryption_key, key.aad_prefix, len(sealed))
        wrapped = self.context.wrap(known, PURPOSE, self.location)
        assert wrapped is not None
        head = json.dumps({"kek": self.context.kek.to_json(), "key": _text(wrapped)})
        with self.io.inner(self.location).new_output(self.location).create(overwrite=True) as file:
            file.write(head.encode() + b"\n" + sealed)

    def end(self) -> None:
        """Delete the plan."""
        self.io.inner(self.location).delete(self.location)


def plan_location(raw: Raw, op: str) -> str:
    """Return where the plan of a job is: one job of a kind works on a table at a time."""
    provider = load_location_provider(raw["location"], raw["properties"])
    return provider.new_metadata_location(f"ags-fast-{op}-{raw['table-uuid']}.plan")


def begin_plan(
    io: FileIO, raw: Raw, op: str, job_id: str, *, kms: KmsClient, wrapping_key_id: str, fresh: bool = False
) -> Plan:
    """Return the plan of an earlier run that did not come to its end, or else an empty one.

    Args:
        io: Of the table.
        raw: The table's metadata.
        op: The operation.
        job_id: Of a new plan.
        kms: As `ags_fast.jobs.engines.local.client_for` returned it.
        wrapping_key_id: The master key that wraps the KEK of a new plan.
        fresh: Whether to return an empty plan in any case.
    """
    options: Any = {
        "table_uuid": raw["table-uuid"],
        "kms": kms,
        "wrapping_key_id": wrapping_key_id,
        "settings": io.settings,
    }
    location = plan_location(raw, op)
    there = io.inner(location).new_input(location)
    if not fresh and there.exists():
        with there.open() as file:
            data = bytes(file.read())
        try:
            return _read(io, location, op, data, wrapping_key_id, options)
        except AgsError:
            pass  # cut, or its master key is gone: the job begins again, and the files of the earlier run are orphans
    return Plan(location, table_context(op, job_id, **options), io)


def _read(io: FileIO, location: str, op: str, data: bytes, master: str, options: Any) -> Plan:
    head, _, sealed = data.partition(b"\n")
    try:
        value = json.loads(head)
        kek, wrapped = KeyEntry.from_json(value["kek"]), base64.b64decode(value["key"], validate=True)
    except (ValueError, TypeError, KeyError):
        raise FormatError(f"{location} is not the plan of a job") from None
    if kek.wrapping_key_id != master:
        raise FormatError(f"{location} is the plan of a job under another master key")
    context = table_context(op, "", kek=kek, **options)
    key = context.unwrap(wrapped, PURPOSE, location)
    assert key is not None
    body = json.loads(AgsCodec(key.encryption_key, aad_prefix=key.aad_prefix).decrypt(sealed, length=key.file_length))
    if body["format"] != FORMAT or body["op"] != op:
        raise FormatError(f"{location} is the plan of another job, or of a newer ags_fast")
    files = {path: Planned(to, base64.b64decode(key)) for path, (to, key) in body["files"].items()}
    context = table_context(op, body["job"], kek=kek, **options)
    return Plan(location, context, io, files, resumed=True)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
