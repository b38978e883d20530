"""Histories of datasets, taken apart and put together by somebody who can write to the storage: pins notice it, and
where the documents do not fit each other, so does who has no pin."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from datasets import HERE, MASTER, decrypted, make_kms, read_tree, write_tree
from support import pattern

from ags_fast import AgsError, FormatError, IntegrityError, PolicyError
from ags_fast.dataset.ledger import Ledger
from ags_fast.fs import Store
from ags_fast.fs.numbered import TOMBSTONE
from ags_fast.jobs import (
    JobResult,
    Policy,
    audit,
    copy_file,
    decrypt_files,
    encrypt_files,
    expire,
    key_status,
    open_file,
    rekey_files,
    remove_files,
    rotate,
    set_policy,
    sweep,
    verify_files,
)
from ags_fast.keys.chain import BLOCK, BLOCKS, NEAR, Chain, ChainObjects, sha256
from ags_fast.keys.kms import load_kms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("pyarrow")


class World:
    """A dataset whose versions were copied one after another, as an attacker could."""

    def __init__(self, folder: Path, versions: int = 5) -> None:
        self.folder = folder
        self.kms = make_kms(folder)
        self.src = folder / "src"
        self.dataset = folder / "dataset"
        self.pins: dict[int, str] = {}
        self.copies: dict[int, dict[str, bytes]] = {}
        for number in range(1, versions + 1):
            self.commit(f"file {number}")
            self.copies[number] = read_tree(self.dataset)

    def commit(self, name: str, **options: Any) -> JobResult:
        write_tree(self.src, {name: pattern(100, len(name))})
        result = encrypt_files(
            self.src, self.dataset, kms=self.kms, wrapping_key_id=MASTER, engine=HERE, progress=False, **options
        )
        result.raise_for_failures()
        assert result.version is not None
        assert result.pin is not None
        self.pins[result.version] = result.pin
        return result

    def path(self, number: int) -> Path:
        return self.dataset / f"_ags/versions/{number:08}.json"

    def put_back(self, number: int) -> None:
        """The dataset as it was at a version, whatever came later."""
        shutil.rmtree(self.dataset)
        write_tree(self.dataset, self.copies[number])

    def splice(self) -> None:
        """Versions 1, 2, 3, 4', 5' and 6: an honest writer made two on version 3, to which the dataset was put back;
        then the newest of the older history was put on top of theirs, with all that it needs."""
        self.put_back(3)
        self.commit("honest")
        self.commit("also honest")
        write_tree(self.dataset, {p: d for p, d in self.copies[6].items() if not (self.dataset / p).exists()})

    def everything(self, **options: Any) -> dict[str, Callable[[], Any]]:
        """All that opens a dataset."""
        given: dict[str, Any] = {"kms": self.kms, **options}
        job: dict[str, Any] = {**given, "engine": HERE, "progress": False}
        write_tree(self.src, {"more": b"more"})
        return {
            "encrypt": lambda: encrypt_files(self.src, self.dataset, wrapping_key_id=MASTER, **job),
            "encrypt dry": lambda: encrypt_files(self.src, self.dataset, wrapping_key_id=MASTER, dry_run=True, **job),
            "encrypt resume": lambda: encrypt_files(
                self.src, self.dataset, wrapping_key_id=MASTER, resume="length", **job
            ),
            "rekey": lambda: rekey_files(self.dataset, **job),
            "rotate": lambda: rotate(self.dataset, **given),
            "rotate mek": lambda: rotate(self.dataset, what="mek", **given),
            "expire": lambda: expire(self.dataset, **given),
            "expire dry": lambda: expire(self.dataset, dry_run=True, **given),
            "sweep": lambda: sweep(self.dataset, **given),
            "remove": lambda: remove_files(self.dataset, "file 3", **given),
            "set_policy": lambda: set_policy(self.dataset, Policy(keep=2), **given),
            "verify": lambda: verify_files(self.dataset, **job),
            "decrypt": lambda: decrypt_files(self.dataset, self.folder / "out", **job),
            "open_file": lambda: open_file(self.dataset, "file 1", **given),
            "copy_file": lambda: copy_file(self.dataset, "file 1", open(os.devnull, "wb"), **given),
            "audit": lambda: audit(self.dataset, **given),
            "key_status": lambda: key_status(self.dataset, **given),
            "open": lambda: Ledger.open(
                self.dataset,
                load_kms(self.kms),
                pin=given.get("pin"),
                min_version=given.get("min_version"),
            ),
        }


WRITERS = ("encrypt", "encrypt resume", "rekey", "rotate", "expire", "expire dry", "sweep", "set_policy", "remove")


def refused(world: World, name: str, action: Callable[[], Any], error: type[AgsError] = IntegrityError) -> str:
    """What an action says that must raise, and write and delete nothing."""
    before = read_tree(world.folder)
    with pytest.raises(error) as caught:
        action()
    assert read_tree(world.folder) == before, name
    return str(caught.value)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("histories"), 6)


@pytest.fixture
def world(made: World) -> Iterator[World]:
    pins, sources = dict(made.pins), read_tree(made.src)
    yield made
    made.pins = pins
    shutil.rmtree(made.folder / "out", ignore_errors=True)
    shutil.rmtree(made.dataset, ignore_errors=True)
    write_tree(made.dataset, made.copies[6])
    for path in read_tree(made.src).keys() - sources.keys():
        (made.src / path).unlink()


# ------------------------------------------------------------------------------------------------------- with a pin


def test_a_pin_is_taken_as_long_as_it_is_an_ancestor(world: World) -> None:
    assert world.pins[6] == f"6-{hashlib.sha256(world.path(6).read_bytes()).hexdigest()}"
    for pin in world.pins.values():
        assert verify_files(world.dataset, kms=world.kms, engine=HERE, pin=pin).pin == world.pins[6]
        assert verify_files(world.dataset, kms=world.kms, engine=HERE, pin=pin, version=2).pin == world.pins[2]
    for name, action in world.everything(pin=world.pins[3], min_version=3).items():
        result = action()
        if isinstance(result, JobResult):
            result.raise_for_failures()
            assert result.pin == f"{result.version}-{sha256(world.path(result.version or 0).read_bytes())}", name
    assert [path.name for path in world.path(1).parent.iterdir() if path.stat().st_size != len(TOMBSTONE)] != []
    world.commit("later", pin=world.pins[2])  # which has been expired


def test_a_splice_is_refused_by_everything_that_has_a_pin(world: World) -> None:
    """The attack of the review. min_version passes, and without a pin the honest branch would be gone."""
    pin = world.pins[5]  # of the older history, which the attacker took away for a while
    world.put_back(3)
    world.commit("honest")
    honest = world.commit("also honest").pin
    for name, action in world.everything(pin=pin).items():
        assert "pin" in refused(world, name, action), name
    write_tree(world.dataset, world.copies[6])  # 4' and 5' are replaced: the older history, whole
    assert verify_files(world.dataset, kms=world.kms, engine=HERE, min_version=5).version == 6
    for name, action in world.everything(pin=honest).items():
        assert "does not descend" in refused(world, name, action), name
    for name, action in world.everything(pin=pin).items():
        if name not in ("expire", "sweep", "expire dry"):  # some parts of the other branch are still there
            action()


def test_a_rollback_is_refused_by_everything_that_has_a_pin(world: World) -> None:
    world.put_back(4)
    for name, action in world.everything(pin=world.pins[5]).items():
        assert "took newer ones away" in refused(world, name, action), name
    for name, action in world.everything(min_version=5).items():
        assert "min_version=5" in refused(world, name, action, PolicyError), name


def test_pins_that_are_never_taken(world: World) -> None:
    number, digest = world.pins[4].split("-")
    flipped = f"{number}-{int(digest[0], 16) ^ 1:x}{digest[1:]}"
    others = [flipped, f"5-{digest}", f"3-{digest}", f"7-{digest}", f"400-{digest}"]
    for pin in others:
        for name in ("verify", "encrypt", "expire"):
            refused(world, name, world.everything(pin=pin)[name])
    malformed = ["", "4", digest, f"0-{digest}", f"04-{digest}", f"-4-{digest}", f"4-{digest[1:]}", f"4-{digest}0"]
    malformed += [f"4-{digest.upper()}", f" 4-{digest}", f"4-{digest}\n", f"٤-{digest}", f"{'9' * 30}-{digest}"]
    for pin in malformed:
        for action in world.everything(pin=pin).values():
            with pytest.raises(ValueError, match="a pin is"):
                action()
    for pin in (4, b"4-" + digest.encode()):  # type: ignore[assignment]
        with pytest.raises(ValueError, match="a pin is"):
            verify_files(world.dataset, kms=world.kms, pin=pin)


def test_a_pin_needs_a_dataset(world: World) -> None:
    """One that is gone, or has no version any more, is an error, and none is made."""
    pin = world.pins[6]
    with pytest.raises(ValueError, match="pass kms"):
        sweep(world.dataset, pin=pin)
    shutil.rmtree(world.dataset / "_ags/versions")
    for name, action in world.everything(pin=pin).items():
        assert "gone" in refused(world, name, action), name
    shutil.rmtree(world.dataset)
    for options in ({"pin": pin}, {"min_version": 1}):
        for name, action in world.everything(**options).items():
            with pytest.raises((FileNotFoundError, IntegrityError)):
                action()
            assert not world.dataset.exists(), name


def test_nothing_slips_between_the_check_and_the_commit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a job writes its files, the history is exchanged: what it began on must still be an ancestor."""
    real = Ledger.commit

    def late(opened: Ledger, *args: Any, **options: Any) -> Any:
        monkeypatch.setattr(Ledger, "commit", real)
        world.put_back(3)
        world.commit("honest")
        world.commit("also honest")
        world.commit("one more")
        before.update(read_tree(world.dataset))
        return real(opened, *args, **options)

    before: dict[str, bytes] = {}
    monkeypatch.setattr(Ledger, "commit", late)
    with pytest.raises(IntegrityError, match="does not descend from version"):
        rekey_files(world.dataset, kms=world.kms, engine=HERE, progress=False)
    after = read_tree(world.dataset)
    assert {path: after.get(path) for path in before} == before
    assert not world.path(7).exists()


