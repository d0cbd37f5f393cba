"""Write a small corpus as a folder of images, {train,test}/CLASS/NAME.png.

    python data_prep/make_corpus.py digits runs/digits/images
    python data_prep/make_corpus.py characters runs/characters/images
    python data_prep/make_corpus.py fashion_mnist runs/fashion_mnist/images

digits: scikit-learn's 1,797 handwritten digits. characters: accented letters rendered from the
fonts in matplotlib's wheel, with other fonts for the test images. fashion_mnist: the idx files of
Fashion-MNIST or MNIST in --path, as `apt install dataset-fashion-mnist` puts them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

try:
    from data_prep.corpora.characters import character_files
    from data_prep.corpora.digits import digit_files, idx_files
    from vitscale.config.errors import UserError, run_script
    from vitscale.distributed.atomic_files import commit_folder
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def main() -> None:
    arguments = parse_arguments()
    output = arguments.output
    if arguments.corpus == "digits":
        contents = dict(digit_files())
    elif arguments.corpus == "fashion_mnist":
        contents = dict(idx_files(arguments.path))
    else:
        numbers = {"num_train": arguments.num_train, "num_test": arguments.num_test}
        contents = dict(character_files(**numbers))
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
        corpus.formatter_class = argparse.ArgumentDefaultsHelpFormatter
        corpus.add_argument("output", type=Path, help="folder to create")
    letters.add_argument("--num-train", type=int, default=160, help="training images per letter")
    letters.add_argument("--num-test", type=int, default=40, help="test images per letter")
    folder = Path("/usr/share/datasets/fashion-mnist")
    clothes.add_argument("--path", type=Path, default=folder, help="of the idx files, also .gz")
    return parser.parse_args()


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
