"""Each extra alone: in an empty environment a part names the command that installs it, and works after that command."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kms_services
import pytest
import servers
import test_azure
import test_gcs

from ags_fast._version import __version__
from ags_fast.fs import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "setup.py").is_file():
    pytest.skip("needs the source tree", allow_module_level=True)

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]

KEYS = """
import os, subprocess, sys
from pathlib import Path
from ags_fast.keys.kms import local
Path("src").mkdir(exist_ok=True); Path("src/a.txt").write_text("text")
kms = {"encryption.kms-type": "local", "kms.local.path": "store.json", "kms.local.key-file": "store.key"}
if not Path("store.json").exists():
    local.create_keystore(kms); local.create_key(kms, "sales")
"""
USES_KMS = """
import json, os, sys
sys.path.append(os.environ["TESTS"])  # the credential of the fake Azure
from ags_fast.keys.kms import load_kms
client = load_kms(json.loads(os.environ["KMS"]))
assert client.unwrap_key(client.wrap_key(bytes(16), os.environ["KEY"]), os.environ["KEY"]) == bytes(16)
"""
USES_STORE = """
import json, os
import ags_fast
url, options = os.environ["URL"], json.loads(os.environ["STORAGE"])
with ags_fast.open(url, "wb", key=bytes(16), storage_options=options) as file:
    file.write(b"text")
with ags_fast.open(url, key=bytes(16), length=file.file_length, storage_options=options) as file:
    assert file.read() == b"text"
"""
STORES = ("s3-store", "gcs-store", "azure-store")
SERVICES = ("aws", "gcp", "azure", "vault", "pkcs11")
# Datasets need no extra, not even of Parquet files.
DATASETS = (
    KEYS
    + """
from ags_fast import jobs
new = {"kms": kms, "wrapping_key_id": "sales"}
jobs.encrypt_files("src", "new.enc", **new).raise_for_failures()
jobs.encrypt_files("tables", "new.enc", format="parquet", column_keys={"x": "sales"}, **new).raise_for_failures()
jobs.rotate("new.enc", kms=kms).raise_for_failures()
done = jobs.verify_files("new.enc", kms=kms)
assert done.counts["ok"] == 2
assert "pyarrow" not in sys.modules
try:
    done.table
except ImportError as error:
    assert str(error).startswith("JobResult.table needs pyarrow: pip install '"), error
    assert str(error).endswith("[files]'"), error
from ags_fast.__main__ import main
options = ["--keystore", "store.json", "--key-file", "store.key"]
assert main(["ls", "new.enc", *options]) == 0
jobs.decrypt_files("new.enc", "back", kms=kms).raise_for_failures()
assert Path("back/a.txt").read_text() == "text"
"""
)
# What users do first. A program leaves nothing if it fails because an extra is missing.
PROGRAMS = {
    "filesystem": KEYS
    + """
from ags_fast.filesystem import AgsFileSystem
from ags_fast import jobs
jobs.encrypt_files("src", "fs.enc", kms=kms, wrapping_key_id="sales").raise_for_failures()
assert AgsFileSystem("fs.enc", kms).cat("a.txt") == b"text"
""",
    "mount": KEYS
    + """
Path("mounted").mkdir(exist_ok=True)
words = ["mount", "none.enc", "mounted", "--keystore", "store.json", "--key-file", "store.key"]
done = subprocess.run([sys.executable, "-m", "ags_fast", *words], capture_output=True, text=True)
if "[files]" in done.stderr:
    assert done.returncode == 6
    raise SystemExit(done.stderr)
assert "none.enc" in done.stderr or "fuse" in done.stderr, done.stderr  # no such dataset, or no libfuse
""",
    "spark": KEYS
    + """
words = ["encrypt", "src", "spark.enc", "--engine", "spark", "--spark-master", "local[1]", "--wrapping-key-id", "sales"]
words += ["--keystore", os.path.abspath("store.json"), "--key-file", os.path.abspath("store.key")]
done = subprocess.run([sys.executable, "-m", "ags_fast", *words], capture_output=True, text=True)
if done.returncode == 6:
    assert not Path("spark.enc").exists()
if done.returncode:
    raise SystemExit(done.stderr)
assert [*Path("spark.enc").glob("a.txt.*.ags")]
""",
    "iceberg": KEYS
    + """
