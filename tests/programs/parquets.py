"""Parquet files: killed, cut, out of room and of memory."""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import HERE, MASTER
from killing import ended, fork, killed_before_steps
from parquet_corpus import check_equal, flat
from parquet_files import FOUR, RICH_LEAVES, data_of

from ags_fast import AgsError, parquet
from ags_fast.fs import NewFile, Store, new
from ags_fast.jobs import decrypt_files, encrypt_files, rekey_files
from ags_fast.parquet import Keys, keytools
from programs.kills import check_nothing_left, check_verified, copy_over

# ---------------------------------------------------------------- Parquet files

PARQUET_PLACES: list[tuple[Any, str]] = [
    *((os, name) for name in ("open", "replace", "close", "write", "fchmod", "unlink")),
    *((NewFile, name) for name in ("write", "publish")),
    (new, "lock"),
]
FOOTER, OTHER = b"0123456789012345", b"x" * 32
OLD, NEW = Keys(FOOTER, {"a": b"1" * 24}), Keys(OTHER, {"a": b"2" * 24})


def convert(op: str, folder: Path, old: Keys, new: Keys, threads: int = 1) -> None:
    """Make the file `out` from `plain` or `sealed`, or give it other keys."""
    out = folder / "out"
    if op == "encrypt":
        parquet.encrypt_file(folder / "plain", out, old, threads=threads)
    elif op == "decrypt":
        parquet.decrypt_file(folder / "sealed", out, old, threads=threads)
    else:
        parquet.reencrypt_file(out, out, old, new, same_size=op == "same_size", threads=threads)


def convert_on(op: str, folder: Path, threads: int) -> None:
    """The same again and again, until the process is killed."""
    print("begins", flush=True)
    old, new = OLD, NEW
    for n in itertools.count(1):
        convert("same_size" if op == "reencrypt" and n % 2 else op, folder, old, new, threads)
        if op == "reencrypt":  # from one key to the other and back
            old, new = new, old
        if n % 50 == 0:
            print(n, flush=True)


def content_of(out: Path, plain: Path, op: str) -> str:
    """What is at the path."""
    if not out.exists():
        return "none"
    if op == "decrypt":
        return "plain" if data_of(out.read_bytes()) == data_of(plain.read_bytes()) else "broken"
    for name, keys in (("old", OLD), ("new", NEW)):
        try:
            parquet.verify(out.read_bytes(), keys, threads=1)
        except AgsError:
            continue
        return name
    return "broken"


def kill_convert_at_steps(op: str, folder: Path) -> None:
    """Prints, for each child, if it ended by itself, what is at the path, and the names of the files."""

    def prepare() -> None:
        for path in set(folder.iterdir()) - {folder / "plain", folder / "sealed"}:
            path.unlink()
        if op not in ("encrypt", "decrypt"):
            shutil.copy(folder / "sealed", folder / "out")

    for _, done in killed_before_steps(lambda: convert(op, folder, OLD, NEW), PARQUET_PLACES, prepare=prepare):
        names = sorted(set(os.listdir(folder)) - {"plain", "sealed"})
        print(done, content_of(folder / "out", folder / "plain", op), *names, flush=True)


def fork_while_encrypting(folder: Path) -> None:
    def progress(nbytes: int) -> None:
        pid = os.fork()
        if pid == 0:
            sys.exit(0)  # with all that Python does at its end
        os.waitpid(pid, 0)

    parquet.encrypt_file(folder / "plain", folder / "out", Keys(FOOTER), progress=progress, threads=1)


def kill_material_rotation(path: Path, properties: dict[str, str], name: str, when: str) -> None:
    """Before or after a function of os."""
    real = getattr(os, name)

    def deadly(*args: Any, **options: Any) -> None:
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        real(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, name, deadly)
    keytools.rotate(path, properties)


# ---------------------------------------------------------------- jobs on Parquet files


