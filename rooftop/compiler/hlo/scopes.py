"""Scopes of a compiled program: rooftop's own, or the open tree of anybody's program.

An operation of another program has the scope of its name stack: named scopes and module paths. In a program without
any, it has the path of the program's functions that called it. Work of optax outside of all scopes is the optimizer's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rooftop.core.scopes import UNSCOPED, FoldedScopes, folded, is_own, open_place, scope_and_phase

#: Files of installed packages and of Python itself, which are not the user's source lines. Rooftop's programs are not
#: among them: their lines are those of the program.
_LIBRARY = re.compile(
    r"[/\\](?:site|dist)-packages[/\\](?!rooftop[/\\]programs[/\\])"
    r"|[/\\]lib[/\\]python3\.\d+[/\\](?!site-packages|dist-packages)|^<frozen |[/\\]rooftop[/\\]target[/\\]"
)
_PACKAGE = re.compile(r"[/\\](?:site|dist)-packages[/\\](?!rooftop[/\\])([^/\\]+)")
#: The frames below which a function is lowered to be compiled.
_LOWERING = re.compile(r"[/\\]rooftop[/\\](?:compiler|explain|library|target|cli|train|serve|embed)[/\\]")
_OWN_PROGRAMS = re.compile(r"[/\\]rooftop[/\\]programs[/\\]")
_OPTAX = re.compile(r"[/\\](?:site|dist)-packages[/\\]optax[/\\]")
_UPDATES = re.compile(r"\bupdate|apply_updates")


class StackFrame(NamedTuple):
    """A line of a program, and the function that it is in."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """'file:line'."""
        return f"{self.file}:{self.line}"

    @property
    def is_library(self) -> bool:
        """True for a file of an installed package or of Python."""
        return _LIBRARY.search(self.file) is not None

    @property
    def package(self) -> str:
        """The installed package of its file; '' for other files."""
        match = _PACKAGE.search(self.file)
        return match.group(1) if match else ""


#: The frames of an operation, innermost first.
Stack = Sequence[StackFrame]


def source_of(stack: Stack) -> str:
    """'file:line' of the innermost frame outside of libraries.

    If all frames are of libraries, as of ``python -m PACKAGE``, it is the innermost one of the package that is nearest
    to the start of the program.
    """
    own = next((frame for frame in stack if not frame.is_library), None)
    if own is None:
        program = next((frame.package for frame in reversed(stack) if frame.package), "")
        own = next((frame for frame in stack if frame.package == program), None)
    return "" if own is None else own.place


@dataclass(frozen=True, kw_only=True)
class ProgramScopes:
    """Scopes of one program. ``own``: they are rooftop's; else ``tree`` has those of its name stacks.

    ``functions`` are those that all operations have in common; None if the program has named scopes.
    """

    own: bool
    tree: FoldedScopes
    functions: tuple[str, ...] | None
    _places: dict[tuple[str, Stack], tuple[str, str]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def read(cls, op_names: Iterable[str], stacks: Mapping[int, Stack]) -> ProgramScopes:
        """The scopes of a program with these names of operations and stack frames."""
        names = {name for name in op_names if name}
        programs = any(_OWN_PROGRAMS.search(frame.file) for stack in stacks.values() for frame in stack)
        own = programs or is_own(names)
        tree = folded(() if own else (open_place(name)[0] for name in names))
        paths = [] if own or len(tree.names) > 1 else [path for stack in stacks.values() if (path := _functions(stack))]
        common: list[str] = []
        for level in zip(*paths, strict=False):
            if len(set(level)) > 1:
                break
            common.append(level[0])
        return cls(own=own, tree=tree, functions=tuple(common) if paths else None)

    def place(self, op_name: str, stack: Stack) -> tuple[str, str]:
        """Scope and phase of an operation."""
        key = (op_name, ()) if self.own else (op_name, tuple(stack))
        if key not in self._places:
            self._places[key] = self._place(op_name, stack)
        return self._places[key]

    def _place(self, op_name: str, stack: Stack) -> tuple[str, str]:
        if self.own:
            return scope_and_phase(op_name)
        scope, phase = open_place(op_name)
        if scope != UNSCOPED:
            return self.tree.names.get(scope, scope), phase
        if any(_OPTAX.search(frame.file) and _UPDATES.search(frame.function) for frame in stack):
            return "optimizer", "update"
        if self.functions is not None and op_name:
            path = _functions(stack)
            scope = "/".join(path[len(self.functions) :] or path[-1:]) or UNSCOPED
        return scope, phase


def _functions(stack: Stack) -> list[str]:
    """Names of the program's functions, outermost first."""
    names: list[str] = []
    for frame in reversed(stack):
        name = frame.function.rpartition("<locals>.")[2].removesuffix(".__call__")
        if frame.is_library or _LOWERING.search(frame.file) or not name or "<" in name:
            continue
        if not names or names[-1] != name:
            names.append(name)
    return names
