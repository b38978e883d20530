"""The names of a dataset's objects and the paths of its files."""

from __future__ import annotations

import hashlib
import re
import secrets
import time

from ags_fast.errors import PolicyError
from ags_fast.keys.stores.base import JOB_ID

HIDDEN = "_ags/"
FORMATS = ("ags1", "parquet")  # of files
NAME_NBYTES = 255  # the longest name that file systems take
NO_NAMES = frozenset(("", ".", ".."))


def object_name(path: str, *marks: object, format: str = "ags1") -> str:
    """Return the name of the object that holds `path`: the path, the marks, and a suffix.

    An AGS1 stream is named ``x.avro.mark.ags``. A Parquet file keeps its name and its suffix: ``x.mark.parquet``. A
    name that is longer than file systems take is shortened.
    """
    folder, slash, name = path.rpartition("/")
    suffix = ".ags"
    if format == "parquet":
        stem, dot, last = name.rpartition(".")
        name, suffix = (stem, dot + last) if stem and len(last) < 16 else (name, "")
    tail = "".join(f".{mark}" for mark in marks) + suffix
    raw = name.encode("utf-8", "surrogateescape")
    more = len(tail.encode("utf-8", "surrogateescape"))
    if len(raw) + more > NAME_NBYTES:
        digest = hashlib.sha256(raw).hexdigest()[:16]
        name = f"{raw[: NAME_NBYTES - more - len(digest) - 1].decode(errors='ignore')}.{digest}"
    return folder + slash + name + tail


def check_path(path: str) -> str:
    """Return a path from a manifest. Raises PolicyError unless it is relative and stays inside the dataset."""
    if "\0" in path or not NO_NAMES.isdisjoint(path.split("/")):
        raise PolicyError(f"{path!r} is not a path inside a dataset")
    return path


def folders_above(path: str) -> list[str]:
    """Return the paths of the folders that a path is in, the outermost first."""
    return [path[:at] for at, char in enumerate(path) if char == "/"]


JOB_MARK = re.compile(rf"\.({JOB_ID.pattern})(?=[.-]|$)")  # in the name of an object


def written_name(path: str, job_id: str, format: str) -> str:
    """Return a new name for the object that holds `path`, with the job's id, unique to this attempt."""
    return object_name(path, f"{job_id}-{secrets.token_hex(4)}", format=format)


def job_in_name(file: str) -> str | None:
    """Return the id of the job in an object's name; None without one."""
    found = JOB_MARK.search(file.rpartition("/")[2])
    return found[1] if found else None


def new_job_id() -> str:
    """Return a new job id. It names the plan, temporary files and, if a name is taken, files. Ids sort by time."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(6)}"


# ---- the objects of the log

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


def above_folder(number: int) -> str:
    """Return what sorts after all that is in the folder of an entry, and before other folders of newer entries."""
    return f"{LOG}{number // FOLDER:07d}0"


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
