"""The serving plan: prefill and generation on a slice, their times, memory, cost, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from rooftop import __version__
from rooftop.arrays.mesh import MeshLayout
from rooftop.arrays.rules import SEQUENCE_AXES, STAGE_AXES, Rules
from rooftop.capabilities import KvSplit
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.ledger import Ledger, Resource, Row
from rooftop.core.quantities import format_bytes, format_seconds
from rooftop.core.records import Record, RelativeChange, read_record
from rooftop.hardware import Slice
from rooftop.models import ModelConfig, kv_bytes_per_token
from rooftop.plan.documents import PlannedModel, PlannedSlice, Reason
from rooftop.plan.evidence import Evidence, Phase, Question, evidence_for
from rooftop.plan.pricing import Bounds, scalar_ledger
from rooftop.plan.serving.assumptions import SHARES, ServingAssumptions, ServingShare
from rooftop.plan.serving.phase import serving_rules
from rooftop.plan.serving.placement import Placement
from rooftop.plan.serving.problem import Link, Mode, ServingMemory, ServingProblem
from rooftop.plan.serving.reasons import serving_reasons
from rooftop.plan.serving.search import (
    most_sequences,
    prefills_in_steps,
    prompt_between_s,
    round_times,
    server_tokens_per_s,
    token_s,
)
from rooftop.plan.serving.times.clients import served_loads
from rooftop.plan.serving.times.steps import PlannedTimes
from rooftop.plan.serving.workload import DraftModel, ServingNumerics, ServingWorkload
from rooftop.roofline import rules


@dataclass(frozen=True, kw_only=True)
class PlannedShares(Record):
    """The shares of a plan by name, their sources, those that the user gave, and the memory that it counts on.

    ``engine``: the engine whose kernels are priced, its ``release``, the ``settings`` that were asked for, and the
    ``command`` that serves so; None: our own programs.
    """

    shares: Mapping[ServingShare, float]
    sources: Mapping[str, str]
    given: Mapping[str, float]
    mfu: float | None
    bounds: Bounds
    engine: str | None = None
    release: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    command: str | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedDraft(Record):
    """The draft model, the seconds of both models in a round, and the gain in tokens/s."""

    model: str
    config: ModelConfig
    length: int
    acceptance: float
    tokens_per_round: float
    guess_s: float
    check_s: float
    round_s: float
    prefill_s: float
    gain: RelativeChange


@dataclass(frozen=True, kw_only=True)
class StepBounds(Record):
    """Seconds of a generate step: the lower bound, and the expectation."""

    lower_s: float
    expected_s: float


@dataclass(frozen=True, kw_only=True)
class ServingEvidence(Record):
    """Evidence for decode steps and for prefills, and the 5th and 95th percentile of TPOT and TTFT in seconds."""

    decode: Evidence
    prefill: Evidence
    tpot_s: tuple[float, float] | None
    ttft_s: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Breakdown(Record):
    """Seconds of a step at peak rates: reading weights and KV, FLOPs, and collectives."""

    weights_s: float
    kv_s: float
    flops_s: float
    ici_s: float


@dataclass(frozen=True, kw_only=True)
class PlannedGenerate(Record):
    """Generation: batch, tokens in a sequence's cache, the step, its rate and its ledger."""

    batch: int
    context: float
    step_s: StepBounds
    tokens_per_s: float
    tokens_per_s_per_chip: float
    bound: Resource
    breakdown: Breakdown
    ledger: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class PlannedPrefill(Record):
    """The prefill of one prompt, and the server that does it.

    The context axis of its mesh splits columns, or the sequence in a ``ring``.
    """

    seconds: float
    lower_s: float
    bound: Resource
    tokens_per_s: float
    slice: str
    mesh: MeshLayout
    ring: bool
    rules: Rules
    ledger: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class DeviceMemory(Record):
    """HBM bytes of one device of the generate server by class."""

    weights: float
    scales: float
    kv: float
    activations: float
    total: float
    capacity: float


