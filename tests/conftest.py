"""Settings that all tests share. What they call is in support.py."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
import hypothesis
import pytest
import servers

from ags_fast.keys import clear_cache

pytest.register_assert_rewrite("store_contract")  # the tests in it are run by files that import them

if TYPE_CHECKING:
    from collections.abc import Iterator

    from iceberg_java import Judge
    from parquet_peers import ParquetJava
    from spark_sessions import ConnectServer, LocalSpark

# In CI a failure must be about the change at hand, so the examples are the same in each run. Elsewhere every run looks
# further, and a failure prints the blob that repeats it. The slow tests always look further.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True, max_examples=60)
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("default"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


SHARED_DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"


def pytest_configure(config: pytest.Config) -> None:
    os.environ["XDG_CONFIG_HOME"] = "/proc/none"  # no profile of whoever runs the tests
    # A JVM may end before the last of its objects here. What then collects them, perhaps within ast.parse(), would log
    # a traceback, which calls ast.parse() again: Python 3.11 takes that for a fault of its own.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    if config.pluginmanager.has_plugin("xdist"):
        from groups import Plugin

        config.pluginmanager.register(Plugin())


# By mark and file, patterns of names: what takes too long for `make test`, or for CI.
TIMES: dict[str, dict[str, list[str]]] = tomllib.loads(Path(__file__).with_name("times.toml").read_text())
ALL_MORE = re.compile(r"^pytestmark = .*\bpytest\.mark\.more\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file whose tests are all left out: each worker would, and what these import takes seconds."""
    if "not more" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    return True if ALL_MORE.search(collection_path.read_text()) else None


JVMS = {"judge", "local_spark", "parquet_java"}  # fixtures of a session


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by the time that they take. Leave out what no clone by itself can run: tests of files beside it."""
    for mark, files in TIMES.items():
        tests = re.compile("|".join(rf"{file}\.py::(?:{'|'.join(names)})" for file, names in files.items()))
        for item in items:
            if tests.match(item.nodeid.removeprefix("tests/")):
                item.add_marker(mark)
    for item in items:
        if isinstance(item, pytest.Function) and JVMS.intersection(item.fixturenames):
            item.add_marker(pytest.mark.timeout(300))  # one of them waits until the JVM is there
    wants = [isinstance(item, pytest.Function) and "shared_data" in item.fixturenames for item in items]
    if any(wants) and not SHARED_DATA.is_dir():
        config.hook.pytest_deselected(items=[item for item, left_out in zip(items, wants, strict=True) if left_out])
        items[:] = [item for item, left_out in zip(items, wants, strict=True) if not left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in the end what was left out."""
    if not SHARED_DATA.is_dir():
        terminalreporter.write_line("Not run: tests of other projects' files, which are not in the tree (shared_data).")


def pytest_collection_finish() -> None:
    """Take what is there now out of the garbage collector's sight: all of the suite's imports live to the end.

    Else each of the many collections that tests ask for looks through them, and takes a third of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Files of other projects beside the checkout. Tests that want them are not collected where they are not."""
    return SHARED_DATA


@pytest.fixture(scope="session")
def vectors() -> Path:
    """Small files of other projects, in the tree; see their README."""
    return Path(__file__).resolve().with_name("vectors")


@pytest.fixture(scope="session")
def moto_s3() -> Iterator[servers.S3Server]:
    with servers.moto_s3() as server:
        yield server


@pytest.fixture(scope="session")
def versitygw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3Server]:
    with servers.versitygw(tmp_path_factory.mktemp("versitygw")) as server:
        yield server


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers.fake_gcs(tmp_path_factory.mktemp("fake_gcs")) as url:
        yield url


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with servers.azurite(tmp_path_factory.mktemp("azurite")) as options:
        yield options


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The plaintext files of parquet_corpus.py, by name."""
    from parquet_corpus import CORPUS

    folder = tmp_path_factory.mktemp("corpus")
    for name, make in CORPUS.items():
        make(folder / name)
    return {name: folder / name for name in CORPUS}


@pytest.fixture(scope="session")
def plain_files(corpus: dict[str, Path]) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in corpus.items()}


@pytest.fixture(scope="session")
def parquet_java() -> Iterator[ParquetJava]:
    from parquet_peers import ParquetJava

    with ParquetJava("-XX:TieredStopAtLevel=1") as peer:
        yield peer


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    """Iceberg's Java, one JVM for all tests: a test takes names of tables from `judge.name()`."""
    from iceberg_java import Judge

    with Judge(tmp_path_factory.mktemp("judge")) as one:
        yield one


@pytest.fixture(scope="session")
def local_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSpark]:
    """The one local Spark of all tests that need none of their own."""
    pytest.importorskip("pyspark.sql")
    if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        pytest.skip("there is no Java runtime")
    from spark_sessions import LocalSpark

    spark = LocalSpark(tmp_path_factory.mktemp("spark"))
    yield spark
    spark.stop()


@pytest.fixture(scope="session")
def shared_connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    """The one server of Spark Connect of all tests that need none of their own."""
    pytest.importorskip("grpc_status")
    from spark_sessions import shared_connect_server

    with shared_connect_server(tmp_path_factory.mktemp("connect")) as server:
        yield server


@pytest.fixture(scope="session")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The one cluster of Spark of all tests that need none of their own: the URL of its master."""
    from spark_jobs import standalone_master

    with standalone_master(tmp_path_factory.mktemp("standalone")) as master:
        yield master


@pytest.fixture
def without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands do their jobs in this process: for tests that are not about workers, which take long to start."""
    from ags_fast.jobs import LocalEngine

    monkeypatch.setattr("ags_fast.jobs.run.LocalEngine", lambda: LocalEngine(0))


@pytest.fixture
def no_leftovers(tmp_path: Path) -> Iterator[Path]:
    """A folder in which nothing that has a temporary name may be left."""
    yield tmp_path
    left = [name for name in os.listdir(tmp_path) if name.endswith(".agstmp")]
    assert not left, left


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    """The properties of a KMS in files, with the master keys that tests of datasets use."""
    clear_cache()
    return datasets.make_kms(tmp_path, keys=datasets.MASTERS)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Where a dataset can be. There is nothing yet."""
    return tmp_path / "dataset"
