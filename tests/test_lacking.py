"""Weak file systems: each errno at each call of `os`, injected once, by the cheapest command that reaches the call.

What a file system may lack (`ags_fast.fs.lacking.CALLS`) changes no content and is one warning. All else fails.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import fcntl
import io
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, QUIET, read_tree, write_tree
from kms_clients import keystore
from support import flip, pattern

pytest.importorskip("pyarrow")

from ags_fast import cli
from ags_fast.fs import lacking
from ags_fast.fs.lacking import CALLS
from ags_fast.jobs import LocalEngine, decrypt_files, encrypt_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Site = tuple[str, str, str]  # module, function, call

ROOT = Path(lacking.__file__).parents[1]
# What asks no file system.
PURE = {"_exit", "cpu_count", "fsdecode", "fsencode", "fspath", "getgid", "getpid", "getuid", "major", "minor"}
PURE |= {"register_at_fork", "sched_getaffinity", "strerror", "umask", "uname", "urandom"}
PURPOSES = {  # of calls that mean what a file system may lack
    ("fs/below.py", "fsync_folder", "fsync"): "fsync of a folder",
    ("fs/new.py", "_usual_mode", "open"): "O_TMPFILE",
}
# Calls that no command of COMMANDS reaches.
ELSEWHERE = {
    "__main__.py": "standard streams",
    "avro/decoders.py": "a file in memory",
    "cli/config.py": "the configuration of whoever runs the command",
    "cli/kms.py": "the terminal",
    "cli/run.py": "standard streams",
    "cli/terminal.py": "standard streams",
    "files/source.py": "files that Python opened",
    "filesystem/changing.py": "files that fsspec opened",
    "filesystem/files.py": "folders beside those of a dataset",
    "filesystem/mounting.py": "FUSE",
    "iceberg/work/tasks.py": "files of Iceberg tables",
    "engines/processes.py": "pipes",
    "engines/start.py": "the interpreter",
    "engines/worker.py": "pipes",
    ("cli/files.py", "standard_input", "isatty"): "standard input",
    ("cli/stream.py", "_verify", "read"): "standard input",
    ("fs/below.py", "regular", "close"): "a pipe in the place of a file",
    ("fs/new.py", "remove_sidecar", "unlink"): "Hadoop's checksum of a Parquet file",
    ("fs/walk.py", "_sweep_beside", "listdir"): "after a job was interrupted",
    ("fs/walk.py", "_sweep_beside", "open"): "after a job was interrupted",
    ("keys/kms/keystore_file.py", "_try_lock", "close"): "another process has the lock",
}
# Where an error of the disk ends no command, and why that is right.
ANSWERED = {
    ("fs/local.py", "_delete", "unlink"): "the version is committed, and a sweep removes the plan",
    ("fs/local.py", "_remove_empty_folders", "listdir"): "the version is committed, and a sweep removes the folder",
    ("fs/local.py", "_remove_empty_folders", "rmdir"): "the version is committed, and a sweep removes the folder",
    ("fs/local.py", "_sync_folders", "open"): "the log is asked whether the plan is there",
    ("keys/kms/local.py", "_current", "stat"): "asks whether the keystore has changed: it is read again",
}
DANGER = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE)
ERRNOS = sorted({*DANGER, *(code for errnos, _ in CALLS.values() for code in errnos)})


@cache
def sites() -> frozenset[Site]:
    """Every call of `os` in ags_fast, and every reference to one."""
    found = set()
    for path in ROOT.rglob("*.py"):
        module = path.relative_to(ROOT).as_posix()

        def visit(node: ast.AST, function: str, module: str = module) -> None:
            for child in ast.iter_child_nodes(node):
                inner = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
                if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name):
                    value = getattr(os, child.attr, None) if child.value.id == "os" else None
                    if child.attr == "flock" or (callable(value) and not isinstance(value, type)):
                        found.add((module, function, child.attr))
                visit(child, inner)

        visit(ast.parse(path.read_text()), "<module>")
    return frozenset(found)


def test_every_call_is_in_the_table() -> None:
    calls = {call for _, _, call in sites()}
    assert calls - PURE - CALLS.keys() == set(), "what do file systems answer that lack it?"
    assert PURE - calls == set()
    assert PURE.isdisjoint(CALLS)
    assert set(PURPOSES) <= sites()
    for code in DANGER:
        assert not any(code in errnos for errnos, _ in CALLS.values())


# -------------------------------------------------------------------------------------------------------- commands

SECRET = "--keystore ks --key-file ks.key"
BAD = "stream decrypt bad.ags -o out --data-key-file key --untrusted-length"
LINK = f"encrypt src ds2 --links follow --delete-sources --wrapping-key-id {MASTER} {SECRET}"
EXITS = {BAD: 3, LINK: 1}  # other commands: 0
COMMANDS = [  # the cheapest first
    "config show",
    "stream inspect a.ags",
    "stream encrypt src/a -o new.ags --data-key-file key",
    "stream decrypt a.ags -o out --data-key-file key --untrusted-length",
    "stream decrypt a.ags -o out --data-key-file key --untrusted-length --no-preserve --fsync",
    "stream decrypt a.ags -o plain --data-key-file key --untrusted-length --overwrite",
    BAD,
    "keys create ks another --key-file ks.key",
    "keys init new --key-file new.key",
    f"ls ds {SECRET}",
    f"ls ds --pin-file pin {SECRET}",
    f"cat ds a {SECRET}",
    f"cp ds:a out {SECRET}",
    f"cp -r ds: copied {SECRET}",
    f"cp src/a ds:new {SECRET}",
    f"decrypt ds out {SECRET}",
    f"encrypt src ds2 --wrapping-key-id {MASTER} {SECRET}",
    LINK,
    f"encrypt src2 ds --overwrite --delete-sources {SECRET}",
    f"keys rotate ds {SECRET}",
    f"sweep ds --older-than 0 {SECRET}",
    f"sweep ds --older-than 1h {SECRET}",
]


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that each command begins with. All is done in this process."""
    home = write_tree(tmp_path / "begun", {"src/a": b"1", "src/b/large": pattern(200_000), "plain": b"1"})
    monkeypatch.setattr(LocalEngine, "runs_here", lambda *_: True)
    monkeypatch.chdir(home)
    keystore(home, MASTER, name="ks")
    (home / "key").write_bytes(bytes(range(16)))
    (home / "key").chmod(0o600)
    for line in (
        f"encrypt src ds --wrapping-key-id {MASTER} {SECRET}",
        "stream encrypt src/a -o a.ags --data-key-file key",
    ):
        assert cli.main(line.split()) == 0
    with contextlib.redirect_stdout(io.StringIO()) as pin:
        assert cli.main(f"pin ds {SECRET}".split()) == 0
    (home / "pin").write_text(pin.getvalue())
    (home / "src/0").symlink_to(home / "src/a")  # leads out of a copy
    left = {".ks.keystore.0123456789abcdef.agstmp": b"", "ds/.x.tag.0123456789abcdef.agstmp": b""}
    bad = flip((home / "a.ags").read_bytes(), -1)
    return write_tree(home, {"src2/a": b"other", "bad.ags": bad, **left})


