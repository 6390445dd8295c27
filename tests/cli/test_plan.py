"""``rooftop plan train`` as people type it: the answer, the file it writes, and what is refused in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from rooftop.cli import output
from rooftop.core.records import schema
from rooftop.plan.training.answer import TrainingAnswerDocument

Run = Callable[..., Any]
JOB = ("plan", "train", "llama3-8b", "--on", "v5p:4x4x4", "--batch-tokens", "1Mi", "--seq", "4096", "--tokens", "1T")


def test_json_is_one_object_that_follows_the_schema(rooftop: Run) -> None:
    answer = rooftop(*JOB, "--json")
    assert (answer.status, answer.err) == (0, "")
    jsonschema.validate(answer.json, schema(TrainingAnswerDocument))
    assert answer.json["model"]["params"] == 8_030_261_248
    where = {"name": "v5p:4x4x4", "chips": 64, "devices": 64, "calibrated": None}
    price = {"price_usd_per_hour": 4.2, "price_source": "Scaling Book, ch. 8 (Google Cloud), 2025-02"}
    assert answer.json["slice"] == where | price
    assert answer.json["workload"] == {"batch_tokens": 2**20, "seq_len": 4096, "tokens": 1e12, "asked_tokens": None}
    hours = answer.json["days"] * 24
    assert answer.json["cost_usd"] == pytest.approx(hours * 64 * 4.2)


def test_tables_say_the_answer_first(rooftop: Run) -> None:
    answer = rooftop(*JOB)
    assert answer.status == 0
    lines = [line for line in answer.out.splitlines() if line.strip()]
    assert lines[0].startswith("llama3-8b on v5p:4x4x4: ")
    for part in ("MFU", "Where the step goes", "layers/mlp/up", "Why", "FSDP alone would need", "Alternatives"):
        assert part in answer.out


@pytest.mark.parametrize(("model", "seq"), [("llama:2M", 2048), ("llama3.2-1b", 4096)])
def test_sequences_are_no_longer_than_the_model_is_made_for(rooftop: Run, model: str, seq: int) -> None:
    data = rooftop("plan", "train", model, "--on", "v5e:2x2", "--batch-seqs", "8", "--json").json
    assert data["workload"]["seq_len"] == seq


def test_given_mesh_and_remat_are_kept(rooftop: Run) -> None:
    data = rooftop(*JOB, "--mesh", "fsdp=16,tensor=4", "--remat", "block", "--optimizer", "lion", "--json").json
    assert {name: size for name, size in data["mesh"]["axes"].items() if size > 1} == {"fsdp": 16, "tensor": 4}
    assert (data["remat"]["name"], data["optimizer"]) == ("block", "lion")
    assert data["memory"]["optimizer"] == pytest.approx(4 * 8.03e9 / 64, rel=1e-3)


@pytest.mark.parametrize("schedule", ["eager_1f1b", "gpipe", "1f1b", "zero_bubble"])
def test_a_pipeline_is_run_against_a_clock(rooftop: Run, schedule: str) -> None:
    how = ("--mesh", "fsdp=16,stage=4", "--microbatches", "8", "--schedule", schedule, "--remat", "none")
    data = rooftop(*JOB, *how, "--json").json
    jsonschema.validate(data, schema(TrainingAnswerDocument))
    pipeline = data["pipeline"]
    assert pipeline["bubble"] == pytest.approx(pipeline["bubble_closed_form"], abs=0.01)
    in_flight = {"gpipe": 8, "eager_1f1b": 7}.get(schedule, 4)
    assert pipeline["in_flight"] == pipeline["in_flight_closed_form"] == in_flight
    # The ledger's last row is the idle time: with the other rows of the passes it is what lockstep takes.
    passes = sum(row["count"] * row["expected_s"] for row in data["ledger"] if row["phase"] != "update")
    assert passes == pytest.approx(pipeline["lockstep_s"])
    # At their own pace stages are priced as if each had the embedding and the loss. Their sends are those of lockstep.
    tasks_s = pipeline["lockstep_s"] - sum(
        row["count"] * row["expected_s"] for row in data["ledger"] if row["scope"] == "pipeline" and row["count"] > 1
    )
    if schedule == "1f1b":
        assert tasks_s > pipeline["passes_s"]
    else:
        assert 0.9 * pipeline["passes_s"] < tasks_s < pipeline["passes_s"]
    assert f"{schedule} simulated" in rooftop(*JOB, *how).out


def test_plan_file_is_what_json_prints(rooftop: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    printed = rooftop(*JOB, "-o", str(file), "--json").json
    assert json.loads(file.read_text()) == printed


def test_a_plan_that_cannot_be_written_leaves_what_was_there(rooftop: Run, tmp_path: Path) -> None:
    answer = rooftop(*JOB, "-o", str(tmp_path / "nowhere" / "plan.json"))
    assert answer.status == 2
    assert "output file" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_a_config_file_is_a_model(rooftop: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 8192,
        "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
    }))  # fmt: skip
    args = list(JOB)
    args[2] = str(file)
    assert rooftop(*args, "--json").json["model"]["config"]["d_model"] == 2048


def test_nothing_fits_is_status_one_and_one_line(rooftop: Run) -> None:
    answer = rooftop("plan", "train", "llama3-405b", "--on", "v5e:4x4", "--batch-tokens", "1Mi", "--json")
    assert answer.status == 1
    assert answer.json["memory"]["fits"] is False
    (line,) = answer.err.strip().splitlines()
    assert "does not fit v5e:4x4" in line
    assert line.endswith(" are optimizer")


@pytest.mark.parametrize("seq_len", ["1", "130"])
def test_sequences_that_every_mesh_pads_are_planned(rooftop: Run, seq_len: str) -> None:
    plan = rooftop(
        "plan", "train", "llama3-8b", "--on", "v5e:4x4", "--batch-seqs", "16", "--seq", seq_len, "--json"
    ).json
    assert plan["executable"] and plan["padding"]["positions"] % 128 == 0


def test_slices_of_which_none_fits_are_one_line_that_names_the_nearest(rooftop: Run) -> None:
    answer = rooftop("plan", "train", "llama3-8b", "--on", "v5e:2x2,v5e:1x1", "--batch-seqs", "16")
    assert (answer.status, answer.err) == (1, "")
    (line,) = answer.out.splitlines()
    assert line.startswith("llama3-8b cannot be trained on v5e:2x2, v5e:1x1: does not fit: ")
    sequences, near = re.search(r"nearest that does: (\d+) sequences a step on (\S+):", line).groups()
    assert rooftop("plan", "train", "llama3-8b", "--on", near, "--batch-seqs", sequences).status == 0


def test_the_first_line_says_that_nothing_fits_and_what_does(rooftop: Run) -> None:
    asked = ("plan", "train", "llama3-70b", "--on", "h100:8x8", "--batch-tokens", "4Mi", "--remat", "none")
    answer = rooftop(*asked, "--mesh", "stage=8,data=2,tensor=4", "--alternatives", "1")
    assert answer.status == 1
    first = " ".join(answer.out.splitlines()[:2])
    assert first.startswith("Does not fit: ") and "too much; nearest that does: h100:8x8 as " in first


def test_changes_are_those_that_programs_run(rooftop: Run) -> None:
    """Int8 matmuls and collective matmuls run; a plan in int4 is priced, and says that no program runs it."""
    job = ("plan", "train", "llama3-8b", "--on", "v5p:4x4x4", "--batch-seqs", "32", "--mesh", "fsdp=16,tensor=4")
    out = rooftop(*job).out
    possible, _, missing = out[out.index("What would change it") :].partition("What rooftop's program does not run")
    assert "ICI twice as fast" in possible and "int8 matmuls in the layers" in possible
    assert not missing
    off = rooftop(*job, "--no-collective-matmuls").out
    assert "collective matmuls over tensor" in off[off.index("What would change it") :]
    planned = rooftop(*job, "--matmul-dtype", "int4")
    assert planned.status == 1
    assert planned.out.startswith(
        "Not executable: no program multiplies in int4: bf16, int8, f8_e4m3; nearest that runs:"
    )
    answer = rooftop(*job, "--matmul-dtype", "int4", "--json")
    assert (answer.status, answer.json["executable"]) == (1, False)
    assert rooftop(*job, "--matmul-dtype", "int8", "--json").json["executable"] is True
    assert "; int8 matmuls in the layers" in rooftop(*job, "--matmul-dtype", "int8").out


def test_slices_are_compared_in_one_table(rooftop: Run) -> None:
    """The recommended slice first, the others with the reason why they are not."""
    question = ("plan", "train", "llama3-8b", "--on", "v5e,v6e:8x8", "--tokens", "100B", "--days", "30")
    answer = rooftop(*question)
    assert answer.status == 0
    lines = answer.out[answer.out.index("Slices compared: fewest dollars first") :].splitlines()
    assert "recommended" in lines[2] and "30" in answer.out
    data = rooftop(*question, "--json").json
    jsonschema.validate(data, schema(TrainingAnswerDocument))
    compared = data["comparison"]
    assert compared["best"]["slice"] == data["slice"]["name"] == lines[2].split()[0]
    assert compared["best"]["meets"] and compared["best"]["days"] <= 30
    assert all(entry["why"] for entry in compared["others"])


def test_no_slice_within_the_limits_is_status_one_with_the_nearest(rooftop: Run) -> None:
    answer = rooftop(
        "plan", "train", "llama3-8b", "--on", "v5e:4x4", "--tokens", "1T", "--days", "2", "--budget", "$1k"
    )
    assert answer.status == 1
    assert answer.out.startswith("No slice meets the limits; nearest is v5e:4x4: ")
    (line,) = answer.err.strip().splitlines()
    assert "no slice trains llama3-8b within 2 days and $1,000: nearest is v5e:4x4" in line


def test_the_book_bounds_use_nominal_memory(rooftop: Run) -> None:
    book = rooftop(*JOB, "--bounds", "book", "--json").json["memory"]
    assert book["capacity"] == 96e9
    assert book["workspace"] == book["gradients"] == 0
    assert book["weights"] == pytest.approx(book["optimizer"] / 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({2: "lama3-8b"}, "llama3-8b"),
        ({2: "nowhere/config.json"}, "nowhere/config.json"),
        ({4: "v5q:4x4x4"}, "v5p"),
        ({4: "v5p:4x4"}, "v5p"),
        ({4: "v5e:17x16"}, "v5e"),
        ({6: "-4M"}, "positive number"),
        ({8: "0"}, "positive number"),
        ({10: "many"}, "positive number"),
        ({6: "1e14"}, "from 1 to 1,000,000,000,000"),
        ({6: "1e30"}, "at most 1e+15"),
        ({10: "1e30"}, "at most 1e+15"),
    ],
)
def test_bad_arguments_are_one_line(rooftop: Run, change: dict[int, str], message: str) -> None:
    args = list(JOB)
    for position, value in change.items():
        args[position] = value
    _refused(rooftop(*args), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mesh", "fsdp=60"), "such as fsdp=64"),
        (("--mesh", "fsdp=32,tensr=2"), "did you mean tensor"),
        (("--mesh", "fsdp=64", "--layout", "fsdp=x+y+z"), "--mesh or --layout, not both"),
        (("--layout", "fsdp=x+y"), "tile physical axis z"),
        (("--layout", "fsdp=x+y+w"), "one of x, y, z"),
        (("--layout", "everything"), "AXIS=PIECES"),
        (("--layout", "fsdp=x+y,fsdp=z"), "each axis once"),
        (("--layout", "rows=x+y+z"), "mesh axis: got 'rows'"),
        (("--remat", "ful"), "did you mean full"),
        (("--remat", "block,qkv=keep"), "save"),
        (("--microbatches", "300"), "at most the 256 sequences"),
        (("--schedule", "2f2b"), "1f1b"),
        (("--chunks", "2", "--schedule", "gpipe"), "interleaved"),
        (("--optimizer", "adamww"), "did you mean adamw"),
        (("--matmul-dtype", "int3"), "int8"),
        (("--price", "-1"), "positive number"),
        (("--days", "1e300"), "days: got '1e300'; accepted: at most 1e+18"),
        (("--days", "1e6"), "days: got 1000000.0; accepted: at most 36500"),
        (("--budget", "1e300"), "budget: got '1e300'; accepted: at most 1e+12"),
        (("--assume", "tensor=2"), "between 0 and 1"),
        (("--bounds", "loose"), "book"),
        (("--batch-seqs", "4"), "one of --batch-tokens and --batch-seqs"),
        (("--nonsense",), "nonsense"),
    ],
)
def test_bad_options_are_one_line(rooftop: Run, options: tuple[str, ...], message: str) -> None:
    _refused(rooftop(*JOB, *options), message)


def test_a_batch_in_tokens_is_rounded_to_whole_sequences(rooftop: Run) -> None:
    answer = rooftop("plan", "train", "llama3-8b", "--on", "v5p:4x4x4", "--batch-tokens", "3M", "--seq", "4096")
    said = "3,000,000 tokens a step are rounded to 732 sequences of 4,096: 2,998,272 tokens"
    assert said in answer.out.splitlines()[:5]
    tiny = ("plan", "train", "llama3-8b", "--on", "v5p:2x2x1", "--batch-tokens", "3", "--seq", "4096", "--json")
    workload = rooftop(*tiny).json["workload"]
    assert (workload["batch_tokens"], workload["asked_tokens"]) == (4096, 3)


def test_a_missing_slice_is_asked_for(rooftop: Run) -> None:
    _refused(rooftop("plan", "train", "llama3-8b", "--batch-tokens", "1Mi"), "--on")


def _refused(answer: Any, message: str) -> None:
    assert answer.status == 2
    assert answer.out == ""
    (line,) = answer.err.strip().splitlines()
    assert line.startswith("rooftop: ")
    assert message in line


def test_progress_begins_after_a_second_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short search shows nothing; a long one a bar on stderr; without a terminal there is no callback."""
    begun: list[tuple[int, int, str]] = []

    @contextmanager
    def bar() -> Iterator[Callable[[int, int, str], None]]:
        yield lambda *call: begun.append(call)

    now = [100.0]
    monkeypatch.setattr(output, "_bar", bar)
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with output.progress_bar(shown=True, after_s=1.0) as none:
        assert none is None
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with output.progress_bar(shown=True, after_s=1.0) as progress:
        assert progress is not None
        progress(1, 3, "early")
        now[0] += 1.5
        progress(2, 3, "late")
    assert begun == [(2, 3, "late")]


