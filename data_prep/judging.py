"""From a place in the source to a verdict: read, then judge.

Owns: files that cannot be read, or are too large to read.
Leaves out: the verdict on bytes (`image_check`).
"""

from __future__ import annotations

from data_prep.image_check import Judged, judge_image
from data_prep.preparation import Place, Preparation
from vitscale.runs.data_prep import ImageSettings


def judge_place(p: Preparation, place: Place, *, settings: ImageSettings) -> Judged:
    """Judge one input. Its hash is empty when its bytes were not read.

    Raises UserError when the source changed since it was listed.
    """
    if place.num_bytes > settings.max_file_mib * 2**20:
        return Judged("too_large", b"", b"", b"")
    try:
        data = p.read(place)
    except OSError:
        return Judged("unreadable", b"", b"", b"")
    return judge_image(data, settings=settings)
