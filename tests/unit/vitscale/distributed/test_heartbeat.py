"""How long a rank counts as silent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vitscale.distributed import heartbeat


def test_a_suspended_job_counts_two_periods_of_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([100.0, 105.0, 3705.0, 3710.0, 3715.0])
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    silence = heartbeat._Silence(5.0)
    assert [silence.seconds(number) for number in (1, 1, 1, 2, 2)] == [0.0, 5.0, 15.0, 0.0, 5.0]
