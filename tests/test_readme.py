"""The snippets of the README and of all pages run, and what the pages quote is there."""

import ast
import logging
import re
import shutil
import subprocess
import sys
import tomllib
from types import SimpleNamespace
from typing import Any

import kms_services
import pytest
from doc_pages import DOCS, README, ROOT, Reader, snippets
from spark_jobs import local_connect, spark_env

if not README.exists():
    pytest.skip("there is no README beside an installed package", allow_module_level=True)

PAGES = [README, *sorted(DOCS.glob("*.md"))]
BESIDE = [ROOT / f"{name}.md" for name in ("SECURITY", "CONTRIBUTING", "CHANGELOG", "CODE_OF_CONDUCT")]
RUN = ("python", "sh")
# many commands, each a process
LONG = {"commands.md", "datasets.md", "recovery.md", "rotation.md", "tutorial.md", "upkeep.md"}
WITH_SERVERS = {"kms.md", "object-stores.md"}
ON_SPARK = {"clusters.md", "keys.md", "spark.md"}
LOCAL = """
mkdir -p orders/2026 && printf 'id,name\\n1,Ada\\n' > orders/2026/01.csv
ags-fast config init local --keystore keystore.json --key-file keystore.key --wrapping-key-id sales
"""
BEFORE = {  # what a page says that is there when it begins
    "recovery.md": LOCAL + "ags-fast encrypt orders orders.enc --wrapping-key-id sales",
    "upkeep.md": LOCAL + "ags-fast encrypt orders orders.enc --wrapping-key-id sales",
}
SPARK = "from pyspark.sql import SparkSession"


def test_readme_is_short():
    assert len(README.read_text().splitlines()) < 130


def pages_to_run():
    for page in PAGES:
        if page.name not in ON_SPARK | WITH_SERVERS and any(snippet.language in RUN for snippet in snippets(page)):
            yield pytest.param(page, id=page.name, marks=[pytest.mark.more] if page.name in LONG else [])


@pytest.fixture
def same_levels():
    """Leave the loggers' levels as they were."""
    loggers = [logging.getLogger(name) for name in ("ags_fast", "ags_fast.kms")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.mark.more
@pytest.mark.usefixtures("same_levels")
@pytest.mark.parametrize("shell", ["zsh", "fish"])
@pytest.mark.parametrize("name", ["README.md", "tutorial.md", "commands.md", "index.md", "rotation.md", "upkeep.md"])
def test_page_in_another_shell(name, shell, tmp_path, monkeypatch):
    """Shells split words and variables in ways of their own."""
    if not shutil.which(shell):
        pytest.skip(f"no {shell} here")
    paste(next(page for page in PAGES if page.name == name), tmp_path, monkeypatch, shell)


@pytest.mark.usefixtures("same_levels")
@pytest.mark.parametrize("page", list(pages_to_run()))
def test_page(page, tmp_path, monkeypatch):
    """Pasted from the top into an empty folder, and what is printed is what the page shows."""
    paste(page, tmp_path, monkeypatch, "bash")


def paste(page, tmp_path, monkeypatch, shell):
    for module in ("dask", "fsspec", "pyarrow", "pandas", "polars", "duckdb", "fastavro", "pyiceberg"):
        if re.search(rf"^(import|from) ({module})\b", page.read_text(), re.MULTILINE):
            pytest.importorskip(module)
    if "ags_fast import iceberg" in page.read_text():
        pytest.importorskip("pyiceberg")
    if "fsspec.config" in page.read_text():
        monkeypatch.setattr("fsspec.config.conf", {})  # what the page sets there is of this process
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    reader = Reader(tmp_path / "folder", shell)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(reader.config))
    if page.name in BEFORE:
        reader.shell(BEFORE[page.name])
    for snippet in snippets(page):
        if snippet.language in RUN and not snippet.installs and SPARK not in snippet.text:
            reader.paste(snippet)


