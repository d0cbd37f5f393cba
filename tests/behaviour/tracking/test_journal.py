"""The journal has each step once after any kill; lines of progress; parameters without secrets."""

import errno
import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import (
    MAX_ENTITY_KEY_LENGTH,
    _validate_metric_name,
    _validate_tag_name,
)

from tests.contract.tree import ROOT
from tests.support.tables import every, refused
from vitscale.config.errors import UserErrors
from vitscale.config.redaction import flatten_params, redact, shared_yaml
from vitscale.tracking import journal as journal_module
from vitscale.tracking.journal import (
    Journal,
    Row,
    decode,
    encode,
    item_progress,
    read_rows,
    training_log,
)
from vitscale.tracking.settings import (
    DEFAULT_URI,
    TrackingSettings,
    absolute_uri,
    default_uri,
    is_store_name,
    sqlite_path,
    tracking_problems,
)


def steps_in(path):
    return [row.step for row, _ in read_rows(path)]


@settings(deadline=None)
@given(
    num_steps=st.integers(0, 12),
    resume_step=st.integers(0, 12),
    torn_bytes=st.integers(0, 60),
)
def test_resumed_journal_has_each_step_once(num_steps, resume_step, torn_bytes):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal.jsonl")
        journal = Journal(path, resume_step=0)
        for step in range(1, num_steps + 1):
            journal.append({"train/loss": step / 7}, step=step)
        journal.close()

        # A kill within a line, or lines that a node lost with its memory.
        data = path.read_bytes()
        path.write_bytes(data[: max(0, len(data) - torn_bytes)])
        before = steps_in(path)

        # Lines after the checkpoint are of steps that will be trained again.
        journal = Journal(path, resume_step=resume_step)
        kept = steps_in(path)
        assert kept == [step for step in before if step <= resume_step]
        for step in range(resume_step + 1, 15):
            journal.append({"train/loss": step / 7}, step=step)
        journal.close()
        assert steps_in(path) == kept + list(range(resume_step + 1, 15))

        # What is kept is kept byte by byte.
        kept_lines = data.splitlines(True)[: len(kept)]
        assert path.read_bytes().startswith(b"".join(kept_lines))


@settings(deadline=None)
@given(value=st.floats(), step=st.integers(0, 2**40), junk=st.binary(max_size=200))
def test_any_number_survives_as_strict_json_beside_invalid_lines(value, step, junk):
    line = encode(Row(step=step, time=1.5, metrics={"train/loss": value}))

    # Python reads NaN and Infinity, which JSON does not have.
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    json.loads(line, parse_constant=refuse)
    decode(junk)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal.jsonl")
        path.write_bytes(junk + b"\n" + line)
        *_, (row, _) = read_rows(path)
        back = row.metrics["train/loss"]
        assert row.step == step
        assert back == value or (math.isnan(back) and math.isnan(value))

        # A resume copies the good line, whatever is before it.
        Journal(path, resume_step=step).close()
        assert line in path.read_bytes()


def test_lines_survive_power_loss_from_a_flush(tmp_path, monkeypatch):
    """And the file's name from the start: the folder's fsync."""
    path = tmp_path / "run/journal.jsonl"
    flushed = []
    fsync = os.fsync

    # Which file, and how much of it there was.
    def record(fd):
        flushed.append((os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_size))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    journal = Journal(path, resume_step=0)
    assert [name for name, _ in flushed] == [str(path.parent)]

    journal.append({"train/loss": 1.0}, step=5)
    journal.flush()
    assert flushed[1:] == [(str(path), path.stat().st_size)]
    assert steps_in(path) == [5]

    # Closing flushes, too, and a flush after it does nothing.
    journal.append({"train/loss": 0.5}, step=6)
    journal.close()
    journal.flush()
    assert flushed[2:] == [(str(path), path.stat().st_size)]


def test_a_flush_that_storage_refuses_names_the_journal(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "journal.jsonl", resume_step=0)

    def refuse(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError) as caught:
        journal.flush()
    # The error of the system names no file: a descriptor has none.
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == str(journal.path)


