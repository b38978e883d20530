"""Folders that become links while a store is used: nothing outside of it is written, read or deleted."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from support import run_python, start_python

if TYPE_CHECKING:
    from pathlib import Path

# Each operation is run again and again, and each time somebody else comes one step later: where Python says what it is
# about to do (audit events), the folder that it is done in is moved away, and a link out of the store takes its place.
EVERY_STEP = """
    import os, shutil, sys
    from ags_fast import AgsReader, AgsError
    from ags_fast.fs import Store

    os.fsync = lambda fd: None  # takes long, and is not what matters here
    base = sys.argv[1]
    STEPS = {"open", "os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.scandir", "os.chmod", "os.utime"}
    TEMPORARY = f".left..{'0' * 16}.agstmp"
    root, folder, outside = f"{base}/store", f"{base}/store/d", f"{base}/outside"
    events, when, flips, busy = 0, 0, False, True

    def somebody_else(event, arguments):
        global events, busy
        if busy or event not in STEPS:
            return
        events += 1
        if events == when or (flips and events > when):
            busy = True
            if os.path.islink(folder):
                os.unlink(folder)
                os.rename(folder + ".moved", folder)
            else:
                os.rename(folder, folder + ".moved")
                os.symlink(outside, folder)
            busy = False

    sys.addaudithook(somebody_else)

    def new(store, at):
        with store.new(f"{at}/new", private=True, fsync=True) as file:
            file.write(b"secret")
            file.publish()

    def read_all(store, at):
        with store.open(f"{at}/file") as file:
            data = bytearray(99)
            return bytes(data[: file.readinto(data)])

    def stream(store, at):
        try:
            AgsReader(store.source(f"{at}/file"), b"k" * 16, length=None)
        except ValueError as error:  # neither is a stream
            return b"beyond" if str(error).startswith("6 bytes") else None

    def listed(store, at):
        sizes = {entry.size for prefix in (f"{at}/", "") for entry in store.list(prefix)}
        return b"beyond" if 6 in sizes else None

    OPERATIONS = [
        new,
        read_all,
        stream,
        listed,
        lambda store, at: store.create(f"{at}/new", b"secret"),
        lambda store, at: store.create(f"{at}/new folder/new", b"secret"),
        lambda store, at: store.put(f"{at}/new", b"secret"),
        lambda store, at: store.put(f"{at}/file", b"secret"),
        lambda store, at: store.read(f"{at}/file", 99),
        lambda store, at: store.take(f"{at}/file", 6),
        lambda store, at: (entry := store.stat(f"{at}/file")) and entry.size == 6 and b"beyond",
        lambda store, at: store.delete(f"{at}/file"),
        lambda store, at: store.delete_read(store.stat(f"{at}/file")),
        lambda store, at: store.remove_folder(f"{at}/empty"),
        lambda store, at: store.sweep(older_than=0) is None,
        lambda store, at: store.hold(f"{at}/lock").close(),
        lambda store, at: store.held(f"{at}/file") and None,
        lambda store, at: store.sync_folders([f"{at}/file"]),
    ]

    def tree():
        return sorted((at, sorted(folders), [(n, os.stat(f"{at}/{n}").st_size) for n in sorted(files)])
                      for at, folders, files in os.walk(outside))

    wrong, steps = [], 0
    for number, operation in enumerate(OPERATIONS):
        for at, flips in (("d/e", False), ("inner", False), ("absolute", True)):
            when, done = 0, 0
            while done >= when:
                when += 1
                shutil.rmtree(base, ignore_errors=True)
                for top, content in ((folder, b"inside the"), (outside, b"beyond")):
                    os.makedirs(f"{top}/e/empty")
                    for name in ("file", TEMPORARY):
                        with open(f"{top}/e/{name}", "wb") as file:
                            file.write(content)
                os.symlink("d/e", f"{root}/inner")
                os.symlink(f"{root}/d/e", f"{root}/absolute")
                before, store = tree(), Store(root)
                events, busy = 0, False
                try:
                    got = operation(store, at)
                except (AgsError, OSError, AttributeError) as error:
                    got = None
                busy = True
                done, steps = events, steps + 1
                del store
                if tree() != before or got not in (None, True, False, b"inside the"):
                    wrong.append((number, at, flips, when, got))
    print(steps, wrong)
"""


@pytest.mark.parametrize("openat2", ["1", pytest.param("0", marks=pytest.mark.more)])
def test_a_folder_that_becomes_a_link_at_any_step(tmp_path: Path, openat2: str) -> None:
    steps, _, wrong = run_python(EVERY_STEP, tmp_path / "base", AGS_FAST_OPENAT2=openat2).partition(" ")
    assert wrong == "[]\n"
    assert int(steps) > 150


EXCHANGES = """
    import ctypes, os, sys
    folder, outside = map(os.fsencode, sys.argv[1:])
    os.symlink(outside, folder + b".link")
    exchange = ctypes.CDLL(None).renameat2
    print(exchange(-100, folder, -100, folder + b".link", 2), flush=True)
    while True:
        exchange(-100, folder, -100, folder + b".link", 2)
