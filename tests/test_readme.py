"""The README's examples run, and what it quotes is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import python_env

ROOT = Path(__file__).resolve().parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
if not README.exists():
    pytest.skip("there is no README beside an installed package", allow_module_level=True)
PAGES = (README, DOCS / "iceberg.md", DOCS / "filesystem.md")
EXAMPLES, *OTHERS = (re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) for page in PAGES)


def orders(folder):
    (folder / "orders" / "2026").mkdir(parents=True)
    (folder / "orders" / "2026" / "01.csv").write_bytes(b"id,name\n1,Ada\n")


@pytest.mark.parametrize("example", [text for text in sum(OTHERS, EXAMPLES) if "spark" not in text])
def test_example(example, tmp_path, monkeypatch):
    if "iceberg" in example:
        pytest.importorskip("pyiceberg")
    if "fsspec" in example or "ags://" in example:
        pytest.importorskip("fsspec")
    if "pandas" in example:
        pytest.importorskip("pandas")
    if "avro" in example:
        pytest.importorskip("fastavro")
    if "jobs" in example or "Dataset" in example:
        pytest.importorskip("pyarrow")
        orders(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(README), "exec"), {})


@pytest.mark.more
@pytest.mark.spark
def test_datasets_on_spark(tmp_path):
    pytest.importorskip("pyspark")
    orders(tmp_path)
    before, example = (text for text in EXAMPLES if "jobs" in text)
    program = "\n".join(line for line in before.splitlines() if "jobs." not in line and not line.startswith("    "))
    env = {**os.environ, **python_env(), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    result = subprocess.run(
        [sys.executable, "-c", program + "\n" + example], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert (tmp_path / "orders.enc" / "2026" / "01.csv.ags").exists()
    assert "'ok': 1" in result.stdout


def test_spark_examples_are_the_tours():
    examples = [text for text in EXAMPLES if "spark" in text and "jobs" not in text]
    chapters = [(ROOT / "benchmarks" / "tour" / f"{name}.py").read_text() for name in ("frames", "avro")]
    assert len(examples) == len(chapters)
    assert all(example in chapter for example, chapter in zip(examples, chapters, strict=True))


def test_each_command_is_a_target():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", README.read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    "page", [README, ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")], ids=lambda page: page.name
)
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
    assert "include SECURITY.md" in (ROOT / "MANIFEST.in").read_text().splitlines()
    quoted = set(re.findall(r"`ags_fast\.(\w+)", text)) | set(re.findall(r"`(Ags\w+)", text))
    assert {"openssl_version", "AgsWriter", "AgsCodec"} <= quoted
    for name in quoted:
        assert hasattr(ags_fast, name) or hasattr(ags_fast.errors, name), name
