"""A KMS client for tests of what workers do when they die: it tells who calls, and kills or delays its own process."""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ags_fast.keys.envelope import binding
from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = "deadly.folder"
SECONDS = 600.0  # longer than a test may take
KEK_NBYTES = 32


class DeadlyKms(local.LocalKms):
    """A keystore whose every call is a line in `calls`, and which obeys `rules.json`, both in one folder.

    With single wrap a file's DEK is unwrapped when its temporary file is there, and nothing is in it yet.
    """

    provider = "deadly"

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        key = super().unwrap_key(wrapped, wrapping_key_id)
        folder = Path(self.properties[FOLDER])
        rules = json.loads((folder / "rules.json").read_bytes())
        if os.getpid() in rules["spared"]:
            return key
        file = rules["files"].get(key[-32:].hex())  # of single wrap: what the DEK is bound to
        if file is None and len(key) > KEK_NBYTES:
            file = _path_of_caller()
        before = _note(folder / "calls", f"{os.getpid()} {file}")
        _note(folder / "threads", str(_threads_of_caller()))
        if rules["weak"]:
            _be_weak()
        if str(file) in rules["shout"]:
            raise RuntimeError(f"{key!r} {key.hex()} {base64.b64encode(key).decode()}")
        if file in rules["kill"] and sum(line.endswith(f" {file}") for line in before) < rules["kill"][file]:
            if not rules["kill_after"]:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Timer(rules["kill_after"], os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(rules["wait"])
        if _is_slowed(rules):
            _note(folder / "slowed", f"{os.getpid()} {file}")
            time.sleep(SECONDS)
        return key


def _be_weak() -> None:
    """The next time that this process sets a time, its file system cannot."""
    own = os.utime

    def utime(*args: Any, **options: Any) -> None:
        os.utime = own
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    os.utime = utime


def _caller() -> dict[str, Any]:
    """What the job's worker, which calls us, has been told; {} if nothing of a job does."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "run_file":  # type: ignore[redundant-expr]
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_locals if frame is not None else {}  # type: ignore[redundant-expr]


def _threads_of_caller() -> int:
    caller = _caller()
    return caller["context"].threads if caller else -1


def _path_of_caller() -> str | None:
    """The path of the file that the job's worker is at: the name of its object is not known before."""
    entry = getattr(_caller().get("task"), "entry", None)
    return None if entry is None else str(entry.path)


def _is_slowed(rules: Mapping[str, Any]) -> bool:
    """Whether this is the one attempt that hangs: the first of one of Spark's tasks."""
    from pyspark import TaskContext

    task = TaskContext.get()
    return task is not None and (task.partitionId(), task.attemptNumber()) == (rules["slow_partition"], 0)


def _note(path: Path, line: str) -> list[str]:
    """Append a line; returns those before it, of whatever process."""
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        before = file.read().splitlines()
        file.write(line + "\n")
    return before


class Rules:
    """The other side: makes the keystore, and says what is to happen. The process that makes it is spared."""

    def __init__(self, folder: Path, *, passphrase: bool = False) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "key").touch(0o600)
        (folder / "key").write_bytes(os.urandom(16).hex().encode() if passphrase else os.urandom(32))
        self.kms = {
            "encryption.kms-impl": "deadly_kms:DeadlyKms",
            "kms.local.path": str(folder / "keystore.json"),
            f"kms.local.{'passphrase' if passphrase else 'key'}-file": str(folder / "key"),
            FOLDER: str(folder),
        }
        local.create_keystore(self.kms)
        local.create_key(self.kms, "master")
        self.set()

    def set(
        self,
        *,
        dataset_id: str = "",
        files: tuple[str, ...] = (),
        kill: Mapping[str, int] | None = None,
        kill_after: float = 0.0,
        wait: float = 0.0,
        slow_partition: int | None = None,
        spared: tuple[int, ...] = (),
        shout: tuple[str, ...] = (),
        weak: bool = False,
    ) -> None:
        """Begin anew. files: objects of the dataset that are told apart; of jobs, files are told apart by their paths.
        kill: how often each kills its process, after so many seconds. wait: with every key. slow_partition: of Spark,
        whose first attempt never ends. spared: other processes than this one to which nothing happens. shout: files of
        which the client raises the key in clear; "None": those of double wrap, too. weak: once, no time can be set."""
        kill = kill or {}
        named = {hashlib.sha256(binding(dataset_id, "dek", file)).hexdigest(): file for file in files}
        rules = {"spared": [os.getpid(), *spared], "files": named, "kill": kill, "kill_after": kill_after, "wait": wait}
        rules |= {"shout": shout, "slow_partition": slow_partition, "weak": weak}
        new = self.folder / "new"
        new.write_text(json.dumps(rules))
        new.replace(self.folder / "rules.json")
        (self.folder / "calls").unlink(missing_ok=True)

    def calls(self) -> list[tuple[int, str]]:
        """Who asked, and for which file: a process id, and a name or "None"."""
        try:
            lines = (self.folder / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(int(pid), file) for pid, _, file in (line.partition(" ") for line in lines)]

    def threads(self) -> list[int]:
        """For each call, the threads that the file's worker may use."""
        return [int(line) for line in (self.folder / "threads").read_text().split()]
