"""Reference pages that are generated: ``docs/library.md`` from signatures, ``docs/options.md`` from commands.

``docs/model-types.md`` is generated from the counts that the tests compare, and the table in ``docs/trust.md`` from the
evidence of plans. ``python docs/reference.py`` (or ``make docs``) writes all; tests check that nothing would change.
"""

from __future__ import annotations

import csv
import importlib
import inspect
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
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
from rooftop.plan import evidence
from rooftop.plan.shapes import require_planned
from rooftop.requests.request import Request
from rooftop.requests.words import GROUPS, MEANINGS

ROOT = Path(__file__).resolve().parent.parent
#: Around the table of errors in docs/trust.md.
_ERRORS, _END = "<!-- written: python docs/reference.py -->", "<!-- end -->"
#: Figures of the table of errors, in its order.
_PHASES = {"train": "step", "decode": "decode step", "prefill": "prefill", "tpot": "TPOT", "ttft": "TTFT"}
#: Most arguments of a signature that the page of the library shows in full.
_FEW = 6
#: Between paragraphs; of a result's docstring the page has the first.
_PARAGRAPH = "\n\n"
#: Members that every result has, described once.
_OF_RESULTS = ("document", "summary", "to_json()", "record")
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
All raise `RooftopError`, naming the argument that is wrong, and some `Infeasible` (the answer is no); both are in
`rooftop.core.errors`.
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

`help(rooftop.plan_training)` has all arguments with types and defaults. Below, arguments that mean the same as an
option of the command line are named only: [options](options.md) has their meaning. This page is written by
`docs/reference.py`.

"""
    known = _meanings()
    shown: dict[str, dict[str, str]] = {}
    for name, function in functions.items():
        if inspect.isclass(function) and issubclass(function, Request):
            if function not in (getattr(taker, "request", None) for taker in functions.values()):
                members = {member.name: member.about for member in function.settings()}
                text += f"## rooftop.{name}\n\n{_docstring(function)[0]}\n\n{_arguments(members, known)}\n\n"
            continue
        about, arguments = _docstring(function)
        text += f"## rooftop.{name}\n\n```python\n{_signature(name, function)}\n```\n\n{about}\n\n"
        same = next((name for name, listed in shown.items() if arguments and listed == arguments), None)
        text += f"Its arguments are those of `rooftop.{same}`.\n\n" if same else f"{_arguments(arguments, known)}\n\n"
        shown[name] = arguments
        if (request := getattr(function, "request", None)) is not None and request.__name__ in names:
            text += f"Its request is `rooftop.{request.__name__}`, with the same fields.\n\n"
    text += "## Results\n\n"
    for module in modules:
        for name, kind in vars(importlib.import_module(module)).items():
            if inspect.isclass(kind) and issubclass(kind, Result) and kind.__module__ == module:
                text += f"### {name}\n\n{_docstring(kind)[0].partition(_PARAGRAPH)[0]}\n\n"
                members = {member: _first_line(value) for member, value in _members(kind) if member not in _OF_RESULTS}
                text += "".join(f"- `{member}`: {line}\n" for member, line in members.items()) + "\n"
    return text.rstrip() + "\n"


def _meanings() -> frozenset[str]:
    """Meanings of options, as docstrings of arguments have them."""
    texts = (*MEANINGS.values(), *(option.help or "" for _, option in every_option()))
    return frozenset(_plain(text) for text in texts)


def _plain(text: str) -> str:
    """A meaning without what differs between an option and the argument of its name."""
    return re.sub(r"\[default:.*\]|[`\s.]|--", "", text).lower()


def _arguments(arguments: Mapping[str, str], known: frozenset[str]) -> str:
    """Arguments as a list: those that are options by their names, the others with their meanings."""
    options_of_verbs = [name for name, about in arguments.items() if _plain(about) in known]
    lines = [
        f"- `{name}`: {about.replace('``', '`')}" for name, about in arguments.items() if name not in options_of_verbs
    ]
    if options_of_verbs:
        lines.append(f"- as on the command line: {', '.join(f'`{name}`' for name in options_of_verbs)}")
    return "\n".join(lines)


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
    """The signature: all arguments where they are few, else those that have no default."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    few = len(parameters) <= _FEW
    words: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        if few or not default or parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            words.append(f"{stars}{parameter.name}: {_annotation(parameter.annotation)}{default}")
    if not few:
        words.append("...")
    return f"rooftop.{name}({', '.join(words)}) -> {_annotation(signature.return_annotation)}"


def _annotation(annotation: object) -> str:
    """An annotation as it is written, without quotes around the whole."""
    return str(annotation).strip("\"'")


def _docstring(value: object) -> tuple[str, dict[str, str]]:
    """The docstring in Markdown without its arguments and errors, and the meanings of the arguments."""
    shown: list[str] = []
    arguments: dict[str, str] = {}
    name = ""
    for line in (inspect.getdoc(value) or "").splitlines():
        if line == "Args:":
            name = line
        elif name and line.startswith("    ") and not line.startswith("     "):
            name, _, about = line.strip().partition(": ")
            arguments[name] = about
        elif name and line.startswith("     "):
            arguments[name] += f" {line.strip()}"
        else:
            name = ""
            shown.append(line.replace("``", "`"))
    paragraphs = re.split(r"\n{2,}", "\n".join(shown).strip())
    return "\n\n".join(text for text in paragraphs if not text.startswith("Raises RooftopError")), arguments


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
program has is never run: its plan says `executable: false` and names the part. The planner refuses a model that is only
counted. `gemma3` is read as `gemma3_text`, `kimi_k2` as `deepseek_v3`, `qwen3_vl_text` and `qwen3_vl_moe_text` as
`qwen3` and `qwen3_moe`; of any other multimodal file the `text_config`, if its type is one of these.

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

