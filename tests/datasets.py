"""Helpers for tests of datasets: a KMS in a file, trees of files, and checks that hold for any dataset."""

from __future__ import annotations

import os
import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kms_clients import keystore
from support import pattern

from ags_fast.dataset import reach
from ags_fast.dataset.access import Access
from ags_fast.dataset.deks import rewrapped_column, with_new_keys
from ags_fast.dataset.entries import FileEntry
from ags_fast.dataset.keys import Rotation
from ags_fast.dataset.kinds import Want
from ags_fast.dataset.names import LOG, entry_path, object_name
from ags_fast.dataset.plan import Copy
from ags_fast.fs import Store
from ags_fast.jobs import LocalEngine, encrypt_files
from ags_fast.jobs.rotation import Rotating
from ags_fast.jobs.work.context import Context
from ags_fast.keys.kms import load_kms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import pytest

    from ags_fast import Dataset
    from ags_fast.dataset.job import Job, Rewrite
    from ags_fast.dataset.log import Log
    from ags_fast.dataset.snapshot import Snapshot
    from ags_fast.jobs import JobResult, Row

HERE = LocalEngine(0, files_at_once=1)  # in this process, which saves time, and one by one, in their order
QUIET: Any = {"engine": HERE, "progress": False}
MASTER = "master"
MAIN = Want(MASTER)
MASTERS = (MASTER, "other", "third", "hr", "finance")


def make_kms(folder: Path, *, name: str = "kms", keys: Iterable[str] = (MASTER,)) -> dict[str, str]:
    """The properties of a new KMS in files of `folder`."""
    return keystore(folder, *keys, name=f"{name}.json")


def small_tree() -> dict[str, bytes]:
    """Make files like those of data lakes, some of them with sizes near the edges of blocks of 1 KiB."""
    tree = {f"year=2026/month={m}/part-{n:05d}.avro": pattern(700 * n + m, n) for m in (1, 2) for n in range(4)}
    tree |= {"empty": b"", "a b/ü €/日本.txt": "ünïcode".encode(), "one": b"x"}
    return tree | {f"edge/{n}": pattern(n, n) for n in (1023, 1024, 1025, 2048)}


def write_tree(folder: Path, tree: Mapping[str, bytes]) -> Path:
    for path, data in tree.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def data_files(url: str | Path) -> set[str]:
    """Return the names of the files of a dataset; other processes may add and remove files meanwhile."""
    found = (os.path.relpath(os.path.join(at, name), url) for at, _, names in os.walk(url) for name in names)
    return {path for path in found if not path.startswith("_ags/")}


def read_tree(folder: Path) -> dict[str, bytes]:
    """Return every file, also hidden and temporary files."""
    found = (Path(at, name) for at, _, names in os.walk(folder) for name in names)
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}


def encrypt(src: Any, dataset: Any, kms: Any, **options: Any) -> JobResult:
    """`encrypt_files` in this process."""
    return encrypt_files(src, dataset, kms=kms, **{"wrapping_key_id": MASTER, "fsync": False, **QUIET, **options})


def add_tree(dataset: Path, kms: Any, tree: Mapping[str, bytes], **options: Any) -> JobResult:
    """Encrypt files of a new folder beside the dataset, all of them."""
    src = write_tree(dataset.parent / f"src {len(list(dataset.parent.glob('src *')))}", tree)
    result = encrypt(src, dataset, kms, **options)
    result.raise_for_failures()
    return result


def version_of(dataset: Any, kms: Any, version: int | None = None) -> Snapshot:
    """The newest version, or the one with this number."""
    return Access.of(dataset, kms, version=version).open()


def rows_of(dataset: Any, kms: Any, version: int | None = None) -> dict[str, FileEntry]:
    """The files of a version, as its tables have them, by path."""
    return {row.path: row for row in sorted(version_of(dataset, kms, version).files())}


def kept_numbers(dataset: Any, kms: Any) -> list[int]:
    """The numbers of the versions that are kept."""
    log, head = version_of(dataset, kms)
    return sorted(entry.number for entry in log.kept(head))


def object_of(dataset: Path, kms: Any, path: str) -> Path:
    """The object that holds a file in the newest version."""
    return dataset / version_of(dataset, kms).file(path).file


