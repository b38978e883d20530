"""What a Store over an object store must do besides: test_gcs.py and test_azure.py run these tests on theirs."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from programs import storage
from store_contract import StoreContract, names, put, race, race_uploads, read_all, writing
from support import finish_python, pattern, program, start_python

from ags_fast.fs.objects import PART_NBYTES

if TYPE_CHECKING:
    from pathlib import Path

    from ags_fast.fs import Store


class ObjectContract(StoreContract):
    def test_create_has_one_winner(self, store: Store, tmp_path: Path) -> None:
        race(store, 2, 15, tmp_path)

    @pytest.mark.parametrize("size", [10, PART_NBYTES, 2 * PART_NBYTES + 1000])
    def test_uploads_have_one_winner(self, store: Store, size: int) -> None:
        race_uploads(store, size)

    def test_a_killed_upload_shows_nothing(self, store: Store) -> None:
        with writing(store, 3 * PART_NBYTES) as child:
            child.kill()
        assert names(store) == []
        assert store.sweep(older_than=0) == []
        put(store, "a/file", pattern(PART_NBYTES + 1))  # whatever the server keeps of it
        assert read_all(store, "a/file") == pattern(PART_NBYTES + 1)

    def test_an_object_that_is_replaced(self, store: Store) -> None:
        put(store, "file", pattern(300_000))
        entry = store.stat("file")
        assert entry is not None
        with store.open_seekable("file", entry) as file, store.open_once("file") as once:
            assert file.read(10) == pattern(300_000)[:10]
            put(store, "file", pattern(300_000))  # the same bytes: another object
            file.seek(250_000)
            with pytest.raises(OSError, match="replaced") as caught:
                file.read(20_000)
            assert caught.value.errno == errno.ESTALE
            with pytest.raises(OSError, match="replaced"):
                once.readinto(bytearray(300_000))
        assert store.read_if_unchanged("file", 300_000, entry.stamp) is None

    def test_forks(self, store: Store) -> None:
        """A connection belongs to its process: a child has its own, neither hangs, at the end neither."""
        child = start_python(program(storage.fork_with_an_upload, store))
        assert finish_python(child) == "child 0,child 1,child/0,child/1,half,parent\n"