def test_a_handle_follows_one_history(world: World) -> None:
    """What it has read or made is as good as a pin: also where all keys are the same."""
    world.put_back(5)
    for _ in range(3):
        set_policy(world.dataset, Policy(), kms=world.kms)
    other = {world.path(number): world.path(number).read_bytes() for number in (6, 7, 8)}
    world.put_back(6)
    opened = Ledger.open(world.dataset, load_kms(world.kms))
    head = opened.current()
    made = opened.succeed(head, "policy", "job", head.manifests if head else ())
    world.path(made.number).unlink()
    with pytest.raises(IntegrityError, match="version 7 was there before"):
        opened.current()
    opened = Ledger.open(world.dataset, load_kms(world.kms))
    opened.current()
    for path, data in other.items():
        path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"version 8 of .* does not descend from version 6 as it was before"):
        opened.current()


# ---------------------------------------------------------------------------------------------------- without a pin


def test_a_splice_whose_documents_do_not_fit_is_refused_without_a_pin(world: World) -> None:
    """The newest of the older history on top of the honest ones: all of it is still there, and stays."""
    world.splice()
    actions = world.everything()
    for name in WRITERS:
        if name == "expire dry":
            continue
        assert "version" in refused(world, name, actions[name]), name
    said = refused(world, "expire", actions["expire"])
    assert "00000004.json is not the version 4" in said
    assert "inspect" in said
    # What to do: the documents that are right are the honest ones, so what does not descend from them is taken away.
    world.path(6).unlink()
    keys = world.path(1).parent.parent / "keys"
    with pytest.raises(IntegrityError, match=r"00000005\.json was made on version \d+ of the keys"):
        expire(world.dataset, kms=world.kms)
    for path in keys.glob("*.json"):
        if path.read_bytes() == world.copies[6].get(f"_ags/keys/{path.name}") and int(path.stem) > 6:
            path.unlink()
    expire(world.dataset, kms=world.kms).raise_for_failures()
    assert set(decrypted(world.dataset, world.kms)) == {"file 1", "file 2", "file 3", "honest", "also honest"} | {
        f"file {n}" for n in (4, 5, 6)
    }


