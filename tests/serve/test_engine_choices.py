"""Tokens that an engine chooses: distributions of samples, penalties, biases, constraints, log probabilities."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from rooftop.core.errors import RooftopError
from rooftop.programs.serving.formats import FORMATS
from rooftop.programs.serving.sampling import Adjustments, SampledChoice, choose, filtered
from rooftop.scheduling.serving.scheduler import Policy
from rooftop.serve.engine.engine import PagedEngine
from rooftop.serve.engine.requests import Constraint, Sampling, Token
from tests.support.checkpoint_tensors import from_checkpoint
from tests.support.engines import CONFIGURATION, GREEDY, again, answers, checkpoint, engine
from tests.support.tiny_models import case

PROMPTS = [case["prompt"] for case in GREEDY["llama"]]


@pytest.fixture(scope="module")
def paged_engine(tmp_path_factory: pytest.TempPathFactory) -> PagedEngine:
    return engine(checkpoint("llama", tmp_path_factory.mktemp("choices")))


def run(
    paged_engine: PagedEngine, prompts: list[list[int]], *samplings: Sampling, **changes: object
) -> list[list[Token]]:
    serving = again(paged_engine, **changes)
    serving.start()
    return answers(serving, prompts, samplings)


def ids(tokens: list[Token]) -> list[int | None]:
    return [token.token for token in tokens]


def reference(logits: npt.NDArray[np.float64], how: Sampling) -> npt.NDArray[np.float64]:
    """The probabilities of tokens, one filter after another as their definitions say."""
    p = np.exp(logits / how.temperature - (logits / how.temperature).max())
    p /= p.sum()
    order = np.argsort(-p)
    if how.top_k is not None:
        p[order[how.top_k :]] = 0
        p /= p.sum()
    before = 0.0
    for token in order:
        if before >= how.top_p:
            p[token] = 0
        before += p[token]
    p /= p.sum()
    p[p < how.min_p * p.max()] = 0
    return p / p.sum()


FILTERS = [
    Sampling(temperature=1.3),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=1.5, min_p=0.2),
    Sampling(temperature=2.0, top_k=20, top_p=0.9, min_p=0.05),
]


def choice(hows: list[Sampling], rows: int) -> SampledChoice:
    samplings = [hows[row % len(hows)] for row in range(rows)]
    return SampledChoice(
        temperature=jnp.array([how.temperature for how in samplings], jnp.float32),
        top_k=jnp.array([how.top_k or 0 for how in samplings], jnp.int32),
        top_p=jnp.array([how.top_p for how in samplings], jnp.float32),
        min_p=jnp.array([how.min_p for how in samplings], jnp.float32),
        seed=jnp.stack([jnp.arange(rows, dtype=jnp.uint32), jnp.full(rows, 7, jnp.uint32)], axis=1),
        drawn=jnp.arange(rows, dtype=jnp.int32) % 3,
    )


def test_what_is_left_out_is_what_the_definitions_leave_out() -> None:
    logits = np.random.default_rng(0).normal(size=40) * 2
    many = jnp.tile(jnp.asarray(logits, jnp.float32), (len(FILTERS), 1))
    probabilities = jax.nn.softmax(filtered(many, choice(FILTERS, len(FILTERS))), axis=-1)
    for row, how in zip(np.asarray(probabilities), FILTERS, strict=True):
        np.testing.assert_allclose(row, reference(logits, how), atol=1e-6)


def test_draws_have_the_distribution() -> None:
    """Chi-square over 4,000 draws of each filter, seeds all different."""
    logits, rows = np.random.default_rng(1).normal(size=30), 4000
    draw = jax.jit(choose)
    for how in FILTERS:
        tokens = draw(jnp.tile(jnp.asarray(logits, jnp.float32), (rows, 1)), choice([how], rows))
        counted = np.bincount(np.asarray(tokens), minlength=30)
        expected = reference(logits, how) * rows
        assert not counted[expected == 0].any()
        likely = expected >= 5
        groups = [np.append(counts[likely], counts[~likely].sum()) for counts in (counted, expected)]
        frequent = groups[1] > 0
        assert stats.chisquare(groups[0][frequent], groups[1][frequent]).pvalue > 1e-3


def test_a_seed_draws_the_same_whatever_is_in_the_batch(paged_engine: PagedEngine) -> None:
    how = partial(Sampling, max_tokens=8, temperature=1.0)
    alone = [ids(run(paged_engine, [prompt], how(seed=row))[0]) for row, prompt in enumerate(PROMPTS)]
    together = run(paged_engine, PROMPTS, *(how(seed=row) for row in range(len(PROMPTS))))
    assert [ids(tokens) for tokens in together] == alone
    preempted = run(
        paged_engine, PROMPTS, *(how(seed=row) for row in range(len(PROMPTS))),
        pages=9, policy=Policy(max_batch=4, chunk_tokens=6),
    )  # fmt: skip
    assert [ids(tokens) for tokens in preempted] == alone
    other = run(paged_engine, PROMPTS, *(how(seed=row + 100) for row in range(len(PROMPTS))))
    assert [ids(tokens) for tokens in other] != alone


def test_a_text_ends_with_a_stop_token(paged_engine: PagedEngine) -> None:
    expected = GREEDY["llama"][0]["output"]
    at = next(i for i, token in enumerate(expected) if i > 1 and token not in expected[:i])
    how = Sampling(max_tokens=12, temperature=0.0, stop_tokens=frozenset([expected[at]]))
    (answer,) = run(paged_engine, PROMPTS[:1], how)
    assert ids(answer) == expected[: at + 1]
    assert answer[-1].finish == "stop" and {token.finish for token in answer[:-1]} == {None}


@pytest.mark.oracle
def test_log_probabilities_are_those_of_transformers_logits(paged_engine: PagedEngine) -> None:
    """Of the token behind the prompt; a request that does not ask gets none."""
    golden = case("llama")[3]
    prompts = [golden["tokens"][row, :length].tolist() for row, length in ((0, 20), (1, 20), (0, 11))]
    asked = Sampling(max_tokens=1, temperature=0.0, logprobs=4)
    outputs = run(paged_engine, prompts, asked, asked, Sampling(max_tokens=1, temperature=0.0))
    for (row, length), (token,) in zip(((0, 20), (1, 20)), outputs[:2], strict=True):
        exact = golden["logits"][row, length - 1].astype(np.float64)
        exact -= np.log(np.exp(exact).sum())
        best = np.argsort(-exact)[:4]
        assert token.token == best[0] and [token_id for token_id, _ in token.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in token.top], exact[best], atol=1e-4)
        assert token.logprob == pytest.approx(exact[best[0]], abs=1e-4)
    assert outputs[2][0].logprob is None and outputs[2][0].top == ()


def test_adjustments_are_what_their_definitions_say() -> None:
    """Beside a plain loop over tokens."""
    random = np.random.default_rng(2)
    logits = random.normal(size=(1, 50)).astype(np.float32) * 3
    prompt, output = random.integers(0, 50, 8), random.integers(0, 50, 6)
    allowed = random.random(50) < 0.7
    expected = logits[0].astype(np.float64)
    for token in {*prompt.tolist(), *output.tolist()}:
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    for token in range(50):
        count = output.tolist().count(token)
        expected[token] -= 0.4 * count + 0.9 * (count > 0)
    expected[7] += 2.5
    expected[~allowed] = -np.inf
    seen = np.bincount(output, minlength=50)
    seen[np.unique(prompt)] += 2**24
    bias = np.zeros(50, np.float32)
    bias[7] = 2.5
    bits = np.zeros(64, np.uint32)
    bits[:50] = allowed
    words = (bits.reshape(2, 32) << np.arange(32, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
    adjustments = Adjustments(
        bias=jnp.asarray(bias)[None], seen=jnp.asarray(seen, jnp.int32)[None], mask=jnp.asarray(words)[None],
        penalties=jnp.array([[0.9, 0.4, 1.3]], jnp.float32),
    )  # fmt: skip
    adjusted = adjustments.apply(jnp.asarray(logits), jnp.zeros(1, jnp.int32))
    np.testing.assert_allclose(np.asarray(adjusted)[0], expected, rtol=1e-5)


@pytest.mark.parametrize("pages", [40, 9])
def test_penalties_see_the_tokens_of_the_request_alone(paged_engine: PagedEngine, pages: int) -> None:
    """Beside the whole model, computed anew for every token; also when requests lose their place."""
    how = Sampling(max_tokens=8, temperature=0.0, frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2)
    plain = Sampling(max_tokens=8, temperature=0.0)
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[0]]
    outputs = run(paged_engine, prompts, how, plain, how, plain, pages=pages)
    assert ids(outputs[1]) == GREEDY["llama"][1]["output"][:8]
    assert ids(outputs[3]) == GREEDY["llama"][0]["output"][:8]
    for at in (0, 2):
        assert ids(outputs[at]) == penalised(prompts[at], how)


def penalised(prompt: list[int], how: Sampling) -> list[int]:
    from rooftop.arrays.rules import Rules
    from rooftop.programs.model.layer import Computation
    from rooftop.programs.model.transformer import logits
    from tests.support.curves import mesh_of
    from tests.support.quickly import QUICKLY

    model, _, tensors, _ = case("llama")
    weights = jax.tree.map(jnp.asarray, from_checkpoint(model, tensors))
    of = jax.jit(partial(logits, how=Computation(model=model, rules=Rules().only({}))), compiler_options=QUICKLY)
    tokens, room = list(prompt), 32
    with jax.set_mesh(mesh_of()):
        for _ in range(how.max_tokens):
            padded = np.zeros((1, room), np.int32)
            padded[0, : len(tokens)] = tokens
            scores = np.asarray(of(weights, jnp.asarray(padded)))[0, len(tokens) - 1].astype(np.float64)
            output = tokens[len(prompt) :]
            for token in set(tokens):
                scores[token] *= 1 / how.repetition_penalty if scores[token] > 0 else how.repetition_penalty
                count = output.count(token)
                scores[token] -= how.frequency_penalty * count + how.presence_penalty * (count > 0)
            tokens.append(int(scores.argmax()))
    return tokens[len(prompt) :]


class OnlyEvenThenOdd(Constraint):
    """A constraint that turns with every token."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def mask(self) -> npt.NDArray[np.uint32]:
        return np.full(3, 0x55555555 << len(self.given) % 2, np.uint32)

    def accept(self, token: int) -> None:
        self.given.append(token)


