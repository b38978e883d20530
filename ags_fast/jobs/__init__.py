"""Jobs over directories of files: encrypt them into a dataset, decrypt, verify and re-key it.

A job plans, makes the plan durable, does it, and commits a new version of the dataset; whatever dies on the way, the
plan has every data key, and the version before stays as it is. The format is in docs/dataset-format.md.
"""

from __future__ import annotations

from ags_fast._lazy import lazy as _lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ags_fast.audit.auditing import audit, key_status
    from ags_fast.dataset.policy import Policy
    from ags_fast.engines.local import LocalEngine
    from ags_fast.jobs.arguments import Reach
    from ags_fast.jobs.decryption import decrypt_files
    from ags_fast.jobs.encryption import encrypt_files
    from ags_fast.jobs.keys import destroy_versions, restore_keys
    from ags_fast.jobs.reading import copy_file, open_file
    from ags_fast.jobs.rekeying import rekey_files
    from ags_fast.jobs.results import JobError, JobFailuresWarning, JobResult, Row
    from ags_fast.jobs.retention import expire, set_policy, sweep
    from ags_fast.jobs.rotation import rotate
    from ags_fast.jobs.upkeep import maintain
    from ags_fast.jobs.verification import verify_files
    from ags_fast.jobs.versions import compact, remove_files, restore_version

__all__ = ["JobError", "JobFailuresWarning", "JobResult", "LocalEngine", "Policy", "Reach", "Row", "audit", "compact"]
__all__ += ["copy_file", "decrypt_files", "destroy_versions", "encrypt_files", "expire", "key_status", "maintain"]
__all__ += ["open_file", "rekey_files", "remove_files", "restore_keys", "restore_version", "rotate", "set_policy"]
__all__ += ["sweep", "verify_files"]

# A worker process imports what its tasks need, which is a small part.
_HOMES = {
    ".audit.auditing": ("audit", "key_status"),
    ".dataset.policy": ("Policy",),
    ".engines.local": ("LocalEngine",),
    "arguments": ("Reach",),
    "decryption": ("decrypt_files",),
    "encryption": ("encrypt_files",),
    "keys": ("destroy_versions", "restore_keys"),
    "reading": ("copy_file", "open_file"),
    "rekeying": ("rekey_files",),
    "results": ("JobError", "JobFailuresWarning", "JobResult", "Row"),
    "retention": ("expire", "set_policy", "sweep"),
    "rotation": ("rotate",),
    "upkeep": ("maintain",),
    "verification": ("verify_files",),
    "versions": ("compact", "remove_files", "restore_version"),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, _HOMES)
