"""Every object of a dataset flipped, cut, swapped, deleted, replaced: an error of ags_fast or a failed row that names
it, and never another plaintext. Nobody who lacks the keys can do better."""

from __future__ import annotations

import itertools
import random
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from datasets import (
    HERE,
    MASTER,
    QUIET,
    add_tree,
    decrypted,
    encrypt,
    leftovers,
    make_kms,
    read_tree,
    version_of,
    write_tree,
)
from support import flip, pattern

pytest.importorskip("pyarrow")
pytest.importorskip("msgspec")

from ags_fast import AgsError, Dataset, FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.dataset import chain, keks, reach
from ags_fast.dataset.access import Access
from ags_fast.dataset.names import TABLES, entry_path, job_of
from ags_fast.dataset.plan import read_files, read_plan
from ags_fast.dataset.policy import Policy
from ags_fast.dataset.snapshot import Snapshot
from ags_fast.jobs import (
    JobError,
    decrypt_files,
    expire,
    open_file,
    rekey_files,
    remove_files,
    rotate,
    set_policy,
    sweep,
    verify_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ags_fast.dataset.entry import Entry
    from ags_fast.dataset.log import Log

TREE = {"a": pattern(3000), "b/c": b"small", "b/d": pattern(1024, 1), "empty": b""}
MORE = {"e": pattern(2000, 2), "f": b"f"}
ENTRIES = 5  # create, policy, encrypt, rekey, policy


class StopError(Exception):
    pass


class Target:
    """A dataset of some versions and an open job, and another of the same kind, all of whose objects may be changed."""

    def __init__(self, folder: Path) -> None:
        self.kms = make_kms(folder, keys=(MASTER, "other"))
        self.folder = folder / "dataset"
        self.other = folder / "other"
        for dataset in (self.other, self.folder):
            self.src = write_tree(folder / f"src of {dataset.name}", TREE)
            Dataset.create(dataset, kms=self.kms, wrapping_key_id=MASTER)
            set_policy(dataset, Policy(kek_scope="partition"), kms=self.kms)
            self.encrypt(dataset)
            rekey_files(dataset, kms=self.kms, wrapping_key_id="other", paths="b/*", **QUIET).raise_for_failures()
            set_policy(dataset, Policy(), kms=self.kms)
            write_tree(self.src, MORE)
            self.begin(dataset)
            for path in MORE:
                (self.src / path).unlink()
        self.first = read_tree(self.folder)
        self.second = read_tree(self.other)
        (self.job,) = self.log().plans()

    def encrypt(self, dataset: Path, **options: Any) -> None:
        encrypt(self.src, dataset, self.kms, block_size=1024, **options).raise_for_failures()

    def begin(self, dataset: Path) -> None:
        def stop(rows: list[Any]) -> None:
            raise StopError

        with pytest.raises(StopError):
            self.encrypt(dataset, progress=stop)

    def log(self) -> Log:
        return Access.of(self.folder, self.kms).log()

    def kind_of(self, path: str) -> str:
        """Of an object: log, tables (of kept versions), chain, plans, parts (beside plans, and their tables), data."""
        top, _, rest = path.partition("/")
        if top != "_ags":
            return "data"
        if path.startswith(TABLES) and job_of(path) == self.job:
            return "parts"
        kind = rest.partition("/")[0]
        return "parts" if kind == "plans" and not path.endswith("/plan") else kind

    def paths(self, kind: str) -> list[str]:
        """The objects of a kind."""
        return sorted(
            path for path in self.first if self.kind_of(path) == kind and not path.endswith(("lock", "alive"))
        )

    def theirs(self, kind: str) -> list[str]:
        """The objects of the other dataset that are of this kind, as far as names show."""
        (job,) = Access.of(self.other, self.kms).log().plans()
        mine, self.job = self.job, job
        try:
            return sorted(path for path in self.second if self.kind_of(path) == kind and not path.endswith("/lock"))
        finally:
            self.job = mine

    def write(self, path: str, data: bytes | None) -> None:
        if data is None:
            (self.folder / path).unlink()
        else:
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_bytes(data)

    def restore(self) -> None:
        shutil.rmtree(self.folder)
        write_tree(self.folder, self.first)

    # What a reader can do. Each raises or returns; what it returns is right.

    def read_log(self) -> None:
        log = self.log()
        log.look(log.kept)

    def read_versions(self) -> None:
        log = self.log()

        def read(head: Entry) -> None:
            for entry in log.kept(head):
                assert set(rows_of(log, entry)) <= {*TREE, *MORE}
                assert all(key.key_id == key_id for key_id, key in entry.keys.items())

        log.look(read)
        head = log.head()
        assert {*rows_of(log, head)} >= {*TREE}

    def read_plan(self) -> None:
        log = self.log()

        def read(head: Entry) -> None:
            for job_id in log.plans():
                plan = read_plan(log, job_id, head)
                assert plan is not None
                rows, _ = read_files(log, job_id, head, log.envelope(head, plan.new))
                assert {row.path for row in rows} <= {*MORE}

        log.look(read)

    def read_files(self) -> None:
        for version in Dataset.open(self.folder, kms=self.kms).versions():
            if version.files:
                checked = verify_files(self.folder, kms=self.kms, version=version.number, **QUIET)
                checked.raise_for_failures()
        for path in TREE:
            self.read_file(path)

    def read_file(self, path: str) -> None:
        with open_file(self.folder, path, kms=self.kms) as reader:
            assert reader.read() == TREE[path]

    READERS = (read_versions, read_plan, read_files)


def rows_of(log: Log, entry: Entry) -> dict[str, str]:
    return {row.path: row.file for row in Snapshot(log, entry).files()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with pytest.MonkeyPatch.context() as patch:  # so that few versions have blocks of digests and tables of KEKs
        patch.setattr(chain, "NEAR", 1)
        patch.setattr(chain, "BLOCK", 2)
        patch.setattr(keks, "INLINE", 1)
        yield Target(tmp_path_factory.mktemp("tamper"))


@pytest.fixture
def target(made: Target) -> Iterator[Target]:
    yield made
    made.restore()


def errors(target: Target, *readers: Callable[[Target], None]) -> list[AgsError]:
    """What readers raise. Anything that is not an error of ags_fast about objects or keys is a failure of the test."""
    found: list[AgsError] = []
    classes: set[str | None] = set()
    for reader in readers:
        try:
            reader(target)
        except (IntegrityError, FormatError, KeyAccessError) as error:
            found.append(error)
        except JobError as error:
            found.append(error)
            classes |= {row.error_class for row in error.result.failed}
    assert classes <= {"IntegrityError", "FormatError"}
    return found


def named(found: list[AgsError], path: str) -> bool:
    """Whether an error names the object, or its file, or the KMS does not know what is said to have wrapped its KEK."""
    file = path.partition(".20")[0]
    return any(
        path in str(error) or f"of {file} " in str(error) or isinstance(error, KeyAccessError) for error in found
    )


def readers_of(kind: str) -> tuple[Callable[[Target], None], ...]:
    if kind in ("plans", "parts"):
        return (Target.read_plan,)
    if kind in ("log", "chain"):
        return (Target.read_log,)
    return (Target.read_files,) if kind == "data" else (Target.read_versions,)


def is_read(target: Target, kind: str, path: str) -> bool:
    """Of data, what the open job has written is not read. Beside a plan, what does not open is as if not there."""
    return kind != "parts" and (kind != "data" or job_of(path) != target.job)


KINDS = ("log", "tables", "chain", "plans", "parts", "data")


def test_the_target(target: Target) -> None:
    assert {kind: len(target.paths(kind)) for kind in KINDS} == {
        "log": ENTRIES,
        "tables": 3,  # one of KEKs, one of files, and one that the rekeying has made of it
        "chain": 1,
        "plans": 1,
        "parts": 2,
        "data": 7,
    }
    assert errors(target, *Target.READERS) == []
    head = target.log().head()
    assert head.number == ENTRIES
    assert {table.path for table in head.key_tables} | {table.path for table in head.files} < {*target.paths("tables")}
    assert {*target.first} == {path for kind in KINDS for path in target.paths(kind)} | {
        f"_ags/plans/{target.job}/lock"
    }


def places(data: bytes, count: int, rng: random.Random) -> list[int]:
    """Those of an object's bytes that are changed: its edges, and a number of the others."""
    edges = {n for n in (*range(12), *range(len(data) - 17, len(data))) if 0 <= n < len(data)}
    return sorted(edges | set(rng.sample(range(len(data)), min(count, len(data)))))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "data"])