@dataclass(frozen=True, kw_only=True)
class SliceMemory(Record):
    """HBM bytes over the slice of the generate server by class, copies included, and those of one device."""

    weights: float
    scales: float
    kv: float
    activations: float
    kv_per_token: float
    total: float
    free: float
    capacity: float
    fits: bool
    per_device: DeviceMemory


@dataclass(frozen=True, kw_only=True)
class KvTransfer(Record):
    """Bytes of one prompt's KV, and the seconds of its transfer over either link."""

    bytes: float
    ici_s: float
    dcn_s: float


@dataclass(frozen=True, kw_only=True)
class PlannedPrefixCache(Record):
    """A prefill without and with the prefix cache, and the prompts whose KV the hosts' memory holds."""

    hit_rate: float
    prefill_without_s: float
    read_s: float
    speedup: float
    host_bytes: float | None
    prompts_held: int | None


@dataclass(frozen=True, kw_only=True)
class TokenCosts(Record):
    """Dollars per million tokens in (prefilled) and out (generated), at full load; None without a price."""

    input: float | None
    output: float | None


@dataclass(frozen=True, kw_only=True)
class MetricDefinitions(Record):
    """The definitions of the measures, in words."""

    ttft_s: str
    tpot_s: str
    tokens_per_s: str


#: How the measures are defined, as the serving benchmarks do.
DEFINITIONS = MetricDefinitions(
    ttft_s="from the request's arrival to its first token, which the prefill yields; no queue is counted",
    tpot_s="(end to end - TTFT) / (tokens out - 1): the mean time of every token but the first",
    tokens_per_s="tokens that a full server generates in a second: disaggregated, those of its steps; interleaved, "
    "with the prefills of its sequences counted",
)


@dataclass(frozen=True, kw_only=True)
class LoadTimes(Record):
    """Mean seconds of requests of clients that wait for their answers, and what nothing can beat.

    ``active`` sequences have a place in the cache of a server at once; the other clients queue.
    """

    ttft_s: float
    tpot_s: float
    active: float
    ttft_bound_s: float
    tpot_bound_s: float