@pytest.mark.parametrize("number", [2, 3, 5])
def test_expire_checks_every_document(world: World, number: int) -> None:
    """Also one that is far back: an exchanged document says what may be deleted, and what not."""
    world.put_back(number - 1)
    set_policy(world.dataset, Policy(), kms=world.kms)  # an authentic one, which names keys that are there
    other = world.path(number).read_bytes()
    world.put_back(6)
    world.path(number).write_bytes(other)
    actions = world.everything()
    for name in ("expire", "sweep", "expire dry"):
        assert f"{number:08}.json" in refused(world, name, actions[name]), name


def test_an_expiry_that_died_removes_only_what_it_had_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan names versions by number and digest. Under these numbers there may be others by now."""
    monkeypatch.setattr("ags_fast.dataset.expiry.finish_expiry", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        expire(world.dataset, kms=world.kms)
    monkeypatch.undo()
    plan = {path: data for path, data in read_tree(world.dataset).items() if "/plans/" in path}
    world.put_back(3)
    for name in ("honest", "also honest", "one more"):
        world.commit(name)
    write_tree(world.dataset, plan)
    for name in ("expire", "sweep"):
        assert "00000004.json" in refused_but_for_older(world, world.everything()[name]), name
    assert world.path(4).stat().st_size > len(TOMBSTONE)
    assert world.path(5).stat().st_size > len(TOMBSTONE)


def refused_but_for_older(world: World, action: Callable[[], Any]) -> str:
    with pytest.raises(IntegrityError) as caught:
        action()
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------------ chains


class Counted:
    """A folder in memory that counts what is read."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.reads = 0

    def read_small(self, path: str, limit: int) -> bytes:
        self.reads += 1
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]

    def write_small(self, path: str, data: bytes, *, fsync: bool = False) -> None:
        self.objects[path] = data


