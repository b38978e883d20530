"""Jobs over directories of files: encrypt them into a dataset, decrypt, verify and re-key it.

A job plans, makes the plan durable, does it, and commits a new version of the dataset; whatever dies on the way, the
plan has every data key, and the version before stays as it is. The format is in docs/dataset-format.md.
"""

from __future__ import annotations

from ags_fast._lazy import attribute as _attribute

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ags_fast.newjobs.decryption import decrypt_files
    from ags_fast.newjobs.encryption import encrypt_files
    from ags_fast.newjobs.reading import copy_file, open_file
    from ags_fast.newjobs.rekeying import rekey_files
    from ags_fast.newjobs.removal import remove_files
    from ags_fast.newjobs.verification import verify_files

__all__ = [
    "copy_file",
    "decrypt_files",
    "encrypt_files",
    "open_file",
    "rekey_files",
    "remove_files",
    "verify_files",
]

# A worker process imports what its tasks need, which is a small part.
_HOMES = {
    "decryption": ("decrypt_files",),
    "encryption": ("encrypt_files",),
    "reading": ("copy_file", "open_file"),
    "rekeying": ("rekey_files",),
    "removal": ("remove_files",),
    "verification": ("verify_files",),
}


def __getattr__(name: str) -> Any:
    return _attribute(__name__, _HOMES, name)
