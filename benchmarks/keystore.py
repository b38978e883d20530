"""The local keystore of benchmarks and of the tour."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from pathlib import Path

MASTER_KEY = "orders"


def keystore(folder: Path) -> dict[str, str]:
    """The properties of a KMS: here a local keystore, made with a master key if it is not there."""
    kms = {
        "encryption.kms-type": "local",
        "kms.local.path": str(folder / "keystore.json"),
        "kms.local.key-file": str(folder / "keystore.key"),
    }
    if not (folder / "keystore.json").exists():
        fd = os.open(folder / "keystore.key", os.O_WRONLY | os.O_CREAT, 0o600)
        with open(fd, "wb") as file:
            file.write(os.urandom(32))
        local.create_keystore(kms)
        local.create_key(kms, MASTER_KEY)
    return kms
