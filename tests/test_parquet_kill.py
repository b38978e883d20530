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
from parquet_files import data_of
from programs import parquets  # needs pyarrow
from programs.parquets import NEW, OLD
from support import program, run_python, start_python

from ags_fast import IntegrityError, parquet
from ags_fast.fs import SUFFIX
from ags_fast.parquet import Keys

if TYPE_CHECKING:
    from pathlib import Path

pa, pq = peers.pa, peers.pq


def decrypted(path: Path, keys: Keys) -> bytes | None:
    """None if these are not its keys."""
    back = bytearray()
    try:
        parquet.decrypt_file(path, back, keys)
    except IntegrityError:
        return None
    return bytes(back)


def remove_dead(path: Path) -> None:
    """It is not locked, for its writer is dead."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    path.unlink()


@pytest.mark.more
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
        child = start_python(program(parquets.convert_on, op, tmp_path, 1 + number % 2))
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "begins\n"
            # So many files are done, and one of them is half done: in every second pair of rounds the first is whole.
            for _ in range(number // 2 % 2):
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
                opened = [back for keys in (OLD, NEW) if (back := decrypted(out, keys)) is not None]
                assert list(map(data_of, opened)) == [data_of(plain)]
        for name in rest:
            remove_dead(tmp_path / name)
        out.unlink(missing_ok=True)
    assert whole or left


@pytest.mark.parametrize("op", ["encrypt", "decrypt", "reencrypt", "same_size"])
def test_killed_before_each_step(tmp_path: Path, op: str) -> None:
    """Before every call that touches storage."""
    table = pa.table({name: pa.array([os.urandom(300) for _ in range(40)]) for name in "ab"})
    pq.write_table(table, tmp_path / "plain", row_group_size=20, use_dictionary=False)
    parquet.encrypt_file(tmp_path / "plain", tmp_path / "sealed", OLD)
    out = run_python(program(parquets.kill_convert_at_steps, op, tmp_path), timeout=100)
    lines = [line.split() for line in out.splitlines()]
    assert len(lines) > 8, lines
    killed, last = lines[:-1], lines[-1]
    before = "none" if op in ("encrypt", "decrypt") else "old"
    after = {"encrypt": "old", "decrypt": "plain"}.get(op, "new")
    contents = [line[1] for line in killed]
    assert set(contents) <= {before, after}
    assert before in contents
    assert last[:2] == ["True", after]
    assert contents == sorted(contents, key=[before, after].index)  # and never back
    assert any(name.endswith(SUFFIX) for line in killed for name in line[2:])  # what a dead writer leaves
    for line in lines:
        assert all(name == "out" or (name.startswith(".out.") and name.endswith(SUFFIX)) for name in line[2:]), line


def test_a_fork_does_not_publish(tmp_path: Path) -> None:
    """A child that is forked while a file is written can neither complete nor remove it."""
    pq.write_table(pa.table({"a": range(1000)}), tmp_path / "plain")
    run_python(program(parquets.fork_while_encrypting, tmp_path))
    back = bytearray()
    parquet.decrypt_file(tmp_path / "out", back, Keys(b"0123456789012345"))
    assert data_of(bytes(back)) == data_of((tmp_path / "plain").read_bytes())
    assert sorted(os.listdir(tmp_path)) == ["out", "plain"]