def test_the_matrix_of_versions():
    """The oldest versions are the bounds of the extras, and the newest are those that .ci/requirements.txt locks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(one for extra in set(extras) - {"test", "bench", "dev"} for one in extras[extra]),
    ]
    bounds = dict(re.findall(r"^([\w-]+)(?:\[.*\])?>=([\d.]+)", "\n".join(wanted), re.MULTILINE))
    locked = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / ".ci" / "requirements.txt").read_text(), re.MULTILINE))
    table = [f"| {name} | {bound} | {locked[name]} |" for name, bound in sorted(bounds.items())]
    assert "\n".join(table) in (DOCS / "installing.md").read_text(), "\n".join(table)


def test_installed_extras_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        for names in re.findall(r"(?:ags_fast|\$CHECKOUT|'\.)\[([\w,-]+)\]", page.read_text()):
            assert set(names.split(",")) <= set(extras), f"{page.name}: {names}"


@pytest.mark.more
@pytest.mark.parametrize("name", ["local", "aws", "gcp", "azure", "vault", "pkcs11"])
def test_each_kms(name, tmp_path, monkeypatch):
    """The page's snippet, with the server's own address and key in the place of the example's."""
    pytest.importorskip("pyarrow")
    found = (snippet for snippet in snippets(DOCS / "kms.md") if f'"encryption.kms-type": "{name}"' in snippet.text)
    (snippet,) = (snippet for snippet in found if snippet.language == "python")
    page = ast.parse(snippet.text)
    begin = next(i for i, line in enumerate(page.body) if ast.unparse(line).startswith("key = ")) + 1
    (tmp_path / "server").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "01.csv").write_text("id\n1\n")
    with kms_services.started(name, tmp_path / "server") as service:
        names: dict[str, Any] = {}
        exec(compile(ast.Module(page.body[:begin], []), "snippet", "exec"), names)
        if name != "local":
            assert names["kms"].keys() - {"client.region"} <= service.properties.keys()
            names |= {"kms": {**names["kms"], **service.properties}, "key": service.new_key()}
        exec(compile(ast.Module(page.body[begin:], []), "snippet", "exec"), names)
    assert [*(tmp_path / f"{name}.enc").glob("01.csv.*.ags")]


def test_a_kms_of_ones_own(tmp_path, monkeypatch):
    pytest.importorskip("cryptography")
    (snippet,) = (snippet for snippet in snippets(DOCS / "kms.md") if "class MyKms" in snippet.text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "01.csv").write_text("id\n1\n")
    Reader(tmp_path).paste(snippet)
    assert [*(tmp_path / "own.enc").glob("01.csv.*.ags")]


@pytest.mark.more
def test_object_stores(tmp_path, monkeypatch, moto_s3):
    pytest.importorskip("s3fs")
    moto_s3.client().create_bucket(Bucket="my-bucket")
    for name, value in {
        "AWS_ENDPOINT_URL": moto_s3.url,
        "AWS_ACCESS_KEY_ID": moto_s3.key,
        "AWS_SECRET_ACCESS_KEY": moto_s3.secret,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path)
    reader.shell(LOCAL.partition("ags-fast")[0])
    for snippet in snippets(DOCS / "object-stores.md"):
        if snippet.language in RUN:
            reader.paste(snippet)


def on_spark(page, chosen, folder, **swaps):
    """Run the page's snippets that have `chosen` in them, in a driver of their own; return what is printed."""
    pytest.importorskip("pyspark")
    text = "\n".join(
        snippet.text for snippet in snippets(DOCS / page) if snippet.language == "python" and chosen(snippet)
    )
    for shown, real in swaps.values():
        assert shown in text
        text = text.replace(shown, real)
    result = subprocess.run(
        [sys.executable, "-c", f"{text}\nspark.stop()"], cwd=folder, env=spark_env(), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


SESSION = "SparkSession.builder"
SMALL = f'{SESSION}.master("local[2]").config("spark.ui.enabled", "false")'


@pytest.mark.more
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_datasets_on_spark(tmp_path):
    Reader(tmp_path).shell(LOCAL)
    printed = on_spark("datasets.md", lambda snippet: SPARK in snippet.text, tmp_path, builder=(SESSION, SMALL))
    assert [*(tmp_path / "orders-spark.enc" / "2026").glob("01.csv.*.ags")]
    assert "'ok': 1" in printed


@pytest.mark.more
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_frames_on_spark(tmp_path):
    """An editable installation has to register the sources."""
    session = f"spark = {SESSION}.getOrCreate()\n"
    real = f"spark = {SMALL}.getOrCreate()\nfrom ags_fast.spark.datasource import register\nregister(spark)\n"
    printed = on_spark("spark.md", lambda snippet: True, tmp_path, session=(session, real))
    assert "|     DE| 1000|" in printed
    assert len(list((tmp_path / "partitioned.enc").glob("year=2026/month=*"))) == 12
    assert list((tmp_path / "events-copy.enc").glob("*.parquet"))


@pytest.mark.more
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_clusters_on_spark(tmp_path):
    printed = on_spark("clusters.md", lambda snippet: "remote(" not in snippet.text, tmp_path, builder=(SESSION, SMALL))
    assert not printed
    Reader(tmp_path).shell(LOCAL)
    places = {"kms.local.path": f"{tmp_path}/keystore.json", "kms.local.key-file": f"{tmp_path}/keystore.key"}
    kms = {"encryption.kms-type": "local", **places}
    swaps = {
        "server": ("sc://spark.example.com:15002", "local[1]"),
        "bucket": ("s3://bucket/", f"{tmp_path}/"),
        "kms": ('{"encryption.kms-type": "aws", "client.region": "eu-central-1"}', repr(kms)),
    }
    with local_connect():
        on_spark("clusters.md", lambda snippet: "remote(" in snippet.text, tmp_path, **swaps)
    assert [*(tmp_path / "orders.enc" / "2026").glob("01.csv.*.ags")]


@pytest.mark.more
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_key_material_on_spark(tmp_path):
    """The tour's class stands for the reader's own."""
    from benchmarks.tour.parquet import jvm_classes

    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    classes = jvm_classes()
    if classes is None:
        pytest.skip("no JVM can compile and run the KMS client here")
    Reader(tmp_path).shell(LOCAL + "ags-fast keys create hr; rm orders/2026/01.csv")
    pq.write_table(pa.table({"id": [1, 2], "ssn": ["123", "456"]}), tmp_path / "orders" / "2026" / "01.parquet")
    swaps = {
        "class": ('client.class": "com.example.MyKms"', 'client.class": "ags.tour.LocalKeystore"'),
        "builder": (SESSION, f'{SMALL}.config("spark.driver.extraClassPath", "{classes}")'),
    }
    printed = on_spark("keys.md", lambda snippet: SPARK in snippet.text, tmp_path, **swaps)
    assert "|  2|456|" in printed


@pytest.mark.more
def test_a_kms_of_your_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path)
    for snippet in snippets(DOCS / "keys.md"):
        if snippet.text.startswith("ags-fast keys destroy"):
            keys = "--wrapping-key-id my-key --keystore keystore --key-file keystore.key"
            reader.shell(f"mkdir orders && touch orders/empty && ags-fast encrypt orders orders.enc {keys}")
        if snippet.language in RUN and SPARK not in snippet.text:
            reader.paste(snippet)
    service = SimpleNamespace(
        encrypt=lambda key_id, key: key[::-1] + b"!", decrypt=lambda key_id, wrapped: wrapped[-2::-1]
    )
    reader.names["my_service"] = {"https://kms": service}.get
    kms = reader.names["MyKms"]()
    kms.initialize({"my.url": "https://kms"})
    key = bytes(range(16))
    assert kms.unwrap_key(kms.wrap_key(key, "sales"), "sales") == key