from ags_fast import iceberg
lake = os.path.abspath("lake")
catalog = iceberg.load_catalog("lake", kms=kms, type="sql", uri=f"sqlite:///{lake}.db", warehouse=f"file://{lake}")
import pyarrow as pa
catalog.create_namespace("shop")
rows = pa.table({"id": [1, 2], "name": ["Ada", "Bob"]})
table = catalog.create_table("shop.orders", rows.schema, properties={"encryption.key-id": "sales"})
table.append(rows)
assert table.scan().to_arrow().num_rows == 2
""",
    "avro": """
from ags_fast import avro
schema = {"type": "record", "name": "point", "fields": [{"name": "x", "type": "int"}]}
length = avro.write("points", bytes(16), schema, [{"x": 1}])
(span,) = avro.splits("points", bytes(16), length=length)
assert list(avro.read_split("points", bytes(16), *span, length=length)) == [{"x": 1}]
""",
    "avro-fast": """
from ags_fast import avro
schema = {"type": "record", "name": "point", "fields": [{"name": "x", "type": "int"}]}
length = avro.write("points", bytes(16), schema, [{"x": 1}])
assert [batch.to_pylist() for batch in avro.read_batches("points", bytes(16), length=length)] == [[{"x": 1}]]
""",
    "sql": KEYS
    + """
