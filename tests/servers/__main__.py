"""usage: python -m servers [NAME...]

Builds these servers into the cache; without names, those of make test. Says what it does only
where there is something to do.
"""

from __future__ import annotations

import os
import sys

from servers import UNLOCKED, NotHereError, programs

in_ci = bool(os.environ.get("CI"))
failed = False
known = programs()
for program in [known[name] for name in sys.argv[1:] or ("versitygw", "vaultmini")]:
    try:
        program.build(lambda name=program.name: print(f"Building {name}, for tests; some minutes, once.", flush=True))  # type: ignore[misc]
    except NotHereError as error:
        failed = failed or program.name not in UNLOCKED
        print(error if in_ci and failed else f"{error}. Its tests will be skipped.", file=sys.stderr)
sys.exit(failed and in_ci)
