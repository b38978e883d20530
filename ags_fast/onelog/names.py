"""The names of a dataset's objects. No name is used twice, except numbers of the log (rule 1)."""

from __future__ import annotations

import re
import secrets

from ags_fast.dataset.names import JOB_ID, job_in_name

LOG = "_ags/log/"
TABLES = "_ags/tables/"
BLOCKS = "_ags/chain/"
PLANS = "_ags/plans/"
FOLDER = 1000  # numbers in a folder of the log: one page of a listing has them all
ENTRY = re.compile(r"_ags/log/([0-9]{7})/([0-9]{10})")
OURS = re.compile(rf"_ags/(?:tables|chain)/({JOB_ID.pattern})-[0-9a-f]+")
PLAN = re.compile(rf"_ags/plans/({JOB_ID.pattern})/(.+)")
FURTHER = re.compile(rf"plan-({JOB_ID.pattern})")
LOCK = "lock"  # beside a plan: locked while its process lives, where the storage has locks
ALIVE = "alive"  # beside a plan: written again and again
LEFT = "left"  # beside the plan of a transaction that waits for another process


def entry_path(number: int) -> str:
    """Return the path of an entry of the log. Paths sort as their numbers do."""
    return f"{LOG}{number // FOLDER:07d}/{number:010d}"


def entry_number(path: str) -> int:
    """Return the number of the entry at a path; 0 if the path is not that of an entry."""
    match = ENTRY.fullmatch(path)
    return int(match[2]) if match and path == entry_path(int(match[2])) else 0


def last_in_folder(number: int) -> str:
    """Return the path of the last entry that is in one folder of the log with this entry."""
    return entry_path(number // FOLDER * FOLDER + FOLDER - 1)


def table_path(job_id: str) -> str:
    """Return the path of a new table."""
    return f"{TABLES}{job_id}-{secrets.token_hex(8)}"


def block_path(job_id: str) -> str:
    """Return the path of a new block of digests."""
    return f"{BLOCKS}{job_id}-{secrets.token_hex(8)}"


def plan_path(plan_id: str, of: str | None = None) -> str:
    """Return the path of a plan. of: the job whose further plan it is; None: the plan is the job's own."""
    return f"{PLANS}{plan_id}/plan" + ("" if of is None else f"-{of}")


def beside_plan(plan_id: str, name: str) -> str:
    """Return the path of an object beside a plan."""
    return f"{PLANS}{plan_id}/{name}"


def is_plan(path: str) -> bool:
    """Whether a path is that of a plan."""
    match = PLAN.fullmatch(path)
    return match is not None and (match[2] == "plan" or FURTHER.fullmatch(match[2]) is not None)


def job_of(path: str) -> str | None:
    """Return the id of the job that made an object; None: no job of ags_fast made it."""
    if match := OURS.fullmatch(path) or PLAN.fullmatch(path):
        return match[1]
    return None if path.startswith("_ags/") else job_in_name(path)
