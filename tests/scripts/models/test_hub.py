"""Models of a Hugging Face Hub start fine-tunings, predict and load, at a fixed commit."""

import base64
import hashlib
import importlib
import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock
from urllib.parse import unquote, urlsplit

import pytest
import timm
import torch
import yaml
from huggingface_hub import constants

from tests.scripts.models.conftest import NPZ
from tests.support.engine.small_models import export, small_model
from tests.support.range_server import Answering, listening
from tests.support.tables import refused
from vitscale import load_model
from vitscale.config.errors import StorageError
from vitscale.evaluation.trained_model import open_model
from vitscale.tracking.mlflow_sync import read_record

pytestmark = pytest.mark.distributed

Run = tuple[Path, dict[str, list[float]]]
HF = "hf://own/Tiny"
Files = dict[str, bytes]


@dataclass
class Hub:
    """What a Hub holds, and what was asked of it."""

    environment: dict[str, str]
    repositories: dict[str, dict[str, Files]] = field(default_factory=dict)
    """By name and commit, the newest one last."""
    large: dict[str, bytes] = field(default_factory=dict)
    """Sent outside of commits, by SHA-256."""
    requests: list[str] = field(default_factory=list)

    def commit(self, name: str, files: Files) -> str:
        """Make the files the newest commit of a repository; returns its id."""
        commits = self.repositories.setdefault(name, {})
        commit = hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest()
        commits[commit] = files
        return commit

    def downloads(self) -> list[str]:
        """Names of the files that were fetched, each as often as it was."""
        names = []
        for request in self.requests:
            # HEAD asks whether the copy in the cache is still right.
            if request.startswith("GET ") and "/resolve/" in request:
                names.append(request.rpartition("/")[2])
        return sorted(names)


class Api(Answering):
    """As much of the Hub's API as uploads and downloads of models take."""

    hub: Hub

    def do_GET(self):
        """The id and the files of a commit, or one file."""
        path, _ = self.received()
        # api/models/OWNER/NAME/KIND/REVISION, and OWNER/NAME/resolve/REVISION/FILE.
        if path[0] == "api":
            del path[:2]
        owner, name, *path = path
        commits = self.hub.repositories.get(f"{owner}/{name}")
        # As the Hub answers: a private repository is not told from none.
        if commits is None:
            return self.say({}, 401, **{"X-Error-Code": "RepoNotFound"})
        kind, revision, *file = path or ["revision", "main"]
        if revision == "main":
            revision = [*commits][-1]
        if revision not in commits:
            return self.say({}, 404, **{"X-Error-Code": "RevisionNotFound"})
        files = commits[revision]
        if kind == "revision":
            return self.say({"id": f"{owner}/{name}", "sha": revision, "siblings": []})
        if kind == "tree":
            entries = [
                {"type": "file", "oid": "0", "path": path, "size": len(data)}
                for path, data in files.items()
            ]
            return self.say(entries)
        data = files["/".join(file)]
        # By the tag the client names its copy in the cache.
        tag = hashlib.sha1(data).hexdigest()
        self.answer(200, data, {"ETag": f'"{tag}"', "X-Repo-Commit": revision})

    def do_PUT(self):
        _, data = self.received()
        self.hub.large[hashlib.sha256(data).hexdigest()] = data
        self.say({})

    def do_POST(self):
        """Create a repository, say how files are sent, or commit them."""
        path, body = self.received()
        url = self.hub.environment["HF_ENDPOINT"]
        token = self.hub.environment["HF_TOKEN"]
        if self.headers["Authorization"] != f"Bearer {token}":
            return self.say({}, 401)
        name = "/".join(path[2:4])
        kind = path[-2]
        if kind == "commit":
            # What the newest commit has and this one does not name stays.
            files = dict([*self.hub.repositories[name].values()][-1])
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.hub.large[value["oid"]]
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            commit = self.hub.commit(name, files)
            commit_url = f"{url}/{name}/commit/{commit}"
            return self.say({"commitUrl": commit_url, "commitOid": commit})

        request = json.loads(body)
        if kind == "repos":
            # Nothing becomes public without its owner's word.
            assert request.get("visibility") == "private" or request["private"]
            name = f"{request['organization']}/{request['name']}"
            if name in self.hub.repositories:
                return self.say({"url": f"{url}/{name}"}, 409)
            self.hub.repositories[name] = {"0" * 40: {}}
            return self.say({"url": f"{url}/{name}"})
        for file in request.get("files", ()):  # of preupload
            file["shouldIgnore"] = False
            file["uploadMode"] = "regular"
            if file["path"].endswith(".safetensors"):
                file["uploadMode"] = "lfs"
        for item in request.get("objects", ()):  # of LFS
            item["actions"] = {"upload": {"href": f"{url}/large"}}
        self.say(request)

    def received(self) -> tuple[list[str], bytes]:
        """The parts of the path, and the body."""
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        length = int(self.headers["Content-Length"] or 0)
        return path.strip("/").split("/"), self.rfile.read(length)

    def say(self, content, status: int = 200, **headers: str):
        self.answer(status, json.dumps(content).encode(), headers)


