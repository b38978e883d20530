"""Every object of a dataset flipped, cut, swapped, deleted, replaced: an error of ags_fast or a failed row that names
it, and never another plaintext."""

from __future__ import annotations

import itertools
import random
import re
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from datasets import HERE, MASTER, make_kms, read_tree, write_tree
from support import flip, pattern

from ags_fast import AgsError, IntegrityError, PolicyError
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.open_jobs import open_plans
from ags_fast.dataset.plan import Plan
from ags_fast.jobs import decrypt_files, encrypt_files, open_file, rekey_files, sweep, verify_files
from ags_fast.keys.kms import load_kms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("pyarrow")

TREE = {"a": pattern(3000), "b/c": b"small", "b/d": pattern(1024, 1), "empty": b""}
MORE = {"e": pattern(2000, 2), "f": b"f"}


class StopError(Exception):
    pass


class Target:
    """A dataset of two versions and an open plan, and another of the same kind, all of whose objects may be changed."""

    def __init__(self, folder: Path) -> None:
        self.kms = make_kms(folder, keys=(MASTER, "other"))
        self.folder = folder / "dataset"
        self.other = folder / "other"
        for dataset in (self.other, self.folder):
            self.src = write_tree(folder / f"src of {dataset.name}", TREE)
            self.encrypt(dataset)
            rekey_files(dataset, kms=self.kms, wrapping_key_id="other", paths="b/*", engine=HERE).raise_for_failures()
            write_tree(self.src, MORE)
            self.begin(dataset)
            for path in MORE:
                (self.src / path).unlink()
        self.first = read_tree(self.folder)
        self.second = read_tree(self.other)
        (self.job,) = open_plans(Ledger.open(self.folder, load_kms(self.kms)).store)

    def encrypt(self, dataset: Path, **options: Any) -> None:
        encrypt_files(
            self.src, dataset, kms=self.kms, wrapping_key_id=MASTER, block_size=1024, engine=HERE, **options
        ).raise_for_failures()

    def begin(self, dataset: Path) -> None:
        def stop(rows: list[Any]) -> None:
            raise StopError

        with pytest.raises(StopError):
            self.encrypt(dataset, progress=stop)

    def paths(self, kind: str) -> list[str]:
        """The objects of a kind: keys, versions, manifests, plans (documents), tables (of plans), data."""

        def of(path: str) -> str:
            top, _, rest = path.partition("/")
            if top != "_ags":
                return "data"
            name = rest.partition("/")[0]
            return "tables" if name == "plans" and path.endswith(".ags") else name

        return sorted(path for path in self.first if of(path) == kind and not path.endswith("/lock"))

    def write(self, path: str, data: bytes | None) -> None:
        if data is None:
            (self.folder / path).unlink()
        else:
            (self.folder / path).write_bytes(data)

    def restore(self) -> None:
        shutil.rmtree(self.folder)
        write_tree(self.folder, self.first)

    # What a reader can do. Each raises or returns; what it returns is right.

    def read_versions(self) -> None:
        opened = Ledger.open(self.folder, load_kms(self.kms))
        for number in opened.version_numbers():
            version = opened.current(version=number)
            assert version is not None
            assert version.number == number
            assert version.files == len(TREE)
            assert sorted(entry.path for entry in opened.entries(version)) == sorted(TREE)

    def read_plan(self) -> None:
        opened = Ledger.open(self.folder, load_kms(self.kms))
        for job_id in open_plans(opened.store):
            plan = Plan.load(opened, job_id)
            assert plan is not None
            assert sorted(entry.path for entry in plan.entries()) == sorted(MORE)

    def read_files(self) -> None:
        for version in Ledger.open(self.folder, load_kms(self.kms)).version_numbers():
            checked = verify_files(self.folder, kms=self.kms, version=version, engine=HERE, progress=False)
            checked.raise_for_failures()
        for path in TREE:
            self.read_file(path)

    def read_file(self, path: str) -> None:
        with open_file(self.folder, path, kms=self.kms) as reader:
            assert reader.read() == TREE[path]

    READERS = (read_versions, read_plan, read_files)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("tamper"))


@pytest.fixture
def target(made: Target) -> Iterator[Target]:
    yield made
    made.restore()


