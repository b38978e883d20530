"""kill -9 at any moment of encrypt_file, decrypt_file and reencrypt_file: at the path stands the old file or the new
one, whole; what may be left beside it is a temporary file that `sweep` knows and a living writer's is not.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
from typing import TYPE_CHECKING

import parquet_peers as peers
import pytest
from support import finish_python, run_python, start_python

from ags_fast import IntegrityError, parquet
from ags_fast.fs import SUFFIX
from ags_fast.parquet import Keys

if TYPE_CHECKING:
    from pathlib import Path

pa, pq = peers.pa, peers.pq
OLD, NEW = Keys(b"0123456789012345", {"a": b"1" * 24}), Keys(b"x" * 32, {"a": b"2" * 24})

WRITER = """
import os, sys
from ags_fast import parquet
from ags_fast.parquet import Keys
op, folder, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
old, new = Keys(b"0123456789012345", {"a": b"1" * 24}), Keys(b"x" * 32, {"a": b"2" * 24})
print("begins", flush=True)
n = 0
while True:
    if op == "encrypt":
        parquet.encrypt_file(folder + "/plain", folder + "/out", old, threads=threads)
    elif op == "decrypt":
        parquet.decrypt_file(folder + "/sealed", folder + "/out", old, threads=threads)
    else:  # over itself, from one key to the other and back
        parquet.reencrypt_file(folder + "/out", folder + "/out", old, new, same_size=n % 2 == 0, threads=threads)
        old, new = new, old
    n += 1
    if n % 50 == 0:
        print(n, flush=True)
"""


def data_of(file: bytes) -> bytes:
    return file[4 : len(file) - 8 - int.from_bytes(file[-8:-4], "little")]


@pytest.mark.parametrize("op", ["encrypt", "decrypt", "reencrypt"])
def test_killed_at_random(tmp_path: Path, op: str) -> None:
    """The writer does the same over and over: a kill falls into any step of it."""
    draw = random.Random(os.urandom(8))
    table = pa.table({name: pa.array([os.urandom(300) for _ in range(600)]) for name in "ab"})
    pq.write_table(table, tmp_path / "plain", row_group_size=200, use_dictionary=False)
    plain = (tmp_path / "plain").read_bytes()
    parquet.encrypt_file(tmp_path / "plain", tmp_path / "sealed", OLD)
    left = whole = 0
    for number in range(6):
        out = tmp_path / "out"
        if op == "reencrypt":
            parquet.encrypt_file(tmp_path / "plain", out, OLD)
        child = start_python(WRITER, op, tmp_path, 1 + number % 2)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "begins\n"
            # So many files are done, and one of them is half done.
            for _ in range(draw.randrange(2)):
                child.stdout.readline()
            os.sched_yield()
            spin = draw.randrange(200_000)
            while spin:
                spin -= 1
        finally:
            child.send_signal(signal.SIGKILL)
            child.communicate()
        rest = sorted(set(os.listdir(tmp_path)) - {"plain", "sealed", "out"})
        assert all(name.endswith(SUFFIX) and name.startswith(".out.") for name in rest), rest
        left += len(rest)
        if out.exists():
            whole += 1
            if op == "decrypt":
                assert data_of(out.read_bytes()) == data_of(plain)
            else:
                opened = 0
                for keys in (OLD, NEW):
                    back = bytearray()
                    try:
                        parquet.decrypt_file(out, back, keys)
                    except IntegrityError:
                        continue
                    assert data_of(bytes(back)) == data_of(plain)
                    opened += 1
                assert opened == 1
        for name in rest:  # not locked: its writer is dead
            with (tmp_path / name).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (tmp_path / name).unlink()
        out.unlink(missing_ok=True)
    assert whole or left


STEPS = """
import os, sys, signal
from ags_fast import fs, parquet
from ags_fast.fs import new as new_files
from ags_fast.parquet import Keys
op, folder, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
old, new = Keys(b"0123456789012345", {"a": b"1" * 24}), Keys(b"x" * 32, {"a": b"2" * 24})
count = 0
def dies(call):
    def wrapped(*args, **kwargs):
        global count
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        return call(*args, **kwargs)
    return wrapped
for owner, name in ((os, "open"), (os, "replace"), (os, "close"), (os, "write"), (os, "fchmod"), (os, "unlink"),
                    (fs.NewFile, "write"), (fs.NewFile, "publish"), (new_files, "lock")):
    setattr(owner, name, dies(getattr(owner, name)))
