"""Seal a table that others have changed, and pins of tables: what shows that metadata are the owner's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ags_fast.dataset.names import new_job_id
from ags_fast.errors import AgsError, ConcurrentChangeError, IntegrityError, PolicyError
from ags_fast.iceberg import policy
from ags_fast.iceberg.commit import edit, pin_of, pinned, raw_metadata, table_io
from ags_fast.iceberg.reading import load_metadata
from ags_fast.iceberg.verification import verify
from ags_fast.jobs.results import JobResult, Row, counted
from ags_fast.seals.guard import CHANGED, SEALED, Sealed, sealing
from ags_fast.seals.pins import OpenPin, parse
from ags_fast.seals.state import differences, digest

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from ags_fast.iceberg.metadata import Raw

__all__ = ["check_pin", "pin", "seal"]


def pin(table: Table) -> str:
    """Return the pin of a table as it was loaded: a text, not secret, to be kept away from the table.

    ``load_catalog(..., pins={"shop.orders": pin})`` and `check_pin` take it. A pin that begins with ``ags1u.`` is of
    metadata without a seal: it shows a restore or a fork, and nothing of what who writes metadata has made.

    Raises:
        IntegrityError: The seal was forged.
        PolicyError: The table is in plaintext, or was not loaded by a catalog of ags_fast.iceberg.
        KeyAccessError: The KMS refuses the KEK of the seal.
    """
    return pin_of(table, _encrypted(table))


def check_pin(table: Table, pin: str) -> None:
    """See that a table, as it was loaded, descends from a pin.

    Raises:
        IntegrityError: It does not, or was changed after it was sealed.
        ValueError: The pin is malformed.
        PolicyError, KeyAccessError: As for `pin`.
    """
    raw, known = _encrypted(table), parse(pin)
    if isinstance(known, OpenPin):
        known.check(raw)
        return
    found = _look(table, raw)
    if found.verdict != SEALED or found.seal is None or found.key is None:
        raise IntegrityError(f"the table does not descend from its pin: its metadata are {found.verdict}")
    known.check(found.seal, found.key)


@counted
@pinned
def seal(table: Table, *, pin: str | None = None, dry_run: bool = False) -> JobResult:
    """Seal what was changed since the table was sealed last, or a table that was never sealed.

    Look at the rows first, with `dry_run`: whoever can write to the storage may have made a change, and nothing tells
    it from one of the owner's. Every tag of every file is checked before. A new KEK makes the seal, unless the table
    descends from `pin`: somebody may have put an old KEK back.

    Args:
        table: A table of a catalog of ags_fast.iceberg. Afterwards it is the sealed version.
        pin: A pin that the table descended from when it was sealed last.
        dry_run: Only return the rows.

    Returns:
        A row for each difference to the state that was sealed last: ``src`` is what differs, such as
        ``properties/comment``, and the class of the error is Added, Changed or Removed. Without that state there is one
        row, "Unsealed": old pins no longer hold then. Next come the rows of `verify` that failed: nothing is committed
        if there are any.

    Raises:
        IntegrityError: There is a `pin`, and the seal was forged, or does not descend from it.
        ConcurrentChangeError, PolicyError, KeyAccessError, ValueError: As for other changes of a table.
    """
    raw = _encrypted(table)
    result = JobResult(new_job_id(), "seal", table.location(), None, [])
    forged: AgsError | None = None
    try:
        found = _look(table, raw)
    except (IntegrityError, PolicyError) as error:  # nobody's, or of a later scheme: then the table begins anew
        if pin is not None:
            raise
        found, forged = Sealed(CHANGED), error
    if pin is not None:
        known = parse(pin)
        if isinstance(known, OpenPin) or found.seal is None or found.key is None:
            raise ValueError("the pin is of metadata without a seal, or the table has no seal of its own to compare")
        known.check(found.seal, found.key)
    if found.verdict == SEALED:
        return result
    result.rows += _differences(table, raw, found, forged)
    failed = [row for row in verify(table, statistics="allow").rows if row.status == "failed"]
    failed = [row for row in failed if forged is None or row.src != table.metadata_location]
    result.rows += failed
    if dry_run or failed:
        return result
    with sealing("same" if pin is not None else "new"):
        edit(table, lambda newest: {**newest} if newest == raw else _refused(table))
    return result


def _refused(table: Table) -> Raw:
    raise ConcurrentChangeError(f"{'.'.join(table.name())} was changed meanwhile: look at the differences again")


def _encrypted(table: Table) -> Raw:
    raw = raw_metadata(table)
    if not policy.is_encrypted(raw):
        raise PolicyError(f"the table has no {policy.KEY_ID}: it is in plaintext, and has no seal")
    return raw


def _look(table: Table, raw: Raw) -> Sealed:
    return table_io(table).session.guard.look(raw, table.metadata_location)


def _differences(table: Table, raw: Raw, found: Sealed, forged: AgsError | None) -> list[Row]:
    """Return a row for each item in which metadata differ from the state that was sealed last."""
    io, before, sealed = table_io(table), None, found.seal if found.key is not None else None
    for one in reversed(raw.get("metadata-log") or ()):
        if sealed is None:
            break
        try:
            older = load_metadata(io.session, one["metadata-file"], io.inner(one["metadata-file"]))
            if digest(older) == sealed.state:
                before = older
                break
        except (AgsError, OSError):  # expired, damaged, or not the table's
            continue
    if before is None:
        why = "no metadata file of the log is the state that was sealed last: look at all of the table"
        why = why if forged is None else f"{forged}. {why}"
        return [Row(table.metadata_location, None, "skipped", "Unsealed", why, format="metadata")]
    return [
        Row(name, None, "skipped", kind, f"{kind.lower()} since it was sealed", format="metadata")
        for name, kind in differences(before, raw).items()
    ]
