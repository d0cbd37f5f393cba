"""Parameters and tags are flat and without secrets; addresses are absolute."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.contract.tree import ROOT
from vitscale.config.errors import UserError, UserErrors
from vitscale.config.redaction import redact
from vitscale.tracking.run_facts import (
    DEFAULT_URI,
    absolute_uri,
    default_uri,
    flatten_params,
    redact_yaml,
    sqlite_path,
)


def test_nested_keys_become_dotted_with_yaml_values_without_secrets() -> None:
    config = {
        "optim": {"lr": 1e-4, "betas": (0.9, 0.999), "clip_norm": None},
        "launch": {"nodes": 2, "mem_gb": None, "setup": ["export A=b"], "sbatch": {"x": "me"}},
        "data": {"flip!": True},
        "deepspeed": {},
        "hub": {"api_key": "abc", "token": None, "my_hf_token": "a"},
        "model": {"num_prefix_tokens": 1, "class_token": True},
    }
    assert flatten_params(config) == {
        "optim.lr": "0.0001",
        "optim.betas": "[0.9, 0.999]",
        "optim.clip_norm": "null",
        "data.flip_": "true",
        "launch.nodes": "2",
        "launch.mem_gb": "null",
        "deepspeed": "{}",
        "hub.api_key": "***",
        "hub.token": "null",
        "hub.my_hf_token": "***",
        "model.num_prefix_tokens": "1",
        "model.class_token": "true",
    }


def test_secrets_in_text_are_removed() -> None:
    for text, expected in {
        "http://me:hunter2@host:5000/x": "http://host:5000/x",
        "see s3://key:pw@bucket and http://h/a@b": "see s3://bucket and http://h/a@b",
        "postgresql+psycopg://u:p@h/db?password=p&x=1": "postgresql+psycopg://h/db?***",
        "https://h/d?X-Amz-Signature=abc": "https://h/d?***",
        "mail me@host": "mail me@host",
        '+ setup: ["export HF_TOKEN=hf_abc", x]': '+ setup: ["export HF_TOKEN=***", x]',
        "num_tokens=5 token=$(cat f)": "num_tokens=5 token=$(cat f)",
    }.items():
        assert redact(text) == expected
    text = "a:\n  hub_token: abc\n  tokens: 3\n  class_token: true\n"
    assert redact_yaml(text) == text.replace("abc", "'***'")
    keys = re.findall(r"^- \*\*`([\w.]+)`\*\*", (ROOT / "docs/configuration.md").read_text(), re.M)
    assert len(keys) > 200
    assert [key for key in keys if flatten_params({key: "x"}) == {key: "***"}] == []


def test_addresses_are_absolute_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    uri = absolute_uri(DEFAULT_URI)
    assert sqlite_path(uri) == tmp_path / "runs/mlflow.db" and absolute_uri(uri) == uri
    assert sqlite_path("http://host") is None
    for wrong in (
        "sqlite://runs/mlflow.db",
        "sqlite:///",
        "sqlight:///a",
        "runs/mlflow",
        "file:///",
    ):
        with pytest.raises(UserError, match="tracking.uri"):
            absolute_uri(wrong)


def test_the_site_file_names_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site.yaml"
    monkeypatch.setenv("VITSCALE_SITE", str(site))
    site.write_text("tracking: {uri: http://mlflow:5000}")
    assert default_uri() == "http://mlflow:5000"
    site.write_text("launch: {partition: gpu}")
    assert default_uri() == DEFAULT_URI
    site.write_text("tracking: 3")
    with pytest.raises(UserErrors, match="tracking as a whole number"):
        default_uri()
