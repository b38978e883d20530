"""A nightly task of Airflow, cron or Kubernetes: rotate what is due, remove what no version needs, verify, report.

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

KEEP = timedelta(days=30)
log = logging.getLogger("nightly_rotation")


def run(dataset: str, kms: Mapping[str, str]) -> bool:
    """Do the work of one night. Returns whether all is well."""
    jobs.sweep(dataset, kms=kms)  # what dead jobs left
    due = jobs.audit(dataset, kms=kms)["steps"]
    for step in due:
        log.info("due: %s, because %s", step["name"], ", ".join(map(str, step["about"])) or "of the policy")
    rotated = jobs.rotate(dataset, kms=kms, what="kek")
    expired = jobs.expire(dataset, kms=kms, keep=1, older_than=KEEP)
    verified = jobs.verify_files(dataset, kms=kms)
    log.info("pin to keep elsewhere: %s", verified.pin)
    return not (rotated.failed or expired.failed or verified.failed)


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
