"""fsspec's own tests of file systems, on a dataset."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, make_kms

from ags_fast import Dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

fsspec = pytest.importorskip("fsspec")
abstract: Any = pytest.importorskip("fsspec.tests.abstract")


class AgsFixtures(abstract.AbstractFixtures):
    """A dataset in memory, which waits for no disk. Folders come with their files, so there are no empty ones."""

    @pytest.fixture
    def fs(self, tmp_path: Path) -> Iterator[Any]:
        url, kms = f"memory://{tmp_path.name}", make_kms(tmp_path)
        Dataset.create(url, kms=kms, wrapping_key_id=MASTER)
        yield fsspec.filesystem("ags", dataset=url, kms=kms)
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)

    @pytest.fixture
    def fs_path(self) -> str:
        return "test"

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return posixpath.join

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False

    # What a test begins with is one version, which saves time.

    def _bulk_operations_scenario_0(self, some_fs: Any, *where: Any) -> Any:
        with some_fs.transaction:
            return super()._bulk_operations_scenario_0(some_fs, *where)

    def _glob_edge_cases_files(self, some_fs: Any, *where: Any) -> Any:
        with some_fs.transaction:
            return super()._glob_edge_cases_files(some_fs, *where)


@pytest.mark.more  # 10 s, of many small versions
class TestCopy(abstract.AbstractCopyTests, AgsFixtures):
    pass


class TestGet(abstract.AbstractGetTests, AgsFixtures):
    pass


@pytest.mark.more  # 10 s, of many small versions
class TestPut(abstract.AbstractPutTests, AgsFixtures):
    pass


class NoTests:
    """In the place of a class of tests that an old fsspec has not."""


AbstractOpenTests: Any = getattr(abstract, "AbstractOpenTests", NoTests)


class TestOpen(AbstractOpenTests, AgsFixtures):
    pass


class TestPipe(abstract.AbstractPipeTests, AgsFixtures):
    pass
