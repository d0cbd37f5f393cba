"""benchmarks/: they run, their checks can fail, and their corpora are as described."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from benchmarks.corpora import glyph_drawing
from benchmarks.corpora.photo_folder import noise_photos, write_photo_folder
from benchmarks.corpora.planted_faults import FAULTS, REJECTED
from benchmarks.sharding.output_checks import WrongOutput, check_shards
from tests.support.corpora.preparing import prepare_here, run_of
from tests.support.levels import by_level
from vitscale.config.errors import UserError

ROOT = Path(__file__).parents[3]
# Characters where the fonts are installed; shapes have the same properties elsewhere.
DRAWING = "shapes" if glyph_drawing.missing_packages() else "glyphs"


COMMANDS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))


def run(
    script: str, *options: object, rc: int = 0, environment: dict[str, str] | None = None
) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *map(str, options)],
        cwd=ROOT,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == rc, done.stdout + done.stderr
    return done.stdout + done.stderr


def members(tar: io.BufferedIOBase) -> dict[str, bytes]:
    with tarfile.open(fileobj=tar) as file:
        return {m.name: file.extractfile(m).read() for m in file}


def glyphs(output: Path, *options: object) -> Path:
    run("corpora/glyph_corpus.py", output, f"--drawing={DRAWING}", "--side=32", *options)
    return output


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    lines = run(command, "--help").splitlines()
    assert lines.index("options:") > 0


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    text = "raise ModuleNotFoundError(\"No module named 'blake3'\", name='blake3')\n"
    (tmp_path / "blake3.py").write_text(text)
    text = run("sharding_speed.py", rc=2, environment={"PYTHONPATH": str(tmp_path)})
    assert "No module named 'blake3'. Run: pip install" in text and "vitscale" not in text


@pytest.mark.slow
@pytest.mark.distributed
def test_checkpoint_stall_is_measured_on_two_ranks(tmp_path: Path) -> None:
    options = ("--mb", 1, "--ranks", 2, "--rounds", 1)
    run("checkpoint_stall.py", *options, "--work", tmp_path, "--json", tmp_path / "results.json")
    results = json.loads((tmp_path / "results.json").read_text())
    assert min(results["measurements"][0]["seconds"]["stall"]) >= 0
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"], "left behind"


@pytest.mark.slow
def test_sharding_benchmark_measures_everything(tmp_path: Path) -> None:
    text = run(
        "sharding_speed.py", "--toy", "--work", tmp_path, "--json", tmp_path / "results.json"
    )
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["all"]["seconds"]) >= {"copy", "copy_all", "cp", "shardwriter", "header"}
    assert set(results["part"]["seconds"]) >= {"decoder", "decode"}
    sizes = results["scaling"]["sizes"]
    assert sizes["10 n"]["images"] == 10 * sizes["n"]["images"]
    assert results["resume"]["trials"]
    assert "header / shardwriter" in text
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"], "left behind"


def test_repaired_photographs_are_no_wrong_output(tmp_path: Path) -> None:
    photos = noise_photos(width=40, height=30, num=4)
    with Image.open(io.BytesIO(photos[0])) as image:
        image.getexif()[0x0112] = 6
        turned = io.BytesIO()
        image.save(turned, "JPEG", exif=image.getexif())
    photos[0] = turned.getvalue()
    source = write_photo_folder(tmp_path / "photos", photos, total_bytes=20_000)
    prepare_here(run_of(source.root, tmp_path / "shards"))
    check_shards(tmp_path / "shards", digests=source.digests)
    other = {path: source.digests[path] for path in source.paths}
    other["n00000000/n00000000_0_0.JPEG"] = bytes(32)
    with pytest.raises(WrongOutput, match="repaired from other bytes"):
        check_shards(tmp_path / "shards", digests=other)


@pytest.mark.parametrize(
    "name", by_level(["copy", "shardwriter", "header", "resume"], fast=["copy"], slow=["resume"])
)
def test_benchmark_fails_on_one_wrong_bit(tmp_path: Path, name: str) -> None:
    text = run("sharding_speed.py", "--toy", "--corrupt", "--only", name, "--work", tmp_path, rc=1)
    assert "FAILED" in text and "Traceback" not in text
    assert not list(tmp_path.iterdir()), "left behind"


def test_unknown_measurement_is_refused(tmp_path: Path) -> None:
    text = run("sharding_speed.py", "--only", "copy,speed", "--work", tmp_path, rc=2)
    assert "speed" in text and "shardwriter" in text


def test_results_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    text = run(
        "sharding_speed.py", "--toy", "--json", tmp_path / "no/x.json", "--work", tmp_path, rc=2
    )
    assert "--json: " in text and "cannot be written" in text and "Traceback" not in text


def test_glyphs_do_not_depend_on_workers_or_layout(tmp_path: Path) -> None:
    options = ("--classes=5", "--images-per-class=3", "--faults=1")
    tars = glyphs(tmp_path / "a", *options, "--workers=1") / "tars"
    folders = glyphs(tmp_path / "b", *options, "--workers=2", "--layout=folders") / "images"
    outer = glyphs(tmp_path / "c", *options, "--layout=tar_of_tars") / "corpus.tar"
    with open(outer, "rb") as file:
        assert members(file) == {path.name: path.read_bytes() for path in tars.iterdir()}
    for path in tars.iterdir():
        with open(path, "rb") as file:
            within = {p.name: p.read_bytes() for p in (folders / path.stem).iterdir()}
            assert members(file) == within
    other = glyphs(tmp_path / "d", *options, "--seed=1") / "tars"
    assert {p.read_bytes() for p in tars.iterdir()}.isdisjoint(
        p.read_bytes() for p in other.iterdir()
    )


def test_glyphs_differ_and_have_a_parent(tmp_path: Path) -> None:
    corpus = glyphs(tmp_path / "a", "--classes=20", "--images-per-class=8", "--layout=folders")
    contents = [path.read_bytes() for path in corpus.rglob("*.png")]
    assert len(set(contents)) == len(contents) == 160
    assert {Image.open(io.BytesIO(data)).size for data in contents} == {(32, 32)}
    names = (corpus / "classes.txt").read_text().splitlines()
    with open(corpus / "parents.csv") as file:
        parents = dict(csv.reader(file))
    assert list(parents) == names == sorted(p.name for p in (corpus / "images").iterdir())
    assert len(set(parents.values())) > 1


def test_every_planted_fault_is_in_the_table(tmp_path: Path) -> None:
    corpus = glyphs(tmp_path / "a", "--classes=4", "--layout=folders", "--faults=2")
    with open(corpus / "faults.csv") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["fault"] for row in rows) == sorted([*FAULTS, *FAULTS])
    for row in rows:
        assert (corpus / "images" / row["path"]).is_file()
        assert not row["of"] or (corpus / "images" / row["of"]).is_file()
        if row["fault"] == "same_bytes":
            one, other = (corpus / "images" / row[key] for key in ("path", "of"))
            assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("name", FAULTS)
def test_decoder_agrees_with_the_fault(name: str) -> None:
    """Files to reject cannot be decoded, are huge, or have another format."""
    fault = FAULTS[name]
    picture = glyph_drawing.draw_shape(7, 0, glyph_drawing.Look())
    if fault.make is None:
        return
    data = fault.make(picture, random.Random(0))
    assert data == fault.make(picture, random.Random(0))
    rejected = True
    try:
        image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP"))
        if image.width * image.height < 10**8:
            image.load()
            rejected = False
    except (OSError, SyntaxError, Image.DecompressionBombError):
        pass
    if fault.expected == REJECTED:
        assert rejected
    elif name not in ("flipped_bytes", "gzip_jpeg", "text_file"):
        assert not rejected


STATUSES = {
    "rejected": {"rejected"},
    "not_an_image": {"rejected"},
    "kept": {"kept"},
    "copy": {"kept"},
    "converted": {"repaired"},
    "repaired": {"repaired"},
    "either": {"kept", "rejected"},
}


@pytest.mark.parametrize(
    ("layout", "kind", "check"),
    [("folders", "image_folder", "decode"), ("tars", "class_tars", "header")],
)
def test_every_planted_fault_gets_its_verdict(
    tmp_path: Path, layout: str, kind: str, check: str
) -> None:
    corpus = glyphs(tmp_path / "a", "--classes=5", f"--layout={layout}", "--faults=2")
    source = corpus / {"folders": "images", "tars": "tars"}[layout]
    command = [sys.executable, "data_prep/make_shards.py", "--config"]
    command += ["configs/data/image_folder.yaml", "source.holdout_fraction=0"]
    command += [f"source.kind={kind}", f"source.path={source}", f"output={tmp_path / 'out'}"]
    command += [f"images.check={check}", "images.max_bad_fraction=1"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    ledger = pq.read_table(tmp_path / "out" / "ledger.parquet").to_pylist()
    status = {row["path"]: row["status"] for row in ledger}
    with open(corpus / "faults.csv") as file:
        faults = list(csv.DictReader(file))
    wrong = {
        row["path"]: status[row["path"]]
        for row in faults
        if status[row["path"]] not in STATUSES[row["expected"]]
    }
    assert not wrong
    planted = {row["path"] for row in faults}
    assert {s for path, s in status.items() if path not in planted} == {"kept"}
    assert len(status) == 5 * 10 + len(faults)


def test_missing_fonts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glyph_drawing, "FONTS", {"/nowhere/a.ttf": "fonts-a"})
    with pytest.raises(UserError, match="apt-get install fonts-a"):
        glyph_drawing.require_packages()
