"""Write a small corpus as a folder of images, {train,test}/CLASS/NAME.png.

    python data_prep/make_corpus.py digits runs/demo/images
    python data_prep/make_corpus.py characters runs/characters/images --sets latin greek
    python data_prep/make_corpus.py fashion_mnist runs/fashion_mnist/images

digits: scikit-learn's 1,797 handwritten digits. characters: letters rendered from the fonts in
matplotlib's wheel, with other fonts for the test images. fashion_mnist: the idx files of
Fashion-MNIST or MNIST in --path, as `apt install dataset-fashion-mnist` puts them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

try:
    from data_prep.corpora.characters import GREY_LEVELS, SETS, Characters, character_files
    from data_prep.corpora.digits import digit_files, idx_files
    from vitscale.config.errors import UserError, run_script
    from vitscale.distributed.atomic_files import commit_folder
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def main() -> None:
    arguments = vars(parse_arguments())
    corpus, output = arguments.pop("corpus"), arguments.pop("output")
    if corpus == "digits":
        contents = dict(digit_files(**arguments))
    elif corpus == "fashion_mnist":
        contents = dict(idx_files(arguments["path"]))
    else:
        contents = dict(character_files(Characters(**arguments)))
    num_train = sum(name.startswith("train/") for name in contents)
    num_classes = len({name.split("/")[1] for name in contents})
    if output.exists():
        check_same_files(output, contents)
        print(f"{output}: already there, the same {len(contents):,} images")
        return
    write_files(output, contents)
    print(
        f"{output}: {num_train:,} training and {len(contents) - num_train:,} test images, "
        f"{num_classes:,} classes"
    )
    config = "characters" if corpus == "characters" else "digits"
    print(
        f"next: python data_prep/make_shards.py --config configs/data/{config}.yaml "
        f"source.path={output} output={output.with_name('shards')}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    corpora = parser.add_subparsers(dest="corpus", required=True, metavar="CORPUS")
    digits = corpora.add_parser("digits", help="scikit-learn's handwritten digits")
    letters = corpora.add_parser("characters", help="letters of the fonts in matplotlib's wheel")
    clothes = corpora.add_parser("fashion_mnist", help="idx files of Fashion-MNIST or MNIST")
    for corpus in (digits, letters, clothes):
        corpus.formatter_class = argparse.ArgumentDefaultsHelpFormatter
        corpus.add_argument("output", type=Path, help="folder to create")
    for corpus in (digits, letters):
        corpus.add_argument("--seed", type=int, default=0, help="of what is drawn")
    folder = Path("/usr/share/datasets/fashion-mnist")
    clothes.add_argument("--path", type=Path, default=folder, help="of the idx files, also .gz")
    add = letters.add_argument
    default = Characters()
    add(
        "--sets", nargs="+", choices=SETS, default=default.sets, metavar="SET", help=", ".join(SETS)
    )
    add("--grey-levels", choices=GREY_LEVELS, default="random", help="fixed: white on black")
    for option, value, allowed, text in (
        ("--num-train", default.num_train, (1, 999), "training images per letter"),
        ("--num-test", default.num_test, (1, 999), "test images per letter"),
        ("--side-px", default.side_px, (16, 512), "side of the images in pixels"),
    ):
        add(option, type=number_in(*allowed), default=value, metavar="N", help=text)
    return parser.parse_args()


def number_in(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of numbers from `low` to `high`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text}; allowed: {low} to {high}")
        return int(text)

    return parse


def write_files(output: Path, contents: dict[str, bytes]) -> None:
    """Write all files or none."""
    temporary = output.with_name(f".{output.name}.preparing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        for name, png in contents.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(png)
        os.sync()  # one flush instead of one for each file
        commit_folder(temporary, output)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"cannot be written ({error.strerror})", where=str(output)) from None


def check_same_files(output: Path, contents: dict[str, bytes]) -> None:
    found = {str(path.relative_to(output)) for path in output.rglob("*") if not path.is_dir()}
    if found != set(contents) or any((output / n).read_bytes() != c for n, c in contents.items()):
        raise UserError(
            "exists already and holds other files",
            where=str(output),
            next_step="choose another folder, or remove this one",
        )


if __name__ == "__main__":
    run_script(main)