def test_rules_of_fsdp_and_hbm_count_all_experts(rooftop: Run) -> None:
    """Mixtral gathers 3.6 times the parameters that a token uses: 2048 tokens a chip are not enough for FSDP alone."""
    job = ("plan", "train", "mixtral-8x7b", "--on", "v5p:4x4x4", "--batch-tokens", "128Ki", "--json")
    reasons = {reason["rule"]: reason for reason in rooftop(*job).json["reasons"]}
    assert reasons["FSDP alone"]["limit"] == pytest.approx(850 * 46.7 / 12.9, rel=0.01)
    assert "bound by ICI" in reasons["FSDP alone"]["text"]
    dense = rooftop("plan", "train", "llama3-8b", "--on", "v5p:4x4x4", "--batch-tokens", "128Ki", "--json").json
    assert {item["rule"]: item["limit"] for item in dense["reasons"]}["FSDP alone"] == pytest.approx(850, rel=0.01)
    hbm = "matmuls bound by FLOPs, not HBM"
    assert reasons[hbm]["limit"] <= 4 * {item["rule"]: item["limit"] for item in dense["reasons"]}[hbm]


def test_sequences_longer_than_the_models_are_said_first(rooftop: Run) -> None:
    job = ("plan", "train", "llama3-8b", "--on", "v5e:8x8", "--batch-seqs", "32", "--seq")
    first = " ".join(rooftop(*job, "16384").out.split("MaxText would")[0].split())
    assert first.endswith("sequences of 16,384, the model was made for 8,192")
    assert "was made for" not in rooftop(*job, "8192").out.split("laid out")[0]
