"""Open tars that nobody indexed: which they are, and their classes.

Leaves out: reading them (`stream` for training, `scan` for evaluation).
"""

from __future__ import annotations

from dataclasses import dataclass

from vitscale.data.remote.settings import RemoteSettings
from vitscale.data.remote.urls import Location, location_of
from vitscale.data.tars.labels import TarLabels
from vitscale.data.tars.names import tars_of_split
from vitscale.data.tars.settings import WebdatasetSettings


@dataclass(frozen=True, kw_only=True)
class StreamedTars:
    """The tars of a training set."""

    tars: tuple[Location, ...]
    labels: TarLabels
    num_samples: int
    """In all tars, as the settings say."""
    shuffle: int
    remote_settings: RemoteSettings


def open_tars(
    path: str, *, split: str, settings: WebdatasetSettings, remote_settings: RemoteSettings
) -> StreamedTars:
    """Raises UserError for missing tars and unreadable class names."""
    tars = tars_of_split(
        location_of(path), split, where="data.train_split", remote_settings=remote_settings
    )
    assert settings.num_samples is not None  # the settings are validated
    return StreamedTars(
        tars=tuple(tars),
        labels=TarLabels.of(settings),
        num_samples=settings.num_samples,
        shuffle=settings.shuffle,
        remote_settings=remote_settings,
    )