@pytest.fixture
def hub(scripts, tmp_path) -> Iterator[Hub]:
    """An empty one, which this process and the scripts use, with a token."""
    environment = {
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": "hf_of_tests",
        # The newer way to send large files has a server of its own.
        "HF_HUB_DISABLE_XET": "1",
    }
    hub = Hub(environment)
    with listening(type("OfHub", (Api,), {"hub": hub})) as url:
        environment["HF_ENDPOINT"] = url
        with (
            mock.patch.dict(os.environ, environment),
            mock.patch.dict(scripts.starter.environment, environment),
        ):
            importlib.reload(constants)  # it reads the environment once
            yield hub
    importlib.reload(constants)


def test_what_is_pushed_comes_back_in_equal_bits(scripts, from_npz, hub, tmp_path):
    """A training fetches it once for two ranks, and when it resumes keeps what it started from."""
    # Of an earlier push in another format, and a file of the owner's.
    before = {"preprocessor_config.json": b"of an earlier push", "mine.txt": b""}
    hub.commit("own/Tiny", before)
    run, _ = from_npz
    exported = tmp_path / "exported"
    words = (f"init={run}", "--to", "timm", "--push", "own/Tiny", exported)
    commit = scripts.run("export", *words).rpartition(f"pushed {HF}@")[2].strip()
    files = hub.repositories["own/Tiny"][commit]
    assert {*files} == {"README.md", "config.json", "model.safetensors", "mine.txt"}
    assert [*hub.large.values()] == [files["model.safetensors"]]

    # How to load it, with timm and with us, what it was trained on, and how good it is.
    card = files["README.md"].decode()
    assert "hf-hub:own/Tiny" in card
    assert f'load_model("{HF}")' in card
    assert str(scripts.shards) in card
    assert "| val/top1 |" in card
    assert "the average of the weights (val/ema" not in card

    model = load_model(run)
    pixels = torch.rand(2, 3, 12, 12)
    with torch.no_grad():
        assert torch.equal(load_model(HF)(pixels), model(pixels))
        theirs = timm.create_model("hf-hub:own/Tiny", pretrained=True).eval()
        assert torch.allclose(theirs(pixels), model(pixels), atol=1e-5)

    # With an empty cache, and then from what the run itself has kept.
    from_hub = ("of-hub", f"init={HF}", "keep_head=true")
    from_folder = ("of-folder", f"init={exported}", "keep_head=true")
    with mock.patch.dict(scripts.starter.environment, HF_HOME=str(tmp_path / "empty")):
        hub.requests.clear()
        _, metrics = scripts.finetune(*from_hub, num_ranks=2)
        assert hub.downloads() == ["config.json", "model.safetensors"]
        assert scripts.finetune(*from_folder, num_ranks=2)[1] == metrics
        hub.commit("own/Tiny", {"README.md": b"no weights any more"})
        hub.requests.clear()
        run, _ = scripts.finetune(*from_hub, "schedule.steps=3")
    record = read_record(run)
    assert not hub.requests
    assert record.tags["vitscale.init"] == f"{HF}@{commit}"


OWN = """
    data.global_batch=8 data.num_workers=0 schedule.epochs=null schedule.steps=2
    schedule.warmup_epochs=0 engine.device=cpu engine.num_threads=1 tracking.uri=null
""".split()


