"""What a notebook shows: HTML of results, reports and datasets, whoever chose the names in it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, QUIET, encrypt, make_kms, write_tree

from ags_fast import Dataset, jobs
from ags_fast.audit.report import Report

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "<script>top.pwned=1</script>&<b onclick=x>"


class Shown(HTMLParser):
    """The elements, their attributes and the texts of cells."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.cells: list[str] = []
        self.feed(thing._repr_html_())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.cells.append("")

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data

    def fact(self, name: str) -> str:
        return self.cells[self.cells.index(name) + 1]

    def check(self) -> None:
        assert self.elements <= {"table", "caption", "thead", "tbody", "tr", "th", "td", "div"}
        assert self.attributes <= {"scope", "align", "class", "title"}


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return make_kms(tmp_path, keys=(MASTER, HOSTILE))


@pytest.fixture
def dataset(tmp_path: Path, kms: dict[str, str]) -> Path:
    write_tree(tmp_path / "src", {"a": b"a" * 1500, HOSTILE.replace("/", "|"): b"b"})
    encrypt(tmp_path / "src", tmp_path / HOSTILE.replace("/", "|"), kms, wrapping_key_id=HOSTILE)
    return tmp_path / HOSTILE.replace("/", "|")


def test_a_result(dataset: Path, kms: dict[str, str]) -> None:
    next(dataset.glob("*.ags")).write_bytes(b"no stream")
    result = jobs.verify_files(dataset, kms=kms, **QUIET)
    shown = Shown(result)
    shown.check()
    assert shown.fact("pin") == result.pin
    assert (shown.fact("ok"), shown.fact("failed")) == ("1", "1")
    assert "IntegrityError" in shown.cells or "FormatError" in shown.cells
    assert any(HOSTILE.split("/")[0] in cell for cell in shown.cells)


def test_a_dataset(dataset: Path, kms: dict[str, str]) -> None:
    handle = Dataset.open(dataset, kms=kms)
    shown = Shown(handle)
    shown.check()
    assert shown.fact("files") == "2"
    assert shown.fact("pin") == handle.pin
    assert shown.fact("version").startswith("2, by encrypt at ")


def test_reports(dataset: Path, kms: dict[str, str]) -> None:
    for found in (jobs.key_status(dataset, kms=kms), jobs.audit(dataset, kms=kms, event="kek-leaked")):
        assert isinstance(found, Report)
        assert json.loads(json.dumps(found)) == dict(found) == found
        shown = Shown(found)
        shown.check()
        assert shown.fact("version") == "2"
        assert (HOSTILE in shown.cells) == ("steps" in found)  # an audit lists the master keys


def test_what_jupyter_shows(dataset: Path, kms: dict[str, str]) -> None:
    """The calls that it says are calls."""
    found = jobs.audit(dataset, kms=kms, event="kek-leaked")
    shown = Shown(found)
    calls = [cell for cell in shown.cells if cell.startswith("jobs.")]
    assert calls
    for call in calls:
        compile(call, "cell", "eval")
        assert hasattr(jobs, call.removeprefix("jobs.").partition("(")[0])