def test_constraints_and_biases_hold_for_their_requests_only(paged_engine: PagedEngine) -> None:
    constraint = OnlyEvenThenOdd()
    plain = Sampling(max_tokens=9, temperature=0.0)
    outputs = run(
        paged_engine,
        PROMPTS[:4],
        Sampling(max_tokens=9, temperature=1.0, seed=3, constraint=constraint),
        plain,
        Sampling(max_tokens=9, temperature=0.0, logit_bias={61: 100.0}),
        plain,
        policy=Policy(max_batch=4, chunk_tokens=6),
    )
    assert [token % 2 for token in ids(outputs[0]) if token is not None] == [0, 1] * 4 + [0]
    assert constraint.given == ids(outputs[0])
    assert set(ids(outputs[2])) == {61}
    for at in (1, 3):
        assert ids(outputs[at]) == GREEDY["llama"][at]["output"][:9]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("temperature", -1.0), ("temperature", float("nan")), ("top_k", 0), ("top_p", 0.0),
        ("top_p", 1.5), ("min_p", 2.0), ("seed", 0.5), ("logprobs", 21), ("presence_penalty", 3.0),
        ("repetition_penalty", 0.0), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: 200.0}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(field: str, value: object) -> None:
    with pytest.raises(RooftopError, match=field):
        Sampling(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weights", "cache", "mesh", "most"),
    [
        ("int8", "int8", (), 0.05),
        pytest.param("f8_e4m3", "plain", (), 0.1, marks=pytest.mark.slow),
        pytest.param("int4-32", "plain", (("tensor", 2),), 0.5, marks=pytest.mark.slow),
    ],
)
def test_weights_and_cache_in_fewer_bits_change_little(
    paged_engine: PagedEngine, weights: str, cache: str, mesh: tuple[tuple[str, int], ...], most: float, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Log-probabilities of the same texts. The tiny model sums over 48 elements at most, 24 on each of two devices."""
    folder = checkpoint("llama", tmp_path)
    configuration = replace(paged_engine.configuration, weights_dtype=weights, kv_dtype=cache, mesh=mesh)
    if weights == "int4-32":
        monkeypatch.setitem(FORMATS, weights, replace(FORMATS[weights], group=8))
    small = engine(folder, configuration)
    small.start()
    how = Sampling(max_tokens=1, temperature=0.0, logprobs=20)
    prompts = PROMPTS * 2
    exact, near = run(paged_engine, prompts, *[how] * len(prompts)), answers(small, prompts, [how] * len(prompts))
    differences = list[float]()
    for (one,), (other,) in zip(exact, near, strict=True):
        scores = dict(other.top)
        differences += [abs(value - scores[token]) for token, value in one.top if token in scores]
    assert len(differences) > 15 * len(prompts)
    assert 1e-5 < np.mean(differences) < most


def test_groups_that_divide_no_dim_are_refused(paged_engine: PagedEngine, tmp_path: Path) -> None:
    configuration = replace(paged_engine.configuration, weights_dtype="int4-32", mesh=(("tensor", 2),))
    with pytest.raises(RooftopError, match="weights: got 'int4-32'; accepted: groups that divide"):
        engine(checkpoint("llama", tmp_path), configuration)


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> PagedEngine:
    return engine(checkpoint("llama", tmp_path_factory.mktemp("guesses")), replace(CONFIGURATION, draft_length=3))


def test_guesses_change_no_output(paged_engine: PagedEngine, guessing: PagedEngine) -> None:
    """Greedy, and sampled with the same seeds; beside requests that cannot be guessed; also when pages are short."""
    repeating = [[5, 6, 7, 8] * 3, [3, 3, 3, 3, 3], *PROMPTS[:4]]
    for temperature, changes in ((0.0, {}), (0.3, {}), (0.0, {"pages": 11, "policy": Policy(max_batch=4)})):
        hows = [Sampling(max_tokens=14, temperature=temperature, seed=row, logprobs=row % 2) for row in range(5)]
        hows.append(Sampling(max_tokens=14, temperature=temperature, seed=9, frequency_penalty=0.5))
        plain = run(paged_engine, repeating, *hows)
        serving = again(guessing, **changes)
        serving.start()
        guessed = answers(serving, repeating, hows)
        assert [ids(tokens) for tokens in guessed] == [ids(tokens) for tokens in plain]
        for one, other in zip(guessed, plain, strict=True):
            for token, same in zip(one, other, strict=True):
                assert (token.finish, token.logprob is None) == (same.finish, same.logprob is None)
                assert token.logprob is None or token.logprob == pytest.approx(same.logprob, abs=1e-4)
        stats_ = serving.stats()
        assert 0 < stats_.accepted < stats_.guessed
        assert stats_.tokens > stats_.steps or changes


def test_guessed_samples_have_the_models_distribution(guessing: PagedEngine) -> None:
    """Chi-square of tokens that were guessed, behind likely pairs of the prompt, against the model's probabilities."""
    prompt = [5, 29, 86, 5, 58, 58, 5, 12, 13, 5, 70, 58, 5, 3, 58, 5]
    how = [Sampling(max_tokens=3, temperature=0.8, top_k=4, seed=row) for row in range(1200)]
    serving = again(guessing, max_queue=len(how))
    serving.start()
    outputs = answers(serving, [prompt] * len(how), how)
    assert 0 < serving.stats().accepted < serving.stats().guessed
    asked = Sampling(max_tokens=1, temperature=0.0, logprobs=20)
    firsts = sorted({answer[0].token for answer in outputs if answer[0].token is not None})
    serving = again(guessing)
    serving.start()
    exact = answers(serving, [[*prompt, token] for token in firsts], [asked] * len(firsts))
    tested = 0
    for first, (likely,) in zip(firsts, exact, strict=True):
        seconds = [answer[1].token for answer in outputs if answer[0].token == first]
        p = np.exp(np.array([value for _, value in likely.top[:4]]) / 0.8)
        expected = p / p.sum() * len(seconds)
        counted = [seconds.count(token) for token, _ in likely.top[:4]]
        assert sum(counted) == len(seconds)
        if expected.min() >= 5:
            tested += 1
            assert stats.chisquare(counted, expected).pvalue > 1e-3
    assert tested and serving.stats().compilations == 0


@pytest.mark.parametrize(
    ("draft", "least", "most"),
    [("llama", 1.0, 1.0), pytest.param("llama_linear", 0.0, 0.5, marks=pytest.mark.slow)],
)
def test_a_draft_model_changes_no_output(
    paged_engine: PagedEngine, draft: str, least: float, most: float, tmp_path: Path
) -> None:
    """A draft with the weights of the model is always right where the likeliest is taken; another one seldom."""
    own = checkpoint("llama", tmp_path)
    other = own if draft == own.name else checkpoint(draft, tmp_path)
    drafted = engine(own, replace(CONFIGURATION, draft_length=3), draft=other)
    sampled = [Sampling(max_tokens=12, temperature=0.5, seed=row) for row in range(6)]
    likeliest = [Sampling(max_tokens=12, temperature=0.0)] * 6
    plain = [[ids(tokens) for tokens in run(paged_engine, PROMPTS, *hows)] for hows in (sampled, likeliest)]
    preempted = {"pages": 11, "policy": Policy(max_batch=4, chunk_tokens=6, preemption="swap")}
    for changes in ({}, preempted):
        for hows, expected in zip((sampled, likeliest), plain, strict=True):
            serving = again(drafted, **changes)
            serving.start()
            assert [ids(tokens) for tokens in answers(serving, PROMPTS, hows)] == expected
        assert least <= serving.stats().accepted / serving.stats().guessed <= most
        assert (serving.stats().preemptions > 0) == bool(changes)