@pytest.mark.parametrize("count", [60, pytest.param(1 << 20, marks=pytest.mark.more)], ids=["many", "every"])
def test_flips(target: Target, kind: str, count: int) -> None:
    """One bit of many bytes, or of every byte."""
    rng = random.Random(kind)
    for path in target.paths(kind):
        data = bytearray(target.first[path])
        sealer = data.find(b'"sealer"'), data.find(b',"wrapped":"', data.find(b"}"))
        for n in places(target.first[path], count, rng):
            bit = 1 << rng.randrange(8)
            data[n] ^= bit
            target.write(path, bytes(data))
            found = errors(target, *readers_of(kind))
            # The head has the sealer of a plan, too, and is believed rather than the plan.
            if kind != "plans" or not sealer[0] < n < sealer[1]:
                assert named(found, path) == is_read(target, kind, path), (path, n, bit, found)
            data[n] ^= bit
        target.write(path, bytes(data))


@pytest.mark.parametrize(
    ("of", "into", "why"),
    [
        (rb'"state":"active"', b'"state":"actiwe"', "a key is active or retired, not 'actiwe'"),
        (rb'"AQE', b'"AQI', "no version 2"),  # of the master key, in the wrapped KEK
        (rb'"created_ms":1', b'"created_ms":01', "malformed"),
        (rb',"nonce"', b', "nonce"', "damaged"),  # the same to a parser
    ],
    ids=["state", "version", "number", "space"],
)
def test_lies_about_the_sealer(target: Target, of: bytes, into: bytes, why: str) -> None:
    """What may be made of the KEK that seals an entry, which is read before the seal is checked."""
    path = target.paths("log")[-1]
    changed, count = re.subn(of, into, target.first[path], count=1)
    assert count == 1
    target.write(path, changed)
    (error,) = errors(target, Target.read_versions)
    assert named([error], path)
    assert why in f"{error} {error.__cause__}"


