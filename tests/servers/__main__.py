"""usage: python -m servers [NAME...]

Builds these servers, which are written in Go, into the cache; without names, those of make test. Says what it does only
where there is something to do.
"""

from __future__ import annotations

import os
import sys

from servers import NotHereError, go_programs

in_ci = bool(os.environ.get("CI"))
failed = False
programs = go_programs()
for program in [programs[name] for name in sys.argv[1:] or ("versitygw", "vaultmini")]:
    try:
        program.build(lambda name=program.name: print(f"Building {name}, for tests; some minutes, once.", flush=True))  # type: ignore[misc]
    except NotHereError as error:
        failed = True
        print(error if in_ci else f"{error}. Its tests will be skipped.", file=sys.stderr)
sys.exit(failed and in_ci)
