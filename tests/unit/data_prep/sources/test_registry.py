from __future__ import annotations

from typing import get_args

import pytest

from data_prep.sources.registry import SOURCES, open_source
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import LabelSettings, SourceSettings


def test_every_kind_in_the_settings_can_be_opened_and_refuses_a_missing_path() -> None:
    kinds = get_args(SourceSettings.model_fields["kind"].annotation)
    assert set(kinds) == set(SOURCES)
    for kind in kinds:
        for labels in (None, LabelSettings(map_key="image")):
            source = open_source(SourceSettings(kind=kind, path="/no/such/place"), labels)
            with pytest.raises(UserError, match="source.path.*no such"):
                source.containers()
