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

from tests.scripts.models.conftest import NPZ, Scripts
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
        found = [
            each for each in self.requests if each[:4] == "GET " and "/resolve/" in each
        ]
        return sorted(each.rpartition("/")[2] for each in found)


class Api(Answering):
    """As much of the Hub's API as uploads and downloads of models take."""

    hub: Hub

    def do_GET(self) -> None:
        """The id and the files of a commit, or one file."""
        path, _ = self.asked()
        owner, name, *path = path[2:] if path[0] == "api" else path
        commits = self.hub.repositories.get(f"{owner}/{name}")
        if commits is None:
            return self.say({}, 401, **{"X-Error-Code": "RepoNotFound"})
        kind, revision, *rest = path or ["revision", "main"]
        commit = [*commits][-1] if revision == "main" else revision
        if commit not in commits:
            return self.say({}, 404, **{"X-Error-Code": "RevisionNotFound"})
        files = commits[commit]
        one = {"type": "file", "oid": "0"}
        if kind == "revision":
            return self.say({"id": f"{owner}/{name}", "sha": commit, "siblings": []})
        if kind == "tree":
            return self.say(
                [{**one, "path": n, "size": len(d)} for n, d in files.items()]
            )
        data = files["/".join(rest)]
        tag = hashlib.sha1(data).hexdigest()
        self.answer(200, data, {"ETag": f'"{tag}"', "X-Repo-Commit": commit})

    def do_PUT(self) -> None:
        _, data = self.asked()
        self.hub.large[hashlib.sha256(data).hexdigest()] = data
        self.say({})

    def do_POST(self) -> None:
        """Create a repository, say how files are sent, or commit them."""
        (path, body) = self.asked()
        url = self.hub.environment["HF_ENDPOINT"]
        if (
            self.headers["Authorization"]
            != f"Bearer {self.hub.environment['HF_TOKEN']}"
        ):
            return self.say({}, 401)
        name = "/".join(path[2:4])
        kind = path[-2]
        if kind == "commit":
            found = dict([*self.hub.repositories[name].values()][-1])
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    found[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    found[value["path"]] = self.hub.large[value["oid"]]
                elif line["key"] == "deletedFile":
                    del found[value["path"]]
            commit = self.hub.commit(name, found)
            return self.say(
                {"commitUrl": f"{url}/{name}/commit/{commit}", "commitOid": commit}
            )
        asked = json.loads(body)
        if kind == "repos":
            assert asked.get("visibility") == "private" or asked["private"]
            name = f"{asked['organization']}/{asked['name']}"
            is_new = name not in self.hub.repositories
            self.hub.repositories.setdefault(name, {"0" * 40: {}})
            return self.say({"url": f"{url}/{name}"}, 200 if is_new else 409)
        for each in asked.get("files", ()):  # of preupload
            is_large = each["path"].endswith(".safetensors")
            each |= {
                "uploadMode": "lfs" if is_large else "regular",
                "shouldIgnore": False,
            }
        for each in asked.get("objects", ()):  # of LFS
            each["actions"] = {"upload": {"href": f"{url}/large"}}
        self.say(asked)

    def asked(self) -> tuple[list[str], bytes]:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        return path.strip("/").split("/"), self.rfile.read(
            int(self.headers["Content-Length"] or 0)
        )

    def say(self, content, status: int = 200, **headers: str) -> None:
        self.answer(status, json.dumps(content).encode(), headers)


@pytest.fixture
def hub(scripts: Scripts, tmp_path) -> Iterator[Hub]:
    """An empty one, which this process and the scripts use, with a token."""
    cache = str(tmp_path / "home")
    found = Hub(
        {"HF_HOME": cache, "HF_TOKEN": "hf_of_tests", "HF_HUB_DISABLE_XET": "1"}
    )
    with listening(type("OfHub", (Api,), {"hub": found})) as url:
        found.environment["HF_ENDPOINT"] = url
        with (
            mock.patch.dict(os.environ, found.environment),
            mock.patch.dict(scripts.starter.environment, found.environment),
        ):
            importlib.reload(constants)  # it reads the environment once
            yield found
    importlib.reload(constants)


def test_what_is_pushed_comes_back_in_equal_bits(
    scripts: Scripts, from_npz: Run, hub: Hub, tmp_path
):
    """A training fetches it once for two ranks, and when it resumes keeps what it started from."""
    hub.commit(
        "own/Tiny", {"preprocessor_config.json": b"of an earlier push", "mine.txt": b""}
    )
    exported = tmp_path / "exported"
    words = (f"init={from_npz[0]}", "--to", "timm", "--push", "own/Tiny", exported)
    commit = scripts.run("export", *words).rpartition(f"pushed {HF}@")[2].strip()
    files = hub.repositories["own/Tiny"][commit]
    assert {*files} == {"README.md", "config.json", "model.safetensors", "mine.txt"}
    assert [*hub.large.values()] == [files["model.safetensors"]]
    card = files["README.md"].decode()
    for part in (
        "hf-hub:own/Tiny",
        f'load_model("{HF}")',
        str(scripts.shards),
        "| val/top1 |",
    ):
        assert part in card
    assert "the average of the weights (val/ema" not in card
    own = load_model(from_npz[0])
    pixels = torch.rand(2, 3, 12, 12)
    with torch.no_grad():
        assert torch.equal(load_model(HF)(pixels), own(pixels))
        theirs = timm.create_model("hf-hub:own/Tiny", pretrained=True).eval()
        assert torch.allclose(theirs(pixels), own(pixels), atol=1e-5)
    with mock.patch.dict(scripts.starter.environment, HF_HOME=str(tmp_path / "empty")):
        hub.requests.clear()
        _, metrics = scripts.finetune(
            "of-hub", f"init={HF}", "keep_head=true", num_ranks=2
        )
        assert hub.downloads() == ["config.json", "model.safetensors"]
        words = (f"init={exported}", "keep_head=true")
        assert scripts.finetune("of-folder", *words, num_ranks=2)[1] == metrics
        hub.commit("own/Tiny", {"README.md": b"no weights any more"})
        hub.requests.clear()
        run, _ = scripts.finetune(
            "of-hub", f"init={HF}", "keep_head=true", "schedule.steps=3"
        )
    record = read_record(run)
    assert not hub.requests
    assert record is not None
    assert record.tags["vitscale.init"] == f"{HF}@{commit}"


OWN = """
    data.global_batch=8 data.num_workers=0 schedule.epochs=null schedule.steps=2
    schedule.warmup_epochs=0 engine.device=cpu engine.num_threads=1 tracking.uri=null
""".split()


def test_published_weights_are_fine_tuned_by_their_name_alone(
    scripts: Scripts, hub: Hub, tmp_path: Path
) -> None:
    """Model, image size and pixels are those that the repository states."""
    pixels = {"mean": (0.1, 0.2, 0.3), "eval_interpolation": "bicubic"}
    model = small_model(num_classes=9, preprocessing=pixels, gelu="erf")
    export(model, "timm", tmp_path / "out")
    commit = hub.commit(
        "timm/tiny.in9", {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    )
    words = ("init=timm/tiny.in9", f"data.path={scripts.shards}", *OWN)
    printed = scripts.run(
        "main", "--config", "own", *words, f"output={tmp_path / 'run'}"
    )
    assert "init=hf://timm/tiny.in9: model." in printed
    assert "the head is new" in printed and "warning: this run has" not in printed
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert config["init"] == "hf://timm/tiny.in9"
    assert config["data"]["mean"] == list(pixels["mean"])
    assert config["data"]["interpolation"] == "bicubic"
    assert (config["model"]["width"], config["model"]["image_size"]) == (24, 16)
    record = read_record(tmp_path / "run")
    assert record is not None
    assert record.tags["vitscale.init"] == f"hf://timm/tiny.in9@{commit}"
    # What the run is told to be is what it is.
    note = record.note
    assert "digits" not in note and f"images of {scripts.shards}, 3 classes" in note
    command = note.partition("**Command:** ")[2].partition("\n")[0]
    assert shlex.split(command)[:4] == ["vitscale", "finetune", "own", words[0]]


def test_ranks_fetch_once_and_nothing_that_runs(
    scripts: Scripts, hub: Hub, tmp_path, monkeypatch
):
    """Later, without a hub, what was fetched is used."""
    scripts.run("export", f"init={NPZ}", "--to", "safetensors", tmp_path / "out")
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    commit = hub.commit(
        "own/Tiny", files | {"pytorch_model.bin": b"pickle", "model.py": b""}
    )
    words = ("compute.device=cpu", "num_workers=0", scripts.images)
    expected = scripts.run("predict", f"init={tmp_path / 'out'}", *words)
    # The first line names the model.
    predictions = expected.partition("\n")[2]
    said = scripts.run("predict", f"init={HF}", *words, num_ranks=2)
    assert said.endswith(predictions)
    assert hub.downloads() == ["model.safetensors", "vitscale.json"]
    assert hub.requests.count("GET /api/models/own/Tiny/revision/main") == 1
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert open_model(HF).source.startswith(f"{HF}@{commit}, ")


def test_bad_input_is_one_error(hub: Hub, scripts: Scripts, tmp_path, monkeypatch):
    hub.commit("own/Tiny", {"pytorch_model.bin": b"pickle", "config.json": b"{}"})
    for init, what in {
        "hf://tiny": "'tiny' is not OWNER/NAME",
        "hf://own/../tiny": "'own/../tiny' is not OWNER/NAME",
        "hf://own/other": "no such repository",
        f"{HF}@v2": "no such revision",
        HF: "has no supported weights",
    }.items():
        with refused(f"init={init}: {what}(?s:.*)next: "):
            open_model(init)
    words = (f"init={NPZ}", "--to", "safetensors")
    for name, token, what in yaml.safe_load("""
    - [tiny, x, "'tiny' is not OWNER/NAME"]
    - [own/Tiny, "", no token that allows it]
    - [own/Tiny, wrong, no token that allows it]
    """):
        with mock.patch.dict(scripts.starter.environment, HF_TOKEN=token):
            printed = scripts.run(
                "export", *words, "--push", name, tmp_path / f"out{token}", code=2
            )
        assert f"push={name}: {what}\n  next: " in printed
        assert "Traceback" not in printed

        # Else before any work.
        assert (tmp_path / f"out{token}").exists() == (token == "wrong")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="127.0.0.1:9 cannot be used"):
        open_model("hf://own/another")
