"""A run folder or a server of somebody else: no private file leaves, nothing hangs or is written.

Each attack is tried on each file that a page, MLflow or `compare.py sync` reads.
"""

import base64
import json
import os
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from launch.comparison.differences import compare
from launch.comparison.page import render
from launch.comparison.runs import load_runs
from launch.comparison.sync import sync
from tests.support.range_server import Answering, listening
from tests.support.tables import every
from vitscale.config.errors import UserError
from vitscale.config.redaction import short_reason
from vitscale.tracking.journal import MAX_LINE_BYTES, read_rows
from vitscale.tracking.mlflow_sync import MlflowRun, upload
from vitscale.tracking.run_files import MIB, check_records

SECRET = b"-----BEGIN OPENSSH PRIVATE KEY----- hunter2"
PNG = b"\x89PNG\r\n\x1a\n"
PER_CLASS = "label,class,images,correct,top1\n"


def link_to_link(path, secret):
    between = path.with_name("between")
    between.symlink_to(secret)
    path.symlink_to("between")


def huge(path, secret):
    """4 TiB that take no space, of which a reader would fill its memory."""
    with open(path, "wb") as file:
        file.write(secret.read_bytes())
        file.truncate(1 << 42)


def linked_folder(path, secret):
    """The file itself is a plain one."""
    outside = secret.parent / "folder"
    outside.mkdir()
    (outside / path.name).write_bytes(secret.read_bytes())
    path.parent.rmdir()
    path.parent.symlink_to(outside)


# What somebody else may have put in place of a file. Of a pipe or a device a read never ends.
ATTACKS = {
    "link": Path.symlink_to,
    "relative link": lambda path, secret: path.symlink_to(
        os.path.relpath(secret, path.parent)
    ),
    "hard link": Path.hardlink_to,
    "pipe": lambda path, _: os.mkfifo(path),
    "device": lambda path, _: path.symlink_to("/dev/zero"),
    "circle": lambda path, _: path.symlink_to(path.name),
    "link to link": link_to_link,
    "huge": huge,
    "folder": linked_folder,
}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs/theirs"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("stage: pretrain\nname: theirs\n")
    (folder / "journal.jsonl").write_text(
        '{"step": 1, "time": 1.7e9, "val/top1": 0.5}\n'
    )
    return folder


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "home/id_ed25519"
    path.parent.mkdir()

    # Would pass as a picture, and as a table.
    path.write_bytes(PNG + SECRET)
    return path


def placed(run, name, attack, secret):
    """Put the attack in place of a file of the run."""
    path = run / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.unlink(missing_ok=True)
    ATTACKS[attack](path, secret)
    return path


def holds_secret(page):
    """As text, or within a picture."""
    if "hunter2" in page:
        return True
    content = page.partition("<script>")[0]
    pictures = re.findall(r"data:image/png;base64,([^\"']*)", content)
    return any(SECRET in base64.b64decode(picture) for picture in pictures)


@every(attack=ATTACKS)
@every(name="pictures/x.png, evaluation/x.png, evaluation/per_class.csv")
def test_the_page_shows_files_of_the_run_alone(name, attack, run, secret, capsys):
    # A table of classes would be shown, if it were one.
    if name.endswith(".csv"):
        secret.write_text(f"{PER_CLASS}0,{SECRET.decode()},1,1,1.0\n")
    path = placed(run, name, attack, secret)
    page = render(compare(load_runs([str(run)], uri=None)))
    lines = capsys.readouterr().out.splitlines()
    assert not holds_secret(page)
    assert any(line.startswith(f"left out: {path}: ") for line in lines)


def test_the_page_shows_what_is_a_picture_of_at_most_4_mib(run, capsys):
    for name in ("pictures/a_b.png", "evaluation/c_d.png"):
        (run / name).parent.mkdir()
        (run / name).write_bytes(PNG + name.encode())

    # A name does not make a picture, and a large one would make the page too heavy to open.
    (run / "pictures/key.png").write_bytes(SECRET)
    (run / "pictures/large.png").write_bytes(PNG + bytes(4 * MIB))
    page = render(compare(load_runs([str(run)], uri=None)))
    lines = capsys.readouterr().out.splitlines()
    assert re.findall("<h3>(.*)</h3>", page) == ["A b", "C d"]
    assert not holds_secret(page)
    large = f"has {4 * MIB + 8:,} bytes; at most {4 * MIB:,} are read"
    assert lines == [
        f"left out: {run}/pictures/large.png: {large}",
        f"left out: {run}/pictures/key.png: is no PNG",
    ]


