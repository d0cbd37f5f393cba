"""Parameters and tags are flat, within MLflow's limits, without secrets."""

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


def test_nested_keys_become_dotted_with_yaml_values() -> None:
    config = {
        "optim": {"lr": 1e-4, "betas": (0.9, 0.999), "clip_norm": None},
        "launch": {"nodes": 2, "mem_gb": None, "setup": ["export A=b"], "sbatch": {"x": "me"}},
        "data": {"flip!": True},
        "deepspeed": {},
    }
    assert flatten_params(config) == {
        "optim.lr": "0.0001",
        "optim.betas": "[0.9, 0.999]",
        "optim.clip_norm": "null",
        "data.flip_": "true",
        "launch.nodes": "2",
        "launch.mem_gb": "null",
        "deepspeed": "{}",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://me:hunter2@host:5000/x", "http://host:5000/x"),
        ("see s3://key:pw@bucket and http://h/a@b", "see s3://bucket and http://h/a@b"),
        (
            "postgresql+psycopg://u:p@h/db?password=p&x=1",
            "postgresql+psycopg://h/db?password=***&x=1",
        ),
        ("https://h/d?X-Amz-Signature=abc", "https://h/d?X-Amz-Signature=***"),
        ("mail me@host", "mail me@host"),
        ('+ setup: ["export HF_TOKEN=hf_abc", x]', '+ setup: ["export HF_TOKEN=***", x]'),
        ("num_tokens=5 token=$(cat f)", "num_tokens=5 token=$(cat f)"),
    ],
)
def test_secrets_in_urls_are_removed(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_secret_keys_are_removed_and_num_tokens_stays() -> None:
    model = {"num_prefix_tokens": 1, "class_token": True, "distillation_token": False}
    config = {"hub": {"api_key": "abc", "token": None, "my_hf_token": "a"}, "model": model}
    assert flatten_params(config) == {
        "hub.api_key": "***",
        "hub.token": "null",
        "hub.my_hf_token": "***",
        "model.num_prefix_tokens": "1",
        "model.class_token": "true",
        "model.distillation_token": "false",
    }
    settings = "model:\n  class_token: true\n  distillation_token: false\n"
    assert redact_yaml(settings) == settings
    text = redact_yaml("a:\n  hub_token: abc\n  tokens: 3\n  uri: http://u:p@h/\n")
    assert text == "a:\n  hub_token: '***'\n  tokens: 3\n  uri: http://h/\n"


def test_no_setting_is_taken_for_a_secret() -> None:
    keys = re.findall(r"^- \*\*`([\w.]+)`\*\*", (ROOT / "docs/configuration.md").read_text(), re.M)
    assert len(keys) > 200
    assert [key for key in keys if flatten_params({key: "x"}) == {key: "***"}] == []


def test_relative_sqlite_paths_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = absolute_uri(DEFAULT_URI)
    assert sqlite_path(uri) == tmp_path / "runs/mlflow.db"
    assert absolute_uri(uri) == uri
    assert sqlite_path("http://host") is None


@pytest.mark.parametrize(
    "uri", ["sqlite://runs/mlflow.db", "sqlite:///", "sqlight:///a", "runs/mlflow", "file:///runs"]
)
def test_unsupported_uris_are_refused(uri: str) -> None:
    with pytest.raises(UserError, match="tracking.uri"):
        absolute_uri(uri)


def test_the_site_file_names_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site.yaml"
    monkeypatch.setenv("VITSCALE_SITE", str(site))
    site.write_text("tracking: {uri: http://mlflow:5000}")
    assert default_uri() == "http://mlflow:5000"
    site.write_text("launch: {partition: gpu}")
    assert default_uri() == DEFAULT_URI
    site.write_text("tracking: 3")
    with pytest.raises(UserErrors, match="tracking is a whole number"):
        default_uri()
