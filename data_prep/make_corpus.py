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
from pathlib import Path

try:
    from data_prep.corpora.characters import GREY_LEVELS, Characters, character_files
    from data_prep.corpora.digits import digit_files
    from data_prep.corpora.idx import idx_files
    from data_prep.corpora.letters import SETS
    from vitscale.config.errors import UserError, run_script
    from vitscale.distributed.atomic_files import commit_folder
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

MIN_SIDE_PX = 16


def main() -> None:
    arguments = parse_arguments()
    output: Path = arguments.output
    if arguments.corpus == "digits":
        contents = digit_files(seed=arguments.seed)
    elif arguments.corpus == "fashion_mnist":
        contents = dict(idx_files(arguments.path))
    else:
        contents = dict(character_files(characters_of(arguments)))
    split_of = [tuple(name.split("/")[:2]) for name in contents]
    num_train = sum(split == "train" for split, _ in split_of)
    num_classes = len({label for _, label in split_of})
    if output.exists():
        check_same_files(output, contents)
        print(f"{output}: already there, the same {len(contents):,} images")
        return
    write_files(output, contents)
    print(
        f"{output}: {num_train:,} training and {len(contents) - num_train:,} test images, "
        f"{num_classes:,} classes"
    )
    config = "characters" if arguments.corpus == "characters" else "digits"
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
        corpus.add_argument("output", type=Path, help="folder to create")
    for corpus in (digits, letters):
        corpus.add_argument("--seed", type=int, default=0, help="default 0")
    clothes.add_argument(
        "--path",
        type=Path,
        default=Path("/usr/share/datasets/fashion-mnist"),
        help="folder of the idx files, also .gz; default %(default)s",
    )
    default = Characters()
    letters.add_argument(
        "--sets",
        nargs="+",
        default=default.sets,
        metavar="SET",
        help=f"of {', '.join(SETS)}; default {' '.join(default.sets)}",
    )
    letters.add_argument(
        "--grey-levels",
        choices=GREY_LEVELS,
        default=default.grey_levels,
        help=f"fixed: white on black; default {default.grey_levels}",
    )
    for option, value, text in (
        ("--num-train", default.num_train, "training images per letter"),
        ("--num-test", default.num_test, "test images per letter"),
        ("--side-px", default.side_px, "side of the images in pixels"),
    ):
        letters.add_argument(
            option, type=int, default=value, metavar="N", help=f"{text}; default {value}"
        )
    return parser.parse_args()


def characters_of(arguments: argparse.Namespace) -> Characters:
    """The options as a corpus. Raises UserError where one is out of range."""
    if unknown := [name for name in arguments.sets if name not in SETS]:
        raise UserError(
            f"{' '.join(unknown)} is not known", where="--sets", allowed=", ".join(SETS)
        )
    for option, value, smallest, largest in (
        ("--num-train", arguments.num_train, 1, 999),
        ("--num-test", arguments.num_test, 1, 999),
        ("--side-px", arguments.side_px, MIN_SIDE_PX, 512),
    ):
        if not smallest <= value <= largest:
            raise UserError(f"{value}", where=option, allowed=f"{smallest} to {largest}")
    return Characters(
        sets=arguments.sets,
        num_train=arguments.num_train,
        num_test=arguments.num_test,
        side_px=arguments.side_px,
        grey_levels=arguments.grey_levels,
        seed=arguments.seed,
    )


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