def test_chains_cover_a_thousand_versions_by_one_read() -> None:
    store = Counted()
    digests = {0: ""}
    chain, sizes = Chain(1), []
    for number in range(1, 1500):
        objects = ChainObjects(store, "chain/")
        digests[number] = hashlib.sha256(b"%d" % number).hexdigest()
        for back in {1, NEAR, number - 1, 1000, 1031} & set(range(1, min(number, 1032))):
            store.reads = 0
            assert ChainObjects(store, "chain/").digest(chain, number - back) == digests[number - back], number
            assert store.reads <= 1
            assert store.reads == 0 or back > NEAR
        assert objects.digest(chain, number) is None
        assert objects.digest(chain, 0) is None
        assert objects.digest(chain, chain.first - 1) is None
        assert Chain.from_json(json.loads(json.dumps(chain.to_json())), number, "x") == chain
        sizes.append(len(json.dumps(chain.to_json())))
        expected = chain.needed(digests[number])
        chain, made = chain.next(digests[number])
        assert set(made) <= expected
        objects.write(made)
    assert max(sizes) < 5500
    assert max(sizes[1000:1200]) >= max(sizes)
    assert chain.number - chain.first >= BLOCK * BLOCKS + NEAR
    all_of_it = ChainObjects(store, "chain/")
    store.reads = 0
    for number in range(chain.first, chain.number):
        assert all_of_it.digest(chain, number) == digests[number]
    assert store.reads == BLOCKS


def test_chains_that_cannot_be() -> None:
    digest = "a" * 64
    for number, near, blocks in [
        (1, [digest], []),
        (2, [], []),
        (3, [digest], []),  # it lacks one
        (50, [digest] * (NEAR + BLOCK), []),
        (60, [digest] * (NEAR + 1), [digest]),
        (40, [digest] * (NEAR - 1), [digest]),
        (2, ["A" * 64], []),
        (2, [digest[1:]], []),
        (2, [7], []),
        (2, digest, []),
        (2, None, []),
        (2, [digest], None),
        (5000, [digest] * NEAR, [digest] * (BLOCKS + 1)),
    ]:
        with pytest.raises(FormatError, match="impossible chain"):
            Chain.from_json({"ancestors": near, "chain": blocks}, number, "x")


