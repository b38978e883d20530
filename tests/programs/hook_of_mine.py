"""A script that names a function of its own as the audit hook."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support import error_of

from ags_fast.jobs import encrypt_files


def hook(event: object) -> None:
    """Never called."""


if __name__ == "__main__":
    src, dataset, kms, key = sys.argv[1:]
    error = error_of(TypeError, lambda: encrypt_files(src, dataset, kms=json.loads(kms), wrapping_key_id=key))
    assert "kms.audit-hook names the main script" in str(error)
    assert not Path(dataset).exists()
