"""ags-fast keys audit --html: one page, whoever chose the names in it, and however many keys there are."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import os
import random
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from chromium import CHROMIUM, PROBE, probe
from datasets import MASTER, make_kms, read_tree, write_tree

from ags_fast import cli, jobs
from ags_fast.audit.runbook import EVENTS
from ags_fast.cli.codes import EXIT_KEY_ACCESS, EXIT_NOT_FOUND
from ags_fast.markup import clipped, el, joined, nbytes, text
from ags_fast.page.audit import audit_page
from ags_fast.page.graph import graph_of
from ags_fast.profiles import profile

pytestmark = pytest.mark.usefixtures("without_workers")

DAY = 86_400_000
HOSTILE = "\"'><script>top.pwned=1</script><img src=//evil/x onerror=alert(1)> style=x &amp; \u202e\x1b[31m\n\udcff"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The current directory: a dataset, ds, of two versions with two KEKs."""
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "src", {"a": b"a" * 1000, "b/c": b"b"})
    kms = make_kms(tmp_path)
    monkeypatch.setenv("AGS_FAST_CONFIG", str(tmp_path / "config.toml"))
    lines = [f"{json.dumps(name)} = {json.dumps(value)}" for name, value in kms.items()]
    (tmp_path / "config.toml").write_text("\n".join(["[profiles.p]", *lines]))
    monkeypatch.setenv("AGS_FAST_PROFILE", "p")
    here = jobs.LocalEngine(0)
    jobs.encrypt_files("src", "ds", kms=kms, wrapping_key_id=MASTER, engine=here).raise_for_failures()
    jobs.rotate("ds", kms=kms, engine=here).raise_for_failures()
    capsys.readouterr()
    return tmp_path


