"""The site of the documentation in Chromium: widths, contrast, links, and nothing from elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from chromium import CHROMIUM, PROBE, probe

ROOT = Path(__file__).resolve().parents[1]
MKDOCS = ROOT / "build" / "docs" / "bin" / "python"

pytestmark = [pytest.mark.more, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By page, what Chromium finds."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    if not (MKDOCS.parents[1] / "done").exists():
        pytest.skip("needs mkdocs: make docs")
    site = tmp_path_factory.mktemp("site")
    build = [str(MKDOCS), "-P", "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    shutil.copy(PROBE, site)
    pages = sorted(str(page.relative_to(site)) for page in site.rglob("*.html") if page.name != PROBE.name)
    (site / "pages.json").write_text(json.dumps(pages))

    found = probe(site, tmp_path_factory.mktemp("chromium"))
    assert list(found) == pages, found
    return found


def all_of(found: dict[str, dict[str, Any]], what: str) -> dict[str, Any]:
    return {page: result[what] for page, result in found.items() if result[what]}


def test_no_page_is_wider_than_its_window(found: dict[str, dict[str, Any]]) -> None:
    assert all_of(found, "wide") == {}


def test_text_can_be_told_from_its_ground(found: dict[str, dict[str, Any]]) -> None:
    """WCAG AA: 4.5, or 3 for large letters."""
    assert all_of(found, "faint") == {}


def test_links_lead_somewhere(found: dict[str, dict[str, Any]]) -> None:
    assert all_of(found, "broken") == {}


def test_nothing_comes_from_elsewhere(found: dict[str, dict[str, Any]]) -> None:
    assert all_of(found, "elsewhere") == {}
    assert all_of(found, "errors") == {}
