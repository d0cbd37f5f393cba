"""Which kernels of attention torch may use; the flags exist without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.backends import cuda
from torch.compiler import config

from vitscale.engine.attention import BACKENDS, use_attention


def allowed() -> list[str]:
    enabled = {
        "flash": cuda.flash_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    return [name for name, is_enabled in enabled.items() if is_enabled]


@pytest.fixture(autouse=True)
def as_at_the_start() -> Iterator[list[str]]:
    before = allowed()
    yield before
    use_attention("auto")


@pytest.mark.parametrize("name", BACKENDS)
def test_one_back_end_is_used_alone(name: str) -> None:
    use_attention(name)
    assert allowed() == [name]


def test_auto_allows_what_torch_allows_itself(as_at_the_start: list[str]) -> None:
    use_attention("math")
    use_attention("auto")
    assert allowed() == as_at_the_start == list(BACKENDS)


def test_each_back_end_has_compiled_code_of_its_own() -> None:
    """torch's cache on disk would give a back end the code that another one compiled."""
    tags = []
    for name in ("auto", *BACKENDS):
        use_attention(name)
        tags.append(config.cache_key_tag)
    assert len(set(tags)) == len(tags)