def test_objects_of_chains_that_were_changed() -> None:
    chain, store = Chain(1), Counted()
    for number in range(1, 50):
        chain, made = chain.next(sha256(b"%d" % number))
        ChainObjects(store, "chain/").write(made)
    ((path, data),) = store.objects.items()
    for changed in (None, data[:-1], data + b"\n", data.replace(b"1", b"2", 1), b"", bytes(len(data))):
        store.objects = {} if changed is None else {path: changed}
        with pytest.raises(IntegrityError, match=r"chain/"):
            ChainObjects(store, "chain/").digest(chain, 3)
    assert ChainObjects(store, "chain/").digest(chain, chain.number - NEAR) is not None  # needs no object


def test_pins_of_versions_that_were_expired(tmp_path: Path) -> None:
    """Objects with older digests come, and what no version names goes; a chain that lacks one refuses old pins."""
    world = World(tmp_path, 1)
    for _ in range(NEAR + BLOCK + 3):
        set_policy(world.dataset, Policy(), kms=world.kms)
    opened = Ledger.open(world.dataset, load_kms(world.kms))
    versions = {version.number: version.pin for version in opened.versions()}
    (block,) = (world.dataset / "_ags/chain").iterdir()
    assert block.name == f"{sha256(block.read_bytes())}.json"
    stale = block.parent / f"{'0' * 64}.json"
    for age, name in ((0, "1" * 64), (2 * 86_400, "0" * 64)):
        path = block.parent / f"{name}.json"
        path.write_bytes(b"left by a writer that lost")
        os.utime(path, (path.stat().st_atime - age, path.stat().st_mtime - age))
    os.utime(block, (0, 0))
    expire(world.dataset, kms=world.kms).raise_for_failures()
    assert not stale.exists()
    assert {path.name for path in block.parent.iterdir()} == {block.name, f"{'1' * 64}.json"}
    for pin in versions.values():
        assert key_status(world.dataset, kms=world.kms, pin=pin)["version"] == NEAR + BLOCK + 4
    block.unlink()
    with pytest.raises(IntegrityError, match="is missing"):
        key_status(world.dataset, kms=world.kms, pin=versions[2])
    assert verify_files(world.dataset, kms=world.kms, engine=HERE, pin=versions[40]).counts["ok"] == 1
    world.commit("and so on")


@pytest.mark.more
def test_a_pin_a_thousand_versions_back(tmp_path: Path) -> None:
    world = World(tmp_path, 1)
    opened = Ledger.open(world.dataset, load_kms(world.kms))
    head = opened.current()
    assert head is not None
    sizes = []
    while head.number < 1071:
        head = opened.succeed(head, "policy", "job", head.manifests)
        sizes.append(world.path(head.number).stat().st_size)
        if head.number % 200 == 0:
            expire(world.dataset, kms=world.kms, keep=3).raise_for_failures()
    assert max(sizes[-20:]) <= max(sizes) < sizes[0] + 6000
    opened = Ledger.open(world.dataset, load_kms(world.kms))
    opened.current()
    reads: list[str] = []
    real = Store.read_small

    def read(store: Store, path: str, limit: int) -> bytes:
        reads.append(path)
        return real(store, path, limit)

    for number in (70, 500, 1060):
        digest = opened.digest(head, number)
        reads.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Store, "read_small", read)
            Ledger.open(world.dataset, load_kms(world.kms), pin=f"{number}-{digest}")
        assert sum("/chain/" in path for path in reads) <= 1
        assert sum("/versions/" in path for path in reads) == 1
    with pytest.raises(IntegrityError, match="remembers the versions from"):
        Ledger.open(world.dataset, load_kms(world.kms), pin=world.pins[1])


