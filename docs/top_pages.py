"""Hooks of mkdocs: pages from the top of the tree; a heading for each key of a configuration;
llms.txt, an index for language models (llmstxt.org)."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
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


def on_nav(nav: Navigation, config: MkDocsConfig, **_: Any) -> None:
    """Note the order of the pages."""
    config.extra["pages"] = nav.pages


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt, and the source of each page, which it names."""
    site = Path(config.site_dir)
    lines = [
        f"# {config.site_name}",
        "",
        f"> {config.site_description}",
        "",
        "## Docs",
        "",
    ]
    for page in config.extra["pages"]:
        lines.append(f"- [{page.title}]({page.file.src_uri})")
        source = site / page.file.src_uri
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(page.file.content_string)
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
