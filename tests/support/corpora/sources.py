"""Write the files of a source of data_prep, open it, and list its inputs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.sources.protocol import Input, Source, open_source, with_damage
from vitscale.runs.data_prep import LabelSettings, SourceSettings


def opened(
    kind, path: Path, labels: Mapping[str, Any] | None = None, **options
) -> Source:
    """options: more settings of `source`."""
    settings = SourceSettings(kind=kind, path=str(path), **options)
    return open_source(settings, LabelSettings(**(labels or {})))


def listed(source: Source) -> list[Input]:
    """Inputs of all containers, and what is damaged of them."""
    inputs = []
    for container in source.containers():
        # As make_shards lists them: a container that breaks off gives what was read before.
        inputs += with_damage(container, source.inputs(container))
    return inputs


def written(path: Path, content: bytes = b"") -> Path:
    """Write a file, and make the folders that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def touch(root: Path, *names: str) -> Path:
    """Make empty files with these names below a folder."""
    for name in names:
        written(root / name)
    return root