def test_a_flush_tells_of_lines_that_a_full_disk_has_refused(tmp_path, monkeypatch):
    """Or a checkpoint would be committed without them and without a word."""
    journal = Journal(tmp_path / "journal.jsonl", resume_step=0)
    with open("/dev/full", "wb", buffering=0) as full, monkeypatch.context() as context:
        context.setattr(journal._file, "write", full.write, raising=False)
        journal.append({"train/loss": 1.0}, step=5)
        with pytest.raises(OSError) as caught:
            journal.flush()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(journal.path)

    # When there is room again, nothing is lost.
    journal.append({"train/loss": 0.5}, step=6)
    journal.flush()
    assert steps_in(journal.path) == [5, 6]


def test_nested_keys_become_dotted_with_yaml_values_without_secrets():
    config, expected = yaml.safe_load("""
    - optim: {lr: 1.0e-4, betas: [0.9, 0.999], clip_norm: null}
      launch: {nodes: 2, mem_gb: null, setup: [export A=b], sbatch: {x: me}}
      data: {flip!: true, path: "http://me:hunter2@host"}
      deepspeed: {}
      hub: {api_key: abc, token: null, my_hf_token: a}
      model: {num_prefix_tokens: 1, class_token: true}
    - {optim.lr: "0.0001", optim.betas: "[0.9, 0.999]", optim.clip_norm: "null",
       data.flip_: "true", data.path: "http://host", launch.nodes: "2", launch.mem_gb: "null",
       deepspeed: "{}", hub.api_key: "***", hub.token: "null", hub.my_hf_token: "***",
       model.num_prefix_tokens: "1", model.class_token: "true"}
    """)
    # A tuple, which YAML has not, is a list.
    config["optim"]["betas"] = (0.9, 0.999)
    assert flatten_params(config) == expected

    # A file that is shared has the same values, without the secrets.
    assert flatten_params(yaml.safe_load(shared_yaml(config))) == flatten_params(config)


def test_secrets_in_text_are_removed():
    # URLs with users, keys in queries, variables in commands, keys of YAML, and what is no secret.
    for text, expected in yaml.safe_load(r"""
    - ["http://me:hunter2@host:5000/x", "http://host:5000/x"]
    - ["see s3://key:pw@bucket and http://h/a@b", "see s3://bucket and http://h/a@b"]
    - ["postgresql+psycopg://u:p@h/db?password=p&x=1", "postgresql+psycopg://h/db?***"]
    - ["https://h/d?X-Amz-Signature=abc", "https://h/d?***"]
    - ["a://b://u:p@h", "a://b://h"]
    - ["mail me@host", "mail me@host"]
    - ['+ setup: ["export HF_TOKEN=hf_abc", x]', '+ setup: ["export HF_TOKEN=***", x]']
    - ["num_tokens=5 token=$(cat f)", "num_tokens=5 token=$(cat f)"]
    - ["a:\n  hub_token: abc d\n  tokens: 3\n", "a:\n  hub_token: '***'\n  tokens: 3\n"]
    - ["+\tmy-api_key: x y\n   class_token: true", "+\tmy-api_key: '***'\n   class_token: true"]
    """):
        assert redact(text) == expected

    # No setting of ours is taken for a secret by its name.
    page = (ROOT / "docs/configuration.md").read_text()
    keys = re.findall(r"^- \*\*`([\w.]+)`\*\*", page, re.M)
    assert len(keys) > 200
    taken = [key for key in keys if flatten_params({key: "x"}) == {key: "***"}]
    assert taken == []


def test_addresses_are_absolute_or_refused(tmp_path, monkeypatch):
    # A resume in another working folder has to find the same store.
    monkeypatch.chdir(tmp_path)
    uri = absolute_uri(DEFAULT_URI)
    assert sqlite_path(uri) == tmp_path / "runs/mlflow.db"
    assert absolute_uri(uri) == uri

    assert sqlite_path("http://host") is None
    for right in ("http://host:1", "postgresql+psycopg://h/db", "databricks://x"):
        assert absolute_uri(right) == right

    # SQLAlchemy takes two slashes for a host; the others name no store or none that there is.
    wrong_ones = "sqlite://runs/a.db sqlite:/// sqlight:///a runs/a http file:///"
    for wrong in wrong_ones.split():
        with refused("tracking.uri"):
            absolute_uri(wrong)


def test_the_site_file_names_the_store(tmp_path, monkeypatch):
    site = tmp_path / "site.yaml"
    monkeypatch.setenv("VITSCALE_SITE", str(site))
    site.write_text("tracking: {uri: http://mlflow:5000}")
    assert default_uri() == "http://mlflow:5000"
    site.write_text("launch: {partition: gpu}")
    assert default_uri() == DEFAULT_URI
    # A site file may have other groups alone.
    site.write_text("tracking: 3")
    with pytest.raises(UserErrors, match="tracking as a whole number"):
        default_uri()


