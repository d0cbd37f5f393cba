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
    where = f"{key}={init}"
    # A repository may also have pickles and code, which are never fetched.
    patterns = [*WEIGHTS, *DESCRIPTIONS, "model-*.safetensors"]
    with hub_errors(name, where=where, then=f"; or set {key} to a file or folder"):
        folder = Path(
            snapshot_download(name, revision=revision or None, allow_patterns=patterns)
        )

    # Other programs may have put more into the cache, such as a pytorch_model.bin.
    for names in (WEIGHTS, ("config.json", "vitscale.json")):
        if not any((folder / name).is_file() for name in names):
            raise UserError(
                "has no supported weights",
                where=where,
                allowed="safetensors of timm, transformers or vitscale",
                next_step=f"choose another one, or download its weights and set {key} to the file",
            )
    return folder, f"{HUB}{name}@{folder.name}"


@contextmanager
def hub_errors(name: str, *, where: str, then: str = "") -> Iterator[None]:
    """Convert refusals of the hub to UserError, and connection failures to StorageError.

    name: of the repository. then: ends the sentence on the next step.
    """
    log_in = "run hf auth login, or set HF_TOKEN"
    try:
        # The client takes a name without an owner for the user's own.
        if "/" not in name:
            raise errors.HFValidationError
        validate_repo_id(name)
        yield
    except Exception as error:  # of the client, of httpx, of hf_xet
        # Tracebacks of the client are pages long; people need one sentence and the next step.
        kind: type[UserError] = UserError
        status = getattr(getattr(error, "response", None), "status_code", 0)

        if isinstance(error, errors.HFValidationError):
            problem = f"{name!r} is not OWNER/NAME"
            next_step = "copy it from the repository's page"
        elif isinstance(error, errors.RevisionNotFoundError):
            problem = "no such revision"
            next_step = "name a branch, a tag or a commit of it"
        elif isinstance(error, errors.RepositoryNotFoundError):
            problem = (
                "no such repository, or one that is private or has terms to accept"
            )
            next_step = f"correct the name, or {log_in}; terms are accepted on its page"
        elif status in (401, 403) or isinstance(error, errors.LocalTokenNotFoundError):
            problem = "no token that allows it"
            next_step = f"{log_in} to one that does"
        else:
            # Anything else may be gone at the next attempt.
            kind = StorageError
            problem = f"{constants.ENDPOINT} cannot be used ({short_reason(error)})"
            next_step = "check the network and HF_ENDPOINT, and try again"

        raise kind(problem, where=where, next_step=next_step + then) from None
