"""kill -9 at each step of a rotation or an expiry, and at random moments: every version that is there can be read, the
same call finishes what was begun, and nothing is left of it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from datasets import MASTER, make_kms
from support import run_python

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("pyarrow")

# What both programs need: jobs by their names, children, and reading.
COMMON = """
import itertools, os, random, shutil, signal, sys, time
from pathlib import Path
from datasets import HERE, MASTER, decrypted, leftovers, read_tree, write_tree
from ags_fast import AgsError, IntegrityError, PolicyError
from ags_fast.fs import NewFile, Store
from ags_fast.dataset.ledger import Ledger
from ags_fast.jobs import Policy, encrypt_files, expire, rekey_files, rotate, rotation, sweep, verify_files
from ags_fast.keys.kms import load_kms, local

folder, kms, there = Path(sys.argv[1]), eval(sys.argv[2]), eval(sys.argv[3])
dataset = folder / "dataset"
rotation.BATCH = 1  # each KEK is a change of the key store, as if there were thousands
quiet = {"engine": HERE, "progress": False}

def encrypt(src, dataset, kms=kms, **options):
    try:
        encrypt_files(src, dataset, kms=kms, wrapping_key_id=MASTER, **{**quiet, **options}).raise_for_failures()
    except PolicyError:  # a rotation has left that key
        encrypt_files(src, dataset, kms=kms, wrapping_key_id="other", **{**quiet, **options}).raise_for_failures()

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
    return pid

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def opens(kms):
    try:
        return Ledger.open(dataset, load_kms(kms)) is not None
    except AgsError:
        return False
"""

# Forks a child for each step that touches storage, which dies before that step; then a child that does the same again.
STEPS = (
    COMMON
    + """
op, first_step, stride = sys.argv[4], int(sys.argv[5]), int(sys.argv[6])
base = folder / "base"
tree = {"a/0": b"0", "a/1": b"1" * 3000, "b/2": b"", "b/3": b"3" * 500}
more = {"b/4": b"4", "c/5": b"5" * 1500}
write_tree(folder / "src", tree)
write_tree(folder / "more", more)
single = op in ("single", "double-wrap")
encrypt(folder / "src", base, double_wrap=not single, policy=Policy(kek_scope="partition"))
encrypt(folder / "more", base, double_wrap=not single)
if op in ("expire", "force"):
    rekey_files(base, kms=kms, paths="a/*", **quiet).raise_for_failures()
    rotate(base, kms=kms).raise_for_failures()
    rotate(base, kms=kms, what="mek", wrapping_key_id="other").raise_for_failures()
local.rotate_key(kms, MASTER)
local.rotate_key(kms, "other")
everything = {**tree, **more}
files = {path: data for path, data in read_tree(base).items() if not path.startswith("_ags/")}
newest = Ledger.open(base, load_kms(kms)).version_numbers()[-1]
before = {entry.key_id for entry in Ledger.open(base, load_kms(kms)).keys.list()}

def job():
    if op == "expire":
        expire(dataset, kms=kms)
    elif op == "force":
        expire(dataset, kms=kms, force=True)
    elif op == "forced":
        done = rotate(dataset, kms=kms, force_expire=True)
        done.raise_for_failures()
        done.expired.raise_for_failures()
    elif op == "move":
        if not opens(there):  # else it was done, but for the plan
            rotate(dataset, kms=kms, what="mek", new_kms=there, wrapping_key_id="third").raise_for_failures()
    else:
        what = {"single": "kek"}.get(op, op)
        rotate(dataset, kms=kms, what=what).raise_for_failures()

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

    owners = [(Store, name) for name in ("create", "put", "delete", "hold", "sweep", "remove_folder")]
    for owner, name in (*owners, (NewFile, "publish"), (os, "link"), (os, "replace"), (os, "unlink")):
        setattr(owner, name, wrapped(getattr(owner, name)))
    job()

