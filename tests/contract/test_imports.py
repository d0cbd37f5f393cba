"""What importing a package does, what Pillow opens, and when ranks may wait for each other.

Who may import what is in pyproject.toml: `[tool.importlinter]`; what would fork: `[tool.ruff]`.
"""

import ast
import itertools
import re
import sys

from tests.contract.tree import ROOT, imports_of, module_files, parsed, scripts


def test_package_files_are_empty():
    """But for one, which sets the environment first, and imports what it offers when asked for."""
    filled = [
        module
        for module, path in module_files().items()
        if path.name == "__init__.py" and parsed(path).body
    ]
    allowed = {"os", "typing", "vitscale.evaluation.api"}
    assert filled == ["vitscale"]
    assert not imports_of("vitscale") - allowed


def test_the_reference_of_trainings_imports_nothing_of_the_product():
    """Nor of DeepSpeed: what both shared would be wrong in both."""
    imported = set()
    for name in ("reference_training", "reference_losses"):
        for node in ast.walk(parsed(ROOT / f"tests/support/{name}.py")):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.module
                assert node.level == 0
                imported.add(node.module)
    # What Python itself has is not said twice either, but nobody here could break it.
    others = {
        name for name in imported if name.split(".")[0] not in sys.stdlib_module_names
    }
    torch_alone = {"numpy", "torch", "torch.nn.functional"}
    assert others == torch_alone | {"tests.support.reference_training"}


def test_nobody_imports_a_script():
    # It would exist twice, as __main__ and under its name, with two states.
    for module in module_files():
        assert not imports_of(module) & scripts(), module


def test_pillow_is_told_which_formats_to_open():
    """Its other parsers, some of which start programs, never see untrusted bytes."""
    files = [*module_files().values(), *(ROOT / "benchmarks").rglob("*.py")]
    opened = 0
    for node in itertools.chain.from_iterable(ast.walk(parsed(path)) for path in files):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Image.open":
            opened += 1
            keywords = {keyword.arg for keyword in node.keywords}
            assert "formats" in keywords, ast.unparse(node)

    # Else the search itself is broken.
    assert opened > 4


# In a text for people: what they may copy into a shell.
COMMAND = re.compile(
    r"\b(vitscale [a-z]+|chmod|set [a-z]+=|mlflow|tensorboard|wandb|rm|mv|cp|git|python) ?.*"
)
A_PLACE = re.compile(r"\b_?(path|folder|file|uri|output|root)\b")


def test_places_in_printed_commands_are_quoted():
    """A run folder may have spaces, and names that a shell would take apart."""
    quoted = 0
    for path in module_files().values():
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.JoinedStr):
                continue

            # Values behind a command in the text before them.
            text = ""
            for part in node.values:
                if isinstance(part, ast.Constant):
                    text += str(part.value)
                    continue
                value = ast.unparse(part)
                if COMMAND.search(text) and A_PLACE.search(value):
                    assert "quote(" in value, f"{path}:{node.lineno}: {text}{value}"
                    quoted += 1
    assert quoted > 5


# Names of torch's collectives, and of the project's functions that are themselves collective.
COLLECTIVES = set(
    """
    all_reduce all_gather all_gather_object all_gather_into_tensor barrier broadcast_object_list
    gather_object scatter_object_list reduce_scatter_tensor monitored_barrier destroy_process_group
    """.split()
)
# At a planned end; an error passes by.
PLANNED = {"vitscale/distributed/world.py: process_group"}


def test_no_collective_runs_while_an_error_unwinds():
    """The other ranks may be in another collective: both would wait.

    Clean-up is what `finally`, `__exit__`, `__del__` and handlers of any error run, and the
    functions of a name that only one function has.
    """
    functions = {}
    for path in module_files().values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                place = (str(path.relative_to(ROOT)), node)
                functions.setdefault(node.name, []).append(place)

    # Of two functions with one name, nobody knows here which is called.
    alone = {
        name: _called(places[0][1].body)
        for name, places in functions.items()
        if len(places) == 1
    }

    # A function that calls a collective one is collective, until there is no new one.
    collective = set(COLLECTIVES)
    num_known = 0
    while len(collective) > num_known:
        num_known = len(collective)
        collective |= {name for name, called in alone.items() if called & collective}
    assert len(collective) > len(COLLECTIVES)

    wrong = {}
    for path, function in itertools.chain.from_iterable(functions.values()):
        names = _called(_clean_up(function)) & collective
        if names and f"{path}: {function.name}" not in PLANNED:
            wrong[f"{path}: {function.name}"] = names
    assert not wrong


def _called(statements):
    """Names of the functions that are called in them, nested functions included."""
    names = set()
    for node in itertools.chain.from_iterable(map(ast.walk, statements)):
        if not isinstance(node, ast.Call):
            continue
        # What is called by an expression, such as the result of a call, has no name.
        function = node.func
        if isinstance(function, ast.Attribute):
            names.add(function.attr)
        elif isinstance(function, ast.Name):
            names.add(function.id)
    return names


# Statements that also run where an error passes by.
def _clean_up(function):
    if function.name in ("__exit__", "__del__"):
        yield from function.body
    for node in ast.walk(function):
        if isinstance(node, ast.Try):
            yield from node.finalbody
            for handler in node.handlers:
                if handler.type is None or "BaseException" in ast.unparse(handler.type):
                    yield from handler.body