def test_published_weights_are_fine_tuned_by_their_name_alone(scripts, hub, tmp_path):
    """Model, image size and pixels are those that the repository states."""
    # No value is a default, which would be right by chance.
    pixels = {"mean": (0.1, 0.2, 0.3), "eval_interpolation": "bicubic"}
    model = small_model(num_classes=9, preprocessing=pixels, gelu="erf")
    commit = hub.commit(
        "timm/tiny.in9", files_of(export(model, "timm", tmp_path / "out"))
    )
    words = ("init=timm/tiny.in9", f"data.path={scripts.shards}", *OWN)
    run = tmp_path / "run"
    printed = scripts.run("main", "--config", "own", *words, f"output={run}")
    assert "init=hf://timm/tiny.in9: model." in printed
    assert "the head is new" in printed
    assert "warning: this run has" not in printed
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["init"] == "hf://timm/tiny.in9"
    assert config["data"]["mean"] == list(pixels["mean"])
    assert config["data"]["interpolation"] == "bicubic"
    assert config["model"]["width"] == 24
    assert config["model"]["image_size"] == 16
    record = read_record(run)
    assert record.tags["vitscale.init"] == f"hf://timm/tiny.in9@{commit}"
    # What the run is told to be is what it is.
    note = record.note
    assert "digits" not in note
    assert f"images of {scripts.shards}, 3 classes" in note
    command = note.partition("**Command:** ")[2].partition("\n")[0]
    assert shlex.split(command)[:4] == ["vitscale", "finetune", "own", words[0]]


def files_of(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_ranks_fetch_once_and_nothing_that_runs(scripts, hub, tmp_path, monkeypatch):
    """Later, without a hub, what was fetched is used."""
    exported = tmp_path / "out"
    scripts.run("export", f"init={NPZ}", "--to", "safetensors", exported)
    # Pickle and Python would run on whoever loads them.
    programs = {"pytorch_model.bin": b"pickle", "model.py": b""}
    commit = hub.commit("own/Tiny", files_of(exported) | programs)
    words = ("compute.device=cpu", "num_workers=0", scripts.images)
    expected = scripts.run("predict", f"init={exported}", *words)
    # The first line names the model.
    predictions = expected.partition("\n")[2]
    printed = scripts.run("predict", f"init={HF}", *words, num_ranks=2)
    assert printed.endswith(predictions)
    assert hub.downloads() == ["model.safetensors", "vitscale.json"]
    assert hub.requests.count("GET /api/models/own/Tiny/revision/main") == 1
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert open_model(HF).source.startswith(f"{HF}@{commit}, ")


def test_bad_input_is_one_error(hub, scripts, tmp_path, monkeypatch):
    hub.commit("own/Tiny", {"pytorch_model.bin": b"pickle", "config.json": b"{}"})
    # What is fetched: the name, the repository, its commit, its content.
    messages = {
        "hf://tiny": "'tiny' is not OWNER/NAME",
        "hf://own/../tiny": "'own/../tiny' is not OWNER/NAME",
        "hf://own/other": "no such repository",
        f"{HF}@v2": "no such revision",
        HF: "has no supported weights",
    }
    for init, message in messages.items():
        with refused(f"init={init}: {message}(?s:.*)next: "):
            open_model(init)

    # What is pushed: the name, no token, one that the Hub does not know.
    words = (f"init={NPZ}", "--to", "safetensors", "--push")
    for name, token, message in yaml.safe_load("""
    - [tiny, x, "'tiny' is not OWNER/NAME"]
    - [own/Tiny, "", no token that allows it]
    - [own/Tiny, wrong, no token that allows it]
    """):
        output = tmp_path / f"out{token}"
        with mock.patch.dict(scripts.starter.environment, HF_TOKEN=token):
            printed = scripts.run("export", *words, name, output, code=2)
        assert f"push={name}: {message}\n  next: " in printed
        assert "Traceback" not in printed

        # Else before any work.
        assert output.exists() == (token == "wrong")
    # An outage is of storage, after which a job may be started again.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="127.0.0.1:9 cannot be used"):
        open_model("hf://own/another")
