"""Reference pages that are generated: ``docs/library.md`` from signatures, ``docs/options.md`` from commands.

``docs/model-types.md`` is generated from the counts that the tests compare. ``python docs/reference.py`` (or ``make
docs``) writes all; the tests check that nothing would change.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

import rooftop
from rooftop.capabilities import model_obstacle
from rooftop.cli import options
from rooftop.cli.main import cli
from rooftop.cli.options import GroupedOption
from rooftop.core.errors import RooftopError
from rooftop.frameworks import framework
from rooftop.frameworks.programs import PROGRAMS
from rooftop.library.results import Result
from rooftop.models import ModelConfig, count_params, from_huggingface
from rooftop.plan.shapes import require_planned
from rooftop.requests.request import Request
from rooftop.requests.words import GROUPS, MEANINGS

ROOT = Path(__file__).resolve().parent.parent
#: Options of the process that every verb has.
_EVERYWHERE = ("--help",)


def library_page() -> str:
    """The page of the library's functions and results."""
    names = [name for name in rooftop.__all__ if not name.startswith("__")]
    functions = {name: getattr(rooftop, name) for name in names}
    modules = sorted({inspect.unwrap(function).__module__ for function in functions.values()})
    text = """# The library

Every verb of the command line is a function of `rooftop`. Functions take objects or the strings of the command line.
Functions whose verb has options also take one request, `plan_training(PlanTraining("llama3-8b", on="v5e:4x4"))`: a
frozen record with the same fields, which stands in each answer under `request`. `write` and `read` are its JSON; on the
command line `--save-request` writes it, and `--request` reads it from its file or from an answer. Objects of a process,
such as a function or a compiled program, are no JSON: a request with one is answered, and not written.
They raise `RooftopError` (the input is wrong) and `Infeasible` (the answer is no), both of `rooftop.core.errors`.
Results are frozen; all of them have

| member | value |
|---|---|
"""
    for name, member in _members(Result):
        text += f"| `{name}` | {_first_line(member)} |\n"
    text += """| `repr`, notebooks | the summary; in a notebook the rows below it |

```python
import rooftop

plan = rooftop.plan_training("llama3-8b", on="v5e:4x4", batch_seqs=16)
plan  # mesh, step time, MFU and memory
plan.rows  # the ledger, ready for a data frame
plan.to_json()  # plan.json, as `rooftop plan train --json` prints it
rooftop.compile(plan)  # the real XLA:TPU compiler, without a TPU
```

This page is written by `docs/reference.py` from signatures and docstrings.

"""
    for name, function in functions.items():
        if inspect.isclass(function) and issubclass(function, Request):
            text += f"## rooftop.{name}\n\n{_docstring(function)}\n\n"
            takers = [taker for taker, taking in functions.items() if getattr(taking, "request", None) is function]
            members = [f"- `{member.name}`: {member.about}" for member in function.settings()]
            text += f"Its fields are those of `rooftop.{takers[0]}`.\n\n" if takers else "\n".join(members) + "\n\n"
            continue
        text += f"## rooftop.{name}\n\n```python\n{_signature(name, function)}\n```\n\n{_docstring(function)}\n\n"
    text += "## Results\n\n"
    for module in modules:
        for name, kind in vars(importlib.import_module(module)).items():
            if inspect.isclass(kind) and issubclass(kind, Result) and kind.__module__ == module:
                text += f"### {name}\n\n{_docstring(kind)}\n\n"
                members = [f"- `{member}`: {_first_line(value)}" for member, value in _members(kind)]
                text += "\n".join(members) + "\n\n"
    return text.rstrip() + "\n"