from ags_fast.keys import open_key_store
assert not list(open_key_store("sqlite:///keys.db").list("orders"))
""",
    **dict.fromkeys(STORES, USES_STORE),
    **dict.fromkeys(SERVICES, USES_KMS),
}
FILES = ("filesystem", "mount", "avro", "avro-fast")
NAMED = {"s3-store": "s3", "gcs-store": "gcs", "azure-store": "azure", "aws": "s3", "gcp": "gcs", "azure": "azure"}
NAMED |= {"spark": "spark", "iceberg": "iceberg", "sql": "sql", "vault": "kms", "pkcs11": "kms"}
NAMED |= dict.fromkeys(FILES, "files")  # the extra that the error of a program names
# Each extra, and programs that it is enough for.
ENOUGH = {
    "files": FILES,
    "iceberg": ("iceberg", "avro"),
    "spark": ("spark",),
    "s3": ("s3-store", "aws"),
    "gcs": ("gcs-store", "gcp"),
    "azure": ("azure-store", "azure"),
    "kms": SERVICES,
    "sql": ("sql",),
    "all": ("filesystem", "avro-fast", "spark", "iceberg", "s3-store", "gcs-store", "azure-store", *SERVICES, "sql"),
}
PAIRS = [(extra, use) for extra, uses in ENOUGH.items() for use in uses]
OF_ONE = [pair for pair in PAIRS if pair[0] != "all"]


def run(environment: Path, program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE"))}
    command = [str(environment / "bin" / "python"), "-P", str(folder / "program.py")]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def uv(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "uv", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of its own, gone afterwards: uv builds PySpark anew in each run, and would keep 2 GB of each build."""
    folder = tmp_path_factory.mktemp("uv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UV_CACHE_DIR", str(folder))
        yield
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def wheel(cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built in a copy: other tests look at the tree's build folder."""
    pytest.importorskip("uv")
    copy, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if not name.startswith(("tests/", "docs/")) and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    build = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(copy)]
    done = subprocess.run([sys.executable, "-P", "-m", *build], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob(f"ags_fast-{__version__}-*.whl")
    return made


@contextmanager
def a_store(kind: str, folder: Path) -> Iterator[Store]:
    """A bucket or a container on a server of its kind."""
    if kind == "s3-store":
        with servers.moto_s3() as s3:
            s3.client().create_bucket(Bucket="extras")
            yield Store("s3://extras", s3.options())
    elif kind == "gcs-store":
        with servers.fake_gcs(folder) as url:
            yield test_gcs.new_store(url, "")
    else:
        with servers.azurite(folder) as options:
            yield test_azure.new_store(options, "")


@pytest.fixture
def server(use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The server that a program talks to."""
    with ExitStack() as stack:
        if use in SERVICES:
            (tmp_path / "server").mkdir()
            service = stack.enter_context(kms_services.started(use, tmp_path / "server"))
            monkeypatch.setenv("TESTS", str(ROOT / "tests"))
            monkeypatch.setenv("KMS", json.dumps(service.properties))
            monkeypatch.setenv("KEY", service.new_key())
        elif use in STORES:
            (tmp_path / "server").mkdir()
            store = stack.enter_context(a_store(use, tmp_path / "server"))
            monkeypatch.setenv("URL", f"{store.url}/file")
            monkeypatch.setenv("STORAGE", json.dumps(store.storage_options))
        yield


@pytest.mark.parametrize("oldest", [False, True], ids=["newest", "oldest"])
def test_datasets_need_no_extra(oldest: bool, wheel: Path, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    environment, folder = tmp_path / "env", tmp_path / "folder"
    (folder / "tables").mkdir(parents=True)
    pq.write_table(pa.table({"x": [1, 2]}), folder / "tables/t.parquet")
    uv("venv", "-q", "--python", sys.executable, environment)
    python = environment / "bin" / "python"
    if oldest:
        uv("pip", "install", "-q", "--python", python, "--resolution", "lowest-direct", "-r", ROOT / "pyproject.toml")
    uv("pip", "install", "-q", "--python", python, *(["--no-deps"] if oldest else []), wheel)
    done = run(environment, DATASETS, folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(("extra", "use"), PAIRS)
def test_extra_alone(extra: str, use: str, wheel: Path, tmp_path: Path) -> None:
    environment, folder = tmp_path / "env", tmp_path / "folder"
    folder.mkdir()
    uv("venv", "-q", "--python", sys.executable, environment)
    uv("pip", "install", "-q", "--python", environment / "bin" / "python", wheel)
    without = run(environment, PROGRAMS[use], folder)
    assert without.returncode, "it works without the extra"
    found = re.search(r"pip install (.*)", without.stderr)
    assert found, without.stderr
    (wanted,) = shlex.split(found[1])
    assert wanted == f"{wheel}[{NAMED[use]}]"
    uv("pip", "install", "-q", "--python", environment / "bin" / "python", f"{wheel}[{extra}]")
    done = run(environment, PROGRAMS[use], folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(("extra", "use"), OF_ONE)
def test_oldest_dependencies(extra: str, use: str, wheel: Path, tmp_path: Path) -> None:
    """The lower bounds in pyproject.toml are versions that work."""
    environment, folder = tmp_path / "env", tmp_path / "folder"
    folder.mkdir()
    uv("venv", "-q", "--python", sys.executable, environment)
    python = environment / "bin" / "python"
    oldest = ("--resolution", "lowest-direct", "-r", ROOT / "pyproject.toml", "--extra", extra)
    uv("pip", "install", "-q", "--python", python, *oldest)
    uv("pip", "install", "-q", "--python", python, "--no-deps", wheel)
    done = run(environment, PROGRAMS[use], folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("use", ["s3-store"])
def test_an_old_botocore_is_refused(use: str, wheel: Path, tmp_path: Path) -> None:
    """s3fs would leave If-None-Match out of its requests, and two writers of a version would both win."""
    environment = tmp_path / "env"
    uv("venv", "-q", "--python", sys.executable, environment)
    uv("pip", "install", "-q", "--python", environment / "bin" / "python", f"{wheel}[s3]")
    uv("pip", "install", "-q", "--python", environment / "bin" / "python", "aiobotocore==2.13.3")
    done = run(environment, PROGRAMS[use], tmp_path)
    assert re.search(r"botocore 1\.34\.\d+ is older than 1\.36\): pip install '.*\[s3\]'", done.stderr)


def extras() -> dict[str, list[str]]:
    """The extras of pyproject.toml."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, list[str]] = project["optional-dependencies"]
    return found


def test_every_extra_is_tried() -> None:
    assert set(ENOUGH) == set(extras()) - {"bench", "dev", "test"}
    assert set(NAMED) == set(PROGRAMS)


def test_a_package_has_one_bound() -> None:
    """Also where more than one extra names the package."""
    bounds: dict[str, set[str]] = {}
    for extra in ENOUGH:
        for requirement in extras()[extra]:
            bounds.setdefault(re.split(r"[\[><=]", requirement)[0], set()).add(requirement)
    assert {name: found for name, found in bounds.items() if len(found) > 1} == {}