def keys_of(dataset: Any, kms: Any) -> set[bytes]:
    """The data keys and KEKs of the newest version, in clear."""
    snapshot, client = version_of(dataset, kms), load_kms(kms)
    rows, keks = snapshot.files(), snapshot.entry.keys.values()
    keys = {snapshot.envelope.unwrap(*wrap) for row in rows for wrap in row.wraps(snapshot.entry.dataset_id)}
    return keys | {client.unwrap_key(kek.wrapped, kek.wrapping_key_id) for kek in keks if kek.wrapped is not None}


def decrypted(dataset: Any, kms: Any, *, version: int | None = None) -> dict[str, bytes]:
    """Every file of a version, opened by what its tables say."""
    snapshot = version_of(dataset, kms, version)
    entry = snapshot.entry
    context = Context("verify", "", entry.dataset_id, snapshot.log.store, snapshot.envelope)
    contents = {}
    for row in snapshot.files():
        assert row.path not in contents, f"{row.path} is there twice"
        with context.reader(row) as reader:
            contents[row.path] = reader.read()
            reader.verify()
    assert (entry.count, entry.nbytes) == (len(contents), sum(map(len, contents.values())))
    return contents


def leftovers(dataset: Path, kms: Any) -> list[str]:
    """Return the files of a dataset that no version needs."""
    log = Access.of(dataset, kms).log()
    head = log.head()
    known = reach.needed(log, head).union(map(entry_path, range(head.first, head.number + 1)))
    return sorted(read_tree(dataset).keys() - known)


def operations(dataset: Dataset) -> list[str]:
    """What has made each version but the first one, the oldest first. A job that was given up makes one, too: "end"."""
    dataset.refresh()
    return [version.operation for version in dataset.versions()][-2::-1]


def lose_an_answer(
    monkeypatch: pytest.MonkeyPatch,
    error: type[OSError] = OSError,
    then: Callable[[], object] = lambda: None,
    *,
    before: Callable[[], object] = lambda: None,
) -> None:
    """Let the next entry of a log be created, and let the storage say that this failed.

    Args:
        monkeypatch: Is undone by the request.
        error: What the storage says.
        then: Runs before the answer.
        before: Runs before the entry is created.
    """
    real = Store.create_exclusive

    def create(store: Store, path: str, data: bytes) -> None:
        if not path.startswith(LOG):
            real(store, path, data)
            return
        monkeypatch.undo()
        before()
        real(store, path, data)
        then()
        raise error("the answer was lost")

    monkeypatch.setattr(Store, "create_exclusive", create)


def row_of(result: JobResult, path: str) -> Row:
    """The one row whose source ends so."""
    rows = [row for row in result.rows if f"/{row.src}".endswith(f"/{path}")]
    assert len(rows) == 1, (path, result.rows)
    return rows[0]


def rewrap_keks(log: Log, wrapping_key_id: str) -> None:
    """Have a master key wrap the KEKs under it once more, whether or not it has a new version."""
    work = Rotating(log, "mek", Rotation(wrapping_key_id, None, wrapping_key_id), LocalEngine(0), 1, False)
    work.current_version = lambda master: None
    work.turn(log.head(), None, False)


def new_row(job: Job, path: str, kind: Want = MAIN) -> FileEntry:
    """Return a new file of a job, without content."""
    (key_id,) = job.keys.take([kind])
    file = object_name(path, f"{job.id}-{secrets.token_hex(4)}")
    job.made.append(file)
    row = FileEntry(
        path, file, "ags1", 0, 36, 1 << 20, key_id, b"", None, bytes(16), job.id, None, None, None, path, ""
    )  # fmt: skip
    (sealed,) = with_new_keys([row], 16, job.keys.envelope(), job.base.dataset_id)
    return sealed


def replace_keks(job: Job, **options: Any) -> None:
    """Replace KEKs as a rotation does, but copy the tables in this thread."""

    def copies(work: Rewrite) -> dict[str, Copy]:
        how = work.moves, partial(rewrapped_column, work.envelope), job.id, work.sealer, work.envelope
        return {table.path: Copy(table.path, job.log.tables.with_wraps(table, *how)) for table in work.tables}

    job.rotate(Rotation(**options), copies, lambda head, keys: keys, {})
