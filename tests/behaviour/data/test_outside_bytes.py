"""Files whose content is far larger than they are, and names that terminals and tables obey."""

import csv
import io
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from data_prep.sources.protocol import printable
from tests.support.corpora.sources import listed, opened
from tests.support.tables import every, refused, rows
from vitscale.config.outside import csv_cell, visible
from vitscale.models.weights.files import read_tensors

MIB = 1 << 20


def parquet(path: Path, cells: list[Any], label: list[Any], **options) -> Path:
    table = pa.table({"image": pa.array(cells, pa.large_binary()), "label": label})
    pq.write_table(table, path, compression="zstd", **options)
    return path


ZEROS = bytes(65 * MIB)
ONE_PAGE = {"use_dictionary": ["image"], "dictionary_pagesize_limit": 1 << 30}


@every(
    make=[
        lambda path: parquet(path, [ZEROS], ["a"]),
        lambda path: parquet(path, [ZEROS] * 3, ["a"] * 3, **ONE_PAGE),
        # The footer says 30 MiB: the cell is stored once.
        lambda path: parquet(path, [ZEROS[: 30 * MIB]] * 9, ["a"] * 9, **ONE_PAGE),
        lambda path: parquet(path, [ZEROS[:MIB]] * 99, ["a"] * 99, row_group_size=1),
        lambda path: parquet(path, [b"x"] * 2, ["a" * (70 * MIB), "b"]),
    ]
)
def test_tables_that_unpack_to_far_more_are_refused(make, tmp_path):
    make(tmp_path / "x.parquet")
    assert (tmp_path / "x.parquet").stat().st_size < MIB
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    with refused("x.parquet': unpacks to .* times its size"):
        listed(opened("parquet", tmp_path / "x.parquet"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 150 * MIB
    assert pa.total_allocated_bytes() - before < 150 * MIB


def test_tables_of_paths_that_unpack_to_far_more_are_refused(tmp_path):
    rows = pa.table({"image": ["x" * MIB] * 70, "label": ["a"] * 70})
    pq.write_table(rows, tmp_path / "t.parquet", compression="zstd")
    with refused("unpacks to"):
        listed(opened("path_table", tmp_path / "t.parquet"))


def test_sound_tables_are_read_whatever_their_size(tmp_path):
    rng = np.random.default_rng(0)
    cells = [rng.bytes(MIB) for _ in range(70)]
    path = parquet(tmp_path / "x.parquet", [*cells, cells[0], cells[0]], ["a"] * 72)
    found = [row.data for row in listed(opened("parquet", path))]
    assert found == [*cells, cells[0], cells[0]]


def deflated(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def repacked(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """What `torch.save` stores, deflated."""
    torch.save(tensors, path)
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    return deflated(path, members)


def overlapping(path: Path) -> Path:
    """Many names of one member: the file is small, and so is the ratio of each member."""
    deflated(path, {"0.npy": npy(np.random.default_rng(0).random(MIB))})
    with zipfile.ZipFile(path, "a") as file:
        for number in range(1, 30):
            again = zipfile.ZipInfo(f"{number}.npy")
            fields = "header_offset compress_size file_size CRC compress_type"
            for field in fields.split():
                setattr(again, field, getattr(file.filelist[0], field))
            file.filelist.append(again)
            file.NameToInfo[again.filename] = again
        file._didModify = True
    return path


def endless_view(path: Path) -> Path:
    torch.save({"x": torch.zeros(1, dtype=torch.float16).expand(1 << 40)}, path)
    return path


def many_arrays(path: Path) -> Path:
    return deflated(path, {f"{n}.npy": npy(np.zeros(MIB)) for n in range(20)})


WEIGHTS = {
    "one.npz": lambda path: deflated(path, {"a.npy": npy(np.zeros(20 * MIB))}),
    "many.npz": many_arrays,
    "overlapping.npz": overlapping,
    "fp32.pth": lambda path: repacked(path, {"x": torch.zeros(20 * MIB)}),
    "fp16.bin": lambda path: repacked(path, {"x": torch.zeros(40 * MIB).half()}),
    "view.pt": endless_view,
}


@every(name=WEIGHTS)
def test_weights_that_unpack_to_far_more_are_refused(name, tmp_path):
    with refused(f"{name}: unpacks to .* times its size"):
        read_tensors(WEIGHTS[name](tmp_path / name))


def test_published_forms_of_weights_are_read(tmp_path):
    """Stored and deflated, with a head of zeros and weights that are tied."""
    weight = torch.randn(1 << 20)
    tensors = {"a": weight, "tied": weight, "head": torch.zeros(1 << 20)}
    arrays = {name: each.numpy() for name, each in tensors.items()}
    np.savez(tmp_path / "a.npz", **arrays)
    np.savez_compressed(tmp_path / "b.npz", **arrays)
    torch.save({"model": tensors}, tmp_path / "c.pth")
    torch.save(tensors, tmp_path / "d.bin", _use_new_zipfile_serialization=False)
    for path in sorted(tmp_path.iterdir()):
        found = read_tensors(path)
        for name, each in tensors.items():
            assert torch.equal(found[name], each), path


NAMES = r'"x\e]0;owned\a.png", "a\e[2J", "b\x9b31m", "line\nbreak", "\r over", "tab\t", "\x7f"'


@every(name=NAMES)
def test_no_control_character_of_a_name_is_shown(name):
    shown = (visible(name), printable(name), csv_cell(name), csv_cell(f"={name}"))
    assert all(text.isprintable() for text in shown)
    assert visible("naïve 数据 \u3000 -x=y@z") == "naïve 数据 \u3000 -x=y@z"


def test_every_command_prints_through_the_guard():
    program = (
        "import sys; from vitscale.config.errors import UserError, run_script\n"
        "def main():\n"
        "    print('name \\x1b]0;owned\\x07', 'second line', sep='\\n')\n"
        "    print('\\x9b2J', file=sys.stderr)\n"
        "    raise UserError('no class \\x1b[2J')\n"
        "run_script(main)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == "name \\x1b]0;owned\\x07\nsecond line\n"
    assert done.stderr == "\\x9b2J\nerror:\nno class \\x1b[2J\n"


@rows(r"""
- [cell, expected]
- ['=HYPERLINK("http://x","y")', "'=HYPERLINK(\"http://x\",\"y\")"]
- ["+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"]
- ["-2+3", "'-2+3"]
- ["@SUM(A1)", "'@SUM(A1)"]
- ["\t=1", "'\\x09=1"]
- ["\r=1", "'\\x0d=1"]
- ["-1", "-1"]
- ["+0.5", "+0.5"]
- [-1.5, -1.5]
- [null, null]
- [plain = name, plain = name]
""")
def test_no_cell_is_a_formula(cell, expected):
    assert csv_cell(cell) == expected
    file = io.StringIO()
    csv.writer(file).writerow([csv_cell(cell)])
    (found,) = next(csv.reader(io.StringIO(file.getvalue())))
    assert found == ("" if expected is None else str(expected))
