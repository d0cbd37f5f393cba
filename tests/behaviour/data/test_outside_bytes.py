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
    images = pa.array(cells, pa.large_binary())
    table = pa.table({"image": images, "label": label})
    pq.write_table(table, path, compression="zstd", **options)
    return path


# Above 64 MiB, up to which a table may unpack to any multiple of its size.
ZEROS = bytes(65 * MIB)
# A dictionary stores a repeated cell once; without a limit it never spills to plain pages.
ONE_PAGE = {"use_dictionary": ["image"], "dictionary_pagesize_limit": 1 << 30}


# One huge cell; a repeated one; many rows or groups; and a huge text beside small images.
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
    path = make(tmp_path / "x.parquet")
    assert path.stat().st_size < MIB

    # Arrow's memory and Python's: neither may have held what the table unpacks to.
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    with refused("x.parquet': unpacks to .* times its size"):
        listed(opened("parquet", path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 150 * MIB
    assert pa.total_allocated_bytes() - before < 150 * MIB


def test_tables_of_paths_that_unpack_to_far_more_are_refused(tmp_path):
    path = tmp_path / "t.parquet"
    rows = pa.table({"image": ["x" * MIB] * 70, "label": ["a"] * 70})
    pq.write_table(rows, path, compression="zstd")
    with refused("unpacks to"):
        listed(opened("path_table", path))


def test_sound_tables_are_read_whatever_their_size(tmp_path):
    # Noise does not compress, and two repeated cells are an ordinary ratio.
    rng = np.random.default_rng(0)
    cells = [rng.bytes(MIB) for _ in range(70)]
    cells += [cells[0]] * 2
    path = parquet(tmp_path / "x.parquet", cells, ["a"] * len(cells))
    rows = listed(opened("parquet", path))
    assert [row.data for row in rows] == cells


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
    noise = np.random.default_rng(0).random(MIB)
    deflated(path, {"0.npy": npy(noise)})
    with zipfile.ZipFile(path, "a") as file:
        stored = file.filelist[0]
        for number in range(1, 30):
            again = zipfile.ZipInfo(f"{number}.npy")
            fields = "header_offset compress_size file_size CRC compress_type"
            for field in fields.split():
                setattr(again, field, getattr(stored, field))
            file.filelist.append(again)
            file.NameToInfo[again.filename] = again

        # Nothing was written through the library, which would leave the directory as it was.
        file._didModify = True
    return path


def endless_view(path: Path) -> Path:
    # One stored number, and a shape that says 2^40.
    view = torch.zeros(1, dtype=torch.float16).expand(1 << 40)
    torch.save({"x": view}, path)
    return path


def many_arrays(path: Path) -> Path:
    # One would be below the 64 MiB that are always allowed; all of them are not.
    array = npy(np.zeros(MIB))
    return deflated(path, {f"{number}.npy": array for number in range(20)})


# More than 64 MiB in each, in every form of weights that is read.
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
    make = WEIGHTS[name]
    path = make(tmp_path / name)
    with refused(f"{name}: unpacks to .* times its size"):
        read_tensors(path)


def test_published_forms_of_weights_are_read(tmp_path):
    """Stored and deflated, with a head of zeros and weights that are tied."""
    num = 1 << 20
    weight = torch.randn(num)
    tensors = {
        "a": weight,
        "tied": weight,
        "head": torch.zeros(num),
    }
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    np.savez(tmp_path / "a.npz", **arrays)
    np.savez_compressed(tmp_path / "b.npz", **arrays)

    # The form that DeiT and others publish, and torch's form of before 2020.
    torch.save({"model": tensors}, tmp_path / "c.pth")
    torch.save(tensors, tmp_path / "d.bin", _use_new_zipfile_serialization=False)
    for path in sorted(tmp_path.iterdir()):
        stored = read_tensors(path)
        for name, tensor in tensors.items():
            assert torch.equal(stored[name], tensor), path


# A title and a cleared screen by escape codes, the 8-bit one, and what moves the cursor.
NAMES = r'"x\e]0;owned\a.png", "a\e[2J", "b\x9b31m", "line\nbreak", "\r over", "tab\t", "\x7f"'


@every(name=NAMES)
def test_no_control_character_of_a_name_is_shown(name):
    # On a terminal, in a ledger, and in a table of results, also behind a formula's sign.
    texts = (visible(name), printable(name), csv_cell(name), csv_cell(f"={name}"))
    for text in texts:
        assert text.isprintable()

    # Other scripts and signs are no danger.
    harmless = "naïve 数据 \u3000 -x=y@z"
    assert visible(harmless) == harmless


def test_every_command_prints_through_the_guard():
    # Both streams and the error itself, since names reach all three.
    program = (
        "import sys; from vitscale.config.errors import UserError, run_script\n"
        "def main():\n"
        "    print('name \\x1b]0;owned\\x07', 'second line', sep='\\n')\n"
        "    print('\\x9b2J', file=sys.stderr)\n"
        "    raise UserError('no class \\x1b[2J')\n"
        "run_script(main)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == "name \\x1b]0;owned\\x07\nsecond line\n"
    assert done.stderr == "\\x9b2J\nerror:\nno class \\x1b[2J\n"


# What a spreadsheet computes: gets a quote. Then numbers, no value, and a plain name.
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
    # Read back as a spreadsheet does; CSV has no other form for "no value" than an empty cell.
    (found,) = next(csv.reader(io.StringIO(file.getvalue())))
    assert found == ("" if expected is None else str(expected))