class Elements(HTMLParser):
    """The elements of a page, their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


KNOWN_ELEMENTS = """
html head meta title style body main header section p h1 h2 dl div dt dd small code strong ul li ol pre figure
figcaption svg text path rect line table caption thead tbody tr th td span details summary
"""


def check(page: str) -> Elements:
    """The page needs nothing else, and nothing in it is anything but what the page's author wrote."""
    elements = Elements(page)
    assert {tag for tag, _ in elements.found} <= set(KNOWN_ELEMENTS.split())
    names = {name for _, attributes in elements.found for name in attributes}
    assert not {name for name in names if name.startswith("on")}
    assert names.isdisjoint({"style", "src", "href", "srcset", "action", "id"})
    page.encode()
    assert all(char.isprintable() or char == "\n" for char in page)
    (policy,) = (a["content"] or "" for t, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")
    style = page.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert "url(" not in style
    return elements


def audited(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    """What an audit finds, with the events."""
    assert cli.main(["keys", "audit", "ds", "--html", "audited.html", "--overwrite", "--json", *more]) == 0
    return dict(json.loads(capsys.readouterr().out))


def many(found: dict[str, Any], number: int, name: str = "") -> dict[str, Any]:
    """The audit of a dataset with `number` KEKs and versions, and with `name` before each name."""
    made, draw, now = copy.deepcopy(found), random.Random(5), found["time_ms"]
    (master,) = made["masters"]
    row = {**master["versions"][0], "first": [shlex.join(["ags-fast", "keys", "rotate", f"{name}ds"])]}
    rows = [{**row, "version": str(v), "current": v == 5, "may_be_destroyed": v == 1} for v in range(1, 6)]
    made["masters"] = [
        {**master, "wrapping_key_id": name + key, "current_version": "5", "versions": rows} for key in ("sales", "hr")
    ]
    made["keys"], made["versions"], made["opens"] = [], [], []
    for i in range(number):
        days = (number - i) * 1000 / number
        active = i > number * 0.2
        created, key_id = int(now - days * DAY), name + base64.urlsafe_b64encode(draw.randbytes(16)).decode()
        made["keys"].append(
            {
                **found["keys"][-1],
                "key_id": key_id,
                "wrapping_key_id": name + draw.choice(["sales", "hr"]),
                "master_version": str(1 + i * 5 // number),
                "scope": f"{name}partition:2026/{i % 12:02}",
                "state": "active" if active else "retired",
                "created_ms": created,
                "age_days": round(days, 1),
                "lifetime_ends_ms": created + 730 * DAY if active else None,
                "uses_left": 10**9 if active else None,
                "needed_by_versions": [i + 1],
            }
        )
        version = {"number": i + 1, "time_ms": created, "files": 1000 + i, "source_length": 10**9 * i, "key_id": key_id}
        made["versions"].append({**found["versions"][0], **version})
        made["opens"].append({"key_id": key_id, "version": i + 1, "data_keys": 10 * i, "tables": 1, "document": True})
    return {**made, "version": number}


def hostile(found: dict[str, Any]) -> dict[str, Any]:
    """The audit of a dataset in which an attacker chose each name and text."""

    def worse(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: worse(inner) if name not in ("state", "event", "events") else inner
                for name, inner in value.items()
            }
        return (
            [worse(one) for one in value]
            if isinstance(value, list)
            else value + HOSTILE
            if isinstance(value, str)
            else value
        )

    made = worse(many(found, 30, HOSTILE))
    job: dict[str, Any] = {"job_id": HOSTILE, "operation": HOSTILE, "lives": None, "keys": []}
    return {**made, "unread": [HOSTILE] * 30, "open_jobs": [job] * 50, "policy": found["policy"]}


def test_text_stays_text() -> None:
    assert el("p", "<b>", class_='"x"', data_label=None) == '<p class="&quot;x&quot;">&lt;b&gt;</p>'
    assert joined("a&", None, el("i", "\x1b\udcff")) == "a&amp;<i>\\x1b\\xff</i>"
    assert text(el("i", 1)) == "<i>1</i>"
    assert clipped("x" * 50, 9) == "xxxx…xxxx"
    shown = [nbytes(n) for n in (0, 1, 9999, 10_000, 999_999, 1_234_567, 5 * 10**12, 10**18)]
    assert shown == ["0 bytes", "1 byte", "9,999 bytes", "10 kB", "1 MB", "1.23 MB", "5 TB", "1,000,000 TB"]


def test_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = read_tree(folder / "ds")
    assert cli.main(["keys", "audit", "ds", "--html", "keys.html"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("keys.html shows the keys of ")
    page = (folder / "keys.html").read_text()
    elements = check(page)
    assert read_tree(folder / "ds") == before
    found = audited(capsys)
    shown = " ".join(elements.text)
    for key in found["keys"]:
        assert key["key_id"] in shown
    commands = [line for line in elements.text if line.startswith("ags-fast ")]
    assert commands
    for line in commands:  # they paste, in any folder
        words = shlex.split(line)
        assert os.path.isabs(words[3 if words[1] == "keys" else 2])
    captions = [tag for tag, _ in elements.found].count("caption")
    assert captions == [tag for tag, _ in elements.found].count("table") == 4


def test_output_is_exclusive(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "keys.html").write_text("mine")
    assert cli.main(["keys", "audit", "ds", "--html", "keys.html"]) == 2
    assert "--overwrite replaces the file" in capsys.readouterr().err
    assert (folder / "keys.html").read_text() == "mine"
    assert cli.main(["keys", "audit", "ds", "--html", "keys.html", "--overwrite", "--event", "kek-leaked"]) == 0
    elements = check((folder / "keys.html").read_text())
    assert "What to do" in elements.text
    assert cli.main(["keys", "audit", "nowhere", "--html", "none.html"]) == EXIT_NOT_FOUND
    kms = ["--kms", "encryption.kms-type=local", "--kms", "kms.local.path=/nowhere", "--kms", "kms.local.key-file=/no"]
    assert cli.main(["keys", "audit", "ds", "--html", "none.html", *kms]) in (EXIT_KEY_ACCESS, EXIT_NOT_FOUND)
    assert not [name for name in os.listdir() if "none" in name]


def test_all_events_cost_what_each_costs(folder: Path) -> None:
    kms = profile("p").kms
    events = jobs.audit("ds", kms=kms, all_events=True)["events"]
    assert list(events) == list(EVENTS)
    event: Any
    for event in EVENTS:
        assert events[event] == jobs.audit("ds", kms=kms, event=event)["steps"]
    assert "events" not in jobs.audit("ds", kms=kms)


def test_hostile_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elements = check(audit_page(hostile(audited(capsys))))
    shown = "".join(elements.text)
    assert "<script>top.pwned=1</script>" in shown  # as text


@pytest.mark.parametrize("number", [1, 10, 1000, 10_000])
def test_size(number: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = many(audited(capsys), number)
    page = audit_page(found)
    check(page)
    assert len(page) < 250_000
    graph = graph_of(found)
    assert all(len(column) <= 11 for column in graph.columns)
    boxes = {box for column in graph.columns for box in column}
    assert {box for way in graph.ways for box in way} <= boxes
    assert ("more rows" in page) == (number > 40)


@pytest.mark.more
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("scheme", "ground"), [(0, "rgb(19, 22, 27)"), (1, "rgb(250, 249, 246)")])
def test_in_chromium(scheme: int, ground: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dark and light: the page is as wide as its window, its text can be read, and nothing comes from elsewhere."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    found = audited(capsys)
    pages = {"found.html": found, "hostile.html": hostile(found)}
    pages |= {f"{number}.html": many(found, number) for number in (1, 10, 10_000)}
    site = folder / "site"
    site.mkdir()
    for name, shown in pages.items():
        (site / name).write_text(audit_page(shown))
    shutil.copy(PROBE, site)
    (site / "pages.json").write_text(json.dumps(list(pages)))
    flag = f"--blink-settings=preferredColorScheme={scheme}"
    seen = probe(site, folder / "chromium", flag, query="?widths=320,360,800,1400")
    assert list(seen) == list(pages), seen
    for name, result in seen.items():
        assert result.pop("ground") == ground, name  # the policy of the page allows the page's style
        assert {what: problems for what, problems in result.items() if problems} == {}, name
