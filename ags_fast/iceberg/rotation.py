"""Turn the keys of an encrypted table: one new metadata file, no new snapshot, and no other file is touched.

`rotated_keks` and `rewrapped_keks` decide, from raw metadata to raw metadata; `rotate` commits what they return. Both
keep the ids of all keys, so snapshots stay as they are, and time travel goes on to work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast._types import RotatedTable, check_choice
from ags_fast.dataset.names import new_job_id
from ags_fast.errors import FormatError, PolicyError
from ags_fast.iceberg import policy
from ags_fast.iceberg.commit import edit, pinned, raw_metadata, table_io
from ags_fast.iceberg.expiry import ALL_STAY, check_gc, forced
from ags_fast.jobs.results import JobResult, Row, counted
from ags_fast.keys.iceberg import EncryptedKey, read_encryption_keys, rewrap_keks, rotate_keks, write_encryption_keys
from ags_fast.keys.kms import Kms, KmsClient, check_key_id, shared_client
from ags_fast.metadata.unused import named_keys
from ags_fast.seals.guard import moving

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyiceberg.table import Table

    from ags_fast.iceberg.metadata import Raw

__all__ = ["Turned", "rewrapped_keks", "rotate", "rotated_keks", "with_keys"]

KEYS = "encryption-keys"
KEK, LIST_KEY = "kek", "manifest-list-key"  # formats of rows
OLDER = "{} older metadata files still hold the keys as they were wrapped before: `expire` deletes these files"


class Turned(NamedTuple):
    """What a rotation makes."""

    raw: Raw  # the new metadata; the very object that was given, if nothing changes
    rows: list[Row]  # for each key its id, the id of the key that took its place or wraps it now, and the status


def with_keys(raw: Raw, keys: Iterable[EncryptedKey], master: str | None = None) -> Raw:
    """Return the metadata with other keys, and another master key if one is given."""
    made = {**raw, KEYS: write_encryption_keys(keys)}
    if master is not None and master != raw["properties"][policy.KEY_ID]:
        made["properties"] = {**raw["properties"], policy.KEY_ID: master}
    return made


def rotated_keks(
    raw: Raw,
    kms: KmsClient,
    *,
    wrapping_key_id: str | None = None,
    new_kms: KmsClient | None = None,
    keep_old: bool = False,
    now: int | None = None,
) -> Turned:
    """Put the keys of all manifest lists under a new KEK.

    It takes one wrap and one unwrap for the new KEK, and at most one unwrap for each old KEK. Each new wrap is opened
    again before it is returned. A table without keys gets none. The arguments are those of `rotate`; `raw` stays as it
    is, `kms` unwraps the old KEKs, and `now` is in milliseconds since the epoch.

    Raises:
        KeyAccessError: The KMS refuses, or a key of a snapshot has lost its KEK.
        IntegrityError: A key of a snapshot, or a new wrap, does not open.
    """
    keys, old_master = _keys(raw)
    master = wrapping_key_id or old_master
    if not keys:
        return Turned(raw if master == old_master else with_keys(raw, keys, master), [])
    length, needed = int(raw["properties"].get(policy.KEY_LENGTH, "16")), named_keys(raw)
    made = rotate_keks(keys, kms, master, keep_old=keep_old, length=length, now=now, new_kms=new_kms, needed=needed)
    return Turned(with_keys(raw, made, master), _rotation_rows(keys, made))


def _rotation_rows(before: list[EncryptedKey], after: list[EncryptedKey]) -> list[Row]:
    kek, now = after[0], {key.key_id: key for key in after}
    rows = [Row(kek.key_id, None, "ok", format=KEK, key_id=kek.encrypted_by_id)]
    for key in before:
        made = now.get(key.key_id)
        if made is None:
            rows.append(Row(key.key_id, kek.key_id, "ok", format=KEK, key_id=kek.key_id))
        elif key.is_kek:
            why = "it stays for writers that have begun: `expire` removes it once nothing needs it"
            rows.append(Row(key.key_id, None, "skipped", "Kept", why, format=KEK, key_id=made.encrypted_by_id))
        elif made is key:
            why = "no snapshot names it, and it does not open"
            rows.append(Row(key.key_id, None, "skipped", "Unused", why, format=LIST_KEY, key_id=key.encrypted_by_id))
        else:
            rows.append(Row(key.key_id, None, "ok", format=LIST_KEY, key_id=kek.key_id))
    return rows


def rewrapped_keks(
    raw: Raw, kms: KmsClient, *, new_kms: KmsClient | None = None, new_wrapping_key_id: str | None = None
) -> Turned:
    """Have the current version of the master key, another master key or another KMS wrap the KEKs.

    Nothing else changes, but with another master key the property ``encryption.key-id``, by which Java unwraps KEKs.
    For each KEK it takes one rewrap, or one unwrap and one wrap, and then one unwrap, which shows that the new wrap
    opens. A KEK that the current version wraps takes none, if the KMS tells versions. The arguments are those of
    `rotate`; `raw` stays as it is, and `kms` unwraps the KEKs.

    Raises:
        KeyAccessError: The KMS refuses, or does not unwrap what it has just wrapped.
        IntegrityError: A new wrap opens as another key.
    """
    keys, old_master = _keys(raw)
    master = new_wrapping_key_id or old_master
    made = rewrap_keks(keys, kms, new_kms=new_kms, new_wrapping_key_id=master)
    why = ("Current", "the current version of its master key wraps it")
    pairs = list(zip(keys, made, strict=True))
    rows = [
        Row(key.key_id, None, "skipped", *why, format=KEK, key_id=master)
        if key is now
        else Row(key.key_id, key.key_id, "ok", format=KEK, key_id=master)
        for key, now in pairs
        if key.is_kek
    ]
    same = master == old_master and all(key is now for key, now in pairs)
    return Turned(raw if same else with_keys(raw, made, master), rows)


def _keys(raw: Mapping[str, Any]) -> tuple[list[EncryptedKey], str]:
    if not policy.is_encrypted(raw):
        raise PolicyError("the table is in plaintext and has no keys: use ags_fast.iceberg.encrypt")
    keys, named = read_encryption_keys(raw.get(KEYS) or ()), named_keys(raw)
    if found := [key.key_id for key in keys if key.is_kek and key.key_id in named]:
        raise FormatError(f"a snapshot names {found[0]!r}, which is a key encryption key")
    return keys, raw["properties"][policy.KEY_ID]


# ------------------------------------------------------------------------------------------------------------- public


@counted
@pinned
def rotate(
    table: Table,
    *,
    what: RotatedTable = "kek",
    wrapping_key_id: str | None = None,
    new_kms: Kms | None = None,
    keep_old: bool = False,
    force_expire: bool = False,
    dry_run: bool = False,
) -> JobResult:
    """Replace the keys above a table's data keys. This writes one metadata file, and no snapshot.

    Each new wrap is opened once before the metadata name it. If another commit comes first, the rotation begins again
    from that commit. A rotation that dies has changed nothing.

    **What was exposed stays exposed** where the old bytes still are: older metadata files hold the keys as they were
    wrapped before, until `expire` deletes these files. If a KEK itself was exposed, use `rekey`, too.

    Args:
        table: A table of a catalog of ags_fast.iceberg. Afterwards it is the new version.
        what: ``"kek"`` makes a new KEK and puts the keys of all manifest lists under it. ``"mek"`` has the current
            version of the master key wrap the KEKs: do this after the master key was rotated in the KMS, and before
            its old version is destroyed.
        wrapping_key_id: The master key from now on. None keeps the table's.
        new_kms: The KMS to move to, a client or its properties. Then load the catalog again, with that KMS. None keeps
            the catalog's.
        keep_old: For ``"kek"``: the old KEKs stay in the table, so that writers of other engines that have begun can
            finish. `expire` removes them.
        force_expire: Then delete older metadata files of any age, and keys that nothing needs. Snapshots stay, since
            the rotation has put their keys under the new ones. The result of this is the result's ``expired``.
        dry_run: Write nothing; the rows have the status "planned". The KMS is asked all the same, so a refusal shows.
            The id of a new KEK is another one later.

    Returns:
        A row for each key. ``src`` is its id, ``key_id`` the key that wraps it now, ``dst`` of a removed KEK the KEK
        that took its place. A KEK that was current is "skipped".

    Raises:
        KeyAccessError: The KMS refuses, or a new wrap does not open. Nothing has changed.
        IntegrityError: A key was changed, or a new wrap opens as another key. Nothing has changed.
        PolicyError: The table is in plaintext, or was not loaded by a catalog of ags_fast.iceberg; or `force_expire`
            and its ``gc.enabled`` is false.
        ConcurrentChangeError: Other commits came first, again and again.
        ValueError: An argument is malformed.
    """
    check_choice("what", what, RotatedTable)
    if keep_old and (what != "kek" or force_expire):
        raise ValueError("keep_old is for what='kek', which makes a new KEK, and without force_expire")
    if wrapping_key_id is not None:
        check_key_id(wrapping_key_id)
    io = table_io(table)
    io.session.check_writes()
    kms = io.session.kms
    target = None if new_kms is None else shared_client(new_kms)
    turned: list[Turned] = []

    def change(raw: Raw) -> Raw:
        if force_expire:
            check_gc(raw)
        if not raw.get(KEYS) and policy.is_encrypted(raw):
            policy.check_master(target or kms, wrapping_key_id or raw["properties"][policy.KEY_ID])
        if what == "kek":
            made = rotated_keks(raw, kms, wrapping_key_id=wrapping_key_id, new_kms=target, keep_old=keep_old)
        else:
            made = rewrapped_keks(raw, kms, new_kms=target, new_wrapping_key_id=wrapping_key_id)
        turned.append(made)
        io.table.made(*(read_encryption_keys(one.get(KEYS) or ()) for one in (raw, made.raw)))
        return made.raw

    if not dry_run:
        token = moving.set(target)
        try:
            raw = edit(table, change)
            result = JobResult(new_job_id(), "rotate", table.location(), None, turned[-1].rows)
            if force_expire:
                result.expired = forced(table, ALL_STAY)
        finally:
            moving.reset(token)
        older = raw.get("metadata-log") or ()
        if older and not force_expire and any(row.status == "ok" for row in result.rows):
            result.warnings.append(OLDER.format(len(older)))
        return result
    table.refresh()
    change(raw_metadata(table))
    rows = [row._replace(status="planned") if row.status == "ok" else row for row in turned[-1].rows]
    return JobResult(new_job_id(), "rotate", table.location(), None, rows)
