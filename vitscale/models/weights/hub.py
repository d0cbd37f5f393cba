"""Weights in a repository of the Hugging Face Hub: `hf://OWNER/NAME`, or `hf://OWNER/NAME@REVISION`.

Fetched into the hub's own cache: safetensors and JSON alone, no pickles and no code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, errors, snapshot_download
from huggingface_hub.utils import validate_repo_id

from vitscale.config.errors import StorageError, UserError
from vitscale.config.redaction import short_reason

HUB = "hf://"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
DESCRIPTIONS = ("config.json", "preprocessor_config.json", "vitscale.json")


def fetch(init: str, *, key: str) -> tuple[Path, str]:
    """Download what the cache lacks; returns the folder, and `init` with the commit in it.

    Raises UserError, or StorageError without a connection.
    """
    name, _, revision = init.removeprefix(HUB).partition("@")
    where, patterns = f"{key}={init}", [*WEIGHTS, *DESCRIPTIONS, "model-*.safetensors"]
    with hub_errors(name, where=where):
        folder = Path(
            snapshot_download(name, revision=revision or None, allow_patterns=patterns)
        )
    # Other programs may have put more into the cache, such as a pytorch_model.bin.
    needed = WEIGHTS, DESCRIPTIONS[::2]
    if not all(any((folder / each).is_file() for each in names) for names in needed):
        what, allowed = (
            "has no supported weights",
            "safetensors of timm, transformers or",
        )
        next_step = (
            f"choose another one, or download its weights and set {key} to the file"
        )
        raise UserError(
            what, where=where, allowed=f"{allowed} vitscale", next_step=next_step
        )
    return folder, f"{HUB}{name}@{folder.name}"


@contextmanager
def hub_errors(name: str, *, where: str, then: str = "") -> Iterator[None]:
    """Convert refusals of the hub to UserError, and connection failures to StorageError.

    name: of the repository. then: ends the sentence on the next step.
    """
    log_in = "run hf auth login, or set HF_TOKEN"
    try:
        if "/" not in name:  # which the client takes for the user's own
            raise errors.HFValidationError
        validate_repo_id(name)
        yield
    except Exception as error:  # of the client, of httpx, of hf_xet
        kind, status = (
            UserError,
            getattr(getattr(error, "response", None), "status_code", 0),
        )
        if isinstance(error, errors.HFValidationError):
            what, next_step = (
                f"{name!r} is not OWNER/NAME",
                "copy it from the repository's page",
            )
        elif isinstance(error, errors.RevisionNotFoundError):
            what, next_step = (
                "no such revision",
                "name a branch, a tag or a commit of it",
            )
        elif isinstance(error, errors.RepositoryNotFoundError):
            what = "no such repository, or one that is private or has terms to accept"
            next_step = f"correct the name, or {log_in}; terms are accepted on its page"
        elif status in (401, 403) or isinstance(error, errors.LocalTokenNotFoundError):
            what, next_step = "no token that allows it", f"{log_in} to one that does"
        else:
            what = f"{constants.ENDPOINT} cannot be used ({short_reason(error)})"
            kind, next_step = (
                StorageError,
                "check the network and HF_ENDPOINT, and try again",
            )
        raise kind(what, where=where, next_step=next_step + then) from None
