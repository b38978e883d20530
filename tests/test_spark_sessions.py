"""The data source "ags_parquet" in sessions of every kind and in every Spark that has data sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import pytest
from iceberg_java import pyspark_folder
from spark_jobs import local_connect, spark_env, spark_home

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
    pytest.skip("there is no Java runtime", allow_module_level=True)

import pyarrow as pa
from pyarrow import parquet

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = [pytest.mark.more, pytest.mark.spark, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[1]
COUNT = 5000


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A dataset of two years, and its KMS."""
    folder = tmp_path_factory.mktemp("place")
    kms = datasets.make_kms(folder)
    for year in (2025, 2026):
        ids = list(range(COUNT * (year - 2025), COUNT * (year - 2024)))
        (folder / "src" / f"year={year}").mkdir(parents=True)
        table = pa.table({"id": ids, "name": [f"n{i}" for i in ids]})
        parquet.write_table(table, folder / "src" / f"year={year}" / "a.parquet", row_group_size=1000)
    datasets.encrypt(folder / "src", folder / "ds", kms, format="parquet").raise_for_failures()
    return folder / "ds", kms


def modules(folder: Path) -> Path:
    """A folder for the Python path with the modules by which Spark finds data sources, as an installation has them.

    An editable installation has them where Python can import them, and cannot list them.
    """
    folder.mkdir()
    for name in ("pyspark_ags_parquet", "pyspark_ags_avro"):
        source = ROOT / f"{name}.py"
        if not source.is_file():
            pytest.skip("needs the source tree")
        shutil.copy(source, folder)
    return folder


def check(
    place: tuple[Path, dict[str, str]], folder: Path, settings: Mapping[str, str], path: str = "", **env: str
) -> dict[str, Any]:
    dataset, kms = place
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.sql.shuffle.partitions": "2",
        "spark.local.dir": str(folder / "scratch"),
        **settings,
    }
    command = [sys.executable, str(Path(__file__).with_name("spark_frames.py")), json.dumps(settings), str(dataset)]
    environ = spark_env(**env)
    places = [path, str(modules(folder / "modules")), environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    done = subprocess.run([*command, json.dumps(kms)], capture_output=True, env=environ, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[done.stderr.find("Traceback") :][:5000]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert answer["schema"] == "struct<id:bigint,name:string,year:int,_file:string>"
    assert answer["sums"] == [
        [year, sum(range(COUNT * (year - 2025), COUNT * (year - 2024))), f"year={year}/a.parquet"]
        for year in (2025, 2026)
    ]
    assert answer["pruned"] == {"sum(id)": sum(range(COUNT, 2 * COUNT)), "count(1)": COUNT}
    assert answer["declared"] == [[0, "n0"], [1, "n1"]]
    assert "did you mean 'columns'" in answer["error"]
    assert answer["registered"] == 2 * COUNT
    return answer


def test_connect(place: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    pytest.importorskip("grpc_status")
    with local_connect():
        answer = check(place, tmp_path, {"spark.remote": "local[2]"})
    assert answer["kind"] == "pyspark.sql.connect.session"


def test_local_cluster(place: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """Each Python worker may use 1 GiB of address space: pyarrow alone reserves a part of it."""
    home = spark_home(tmp_path / "home", tmp_path / "work")
    settings = {"spark.master": "local-cluster[2,1,2048]", "spark.executor.pyspark.memory": "1g"}
    check(place, tmp_path, settings, SPARK_HOME=str(home))


def test_standalone(place: tuple[Path, dict[str, str]], standalone: str, tmp_path: Path) -> None:
    check(place, tmp_path, {"spark.master": standalone})


@pytest.mark.parametrize("version", ["4.0", "4.1"])
def test_older_sparks(place: tuple[Path, dict[str, str]], tmp_path: Path, version: str) -> None:
    answer = check(place, tmp_path, {"spark.master": "local[2]"}, str(pyspark_folder(version)))
    assert answer["version"].startswith(version + ".")