def options_page() -> str:
    """The page of the command line's options: one name, one meaning."""
    verbs: dict[str, list[str]] = {}
    first: dict[str, tuple[str, str, str]] = {}
    others: dict[str, str] = {}
    for verb, option in every_option():
        name = long_name(option)
        verbs.setdefault(name, []).append(verb)
        if option.secondary_opts:
            others[name] = f"{name} / {option.secondary_opts[0]}"
        group = option.group if isinstance(option, GroupedOption) and option.group else "Other options"
        first.setdefault(name, (group, metavar(option), option.help or ""))
    shared = shared_help()
    text = """# Options

An option means the same in every verb that has it. Numbers take suffixes (`4M` is 4,000,000, `4Mi` is 4,194,304), a
TIME has its unit (`500ms`, `1.5s`, `10m`), BYTES are `400G`, `32Mi` or `512B`, and a DTYPE is one of bf16, f32, f16,
int8, int4, f8_e4m3 and f8_e5m2 (bfloat16, fp32, half, fp8, e4m3 and the like are understood). A shell completes
presets, chips, slices, dtypes, axes and names once it has run
`eval "$(_ROOFTOP_COMPLETE=bash_source rooftop)"`.

This page is written by `docs/reference.py` from the commands.
"""
    for group in (*GROUPS, "Other options"):
        names = sorted(name for name, (own, _, _) in first.items() if own == group and name not in _EVERYWHERE)
        if names:
            text += f"\n## {group}\n\n| option | meaning | verbs |\n|---|---|---|\n"
        for name in names:
            _, value, help_text = first[name]
            meaning = re.sub(r"\s+", " ", shared.get(name, help_text)).replace("|", "\\|")
            written = f"{others.get(name, name)} {value}".strip().replace("|", "\\|")
            text += f"| `{written}` | {meaning} | {', '.join(verbs[name])} |\n"
    return text


def every_option(group: click.Group = cli, prefix: str = "") -> Iterator[tuple[str, click.Option]]:
    """(verb, option) of every command."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from every_option(command, f"{prefix}{name} ")
        elif command is not None:
            for param in command.params:
                if isinstance(param, click.Option):
                    yield f"{prefix}{name}", param


def shared_help() -> dict[str, str]:
    """The help of each shared option, as the vocabulary has it."""
    texts = {f"--{name.replace('_', '-')}": meaning for name, meaning in MEANINGS.items()}
    for name, factory in vars(options).items():
        if name.endswith("_option") and name != "json_option":
            function = factory()(lambda: None)
            (option,) = function.__click_params__
            texts[long_name(option)] = option.help or ""
    return texts


def long_name(option: click.Option) -> str:
    """The long name of an option."""
    return max(option.opts, key=len)


def metavar(option: click.Option) -> str:
    """The value of an option as the help shows it; '' for a flag."""
    if option.is_flag or option.count:
        return ""
    return option.make_metavar(click.Context(click.Command("rooftop")))


def _members(kind: type) -> Iterator[tuple[str, object]]:
    """Public methods and properties of a class itself, with their docstrings; a method is named with ``()``."""
    for name, value in vars(kind).items():
        if not name.startswith("_") and (callable(value) or (hasattr(value, "__doc__") and _is_property(value))):
            yield (name if _is_property(value) else f"{name}()"), value


def _is_property(value: object) -> bool:
    return isinstance(value, property) or type(value).__name__ == "cached_property"


def _first_line(value: object) -> str:
    return (inspect.getdoc(value) or "").partition("\n")[0].replace("``", "`")


def _signature(name: str, function: Callable[..., object]) -> str:
    signature = inspect.signature(function)
    lines: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(line.startswith("    *") for line in lines):
            lines.append("    *,")
        stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        lines.append(f"    {stars}{parameter.name}: {_annotation(parameter.annotation)}{default},")
    result = _annotation(signature.return_annotation)
    inside = "".join(f"{line}\n" for line in lines)
    return f"rooftop.{name}(\n{inside}) -> {result}" if lines else f"rooftop.{name}() -> {result}"


def _annotation(annotation: object) -> str:
    """An annotation as it is written, without quotes around the whole."""
    return str(annotation).strip("\"'")


def _docstring(value: object) -> str:
    """The docstring in Markdown: arguments as a list."""
    text = inspect.getdoc(value) or ""
    shown: list[str] = []
    arguments = False
    for line in text.splitlines():
        if line == "Args:":
            arguments = True
        elif arguments and line.startswith("    ") and not line.startswith("     "):
            name, _, about = line.strip().partition(": ")
            shown.append(f"- `{name}`: {about}")
        elif arguments and line.startswith("     "):
            shown[-1] += f" {line.strip()}"
        else:
            arguments = False
            shown.append(line.replace("``", "`"))
    return "\n".join(shown)


def types_page() -> str:
    """The page of the model types."""
    oracle = json.loads((ROOT / "tests" / "oracles" / "type_counts.json").read_text(encoding="utf-8"))
    made_with = oracle["made_with"]
    named = json.loads((ROOT / "tests" / "oracles" / "tiny_models.json").read_text(encoding="utf-8"))
    compared = {keys.get("text_config", keys)["model_type"] for keys in named.values()}
    rows, runs, planned = list[str](), 0, 0
    for kind, sizes in sorted(oracle["models"].items()):
        size = "default" if "default" in sizes else "tiny"
        # A tiny model has all parts that the type can have, its default sizes may not.
        model, tiny = (from_huggingface(sizes[name]["config"], kind) for name in (size, "tiny"))
        obstacle = model_obstacle(model) or model_obstacle(tiny)
        programs = "run" if kind in compared else "run, but read no published weights"
        if obstacle is not None:
            parts = obstacle.removeprefix("no program has ").rpartition(": ")[0]
            programs = f"not: {parts}" if model_obstacle(model) else f"{programs}; not with {parts}"
        runs += model_obstacle(model) is None and kind in compared
        is_planned = _is_planned(model) or _is_planned(tiny)
        planned += is_planned
        ours, theirs = count_params(model).total, sizes[size]["total"]
        counts = f"{ours:,} | {'the same' if ours == theirs else f'{theirs:,}'}"
        rows.append(f"| `{kind}` | {size} | {counts} | {'planned' if is_planned else 'counted only'} | {programs} |")
    return f"""# Model types

