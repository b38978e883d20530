"""Which tests one worker of pytest-xdist runs, and in what order: those of a file, and those that share a JVM.

pytest-xdist's own --dist loadgroup writes the groups into the ids of tests, which pytest 9 does not let it do. So each
worker writes them to a file, which the scheduler reads. With another --dist than loadfile, or without pytest-xdist,
nothing of this happens.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

# Tests that ask for one of these fixtures are a group, whatever their files; so are those that have the mark.
SHARED = {"local_spark": "spark", "shared_connect": "connect", "standalone": "cluster", "judge": "judge"}
# What takes longest comes first, lest one worker has it left when the others are done. The rest follows by numbers of
# tests. Needs --no-loadscope-reorder.
LONG = ("spark", "test_extras", "judge", "cluster", "connect", "test_spark_driver_kills", "test_spark_streams")

FOLDER = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def group_of(item: pytest.Item) -> str | None:
    if mark := item.get_closest_marker("xdist_group"):
        return str(mark.args[0])
    return next((SHARED[name] for name in SHARED if name in getattr(item, "fixturenames", ())), None)


class Scheduling(LoadFileScheduling):
    @cached_property
    def groups(self) -> dict[str, str]:
        found: dict[str, str] = json.loads(Path(self.config.stash[FOLDER].name, "groups").read_text())
        return found

    def _split_scope(self, nodeid: str) -> str:
        return self.groups.get(nodeid) or super()._split_scope(nodeid)


class Plugin:
    @pytest.hookimpl(trylast=True)  # as they are to be run
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        names = {item: group_of(item) or item.path.stem for item in items}
        counts = Counter(names.values())
        ranks = {name: rank for rank, name in enumerate(LONG)}
        items.sort(key=lambda item: (ranks.get(names[item], len(LONG)), -counts[names[item]]))

    @pytest.hookimpl(tryfirst=True)  # before the controller is told that all is collected
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        told = getattr(session.config, "workerinput", {})
        if "groups" in told:
            groups = {item.nodeid: group for item in session.items if (group := group_of(item))}
            mine = Path(told["groups"], told["workerid"])
            mine.write_text(json.dumps(groups))
            os.replace(mine, mine.with_name("groups"))  # the same in all workers

    def pytest_configure_node(self, node: Any) -> None:
        stash = node.config.stash
        if FOLDER not in stash:
            stash[FOLDER] = tempfile.TemporaryDirectory(prefix="ags_fast-groups-")
        node.workerinput["groups"] = stash[FOLDER].name

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Scheduling | None:
        return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        if FOLDER in config.stash:
            config.stash[FOLDER].cleanup()
