"""What a scan of an encrypted table asks for: each key, footer and KEK once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import iceberg_tables
from iceberg_tables import new_table, rows

from ags_fast.iceberg import clear_cache, files, rotate
from ags_fast.keys import set_audit_hook
from ags_fast.keys.metadata import StandardKeyMetadata
from ags_fast.parquet.opened import Opened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILES = 3


class Asked:
    """What was asked for since `clear`: unwraps by master key, key metadata by key, footers by path."""

    def __init__(self) -> None:
        self.unwraps: Counter[str] = Counter()
        self.keys: Counter[bytes] = Counter()
        self.footers: Counter[str | None] = Counter()

    def clear(self) -> None:
        for counts in (self.unwraps, self.keys, self.footers):
            counts.clear()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    found = Asked()
    decode, read_footer = StandardKeyMetadata.decode, Opened._read_footer  # noqa: SLF001 (to count its calls)

    def counted_decode(data: Any) -> StandardKeyMetadata:
        key = decode(data)
        found.keys[bytes(key.encryption_key)] += 1
        return key

    def counted_footer(opened: Opened) -> None:
        found.footers[opened.source.path] += 1
        read_footer(opened)

    def heard(event: dict[str, Any]) -> None:
        if event["operation"] == "unwrap":
            found.unwraps[event["wrapping_key_id"]] += 1

    monkeypatch.setattr(StandardKeyMetadata, "decode", staticmethod(counted_decode))
    monkeypatch.setattr(Opened, "_read_footer", counted_footer)
    set_audit_hook(heard)
    yield found
    set_audit_hook(None)


def test_a_scan_reads_each_key_once(tmp_path: Path, kms: dict[str, str], asked: Asked) -> None:
    """Also with row groups, and filters that look at statistics first: a file's key and footer are read once."""
    made = iceberg_tables.sql_catalog(tmp_path, kms)
    table = new_table(made, write_parquet_row_group_limit="1000")
    for i in range(FILES):
        table.append(rows(i * 5000, (i + 1) * 5000))
    clear_cache()
    table = iceberg_tables.sql_catalog(tmp_path, kms).load_table("ns.t")
    asked.clear()
    scans: list[dict[str, Any]] = [{}, {"selected_fields": ("id",)}, {"row_filter": "id >= 1000 and id < 14000"}]
    for number, scan in enumerate(scans):
        assert len(table.scan(**scan).to_arrow()) == (13_000 if "row_filter" in scan else FILES * 5000)
        assert asked.unwraps == {iceberg_tables.MASTER: 1}, "one KEK, one unwrap in this process"
        assert len(asked.footers) == FILES
        assert set(asked.footers.values()) == {number + 1}
        # The list's key, that of each manifest in it, and that of each data file.
        assert len(asked.keys) == 1 + 2 * FILES
        assert max(asked.keys.values()) <= number + 1


def test_the_kms_is_asked_once_for_each_kek(tmp_path: Path, kms: dict[str, str], asked: Asked) -> None:
    """Also over several handles, scans and snapshots of one table, before and after the KEK is turned."""
    made = iceberg_tables.sql_catalog(tmp_path, kms)
    table = new_table(made)
    table.append(rows(0, 10))
    table.append(rows(10, 20))
    first = table.metadata.snapshots[0].snapshot_id
    for keks in (1, 2):
        clear_cache()
        asked.clear()
        for _ in range(2):
            loaded = iceberg_tables.sql_catalog(tmp_path, kms).load_table("ns.t")
            loaded.scan().to_arrow()
            loaded.scan(snapshot_id=first).to_arrow()
            list(files(loaded))
        assert asked.unwraps == {iceberg_tables.MASTER: 1}, f"with KEK {keks}"
        rotate(loaded, what="kek").raise_for_failures()