def test_what_a_commit_reads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bounded number of objects, whatever the number of versions."""
    reads: Counter[str] = Counter()
    real = Store.read_small

    def read(store: Store, path: str, limit: int) -> bytes:
        reads[path.rpartition("/")[0]] += 1
        return real(store, path, limit)

    def count(name: str, **options: Any) -> Counter[str]:
        reads.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Store, "read_small", read)
            world.commit(name, **options)
        return Counter(
            {folder: n for folder, n in reads.items() if "plans" not in folder and "manifests" not in folder}
        )

    few = count("few")
    assert few["_ags/versions"] <= 2 + 2 * 4
    assert few.keys() == {"_ags/versions", "_ags/keys"}
    for _ in range(NEAR + BLOCK):
        set_policy(world.dataset, Policy(), kms=world.kms)
    assert count("many") == few
    pinned = count("pinned", pin=world.pins[2])  # whose digest is in an object by now
    assert pinned - few == {"_ags/versions": 1, "_ags/keys": 1, "_ags/chain": 1}


# --------------------------------------------------------------------------------------------------------- the keys


def test_keys_that_were_put_back(world: World) -> None:
    """Without a pin: the newest version says which keys it was made on, so older ones are noticed, and others, too."""
    keys = sorted(path for path in read_tree(world.dataset) if path.startswith("_ags/keys/"))
    newest = keys[-1]
    (world.dataset / newest).unlink()
    actions = world.everything()
    for name, action in actions.items():
        if name not in ("open",):
            assert "older keys" in refused(world, name, action), name
    write_tree(world.dataset, {newest: world.copies[6][newest]})
    rotate(world.dataset, kms=world.kms, what="mek").raise_for_failures()  # a version of the keys after the pinned one
    later = read_tree(world.dataset)
    assert verify_files(world.dataset, kms=world.kms, engine=HERE, pin=world.pins[6]).counts["failed"] == 0
    # What a pin cannot show, and docs say: that keys were put back to no earlier than the pinned version's.
    for path in later.keys() - world.copies[6].keys():
        (world.dataset / path).unlink()
    assert verify_files(world.dataset, kms=world.kms, engine=HERE, pin=world.pins[6]).counts["failed"] == 0


def test_keys_from_before_a_rotation(world: World) -> None:
    """The newest version is sealed with a key that the older documents do not have."""
    pin = rotate(world.dataset, kms=world.kms, what="kek").pin
    assert pin is not None
    for path in sorted(read_tree(world.dataset).keys() - world.copies[6].keys()):
        if path.startswith("_ags/keys/"):
            (world.dataset / path).unlink()
    for options in ({}, {"pin": pin}):
        for name, action in world.everything(**options).items():
            if name != "open" or options:
                assert "not among the dataset's" in refused(world, name, action), name


def test_keys_of_another_history(world: World) -> None:
    """Keys are put back, an honest job makes others, and the older ones come back: the version made on the honest ones
    says so."""
    other = world.copies[6]
    world.put_back(5)
    world.commit("honest")
    theirs = {path: data for path, data in other.items() if path.startswith("_ags/keys/")}
    write_tree(world.dataset, theirs)
    actions = world.everything()
    for name, action in actions.items():
        if name not in ("open",):
            assert "of another history" in refused(world, name, action), name


def test_expire_checks_old_documents_of_the_keys(world: World) -> None:
    keys = sorted(path for path in read_tree(world.dataset) if path.startswith("_ags/keys/"))
    world.put_back(3)
    world.commit("honest")
    other = {path: data for path, data in read_tree(world.dataset).items() if world.copies[6].get(path, data) != data}
    (changed,) = [path for path in other if path in keys]
    world.put_back(6)
    write_tree(world.dataset, {changed: other[changed]})
    for name in ("expire", "sweep"):
        assert changed in refused(world, name, world.everything()[name])


@pytest.mark.parametrize("where", ["sql", "folder"])
def test_keys_elsewhere(tmp_path: Path, where: str) -> None:
    """A key store that was restored from a backup is noticed; with others made in it meanwhile, too."""
    if where == "sql":
        pytest.importorskip("sqlalchemy")
    kms = make_kms(tmp_path)
    store = f"sqlite:///{tmp_path}/keys.db?dataset=d" if where == "sql" else str(tmp_path / "keys")
    place = tmp_path / ("keys.db" if where == "sql" else "keys")

    def commit(name: str) -> str:
        write_tree(tmp_path / "src", {name: name.encode()})
        result = encrypt_files(
            tmp_path / "src", tmp_path / "d", kms=kms, wrapping_key_id=MASTER, engine=HERE, key_store=store
        )
        result.raise_for_failures()
        assert result.pin is not None
        return result.pin

    def save(name: str) -> None:
        (shutil.copytree if place.is_dir() else shutil.copy)(place, tmp_path / name)

    def restore(name: str) -> None:
        if place.is_dir():
            shutil.rmtree(place)
            shutil.copytree(tmp_path / name, place)
        else:
            shutil.copy(tmp_path / name, place)

    def verify() -> None:
        verify_files(tmp_path / "d", kms=kms, engine=HERE, key_store=store).raise_for_failures()

    commit("a")
    save("backup")
    commit("b")
    save("later")
    verify()
    restore("backup")
    with pytest.raises(IntegrityError, match="older keys"):
        verify()
    version = tmp_path / "d/_ags/versions/00000002.json"
    hidden = version.read_bytes()
    version.unlink()
    commit("c")  # on the older keys, and version 1
    verify()
    restore("later")
    with pytest.raises(IntegrityError, match="of another history"):
        verify()
    version.write_bytes(hidden)
    verify()


# ------------------------------------------------------------------------------------------------------------ commands


def test_commands(world: World, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """Every command on datasets takes both options, and says the pin."""
    from ags_fast.cli import main

    kms = ["--keystore", world.kms["kms.local.path"], "--key-file", world.kms["kms.local.key-file"]]
    dataset, out = str(world.dataset), str(world.folder / "out")
    commands = [
        ["encrypt", str(world.src), dataset, "--wrapping-key-id", MASTER],
        ["decrypt", dataset, out],
        ["verify", dataset],
        ["rekey", dataset, "--dry-run"],
        ["rm", dataset, "file 1", "--dry-run"],
        ["ls", dataset],
        ["cat", dataset, "file 1"],
        ["inspect", dataset],
        ["sweep", dataset],
        ["keys", "status", dataset],
        ["keys", "rotate", dataset, "--dry-run"],
        ["keys", "audit", dataset],
        ["keys", "policy", dataset],
        ["keys", "expire", dataset],
    ]
    good, bad = world.pins[2], f"3-{world.pins[2][2:]}"
    for command in commands:
        assert main([*command, *kms, "--pin", bad]) == 3, command
        assert "does not descend" in capsysbinary.readouterr().err.decode()
        assert main([*command, *kms, "--min-version", "7"]) != 0, command
        assert main([*command, *kms, "--pin", "7"]) != 0, command
        assert main([*command, *kms, "--pin", good, "--min-version", "6"]) == 0, command
        capsysbinary.readouterr()
    assert main(["verify", dataset, *kms]) == 0
    assert world.pins[6] in capsysbinary.readouterr().out.decode()
    assert main(["verify", dataset, *kms, "--json"]) == 0
    assert json.loads(capsysbinary.readouterr().out.decode())["pin"] == world.pins[6]


def test_inspect_shows_where_histories_part(world: World, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    from ags_fast.cli import main

    world.splice()
    assert main(["inspect", str(world.dataset)]) == 0
    said = capsysbinary.readouterr().out.decode()
    assert said.count("NOT follow") == 1
    assert "does NOT follow the stored version 5" in said
    assert world.pins[5] in said


# -------------------------------------------------------------------------------------------- never green on nothing


@pytest.fixture
def interrupted(tmp_path: Path) -> World:
    """A dataset whose first encrypt was interrupted."""

    def stop(rows: Any) -> None:
        raise KeyboardInterrupt

    world = World(tmp_path, 0)
    write_tree(world.src, {"file 1": b"1"})
    with pytest.raises(KeyboardInterrupt):
        encrypt_files(world.src, world.dataset, kms=world.kms, wrapping_key_id=MASTER, engine=HERE, progress=stop)
    return world


READS = ("verify", "decrypt", "rekey", "remove", "open_file", "copy_file", "expire", "expire dry")


def test_a_dataset_without_a_version_is_no_success(interrupted: World) -> None:
    (job_id,) = [path.name for path in (interrupted.dataset / "_ags/plans").iterdir()]
    for name, action in interrupted.everything().items():
        if name in READS:
            said = refused(interrupted, name, action)
            assert f"job {job_id} is open: run encrypt again with resume, or sweep" in said, name
    sweep(interrupted.dataset, kms=interrupted.kms)
    for name in READS:
        assert "committed; run encrypt" in refused(interrupted, name, interrupted.everything()[name])
    assert key_status(interrupted.dataset, kms=interrupted.kms)["version"] is None
    interrupted.commit("more")
    assert set(decrypted(interrupted.dataset, interrupted.kms)) == {"file 1", "more"}


@pytest.mark.parametrize("dead", [False, True])
def test_versions_that_were_taken_away(world: World, dead: bool) -> None:
    """Nothing reads as success, and nothing is deleted or begun anew: with them back in place, all is there."""
    if dead:  # a job that died before they went
        with pytest.raises(ZeroDivisionError):
            rekey_files(world.dataset, kms=world.kms, engine=HERE, progress=lambda rows: 1 // 0)
    shutil.move(world.dataset / "_ags/versions", world.folder / "versions")
    actions = world.everything()
    for name, action in actions.items():
        if name != "open":
            assert "Restore it" in refused(world, name, action), name
    shutil.move(world.folder / "versions", world.dataset / "_ags/versions")
    assert len(decrypted(world.dataset, world.kms)) == 6


def test_paths_that_match_nothing(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    from ags_fast.cli import main

    given: dict[str, Any] = {"kms": world.kms}
    write_tree(world.src, {"folder/a.csv": b"a"})
    encrypt_files(world.src, world.dataset, wrapping_key_id=MASTER, engine=HERE, **given).raise_for_failures()
    hints = {"file 7": "'file ", "folder": "'folder/[*]'", "folder/": "'folder/[*]'", "fodler/a.csv": "'folder/a.csv'"}
    for paths, hint in [*hints.items(), (["file 1", "file 7"], "'file "), (["folder/a.csv", "x*x"], "x[*]x'$")]:
        for job in (
            lambda **options: verify_files(world.dataset, engine=HERE, **options),
            lambda **options: decrypt_files(world.dataset, world.folder / "out", engine=HERE, **options),
            lambda **options: rekey_files(world.dataset, engine=HERE, **options),
            lambda **options: rekey_files(world.dataset, engine=HERE, dry_run=True, **options),
            lambda **options: audit(world.dataset, event="dek-leaked", **options),
        ):
            with pytest.raises(FileNotFoundError, match=f"no file of the dataset matches .*{hint}"):
                job(paths=paths, **given)
    with pytest.raises(ValueError, match="empty list"):
        verify_files(world.dataset, paths=[], **given)
    kms = ["--keystore", world.kms["kms.local.path"], "--key-file", world.kms["kms.local.key-file"]]
    for command in (["verify"], ["decrypt"], ["rekey"], ["keys", "audit", "--event", "dek-leaked"]):
        more = [str(world.folder / "out")] if command == ["decrypt"] else []
        assert main([*command, str(world.dataset), *more, *kms, "--path", "fodler/a.csv"]) not in (0, 2, 3)
        assert "did you mean 'folder/a.csv'?" in capsys.readouterr().err
    assert verify_files(world.dataset, engine=HERE, paths="file*", **given).counts["ok"] == 6


def test_extra_files_are_counted(world: World) -> None:
    assert verify_files(world.dataset, kms=world.kms, engine=HERE).warnings == []
    write_tree(world.dataset, {"one": b"1", "x/two": b"2"})
    result = verify_files(world.dataset, kms=world.kms, engine=HERE)
    assert result.extra_files == 2
    assert "2 files are in the dataset's folder" in result.warnings[0]