def test_lines_go_to_output_and_log(tmp_path, capsys):
    for _ in range(2):  # a resume appends to the same log
        with training_log(tmp_path, is_writer=True) as say:
            say("step 1/2")
        with training_log(tmp_path, is_writer=False) as silent:
            silent("hello")
    log = (tmp_path / "logs/rank0.log").read_text()
    assert re.fullmatch(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d step 1/2\n){2}", log)

    # After its end, a line is printed and no closed file is written to.
    say("late")
    assert capsys.readouterr().out.startswith(log)
    assert "late" not in log


def test_progress_of_items_has_a_rate(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(journal_module.time, "monotonic", lambda: now[0])

    # A line every ten seconds and at the end. At 10 s there are 30 items, at 11 s all 90.
    with item_progress("verify", total=90, unit="tars") as advance:
        for now[0], num in ((1.0, 10), (10.0, 20), (11.0, 60)):
            advance(num)

    # What takes no time, and what another rank does, has no line.
    with item_progress("short", total=2) as advance:
        advance(2)
    with item_progress("another rank", total=9, is_shown=False) as advance:
        for now[0] in (20.0, 30.0):
            advance(1)

    # Where standard output has the results.
    with item_progress("predict", total=9, file=sys.stderr) as advance:
        now[0] = 50.0
        advance(9)

    # One that takes a day.
    now[0] = 0.0
    with item_progress("list", total=9000, unit="units") as advance:
        for now[0], num in ((1.0, 1), (20.0, 1)):
            advance(num)
    shown = capsys.readouterr()
    assert shown.err == "predict: 9 of 9, 0.45 images/s, 0 s left\n"
    assert shown.out.splitlines() == [
        "verify: 30 of 90, 3.00 tars/s, 20 s left",
        "verify: 90 of 90, 8.18 tars/s, 0 s left",
        "list: 2 of 9,000, 0.10 units/s, 24 h 59 min left",
    ]


def mlflow_takes(name):
    """What MLflow itself says."""
    # The same name has to do for metrics, whose rule is another one.
    try:
        _validate_tag_name(name)
        _validate_metric_name(name)
    except MlflowException:
        return False
    return len(name) <= MAX_ENTITY_KEY_LENGTH


# Signs that stores allow, other signs, paths that lead elsewhere, and other alphabets.
NAMES = "team|a/b|a.b|a b|a:b|a-b_c|train/loss|café|chain.a.seed|what?|a/../b|../b|./b|a//b|a/|/a"
NAMES += "|.|..||a\tb|a%b|a=b|a,b|a#b|a\x00b|日本"


@every(name=[*NAMES.split("|"), "x" * 250, "x" * 251])
def test_names_of_tags_are_refused_at_the_start_as_mlflow_would_later(name):
    tracking = TrackingSettings(tags={name: "x"})
    problems = dict(tracking_problems(tracking))
    is_taken = mlflow_takes(name)
    assert is_store_name(name) == is_taken
    assert (not problems) == is_taken
    if problems:
        assert repr(name)[:50] in problems["tracking.tags"]
        assert "allowed" in problems["tracking.tags"]


def test_a_name_with_a_line_break_is_refused():
    """MLflow's own rule lets one at the end pass."""
    assert not is_store_name("a\n")
    assert not is_store_name("a\nb")
    assert not is_store_name(".hidden/..")


def test_all_that_mlflow_would_refuse_is_one_report():
    values = yaml.safe_load("""
    uri: htp://h
    experiment: ''
    tags: {'what?': '', vitscale.tracking_id: x}
    """)
    problems = list(tracking_problems(TrackingSettings.model_validate(values)))
    # Two of tags: a name with a question mark, and one that is the tracker's own.
    keys = ["uri", "experiment", "tags", "tags"]
    assert [key for key, _ in problems] == [f"tracking.{key}" for key in keys]

    # MLflow's column has 500 characters.
    long = TrackingSettings(experiment="x" * 501)
    assert [key for key, _ in tracking_problems(long)] == ["tracking.experiment"]
    assert not list(tracking_problems(TrackingSettings(experiment="x" * 500)))