@every(name="pictures/x.png, evaluation/a.csv", attack=ATTACKS)
def test_mlflow_gets_files_of_the_run_alone(name, attack, run, secret, mlflow_database):
    path = placed(run, name, attack, secret)
    (run / "results.csv").write_text("fine\n")
    lines = []
    sent = MlflowRun(run, f"sqlite:///{mlflow_database}", say=lines.append)
    sent.sync("FINISHED")
    assert sent.num_files == 2  # with the configuration
    for stored in mlflow_database.parent.rglob("*"):
        assert not stored.is_file() or SECRET not in stored.read_bytes()

    # Only the bad file is left out, and said.
    (line,) = lines
    assert line.partition(": ")[2].partition(": ")[0] == str(path)


RECORDS = """
config.yaml journal.jsonl events/n1.jsonl classes.json slurm/1/a.failed_starts
""".split()


@every(attack=ATTACKS)
@every(name=RECORDS)
def test_a_record_that_is_no_file_of_the_run_is_one_error(
    name,
    attack,
    run,
    secret,
    mlflow_database,
):
    # The folder of these is the run's own.
    if attack == "folder" and "/" not in name:
        return
    path = placed(run, name, attack, secret)
    if attack == "hard link":
        # A backup of one's own; of another user's folder it is the reader's private file.
        check_records(run)
        if os.getuid() != 0:
            return
        os.chown(secret, 12345, 12345)

    # Without its records a run cannot be shown in part.
    uri = f"sqlite:///{mlflow_database}"
    for read in (
        lambda: load_runs([str(run)], uri=None),
        lambda: sync([str(run), "--uri", uri]),
    ):
        with pytest.raises(UserError) as caught:
            read()
        text = caught.value.text()
        assert str(path) in text
        assert "hunter2" not in text


def test_a_journal_of_odd_lines_has_its_good_ones(tmp_path):
    good = b'{"step": 7, "time": 5, "a": 1}\n'
    # Too deep, too long in two ways, numbers that overflow, times and steps that are none, no text.
    odd = (
        b"[" * (MAX_LINE_BYTES - 2) + b"\n",
        b"x" * (3 * MAX_LINE_BYTES + 5) + b"\n",
        b"x" * MAX_LINE_BYTES + b'{"step": 1, "time": 1, "a": 1}\n',
        b'{"step": 1, "time": 1, "a": ' + b"9" * 400 + b"}\n",
        b'{"step": ' + b"9" * 300 + b', "time": 1, "a": 1}\n',
        b'{"step": 1, "time": Infinity, "a": 1}\n',
        b'{"step": 1, "time": "NaN", "a": 1}\n',
        b'{"step": true, "time": 1, "a": 1}\n',
        b'{"step": 1, "time": 1e12, "a": 1}\n',
        b"\0" * 100 + b"\n",
    )
    path = tmp_path / "journal.jsonl"
    last = b'{"step": 8, "ti'  # being written
    path.write_bytes(b"".join(line + good for line in odd) + last)
    rows = [*read_rows(path)]
    assert [row.step for row, _ in rows] == [7] * len(odd)
    assert rows[-1][1] == path.stat().st_size - len(last)

    # A later read goes on behind any row.
    later = [*read_rows(path, offset=rows[2][1])]
    assert len(later) == len(odd) - 3


# ---- a server -----------------------------------------------------------------------------------


