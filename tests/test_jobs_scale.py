"""Many files: time and memory of planning, committing, listing and resuming grow with their number, and no faster.

``python tests/test_jobs_scale.py entries 1000000`` and ``... files 100000 FOLDER`` print what they measure.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, make_kms
from support import python_env

from ags_fast import Dataset, encrypted_length
from ags_fast.dataset.access import Access
from ags_fast.dataset.change import Wish
from ags_fast.dataset.entries import FileEntry
from ags_fast.dataset.job import Job
from ags_fast.dataset.kinds import Want
from ags_fast.engines.base import bins
from ags_fast.engines.local import LocalEngine
from ags_fast.fs import Entry
from ags_fast.jobs import (
    encrypt_files,
    open_file,
    rekey_files,
    verify_files,
)
from ags_fast.jobs.run import begin_files
from ags_fast.jobs.work.context import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ags_fast.dataset.snapshot import Snapshot

Figures = dict[str, list[float]]


class Meter:
    """Of what is done in `measure`: seconds, those of the CPUs, and the peak so far of this process' memory in MiB."""

    def __init__(self) -> None:
        self.figures: Figures = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        begun, used = time.monotonic(), _cpu_seconds()
        yield
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.figures[name] = [round(time.monotonic() - begun, 2), round(_cpu_seconds() - used, 2), round(peak)]


def _cpu_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def _entry(found: Entry) -> FileEntry:
    return FileEntry(
        path=found.path,
        file="",
        format="ags1",
        plain_length=found.size,
        file_length=encrypted_length(found.size),
        block_size=1 << 20,
        key_id="",
        wrapped_dek=b"",
        column_keys=None,
        aad_prefix=os.urandom(16),
        job_id="",
        set_id=None,
        part=None,
        parts=None,
        source=found.path,
        stamp=found.stamp,
    )


def entries(count: int, folder: Path) -> Figures:
    """A plan and a version of so many entries, without the files."""
    meter = Meter()
    kms = make_kms(folder)
    snapshot = Access.of(folder / "dataset", kms).create(MASTER)
    with meter.measure("list"):
        listed = [Entry(f"year=2026/month={n % 12}/part-{n:08}.avro", 4096, "1" * 19, 1.0) for n in range(count)]
    with meter.measure("plan"):
        job, planned = _begun(snapshot, "encrypt", listed)
    with meter.measure("bins"):
        assert sum(map(len, bins(list(map(Task, planned)), target_bytes=64 << 20, open_cost=1 << 19, least=4))) == count
    job.release()
    with meter.measure("load the plan"):
        again = Job.resume(snapshot.log, job.id)
        planned = again.planned()
        assert len(planned) == count
        files = {row.path: row.file for row in planned}
    with meter.measure("commit"):
        made = again.commit(Wish("encrypt", planned))
        assert made.version is not None
        assert not made.change.refused
    snapshot = snapshot._replace(entry=made.head)
    with meter.measure("read the version"):
        assert sum(1 for _ in snapshot.files()) == count
    with meter.measure("commit a thousandth again"):
        job, rows = _begun(snapshot, "rekey", listed[::1000])
        job.commit(Wish("rekey", rows, {row.path: files[row.path] for row in rows}))
    with meter.measure("open one file"), pytest.raises(Exception, match="missing"):
        open_file(folder / "dataset", planned[-1].path, kms=kms)
    return meter.figures


def _begun(snapshot: Snapshot, operation: str, listed: Iterable[Entry]) -> tuple[Job, list[FileEntry]]:
    rows = [_entry(found) for found in listed]
    return begin_files(snapshot, operation, {}, rows, lambda job_id: [[Want(MASTER)]] * len(rows), 16)