"""

JOBS = """
    import os, sys, warnings
    from ags_fast.jobs import decrypt_files, encrypt_files
    from ags_fast.jobs.engines.local import LocalEngine
    from ags_fast.keys.kms import local

    warnings.simplefilter("ignore")  # that at times all leads out
    base = sys.argv[1]
    here = LocalEngine(processes=0)
    kms = {"encryption.kms-type": "local", "kms.local.path": f"{base}/kms", "kms.local.key-file": f"{base}/key"}
    local.create_keystore(kms)
    local.create_key(kms, "master")
    os.makedirs(f"{base}/src/inner")
    for n in range(8):
        with open(f"{base}/src/inner/{n}", "wb") as file:
            file.write(b"plain %d" % n)
    encrypt_files(f"{base}/src", f"{base}/dataset", kms=kms, wrapping_key_id="master", engine=here)
    done = 0
    for _ in range(15):
        result = decrypt_files(
            f"{base}/dataset", f"{base}/out", kms=kms, engine=here, overwrite=True, fsync=False, progress=False
        )
        done += result.counts["ok"]
    for n in range(5):
        encrypt_files(
            f"{base}/out", f"{base}/other{n}", kms=kms, wrapping_key_id="master", engine=here, delete_sources=True,
            fsync=False, progress=False,
        )
    print(done)
"""


def test_jobs_in_a_loop_of_renames(tmp_path: Path) -> None:
    """Somebody who may write to a folder turns one below it into a link out of it and back, as fast as can be."""
    outside = tmp_path / "outside"
    (outside / "e").mkdir(parents=True)
    (tmp_path / "out/d/e").mkdir(parents=True)
    (tmp_path / "out/inner").symlink_to("d/e")
    for n in range(8, 12):
        (outside / "e" / str(n)).write_bytes(b"precious")
    renames = start_python(EXCHANGES, tmp_path / "out/d", outside)
    try:
        assert renames.stdout is not None
        if renames.stdout.readline() != "0\n":
            pytest.skip("needs renameat2")
        done = run_python(JOBS, tmp_path)
    finally:
        renames.send_signal(signal.SIGKILL)
        renames.communicate()
    assert int(done.split()[-1]) > 0
    assert sorted(os.listdir(outside / "e"), key=int) == ["8", "9", "10", "11"]
    assert {path.read_bytes() for path in (outside / "e").iterdir()} == {b"precious"}


# At each step that Python tells of, everything that is in the folder is looked at, as somebody else could. umask 0 is
# what some services and containers run with.
MODES = """
    import os, sys

    os.umask(0)
    STEPS = {"open", "fcntl.flock", "os.chmod", "os.utime", "os.rename", "os.link", "os.remove"}
    base, seen, busy = sys.argv[1], {}, False

    def somebody_else(event, arguments):
        global busy
        if busy or event not in STEPS:
            return
        busy = True
        for at, folders, files in os.walk(base):
            folders[:] = set(folders) - {"dataset"}  # all is encrypted there
            for name in files:
                try:
                    info = os.lstat(f"{at}/{name}")
                except FileNotFoundError:
                    continue
                kind = name.removeprefix(".").partition(".")[0]
                seen.setdefault(kind, set()).add(oct(info.st_mode & 0o777))
        busy = False

    from ags_fast import cli, jobs, parquet
    from ags_fast.jobs.engines.local import LocalEngine
    from ags_fast.keys.kms import local
    here = LocalEngine(processes=0)
    busy = True
    os.makedirs(f"{base}/src")
    for name, mode in (("private", 0o600), ("shared", 0o640), ("narrow", 0o400)):
        with open(f"{base}/src/{name}", "wb") as file:
            file.write(name.encode())
        os.chmod(f"{base}/src/{name}", mode)
    busy = False
    sys.addaudithook(somebody_else)

    keystore = ["--key-file", f"{base}/key"]
    assert cli.main(["keys", "init", f"{base}/keystore", *keystore]) == 0
    assert cli.main(["keys", "create", f"{base}/keystore", "master", *keystore]) == 0
    assert cli.main(["keys", "create", f"{base}/keystore", "master", "--new-version", *keystore]) == 0
    kms = {"encryption.kms-type": "local", "kms.local.path": f"{base}/keystore", "kms.local.key-file": f"{base}/key"}
    jobs.encrypt_files(f"{base}/src", f"{base}/dataset", kms=kms, wrapping_key_id="master", engine=here)
    for options in ({}, {"overwrite": True}):
        jobs.decrypt_files(f"{base}/dataset", f"{base}/out", kms=kms, engine=here, **options).raise_for_failures()
    key = ["--key-env", "KEY", "--key-format", "hex"]
    for name in ("private", "narrow"):
        os.environ["KEY"] = "00" * 16
        assert cli.main(["stream", "encrypt", f"{base}/src/{name}", *key, "-o", f"{base}/{name}.ags"]) == 0
        assert cli.main(["stream", "decrypt", f"{base}/{name}.ags", *key, "--untrusted-length", "-o",
            f"{base}/out/{name}", "--force"]) == 0
    busy = True
    for kind in ("key", "keystore", "private", "shared", "narrow"):
        print(kind, *sorted(seen[kind]))
"""


def test_what_is_secret_is_never_seen_by_others(tmp_path: Path) -> None:
    """Not for a moment, and not under a temporary name."""
    (tmp_path / "base").mkdir()
    printed = run_python(MODES, tmp_path / "base").splitlines()
    assert printed[-5:] == [
        "key 0o600",
        "keystore 0o600",
        "private 0o600",
        "shared 0o600 0o640",
        "narrow 0o400 0o600",
    ]
