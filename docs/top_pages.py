"""Hook of mkdocs: add the pages that are at the top of the tree, where GitHub shows them."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md"} | {
    name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in PAGES.items():
        content = (ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=content))
    return files
