"""The README's examples run, and what it quotes is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
if not README.exists():
    pytest.skip("there is no README beside an installed package", allow_module_level=True)
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("example", [text for text in EXAMPLES if "spark" not in text])
def test_example(example, tmp_path, monkeypatch):
    if "avro" in example:
        pytest.importorskip("fastavro")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(README), "exec"), {})


def test_spark_example_is_the_tours():
    (example,) = [text for text in EXAMPLES if "spark" in text]
    assert example in (ROOT / "benchmarks" / "tour.py").read_text()


def test_each_command_is_a_target():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", README.read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