class Run:
    """A command in a copy of `begun`. One call of `os`, the first at a site, fails with an errno."""

    def __init__(self, begun: Path, line: str, site: Site | None = None, code: int = 0) -> None:
        self.reached: Counter[Site] = Counter()
        self._site, self._code = site, code
        folder = begun.with_name("copy")
        shutil.copytree(begun, folder, symlinks=True)
        (folder / "src/in").symlink_to(folder / "src/b/large")
        os.chdir(folder)
        out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for module, call in {(fcntl, "flock")} | {
                (os, call) for call in CALLS if callable(getattr(os, call, None))
            }:
                patch.setattr(module, call, self._watched(call, getattr(module, call)))
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                self.exit = cli.main(line.split())
        out.seek(0)
        self.said = out.read() + err.getvalue()
        texts = [str(warning.message) for warning in told if issubclass(warning.category, UserWarning)]
        self.warnings = sum("left out" in text for text in (*texts, *err.getvalue().splitlines()))
        made = folder / "out"
        self.plain = made.read_bytes() if made.is_file() else read_tree(made)
        os.chdir(begun)
        shutil.rmtree(folder)

    def _watched(self, call: str, true: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            frame = sys._getframe(1)  # noqa: SLF001
            path = frame.f_code.co_filename
            if path.startswith(str(ROOT)):
                site = (os.path.relpath(path, ROOT), frame.f_code.co_name, call)
                self.reached[site] += 1
                if site == self._site and self.reached[site] == 1:
                    if call == "close":
                        true(*args, **options)
                    raise OSError(self._code, os.strerror(self._code))
            return true(*args, **options)

        return watched


def check(begun: Path, line: str, right: Run, site: Site, code: int) -> None:
    errnos, what = CALLS[PURPOSES.get(site, site[2])]
    run = Run(begun, line, site, code)
    where = f"{line}: {site} {errno.errorcode[code]}: exit {run.exit}, {run.said}"
    assert "Traceback" not in run.said, where
    if code in errnos:
        assert (run.exit, run.plain, run.warnings) == (right.exit, right.plain, bool(what)), where
    elif code in DANGER and site not in ANSWERED:
        assert (bool(run.exit), run.warnings) == (True, 0), where


@pytest.mark.parametrize(
    "codes",
    [(errno.EIO, errno.EPERM), *(pytest.param((code,), marks=pytest.mark.more) for code in ERRNOS)],
    ids=lambda codes: "-".join(errno.errorcode[code] for code in codes),
)
def test_each_errno_at_each_call(begun: Path, codes: Sequence[int]) -> None:
    reached: dict[Site, tuple[str, Run]] = {}
    for line in COMMANDS:
        right = Run(begun, line)
        assert (right.exit, right.warnings) == (EXITS.get(line, 0), 0), right.said
        for site in right.reached:
            reached.setdefault(site, (line, right))
    wanted = {site for site in sites() if site[2] in CALLS and ELSEWHERE.keys().isdisjoint((site, site[0]))}
    assert wanted - reached.keys() == set(), "which command reaches that?"
    for site, (line, right) in sorted(reached.items()):
        for code in codes:
            check(begun, line, right, site, code)


# ------------------------------------------------------------------------------------------------- times far away


@pytest.mark.parametrize("year", [1601, 1800, 1910, 1969, 2020, 2039, 2106, 2200, 2300, 2446, 9999])
@pytest.mark.parametrize("place", [None, "/dev/shm"])
def test_times_are_kept_or_told(tmp_path: Path, year: int, place: str | None) -> None:
    """A small file is written in another way than a large one. ext4 has fewer times than tmpfs."""
    if place is not None and not os.access(place, os.W_OK):
        pytest.skip(f"no {place}")
    with tempfile.TemporaryDirectory(dir=place) as folder, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        src, kms = (
            write_tree(Path(folder, "src"), {"small": b"1", "large": pattern(200_000)}),
            keystore(tmp_path, MASTER),
        )
        seconds = (datetime(year, 1, 2, tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1)
        for path in src.iterdir():
            os.utime(path, ns=(0, seconds * 10**9 + 500))
        true = (src / "small").stat().st_mtime_ns  # as far as the file system has such times
        encrypt_files(src, Path(folder, "ds"), kms=kms, wrapping_key_id=MASTER, **QUIET).raise_for_failures()
        done = decrypt_files(Path(folder, "ds"), tmp_path / "out", kms=kms, **QUIET)
        done.raise_for_failures()
        texts = [str(warning.message) for warning in told] + done.warnings
        for name in ("small", "large"):
            kept = (tmp_path / "out" / name).stat().st_mtime_ns
            assert (kept == true) != any(name in text for text in texts), (name, true, kept, texts)
            assert kept == true or place or abs(true) >= 1 << 63
