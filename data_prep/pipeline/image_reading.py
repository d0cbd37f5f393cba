"""Read and validate inputs.

Owns: files that are unreadable or too large to read.
Leaves out: validating bytes (`images.check`).
"""

from __future__ import annotations

import os

from data_prep.images.check import MAX_FILE_BYTES, ValidationResult, validate_image
from data_prep.pipeline.workspace import InputLocation, Preparation
from data_prep.sources.outages import raise_if_outage


def validate_input(p: Preparation, location: InputLocation) -> ValidationResult:
    """Validate one input. Its hash is empty if its bytes were not read.

    Raises UserError if the source has changed since it was listed, Interrupted for an outage,
    SpoolError if the spooled copy cannot be read.
    """
    if location.num_bytes > MAX_FILE_BYTES:
        return ValidationResult("too_large", b"", b"", b"")
    try:
        data = p.read(location)
    except OSError as error:
        raise_if_outage(error, os.fsdecode(location.path))
        return ValidationResult("unreadable", b"", b"", b"")
    return validate_image(data, settings=p.run.images)