A plan of training is of rooftop's own program, or that of a framework that people train with.

```
rooftop plan train llama3-70b --on h100:8x8 --batch-seqs 256 --seq 8192 --framework megatron
rooftop plan train llama3-8b --on v6e:4x4 --batch-seqs 64 --seq 8192 --framework maxtext --set fused_backward=no
```

- The search tries only what the framework can run. rooftop's own program pads sizes that a mesh does not divide; the
  others refuse them, as the tables below say.
- `--release` is a release of the framework, by default the newest below. `--set NAME=VALUE,...` changes a setting; the
  defaults are those of the framework's recipes for the chip's family, release and kind of model.
- Published runs of a framework are planned by the same call as yours ([validate](validate.md)); their errors give the
  interval.
- `--framework all` compares the best plan of each, by the middle of its interval.
- Megatron-Bridge ships benchmarks: balanced routing forced, gradients in bf16, no checks of the loss. A plan says if it
  is priced as one or, with `--set gradients=f32`, as a training recipe, and the name of the recipe that it equals.

## Configurations

```
rooftop plan train llama3-70b --on h100:8x32 --batch-seqs 1024 --seq 8192 --framework megatron --config job
rooftop plan train --framework megatron --from job/train.sh --on h100:8x32
rooftop plan train --framework megatron --from llama3_70b_pretrain_64gpu_h100_bf16_config --on h100:8x8
```

A plan of another framework ends with its configuration: a script with Megatron-LM's arguments, MaxText's YAML, or
torchtitan's TOML, for the version that its first line names. `--config DIR` writes it.

`--from` prices a configuration as it stands, on the slice: a script with Megatron-LM's arguments (its variables and
arrays are put in, nothing is run), a MaxText YAML or its `key=value` command, a torchtitan TOML; or, by its name, what
Megatron-Bridge, MaxText or torchtitan ship. Other options change it: `--from job/train.sh --chunks 4`. The answer names
settings without a price, and those left unused, with their gains.

"""
    text += _shipped()
    text += """
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


def _shipped() -> str:
    """Counts of the configurations that frameworks ship: read, priced, written back, and refused by reason."""
    with (ROOT / "bench" / "results" / "shipped.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    text = """Published configurations (`bench/evidence/shipped.py`). Written back: read again, they give the same plan.

| of | shipped | priced | fit | written back | refused | for |
|---|---|---|---|---|---|---|
"""
    for name, title in (("megatron", "Megatron-Bridge"), ("maxtext", "MaxText"), ("torchtitan", "torchtitan")):
        shipped = [row for row in rows if row["framework"] == name]
        priced = [row for row in shipped if row["step_s"]]
        fit = sum(row["outcome"] == "priced" for row in priced)
        again = sum(row["read_again"] == "yes" for row in priced)
        reasons = Counter(_refusal(row["outcome"]) for row in shipped if not row["step_s"])
        most = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(3))
        cells = (title, len(shipped), len(priced), fit, again, len(shipped) - len(priced), most)
        text += f"| {' | '.join(map(str, cells))} |\n"
    return text


def _refusal(outcome: str) -> str:
    """The kind of a refusal: a setting that has no price, by its key, or the words of it."""
    if "preset" in outcome:
        return "the model"
    field, _, accepted = outcome.partition(": ")
    return (accepted.partition(",")[0] if field == "from" else f"`{field}`") if accepted else outcome.partition(",")[0]


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


def trust_page() -> str:
    """The page on trust, with the table of errors of the published runs that intervals rest on."""
    text = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(_ERRORS)
    return f"{before}{_ERRORS}\n{_errors_table()}\n{_END}{rest.partition(_END)[2]}"


def _errors_table() -> str:
    plans = Path(evidence.__file__)
    runs = [run for name in ("evidence.csv", "engine_evidence.csv") for run in _ratios(plans.with_name(name))]
    as_ours = {run["run"]: run for run in _ratios(plans.with_name("own_evidence.csv")) if run["phase"] == "train"}
    places = sorted({(run["phase"] != "train", run["framework"], run["chip"], run["kind"]) for run in runs})
    text = "| program | chip | model | figure | runs | mean error, % | largest | as rooftop's program |\n"
    text += "|---|---|---|---|---|---|---|---|"
    for is_serving, *place in places:
        phases: dict[str, list[dict[str, str]]] = {}
        for run in runs:
            if [run["framework"], run["chip"], run["kind"]] == place and (run["phase"] != "train") == is_serving:
                phases.setdefault(run["phase"], []).append(run)
        errors = [_errors(members) for _, members in sorted(phases.items())]
        ours = "" if is_serving else f"{fmean(_errors(as_ours[run['run']] for run in phases['train'])):.1f}"
        figures = "; ".join(_PHASES[phase] for phase in sorted(phases))
        text += f"\n| {' | '.join(place)} | {figures} | {'; '.join(f'{len(group)}' for group in errors)} | "
        text += f"{'; '.join(f'{fmean(group):.1f}' for group in errors)} | "
        text += f"{'; '.join(f'{max(group):.0f}' for group in errors)} | {ours} |"
    return text


def _errors(runs: Iterable[Mapping[str, str]]) -> list[float]:
    """Expected over measured times, minus 1, of published runs: in %, without signs."""
    return [abs(100 / float(run["ratio"]) - 100) for run in runs]


def _ratios(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


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
    "trust.md": trust_page,
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