for done, step in enumerate(itertools.count(first_step, stride)):
    shutil.rmtree(dataset, ignore_errors=True)
    shutil.copytree(base, dataset)
    code = ended(child(lambda: dying(step)))
    assert code in (0, -signal.SIGKILL), (step, code)
    now = there if op == "move" and opens(there) else kms
    for number in Ledger.open(dataset, load_kms(now)).version_numbers():
        assert decrypted(dataset, now, version=number) == (tree if number == 1 else everything), (step, number)
    assert ended(child(job)) == 0, step
    now = there if op == "move" else kms
    if op == "move":  # which nobody takes up, if it was done but for its plan
        sweep(dataset, kms=now)
    assert leftovers(dataset, now) == [] == os.listdir(dataset / "_ags/plans"), (step, leftovers(dataset, now))
    swept = sweep(dataset, kms=now).rows
    assert swept == [], (step, swept)  # whoever took it up has left nothing
    opened = Ledger.open(dataset, load_kms(now))
    numbers = opened.version_numbers()
    for number in numbers:
        assert decrypted(dataset, now, version=number) == (tree if number == 1 else everything), (step, number)
    assert leftovers(dataset, now) == [], (step, leftovers(dataset, now))
    kept = {path: data for path, data in read_tree(dataset).items() if not path.startswith("_ags/")}
    head = opened.current()
    active = {entry.key_id for entry in opened.keys.list("active")}
    client = load_kms(now)
    if op in ("expire", "force", "forced"):
        assert numbers == [head.number] and head.number >= newest, (step, numbers)
        assert kept == {entry.file: files[entry.file] for entry in opened.entries(head)}, step
        found = read_tree(dataset).items()
        found = read_tree(dataset).items()
        documents = [path for path, data in found if path.startswith("_ags/keys/") and b'"auth"' in data]
        assert len(documents) == 1, (step, documents)
        assert op == "expire" or not opened.keys.list("retired"), step
    else:
        assert kept == files, step
    if op in ("kek", "single", "double-wrap", "forced"):
        for entry in opened.entries(head):
            assert entry.key_ids() <= active, step
            assert entry.key_id not in before, step
            assert opened.keys.get(entry.key_id).double_wrap == (op != "single"), step
        assert {ref.key_id for ref in head.manifests} <= active, step
    if op in ("mek", "move"):
        for entry in opened.keys.list():
            assert entry.wrapping_key_id == ("third" if op == "move" else MASTER), step
            assert client.key_version(entry.wrapped) == ("1" if op == "move" else "2"), step
    checked = verify_files(dataset, kms=now, **quiet)
    assert checked.counts == {"ok": len(everything), "skipped": 0, "failed": 0}, (step, checked.rows)
    if code == 0:
        break
print(done, step)
"""
)

FEW = ("mek", "move")  # change the key store, and write no plan
OPS = ["single", "kek", "mek", "move", "double-wrap", "expire", "force", "forced"]


def stepped(folder: Path, op: str, first: int, stride: int) -> tuple[int, int]:
    """How many steps a job was killed before, and a number above that of all its steps."""
    kms, there = make_kms(folder, keys=(MASTER, "other")), make_kms(folder, name="there", keys=("third",))
    out = run_python(STEPS, folder, repr(kms), repr(there), op, first, stride, timeout=280)
    killed, steps = map(int, out.split())
    return killed, steps


@pytest.mark.more
@pytest.mark.parametrize("op", OPS)
@pytest.mark.timeout(300)
def test_some_steps(tmp_path: Path, op: str) -> None:
    killed, _ = stepped(tmp_path, op, OPS.index(op), 4 if op in FEW else 13)
    assert killed >= 1


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.timeout(300)
def test_every_step(tmp_path: Path, op: str) -> None:
    killed, steps = stepped(tmp_path, op, 0, 1)
    assert killed == steps > (4 if op in FEW else 20)


# Children do one job after another, and are killed at some moment, while this process reads all the time.
MOMENTS = (
    COMMON
    + """
wanted, seed = int(sys.argv[4]), int(sys.argv[5])
rng = random.Random(seed)
tree = {f"{n % 3}/{n}": os.urandom(rng.randrange(3000)) for n in range(8)}
write_tree(folder / "src", tree)
encrypt(folder / "src", dataset, policy=Policy(kek_scope="partition", keep=4))
masters = ["master", "other"]
pair = [kms, there]  # where the KEKs are, and where they can go
for properties in pair:
    for master in masters:
        local.rotate_key(properties, master)
seconds = {}

def read(*allowed):
    # What is there now. A version that goes while it is read makes way for a newer one, and a KMS for the other.
    while True:
        number = None
        try:
            number = Ledger.open(dataset, load_kms(pair[0])).version_numbers()[-1]
            found = decrypted(dataset, pair[0])
        except (AgsError, FileNotFoundError):
            if opens(pair[1]):
                return
            if number is None or Ledger.open(dataset, load_kms(pair[0])).version_numbers()[-1] == number:
                raise
            continue
        assert found in allowed, sorted(found)
        return