if op == "encrypt":
    parquet.encrypt_file(folder + "/plain", folder + "/out", old, threads=1)
elif op == "decrypt":
    parquet.decrypt_file(folder + "/sealed", folder + "/out", old, threads=1)
else:
    parquet.reencrypt_file(folder + "/out", folder + "/out", old, new, same_size=op == "same_size", threads=1)
print("steps", count)
"""

FORKS = """
import os, shutil, sys
from pathlib import Path
from ags_fast import AgsError, parquet
from ags_fast.parquet import Keys
source, op, folder = sys.argv[1:4]
old, new = Keys(b"0123456789012345", {"a": b"1" * 24}), Keys(b"x" * 32, {"a": b"2" * 24})
data_of = lambda file: file[4:len(file) - 8 - int.from_bytes(file[-8:-4], "little")]
import ags_fast.parquet.transcode, ags_fast.fs
steps = 0
while True:
    if op not in ("encrypt", "decrypt"):
        shutil.copy(folder + "/sealed", folder + "/out")
    pid = os.fork()
    if pid == 0:
        sys.argv = ["", op, folder, str(steps)]
        code = 0
        try:
            exec(compile(source, "steps", "exec"), {"__name__": "steps"})
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            code = 3
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    names = sorted(set(os.listdir(folder)) - {"plain", "sealed"})
    out = folder + "/out"
    content = "none"
    if os.path.exists(out):
        data = Path(out).read_bytes()
        content = "broken"
        if op == "decrypt":
            if data_of(data) == data_of(Path(folder + "/plain").read_bytes()):
                content = "plain"
        else:
            for name, keys in (("old", old), ("new", new)):
                try:
                    parquet.verify(data, keys, threads=1)
                    content = name
                except AgsError:
                    pass
    print(steps, os.waitstatus_to_exitcode(status), content, *names, flush=True)
    for name in names:
        os.unlink(folder + "/" + name)
    if os.waitstatus_to_exitcode(status) != -9:
        break
    steps += 1
"""


@pytest.mark.parametrize("op", ["encrypt", "decrypt", "reencrypt", "same_size"])
def test_killed_before_each_step(tmp_path: Path, op: str) -> None:
    """Before every call that touches storage."""
    table = pa.table({name: pa.array([os.urandom(300) for _ in range(40)]) for name in "ab"})
    pq.write_table(table, tmp_path / "plain", row_group_size=20, use_dictionary=False)
    parquet.encrypt_file(tmp_path / "plain", tmp_path / "sealed", OLD)
    lines = [
        line.split() for line in run_python(FORKS, STEPS, op, tmp_path, timeout=100).splitlines() if line[0].isdigit()
    ]
    assert len(lines) > 8, lines
    killed, last = lines[:-1], lines[-1]
    before = "none" if op in ("encrypt", "decrypt") else "old"
    after = {"encrypt": "old", "decrypt": "plain"}.get(op, "new")
    assert all(line[1] == "-9" for line in killed), lines
    assert last[1] == "0", lines
    contents = [line[2] for line in killed]
    assert set(contents) <= {before, after}
    assert before in contents
    assert last[2] == after
    assert contents == sorted(contents, key=[before, after].index)  # and never back
    assert any(name.endswith(SUFFIX) for line in killed for name in line[3:])  # what a dead writer leaves
    for line in lines:
        assert all(name == "out" or (name.startswith(".out.") and name.endswith(SUFFIX)) for name in line[3:]), line


def test_a_fork_does_not_publish(tmp_path: Path) -> None:
    """A child that is forked while a file is written can neither complete nor remove it."""
    program = """
    import os, sys
    from ags_fast import parquet
    from ags_fast.parquet import Keys
    folder = sys.argv[1]
    def progress(nbytes):
        pid = os.fork()
        if pid == 0:
            sys.exit(0)  # with all that Python does at its end
        os.waitpid(pid, 0)
    parquet.encrypt_file(folder + "/plain", folder + "/out", Keys(b"0123456789012345"), progress=progress, threads=1)
    """
    pq.write_table(pa.table({"a": range(1000)}), tmp_path / "plain")
    finish_python(start_python(program, tmp_path))
    back = bytearray()
    parquet.decrypt_file(tmp_path / "out", back, Keys(b"0123456789012345"))
    assert data_of(bytes(back)) == data_of((tmp_path / "plain").read_bytes())
    assert sorted(os.listdir(tmp_path)) == ["out", "plain"]
