"""docs/dataset-format.md, read by somebody who has only that page, cryptography, pyarrow and a KMS to unwrap with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from datasets import HERE, MASTER, make_kms
from support import pattern

pytest.importorskip("pyarrow")
from second_reader import SecondReader

from ags_fast import jobs
from ags_fast.dataset.ledger import Ledger
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
    pins = [jobs.encrypt_files(tmp_path / "src", dataset, kms=kms, wrapping_key_id=MASTER, engine=HERE).pin]
    for _ in range(42):
        jobs.set_policy(dataset, jobs.Policy(), kms=kms)
    opened = Ledger.open(dataset, load_kms(kms))
    for _ in range(42):
        opened.keyring.add_uses({opened.keyring.main_key().key_id: 1})
    jobs.set_policy(dataset, jobs.Policy(), kms=kms)
    pins.append(jobs.verify_files(dataset, kms=kms, engine=HERE).pin)
    digests = SecondReader(dataset, load_kms(kms)).check_history()
    assert len(digests) == 44
    assert pins == [f"1-{digests[1]}", f"44-{digests[44]}"]
    assert [len(list((dataset / f"_ags/{folder}chain").iterdir())) for folder in ("", "keys/")] == [1, 1]
