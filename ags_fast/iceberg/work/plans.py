"""The durable plan of a job that moves a table's files: which file goes where under which key, for a second run.

The plan is one object in the table's folder of metadata: a line of JSON with the KEK of the job as the KMS wrapped it,
then an AES GCM Stream, whose key that KEK wraps. Only who may use the master key can read, make or change a plan.
"""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ags_fast.ags1 import AgsCodec
from ags_fast.errors import AgsError, FormatError
from ags_fast.iceberg.snapshots import line_of
from ags_fast.iceberg.work.heads import location_provider
from ags_fast.iceberg.work.tasks import NEW_KEY, TableContext
from ags_fast.iceberg.writing import new_key
from ags_fast.keys.entry import KeyEntry
from ags_fast.keys.metadata import StandardKeyMetadata

if TYPE_CHECKING:
    from ags_fast.iceberg.io import FileIO
    from ags_fast.iceberg.metadata import Raw

__all__ = ["JOB_ID", "OPS", "Plan", "Planned", "begin_plan", "find_plan", "plan_location"]

OPS = ("rekey", "rekey-manifests", "encrypt")  # that have plans
PURPOSE = "iceberg-plan"
FORMAT = 2
JOB_ID = "ags-fast.job-id"  # of a snapshot's summary


@dataclass(frozen=True, slots=True, repr=False)
class Planned:
    """The path and the key of a new file."""

    to: str
    key: bytes  # with the AAD prefix, wrapped by the KEK of the job


@dataclass(slots=True, repr=False)
class Plan:
    """The plan of a job."""

    location: str
    context: TableContext  # has the KEK of the job
    io: FileIO
    base: int | None  # the id of the main branch's newest snapshot when the plan was begun
    files: dict[str, Planned] = field(default_factory=dict)  # by the path of the old file
    resumed: bool = False  # whether an earlier run began it

    def add(self, path: str, to: str, nbytes: int) -> None:
        """Plan that a file goes to another path, under a new key of `nbytes` bytes."""
        self.files[path] = Planned(to, self.context.wrap(new_key(nbytes), NEW_KEY, to))

    def was_committed(self, raw: Raw) -> bool:
        """Tell whether a snapshot of the table is the one that the plan was for."""
        jobs = [(one.get("summary") or {}).get(JOB_ID) for one in raw.get("snapshots") or ()]
        return self.resumed and self.context.job_id in jobs

    def goes_on(self, raw: Raw) -> bool:
        """Tell whether the plan is for the main branch as it is: its keys were never in use.

        If the table was rolled back behind the plan's base, or the base has expired, nothing tells whether they were.
        """
        return not self.resumed or (self.base in list(line_of(raw)) and not self.was_committed(raw))

    def key(self, path: str) -> StandardKeyMetadata:
        """Return the new key of an old file."""
        planned = self.files[path]
        return self.context.unwrap(planned.key, NEW_KEY, planned.to)

    def save(self) -> None:
        """Write the plan."""
        files = {path: [one.to, _text(one.key)] for path, one in self.files.items()}
        job = {"format": FORMAT, "job": self.context.job_id, "op": self.context.op, "base": self.base}
        body = json.dumps({**job, "files": files})
        key = new_key(32)
        sealed = AgsCodec(key.encryption_key, aad_prefix=key.aad_prefix).encrypt(body.encode())
        known = StandardKeyMetadata(key.encryption_key, key.aad_prefix, len(sealed))
        wrapped = self.context.wrap(known, PURPOSE, self.location)
        head = json.dumps({"kek": self.context.kek.to_json(), "key": _text(wrapped)})
        with self.io.inner(self.location).new_output(self.location).create(overwrite=True) as file:
            file.write(head.encode() + b"\n" + sealed)

    def end(self) -> None:
        """Delete the plan."""
        self.io.inner(self.location).delete(self.location)


def plan_location(raw: Raw, op: str) -> str:
    """Return where the plan of a job is: one job of a kind works on a table at a time."""
    return location_provider(raw).new_metadata_location(f"ags-fast-{op}-{raw['table-uuid']}.plan")


def find_plan(io: FileIO, raw: Raw, op: str, **options: Any) -> Plan | None:
    """Return the plan of an earlier run that did not come to its end, or None.

    `options` are the KMS, which is from `client_for`, the master key ``wrapping_key_id`` of the job's KEK, and more
    fields of the `TableContext`. FormatError or IntegrityError if no run can go on by the plan: the plan is cut, was
    changed, or is under another master key.
    """
    location = plan_location(raw, op)
    there = io.inner(location).new_input(location)
    if not there.exists():
        return None
    with there.open() as file:
        data = bytes(file.read())
    return _read(io, location, op, data, _fields(io, raw, options))


def begin_plan(io: FileIO, raw: Raw, op: str, job_id: str, *, fresh: bool = False, **options: Any) -> Plan:
    """Return the plan of an earlier run, or else, or if `fresh`, an empty one of this id. Options: see `find_plan`."""
    found = None
    if not fresh:
        with suppress(AgsError):  # else the job begins again, and the files of the earlier run are orphans
            found = find_plan(io, raw, op, **options)
    if found is None:
        context = TableContext.begin(op, job_id, **_fields(io, raw, options))
        found = Plan(plan_location(raw, op), context, io, next(line_of(raw), None))
    return found


def _fields(io: FileIO, raw: Raw, options: dict[str, Any]) -> dict[str, Any]:
    return {"table_uuid": raw["table-uuid"], "settings": io.settings, **options}


def _read(io: FileIO, location: str, op: str, data: bytes, fields: dict[str, Any]) -> Plan:
    head, _, sealed = data.partition(b"\n")
    try:
        value = json.loads(head)
        kek, wrapped = KeyEntry.from_json(value["kek"]), base64.b64decode(value["key"], validate=True)
    except (ValueError, TypeError, KeyError):
        raise FormatError(f"{location} is not the plan of a job") from None
    if kek.wrapping_key_id != fields["wrapping_key_id"]:
        raise FormatError(f"{location} is the plan of a job under another master key")
    context = TableContext.begin(op, "", kek=kek, **fields)
    key = context.unwrap(wrapped, PURPOSE, location)
    body = json.loads(AgsCodec(key.encryption_key, aad_prefix=key.aad_prefix).decrypt(sealed, length=key.file_length))
    if body["format"] != FORMAT or body["op"] != op:
        raise FormatError(f"{location} is the plan of another job, or of a newer ags_fast")
    files = {path: Planned(to, base64.b64decode(key)) for path, (to, key) in body["files"].items()}
    return Plan(location, replace(context, job_id=body["job"]), io, body["base"], files, resumed=True)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