@contextmanager
def hostile_server(artifact_uri, *, listed="x", **more):
    """Its address, and the paths that it was asked for. more: further keys of its runs."""
    info, experiment = yaml.safe_load("""
    - {experiment_id: "0", run_name: r, status: RUNNING, start_time: 1, lifecycle_stage: active}
    - {experiment_id: "0", name: vitscale, lifecycle_stage: active}
    """)
    info |= {"run_id": "a" * 32, "run_uuid": "a" * 32, "artifact_uri": artifact_uri}
    info |= more
    asked = []

    class Hostile(Answering):
        """As much of MLflow's protocol as its client needs to send a run."""

        def do_GET(self):
            self.rfile.read(int(self.headers["content-length"] or 0))
            path = self.path.partition("?")[0]
            asked.append(path)
            answer = {}
            if path.endswith("runs/search"):
                answer = {"runs": []}
            elif path.endswith("experiments/search"):
                answer = {"experiments": [experiment]}
            elif "experiments" in path:
                answer = {"experiment": experiment, "experiment_id": "0"}
            elif "/runs/" in path and "log" not in path:
                answer = {"run": {"info": info, "data": {}}}
            elif "artifacts" in path:
                answer = {"files": [{"path": listed, "is_dir": False, "file_size": 1}]}
            content = json.dumps(answer).encode()
            self.answer(200, content, {"content-type": "application/json"})

        do_POST = do_PATCH = do_PUT = do_GET

    with listening(Hostile) as url:
        yield url, asked


# Ways to say that files belong into a folder of the person who sends a run.
FORMS = "file://{} {} file:{} FILE://{} file://localhost{} runs:/abc{} models:/x{}"
FORMS += " sftp://localhost{} sqlite://{} ../../{}"


@every(form=[*FORMS.split(), " {}", ""])
def test_no_server_chooses_where_files_are_written(form, run, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    mine = home / "config.yaml"
    mine.write_text("mine: untouched\n")
    results = run / "results.md"
    results.write_text("x\n")

    def names():
        return sorted(str(path) for path in tmp_path.rglob("*"))

    before = names()
    lines = []
    with hostile_server(form.format(home)) as (uri, _):
        # A whole run, and then one more file of a run that is tracked there.
        sent = MlflowRun(run, uri, say=lines.append)
        sent.sync("FINISHED")
        (run / "events").mkdir()
        record = {"event": "tracked", "time": 1, "tracking_id": "x", "name": "r"}
        record["uri"] = uri
        (run / "events/n.jsonl").write_text(json.dumps(record) + "\n")
        upload(run, [results], say=lines.append)

    # Numbers are sent all the same.
    assert sent.num_points == 1
    assert sent.num_files == 0
    assert len([line for line in lines if "must not choose" in line]) >= 2
    assert [name for name in names() if "events" not in name] == before
    assert mine.read_text() == "mine: untouched\n"


@every(listed="results.md, ../../../x, /etc/x, a/../../x")
def test_a_server_that_takes_files_itself_gets_them(listed, run, tmp_path):
    """Names that it lists are compared, and lead nowhere; MLflow refuses those with `..`."""
    (run / "results.md").write_text("some text\n")
    lines = []
    address = "mlflow-artifacts:/0/abc/artifacts"
    with hostile_server(address, listed=listed) as (uri, asked):
        sent = MlflowRun(run, uri, say=lines.append)
        sent.sync("FINISHED")
    if listed == "results.md":
        assert sent.num_files == 2
        assert not lines
        end = "artifacts/0/abc/artifacts/results.md"
        assert any(path.endswith(end) for path in asked)
    else:
        assert sent.num_files == 0
        assert "files were not uploaded" in lines[0]

    # Nothing of the server's names is on the disk.
    assert not [*tmp_path.rglob("x")]


def test_what_a_server_says_is_printed_as_text(run, capsys):
    # Sets the title of a terminal; others run commands.
    evil = "\x1b]0;owned\x07"
    ids = {"run_id": f"a{evil}", "experiment_id": f"0{evil}"}
    with hostile_server(f"file:///{evil}", **ids) as (uri, _):
        sync([str(run), "--uri", uri])
    out = "".join(capsys.readouterr())
    assert "\x1b" not in out
    assert "\x07" not in out
    assert short_reason(ConnectionError(f"{evil}\nmore")) == "?]0;owned?"
