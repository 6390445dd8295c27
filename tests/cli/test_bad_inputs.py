"""Hundreds of wrong command lines: each is one line on stderr that names the field, or an answer of no."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import rooftop
from tests.support.command_lines import Outcome, run_lines

ROOT = Path(__file__).parents[2]
#: Seconds that one of them may take.
LIMIT_S = 60


@dataclass(frozen=True, kw_only=True)
class BadInput:
    """A command line, its exit status, and how its line begins."""

    status: int
    command: str
    line: str

    @property
    def words(self) -> list[str]:
        """The arguments; a control character is written as an escape."""
        return [word.replace(r"\0", "\0") for word in shlex.split(self.command)]


def _read() -> tuple[list[BadInput], list[BadInput]]:
    """The command lines of bad_inputs.txt: those that are refused at once, and the slow ones."""
    quick, _, slow = Path(__file__).with_name("bad_inputs.txt").read_text(encoding="utf-8").partition("# slow\n")
    parts = []
    for text in (quick, slow):
        entries = (line.split(" | ") for line in text.splitlines() if line and not line.startswith("#"))
        parts.append([BadInput(status=int(status), command=command, line=line) for status, command, line in entries])
    return parts[0], parts[1]


QUICK, SLOW = _read()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans, damaged and whole, configurations of models, traces and data, and an empty folder."""
    here = tmp_path_factory.mktemp("bad")
    tables = (ROOT / "docs" / "tables.toml").read_text(encoding="utf-8")
    train = rooftop.plan_training("llama3-8b", on="v5e:4x4", batch_seqs=16).to_json()
    serve = rooftop.plan_serving("llama3-8b", on="v5e:4x4", prompt=512, generate=128).to_json()
    (here / "tables.toml").write_text(tables)
    embed = rooftop.plan_embedding(here / "tables.toml", on="v5p:2x2x1", batch_samples=1024).to_json()
    llama = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "vocab_size": 160, "num_key_value_heads": 2,
    }  # fmt: skip
    pods = rooftop.plan_serving("llama3-8b", on="v5p:8x8x8@4", prompt=512, generate=128).to_json()
    objects: dict[str, Mapping[str, object]] = {
        "pods.json": pods, "toomany.json": _with_slices(train, 100_000),
        "train.json": train, "serve.json": serve, "embed.json": embed, "slicetext.json": train | {"slice": "v5e:4x4"},
        "schema.json": train | {"schema": 999}, "kind.json": train | {"kind": "cake"},
        "hole.json": {key: value for key, value in train.items() if key != "ledger"},
        "badtype.json": llama | {"model_type": "bert"}, "negative.json": llama | {"hidden_size": -64},
        "zeroheads.json": llama | {"num_attention_heads": 0}, "unknownkey.json": llama | {"mystery": 3},
        "hugeconfig.json": llama | {"hidden_size": 10**30},
    }  # fmt: skip
    texts = {
        "trunc.json": json.dumps(train)[:500], "deep.json": "[" * 100_000, "list.json": "[1, 2]", "empty.json": "",
        "text.json": '"text"', "nan.json": '{"kind": NaN}', "bad.toml": "[[tables\nx", "bad.csv": "a,b\n1,2\n",
        "bad.jsonl": '{"arrival_s": 0}\nnot json\n', "empty.txt": "", "data.txt": "some text to train on\n" * 50,
        "good.jsonl": '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 6}\n' * 3, "bad.jinja": "{% if x %}",
        "garbage.hlo": "HloModule nonsense\n\nENTRY { oops",
    }  # fmt: skip
    for name, content in objects.items():
        (here / name).write_text(json.dumps(content))
    for name, text in texts.items():
        (here / name).write_text(text)
    for name in ("binary.json", "garbage.xplane.pb"):
        (here / name).write_bytes(bytes(range(256)) * 4)
    (here / "latin.json").write_bytes('{"a": "é"}'.encode("latin-1"))
    (here / "folder").mkdir()
    (here / "loop.json").symlink_to("loop.json")
    (here / "dangling.json").symlink_to("nowhere.json")
    return here


def _with_slices(plan: Mapping[str, object], slices: int) -> dict[str, object]:
    """The plan's JSON, with its slice said to be of so many slices."""
    where = plan["slice"]
    assert isinstance(where, dict)
    return {**plan, "slice": where | {"name": f"v5e:16x16@{slices}"}}


