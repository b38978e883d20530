"""kill -9 at each step of a job, and at random moments: the dataset opens at the old version or at the new one, every
file of it decrypts to its source, and whoever takes up the job finishes it and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from datasets import HERE, MASTER, decrypted, leftovers, make_kms, read_tree, write_tree
from support import pattern, python_env, run_python

from ags_fast.dataset.ledger import Ledger
from ags_fast.jobs import encrypt_files, rekey_files, sweep, verify_files
from ags_fast.keys.kms import load_kms

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("pyarrow")

# ---------------------------------------------------------------------------------------------- every step

# Forks a child for each step of a job that touches storage, which dies before that step; then a child that takes up
# the job. Prints how many steps there were.
STEPS = """
import itertools, os, shutil, signal, sys
from pathlib import Path
from datasets import HERE, MASTER, decrypted, leftovers, read_tree, write_tree
from ags_fast.fs import NewFile, Store
from ags_fast.dataset.ledger import Ledger
from ags_fast.jobs import encrypt_files, rekey_files, sweep, verify_files
from ags_fast.keys.kms import load_kms

folder, op, kms = Path(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
src, dataset, first = folder / "src", folder / "dataset", folder / "first"
old = {"a": b"1" * 3000, "b/c": b"2", "b/d": b""}
new = {**old, "b/c": b"22", "e/f": b"3" * 1000}

def job(**options):
    options = {"kms": kms, "engine": HERE, "progress": False, **options}
    if op == "rekey":
        return rekey_files(dataset, **options)
    return encrypt_files(src, dataset, wrapping_key_id=MASTER, block_size=1024, overwrite=True, **options)

def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def dying(step):
    steps = itertools.count()

    def count():
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(function):
        def call(*args, **options):
            count()
            return function(*args, **options)
        return call

    for owner, name in ((Store, "create"), (Store, "delete"), (Store, "hold"), (Store, "sweep"), (NewFile, "publish")):
        setattr(owner, name, wrapped(getattr(owner, name)))
    for name in ("link", "replace", "unlink"):
        setattr(os, name, wrapped(getattr(os, name)))
    job().raise_for_failures()

if op != "create":
    write_tree(src, old)
    if child(lambda: encrypt_files(src, first, kms=kms, wrapping_key_id=MASTER, block_size=1024, engine=HERE)):
        sys.exit(1)
if op != "rekey":
    write_tree(src, new)
before, after = {"create": ({}, new), "encrypt": (old, new), "rekey": (old, old)}[op]
for step in itertools.count():
    shutil.rmtree(dataset, ignore_errors=True)
    if first.exists():
        shutil.copytree(first, dataset)
    code = child(lambda: dying(step))
    assert code in (0, -signal.SIGKILL), (step, code)
    try:
        found = decrypted(dataset, kms)
    except FileNotFoundError:
        assert op == "create" and step < 10, step
        found = {}
    assert found in (before, after), step
    if op != "create":
        assert decrypted(dataset, kms, version=1) == before
    assert child(lambda: job(resume="verify" if step % 2 else "length").raise_for_failures()) == 0, step
    assert decrypted(dataset, kms) == after, step
    assert leftovers(dataset, kms) == [] == os.listdir(dataset / "_ags/plans"), (step, leftovers(dataset, kms))
    swept = sweep(dataset, kms=kms).rows
    assert swept == [], (step, swept)  # whoever took it up has left nothing
    checked = verify_files(dataset, kms=kms, engine=HERE)
    assert checked.counts == {"ok": len(after), "skipped": 0, "failed": 0}, (step, checked.rows)
    if code == 0:
        break
assert read_tree(src) == (old if op == "rekey" else new)
print(step)
"""


@pytest.mark.more
@pytest.mark.parametrize("op", ["create", "encrypt", "rekey"])
@pytest.mark.timeout(300)
def test_every_step(tmp_path: Path, op: str) -> None:
    kms = make_kms(tmp_path)
    assert int(run_python(STEPS, tmp_path, op, repr(kms), timeout=280)) > 20


# ---------------------------------------------------------------------------------------------- random moments

# Runs jobs in children of its own that have no time to lose with imports, each with its workers in a process group.
SERVER = """
import os, sys
import pyarrow.parquet
from ags_fast.jobs import LocalEngine, encrypt_files, rekey_files

src, dataset, kms = sys.argv[1], sys.argv[2], eval(sys.argv[3])
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        options = {"kms": kms, "engine": LocalEngine(2), "progress": False, **eval(line)}
        if options.pop("op") == "rekey":
            rekey_files(dataset, **options)
        else:
            encrypt_files(src, dataset, wrapping_key_id="master", block_size=4096, overwrite=True, **options)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Jobs:
    """Starts jobs and kills them."""

    def __init__(self, *args: object) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, *map(str, args)],
            env=python_env(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.kill()
        self._server.communicate()

    def run(self, seconds: float | None, whole_group: bool, **options: object) -> int:
        """Kill it after so many seconds. Returns what it has come to: 0 if it was done before."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(repr(options) + "\n")
        self._server.stdin.flush()
        pid = int(self._server.stdout.readline())
        if seconds is not None:
            time.sleep(seconds)
            with contextlib.suppress(ProcessLookupError):  # it is done
                (os.killpg if whole_group else os.kill)(pid, signal.SIGKILL)
        return int(self._server.stdout.readline())


@pytest.fixture
def kms(tmp_path: Path) -> Iterator[dict[str, str]]:
    yield make_kms(tmp_path)
    assert [name for name in os.listdir(tmp_path) if name.endswith(".agstmp")] == []


@pytest.mark.parametrize("rounds", [pytest.param(20, id="quick"), pytest.param(200, id="200", marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_random_moments(tmp_path: Path, kms: dict[str, str], rounds: int) -> None:
    src, dataset = tmp_path / "src", tmp_path / "dataset"
    rng = random.Random()
    seed = rng.randrange(1 << 32)
    rng.seed(seed)
    tree = {f"{n % 3}/{n:02}": pattern(rng.randrange(60_000), n) for n in range(30)}
    write_tree(src, tree)
    killed = 0
    with Jobs(src, dataset, repr(kms)) as jobs:
        begun = time.monotonic()
        assert jobs.run(None, False, op="encrypt") == 0
        seconds = time.monotonic() - begun
        for n in range(rounds):
            old = dict(tree)
            op = rng.choice(["encrypt", "rekey"])
            if op == "encrypt":  # files that are new, and others that change
                tree[f"new/{n}"] = pattern(rng.randrange(30_000), n)
                for path in rng.sample(sorted(tree), 5):
                    tree[path] = pattern(rng.randrange(30_000), rng.randrange(1 << 30))
                write_tree(src, {path: data for path, data in tree.items() if old.get(path) != data})
            base = Ledger.open(dataset, load_kms(kms)).version_numbers()[-1]
            resume: dict[str, str] = {}
            for _ in range(rng.choice([1, 1, 1, 3])):  # and kill what takes it up, too
                code = jobs.run(rng.uniform(0, seconds), rng.random() < 0.7, op=op, **resume)
                assert code in (0, -signal.SIGKILL), (seed, n, code)
                killed += code != 0
                seconds *= 1.1 if code else 0.8  # of a run until its end: however busy the machine is, half are killed
                resume = {"resume": rng.choice(["length", "verify"])}
                found = decrypted(dataset, kms)
                assert found in (old, tree), (seed, n)
                number = Ledger.open(dataset, load_kms(kms)).version_numbers()[-1]
                assert number >= base, (seed, n)
                assert number > base or found == old, (seed, n)
                if code == 0:
                    break
            if code != 0:
                done = (
                    rekey_files(dataset, kms=kms, engine=HERE, progress=False, resume="length")
                    if op == "rekey"
                    else encrypt_files(
                        src, dataset, kms=kms, wrapping_key_id=MASTER, engine=HERE, block_size=4096, overwrite=True,
                        progress=False, resume="length",
                    )
                )  # fmt: skip
                assert done.failed == [], (seed, n, done.failed)
            assert decrypted(dataset, kms) == tree, (seed, n)
            if code != 0:  # whoever took it up has left nothing
                left = [name for name in leftovers(dataset, kms) if not name.startswith("_ags/chain/")]
                assert left == [] == os.listdir(dataset / "_ags/plans"), (seed, n, left)
            sweep(dataset, kms=kms)
            assert leftovers(dataset, kms) == [], (seed, n, leftovers(dataset, kms))
    checked = verify_files(dataset, kms=kms, engine=HERE, progress=False)
    assert checked.counts == {"ok": len(tree), "skipped": 0, "failed": 0}, (seed, checked.failed)
    assert read_tree(src) == tree
    assert killed >= rounds // 4