rooftop reads a config.json as the blocks that a model is made of (`rooftop.models.ModelConfig`): norms and where they
stand, what mixes the tokens of each layer, experts and their router, positions, biases, multipliers. Below are the
`model_type`s whose keys it knows. The parameters that it counts stand next to those of the module that transformers
{made_with["transformers"]} builds from the same keys on PyTorch's meta device (torch {made_with["torch"]},
{made_with["date"]}; `tests/oracles/make_type_counts.py`). Tests compare two models of each type: the sizes that its
configuration class has as defaults, where they describe a model, and a tiny one that turns on what the type can do.

Of {len(rows)} types all are counted, {planned} are planned, and {runs} run in the programs that train and serve, with
logits and gradients equal to those of transformers (`tests/programs/test_families.py`). A model with a part that no
program has is never run: its plan says `executable: false` and names the part, and a program that is asked for it stops
with the same words. The planner refuses a model that is only counted. `gemma3` is read as `gemma3_text`, `kimi_k2`
as `deepseek_v3`, `qwen3_vl_text` and `qwen3_vl_moe_text` as `qwen3` and `qwen3_moe`; of any other multimodal file the
`text_config`, if its type is one of these. Vision and audio are other models.

A key of the file that its type does not have is refused by name, unless it is null, false or zero, or known to change
nothing.

| `model_type` | sizes | parameters | of transformers | plans | programs |
|---|---|---|---|---|---|
{chr(10).join(rows)}

This page is written by `docs/reference.py`.
"""


def _is_planned(model: ModelConfig) -> bool:
    try:
        require_planned(model)
    except RooftopError:
        return False
    return True


def frameworks_page() -> str:
    """The page of the frameworks: what each can run, and its settings with their defaults."""
    text = """# Frameworks

A plan of training is of a program: rooftop's own by default, or that of a framework that people train with.

```
rooftop plan train llama3-70b --on h100:8x8 --batch-seqs 256 --seq 8192 --framework megatron
rooftop plan train llama3-8b --on v6e:4x4 --batch-seqs 64 --seq 8192 --framework maxtext --set fused_backward=no
```

- The search tries only what the framework can run. rooftop's own program pads sizes that a mesh does not divide; the
  others refuse them, as the tables below say.
- `--release` is a release of the framework, by default the newest below. `--set NAME=VALUE,...` changes a setting; the
  defaults are those of the framework's recipes for the chip's family, release and kind of model. A setting that the
  release, chip, model or matmul dtype does not have is refused.
