"""docs/dataset-format.md, read by somebody who has only that page, cryptography, msgspec and a KMS to unwrap with."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from datasets import HERE, MASTER, make_kms, write_tree
from second_reader import SecondReader
from support import pattern

from ags_fast import jobs
from ags_fast.keys.kms import load_kms, local


@pytest.mark.parametrize("double_wrap", [True, False])
def test_second_reader(tmp_path: Path, double_wrap: bool) -> None:
    properties = {
        "encryption.kms-type": "local",
        "kms.local.path": str(tmp_path / "keystore"),
        "kms.local.key-file": str(tmp_path / "key"),
    }
    local.create_keystore(properties)
    local.create_key(properties, "master")
    plain = {"a.bin": pattern(200_000), "b/c=1/d.avro": pattern(65536, 7), "e": b"", "größe/f.txt": b"x"}
    for name, data in plain.items():
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_bytes(data)
    (tmp_path / "src/e").chmod(0o4640)
    os.utime(tmp_path / "src/e", ns=(0, -1_500_000_007))
    result = jobs.encrypt_files(
        tmp_path / "src",
        tmp_path / "dataset",
        kms=properties,
        wrapping_key_id="master",
        double_wrap=double_wrap,
        block_size=1 << 16,
        aad_prefix="files.part{n}" if double_wrap else None,
    )
    result.raise_for_failures()
    for rekey in (False, True):
        if rekey:
            jobs.rekey_files(tmp_path / "dataset", kms=properties, double_wrap=double_wrap).raise_for_failures()
        reader = SecondReader(tmp_path / "dataset", load_kms(properties))
        assert reader.files() == plain
        for row in reader.rows():
            info = (tmp_path / "src" / row["path"].decode()).stat()
            assert (row["mode"], row["mtime_ns"]) == (info.st_mode & 0o777, info.st_mtime_ns)
            assert row["path"] != b"e" or (row["mode"], row["mtime_ns"]) == (0o640, -1_500_000_007)


def test_second_reader_of_a_history(tmp_path: Path) -> None:
    kms = make_kms(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a").write_bytes(b"a")
    dataset = tmp_path / "dataset"
    first = jobs.encrypt_files(tmp_path / "src", dataset, kms=kms, wrapping_key_id=MASTER, engine=HERE)
    for _ in range(80):
        last = jobs.rotate(dataset, kms=kms, what="kek", engine=HERE, progress=False)
    reader = SecondReader(dataset, load_kms(kms))
    digests = reader.digests()
    assert digests.keys() == set(range(1, 83))
    assert [first.pin, last.pin] == [f"2-{digests[2]}", f"82-{digests[82]}"]
    assert reader.files() == {"a": b"a"}
    there = {int(path.name): path.read_bytes() for path in (dataset / "_ags/log").glob("*/*")}
    assert {number: hashlib.sha256(data).hexdigest() for number, data in there.items()} == digests


def test_second_reader_of_many_keks(tmp_path: Path) -> None:
    """They are in tables, and so is how often each wraps."""
    kms = make_kms(tmp_path)
    dataset = tmp_path / "dataset"
    plain = {f"{n:03}/file": b"%d" % n for n in range(100)}
    write_tree(tmp_path / "src", plain)
    jobs.encrypt_files(
        tmp_path / "src", dataset, kms=kms, wrapping_key_id=MASTER, engine=HERE, policy=jobs.Policy("partition")
    ).raise_for_failures()
    jobs.remove_files(dataset, "000/file", kms=kms).raise_for_failures()
    jobs.expire(dataset, kms=kms, keep=1, skip_grace=True).raise_for_failures()
    reader = SecondReader(dataset, load_kms(kms))
    assert reader.head["key_tables"]
    assert reader.head["files"][0]["keys"] is None
    assert len(reader.keys) == 100
    assert reader.files() == {path: data for path, data in plain.items() if path != "000/file"}
