"""Jobs over directories of files: encrypt them into a dataset, decrypt, verify and re-key it.

A job plans, makes the plan durable, does it, and commits a new version of the dataset; whatever dies on the way, the
plan has every data key, and the version before stays as it is. The format is in docs/dataset-format.md.
"""

from __future__ import annotations

from ags_fast._lazy import attribute as _attribute

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ags_fast.dataset.policy import Policy
    from ags_fast.jobs.auditing import audit, key_status
    from ags_fast.jobs.compaction import compact
    from ags_fast.jobs.decryption import decrypt_files
    from ags_fast.jobs.destruction import destroy_versions
    from ags_fast.jobs.encryption import encrypt_files
    from ags_fast.jobs.engines.local import LocalEngine
    from ags_fast.jobs.reading import copy_file, open_file
    from ags_fast.jobs.rekeying import rekey_files
    from ags_fast.jobs.removal import remove_files
    from ags_fast.jobs.restoration import restore_keys
    from ags_fast.jobs.results import JobError, JobResult, Row
    from ags_fast.jobs.retention import expire
    from ags_fast.jobs.reversion import restore_version
    from ags_fast.jobs.rotation import rotate
    from ags_fast.jobs.sweeping import set_policy, sweep
    from ags_fast.jobs.verification import verify_files

__all__ = [
    "JobError",
    "JobResult",
    "LocalEngine",
    "Policy",
    "Row",
    "audit",
    "compact",
    "copy_file",
    "decrypt_files",
    "destroy_versions",
    "encrypt_files",
    "expire",
    "key_status",
    "open_file",
    "rekey_files",
    "remove_files",
    "restore_keys",
    "restore_version",
    "rotate",
    "set_policy",
    "sweep",
    "verify_files",
]

# A worker process imports what its tasks need, which is a small part.
_HOMES = {
    "auditing": ("audit", "key_status"),
    "compaction": ("compact",),
    "decryption": ("decrypt_files",),
    "destruction": ("destroy_versions",),
    "encryption": ("encrypt_files",),
    "engines.local": ("LocalEngine",),
    "reading": ("copy_file", "open_file"),
    "rekeying": ("rekey_files",),
    "removal": ("remove_files",),
    "restoration": ("restore_keys",),
    "results": ("JobError", "JobResult", "Row"),
    "retention": ("expire",),
    "reversion": ("restore_version",),
    "rotation": ("rotate",),
    "sweeping": ("set_policy", "sweep"),
    "verification": ("verify_files",),
}


def __getattr__(name: str) -> Any:
    if name == "Policy":
        from ags_fast.dataset.policy import Policy

        return Policy
    return _attribute(__name__, _HOMES, name)
