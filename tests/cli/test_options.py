"""The vocabulary of options: one name has one meaning, values are checked at once, and shells complete them."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import click
import pytest

from rooftop.arrays.mesh import AXES
from rooftop.cli import options
from rooftop.cli.main import cli
from rooftop.cli.options import GroupedOption, OptionType, VerbCommand
from rooftop.core.errors import RooftopError
from rooftop.core.quantities import DTYPE_BYTES
from rooftop.frameworks.framework import FRAMEWORKS
from rooftop.hardware import catalogue
from rooftop.models import presets
from rooftop.models.optimizers import OPTIMIZERS
from rooftop.requests import kinds, words
from rooftop.scheduling.pipeline import SCHEDULES
from rooftop.scheduling.serving.scheduler import BATCHING


def _commands(group: click.Group = cli, prefix: str = "rooftop") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


COMMANDS = dict(_commands())


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_groups_and_examples(path: str) -> None:
    command = COMMANDS[path]
    assert isinstance(command, VerbCommand)
    assert command.examples


def _declared(command: click.Command) -> dict[str, Any]:
    """Types of the parameters of a verb's function, by name."""
    assert command.callback is not None
    kind = vars(command.callback).get("request_kind")
    hints = get_type_hints(command.callback, localns={command.callback.__annotations__.get("request", ""): kind})
    for name, hint in list(hints.items()):
        if get_origin(hint) is Unpack:
            del hints[name]
            hints |= get_type_hints(get_args(hint)[0])
    # The fields of a request are declared once, as its own.
    if kind is not None:
        del hints["request"]
        hints |= {setting.name: None for setting in kind.settings()} | {"request_file": None, "save_request": None}
    return hints


def _given(param: click.Parameter) -> Any:
    """Type of the values that click passes for a parameter."""
    match param.type:
        case OptionType(kind=kinds.Parsed() as kind):
            value = get_type_hints(kind.parse)["return"]
        case OptionType(kind=kinds.Dtype(several=True)):
            value = tuple[str, ...]
        case click.Path():
            value = Path
        case click.Tuple():
            value = tuple[(Path,) * param.nargs]
        case click.types.IntParamType():
            value = int
        case click.types.FloatParamType():
            value = float
        case click.types.BoolParamType():
            value = bool
        case _:
            value = str
    if param.multiple or param.nargs == -1:
        return dict[str, float] if param.name == "figures" else tuple[value, ...]
    # A flag that leaves the answer to the verb where neither of its names is typed has no default.
    return value if param.required or param.to_info_dict()["default"] is not None else value | None


# The verb of training reads its parameters by name and origin.
@pytest.mark.parametrize("path", sorted(COMMANDS.keys() - {"rooftop train"}))
def test_a_verb_declares_the_types_that_its_options_have(path: str) -> None:
    declared = _declared(COMMANDS[path])
    del declared["return"]
    passed = {param.name: _given(param) for param in COMMANDS[path].params}
    assert declared.keys() == passed.keys()
    assert {name: passed[name] if hint is None else hint for name, hint in declared.items()} == passed


def test_an_option_has_one_kind_of_value_in_every_verb() -> None:
    values: dict[str, set[str]] = defaultdict(set)
    for command in COMMANDS.values():
        for param in command.params:
            if isinstance(param, click.Option):
                # A verb may accept fewer of an option's names.
                names = isinstance(param.type, OptionType) and isinstance(param.type.kind, kinds.Name)
                value = "flag" if param.is_flag else "name" if names else param.make_metavar(click.Context(command))
                values[max(param.opts, key=len)].add(value)
    several = {name: kinds for name, kinds in values.items() if len(kinds) > 1}
    # Requests name the model as the server does, a text that is trained on is no length, and an expression is one
    # program to compile, where a search has many.
    assert several == {"--model": {"MODEL", "NAME"}, "--prompt": {"N", "TEXT"}, "--compile": {"N", "flag"}}


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_has_a_group_and_a_sentence(path: str) -> None:
    for param in COMMANDS[path].params:
        if isinstance(param, click.Option):
            assert isinstance(param, GroupedOption)
            assert param.group in words.GROUPS
            assert param.help
            assert "\b" not in param.help


@pytest.mark.parametrize("path", COMMANDS)
def test_help_shows_groups_and_ends_with_examples(rooftop: Callable[..., Any], path: str) -> None:
    text = rooftop(*path.split()[1:], "--help").out
    assert "\\b" not in text
    assert "\nOutput:\n" in text
    command = COMMANDS[path]
    assert isinstance(command, VerbCommand)
    heading = "Examples:" if len(command.examples) > 1 else "Example:"
    shown = [f"  {line}" for example in command.examples for line in example.splitlines()]
    assert text.endswith("\n".join([heading, *shown, ""]))
    assert all(example.startswith(path) for example in command.examples)