def kill_parquet_job_at_steps(folder: Path, op: str, kms: dict[str, str], first: int, stride: int) -> None:
    """Prints the last step."""
    src, dataset, base, out = (folder / name for name in ("src", "dataset", "first", "out"))
    common: Any = {"kms": kms, "engine": HERE, "progress": False}
    columns: Any = {"wrapping_key_id": MASTER, "format": "parquet", "column_keys": {"text": "hr"}}

    def job(resume: Any = None) -> None:
        if op == "rekey":
            done = rekey_files(dataset, resume=resume, **common)
        else:
            done = encrypt_files(src, dataset, resume=resume, **columns, **common)
        done.raise_for_failures()

    src.mkdir()
    for n in range(3):
        pq.write_table(flat(60, seed=n), src / f"{n}.parquet")
    if op == "rekey":
        assert ended(fork(lambda: encrypt_files(src, base, fsync=False, **columns, **common))) == 0
    places = [(Store, "create_exclusive"), (Store, "delete"), (NewFile, "write"), (NewFile, "publish"), (os, "replace")]
    prepare = functools.partial(copy_over, base, dataset)
    for step, _ in killed_before_steps(job, places, prepare=prepare, first=first, stride=stride):
        assert ended(fork(functools.partial(job, "verify" if step % 2 else "length"))) == 0, step
        check_nothing_left(dataset, kms, step)
        checked = check_verified(dataset, kms, 3, step)
        for version in {2, checked.version}:
            shutil.rmtree(out, ignore_errors=True)
            decrypt_files(dataset, out, version=version, fsync=False, **common).raise_for_failures()
            check_equal(src, out)
    print(step)


# ---------------------------------------------------------------- cut, out of room and of memory


def cut_while_reading(path: Path, op: str, threads: int) -> None:
    cut: list[int] = []

    def progress(nbytes: int) -> None:
        if not cut:
            os.truncate(path, 100_000)
        cut.append(nbytes)

    keys = Keys(FOOTER)
    try:
        if op == "verify":
            parquet.verify(path, keys, threads=threads, progress=progress)
        else:
            call = parquet.encrypt_file if op == "encrypt" else parquet.decrypt_file
            call(path, path.with_suffix(".out"), keys, threads=threads, progress=progress)
    except AgsError as error:
        print(type(error).__name__, error)
    print(sorted(os.listdir(path.parent)))


def fill_up(path: Path, limit: int, threads: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    keys, other = Keys(FOOTER), Keys(OTHER)
    sealed, out = path.with_suffix(".sealed"), path.with_name("out")
    calls: list[Callable[[], object]] = [
        lambda: parquet.encrypt_file(path, out, keys, threads=threads),
        lambda: parquet.decrypt_file(sealed, out, keys, threads=threads),
        lambda: parquet.reencrypt_file(sealed, out, keys, other, threads=threads),
        lambda: parquet.reencrypt_file(sealed, sealed, keys, other, same_size=True, threads=threads),
    ]
    for call in calls:
        try:
            call()
            print("written")
        except OSError as error:
            print(error.errno)
    print(sorted(os.listdir(path.parent)))


def open_in_little_memory(path: Path) -> None:
    cases = pickle.loads(path.read_bytes())
    data = path.with_suffix(".parquet")

    def each(number: int, content: bytes) -> None:
        data.write_bytes(content)
        keys = FOUR[number].keys(RICH_LEAVES)
        calls: list[Callable[[], object]] = [
            lambda: parquet.decrypt_file(data, bytearray(), keys, threads=1),
            lambda: parquet.verify(data, keys, threads=1),
            lambda: parquet.inspect(data),
            lambda: parquet.reencrypt_file(data, bytearray(), keys, keys, threads=1),
        ]
        for call in calls:
            try:
                call()
            except AgsError:
                pass

    for case in cases[:4]:  # what is imported late
        each(*case)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + (24 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for case in cases:
        each(*case)
    print("done", len(cases))


def write_encrypted(plain: Path, path: Path, footer: bytes, columns: Any) -> None:
    """After a file that says that the table has been read."""
    table = pq.read_table(plain)
    path.with_suffix(".begin").touch()
    options: Any = {"compression": "none", "use_dictionary": False, "row_group_size": 500, "threads": 2}
    parquet.write_table(table, path, Keys(footer, columns), **options)


class Counter:
    """A target that counts."""

    nbytes = 0

    def write(self, data: Any) -> None:
        self.nbytes += len(data)


def write_at_length() -> None:
    draw = np.random.default_rng(0)
    schema = pa.schema({"a": pa.int64(), "b": pa.int64()})

    def batches() -> Iterator[Any]:
        for _ in range(240):
            columns = [draw.integers(0, 1 << 62, 1 << 16) for _ in range(2)]
            yield pa.record_batch(columns, schema)

    options: Any = {"row_group_size": 1 << 18, "use_dictionary": False, "compression": "none"}
    for threads in (1, 2):
        target = Counter()
        report = parquet.write_table(batches(), target, Keys(FOOTER), threads=threads, **options)
        assert report.row_groups == 60
        assert target.nbytes == report.file_length > 240 << 20
        assert report.buffer_nbytes < 64 << 20, report.buffer_nbytes
        assert pa.default_memory_pool().max_memory() < 64 << 20, pa.default_memory_pool().max_memory()
