"""Somebody who comes between two steps of a process: to exchange folders, or to look at modes."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import HERE, MASTER, make_kms

from ags_fast import AgsError, AgsReader, cli, jobs
from ags_fast.fs import Store

TEMPORARY = f".left..{'0' * 16}.agstmp"


class Somebody:
    """Exchanges a folder and a link out of the store at one of the steps that Python's audit events tell of."""

    STEPS = frozenset(
        {"open", "os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.scandir", "os.chmod", "os.utime"}
    )

    def __init__(self, folder: Path, outside: Path) -> None:
        self._folder, self._outside = folder, outside
        self._moved = folder.with_name(f"{folder.name}.moved")
        self._busy = True
        sys.addaudithook(self._look)

    def watch(self, when: int, flips: bool, call: Callable[[], object]) -> tuple[object, int]:
        """What a call gives, and its number of steps. Comes at its N-th step; if it flips, at each later one too."""
        self._events, self._when, self._flips = 0, when, flips
        self._busy = False
        try:
            return call(), self._events
        except (AgsError, OSError, AttributeError):
            return None, self._events
        finally:
            self._busy = True

    def _look(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._busy or event not in self.STEPS:
            return
        self._events += 1
        if self._events == self._when or (self._flips and self._events > self._when):
            self._busy = True
            if self._folder.is_symlink():
                self._folder.unlink()
                self._moved.rename(self._folder)
            else:
                self._folder.rename(self._moved)
                self._folder.symlink_to(self._outside)
            self._busy = False


def new(store: Store, at: str) -> None:
    with store.begin(f"{at}/new", private=True, fsync=True) as file:
        file.write(b"secret")
        file.publish()


def read_all(store: Store, at: str) -> bytes:
    with store.open_once(f"{at}/file") as file:
        data = bytearray(99)
        return bytes(data[: file.readinto(data)])


def stream(store: Store, at: str) -> bytes | None:
    try:
        AgsReader(store.open_seekable(f"{at}/file"), b"k" * 16, length=None)
    except ValueError as error:  # neither is a stream
        return b"beyond" if str(error).startswith("6 bytes") else None
    return None


def listed(store: Store, at: str) -> bytes | None:
    sizes = {entry.size for prefix in (f"{at}/", "") for entry in store.list(prefix)}
    return b"beyond" if 6 in sizes else None


OPERATIONS: list[Callable[[Any, str], object]] = [
    new,
    read_all,
    stream,
    listed,
    lambda store, at: store.create_exclusive(f"{at}/new", b"secret"),
    lambda store, at: store.create_exclusive(f"{at}/new folder/new", b"secret"),
    lambda store, at: store.write_small(f"{at}/new", b"secret"),
    lambda store, at: store.write_small(f"{at}/file", b"secret"),
    lambda store, at: store.read_small(f"{at}/file", 99),
    lambda store, at: store.read_if_unchanged(f"{at}/file", 6),
    lambda store, at: (entry := store.stat(f"{at}/file")) and entry.size == 6 and b"beyond",
    lambda store, at: store.delete(f"{at}/file"),
    lambda store, at: store.delete_read(store.stat(f"{at}/file")),
    lambda store, at: store.remove_empty_folders(at),
    lambda store, at: store.sweep(older_than=0) is None,
    lambda store, at: store.lock(f"{at}/lock").close(),
    lambda store, at: store.is_locked(f"{at}/file") and None,
    lambda store, at: store.sync_folders([f"{at}/file"]),
]


def tree(folder: Path) -> object:
    return sorted(
        (at, sorted(folders), [(name, os.stat(f"{at}/{name}").st_size) for name in sorted(files)])
        for at, folders, files in os.walk(folder)
    )


def make_places(base: Path, folder: Path, outside: Path) -> None:
    shutil.rmtree(base, ignore_errors=True)
    for top, content in ((folder, b"inside the"), (outside, b"beyond")):
        (top / "e/empty").mkdir(parents=True)
        for name in ("file", TEMPORARY):
            (top / "e" / name).write_bytes(content)
    folder.with_name("inner").symlink_to("d/e")
    folder.with_name("absolute").symlink_to(folder / "e")


def exchange_at_every_step(base: Path) -> None:
    """Each operation again and again, and each time the folder that it is done in becomes a link one step later."""
    os.fsync = lambda fd: None  # takes long, and is not what matters here
    folder, outside = base / "store/d", base / "outside"
    somebody = Somebody(folder, outside)
    wrong, steps = [], 0
    for number, operation in enumerate(OPERATIONS):
        for at, flips in (("d/e", False), ("inner", False), ("absolute", True)):
            when, done = 0, 0
            while done >= when:
                when += 1
                make_places(base, folder, outside)
                before, store = tree(outside), Store(folder.parent)
                got, done = somebody.watch(when, flips, functools.partial(operation, store, at))
                steps += 1
                del store
                if tree(outside) != before or got not in (None, True, False, b"inside the"):
                    wrong.append((number, at, flips, when, got))
    print(steps, wrong)


def exchange_for_ever(folder: Path, outside: Path) -> None:
    link = folder.with_name(f"{folder.name}.link")
    link.symlink_to(outside)
    exchange = ctypes.CDLL(None).renameat2
    print(exchange(-100, bytes(folder), -100, bytes(link), 2), flush=True)
    while True:
        exchange(-100, bytes(folder), -100, bytes(link), 2)


def run_jobs(base: Path) -> None:
    warnings.simplefilter("ignore")  # that at times all leads out
    kms = make_kms(base)
    (base / "src/inner").mkdir(parents=True)
    for n in range(8):
        (base / f"src/inner/{n}").write_bytes(b"plain %d" % n)
    common: Any = {"kms": kms, "engine": HERE, "progress": False}
    jobs.encrypt_files(base / "src", base / "dataset", wrapping_key_id=MASTER, **common)
    done = 0
    for _ in range(15):
        done += jobs.decrypt_files(base / "dataset", base / "out", overwrite=True, fsync=False, **common).counts["ok"]
    common |= {"wrapping_key_id": MASTER, "delete_sources": True, "fsync": False}
    for n in range(5):
        jobs.encrypt_files(base / "out", base / f"other{n}", **common)
    print(done)


class Looker:
    """Notes the modes of all files of a folder at the steps that Python's audit events tell of, as others could."""

    STEPS = frozenset({"open", "fcntl.flock", "os.chmod", "os.utime", "os.rename", "os.link", "os.remove"})

    def __init__(self, folder: Path) -> None:
        self.seen: dict[str, set[str]] = {}
        self._folder, self._busy = folder, False
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._busy or event not in self.STEPS:
            return
        self._busy = True
        for at, folders, files in os.walk(self._folder):
            folders[:] = set(folders) - {"dataset"}  # all is encrypted there
            for name in files:
                try:
                    info = os.lstat(f"{at}/{name}")
                except FileNotFoundError:
                    continue
                kind = name.removeprefix(".").partition(".")[0]
                self.seen.setdefault(kind, set()).add(oct(info.st_mode & 0o777))
        self._busy = False


def show_modes(base: Path) -> None:
    os.umask(0)  # as some services and containers run with
    (base / "src").mkdir()
    for name, mode in (("private", 0o600), ("shared", 0o640), ("narrow", 0o400)):
        (base / "src" / name).write_bytes(name.encode())
        (base / "src" / name).chmod(mode)
    looker = Looker(base)

    def run(*arguments: str) -> None:
        assert cli.main([*arguments]) == 0

    keystore = ["--key-file", f"{base}/key"]
    run("keys", "init", f"{base}/keystore", *keystore)
    run("keys", "create", f"{base}/keystore", MASTER, *keystore)
    run("keys", "create", f"{base}/keystore", MASTER, "--new-version", *keystore)
    kms = {"encryption.kms-type": "local", "kms.local.path": f"{base}/keystore", "kms.local.key-file": f"{base}/key"}
    jobs.encrypt_files(base / "src", base / "dataset", kms=kms, wrapping_key_id=MASTER, engine=HERE)
    for overwrite in (False, True):
        done = jobs.decrypt_files(base / "dataset", base / "out", kms=kms, engine=HERE, overwrite=overwrite)
        done.raise_for_failures()
    os.environ["KEY"] = "00" * 16
    key = ["--key-env", "KEY", "--key-format", "hex"]
    for name in ("private", "narrow"):
        sealed, out = f"{base}/{name}.ags", f"{base}/out/{name}"
        run("stream", "encrypt", f"{base}/src/{name}", *key, "-o", sealed)
        run("stream", "decrypt", sealed, *key, "--untrusted-length", "-o", out, "--overwrite")
    for kind in ("key", "keystore", "private", "shared", "narrow"):
        print(kind, *sorted(looker.seen[kind]))