def errors(target: Target, *readers: Callable[[Target], None]) -> list[AgsError]:
    """What readers raise. Anything that is not an error of ags_fast is a failure of the test."""
    found = []
    for reader in readers:
        try:
            reader(target)
        except AgsError as error:
            found.append(error)
    return found


def named(found: list[AgsError], path: str) -> bool:
    return bool(found) and any(path in str(error) for error in found)


def readers_of(kind: str) -> tuple[Callable[[Target], None], ...]:
    if kind in ("plans", "tables"):
        return (Target.read_plan,)
    return (Target.read_files,) if kind == "data" else (Target.read_versions,)


def is_read(target: Target, kind: str, path: str) -> bool:
    """Of keys and documents of plans, only the newest is read; of data, what the open job has written is not."""
    if kind == "data":
        return path.removesuffix(".ags") not in MORE
    return kind not in ("keys", "plans") or path == target.paths(kind)[-1]


KINDS = ("keys", "versions", "manifests", "plans", "tables", "data")


def test_the_target(target: Target) -> None:
    assert {kind: len(target.paths(kind)) for kind in KINDS} == {
        "keys": 4,
        "versions": 2,
        "manifests": 2,  # the commit has merged two of them
        "plans": 2,
        "tables": 1,
        "data": 7,
    }
    assert errors(target, *Target.READERS) == []


def places(data: bytes, count: int, rng: random.Random) -> list[int]:
    """Those of an object's bytes that are changed: its edges, and a number of the others."""
    edges = {n for n in (*range(12), *range(len(data) - 17, len(data))) if 0 <= n < len(data)}
    return sorted(edges | set(rng.sample(range(len(data)), min(count, len(data)))))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "data"])
@pytest.mark.parametrize("count", [100, pytest.param(1 << 20, marks=pytest.mark.more)], ids=["many", "every"])
def test_flips(target: Target, kind: str, count: int) -> None:
    """One bit of many bytes, or of every byte."""
    rng = random.Random(kind)
    for path in target.paths(kind):
        read = is_read(target, kind, path)
        data = bytearray(target.first[path])
        for n in places(target.first[path], count if read else 0, rng):
            bit = 1 << rng.randrange(8)
            data[n] ^= bit
            target.write(path, bytes(data))
            found = errors(target, *readers_of(kind))
            assert named(found, path) == read, (path, n, bit, found)
            data[n] ^= bit
        target.write(path, bytes(data))


@pytest.mark.parametrize(
    ("of", "into", "why"),
    [
        (b'"state":"active"', b'"state":"actiwe"', "a key is active or retired, not 'actiwe'"),
        (b'([AEIMQUYcgkosw048])="', lambda found: bytes([found[1][0] + 1]) + b'="', "not base64 as it is written"),
        (b'"AQE', b'"AQI', "no version 2"),  # of the master key, in the wrapped KEK
    ],
    ids=["state", "base64", "version"],
)
def test_lies_in_keys(target: Target, of: bytes, into: Any, why: str) -> None:
    """What a flipped bit makes of the KEK that seals the document, which is read before the seal is checked."""
    path = target.paths("keys")[-1]
    changed, count = re.subn(of, into, target.first[path], count=1)
    assert count == 1
    target.write(path, changed)
    (error,) = errors(target, Target.read_versions)
    assert path in str(error)
    assert why in f"{error} {error.__cause__}"


@pytest.mark.more
def test_flips_of_data(target: Target) -> None:
    """Of all files at once: each is reported, by the job and by its reader."""
    rng = random.Random(0)
    changes = {path: places(target.first[path], 60, rng) for path in target.paths("data")}
    for i in range(max(map(len, changes.values()))):
        changed = {path: at[i] for path, at in changes.items() if i < len(at)}
        for path, n in changed.items():
            target.write(path, flip(target.first[path], 8 * n + rng.randrange(8)))
        wanted = {path for path in changed if is_read(target, "data", path)}
        failed = set()
        for version in (1, 2):
            checked = verify_files(target.folder, kms=target.kms, version=version, engine=HERE, progress=False)
            newest = {row.src.removeprefix(f"{target.folder}/") for row in checked.rows if row.error}
            failed |= newest
        assert failed == wanted, changed
        found = errors(target, *(partial(Target.read_file, path=path) for path in TREE))
        assert len(found) == len(newest), changed
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
            assert named(found, path) == is_read(target, kind, path), (path, len(change), len(data), found)
        target.write(path, data)