- Published runs of a framework are planned by the same call as yours ([validate](validate.md)); their errors give the
  interval. rooftop's own program has no published runs: its interval is from runs of other frameworks, priced as if
  rooftop's program had made them.
- `rooftop compile`, `train` and `tune` take plans of rooftop's own program only.
- Published runs are benchmarks: they force balanced routing, reduce gradients in 16 bits and do not check for NaN. A
  training run that does otherwise is slower than its plan.

The files are in `rooftop/frameworks/data`; each rule names its source. This page is written by `docs/reference.py`.

"""
    families = tomllib.loads((Path(framework.__file__).with_name("data") / "families.toml").read_text(encoding="utf-8"))
    text += (
        "Families of chips: " + "; ".join(f"{name}: {', '.join(chips)}" for name, chips in families.items()) + ".\n\n"
    )
    for name in framework.FRAMEWORKS[1:]:
        data = framework.framework_data(name)
        text += f"## {name}\n\n{data['about']}. Runs on {' and '.join(map(str.upper, data['chips']))}s. "
        text += f"Releases: {', '.join(data['releases'])}. A search has the axes {', '.join(data['axes'])}.\n\n"
        text += "| property | accepted |\n|---|---|\n"
        text += "".join(f"| {item.name} | {item.accepted} |\n" for item in PROGRAMS[name])
        text += "\n| setting | meaning | values | default |\n|---|---|---|---|\n"
        for key, facts in data["setting"].items():
            defaults = _defaults(data, key)
            about = "; ".join((facts["about"], *_needed(facts)))
            text += f"| `{key}` | {about} | {framework.accepted_values(facts)} | {defaults} |\n"
        text += "\n"
    return text + _engines()


def _engines() -> str:
    """The engines that a plan of serving may be of, and their settings with their defaults."""
    text = """# Engines

A plan of serving is of `rooftop serve` by default, or of an engine on GPUs
([plan serve](plan-serve.md#engines)): `rooftop plan serve --engine vllm --release 0.19.0 --set memory=0.8`.

"""
    for name in framework.ENGINES[1:]:
        data = framework.framework_data(name)
        releases = f" Releases: {', '.join(data['releases'])}." if data["releases"] else ""
        text += f"## {name}\n\n{data['about']}. Runs on {' and '.join(map(str.upper, data['chips']))}s.{releases}\n\n"
        text += "| setting | meaning | values | default |\n|---|---|---|---|\n"
        for key, facts in data["setting"].items():
            text += f"| `{key}` | {facts['about']} | {framework.accepted_values(facts)} | {_defaults(data, key)} |\n"
        text += "\n"
    return text


def _needed(facts: Mapping[str, Any]) -> Iterator[str]:
    """The jobs that have a setting, or some of its values, where not all do."""
    needs = {"models": "with {}", "from": "from {}", "dtypes": "with {} matmuls", "chips": "on {}"}
    if words := [text.format(_listed(facts[key])) for key, text in needs.items() if key in facts]:
        yield " ".join(words)
    for value, only in facts.get("only", {}).items():
        yield f"{value} on {_listed(only['chips'])}"


def _listed(names: str | list[str]) -> str:
    return names if isinstance(names, str) else ", ".join(names)


def _defaults(data: Mapping[str, Any], key: str) -> str:
    """Defaults of a setting, the last rule first: it wins."""
    words = []
    for rule in reversed(data["rule"]):
        if key in rule.get("settings", {}):
            about = [
                *rule.get("chips", ()), *([f"from {rule['from']}"] if "from" in rule else rule.get("releases", ())),
                *([rule["models"]] if "models" in rule else ()), *rule.get("dtypes", ()),
            ]  # fmt: skip
            words.append(f"`{rule['settings'][key]}`" + (f" ({', '.join(about)})" if about else ""))
    return "; ".join(words)


PAGES = {
    "frameworks.md": frameworks_page,
    "library.md": library_page,
    "model-types.md": types_page,
    "options.md": options_page,
}


def main() -> None:
    """Write the pages that have changed."""
    for name, page in PAGES.items():
        path = ROOT / "docs" / name
        text = page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"rewritten: docs/{name}")


if __name__ == "__main__":
    main()
