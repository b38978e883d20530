"""Histories of datasets, taken apart and put together by somebody who can write to the storage: pins notice it, and
where the entries do not fit each other, so does who has no pin."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from datasets import HERE, MASTER, decrypted, leftovers, make_kms, read_tree, write_tree
from support import pattern

from ags_fast import AgsError, Dataset, IntegrityError, PolicyError
from ags_fast.dataset.job import Job
from ags_fast.dataset.names import LOG, entry_path
from ags_fast.jobs import (
    JobResult,
    Policy,
    audit,
    copy_file,
    decrypt_files,
    encrypt_files,
    expire,
    key_status,
    maintain,
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

pytest.importorskip("pyarrow")


class World:
    """A dataset whose history was copied after each commit, as an attacker could.

    Commit n is version n + 1: version 1 has no files.
    """

    def __init__(self, folder: Path, versions: int = 5) -> None:
        self.folder = folder
        self.kms = make_kms(folder)
        self.src = folder / "src"
        self.dataset = folder / "dataset"
        self.pins: dict[int, str] = {}
        self.copies: dict[int, dict[str, bytes]] = {}
        for number in range(1, versions + 1):
            result = self.commit(f"file {number}")
            self.copies[result.version or 0] = read_tree(self.dataset)

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
        return self.dataset / entry_path(number)

    def put_back(self, number: int) -> None:
        """The dataset as it was at a version, whatever came later."""
        shutil.rmtree(self.dataset)
        write_tree(self.dataset, self.copies[number])

    def splice(self) -> None:
        """Versions 1 to 4, 5', 6' and 7: an honest writer made two on version 4, to which the dataset was put back;
        then the newest of the older history was put on top of theirs, with all that it needs."""
        self.put_back(4)
        self.commit("honest")
        self.commit("also honest")
        write_tree(self.dataset, {p: d for p, d in self.copies[7].items() if not (self.dataset / p).exists()})

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
            "expire": lambda: expire(self.dataset, keep=1, **given),
            "expire dry": lambda: expire(self.dataset, keep=1, dry_run=True, **given),
            "maintain": lambda: maintain(self.dataset, **job),
            "sweep": lambda: sweep(self.dataset, **given),
            "remove": lambda: remove_files(self.dataset, "file 3", **given),
            "set_policy": lambda: set_policy(self.dataset, Policy(keep=2), **given),
            "verify": lambda: verify_files(self.dataset, **job),
            "decrypt": lambda: decrypt_files(self.dataset, self.folder / "out", **job),
            "open_file": lambda: open_file(self.dataset, "file 1", **given),
            "copy_file": lambda: copy_file(self.dataset, "file 1", open(os.devnull, "wb"), **given),
            "audit": lambda: audit(self.dataset, **given),
            "key_status": lambda: key_status(self.dataset, **given),
            "open": lambda: Dataset.open(self.dataset, **given).files(),
        }


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
    write_tree(made.dataset, made.copies[7])
    for path in read_tree(made.src).keys() - sources.keys():
        (made.src / path).unlink()


# ------------------------------------------------------------------------------------------------------- with a pin


def test_a_pin_is_taken_as_long_as_it_is_an_ancestor(world: World) -> None:
    assert world.pins[7] == f"7-{hashlib.sha256(world.path(7).read_bytes()).hexdigest()}"
    for pin in world.pins.values():
        assert verify_files(world.dataset, kms=world.kms, engine=HERE, pin=pin).pin == world.pins[7]
        assert verify_files(world.dataset, kms=world.kms, engine=HERE, pin=pin, version=3).pin == world.pins[3]
    for name, action in world.everything(pin=world.pins[4], min_version=4).items():
        result = action()
        if isinstance(result, JobResult):
            result.raise_for_failures()
            digest = hashlib.sha256(world.path(result.version or 0).read_bytes()).hexdigest()
            assert result.pin == f"{result.version}-{digest}", name
    assert not world.path(4).exists()
    world.commit("later", pin=world.pins[3])  # which has been expired


def test_a_splice_is_refused_by_everything_that_has_a_pin(world: World) -> None:
    """min_version passes, and without a pin the honest branch would be gone."""
    pin = world.pins[6]  # of the older history, which the attacker took away for a while
    world.put_back(4)
    world.commit("honest")
    honest = world.commit("also honest").pin
    for name, action in world.everything(pin=pin).items():
        assert "pin" in refused(world, name, action), name
    write_tree(world.dataset, world.copies[7])  # 5' and 6' are replaced: the older history, whole
    assert verify_files(world.dataset, kms=world.kms, engine=HERE, min_version=6).version == 7
    for name, action in world.everything(pin=honest).items():
        assert "does not descend" in refused(world, name, action), name
    for name, action in world.everything(pin=pin).items():
        action()
        assert name


def test_a_rollback_is_refused_by_everything_that_has_a_pin(world: World) -> None:
    world.put_back(5)
    for name, action in world.everything(pin=world.pins[6]).items():
        assert "pin" in refused(world, name, action), name
    for name, action in world.everything(min_version=6).items():
        assert "min_version=6" in refused(world, name, action, PolicyError), name


def test_pins_that_are_never_taken(world: World) -> None:
    number, digest = world.pins[5].split("-")
    flipped = f"{number}-{int(digest[0], 16) ^ 1:x}{digest[1:]}"
    others = [flipped, f"6-{digest}", f"4-{digest}", f"8-{digest}", f"400-{digest}"]
    for pin in others:
        for name in ("verify", "encrypt", "expire"):
            refused(world, name, world.everything(pin=pin)[name])
    malformed = ["", "5", digest, f"0-{digest}", f"05-{digest}", f"-5-{digest}", f"5-{digest[1:]}", f"5-{digest}0"]
    malformed += [f"5-{digest.upper()}", f" 5-{digest}", f"5-{digest}\n", f"\u0665-{digest}", f"{'9' * 30}-{digest}"]
    for pin in malformed:
        for action in world.everything(pin=pin).values():
            with pytest.raises(ValueError, match="a pin is"):
                action()
    for pin in (5, b"5-" + digest.encode()):  # type: ignore[assignment]
        with pytest.raises(ValueError, match="a pin is"):
            verify_files(world.dataset, kms=world.kms, pin=pin)


def test_a_pin_needs_a_dataset(world: World) -> None:
    """One that is gone, or whose log is, is an error, and none is made."""
    pin = world.pins[7]
    shutil.rmtree(world.dataset / LOG)
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
    real = Job.commit

    def late(job: Job, *args: Any) -> Any:
        monkeypatch.setattr(Job, "commit", real)
        world.put_back(4)
        for name in ("honest", "also honest", "one more", "the last"):
            world.commit(name)
        before.update(read_tree(world.dataset))
        return real(job, *args)

    before: dict[str, bytes] = {}
    monkeypatch.setattr(Job, "commit", late)
    with pytest.raises(IntegrityError, match="does not descend from version"):
        rekey_files(world.dataset, kms=world.kms, engine=HERE, progress=False)
    after = read_tree(world.dataset)
    assert {path: after.get(path) for path in before} == before
    assert not world.path(9).exists()


def test_a_handle_follows_one_history(world: World) -> None:
    """What it has read or made is as good as a pin: also where all keys are the same."""
    world.put_back(6)
    for _ in range(3):
        set_policy(world.dataset, Policy(), kms=world.kms)
    other = {world.path(number): world.path(number).read_bytes() for number in (7, 8, 9)}
    world.put_back(7)
    dataset = Dataset.open(world.dataset, kms=world.kms)
    with dataset.transaction() as new, new.create("mine") as file:
        file.write(b"mine")
    world.path(8).unlink()
    with pytest.raises(IntegrityError, match=r"version 8 of .* was there before"):
        dataset.refresh()
    world.put_back(7)
    dataset = Dataset.open(world.dataset, kms=world.kms)
    for path, data in other.items():
        path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"version 9 of .* does not descend from version 7"):
        dataset.refresh()


# ---------------------------------------------------------------------------------------------------- without a pin


def test_a_splice_that_does_not_fit_deletes_nothing(world: World) -> None:
    """The newest of the older history on top of the honest ones: who deletes sees it, and all stays."""
    world.splice()
    actions = world.everything()
    for name in ("expire", "expire dry", "sweep"):
        assert "version" in refused(world, name, actions[name]), name
    world.path(7).unlink()  # what does not descend from the honest ones
    expire(world.dataset, kms=world.kms, keep=1).raise_for_failures()
    assert set(decrypted(world.dataset, world.kms)) == {"file 1", "file 2", "file 3", "honest", "also honest"} | {
        f"file {n}" for n in (4, 5, 6)
    }


@pytest.mark.parametrize("number", [3, 4, 6])
def test_expire_checks_every_entry(world: World, number: int) -> None:
    """Also one that is far back: an exchanged entry says what may be deleted, and what not."""
    world.put_back(number - 1)
    set_policy(world.dataset, Policy(), kms=world.kms)  # an authentic one, which names keys that are there
    other = world.path(number).read_bytes()
    world.put_back(7)
    world.path(number).write_bytes(other)
    actions = world.everything()
    for name in ("expire", "sweep", "expire dry"):
        assert entry_path(number) in refused(world, name, actions[name]), name


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
        ["sweep", dataset],
        ["keys", "status", dataset],
        ["keys", "rotate", dataset, "--dry-run"],
        ["keys", "audit", dataset],
        ["keys", "policy", dataset],
        ["expire", dataset, "--yes", "--keep", "1"],
    ]
    good, bad = world.pins[3], f"4-{world.pins[3][2:]}"
    for command in commands:
        assert main([*command, *kms, "--pin", bad]) == 3, command
        assert "does not descend" in capsysbinary.readouterr().err.decode()
        assert main([*command, *kms, "--min-version", "8"]) != 0, command
        assert main([*command, *kms, "--pin", "8"]) != 0, command
        assert main([*command, *kms, "--pin", good, "--min-version", "7"]) == 0, command
        capsysbinary.readouterr()
    assert main(["verify", dataset, *kms]) == 0
    newest = max((world.dataset / LOG).rglob("0*[0-9]"), key=lambda path: path.name if path.is_file() else "")
    pin = f"{int(newest.name)}-{hashlib.sha256(newest.read_bytes()).hexdigest()}"
    assert pin in capsysbinary.readouterr().out.decode()
    assert main(["verify", dataset, *kms, "--json"]) == 0
    assert json.loads(capsysbinary.readouterr().out.decode())["pin"] == pin


def test_inspect_shows_where_histories_part(world: World, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    from ags_fast.cli import main

    world.splice()
    assert main(["inspect", str(world.dataset)]) == 0
    said = capsysbinary.readouterr().out.decode()
    assert said.count("NOT follow") == 1
    assert "does NOT follow the stored version 6" in said
    assert world.pins[6] in said


# -------------------------------------------------------------------------------------------- never green on nothing


def test_an_interrupted_first_encrypt_leaves_an_empty_dataset(tmp_path: Path) -> None:
    """Its files are there when encrypt has gone on, and a sweep takes what it has left."""

    def stop(rows: Any) -> None:
        raise KeyboardInterrupt

    world = World(tmp_path, 0)
    write_tree(world.src, {"file 1": b"1"})
    with pytest.raises(KeyboardInterrupt):
        encrypt_files(world.src, world.dataset, kms=world.kms, wrapping_key_id=MASTER, engine=HERE, progress=stop)
    assert decrypted(world.dataset, world.kms) == {}
    world.commit("more", resume="length")
    assert set(decrypted(world.dataset, world.kms)) == {"file 1", "more"}
    sweep(world.dataset, kms=world.kms).raise_for_failures()
    assert leftovers(world.dataset, world.kms) == []


@pytest.mark.parametrize("dead", [False, True])
def test_a_log_that_was_taken_away(world: World, dead: bool) -> None:
    """Nothing reads as success, and nothing is deleted or begun anew: with the log back in place, all is there."""
    if dead:  # a job that died before the log went
        with pytest.raises(ZeroDivisionError):
            rekey_files(world.dataset, kms=world.kms, engine=HERE, progress=lambda rows: 1 // 0)
    shutil.move(world.dataset / LOG, world.folder / "log")
    for name, action in world.everything().items():
        assert "restore" in refused(world, name, action), name
    shutil.move(world.folder / "log", world.dataset / LOG)
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
        assert main([*command, str(world.dataset), *more, *kms, "--include", "fodler/a.csv"]) not in (0, 2, 3)
        assert "did you mean 'folder/a.csv'?" in capsys.readouterr().err
    assert verify_files(world.dataset, engine=HERE, paths="file*", **given).counts["ok"] == 6


def test_extra_files_are_counted(world: World) -> None:
    assert verify_files(world.dataset, kms=world.kms, engine=HERE).warnings == []
    write_tree(world.dataset, {"one": b"1", "x/two": b"2"})
    result = verify_files(world.dataset, kms=world.kms, engine=HERE)
    assert result.extra_files == 2
    assert "2 files are in the dataset's folder" in result.warnings[0]