@dataclass(frozen=True, kw_only=True)
class ServingPlanDocument(Record):
    """A serving plan as JSON: all that its servers need, and its figures. ``ServingAnswer`` adds the search's.

    ``tpot_together_s``: of sequences that start and end together, as in a closed loop of requests of one length; None
    where that makes no difference. ``under_load``: the latencies of the workload's load of clients, if it has one.
    """

    kind: Literal["serve"]
    schema: Literal[1]
    rooftop_version: str
    model: PlannedModel
    slice: PlannedSlice
    workload: ServingWorkload
    dtypes: ServingNumerics
    mode: Mode
    link: Link
    mesh: MeshLayout
    kv_split: KvSplit
    rules: Rules
    assumptions: PlannedShares
    draft: PlannedDraft | None
    definitions: MetricDefinitions
    generate: PlannedGenerate
    prefill: PlannedPrefill
    ttft_s: float
    tpot_s: float
    tpot_together_s: float | None = None
    under_load: LoadTimes | None = None
    evidence: ServingEvidence | None = None
    memory: SliceMemory
    max_batch: int
    kv_transfer: KvTransfer
    prefix_cache: PlannedPrefixCache
    evicted_tokens_per_step: float
    prefill_per_generate: float
    cost_per_million_tokens: TokenCosts
    executable: bool
    obstacles: tuple[str, ...]
    reasons: tuple[Reason, ...]

    @property
    def plan(self) -> ServingPlan:
        """The plan, priced anew. Raises RooftopError on slices or meshes that cannot be."""
        slice_ = self.slice.hardware
        prefill_slice = Slice.parse(self.prefill.slice).with_calibration(self.slice.calibrated)
        draft = None
        if self.draft is not None:
            draft = DraftModel(model=self.draft.config, length=self.draft.length, acceptance=self.draft.acceptance)
        problem = ServingProblem(
            model=self.model.config,
            slice=slice_,
            workload=self.workload,
            numerics=self.dtypes,
            assumptions=ServingAssumptions(
                shares=self.assumptions.given,
                mfu=self.assumptions.mfu,
                engine=self.assumptions.engine,
                release=self.assumptions.release,
                settings=self.assumptions.settings,
            ),
            mode=self.mode,
            bounds=self.assumptions.bounds,
            link=self.link,
            prefill_slice=None if prefill_slice == slice_ else prefill_slice,
            draft=draft,
        )
        prefill_on = Placement(mesh=self.prefill.mesh.on(prefill_slice))
        return ServingPlan(
            problem=problem,
            generate_on=Placement(mesh=self.mesh.on(slice_), kv_split=self.kv_split),
            prefill_on=prefill_on if self.prefill.ring else prefill_on.joined(),
            batch=self.generate.batch,
        )


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """One way to serve one workload: where each phase runs and how many sequences are generated together."""

    problem: ServingProblem
    generate_on: Placement
    prefill_on: Placement
    batch: int

    @cached_property
    def generate(self) -> Ledger:
        """The ledger of a generate step at the workload's context."""
        return scalar_ledger(self.problem.generate(self.generate_on, float(self.batch)))

    @cached_property
    def prefill(self) -> Ledger:
        """The ledger of one prompt's prefill."""
        work = self.problem.workload
        new = work.new_prompt_tokens
        return scalar_ledger(self.problem.prefill(self.prefill_on, float(new), float(work.prompt - new)))

    @property
    def step_s(self) -> float:
        """Expected seconds of a step of the model."""
        return float(self.generate.expected_s)

    @property
    def lower_s(self) -> float:
        """Lower bound of a step: the busiest resource; by the book attention and the rest after one another."""
        return self.step_s if self.problem.book else max(_busy(self.generate).values())

    @cached_property
    def prefill_s(self) -> float:
        """Expected seconds of one prompt's prefill: the cached part is read, a draft model prefills too."""
        return float(self.problem.prompt_s(self.prefill_on))

    @cached_property
    def prompt_interval_s(self) -> float:
        """Expected seconds from one prompt to the next: pipeline stages prefill several at the same time."""
        return float(self.problem.prompt_interval_s(self.prefill_on))

    @cached_property
    def token_s(self) -> float:
        """Seconds between two tokens of a sequence when nothing else runs: a step, or a round's share with a draft."""
        return float(token_s(self.problem, self.generate_on, float(self.batch)))

    @cached_property
    def under_load(self) -> LoadTimes | None:
        """Mean latencies under the workload's load of clients; None without any."""
        load = self.problem.workload.load
        if load is None:
            return None
        served = served_loads(self.problem, self.generate_on, self.prefill_on, [load])
        times = served.times(self.problem.overheads)
        return LoadTimes(
            ttft_s=float(times.ttft_s[0]),
            tpot_s=float(times.tpot_s[0]),
            active=float(times.active[0]),
            ttft_bound_s=float(served.bounds.ttft_s[0]),
            tpot_bound_s=float(served.bounds.tpot_s[0]),
        )

    @property
    def ttft_s(self) -> float:
        """Time to first token (see DEFINITIONS)."""
        if self.under_load is not None:
            return self.under_load.ttft_s
        return self.problem.front_end.seconds(self.problem.workload.prompt) + self.prefill_s

    @property
    def tpot_s(self) -> float:
        """Time per output token (see DEFINITIONS)."""
        return self.tpot_at(self.token_s) if self.under_load is None else self.under_load.tpot_s

    @property
    def tpot_together_s(self) -> float | None:
        """Time per output token of sequences that start and end together; None where that makes no difference."""
        if self.problem.mode != "interleaved" or prefills_in_steps(self.problem):
            return None
        out = self.problem.workload.generate
        return rules.interleaved_token_s(self.token_s, self._prompt_between_s, self.batch, out, together=self.batch)

    @cached_property
    def _prompt_between_s(self) -> float:
        """Seconds that the prefill of another prompt puts between two tokens."""
        return prompt_between_s(self.problem, self.generate_on, self.batch)

    def tpot_at(self, token_s: float) -> float:
        """Time per output token if, with nothing else to do, ``token_s`` pass between two tokens of a sequence.

        Interleaved, the prefills of the other sequences of the batch come between two tokens. An engine does them in
        the same steps, which they make longer, that of a sequence's own prefill too: (B - 1)/G of them each.
        Disaggregated, the KV's transfer comes between the first and the second token.
        """
        out = self.problem.workload.generate
        if prefills_in_steps(self.problem):
            return token_s + (self.batch - 1) / out * self._prompt_between_s
        if self.problem.mode == "interleaved":
            return rules.interleaved_token_s(token_s, self._prompt_between_s, self.batch, out)
        moved = 0.0 if self.problem.book or out == 1 else self.transfer_s / (out - 1)
        return token_s + moved

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated per second by one full server (see DEFINITIONS)."""
        return server_tokens_per_s(self.problem, self.generate_on, self.batch, self.token_s)

    @cached_property
    def memory(self) -> ServingMemory:
        """Bytes on one device of the generate server."""
        interleaved = self.problem.mode == "interleaved"
        return self.problem.memory(self.generate_on, float(self.batch), prefilling=interleaved, generating=True)

    @property
    def fits(self) -> bool:
        """True if the batch stays within the device's HBM."""
        return float(self.memory.total) <= self.problem.capacity

    @cached_property
    def max_batch(self) -> int:
        """The most sequences that fit the generate server as it is laid out."""
        return most_sequences(self.problem, self.generate_on)

    @cached_property
    def transfer_rates(self) -> dict[str, float]:
        """Bytes/s between a prefill and a generate server, at the named fractions.

        ``dcn``: every chip's egress. ``ici``: two such slices side by side, over the links of their common face.
        """
        chip, fractions = self.problem.slice.chip, self.problem.rates.fractions
        servers = (self.problem.slice, self.problem.prefill_server)
        chips = min(server.chips for server in servers)
        face = min(server.chips / server.num_slices / (1 if chip.switched else max(server.shape)) for server in servers)
        return {
            "ici": face * chip.ici_bytes_per_s * max(fractions.ici["permute"].share),
            "dcn": chips * chip.dcn_bytes_per_s * fractions.dcn,
        }

    @property
    def transfer_s(self) -> float:
        """Seconds of one prompt's KV to the generate server over the plan's link."""
        return self.problem.prompt_kv_bytes / self.transfer_rates[self.problem.link]

    @property
    def prefill_per_generate(self) -> float:
        """Prefill servers that keep one generate server busy."""
        out = self.problem.workload.generate
        return rules.prefill_per_generate(self.prompt_interval_s, self.token_s, self.batch, out)

    @property
    def cost_per_million_tokens(self) -> TokenCosts:
        """Dollars per million tokens at full load."""
        prices = self.problem.prefill_server.price_usd_per_hour, self.problem.slice.price_usd_per_hour
        prompts_per_s = 1 / self.prompt_interval_s
        rates = self.problem.workload.prompt * prompts_per_s, self.tokens_per_s
        into, out = (
            None if price is None else price / 3600 / rate * 1e6 for price, rate in zip(prices, rates, strict=True)
        )
        return TokenCosts(input=into, output=out)

    @cached_property
    def reasons(self) -> list[Reason]:
        """The rules of chapters 7 and 8 that apply."""
        return serving_reasons(self.problem, self.generate_on, self.batch, self.generate)

    @cached_property
    def obstacles(self) -> list[str]:
        """Reasons why no program runs the plan as it stands; empty if one does."""
        apart = self.problem.mode == "disaggregated"
        return self.problem.obstacles(self.generate_on, self.prefill_on if apart else None)

    @property
    def is_refused(self) -> bool:
        """True if ``rooftop serve`` has to run the plan and cannot.

        Other engines run the plans that are priced for them, and nothing runs the book's arithmetic.
        """
        problem = self.problem
        return bool(self.obstacles) and not problem.book and problem.engine is None

    def step_times(self) -> PlannedTimes:
        """Seconds of any step of these servers, for a simulation of requests.

        Raises RooftopError on a plan with a draft model, whose rounds yield a number of tokens that varies, and on one
        with pipeline stages, in which steps of several flights overlap.
        """
        if self.problem.draft is not None:
            raise RooftopError("plan", "one with a draft model", "one without: drafts are planned, and not simulated")
        if any(placement.ways(STAGE_AXES) > 1 for placement in (self.generate_on, self.prefill_on)):
            accepted = "one without: stages are planned and served, and not simulated"
            raise RooftopError("plan", "one with pipeline stages", accepted)
        rate = self.transfer_rates[self.problem.link]
        return PlannedTimes(self.problem, self.generate_on, self.prefill_on, rate)

    def require_fit(self) -> None:
        """Raises Infeasible, with the HBM that is left for the cache, if an engine would not admit the batch."""
        if self.fits:
            return
        problem, memory = self.problem, self.memory
        left = problem.capacity - float(memory.total - memory.kv)
        most = f"at most {self.max_batch} sequences fit" if self.max_batch else "not one sequence fits"
        many = "1 sequence" if self.batch == 1 else f"{self.batch} sequences"
        raise Infeasible(
            f"{problem.model.name} with {many} of {problem.held_tokens:,.0f} tokens does not fit {problem.slice.name}",
            f"their KV takes {format_bytes(float(memory.kv))} of a device, of whose {format_bytes(problem.capacity)} "
            f"{format_bytes(max(left, 0.0))} are left; {most}",
        )

    def require_targets(self) -> None:
        """Raises Infeasible, with what can be reached, if the plan misses a target of its workload."""
        work = self.problem.workload
        for name, reached, target in (("TTFT", self.ttft_s, work.ttft_s), ("TPOT", self.tpot_s, work.tpot_s)):
            if target is not None and reached > target:
                raise Infeasible(
                    f"{self.problem.model.name} on {self.problem.slice.name} misses its {name} of "
                    f"{format_seconds(target)}",
                    f"nearest is {format_seconds(reached)} ({reached / target:.2f} times the target), with batch "
                    f"{self.batch}",
                )

    @property
    def memory_of_slice(self) -> SliceMemory:
        """Bytes over the whole slice by class, copies included, and the same of one device."""
        problem, devices = self.problem, self.problem.slice.devices
        classes = {name: float(value) for name, value in asdict(self.memory).items()}
        total, capacity = sum(classes.values()), problem.capacity
        return SliceMemory(
            **{name: value * devices for name, value in classes.items()},
            kv_per_token=float(kv_bytes_per_token(problem.model, problem.numerics.kv)),
            total=total * devices,
            free=(capacity - total) * devices,
            capacity=capacity * devices,
            fits=self.fits,
            per_device=DeviceMemory(**classes, total=total, capacity=capacity),
        )

    @property
    def breakdown(self) -> Breakdown:
        """Seconds of a step at peak rates."""
        hbm = self.problem.rates.hbm_bytes_per_s
        kv = sum(float(r.count * r.hbm_bytes) for r in self.generate if r.scope in ("layers/attn/core", "kv_cache"))
        every = sum(float(row.count * row.hbm_bytes) for row in self.generate)
        busy = _busy(self.generate)
        return Breakdown(
            weights_s=(every - kv) / hbm, kv_s=kv / hbm, flops_s=busy["mxu"], ici_s=busy["ici"] + busy["dcn"]
        )

    @cached_property
    def document(self) -> ServingPlanDocument:
        """The plan as a record."""
        problem, work = self.problem, self.problem.workload
        return ServingPlanDocument(
            kind="serve",
            schema=1,
            rooftop_version=__version__,
            model=PlannedModel.of(problem.model),
            slice=PlannedSlice.of(problem.slice),
            workload=work,
            dtypes=problem.numerics,
            mode=problem.mode,
            link=problem.link,
            mesh=self.generate_on.mesh.described,
            kv_split=self.generate_on.kv_split,
            rules=serving_rules(generating=True).only(self.generate_on.mesh.shape),
            assumptions=PlannedShares(
                shares={name: problem.assumptions.share(name, problem.slice.chip) for name in SHARES},
                sources=problem.assumptions.sources(problem.slice.chip),
                given=problem.assumptions.shares,
                mfu=problem.assumptions.mfu,
                engine=problem.assumptions.engine,
                release=None if problem.engine is None else problem.engine.release,
                settings=problem.assumptions.settings,
                command=None
                if problem.engine is None
                else problem.engine.command(self.generate_on.mesh.shape, problem.numerics.kv),
                bounds=problem.bounds,
            ),
            draft=self._draft(),
            definitions=DEFINITIONS,
            generate=PlannedGenerate(
                batch=self.batch,
                context=problem.step_context,
                step_s=StepBounds(lower_s=self.lower_s, expected_s=self.step_s),
                tokens_per_s=self.tokens_per_s,
                tokens_per_s_per_chip=self.tokens_per_s / problem.slice.chips,
                bound=_bound(self.generate),
                breakdown=self.breakdown,
                ledger=self.generate.rows,
            ),
            prefill=PlannedPrefill(
                seconds=self.prefill_s,
                lower_s=max(_busy(self.prefill).values()),
                bound=_bound(self.prefill),
                tokens_per_s=work.prompt / self.prompt_interval_s,
                slice=problem.prefill_server.name,
                mesh=self.prefill_on.engine_mesh.described,
                ring=self._ring,
                rules=serving_rules(generating=False, ring=self._ring).only(self.prefill_on.engine_mesh.shape),
                ledger=self.prefill.rows,
            ),
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            tpot_together_s=self.tpot_together_s,
            under_load=self.under_load,
            evidence=self.evidence,
            memory=self.memory_of_slice,
            max_batch=self.max_batch,
            kv_transfer=KvTransfer(
                bytes=problem.prompt_kv_bytes,
                ici_s=problem.prompt_kv_bytes / self.transfer_rates["ici"],
                dcn_s=problem.prompt_kv_bytes / self.transfer_rates["dcn"],
            ),
            prefix_cache=self.prefix_cache,
            evicted_tokens_per_step=rules.evicted_tokens_per_step(self.batch, work.prompt, work.generate),
            prefill_per_generate=self.prefill_per_generate,
            cost_per_million_tokens=self.cost_per_million_tokens,
            executable=not self.obstacles,
            obstacles=tuple(self.obstacles),
            reasons=tuple(self.reasons),
        )

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values; ``ServingAnswer`` adds the results of the search."""
        return self.document.to_json()

    @cached_property
    def evidence(self) -> ServingEvidence:
        """Published decode steps and prefills of the chip and kind of model, and the intervals that they give.

        Of a plan for an engine, published benchmarks of engines under load. No run speaks for the book's arithmetic,
        nor for a prefill at an MFU that was given.
        """
        problem = self.problem
        calibration, context = problem.slice.chip.calibrated, round(problem.step_context)
        phases: tuple[Phase, Phase] = ("decode", "prefill") if problem.engine is None else ("tpot", "ttft")
        asked = (
            Question.of(phases[0], problem.model, problem.slice, context),
            Question.of(phases[1], problem.model, problem.prefill_server, problem.workload.prompt),
        )
        decode, prefill = (
            Evidence.without_runs("bound", "arithmetic at nominal peaks, as in the book")
            if problem.book
            else evidence_for(question).calibrated(calibration)
            for question in asked
        )
        if (mfu := problem.assumptions.mfu) is not None:
            prefill = Evidence.without_runs("estimate", str(asked[1]), f"a prefill at the MFU given, {mfu:.0%}")
        load, engine = self.under_load, problem.engine
        if engine is not None and engine.habits.estimate:
            decode, prefill = (
                Evidence.without_runs("estimate", str(question), engine.habits.estimate) for question in asked
            )
        if load is not None and self._queues:
            prefill = Evidence.without_runs(
                "estimate", str(asked[1]), "clients wait for a place, and no run says how long"
            )
        lower_s = self.lower_s if load is None else load.tpot_bound_s
        ttft_lower_s = max(_busy(self.prefill).values()) if load is None else load.ttft_bound_s
        return ServingEvidence(
            decode=decode,
            prefill=prefill,
            tpot_s=decode.interval_s(self.tpot_s, min(lower_s, self.tpot_s)),
            ttft_s=prefill.interval_s(self.ttft_s, ttft_lower_s),
        )

    @property
    def _queues(self) -> bool:
        """True if clients of the load wait for a place in a cache, or for servers that prefill."""
        load, times = self.problem.workload.load, self.under_load
        if load is None or times is None:
            return False
        return self.problem.mode == "disaggregated" or times.active < load.concurrency

    @property
    def _ring(self) -> bool:
        return self.prefill_on.joined_of is None and self.prefill_on.ways(SEQUENCE_AXES) > 1

    def _draft(self) -> PlannedDraft | None:
        problem, draft = self.problem, self.problem.draft
        if draft is None:
            return None
        times = round_times(problem, self.generate_on, float(self.batch))
        work = problem.workload
        new = float(work.new_prompt_tokens)
        prefill = problem.prefill(self.prefill_on, new, work.prompt - new, model=draft.model)
        return PlannedDraft(
            model=draft.model.name,
            config=draft.model,
            length=draft.length,
            acceptance=draft.acceptance,
            tokens_per_round=draft.tokens_per_round,
            guess_s=float(times.guess_s),
            check_s=float(times.check_s),
            round_s=float(times.round_s),
            prefill_s=float(prefill.expected_s),
            gain=self.step_s / self.token_s - 1,
        )

    @property
    def prefix_cache(self) -> PlannedPrefixCache:
        """The gain of the prefix cache, and its capacity."""
        problem = self.problem
        without = replace(problem, workload=replace(problem.workload, hit_rate=0.0))
        cold = float(without.prompt_s(self.prefill_on))
        memory = None if problem.host_bytes is None else problem.host_bytes * problem.prefill_server.hosts
        return PlannedPrefixCache(
            hit_rate=problem.workload.hit_rate,
            prefill_without_s=cold,
            read_s=float(problem.prefix_read_s(self.prefill_on)),
            speedup=cold / self.prefill_s,
            host_bytes=memory,
            prompts_held=None if memory is None else int(memory / problem.prompt_kv_bytes),
        )

    @classmethod
    def from_json(cls, data: object) -> ServingPlan:
        """The plan that a plan.json of kind 'serve' describes, priced anew. Raises RooftopError on any other file."""
        return read_record(ServingPlanDocument, data, "plan", amounts=True).plan


def _busy(ledger: Ledger) -> dict[Resource, float]:
    resources: tuple[Resource, ...] = ("hbm", "mxu", "ici", "dcn")
    return {name: float(ledger.total(name)) for name in resources}


def _bound(ledger: Ledger) -> Resource:
    busy = _busy(ledger)
    return max(busy, key=lambda name: busy[name])