def _wrong(outcome: Outcome, of: BadInput, here: Path) -> str:
    """The fault of an outcome; empty if there is none."""
    line = of.line.replace("{here}", str(here))
    if outcome.status != of.status:
        return f"status {outcome.status}, not {of.status}: {outcome.err[-300:] or outcome.out[-300:]}"
    if of.status == 2:
        if outcome.out:
            return f"output: {outcome.out[:300]}"
        if not (outcome.err.startswith(f"rooftop: {line}; accepted: ") and outcome.err.count("\n") == 1):
            return outcome.err[:300]
    else:
        first = (outcome.out or outcome.err).removeprefix("rooftop: ")
        if not first.startswith(line) or outcome.err.count("\n") > 1:
            return first[:300]
    return "a traceback" if "Traceback" in outcome.err else ""


def _check(inputs: list[BadInput], here: Path, *, light: bool) -> None:
    outcomes = list(run_lines([one.words for one in inputs], here, seconds=LIMIT_S, apart=not light))
    assert len(outcomes) == len(inputs)
    failures = [
        f"{one.command}: {problem}"
        for one, outcome in zip(inputs, outcomes, strict=True)
        if (problem := _wrong(outcome, one, here) or ("it imported JAX" if light and outcome.jax else ""))
    ]
    assert not failures, "\n".join(failures)


def test_the_list_is_long_and_covers_every_verb() -> None:
    from rooftop.cli.main import VERBS as verbs

    assert len(QUICK) + len(SLOW) >= 300
    assert not set(verbs) - {one.words[0] for one in QUICK}
    assert len({one.command for one in QUICK + SLOW}) == len(QUICK) + len(SLOW)


def test_a_wrong_command_line_is_one_line_before_jax_is_imported(folder: Path) -> None:
    _check(QUICK, folder, light=True)


#: Verbs that plan, compile or simulate, and how each is asked for 51,200,000 chips.
_TOO_MANY = {
    "chips v5p:8x8x8@100000": "slice",
    "support llama3-8b --on v5p:8x8x8@100000": "slice",
    "plan train llama3-8b --on v5p:8x8x8@100000 --batch-seqs 100000000": "slice",
    "plan train llama3-8b --on v5p,v6e:16x16@200000 --batch-seqs 100000000": "slice",
    "plan train llama3-8b --on h100:8x6400000 --batch-seqs 100000000": "slice",
    "plan train llama3-8b --on v5p --tokens 15T --chips 51200000": "chips",
    "plan serve llama3-8b --on v5p:8x8x8@100000": "slice",
    "plan serve llama3-8b --on v5e:4x4 --prefill-on v5p:8x8x8@100000": "slice",
    "plan embed tables.toml --on v5p:8x8x8@100000": "slice",
    'matmul "A[I_X, J] * B[J, K]" --mesh X=4 --dims I=8,J=8,K=8 --on v5p:8x8x8@100000': "slice",
    "simulate pods.json --requests-per-second 1 --replicas 10000": "replicas",
    'compile os:getpid --args "bf16[8]" --on v5p:8x8x8@100000': "slice",
    "compile toomany.json": "slice",
    "tune toomany.json": "slice",
}


def test_every_verb_refuses_more_chips_than_were_ever_built(folder: Path) -> None:
    commands = list(_TOO_MANY)
    outcomes = run_lines([shlex.split(command) for command in commands], folder, seconds=LIMIT_S)
    for command, outcome in zip(commands, outcomes, strict=True):
        assert (outcome.status, outcome.out) == (2, ""), command
        assert outcome.err.startswith(f"rooftop: {_TOO_MANY[command]}: got "), outcome.err
        assert "at most 10,000,000" in outcome.err, outcome.err


@pytest.mark.slow
def test_what_only_jax_or_a_search_can_refuse_is_one_line_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    _check(SLOW, folder, light=False)


def test_the_check_sees_what_is_wrong(tmp_path: Path) -> None:
    """A right command line, one that names another field, and a traceback."""
    inputs = [
        BadInput(status=2, command="chips --json", line="chip: got 'json'"),
        BadInput(status=2, command="chips v5q", line="slice: got 'v5q'"),
    ]
    outcomes = list(run_lines([one.words for one in inputs], tmp_path, seconds=LIMIT_S))
    assert all(_wrong(outcome, one, tmp_path) for one, outcome in zip(inputs, outcomes, strict=True))
    failed = Outcome(status=2, out="", err="Traceback (most recent call last):\n", jax=False)
    assert _wrong(failed, inputs[0], tmp_path)
