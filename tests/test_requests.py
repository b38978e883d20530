"""How many requests datasets make of an object store, exactly."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from datasets import HERE
from servers.slow_s3 import SlowS3, in_flight, slow_s3
from support import pattern

from ags_fast import Dataset, jobs
from ags_fast.fs import Store, s3
from ags_fast.keys import clear_cache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

pytest.importorskip("s3fs")
pytest.importorskip("boto3")
pytest.importorskip("pyarrow")

FILES = 12


@pytest.fixture(scope="module")
def server() -> Iterator[SlowS3]:
    with slow_s3() as one:
        yield one


@pytest.fixture
def common(server: SlowS3, kms: dict[str, str]) -> dict[str, Any]:
    return {"kms": kms, "storage_options": server.options()}


@pytest.fixture
def url(server: SlowS3, common: dict[str, Any], tmp_path: Path) -> str:
    """A dataset with a few files, in a bucket of its own."""
    where = f"s3://bucket-{os.urandom(8).hex()}/dataset"
    encrypt(tmp_path, where, common, FILES)
    server.log()
    clear_cache()
    return where


def encrypt(tmp_path: Path, url: str, common: dict[str, Any], count: int, **more: Any) -> None:
    (tmp_path / "src").mkdir(exist_ok=True)
    for i in range(count):
        (tmp_path / "src" / f"{i}").write_bytes(pattern(1000 + i))
    jobs.encrypt_files(tmp_path / "src", url, wrapping_key_id="master", engine=HERE, **common, **more)


def test_one_file_of_a_dataset_that_was_never_opened(server: SlowS3, common: dict[str, Any], url: str) -> None:
    with jobs.open_file(url, "7", **common) as file:
        assert file.read() == pattern(1007)
    assert [(one.operation, one.key.removeprefix("dataset/").split("/")[:2][-1][:5]) for one in server.log()] == [
        ("ListObjectsV2", ""),
        ("GetObject", "log"),
        ("ListObjectsV2", ""),  # nothing has come after it meanwhile
        ("GetObject", "table"),
        ("GetObject", "7.202"),
    ]


def test_one_file_of_an_open_dataset(server: SlowS3, common: dict[str, Any], url: str) -> None:
    handle = Dataset.open(url, **common)
    assert server.operations() == ["ListObjectsV2", "GetObject", "ListObjectsV2"]
    with handle.open_file("3") as file:
        assert file.read() == pattern(1003)
    assert server.operations() == ["GetObject", "GetObject"]  # the manifest
    with handle.open_file("5") as file:
        assert file.read() == pattern(1005)
    assert server.operations() == ["GetObject"]
    assert handle.refresh() is False
    assert server.operations() == ["ListObjectsV2"]


def test_a_version_that_comes_with_its_keys(common: dict[str, Any], url: str, tmp_path: Path) -> None:
    """The keys that a first look has read are those of the version, also if another process adds some meanwhile."""
    handle = Dataset.open(url, **common)
    jobs.rotate(url, what="kek", engine=HERE, **common)
    encrypt(tmp_path, url, common, FILES, overwrite=True)
    with handle.open_file("3") as file:
        assert file.read() == pattern(1003)
    assert handle.refresh() is True
    assert handle.open_file("3").read() == pattern(1003)
    assert Dataset.open(url, version=2, **common).version == 2


def test_a_parquet_file_of_an_open_dataset(server: SlowS3, common: dict[str, Any], tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    url = "s3://bucket/of-parquet"
    (tmp_path / "src").mkdir()
    table = pa.table({f"c{i}": [*range(i, i + 20_000)] for i in range(6)})
    for name in "ab":
        pq.write_table(table, tmp_path / "src" / f"{name}.parquet", row_group_size=10_000)
    jobs.encrypt_files(tmp_path / "src", url, format="parquet", wrapping_key_id="master", engine=HERE, **common)
    handle = Dataset.open(url, **common)
    handle.open_file("a.parquet").close()
    server.log()
    server.set(latency=0.05)
    with handle.open_file("b.parquet") as view:
        assert server.operations() == ["GetObject"]  # the footer, size and ETag
        ranges = []
        for group in range(2):
            for column in (0, 2, 4):
                chunk = pq.ParquetFile(view).metadata.row_group(group).column(column)
                begin = chunk.dictionary_page_offset or chunk.data_page_offset
                ranges.append((begin, chunk.total_compressed_size))
        found = view.read_ranges(ranges)  # type: ignore[attr-defined]
        log = server.log()
        assert in_flight(log) == len(log) <= 6
        assert found == [view.read_at(begin, size) for begin, size in ranges]
        assert pq.read_table(view).equals(table)
    server.set()


def test_an_expiry_does_not_read_all_that_it_keeps(server: SlowS3, common: dict[str, Any]) -> None:
    dataset = Dataset.create(f"s3://bucket-{os.urandom(8).hex()}/dataset", wrapping_key_id="master", **common)
    for n in range(44):
        with dataset.transaction() as new:
            with new.create(f"{n}") as file:
                file.write(b"content")
            if n % 3 == 2:
                new.remove(f"{n - 1}")
    assert dataset.version == 45
    server.log()
    jobs.expire(dataset.url, keep=40, **common)
    assert len(server.operations()) <= 40
    assert len([*Dataset.open(dataset.url, **common).versions()]) == 41


def test_many_files_cost_few_listings(server: SlowS3, common: dict[str, Any], url: str, tmp_path: Path) -> None:
    store = Store(url, common["storage_options"])
    for count in (FILES, 300):
        encrypt(tmp_path, url, common, count, overwrite=True)
        asked = Counter(server.operations())
        assert asked["HeadObject"] == 0
        assert asked["PutObject"] <= count + 12
        assert asked["ListObjectsV2"] <= 25
    assert len([entry for entry in store.list() if not entry.path.startswith("_ags/")]) == 2 * FILES + 300
    assert {file.path for file in Dataset.open(url, **common).files()} == {f"{i}" for i in range(300)}


def test_which_files_exist(server: SlowS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against every other way to tell, with names that sort in all ways, and pages of a few objects."""
    monkeypatch.setattr(s3, "PAGE", 5)
    dice = random.Random(3)
    letters = ["a", "b", "/x", "é", "\U0001f600", "-", "0", "10", " "]
    names = sorted({"f" + "".join(dice.choices(letters, k=dice.randrange(1, 5))) for _ in range(300)})
    there = {name for name in names if dice.random() < 0.5}
    for folder in ("", "deep/er"):
        bucket = f"bucket-{len(folder)}"
        server.put_many(bucket, [f"{folder}/{name}" if folder else name for name in there], b"x")
        server.put_many(bucket, ["deep/er-2", "zzz"], b"x")
        store = Store(f"s3://{bucket}/{folder}" if folder else f"s3://{bucket}", server.options())
        for wanted in ([], names[:1], names[7:60:9], names, dice.sample(names, 40), ["zzzz", "\U0010ffff"]):
            server.log()
            assert store.existing(wanted) == there.intersection(wanted)
            assert len(server.log()) <= len(wanted) + 1
    monkeypatch.undo()
    assert store.existing(names) == there
    assert server.operations() == ["ListObjectsV2"]
    memory = Store("memory://which")
    memory.write_small("a", b"x")
    assert memory.existing(["a", "b"]) == {"a"}


def test_small_files_cost_one_request_each(server: SlowS3, common: dict[str, Any], url: str) -> None:
    jobs.verify_files(url, engine=HERE, **common).raise_for_failures()
    log = [one for one in server.log() if "/_ags/" not in one.key and one.key]
    assert Counter(one.operation for one in log) == {"GetObject": FILES}
    target = url.replace("/dataset", "/plain")
    jobs.decrypt_files(url, target, engine=HERE, **common).raise_for_failures()
    log = [one for one in server.log() if one.key.startswith("dataset/") and "/_ags/" not in one.key]
    assert Counter(one.operation for one in log) == {"GetObject": FILES}
    jobs.encrypt_files(target, url + "2", wrapping_key_id="master", engine=HERE, **common).raise_for_failures()
    log = [one for one in server.log() if one.key and "/_ags/" not in one.key]
    assert Counter(one.operation for one in log) == {"GetObject": FILES, "PutObject": FILES}
