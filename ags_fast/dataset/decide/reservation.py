"""Reserve KEKs for the files of a job."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ags_fast.dataset.decide.change import Change
from ags_fast.dataset.decide.keys import active, provisional
from ags_fast.dataset.keks import GRACE_MS, SLACK_USES, Uses, Want, master_now
from ags_fast.dataset.policy import Policy
from ags_fast.errors import PolicyError
from ags_fast.keys.entry import (
    KeyEntry,
    moved,
    retired,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ags_fast.dataset.entries import FileEntry


def reserve(
    keys: Iterable[KeyEntry],
    wants: Mapping[Want, Uses],
    policy: Policy,
    made: Mapping[Want, KeyEntry],
    now_ms: int,
    where: str = "the dataset",
) -> Change:
    """Reserve uses of each kind on the newest active key, or on a new key.

    A key whose uses or lifetime are over, as `policy` has it, retires in favour of the new key. In single wrap nothing
    is reserved, since the KMS counts its own.

    Args:
        keys: All keys, or all active ones.
        wants: How often a job may use a key of each kind.
        policy: How long and how often a KEK may serve.
        made: The new KEKs that the KMS has made, by kind.
        now_ms: The time, in milliseconds since the epoch.
        where: Names the dataset in errors.

    Returns:
        The keys to put in, and for each kind the key to use (`chosen`).

    Raises:
        PolicyError: One KEK may not be used that often, or the dataset has left the master key.
    """
    there = active(keys)
    newest = {Want.of(key): key for key in there}
    chosen: dict[Want, KeyEntry] = {}
    changes: dict[str, KeyEntry | None] = {}
    makes: list[Want] = []
    for want, uses in wants.items():
        held = newest.get(want)
        if held is not None and not want.double_wrap:
            chosen[want] = held  # the KMS counts its own
            continue
        if held is None or policy.outlived(held.created_ms, now_ms) or not policy.has_room(held.uses, *uses):
            if not policy.has_room(0, *uses):
                raise PolicyError(
                    f"one KEK would wrap {uses.data_keys} data keys, and the dataset's policy allows "
                    f"{policy.kek_uses}: share it among fewer files by the policy's kek_scope"
                )
            if want not in made:
                _check_not_left(want.wrapping_key_id, there, where)
                makes.append(want)
            fresh = made.get(want) or provisional(want, len(makes), now_ms)
            if held is not None:
                fresh = moved(fresh, held)
                changes[held.key_id] = retired(held, fresh.key_id, GRACE_MS, now_ms)
            held = fresh
        chosen[want] = held.replace(uses=policy.reserved(held.uses, *uses)) if want.double_wrap else held
        if chosen[want] != newest.get(want):
            changes[held.key_id] = chosen[want]
    return Change(changes, tuple(makes), chosen)


def kinds_for_files(
    paths: Sequence[str],
    masters: Sequence[Mapping[str, str]],
    main: str,
    double_wrap: bool,
    policy: Policy,
    job_id: str,
    now_ms: int,
) -> tuple[list[list[Want]], dict[Want, Uses]]:
    """Say which kinds of keys wrap the DEKs of new files, and how often.

    Args:
        paths: The paths of the files.
        masters: For each file, {column: master key} of the columns that have a key of their own.
        main: The master key of the rest.
        double_wrap: Whether KEKs wrap the DEKs; else the KMS does.
        policy: How files share KEKs.
        job_id: The id of the job.
        now_ms: The time, in milliseconds since the epoch.

    Returns:
        For each file the kind for its own DEK, and then the kinds for its columns; and the uses of each kind. They
        include spare uses for documents and tables, and for DEKs that are wrapped a second time.
    """
    scopes = policy.scopes(paths, job_id, now_ms) if double_wrap else [None] * len(paths)
    # Under the master key of the rest, a column needs no key apart: one call of the KMS opens both.
    known: dict[tuple[str | None, ...], list[Want]] = {}  # most files share one list
    kinds = []
    for scope, columns in zip(scopes, masters, strict=True):
        if (each := known.get((scope, *columns.values()))) is None:
            wants = (Want(master, double_wrap, master != main, scope) for master in columns.values())
            each = known[scope, *columns.values()] = [Want(main, double_wrap, False, scope), *wants]
        kinds.append(each)
    counts = Counter(kind for each in kinds for kind in each)
    uses = {kind: Uses(count, spare=count) for kind, count in counts.items()}  # where a name is taken, wrapped again
    own = uses.get(Want(main), Uses())
    uses[Want(main)] = own._replace(spare=own.spare + SLACK_USES + len(paths) // 1000)  # documents and tables
    return kinds, uses


def with_keys(
    entries: Sequence[FileEntry],
    kinds: Sequence[Sequence[Want]],
    masters: Sequence[Mapping[str, str]],
    chosen: Mapping[Want, KeyEntry],
) -> list[FileEntry]:
    """Return the entries with the ids of the keys that will wrap their DEKs.

    Args:
        entries: New files.
        kinds: For each file what `kinds_for_files` has said.
        masters: What `kinds_for_files` was given.
        chosen: The key of each kind.
    """
    return [
        entry._replace(
            key_id=chosen[first].key_id,
            column_keys=tuple(
                {"column": column, "key_id": chosen[kind].key_id, "wrapped_dek": b""}
                for column, kind in zip(columns, rest, strict=True)
            )
            or None,
        )
        for entry, (first, *rest), columns in zip(entries, kinds, masters, strict=True)
    ]


def _check_not_left(wrapping_key_id: str, there: Iterable[KeyEntry], where: str) -> None:
    """Raise PolicyError if the dataset has left this master key, for a reason that the job may not know."""
    now = master_now(wrapping_key_id, there)
    if now != wrapping_key_id:
        raise PolicyError(
            f"the keys of {where} were rotated from the master key {wrapping_key_id!r} to {now!r}: "
            f"pass wrapping_key_id={now!r}, or rotate them back"
        )