def test_names_are_those_of_the_modules_that_read_them() -> None:
    assert set(words.SCHEDULES) == set(SCHEDULES)
    assert words.FRAMEWORKS == FRAMEWORKS
    assert set(words.OPTIMIZERS) == set(OPTIMIZERS)
    assert set(words.BATCHINGS) <= set(BATCHING)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("plan", "train", "llama3-8b", "--on", "v5q:4x4"), "chip: got 'v5q'; accepted: did you mean"),
        (("plan", "train", "llama3-8b", "--on", "v5e:3x5"), "slice: got 'v5e:3x5'"),
        (("plan", "train", "llama3-8b", "--schedule", "1f2b"), "schedule: got '1f2b'; accepted: did you mean 1f1b"),
        (("plan", "train", "llama3-8b", "--weights-dtype", "int3"), "weights-dtype: got 'int3'; accepted: did you"),
        (("plan", "train", "llama3-8b", "--tokens", "1e30"), "tokens: got '1e30'; accepted: at most 1e+15"),
        (
            ("plan", "train", "llama3-8b", "--on", "v5e:4x4", "--batch-seqs", "16", "--price", "1e300"),
            "price: got '1e300'; accepted: at most 1e+06",
        ),
        (("simulate", "plan.json", "--duration", "1e300s"), "duration: got '1e300s'; accepted: at most 1e+09s"),
        (
            ("plan", "serve", "--requests-per-second", "1e30"),
            "requests-per-second: got '1e30'; accepted: at most 1e+18",
        ),
        (("model", "llama3-8b", "--seq", "1e30"), "seq: got '1e30'; accepted: at most 1e+15"),
        # The spelling that was typed, not the canonical one; a small model has a way on.
        (
            ("plan", "train", "llama3-8b", "--on", "v5e:4x4", "--batch-seqs", "16", "--matmul-dtype=FP8"),
            "matmul dtype on v5e: got 'FP8'",
        ),
        (
            ("plan", "serve", "llama3-8b", "--on", "v5e:4x4", "--matmul-dtype", "f8_e4m3"),
            "matmul-dtype on v5e: got 'f8_e4m3'",
        ),
        (
            ("model", "llama:8B"),
            "model: got 'llama:8B'; accepted: llama:N with N from 918,144 to 1e9 parameters; larger",
        ),
        (("matmul", "A[I, J]", "--mesh", "X=1", "--level", "best"), "level: got 'best'; accepted: one of book"),
        (("matmul", "A[I, J]", "--mesh", "X=1", "--top", "few"), "top: got 'few'; accepted: a positive number"),
        (("matmul", "A[I, J]", "--mesh", "X=1", "--dims", "I=1e30,J=2"), "dim I: got '1e30'; accepted: at most 1e+15"),
        (("compile", "plan.json", "--timeout", "500"), "timeout: got '500'; accepted: a time with its unit: 500ms"),
        (("matmul", "A[I]", "--mesh", "X=1", "--figure", "hop_s"), "figure: got 'hop_s'; accepted: NAME=VALUE"),
    ],
)
def test_a_wrong_value_is_one_line(rooftop: Callable[..., Any], arguments: tuple[str, ...], line: str) -> None:
    answer = rooftop(*arguments)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith(f"rooftop: {line}")
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize(
    "verb", [("plan", "train", "llama3-8b", "--seq", "x"), ("compile", "p.json", "--timeout", "x")]
)
def test_values_are_checked_before_anything_heavy_is_imported(verb: tuple[str, ...]) -> None:
    code = (
        "import sys; from rooftop.cli.main import main\n"
        f"try: main({list(verb)!r})\n"
        "except SystemExit: print([name for name in ('numpy', 'jax', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def _completions(param_type: click.ParamType, incomplete: str) -> list[str]:
    command = click.Command("rooftop")
    items = param_type.shell_complete(click.Context(command), click.Option(["--value"]), incomplete)
    return [item.value for item in items]


@pytest.mark.parametrize(
    ("param_type", "incomplete", "offered"),
    [
        (options.DTYPE, "f8", ["f8_e4m3", "f8_e5m2"]),
        (options.DTYPES, "int8,bf", ["int8,bf16"]),
        (options.Name("gpipe", "1f1b"), "g", ["gpipe"]),
        (options.HARDWARE_NAME, "v5", ["v5e", "v5p"]),
        (options.HARDWARE_NAME, "v5e,tpu", ["v5e,tpu7x"]),
        (options.AXES, "fsdp=4,t", ["fsdp=4,tensor="]),
        (options.MODEL, "llama3-7", ["llama3-70b"]),
        (options.MODEL, "llama:", ["llama:2M"]),
        (options.COUNT, "4", []),
    ],
)
def test_a_shell_completes_values(param_type: click.ParamType, incomplete: str, offered: list[str]) -> None:
    assert _completions(param_type, incomplete) == offered


def test_a_shell_completes_all_that_there_is() -> None:
    assert _completions(options.DTYPE, "") == list(DTYPE_BYTES)
    assert _completions(options.AXES, "") == [f"{axis}=" for axis in AXES]
    assert _completions(options.HARDWARE_NAME, "") == list(catalogue())
    assert set(presets()) <= set(_completions(options.MODEL, ""))
    shapes = _completions(options.HARDWARE_NAME, "v5e:")
    assert "v5e:4x4" in shapes
    assert all(shape.startswith("v5e:") for shape in shapes)


def test_a_path_is_completed_by_the_shell() -> None:
    (item,) = options.MODEL.shell_complete(click.Context(click.Command("rooftop")), click.Option(["--v"]), "./mod")
    assert (item.type, item.value) == ("file", "./mod")


def test_several_dtypes_become_a_tuple() -> None:
    assert options.DTYPES.convert("INT8,bfloat16", None, None) == ("int8", "bf16")
    with pytest.raises(RooftopError, match=r"^value: got 'int7'; accepted: did you mean"):
        options.DTYPES.convert("int8,int7", None, None)
