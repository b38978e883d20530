"""Helpers for tests of datasets: a KMS in a file, trees of files, and checks that hold for any dataset."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kms_clients import keystore
from support import pattern

from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.names import CHAIN, LISTS
from ags_fast.jobs import LocalEngine, encrypt_files
from ags_fast.jobs.work.context import Context
from ags_fast.keys.kms import load_kms
from ags_fast.keys.stores import DatasetKeyStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ags_fast.jobs import JobResult, Row

HERE = LocalEngine(0)  # in this process: starts no others, which saves time
QUIET: Any = {"engine": HERE, "progress": False}
MASTER = "master"
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


def decrypted(dataset: Any, kms: Any, *, version: int | None = None) -> dict[str, bytes]:
    """Every file of a version, opened by what its manifests say."""
    opened = Ledger.open(dataset, load_kms(kms))
    head = opened.current(version=version)
    context = Context("verify", "", opened.id, opened.store, opened.envelope)
    contents = {}
    for entry in opened.entries(head):
        assert entry.path not in contents, f"{entry.path} is there twice"
        with context.reader(entry) as reader:
            contents[entry.path] = reader.read()
            reader.verify()
    assert head is None or (head.files, head.plain_length) == (len(contents), sum(map(len, contents.values())))
    return contents


def leftovers(dataset: Path, kms: Any) -> list[str]:
    """Return the files of a dataset that belong to no version, and to neither its keys nor its versions."""
    opened = Ledger.open(dataset, load_kms(kms))
    known: set[str] = set()
    for number in opened.version_numbers():
        version = opened.version(number)
        known.update(ref.path for ref in version.manifests)
        known.update(entry.file for entry in opened.entries(version))
        known.update(f"{LISTS}{name}.json" for name in version.lists)
        known.update(f"{CHAIN}{name}.json" for name in version.chain.needed(version.sha256))
    if isinstance(opened.keys, DatasetKeyStore):
        known |= opened.keys.objects(opened.keys.version)
    found = set(read_tree(dataset)) - known
    return sorted(path for path in found if not path.startswith(("_ags/keys/0", "_ags/versions/0")))


def row_of(result: JobResult, path: str) -> Row:
    """The one row whose source ends so."""
    rows = [row for row in result.rows if row.src.endswith("/" + path)]
    assert len(rows) == 1, (path, result.rows)
    return rows[0]
