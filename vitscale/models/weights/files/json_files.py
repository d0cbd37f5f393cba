"""Read small JSON files beside weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vitscale.config.errors import UserError

MAX_BYTES = 16 * 2**20  # id2label of 21,843 classes has 1 MB


def read_json(path: Path) -> dict[str, Any]:
    """An object. Raises UserError for anything else, and for files that cannot be read."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"is larger than {MAX_BYTES:,} bytes", where=str(path))
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(path)) from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"is not JSON ({error})", where=str(path)) from None
    if not isinstance(found, dict):
        raise UserError("holds no JSON object", where=str(path))
    return found
