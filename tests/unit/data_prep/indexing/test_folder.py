from __future__ import annotations

import hashlib
from pathlib import Path

from data_prep.indexing.folder import tar_listing
from data_prep.sources.protocol import Container


def test_listings_ignore_the_sizes_of_folders(tmp_path: Path) -> None:
    """They differ between file systems."""
    (tmp_path / "a.tar").write_bytes(b"12345")
    found = tar_listing(tmp_path, [Container(".", "train"), Container("a.tar", "train")])
    assert found == hashlib.sha256(b"train\0.\x000\0train\0a.tar\x005\0").hexdigest()
