"""The pages for users, and their snippets: each page's run in order, in one folder, as a reader would paste them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from support import python_env

ROOT = Path(__file__).resolve().parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Snippet(NamedTuple):
    """A block between fences. `output` is the text block that follows it with nothing between, or None."""

    language: str
    text: str
    output: str | None

    @property
    def installs(self) -> bool:
        return "pip install" in self.text


def snippets(page: Path) -> list[Snippet]:
    text, found = page.read_text(), []
    blocks = list(FENCE.finditer(text))
    for block, after in zip(blocks, [*blocks[1:], None], strict=False):
        follows = after and after[1] == "text" and not text[block.end() : after.start()].strip()
        found.append(Snippet(block[1], block[2], after[2] if after and follows else None))
    return found


class Reader:
    """Somebody who pastes a page's snippets: a folder, one shell, one Python."""

    def __init__(self, folder: Path, shell: str = "bash") -> None:
        self.folder = folder
        self.program = shell
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.config = folder.parent / f"{folder.name}.config"
        self.variables = folder.parent / f"{folder.name}.variables"

    def paste(self, snippet: Snippet) -> None:
        """Run it in this folder, which is the current one, and compare what it prints with what the page shows."""
        printed = self.shell(snippet.text) if snippet.language == "sh" else self.python(snippet.text)
        if snippet.output is not None:
            lines = ".*".join(re.escape(part) for part in snippet.output.split("..."))
            assert re.fullmatch(lines, printed, re.DOTALL), (
                f"the page shows\n{snippet.output}\nand this is printed\n{printed}"
            )

    def python(self, text: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(text, "snippet", "exec"), self.names)
        return printed.getvalue()

    def shell(self, text: str) -> str:
        bin_first = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        before = f". {self.variables}; " if self.variables.exists() else ""
        words = ["bash", "-c", f"set -euo pipefail; {before}set -a\n{text}\nexport -p > {self.variables}"]
        if self.program == "zsh":
            words = ["zsh", "-fc", *words[2:]]
        elif self.program == "fish":  # which has no word for "end at the first line that fails"
            ended = re.sub(r"(?<!\\)\n", "; or exit 1\n", text.rstrip("\n") + "\n")
            words = ["fish", "--no-config", "-c", ended]
        result = subprocess.run(
            words,
            cwd=self.folder,
            env={**python_env(), "PATH": bin_first, "COLUMNS": "120", "XDG_CONFIG_HOME": str(self.config)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert result.returncode == 0, f"{text}\nends with {result.returncode}\n{result.stdout}"
        return result.stdout
