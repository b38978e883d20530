"""Documents of datasets, opened in little memory. Imports nothing that takes much of it."""

from __future__ import annotations

import resource
import time

from support import error_of

from ags_fast import AgsError
from ags_fast.dataset.ledger import Ledger
from ags_fast.fs import Store
from ags_fast.keys.kms import load_kms
from ags_fast.keys.stores import claimed_keys


def read_in_512_mib(folder: str, kms: dict[str, str], expected: str) -> None:
    """Prints the errors; reading must fail."""
    resource.setrlimit(resource.RLIMIT_AS, (512 << 20,) * 2)
    calls = [lambda: Ledger.open(folder, load_kms(kms)).load(), lambda: claimed_keys(Store(folder))]
    for call in calls if expected == "keys" else calls[:1]:
        began = time.process_time()
        error = error_of(AgsError, call)
        print(type(error).__name__, error)
        assert time.process_time() - began < 20
