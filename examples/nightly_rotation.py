"""A nightly task of Airflow, cron or Kubernetes: do what is due, and nothing else; verify a share; report.

python examples/nightly_rotation.py DATASET --kms encryption.kms-type=... [--kms NAME=VALUE ...]

The exit code is 1 if a file failed. Killed at any moment, the task of the next night finishes the work.
"""

from __future__ import annotations

import argparse
import logging
from datetime import timedelta
from typing import TYPE_CHECKING

from ags_fast import jobs

if TYPE_CHECKING:
    from collections.abc import Mapping

SHARE = 0.05  # of the files, each night others: all of them in some 20 nights
log = logging.getLogger("nightly_rotation")


def run(dataset: str, kms: Mapping[str, str]) -> bool:
    """Do the work of one night. Returns whether all is well."""
    done = []
    for step in jobs.audit(dataset, kms=kms)["steps"]:  # such as sweep, rotate, expire: what `ags-fast maintain` does
        log.info("due: %s (%s)", step["name"], ", ".join(map(str, step["about"])) or "by the policy")
        arguments = dict(step["arguments"])
        if "older_than" in arguments:
            arguments["older_than"] = timedelta(days=arguments["older_than"])
        done.append(getattr(jobs, step["function"])(dataset, kms=kms, **arguments))
    done.append(jobs.verify_files(dataset, kms=kms, sample=SHARE))
    log.info("pin to keep elsewhere: %s", done[-1].pin)
    return not any(result.failed for result in done)


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("--kms", action="append", required=True, metavar="NAME=VALUE")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    if not run(args.dataset, dict(option.split("=", 1) for option in args.kms)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
