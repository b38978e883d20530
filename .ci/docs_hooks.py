"""What mkdocs does beside its own work: pages from the top of the tree, and no links to files that the site lacks."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"\[([^\]]*)\]\(([^):#]+)((?:#[^)]*)?)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that GitHub wants at the top."""
    for name in BESIDE:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links between docs/ and the top to the site's pages. A link to source code becomes its text."""
    here = ROOT if page.file.src_uri in BESIDE else Path(page.file.abs_src_path).parent

    def lead(link: re.Match[str]) -> str:
        text, target, heading = link.groups()
        path = (here / target).resolve()
        if path.name in BESIDE and path.parent == ROOT:
            up = "../" * page.file.src_uri.count("/")
            return f"[{text}]({up}{path.name}{heading})"
        if path.is_relative_to(ROOT / "docs"):
            return link[0] if here != ROOT else f"[{text}]({path.relative_to(ROOT / 'docs')}{heading})"
        return f"`{text.strip('`')}`"

    return LINK.sub(lead, markdown)
