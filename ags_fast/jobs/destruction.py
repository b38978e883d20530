"""Destroy old versions of a master key in a local keystore, after a look at the datasets that may need them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ags_fast.errors import PolicyError
from ags_fast.jobs.auditing import audit
from ags_fast.jobs.results import shown
from ags_fast.keys.kms import KMS_TYPE, local

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ags_fast.dataset.access import Folder, KeyPlace


def destroy_versions(
    kms: Mapping[str, str],
    key_id: str,
    versions: Sequence[int],
    *,
    datasets: Folder | Sequence[Folder] = (),
    unchecked: bool = False,
    dry_run: bool = False,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Destroy versions of a master key in a local keystore, if none of `datasets` needs them.

    What a destroyed version alone has wrapped never opens again: also other datasets, Iceberg tables, and copies of
    `datasets` that were made earlier. Either all versions are destroyed, or none.

    Args:
        kms: The properties of the local keystore.
        key_id: The master key.
        versions: The numbers of the versions. Neither the newest one, nor the one that wraps now, can be destroyed.
        datasets: The datasets under the master key: local paths, fsspec URLs, or `Store`. `audit` looks at each.
        unchecked: Look at no dataset.
        dry_run: Check everything, and destroy nothing.
        key_store: Where the keys of `datasets` are; None: in each dataset.
        storage_options: Options for fsspec.

    Returns:
        ``destroyed``: the versions that were not destroyed before; ``versions`` as given; ``key_id``; ``datasets``:
        the names of what was looked at; ``dry_run``.

    Raises:
        PolicyError: One of the datasets needs a version, it cannot be told, or a job may run. Nothing was destroyed.
        ValueError: There are no versions, one is the newest or wraps now, `kms` is no local keystore, or neither
            `datasets` nor `unchecked` is given. Nothing was destroyed.
        KeyAccessError: The keystore has no such key or version, or does not open a dataset. Nothing was destroyed.
        FileNotFoundError: There is no such dataset. Nothing was destroyed.
    """
    looked = [datasets] if isinstance(datasets, str | os.PathLike) or not hasattr(datasets, "__iter__") else [*datasets]
    numbers = sorted(set(versions))
    if kms.get(KMS_TYPE) != "local":
        raise ValueError(f"only versions in a local keystore can be destroyed here, with {KMS_TYPE}=local")
    if not numbers:
        raise ValueError("say which versions to destroy")
    if bool(looked) == unchecked:
        raise ValueError("give either the datasets to look at first, or unchecked=True to look at none")
    local.destroy_versions(kms, key_id, numbers, dry_run=True)  # what is wrong with the versions is known at once
    for dataset in looked:
        found = audit(dataset, kms=kms, key_store=key_store, storage_options=storage_options)
        for number in numbers:
            if (reason := _needs(found, key_id, str(number))) is not None:
                raise PolicyError(
                    f"version {number} of the local key {key_id!r} stays, and nothing was destroyed: of the dataset "
                    f"{found['dataset']} at version {found['version']}, {reason}. `ags-fast keys audit` says what to "
                    "run first"
                )
    return {
        "key_id": key_id,
        "versions": numbers,
        "destroyed": local.destroy_versions(kms, key_id, numbers, dry_run=dry_run),
        "datasets": [shown(os.fspath(one) if isinstance(one, str | os.PathLike) else one.url) for one in looked],
        "dry_run": dry_run,
    }


def _needs(found: Mapping[str, Any], key_id: str, version: str) -> str | None:
    """Return why a dataset may need a version of a master key, by its audit; None if it needs it for nothing."""
    running = [job["job_id"] for job in found["open_jobs"] if job["lives"] is not False]
    master = next((row for row in found["masters"] if row["wrapping_key_id"] == key_id), None)
    row = next((row for row in master["versions"] if row["version"] == version), None) if master else None
    if row is not None and not row["may_be_destroyed"]:
        return str(row["why"])
    if found["unread"]:
        return f"something could not be read: {found['unread'][0]}"
    if row is None and master is not None and master["others"] is None:
        return "it cannot be told which version wrapped its keys"
    if running:
        return f"the job {running[0]} may be running: its workers may know keys as they were wrapped before"
    return None