def job(op, n):
    here, other = pair
    common = {"kms": here, "progress": False}
    if op == "append":
        encrypt(folder / f"src {n}", dataset, kms=here, double_wrap=n % 3 > 0, resume="verify")
    elif op == "rekey":
        rekey_files(dataset, kms=here, engine=HERE, progress=False, paths="0/*", resume="length").raise_for_failures()
    elif op == "kek":
        rotate(dataset, **common, wrapping_key_id=masters[n % 2]).raise_for_failures()
    elif op == "mek":
        rotate(dataset, **common, what="mek").raise_for_failures()
    elif op == "double-wrap":
        rotate(dataset, **common, what="double-wrap").raise_for_failures()
    elif op == "expire":
        expire(dataset, kms=here, keep=1 + n % 2).raise_for_failures()
    elif op == "force":
        rotate(dataset, **common, force_expire=True).raise_for_failures()
    elif op == "move":
        if opens(here):
            rotate(dataset, **common, what="double-wrap", force_expire=True).raise_for_failures()
            expire(dataset, kms=here, force=True)
            rotate(dataset, **common, what="mek", new_kms=other).raise_for_failures()

killed = done = 0
while killed < wanted:
    op = rng.choice(["append", "rekey", "kek", "mek", "double-wrap", "expire", "force", "move"])
    n = done = done + 1
    after = dict(tree)
    if op == "append":
        new = {f"{m % 3}/{n} {m}": b"%d %d" % (n, m) for m in range(2)}
        write_tree(folder / f"src {n}", new)
        after |= new
    if op == "mek":
        for master in masters:
            local.rotate_key(pair[0], master)
    for attempt in range(rng.choice([1, 1, 1, 3])):  # and what takes it up is killed, too
        begun = time.monotonic()
        pid = child(lambda: job(op, n))
        moment = begun + rng.uniform(0, seconds.get(op, 0.2))
        while time.monotonic() < moment:
            read(tree, after)
        os.kill(pid, signal.SIGKILL)
        code = ended(pid)
        assert code in (0, -signal.SIGKILL), (seed, n, op, code)
        killed += code != 0
        seconds[op] = seconds.get(op, 0.2) * (1.1 if code else 0.8)  # half of them are killed, however busy it is here
        if op == "move" and opens(pair[1]):
            pair.reverse()
            break
        read(tree, after)
        if code == 0:
            break
    assert ended(child(lambda: job(op, n))) == 0 or op == "move", (seed, n, op)
    if op == "move" and opens(pair[1]):
        pair.reverse()
    tree = after
    read(tree)
    if len(tree) > 30:  # it would get slower and slower
        shutil.rmtree(dataset)
        tree = {path: data for path, data in tree.items() if rng.random() < 0.3}
        shutil.rmtree(folder / "src")
        encrypt(write_tree(folder / "src", tree), dataset, kms=pair[0], policy=Policy(kek_scope="partition", keep=4))
    if n % 5 == 0:
        swept = sweep(dataset, kms=pair[0]).rows
        opened = Ledger.open(dataset, load_kms(pair[0]))
        for number in opened.version_numbers():
            decrypted(dataset, pair[0], version=number)
        assert leftovers(dataset, pair[0]) == [], (seed, n, op)
checked = verify_files(dataset, kms=pair[0], **quiet)
assert checked.counts == {"ok": len(tree), "skipped": 0, "failed": 0}, (seed, checked.rows)
expire(dataset, kms=pair[0], force=True)
sweep(dataset, kms=pair[0])
opened = Ledger.open(dataset, load_kms(pair[0]))
assert opened.keys.list("retired") == [] and leftovers(dataset, pair[0]) == [], seed
read(tree)
print(killed)
"""
)


@pytest.mark.parametrize("kills", [pytest.param(5, id="quick"), pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_random_moments(tmp_path: Path, kills: int) -> None:
    kms, there = (make_kms(tmp_path, name=name, keys=(MASTER, "other")) for name in ("kms", "there"))
    seed = random.SystemRandom().randrange(1 << 30)
    out = run_python(MOMENTS, tmp_path, repr(kms), repr(there), kills, seed, timeout=880)
    assert int(out) >= kills