def files(count: int, folder: Path) -> Figures:
    """So many files of 100 bytes."""
    meter = Meter()
    kms = make_kms(folder)
    src, dataset = folder / "src", folder / "dataset"
    for n in range(count):
        if n % 1000 == 0:
            at = src / f"{n // 1000:04}"
            at.mkdir(parents=True)
        (at / f"{n:08}").write_bytes(b"%100d" % n)
    options: dict[str, Any] = {"kms": kms, "fsync": False, "progress": False, "engine": LocalEngine(2)}

    class StopError(Exception):
        pass

    rows: list[object] = []

    def stop(more: list[object]) -> None:
        rows.extend(more)
        if len(rows) > count * 0.99:
            raise StopError

    with meter.measure("encrypt 99 %"), pytest.raises(StopError):
        encrypt_files(src, dataset, wrapping_key_id=MASTER, **{**options, "progress": stop})
    with meter.measure("resume"):
        done = encrypt_files(src, dataset, wrapping_key_id=MASTER, resume="length", **options)
        assert done.counts == {"ok": count, "skipped": 0, "failed": 0}
    with meter.measure("again, unchanged"):
        assert encrypt_files(src, dataset, wrapping_key_id=MASTER, **options).counts["skipped"] == count
    with meter.measure("verify"):
        assert verify_files(dataset, kms=kms, progress=False, engine=LocalEngine(2)).counts["ok"] == count
    with meter.measure("rekey"):
        assert rekey_files(dataset, **options).counts["ok"] == count
    return meter.figures


@pytest.mark.more
def test_memory_of_a_commit(tmp_path: Path) -> None:
    """A file of a commit takes less than 1,000 bytes, all names and keys included."""
    kms, peaks = make_kms(tmp_path), []
    for count in (100, 10_000, 20_000):  # the first one imports what it needs
        snapshot = Access.of(tmp_path / f"{count} files", kms).create(MASTER)
        gc.collect()
        tracemalloc.start()
        listed = (Entry(f"{count}/part-{n:08}.avro", 4096, f"{n:019}", 1.0) for n in range(count))
        job, planned = _begun(snapshot, "encrypt", listed)
        job.commit(Wish("encrypt", planned))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        del planned, job
    assert (peaks[2] - peaks[1]) / 10_000 < 1000


@pytest.mark.parametrize("engine", [LocalEngine(0), LocalEngine(1)])
def test_a_commit_does_not_list_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: LocalEngine
) -> None:
    """One more file in a folder of the dataset costs the same however many files the folder has."""
    kms, src, dataset = make_kms(tmp_path), tmp_path / "src", tmp_path / "dataset"
    (src / "sub").mkdir(parents=True)
    (src / "sub/first").write_bytes(b"x")
    encrypt_files(src, dataset, kms=kms, wrapping_key_id=MASTER, engine=engine, progress=False)
    (src / "sub/second").write_bytes(b"y")
    listed = []

    def noting(list_folder: Callable[..., Any]) -> Callable[..., Any]:
        def listing(folder: Any = ".") -> Any:
            listed.append(os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) else os.fspath(folder))
            return list_folder(folder)

        return listing

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    assert encrypt_files(src, dataset, kms=kms, wrapping_key_id=MASTER, engine=engine, progress=False).counts["ok"] == 1
    handle = Dataset.open(dataset, kms=kms)
    with handle.transaction() as new, new.create("sub/third") as file:
        file.write(b"z")
    assert str(src / "sub") in listed
    assert str(dataset / "sub") not in listed


def measured(what: str, count: int, folder: Path) -> Figures:
    """In a process of its own, whose memory is only this."""
    folder.mkdir()
    out = subprocess.run(
        [sys.executable, __file__, what, str(count), str(folder)],
        env=python_env(),
        stdout=subprocess.PIPE,
        check=True,
    )
    figures: Figures = json.loads(out.stdout)
    return figures


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("what", "count"), [("entries", 1_000_000), ("files", 100_000)])
def test_linear(tmp_path: Path, what: str, count: int) -> None:
    part, whole = (measured(what, n, tmp_path / str(n)) for n in (count // 4, count))
    for name, (_, seconds, peak) in whole.items():
        assert seconds < 6 * part[name][1] + 1, (name, part, whole)
        assert peak < 4.5 * part[name][2], (name, part, whole)
        assert peak < count * 4 / 1024 + 300, (name, whole)  # at most 4 KiB for each


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[3] if len(sys.argv) > 3 else None) as made:
        print(json.dumps({"entries": entries, "files": files}[sys.argv[1]](int(sys.argv[2]), Path(os.fsdecode(made)))))
