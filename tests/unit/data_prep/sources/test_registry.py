from __future__ import annotations

from typing import get_args

import pytest

from data_prep.sources.registry import SOURCES, open_source
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import LabelSettings, SourceKind, SourceSettings


def test_settings_and_registry_name_the_same_kinds() -> None:
    assert set(get_args(SourceKind)) == set(SOURCES), (
        "SourceKind in vitscale/runs/data_prep.py and SOURCES in data_prep/sources/registry.py "
        "must name the same kinds"
    )


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_refuses_a_missing_path(kind: SourceKind) -> None:
    for labels in (None, LabelSettings(values="none")):
        source = open_source(SourceSettings(kind=kind, path="/no/such/place"), labels)
        with pytest.raises(UserError, match="source.path.*no such"):
            source.containers()
