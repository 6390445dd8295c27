"""English that a program can check: how docstrings begin, names that say nothing, sizes of folders."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rooftop"
#: A docstring begins with a noun phrase or an imperative verb.
BEGINNINGS = {"What", "Whether", "How"}
#: Participles that do not say what a variable holds.
EMPTY_NAMES = {"found", "given", "told", "held", "each", "made", "kept", "wanted"}
#: ``given`` is a field of RooftopError: the value that is not accepted.
ALLOWED = {("rooftop/core/errors.py", "given")}
#: Words that are no nouns, or say nothing of what they hold; in the rooms that have none left.
VAGUE_NAMES = {"own", "one", "how", "where"}
VAGUE_MEMBERS = {
    "_told",
    "_said",
    "_greeted",
    "_taken",
    "_held",
    "_given",
    "_made",
    "_kept",
    "_wanted",
    "_fits",
    "_how",
}
PLAIN_ROOMS = ("cli", "core", "embed", "library", "profile", "requests", "serve", "ui")
#: ``shutdown`` has the signature of a socket's.
PLAIN_ALLOWED = {("rooftop/serve/hosts/encryption.py", "how")}
MOST_MODULES = 15
#: Parameters and lines of a function; what takes more takes a record, or is two functions.
MOST_PARAMETERS, MOST_LINES = 12, 80
#: A kernel is one body over its references, and a table of replacements one list.
LONG = {("rooftop/programs/serving/row_kernel.py", "_kernel"), ("rooftop/target/session.py", "_replacements")}
Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).glob("*.py"))


def folders() -> list[str]:
    """Folders of the package, of tests, benchmarks and docs that have modules, from the root of the repository."""
    files = (path for top in ("rooftop", "tests", "bench", "docs") for path in (ROOT / top).rglob("*.py"))
    return sorted({str(path.parent.relative_to(ROOT)) for path in files})


def packages() -> list[str]:
    return sorted(str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py"))


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def docstrings(path: Path) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, Definition) and (docstring := ast.get_docstring(node)):
            yield node, docstring


def local_names(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Variables and parameters; fields of classes are not local."""
    classes = [node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
    fields = {field.target for one in classes for field in one.body if isinstance(field, ast.AnnAssign)}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields:
            yield node, node.id
        elif isinstance(node, ast.arg):
            yield node, node.arg


@pytest.mark.parametrize("folder", folders())
def test_docstrings_begin_with_a_noun_or_a_verb(folder: str) -> None:
    wrong = [
        f"{place(path, node)}: {docstring.splitlines()[0]}"
        for path in sorted((ROOT / folder).glob("*.py"))
        for node, docstring in docstrings(path)
        if docstring.split()[0] in BEGINNINGS
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", folders())
def test_local_names_say_what_they_hold(folder: str) -> None:
    paths = sorted((ROOT / folder).glob("*.py"))
    names = [(place(path, node), name) for path in paths for node, name in local_names(path)]
    wrong = [
        f"{where}: {name}"
        for where, name in names
        if name in EMPTY_NAMES and (where.partition(":")[0], name) not in ALLOWED
    ]
    assert wrong == []


@pytest.mark.parametrize("room", PLAIN_ROOMS)
def test_names_of_a_plain_room_are_nouns(room: str) -> None:
    """Locals, parameters, private members and aliases of imports."""
    wrong = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        names = [(place(path, node), name) for node, name in local_names(path) if name in VAGUE_NAMES]
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in VAGUE_MEMBERS:
                names.append((place(path, node), node.name))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in VAGUE_MEMBERS:
                names.append((place(path, node), node.attr))
            elif isinstance(node, ast.alias) and (node.asname or "").lower() in EMPTY_NAMES:
                names.append((place(path, node), str(node.asname)))
        wrong += [f"{at}: {name}" for at, name in names if (at.partition(":")[0], name) not in PLAIN_ALLOWED]
    assert wrong == []


def test_functions_take_few_parameters_and_are_short() -> None:
    long = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(argument.arg not in ("self", "cls") for argument in taken)
                if count > MOST_PARAMETERS or (node.end_lineno or 0) - node.lineno + 1 > MOST_LINES:
                    long.add((str(path.relative_to(ROOT)), node.name))
    assert long == LONG


@pytest.mark.parametrize("folder", packages())
def test_packages_say_what_lives_in_them(folder: str) -> None:
    docstring = ast.get_docstring(tree(PACKAGE / folder / "__init__.py")) or ""
    assert docstring.partition("\n\n")[0].endswith(".")


def test_class_names_are_unique() -> None:
    nodes = [node for folder in packages() for path in modules(folder) for node in tree(path).body]
    times = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert {name for name in times if times[name] > 1} == set()


def test_folders_are_small() -> None:
    sizes = {folder: len(modules(folder)) - 1 for folder in packages()}
    assert {folder for folder in sizes if sizes[folder] > MOST_MODULES} == set()


#: Turns of phrase that readers tripped over, and what to write.
RIDDLES = {
    "devices that are here": "local devices",
    "on the devices here": "on local devices",
    "slice that is not there": "a slice you do not have",
    "waits, and no performance": "waits are real, speeds are not",
    "of slices always busy": "at full load",
    "if all overlapped, bound": "if everything overlaps (MXU-bound)",
    "though its T": "a column",
    ' of ours"': "the listed strategies",
}


def test_riddles_do_not_come_back() -> None:
    """In the package, the page, the docs and the README; ``CHANGELOG.md`` says what was."""
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts += [path for suffix in ("py", "js", "html", "toml") for path in PACKAGE.rglob(f"*.{suffix}")]
    wrong = [
        f"{path.relative_to(ROOT)}: {phrase!r}; better: {better}"
        for path in texts
        for phrase, better in RIDDLES.items()
        if phrase in path.read_text(encoding="utf-8")
    ]
    assert len(texts) > 400 and wrong == []
