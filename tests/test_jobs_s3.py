"""Datasets in S3: on a real server, and on moto's. What dies leaves nothing that looks complete."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import programs.jobs
import pytest
from datasets import HERE
from support import finish_python, pattern, program, run_python, start_python

from ags_fast import Dataset, jobs
from ags_fast.fs import Store
from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from pathlib import Path

    from servers import S3Server

pytest.importorskip("s3fs")
pytest.importorskip("boto3")
pytest.importorskip("pyarrow")

pytestmark = pytest.mark.timeout(900)  # the first time, a server has to be built


@pytest.fixture(params=[pytest.param("moto", marks=pytest.mark.more), "versitygw"])
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue({"moto": "moto_s3"}.get(request.param, request.param))
    return found


@pytest.fixture
def bucket(server: S3Server) -> str:
    name = f"bucket-{os.urandom(8).hex()}"
    server.client().create_bucket(Bucket=name)
    return f"s3://{name}"


def tree(folder: Path, sizes: dict[str, int]) -> dict[str, bytes]:
    plain = {name: pattern(size, i) for i, (name, size) in enumerate(sizes.items())}
    for name, data in plain.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return plain


def content(url: str, kms: dict[str, str], options: dict[str, Any]) -> dict[str, bytes]:
    """Every file of the newest version."""
    found = {}
    for file in Dataset.open(url, kms=kms, storage_options=options).files():
        with jobs.open_file(url, file.path, kms=kms, storage_options=options) as reader:
            found[file.path] = reader.read()
    return found


def unknown_objects(url: str, kms: dict[str, str], options: dict[str, Any]) -> list[str]:
    result = jobs.verify_files(url, kms=kms, storage_options=options, engine=HERE)
    result.raise_for_failures()
    return [row.src for row in result.rows if row.error_class == "ExtraFile"]


def test_round_trip(server: S3Server, bucket: str, kms: dict[str, str], tmp_path: Path) -> None:
    """Workers encrypt and decrypt; the rest is done in this process, which is there sooner."""
    plain = tree(tmp_path / "src", {"a": 9 << 20, "p=1/b": 1 << 20, "p=2/c": 5, "empty": 0})
    url = f"{bucket}/deep/dataset"
    shared: dict[str, Any] = {"kms": kms, "storage_options": server.options()}
    jobs.encrypt_files(tmp_path / "src", url, wrapping_key_id="master", **shared).raise_for_failures()
    assert content(url, kms, server.options()) == plain
    jobs.rekey_files(url, engine=HERE, **shared).raise_for_failures()
    jobs.decrypt_files(url, f"{bucket}/plain", **shared).raise_for_failures()
    copy = Store(f"{bucket}/plain", server.options())
    assert {entry.path: copy.read_small(entry.path, 1 << 30) for entry in copy.list()} == plain
    again = jobs.encrypt_files(f"{bucket}/plain", url, wrapping_key_id="master", overwrite=True, engine=HERE, **shared)
    again.raise_for_failures()  # from S3 to S3; other etags than the files' times, so all of them anew
    assert again.counts["ok"] == 4
    assert content(url, kms, server.options()) == plain
    assert unknown_objects(url, kms, server.options()) == []


@pytest.mark.more
def test_two_at_once_and_a_third(server: S3Server, bucket: str, kms: dict[str, str], tmp_path: Path) -> None:
    """The same tree by two jobs: every path comes from one of them, and nothing of the other is left."""
    plain = tree(tmp_path / "src", {f"{i}": 100_000 + i for i in range(12)})
    common: dict[str, Any] = {"dataset": f"{bucket}/dataset", "kms": kms, "wrapping_key_id": "master"}
    common["storage_options"] = server.options()
    encrypt = program(programs.jobs.run, "encrypt_files", src=tmp_path / "src", **common)
    children = [start_python(encrypt) for _ in range(2)]
    ok = sum(json.loads(finish_python(child, 120).splitlines()[-1])["ok"] for child in children)
    assert ok == len(plain)
    url = f"{bucket}/dataset"
    assert content(url, kms, server.options()) == plain
    assert unknown_objects(url, kms, server.options()) == []
    plain |= tree(tmp_path / "more", {"new": 70_000})
    run_python(program(programs.jobs.run, "encrypt_files", src=tmp_path / "more", **common), timeout=120)
    assert content(url, kms, server.options()) == plain


@pytest.mark.more
def test_a_killed_driver(server: S3Server, bucket: str, kms: dict[str, str], tmp_path: Path) -> None:
    """Killed with its workers in the middle of uploads in parts: the dataset is empty still; a resumed job ends it."""
    plain = tree(tmp_path / "src", {f"{i}": 20 << 20 for i in range(4)})
    url, options = f"{bucket}/dataset", server.options()
    common: dict[str, Any] = {"dataset": url, "kms": kms, "wrapping_key_id": "master", "storage_options": options}
    child = start_python(program(programs.jobs.run, "encrypt_files", src=tmp_path / "src", own_session=True, **common))
    client, name = server.client(), bucket.removeprefix("s3://")
    for _ in range(3000):
        if client.list_multipart_uploads(Bucket=name).get("Uploads"):
            break
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert content(url, kms, options) == {}
    resumed = jobs.encrypt_files(
        tmp_path / "src", url, kms=kms, wrapping_key_id="master", storage_options=options, resume="length"
    )
    resumed.raise_for_failures()
    assert content(url, kms, options) == plain
    jobs.sweep(url, kms=kms, older_than=timedelta(0), storage_options=options)
    assert not client.list_multipart_uploads(Bucket=name).get("Uploads")
    assert unknown_objects(url, kms, options) == []
    assert not list(Store(url, options).list("_ags/plans/"))


def test_keys_are_rotated_and_expired(server: S3Server, bucket: str, kms: dict[str, str], tmp_path: Path) -> None:
    """With the old master version gone, and a key store in another bucket folder."""
    options, url = server.options(), f"{bucket}/dataset"
    plain = tree(tmp_path / "src", {f"{n}": 100 * n for n in range(4)})
    common: dict[str, Any] = {"kms": kms, "storage_options": options, "key_store": Store(f"{bucket}/keys", options)}
    jobs.encrypt_files(tmp_path / "src", url, **common, wrapping_key_id="master", engine=jobs.LocalEngine(0))
    local.rotate_key(kms, "master")
    for what in ("mek", "kek"):
        jobs.rotate(url, **common, what=what, progress=False).raise_for_failures()
    removed = jobs.expire(url, **common, keep=1, skip_grace=True)
    assert {row.format for row in removed.rows} == {"version", "table", "key"}
    local.set_state(kms, "master", "destroyed", version=1)
    jobs.decrypt_files(url, tmp_path / "out", **common, engine=jobs.LocalEngine(0)).raise_for_failures()
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == plain
