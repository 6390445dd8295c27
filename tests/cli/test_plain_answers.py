"""The first words of a plan: bound, estimate, executable and recommended mean the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rooftop as library

Run = Callable[..., Any]


def printed(rooftop: Run, *words: str) -> tuple[int, str]:
    """The status, and the answer with one blank between words."""
    answer = rooftop(*words)
    return answer.status, " ".join(answer.out.split())


def test_a_time_without_measurements_is_an_estimate(rooftop: Run) -> None:
    for words in (
        ("plan", "train", "llama3-8b", "--on", "v3:4x4", "--batch-seqs", "32"),
        ("plan", "serve", "llama3-8b", "--on", "v6e:2x2", "--batch-seqs", "8"),
    ):
        status, out = printed(rooftop, *words)
        assert status == 0 and "an estimate; " in out and "an estimate: nothing measured on this chip" in out
        assert "a bound" not in out and "at least" not in out.partition("Where")[0]
        assert "if everything overlaps (" in out


def test_the_books_arithmetic_is_a_bound_without_an_interval(rooftop: Run) -> None:
    words = ("plan", "serve", "llama2-13b", "--on", "v5e:2x4", "--batch-seqs", "1", "--context", "8192")
    status, out = printed(rooftop, *words, "--bounds", "book")
    assert status == 0 and "a bound: arithmetic at nominal peaks" in out
    assert "interval" not in out and "expected;" not in out
    # An MFU that was given is no bound.
    _, out = printed(rooftop, *words, "--bounds", "book", "--mfu", "0.4")
    assert "an estimate: a prefill at the MFU given, 40%" in out and "interval" not in out


@pytest.mark.parametrize("chip", ["h100", "b200"])
@pytest.mark.parametrize("model", ["gemma2-9b", "gpt-oss-20b", "deepseek-v2-lite"])
def test_attention_that_cudnn_lacks_is_executable_and_support_says_so(rooftop: Run, model: str, chip: str) -> None:
    words = ("plan", "train", model, "--on", f"{chip}:8x4", "--batch-seqs", "64", "--seq", "2048")
    answer = rooftop(*words, "--json")
    assert (answer.status, answer.json["executable"], answer.json["obstacles"]) == (0, True, [])
    verbs = {entry.verb: entry for entry in library.support(model, on=chip).record.verbs}
    assert verbs["train"].answer == "yes"


def test_a_plan_for_another_engine_is_an_answer(rooftop: Run) -> None:
    words = ("plan", "serve", "llama3.1-70b", "--on", "h100", "--engine", "vllm", "--requests-per-second", "5")
    status, out = printed(rooftop, *words)
    assert status == 0 and out.startswith("Recommended: ")
    assert "Priced for vLLM, to be run by vLLM; `rooftop serve` does not run it." in out
    assert "ot executable" not in out and "are estimates" not in out


def test_a_format_that_only_other_engines_have_names_one(rooftop: Run) -> None:
    status, out = printed(rooftop, "plan", "serve", "llama3.1-8b", "--on", "h100:1", "--kv-dtype", "fp8")
    assert status == 1
    assert "rooftop serve has no KV cache in f8_e4m3 (it has bf16, int8); `--engine vllm` prices it" in out
    _, out = printed(rooftop, "plan", "serve", "llama3.1-8b", "--on", "v5e:2x2", "--kv-dtype", "fp8")
    assert "rooftop serve has no KV cache in f8_e4m3 (it has bf16, int8)" in out and "--engine" not in out


def test_weights_of_a_checkpoint_that_an_engine_lacks_name_where_they_come_from(rooftop: Run) -> None:
    answer = rooftop("plan", "serve", "gpt-oss-120b", "--on", "h100", "--engine", "vllm", "--requests-per-second", "5")
    assert answer.status == 2
    assert "got 'f4_e2m1, as gpt-oss-120b is published'; accepted: bf16, f8_e4m3: --weights-dtype bf16" in answer.err


def test_a_plan_of_long_sequences_says_what_published_kernels_would_give(rooftop: Run) -> None:
    words = ("plan", "train", "llama3.1-70b", "--on", "tpu7x:4x8x8", "--seq")
    changes = rooftop(*words, "131072", "--batch-seqs", "64", "--json").json["what_if"]
    (kernels,) = [change for change in changes if "attention kernels of published runs" in change["change"]]
    assert 0.4 < kernels["gain"] < 0.7 and "MaxText runs them" in kernels["obstacle"]
    short = rooftop(*words, "8192", "--batch-seqs", "512", "--json").json["what_if"]
    assert not any("attention kernels" in change["change"] for change in short)


def test_a_yes_or_no_stands_before_the_rule_that_it_is_about(rooftop: Run) -> None:
    for words in (
        ("train", "llama3-8b", "--on", "v5p:4x4x4", "--batch-seqs", "32"),
        ("serve", "llama3-8b", "--on", "v5e:2x2"),
    ):
        _, out = printed(rooftop, "plan", *words)
        for reason in rooftop("plan", *words, "--json").json["reasons"]:
            answer = "yes" if reason["holds"] else "no"
            assert f" {answer} {reason['rule']}" in out
