"""The examples run as they are, and print what they promise."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from datasets import encrypt, write_tree
from support import python_env

from ags_fast import Dataset, jobs

if TYPE_CHECKING:
    from servers import S3Server

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
pytestmark = pytest.mark.more

if not EXAMPLES.is_dir():
    pytest.skip("the tests run without the source tree", allow_module_level=True)

PRINTED = {
    "avro_fastavro": ("{'id': 0, 'name': 'order 0'}\n", "{'id': 2, 'name': 'order 2'}\n"),
    "duckdb_dataset": ("(2025, 1000, 124.875)\n(2026, 1000, 124.875)\n",),
    "pandas_dataset": ("1   2  Bob\n", "2   Cy\n"),
    "polars_parquet": ("8575",),
    "pyiceberg_table": ("[{'id': 3, 'name': 'Cy'}, {'id': 4, 'name': 'Di'}]\n", "'failed': 0}\n"),
    "spark_map_partitions": ("138600\n",),
}
NEEDS = {"avro_fastavro": "fastavro", "pandas_dataset": "pandas", "pyiceberg_table": "pyiceberg"}


def run_example(name: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *args]
    return subprocess.run(command, env=python_env(**env), capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize("name", PRINTED)
def test_runs(name: str) -> None:
    pytest.importorskip(NEEDS.get(name, name.partition("_")[0].replace("spark", "pyspark")))
    done = run_example(name, SPARK_LOCAL_IP="127.0.0.1")
    assert done.returncode == 0, done.stderr
    for text in PRINTED[name]:
        assert text in done.stdout


def test_boto3(moto_s3: S3Server) -> None:
    bucket = f"examples-{os.urandom(8).hex()}"
    moto_s3.client().create_bucket(Bucket=bucket)
    done = run_example(
        "boto3_upload",
        bucket,
        AWS_ENDPOINT_URL=moto_s3.url,
        AWS_DEFAULT_REGION="us-east-1",
        AWS_ACCESS_KEY_ID=moto_s3.key,
        AWS_SECRET_ACCESS_KEY=moto_s3.secret,
    )
    assert (done.returncode, done.stdout) == (0, "id,name\n1,Ada\n"), done.stderr
    stored = moto_s3.client().get_object(Bucket=bucket, Key="reports/2026.csv")["Body"].read()
    assert stored.startswith(b"AGS1")
    assert b"Ada" not in stored


def test_nightly_rotation(kms: dict[str, str], tmp_path: Path) -> None:
    """What is due is done, and nothing else."""
    encrypt(write_tree(tmp_path / "src", {"a": b"one", "b": b"two"}), tmp_path / "ds", kms)
    options = [text for name, value in kms.items() for text in ("--kms", f"{name}={value}")]

    def night() -> tuple[set[str], int, str]:
        done = run_example("nightly_rotation", str(tmp_path / "ds"), *options)
        assert done.returncode == 0, done.stderr
        assert "nightly_rotation: pin to keep elsewhere: " in done.stderr
        now = Dataset.open(tmp_path / "ds", kms=kms)
        return {file.key_id for file in now.sealed_files()}, now.version, done.stderr

    keys, version, told = night()
    assert night()[:2] == (keys, version)
    assert "due:" not in told
    jobs.set_policy(tmp_path / "ds", jobs.Policy(kek_uses=1, keep=2), kms=kms)
    newer, _, told = night()
    assert "due:" in told
    assert keys.isdisjoint(newer)


def test_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell gives the output that the notebook shows."""
    pytest.importorskip("pandas")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    names: dict[str, Any] = {}
    shown = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        printed, results = io.StringIO(), []
        with redirect_stdout(printed):
            exec(compile(tree, "cell", "exec"), names)
            if isinstance(last, ast.Expr):
                results.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
        texts = [text for text in (printed.getvalue(), *(repr(one) for one in results if one is not None)) if text]
        wanted = [out["data"]["text/plain"] if "data" in out else out["text"] for out in cell["outputs"]]
        assert texts == ["".join(lines) for lines in wanted]
        shown += len(texts)
    assert shown == 6