def test_spark_examples_are_the_tours():
    """The tour runs them."""
    for page, chapter in (("spark", "frames"), ("streams", "avro")):
        code = (ROOT / "benchmarks" / "tour" / f"{chapter}.py").read_text()
        (example,) = (
            s.text for s in snippets(DOCS / f"{page}.md") if s.text.startswith(("def write", "import shutil"))
        )
        assert re.split(r"\n\n\n(?=write\()", example[example.index("def ") :])[0].rstrip() in code


def test_each_command_is_a_target():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(
        r"`make ([a-z-]+)", "".join(page.read_text() for page in [*PAGES, ROOT / "CONTRIBUTING.md"])
    ):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", [*PAGES, *BESIDE], ids=lambda page: page.name)
def test_links(page):
    """Each leads to a file, and to a heading in it."""
    for file, heading in re.findall(r"\]\(([^):#]*)(?:#([^)]*))?\)", page.read_text()):
        target = page.parent / file if file else page
        assert target.exists(), f"{page.name} refers to {file}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def test_what_security_says_of_this_version():
    """The README refers to it, it is in the source distribution, and what it quotes of the library is there."""
    import ags_fast

    text = (ROOT / "SECURITY.md").read_text()
    assert "(SECURITY.md)" in README.read_text()
    assert any("SECURITY.md" in line.split()[1:] for line in (ROOT / "MANIFEST.in").read_text().splitlines() if line)
    quoted = set(re.findall(r"`ags_fast\.(\w+)", text)) | set(re.findall(r"`(Ags\w+)", text))
    assert {"crypto", "AgsWriter", "AgsCodec"} <= quoted
    for name in quoted:
        assert hasattr(ags_fast, name) or hasattr(ags_fast.errors, name), name


def test_picture_of_the_design(tmp_path):
    """The picture shows the layers that import-linter checks."""
    made = tmp_path / "design.svg"
    subprocess.run([sys.executable, ROOT / ".ci" / "picture.py", made], check=True)
    assert made.read_text() == (DOCS / "design.svg").read_text(), "run: python3 .ci/picture.py"


def test_the_site_has_every_page():
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert set(named) == pages | {page.name for page in BESIDE}


def test_commits_run_the_tools_of_lint():
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lint
    commands = lint[1].replace("$(PY)", ".venv/bin/python").replace("$(VENV)", ".venv").replace("\t", "").splitlines()
    hooks = re.findall(r"^ +entry: (.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    assert [hook.removesuffix(" --force-exclude") for hook in hooks] == commands
