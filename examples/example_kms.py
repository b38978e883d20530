"""The KMS of the examples: a local keystore. In production pass the properties of your own (docs/keys.md)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from pathlib import Path

MASTER_KEY = "sales"


def local_kms(folder: Path) -> dict[str, str]:
    """Make a keystore with one master key, and return its properties."""
    key_file = folder / "keystore.key"
    with open(os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(os.urandom(32))
    kms = {
        "encryption.kms-type": "local",
        "kms.local.path": str(folder / "keystore.json"),
        "kms.local.key-file": str(key_file),
    }
    local.create_keystore(kms)
    local.create_key(kms, MASTER_KEY)
    return kms
