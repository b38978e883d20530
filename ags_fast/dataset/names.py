"""The names of a dataset's objects and the paths of its files."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
import uuid

from ags_fast.errors import PolicyError

HIDDEN = "_ags/"
FORMATS = ("ags1", "parquet")  # of files that jobs write
VERSIONS = "_ags/versions/"
MANIFESTS = "_ags/manifests/"
PLANS = "_ags/plans/"
CHAIN = "_ags/chain/"
LISTS = "_ags/lists/"
LEFT = "left"  # in a plan's folder: the plan waits for another process to take it up
ATTEMPT = "attempt-"  # in a plan's folder: an attempt of a task has begun to write, and shows that it lives
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


def manifest_name(job_id: str) -> str:
    """Return the path of a new manifest. The job's id in the name identifies what a dead job leaves behind."""
    return f"{MANIFESTS}{job_id}-{uuid.uuid4()}.arrow.ags"


def is_manifest_of(path: str, job_id: str) -> bool:
    """Whether a job has written the manifest at a path."""
    return path.startswith(f"{MANIFESTS}{job_id}-")


def check_path(path: str) -> str:
    """Return a path from a manifest. Raises PolicyError unless it is relative and stays inside the dataset."""
    if "\0" in path or not NO_NAMES.isdisjoint(path.split("/")):
        raise PolicyError(f"{path!r} is not a path inside a dataset")
    return path


def folders_above(path: str) -> list[str]:
    """Return the paths of the folders that a path is in, the outermost first."""
    return [path[:at] for at, char in enumerate(path) if char == "/"]


JOB_ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]{12}")
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