@pytest.mark.parametrize("kind", KINDS)
def test_swaps(target: Target, kind: str) -> None:
    """Any object for any other of its kind, of the same dataset, older or newer, or of another one."""
    ours = target.paths(kind)
    theirs = [path for path in target.second if path.split("/")[1:2] == ours[0].split("/")[1:2] or kind == "data"]
    for path in ours:
        others = [target.first[other] for other in ours if other != path]
        others += [target.second[other] for other in theirs if not other.endswith("lock")]
        for other in others:
            if other == target.first[path]:
                continue
            target.write(path, other)
            found = errors(target, *readers_of(kind))
            # Another dataset's keys are right in themselves: what is wrong is that nothing here is sealed with them.
            name = "_ags/keys" if kind == "keys" else path
            assert named(found, name) == is_read(target, kind, path), (path, found)
        target.write(path, target.first[path])


@pytest.mark.parametrize("kind", KINDS)
def test_deletions(target: Target, kind: str) -> None:
    for path in target.paths(kind):
        target.write(path, None)
        found = errors(target, *Target.READERS)
        if kind in ("keys", "versions", "plans"):
            # An older one is the newest then. What it does not know may fail, and nothing is wrong plaintext.
            assert kind == "keys" or not found
        else:
            assert named(found, path) == is_read(target, kind, path), (path, found)
        target.write(path, target.first[path])


def test_the_newest_taken_away(target: Target) -> None:
    target.write("_ags/versions/00000002.json", None)
    assert verify_files(target.folder, kms=target.kms, engine=HERE).version == 1
    for job in (verify_files, lambda folder, **options: decrypt_files(folder, target.src / "x", **options)):
        with pytest.raises(PolicyError, match="min_version=2"):
            job(target.folder, kms=target.kms, min_version=2)
    target.write("_ags/versions/00000002.json", target.first["_ags/versions/00000001.json"])  # or replaced by an older
    with pytest.raises(IntegrityError, match=r"versions/00000002\.json"):
        verify_files(target.folder, kms=target.kms)
    target.write("_ags/versions/00000002.json", target.first["_ags/versions/00000002.json"])
    for path in target.paths("keys"):
        target.write(path, None)
    with pytest.raises(IntegrityError, match="_ags/keys"):
        verify_files(target.folder, kms=target.kms)


def test_a_version_under_another_number(target: Target) -> None:
    target.write("_ags/versions/00000003.json", target.first["_ags/versions/00000001.json"])
    with pytest.raises(IntegrityError, match=r"versions/00000003\.json"):
        verify_files(target.folder, kms=target.kms)


@pytest.mark.more
@pytest.mark.parametrize("kind", KINDS)
def test_jobs_that_write_over_what_was_damaged(target: Target, kind: str) -> None:
    """They say so, and make nothing worse: with the object back in its place, everything is there."""
    jobs: list[Callable[[], Any]] = [
        lambda: target.encrypt(target.folder),
        lambda: target.encrypt(target.folder, resume="length"),
        lambda: target.encrypt(target.folder, resume="verify"),
        lambda: rekey_files(target.folder, kms=target.kms, engine=HERE),
        lambda: rekey_files(target.folder, kms=target.kms, engine=HERE, resume="length"),
        lambda: sweep(target.folder, kms=target.kms),
        lambda: decrypt_files(target.folder, target.src.parent / "out", kms=target.kms, engine=HERE, overwrite=True),
    ]
    for path, change, (n, job) in itertools.product(target.paths(kind), ("flip", "cut", "gone"), enumerate(jobs)):
        data = target.first[path]
        target.write(
            path, {"flip": bytes([data[0] ^ 1]) + data[1:], "cut": data[: len(data) // 2], "gone": None}[change]
        )
        try:
            job()
        except AgsError:
            pass
        out = target.src.parent / "out"
        for name, found in (read_tree(out) if out.exists() else {}).items():
            assert found == TREE[name], (path, change, n)
        # But what only a version that is gone had named may have been swept, and the plan may have ended. Old keys
        # that come back after a job has made others are refused: see test_histories.py.
        if kind not in ("plans", "tables") and (kind, change) not in (("versions", "gone"), ("keys", "gone")):
            target.write(path, data)
            Target.read_files(target)
        target.restore()