@pytest.mark.more
def test_flips_of_data(target: Target) -> None:
    """Of all files at once: each is reported, by the job and by its reader."""
    rng = random.Random(0)
    changes = {path: places(target.first[path], 60, rng) for path in target.paths("data")}
    log = target.log()
    newest = {*rows_of(log, log.head()).values()}
    for i in range(max(map(len, changes.values()))):
        changed = {path: at[i] for path, at in changes.items() if i < len(at)}
        for path, n in changed.items():
            target.write(path, flip(target.first[path], 8 * n + rng.randrange(8)))
        failed = set()
        for version in (3, ENTRIES):
            checked = verify_files(target.folder, kms=target.kms, version=version, **QUIET)
            files = rows_of(log, log.entry(version))
            failed |= {files[row.src] for row in checked.failed}
        assert failed == {path for path in changed if is_read(target, "data", path)}, changed
        for path, file in rows_of(log, log.head()).items():
            if file in changed:
                with pytest.raises((IntegrityError, FormatError)):
                    target.read_file(path)
            else:
                target.read_file(path)
        assert newest
        for path in changed:
            target.write(path, target.first[path])


@pytest.mark.parametrize("kind", KINDS)
def test_cuts(target: Target, kind: str) -> None:
    for path in target.paths(kind):
        data = target.first[path]
        changes = [
            data[:n] for n in {0, 1, 7, 8, 9, len(data) // 2, len(data) - 17, len(data) - 1} if 0 <= n < len(data)
        ]
        for change in [*changes, data + b"\0", data + b"\n", data + data, bytes(len(data)), bytes(1 << 20)]:
            target.write(path, change)
            found = errors(target, *readers_of(kind))
            if kind == "tables" and change.startswith(data):
                assert not found  # a reader knows where a table ends
            else:
                assert named(found, path) == is_read(target, kind, path), (path, len(change), len(data), found)
        target.write(path, data)


@pytest.mark.parametrize("kind", KINDS)
def test_swaps(target: Target, kind: str) -> None:
    """Any object for any other of its kind, of the same dataset, older or newer, or of another one."""
    ours = target.paths(kind)
    for path in ours:
        others = [target.first[other] for other in ours if other != path]
        for other in [*others, *(target.second[name] for name in target.theirs(kind))]:
            if other == target.first[path]:
                continue
            target.write(path, other)
            found = errors(target, *readers_of(kind))
            # Another dataset's head is right in itself: what is wrong is that the older entries are not its own.
            name = "_ags/log" if kind == "log" else path
            assert named(found, name) == is_read(target, kind, path), (path, found)
        target.write(path, target.first[path])


@pytest.mark.parametrize("kind", KINDS)
def test_deletions(target: Target, kind: str) -> None:
    for path in target.paths(kind):
        target.write(path, None)
        found = errors(target, *Target.READERS)
        if path == target.paths("log")[-1] or kind == "plans":
            assert not found  # an older one is the newest then, which pins and `min_version` find; the job is over
        else:
            assert named(found, path) == is_read(target, kind, path), (path, found)
        target.write(path, target.first[path])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plans"])
def test_objects_that_are_no_files(target: Target, kind: str) -> None:
    """A folder in the place of an object. An entry after the newest one is not there."""
    for path in target.paths(kind)[: -1 if kind == "log" else None]:
        target.write(path, None)
        (target.folder / path).mkdir()
        found = errors(target, *readers_of(kind))
        assert named(found, path) == is_read(target, kind, path), (path, found)
        (target.folder / path).rmdir()
        target.write(path, target.first[path])


def test_the_newest_taken_away(target: Target) -> None:
    newest, before = reversed(target.paths("log")[-2:])
    pin = target.log().head().pin
    target.write(newest, None)
    assert verify_files(target.folder, kms=target.kms, engine=HERE).version == ENTRIES - 1
    for job in (verify_files, lambda folder, **options: decrypt_files(folder, target.src / "x", **options)):
        with pytest.raises(PolicyError, match=f"min_version={ENTRIES}"):
            job(target.folder, kms=target.kms, min_version=ENTRIES)
        with pytest.raises(IntegrityError, match="pin"):
            job(target.folder, kms=target.kms, pin=pin)
    target.write(newest, target.first[before])  # or replaced by an older one
    with pytest.raises(IntegrityError, match=newest):
        verify_files(target.folder, kms=target.kms)
    for path in target.paths("log"):
        target.write(path, None) if path != newest else None
    target.write(newest, None)
    with pytest.raises(IntegrityError, match="is gone: restore _ags/log/"):
        verify_files(target.folder, kms=target.kms)


def test_a_version_under_another_number(target: Target) -> None:
    log = target.log()
    log.head()
    for number in (ENTRIES + 1, 999, 1000, 10**10 - 1):
        forged = f"_ags/log/{number // 1000:07d}/{number:010d}"
        target.write(forged, target.first[target.paths("log")[0]])
        for reader in (log, target.log()):
            with pytest.raises(IntegrityError, match=forged):
                reader.head()
        target.write(forged, None)
    target.write("_ags/log/0000000/0000001000", b"")  # which is no name of an entry
    assert log.head().number == ENTRIES
    assert errors(target, *Target.READERS) == []


def test_another_dataset_in_its_place(target: Target) -> None:
    """Its log, or all of it: who has a pin, or has read the dataset before, sees that."""
    log = target.log()
    pin = log.head().pin
    for path in target.paths("log"):
        target.write(path, None)
    for path in target.theirs("log"):
        target.write(path, target.second[path])
    assert errors(target, Target.read_versions)  # its tables are missing
    for path, data in target.second.items():
        target.write(path, data)
    assert errors(target, Target.read_versions) == []
    with pytest.raises(IntegrityError):
        Access.of(target.folder, target.kms, pin=pin).open()
    rekey_files(target.folder, kms=target.kms, **QUIET).raise_for_failures()
    with pytest.raises(IntegrityError):
        log.head()


@pytest.mark.more
@pytest.mark.parametrize("kind", KINDS)
def test_jobs_that_write_over_what_was_damaged(target: Target, kind: str) -> None:
    """They say so, and make nothing worse: with the object back in its place, everything is there."""
    out = target.src.parent / "out"
    jobs: list[Callable[[], Any]] = [
        lambda: target.encrypt(target.folder),
        lambda: target.encrypt(target.folder, resume="length"),
        lambda: target.encrypt(target.folder, resume="verify"),
        lambda: rekey_files(target.folder, kms=target.kms, **QUIET),
        lambda: rekey_files(target.folder, kms=target.kms, resume="length", **QUIET),
        lambda: rotate(target.folder, kms=target.kms, what="kek", progress=False),
        lambda: expire(target.folder, kms=target.kms, keep=1, force=True),
        lambda: sweep(target.folder, kms=target.kms),
        lambda: decrypt_files(target.folder, out, kms=target.kms, overwrite=True, **QUIET),
    ]
    for path, change, (n, job) in itertools.product(target.paths(kind), ("flip", "cut", "gone"), enumerate(jobs)):
        data = target.first[path]
        target.write(
            path, {"flip": bytes([data[0] ^ 1]) + data[1:], "cut": data[: len(data) // 2], "gone": None}[change]
        )
        try:
            job()
        except (IntegrityError, FormatError, KeyAccessError):
            pass
        for name, found in (read_tree(out) if out.exists() else {}).items():
            assert found == TREE[name], (path, change, n)
        # But a job may have made another entry in the place of the newest one, if that was gone.
        if kind != "plans" and not (path == target.paths("log")[-1] and change == "gone"):
            target.write(path, data)
            Target.read_versions(target)
            Target.read_files(target)
        target.restore()


@pytest.mark.parametrize("change", ["flip", "cut"])
@pytest.mark.parametrize("kind", ["log", "tables"])
def test_what_is_expired_keeps_nobody_from_cleaning_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, change: str
) -> None:
    """An expiry dies before it deletes, and what it leaves is damaged: a sweep finds all the same."""
    kms = make_kms(tmp_path)
    dataset = tmp_path / "dataset"
    add_tree(dataset, kms, TREE)
    remove_files(dataset, "b/*", kms=kms)
    (table,) = version_of(dataset, kms, 2).entry.files
    with monkeypatch.context() as patch:
        patch.setattr(reach, "clean", lambda log, head: [])
        expire(dataset, kms=kms, keep=1, force=True)
    damaged = dataset / (table.path if kind == "tables" else entry_path(2))
    data = damaged.read_bytes()
    damaged.write_bytes(flip(data, 8 * (len(data) - 20)) if change == "flip" else data[:40])
    expire(dataset, kms=kms, keep=1, force=True).raise_for_failures()
    add_tree(dataset, kms, MORE)
    sweep(dataset, kms=kms).raise_for_failures()
    assert leftovers(dataset, kms) == []
    assert not damaged.exists()
    assert decrypted(dataset, kms) == {**MORE, "a": TREE["a"], "empty": b""}
