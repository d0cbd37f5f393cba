"""Hooks of mkdocs: pages from the top of the tree; a heading for each key of a configuration."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md"} | {
    name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
}
# As vitscale/config/reference.py writes it.
KEY = re.compile(r"^- \*\*(`[\w.]+`)\*\* \((.*?)\)\. ", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in PAGES.items():
        content = (ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let search and links find each key."""
    return (
        KEY.sub(r"### \1\n\n\2.\n\n", markdown)
        if page.url == "configuration/"
        else markdown
    )
