"""The documents of serving: a plan with its fleet, a front of servers, a simulation, and a measured server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from rooftop.arrays.rules import SEQUENCE_AXES, ways
from rooftop.core.ledger import Ledger, Row
from rooftop.core.quantities import counted, format_bytes, format_count, format_seconds
from rooftop.core.timelines import Lanes
from rooftop.hardware import GIVEN
from rooftop.plan.serving.fleet import FleetAnswerDocument, FleetDocument, FleetPoint, ServingFrontDocument
from rooftop.plan.serving.nearest import NearestServing
from rooftop.plan.serving.plan import DeviceMemory, PlannedGenerate
from rooftop.plan.serving.search import FrontPoint
from rooftop.present.document import (
    Bar,
    Bars,
    Chart,
    ChartAxis,
    ChartSeries,
    Document,
    Lines,
    ShownFigure,
    ShownVerdict,
    Table,
    TableColumn,
    columns,
)
from rooftop.present.documents.parts import (
    bound_text,
    busy,
    calibrated_by,
    evidence_figure,
    interval_text,
    layout_text,
    ledger_bars,
    ledger_lines,
    ledger_table,
    level_of,
    memory_bars,
    mesh_text,
    obstacles,
    price_text,
    prices_text,
    prose,
    reasons,
    rooflines,
    roofs_of_slice,
    sentence,
    stored_figures,
    version_note,
)
from rooftop.serve.client.metrics import ReplayMetrics, ServingBenchRecord
from rooftop.simulate.planned import step_lanes
from rooftop.simulate.serving.metrics import Goodput, SimulationReport, Spread, Utilisation

#: Points of a front that are printed; the data has all.
_POINTS = 12
#: Seconds that a request may be sent late before a note says so.
_LAG_S = 0.05


def serving_plan(plan: FleetAnswerDocument) -> Document:
    """A serving plan: the fleet, a step and its latencies, both ledgers, why, and the front of batches."""
    where, generate, prefill, fleet = plan.slice.name, plan.generate, plan.prefill, plan.recommendation
    memory = plan.memory.per_device
    subject = f"{plan.model.name} on {where}: batch {generate.batch}, {plan.mode}"
    subject += f"{calibrated_by(plan.slice)}{_too_long(plan)}"
    return Document(
        title=f"{plan.model.name} on {where}: a serving plan",
        verdict=ShownVerdict(
            subject=subject if fleet is None else f"{_recommended(plan)}: {fleet.best.name}{calibrated_by(plan.slice)}",
            no=_no(plan),
            details=(*_fleet(plan), *_other_engine(plan), *(() if fleet is None else (subject,)), *_layouts(plan)),
        ),
        figures=tuple(_figures(plan)),
        charts=(
            *_others(plan),
            *(obstacles(plan.obstacles, *_nearest(plan)) if plan.assumptions.engine is None else ()),
            _where(generate.ledger, "Where a generate step goes (ms on one device)", "Generate"),
            *_pictures(generate.ledger, where, "a generate step", ""),
            _where(prefill.ledger, "Where a prefill goes (ms on one device)", "Prefill"),
            *_pictures(prefill.ledger, prefill.slice, "a prefill", " of a prefill"),
            memory_bars({"planned": _classes(memory)}, memory.capacity),
            reasons(plan.reasons),
            front_chart(plan.pareto, generate),
            _front(plan.pareto, _front_title(plan)),
        ),
        sources=version_note(plan.rooftop_version),
    )


def serving_lanes(plan: FleetAnswerDocument) -> Iterator[Lanes]:
    """The timelines of a step of generation and of a prefill."""
    yield step_lanes(Ledger(plan.generate.ledger), title="planned: a step of generation")
    yield step_lanes(Ledger(plan.prefill.ledger), title="planned: a prefill")


def front(answer: ServingFrontDocument) -> Document:
    """A front of servers."""
    return Document(
        title=f"{answer.model}: latency and throughput of generation",
        verdict=ShownVerdict(subject=f"{answer.model}: the front of batches over servers"),
        charts=(front_chart(answer.pareto), _front(answer.pareto, "Nothing generates both faster and cheaper")),
    )


def _classes(memory: DeviceMemory) -> dict[str, float]:
    """Bytes of a device by class."""
    return {
        "weights": memory.weights, "scales": memory.scales, "kv": memory.kv, "activations": memory.activations
    }  # fmt: skip


def _no(plan: FleetAnswerDocument) -> str:
    """The reason why the plan cannot be, with the nearest that can; empty if it can."""
    memory = plan.memory.per_device
    if not plan.memory.fits:
        reason = f"does not fit: {format_bytes(memory.total)} of {format_bytes(memory.capacity)} a device"
    elif missed := list(_missed(plan)):
        return f"misses {' and '.join(missed)}; nearest is with batch {plan.generate.batch}"
    elif _is_refused(plan):
        reason = f"not executable: {plan.obstacles[0]}"
    else:
        return ""
    near = [_near(plan, item) for item in plan.nearest]
    return reason + (f"; nearest: {', or '.join(near)}" if near else "; no slice of this chip has a plan that runs")


def _is_refused(plan: FleetAnswerDocument) -> bool:
    """True if our engine has to run the plan and cannot: not of another engine's, nor of the book's arithmetic."""
    return bool(plan.obstacles) and plan.assumptions.bounds != "book" and plan.assumptions.engine is None


def _too_long(plan: FleetAnswerDocument) -> str:
    """A warning if the front has contexts that are longer than those for which the model was made."""
    longest = plan.model.config.max_seq_len
    most = max((point.context for point in plan.pareto), default=0)
    if most <= max(longest, plan.generate.context):
        return ""
    return f"; contexts of {most:,.0f}, the model was made for {longest:,}"


def _missed(plan: FleetAnswerDocument) -> Iterator[str]:
    """Targets that the plan of one slice misses, with what it reaches."""
    if plan.recommendation is not None:
        return
    work = plan.workload
    for name, target, reached in (("TTFT", work.ttft_s, plan.ttft_s), ("TPOT", work.tpot_s, plan.tpot_s)):
        if target is not None and reached > target:
            yield f"its {name} of {format_seconds(target)} with {format_seconds(reached)}"


def _weights(dtype: str, group: int | None) -> str:
    """The format of weights: 'int4 in groups of 32'."""
    return dtype if group is None else f"{dtype} in groups of {group}"


def _near(plan: FleetAnswerDocument, near: NearestServing) -> str:
    """The nearest plan, by its batch and all else in which it differs from the one asked for."""
    work, dtypes = plan.workload, plan.dtypes
    parts = [f"batch {near.batch} on {near.slice}"]
    if near.prompt != work.prompt or near.generate != work.generate:
        parts.append(f"{near.prompt} + {near.generate} tokens")
    if (near.weights, near.weight_group) != (dtypes.weights, dtypes.weight_group):
        parts.append(f"weights in {_weights(near.weights, near.weight_group)}")
    if near.kv != dtypes.kv:
        parts.append(f"{near.kv} KV")
    if near.matmul != dtypes.flops:
        parts.append(f"{near.matmul} matmuls")
    if near.mode != plan.mode:
        parts.append(near.mode)
    return " with ".join((parts[0], " and ".join(parts[1:]))) if parts[1:] else parts[0]


def _nearest(plan: FleetAnswerDocument) -> Iterator[str]:
    """A line on each of the nearest plans that run."""
    for near in plan.nearest:
        mesh = ",".join(f"{name}={size}" for name, size in near.mesh.items())
        latency = format_seconds(near.tpot_s)
        yield f"nearest that runs: {_near(plan, near)}, as {mesh or 'one device'}: TPOT {latency}"


def _recommended(plan: FleetAnswerDocument) -> str:
    return "Cheapest, but no program runs it" if _is_refused(plan) else "Recommended"


def _other_engine(plan: FleetAnswerDocument) -> Iterator[str]:
    """The engine that runs the plan, if it is not ours."""
    if plan.assumptions.engine is not None:
        yield sentence(plan.obstacles[0])
        yield f"run as: {plan.assumptions.command}"


def _fleet(plan: FleetAnswerDocument) -> Iterator[str]:
    """The chips, dollars and latencies of the recommended fleet."""
    if plan.recommendation is None:
        return
    best = plan.recommendation.best
    at = "at the given price" if best.price_source == GIVEN else "at list prices"
    money = (
        f", no list price: --price {best.chip}=USD"
        if best.usd_per_hour is None
        else f", ${best.usd_per_hour:,.2f} an hour {at}"
    )
    per_request = " for each request a second" if plan.workload.requests_per_second is None else ""
    yield (
        f"  {counted(best.chips, 'chip')}{money}{per_request}; TTFT {format_seconds(best.ttft_s)} with its "
        f"queue, TPOT {format_seconds(best.tpot_s)}"
    )


def _layouts(plan: FleetAnswerDocument) -> Iterator[str]:
    """The layouts of generation and prefill on their slices."""
    split = ""
    if ways(plan.mesh.axes, *SEQUENCE_AXES) > 1:
        split = f"; context splits the cache's {'sequences' if plan.kv_split == 'batch' else 'tokens'}"
    yield f"generate as {layout_text(plan.slice.name, plan.mesh)}{split}"
    where = plan.prefill.slice
    yield f"prefill on {where} as {layout_text(where, plan.prefill.mesh)}"


def _others(plan: FleetAnswerDocument) -> tuple[Chart, ...]:
    """The recommended fleet next to the best of each other chip, and of each mode."""
    fleet = plan.recommendation
    if fleet is None or not (fleet.others or fleet.left_out):
        return ()
    best = fleet.best
    seen = {(best.chip, best.mode)}
    others: list[FleetDocument] = []
    for other in fleet.others:
        # Fleets of one chip and mode differ in their number formats: the best of them stands for all.
        if (kind := (other.chip, other.mode)) not in seen:
            seen.add(kind)
            others.append(other)

    def amount(one: FleetDocument) -> float | None:
        return one.chips if fleet.objective == "chips" else one.usd_per_hour

    def row(one: FleetDocument) -> tuple[str, ...]:
        usd, prices, its, least = one.usd_per_hour, one.token_prices, amount(one), amount(best)
        return (
            one.name.rpartition(", batch")[0],
            f"{one.chips:,.4g}",
            f"no price (--price {one.chip}=USD)" if usd is None else f"{usd:,.2f}",
            "" if one is best or its is None or least is None else f"{its / least - 1:+.0%}",
            "" if prices is None else f"{prices.input:.3g}",
            "" if prices is None else f"{prices.output:.3g}",
            format_seconds(one.ttft_s),
            format_seconds(one.tpot_s),
            str(one.batch),
            counted(one.evidence_runs, "run") if one.evidence_runs else "none",
            "" if one.executable else "no program",
        )

    names = ("fleet", "chips", "$/h", "more", "$/M in", "$/M out", "TTFT", "TPOT", "batch", "evidence", "")
    rows = [row(best), *map(row, others)]
    rows += [(f"{lost.chip}: {lost.why}", *[""] * 10) for lost in fleet.left_out]
    shown = [at for at, name in enumerate(names) if name == "fleet" or any(line[at] for line in rows)]
    drops = {"batch": 4, "chips": 3, "$/M in": 2}
    cited = prices_text((best, *others))
    first = {"cost": "cheapest", "chips": "fewest chips"}[fleet.objective]
    return (
        Table(
            title=f"Fleets compared: {first} first",
            section="Fleets",
            about="The best of each chip and mode. Evidence: published runs of decoding; without any, estimates."
            + (f" Dollars a chip-hour: {cited}." if cited else ""),
            columns=tuple(
                TableColumn(
                    name,
                    "text" if name in ("fleet", "evidence", "") else "number",
                    wrap=name == "fleet",
                    drop=drops.get(name, 0),
                )
                for name in (names[at] for at in shown)
            ),
            rows=tuple(tuple(line[at] for at in shown) for line in rows),
        ),
    )


def _figures(plan: FleetAnswerDocument) -> Iterator[ShownFigure]:
    generate, memory, draft, evidence = plan.generate, plan.memory, plan.draft, plan.evidence
    decoding, prefilling = (
        ("estimate", "estimate") if evidence is None else (evidence.decode.level, evidence.prefill.level)
    )
    tpot_s, ttft_s = (None, None) if evidence is None else (evidence.tpot_s, evidence.ttft_s)
    step, parts = generate.step_s, generate.breakdown
    decode, prefill = level_of(decoding), level_of(prefilling)
    overlapped = f"{format_seconds(step.lower_s)} if everything overlaps"
    if decode == "bound":
        overlapped = "a bound"
    yield ShownFigure("step_s", "step", step.expected_s, "s", decode,
        note=f"{overlapped} ({bound_text(generate.bound)}); at peak rates: "
        f"weights {format_seconds(parts.weights_s)}, KV {format_seconds(parts.kv_s)}, "
        f"FLOPs {format_seconds(parts.flops_s)}, ICI {format_seconds(parts.ici_s)}")  # fmt: skip
    if draft is not None:
        yield ShownFigure("speculation", "speculation", draft.gain, "%", "expected",
            shown=f"{draft.gain:+.0%} tok/s",
            note=f"{draft.tokens_per_round:.2f} tokens a round: {draft.length} guesses of {draft.model} in "
            f"{format_seconds(draft.guess_s)}, checked in {format_seconds(draft.check_s)}")  # fmt: skip
    prefills = ", with the prefills between" if plan.mode == "interleaved" else ""
    yield ShownFigure("tokens_per_s", "rate", generate.tokens_per_s, "tok/s", decode,
        note=f"{generate.tokens_per_s_per_chip:.4g} tok/s per chip{prefills}")  # fmt: skip
    both = "" if draft is None else " by both models"
    yield ShownFigure("ttft_s", "TTFT", plan.ttft_s, "s", prefill, formula=plan.definitions.ttft_s,
        note=f"{interval_text(prefilling, ttft_s)}; "
        f"{_clients(plan) or f'one prefill of {plan.workload.prompt} tokens{both}, no queue'}")  # fmt: skip
    why = "with the prefills of others between" if plan.mode == "interleaved" else "with the KV's transfer"
    step_text = "a step" if plan.assumptions.bounds == "book" else f"a step, {why}"
    step_text = _clients(plan) or step_text
    if plan.tpot_together_s is not None and generate.batch > 1:
        step_text += f"; {format_seconds(plan.tpot_together_s)} if all answers start and end together"
    yield ShownFigure("tpot_s", "TPOT", plan.tpot_s, "s", decode,
        note=f"{interval_text(decoding, tpot_s)}; {step_text}")  # fmt: skip
    if evidence is not None:
        yield evidence_figure(evidence.decode)
        yield evidence_figure(evidence.prefill, "ttft_evidence")
    classes = ", ".join(
        f"{name} {format_bytes(size)}"
        for name, size in (
            ("weights", memory.weights),
            ("scales", memory.scales),
            ("kv", memory.kv),
            ("activations", memory.activations),
        )
    )
    yield ShownFigure("memory_bytes", "memory", memory.total, "B", "expected",
        note=f"of {format_bytes(memory.capacity)}: {classes}")  # fmt: skip
    weights = _weights(plan.dtypes.weights, plan.dtypes.weight_group)
    weights += ", all else bf16" if plan.dtypes.only_experts else ""
    yield from stored_figures(plan.model.stored, f"planned and served as {weights}")
    yield from _batches(plan)
    transfer = plan.kv_transfer
    yield ShownFigure("prefill_per_generate", "prefill", plan.prefill_per_generate, level="expected",
        shown=counted(float(f"{plan.prefill_per_generate:.3g}"), "server"),
        note=f"for each generate server; a prompt's KV of {format_bytes(transfer.bytes)} moves in "
        f"{format_seconds(transfer.ici_s)} over ICI, {format_seconds(transfer.dcn_s)} over DCN")  # fmt: skip
    yield from _cost(plan, prefills)
    cache = plan.prefix_cache
    if cache.hit_rate:
        host_text = "" if cache.prompts_held is None else f"; host memory holds {cache.prompts_held:,} prompts' KV"
        yield ShownFigure("prefix_cache", "prefix cache", cache.speedup, level="expected",
            shown=f"{cache.speedup:.2f}x",
            note=f"faster prefill at {cache.hit_rate:.0%} hits{host_text}")  # fmt: skip


def _clients(plan: FleetAnswerDocument) -> str:
    """The clients whose mean latencies these are; empty without any."""
    load, times = plan.workload.load, plan.under_load
    if load is None or times is None:
        return ""
    text = f"mean of {counted(load.concurrency, 'client')}, each of which waits for its answer"
    waiting = load.concurrency - times.active * load.replicas
    return f"{text}; {times.active:,.0f} have a place at once" if plan.mode == "interleaved" and waiting > 0 else text


def _cost(plan: FleetAnswerDocument, prefills: str) -> Iterator[ShownFigure]:
    """Dollars per million tokens: of the fleet at its rate, or else at full load."""
    into, out = plan.cost_per_million_tokens.input, plan.cost_per_million_tokens.output
    if into is None or out is None:
        return
    prices = None if plan.recommendation is None else plan.recommendation.best.token_prices
    load = "at full load"
    of_output, of_input = (", prefills included", " if it only prefills") if prefills else ("", "")
    if prices is not None:
        load = f"at {plan.workload.requests_per_second:g} requests/s; at full load "
        load += f"${prices.full_load_output:.3g} and ${prices.full_load_input:.3g}"
        into, out, of_output, of_input = prices.input, prices.output, "", ""
    cited = ""
    if plan.slice.price_source and plan.slice.price_usd_per_hour is not None:
        cited = f"; {price_text(plan.slice.price_usd_per_hour, plan.slice.price_source)}"
    decode = "estimate" if plan.evidence is None else plan.evidence.decode.level
    yield ShownFigure(
        "usd_per_million_tokens",
        "cost",
        out,
        level=level_of(decode),
        shown=f"${out:.3g}",
        note=f"per million output tokens{of_output}, ${into:.3g} per million input{of_input}, {load}{cited}",
    )


def _batches(plan: FleetAnswerDocument) -> Iterator[ShownFigure]:
    """The batch, how it was chosen, and the smallest and the largest of the search next to it."""
    rules = {
        "knee": "the knee: the largest whose last doubling raised tokens/s by more than TPOT",
        "target": f"the most tokens/s within TPOT {format_seconds(plan.workload.tpot_s or 0.0)}",
    }
    batch = plan.generate.batch
    if (rule := rules.get(plan.batch_rule)) is not None and plan.memory.fits:
        beside = [
            f"batch {point.batch} has a TPOT of {format_seconds(point.tpot_s)} and "
            f"{point.tokens_per_s_per_chip:.4g} tok/s a chip"
            for point in (plan.smallest_batch, plan.largest_batch)
            if point is not None and point.batch != batch
        ]
        yield ShownFigure("batch", "batch", batch, shown=str(batch), note="; ".join((rule, *beside)))
    smallest = plan.smallest_slice
    holds = "no slice holds this batch" if smallest is None else f"smallest slice for this batch: {smallest}"
    yield ShownFigure("max_batch", "largest batch", plan.max_batch, shown=str(plan.max_batch),
        note=f"on this mesh; {holds}")  # fmt: skip


def _front_title(plan: FleetAnswerDocument) -> str:
    """The title of the front, with a warning on contexts for which the model was not made."""
    reason = next(item for item in plan.reasons if item.source == "the model's config")
    if all(point.context <= reason.value for point in plan.pareto):
        return "Batches worth having"
    return f"Batches worth having (the model was made for contexts up to {reason.value:,.0f})"


def _where(ledger: tuple[Row, ...], title: str, section: str) -> Table:
    """Milliseconds by scope."""
    priced = Ledger(ledger)
    whole = float(priced.expected_s)
    rows = []
    for (scope, _), members in priced.by_key().items():
        seconds = busy(members)
        bound = max(seconds, key=lambda name: seconds[name])
        expected = sum(float(row.count * row.expected_s) for row in members)
        exposed = sum(float(row.count * moved.exposed_s) for row in members for moved in row.collectives)
        rows.append(
            (
                scope,
                f"{expected * 1e3:.3f}",
                f"{expected / whole:.1%}",
                f"{exposed * 1e3:.3f}" if exposed else "",
                f"{seconds[bound] * 1e3:.3f}",
                bound,
            )
        )
    return Table(
        title=title,
        section=section,
        columns=(
            TableColumn("scope", "text"),
            *(TableColumn(name) for name in ("expected", "share", "exposed")),
            TableColumn("at peak", drop=1),
            TableColumn("bound", "text"),
        ),
        rows=tuple(rows),
    )


def _pictures(ledger: tuple[Row, ...], where: str, what: str, of: str) -> tuple[Chart, ...]:
    lines = ledger_lines({"planned": ledger})
    bars = ledger_bars(ledger, title="Where the step goes" if not of else "Where a prefill goes")
    table = ledger_table(lines, f"The ledger{of}", about=f"Per device and {what}, counts applied.")
    return (bars, table, *rooflines(lines, roofs_of_slice(where), f"Roofline of {what}"))


def front_chart(points: Sequence[FrontPoint], chosen: PlannedGenerate | None = None) -> Lines:
    """Tokens/s per chip over the seconds of a step, a line for each context, or for each slice and its dtypes."""
    formats = {(point.weights, point.kv) for point in points if isinstance(point, FleetPoint)}
    lines: dict[str, list[FrontPoint]] = {}
    for point in points:
        name = f"context {point.context:,.0f}"
        if isinstance(point, FleetPoint):
            name = point.slice + (f", {point.weights}, KV {point.kv}" if len(formats) > 1 else "")
        lines.setdefault(name, []).append(point)
    series = [
        ChartSeries(
            name,
            tuple((float(point.step_s), float(point.tokens_per_s_per_chip)) for point in members),
            "marked",
            names=tuple(f"batch {point.batch}" for point in members),
            notes=tuple(_front_note(point) for point in members),
        )
        for name, members in lines.items()
    ]
    if chosen is not None:
        step_s, rate = chosen.step_s.expected_s, chosen.tokens_per_s_per_chip
        note = f"step: {format_seconds(step_s)}\ntokens/s per chip: {format_count(rate)}"
        series.append(
            ChartSeries("this plan", ((step_s, rate),), "point", names=(f"batch {chosen.batch}",), notes=(note,))
        )  # fmt: skip
    return Lines(
        title="Latency against throughput",
        section="Pareto",
        about="Tokens/s per chip over the time of a step. Each point is a batch on its best mesh.",
        x=ChartAxis("step", "s", "log"),
        y=ChartAxis("tokens/s per chip"),
        series=tuple(series),
    )


def _front_note(point: FrontPoint) -> str:
    texts = [
        f"step: {format_seconds(point.step_s)}",
        f"tokens/s per chip: {format_count(point.tokens_per_s_per_chip)}",
    ]
    if point.usd_per_million_tokens is not None:
        texts.append(f"a million tokens: ${point.usd_per_million_tokens:.2f}")
    texts.append(f"mesh: {mesh_text(point.mesh)}")
    return "\n".join(texts)


def _front(points: Sequence[FrontPoint], title: str) -> Table:
    many = bool(points) and isinstance(points[0], FleetPoint)
    names = (*(("slice", "weights", "kv") if many else ()), "context", "batch", "step", "tok/s per chip", "$/M tokens")
    stride = 1 if many else max(1, len(points) // _POINTS)
    rows = []
    for point in points[::stride]:
        cost = point.usd_per_million_tokens
        rows.append(
            (
                *((point.slice, point.weights, point.kv) if isinstance(point, FleetPoint) else ()),
                f"{point.context:,.0f}",
                str(point.batch),
                format_seconds(point.step_s),
                f"{point.tokens_per_s_per_chip:.4g}",
                "" if cost is None else f"{cost:.3g}",
            )
        )
    kinds = ("slice", "weights", "kv")
    return Table(
        title=title,
        columns=tuple(TableColumn(name, "text" if name in kinds else "number") for name in names),
        rows=tuple(rows),
    )


# ---- simulated and measured ------------------------------------------------------------------------------------------


def simulation(report: SimulationReport) -> Document:
    """A simulation of requests to the servers of a plan."""
    requests, tokens = report.requests, report.tokens
    return Document(
        title=f"{report.plan.model}: a simulation",
        verdict=ShownVerdict(
            subject=_simulated_servers(report),
            says=f"{requests.finished:,} of {requests.offered:,} requests finished, "
            f"{format_count(tokens.generated_per_second, 'tok/s')}.",
            details=report.notes,
        ),
        figures=tuple(_simulated_figures(report)),
        charts=(_simulated_latencies(report), _server_table(report), _busy_bars(report)),
        sources=version_note(report.rooftop_version),
    )


def _simulated_servers(report: SimulationReport) -> str:
    plan, deployment = report.plan, report.deployment
    servers = f"{deployment.replicas} x {plan.slice}"
    if deployment.prefill_servers:
        servers = f"{deployment.prefill_servers} x {plan.prefill_slice} for prefill and {servers} to generate"
    text = f"{plan.model} on {servers}: {deployment.batching}"
    if plan.calibrated_by:
        text += f", calibrated by {plan.calibrated_by}"
    if deployment.chunk_tokens is not None:
        text += f", prefill in chunks of {deployment.chunk_tokens} tokens a step"
    text += f", batches up to {deployment.max_batch}"
    longest, most = report.trace.longest_tokens, plan.max_seq_len
    return text if longest <= most else f"{text}; requests of {longest:,} tokens, the model was made for {most:,}"


def _simulated_figures(report: SimulationReport) -> Iterator[ShownFigure]:
    requests, tokens, goodput = report.requests, report.tokens, report.goodput
    note = f"{requests.per_second:.4g} a second over {format_seconds(report.duration_s)}"
    if requests.refused:
        note += f"; {requests.refused:,} refused, such as: {requests.refused_why}"
    yield ShownFigure("finished", "requests", requests.finished, shown=f"{requests.finished:,}", note=note,
        level="simulated")  # fmt: skip
    yield ShownFigure("generated", "generated", tokens.generated, "tok", "simulated",
        note=f"{tokens.generated_per_second:,.0f} tok/s in all")  # fmt: skip
    share = tokens.cached / tokens.prompt if tokens.prompt else 0.0
    note = f"{share:.1%} of the prompts' tokens were cached" if report.deployment.prefix_cache else ""
    yield ShownFigure("prefilled", "prefilled", tokens.prefilled, "tok", "simulated", note=note)
    if report.preemptions:
        yield ShownFigure("preemptions", "preemptions", report.preemptions, shown=f"{report.preemptions:,}",
            level="simulated", note=f"{format_count(tokens.recomputed, 'tok')} computed again")  # fmt: skip
    targets = _targets(goodput)
    if targets:
        yield ShownFigure("goodput", "goodput", goodput.requests_per_second, level="simulated",
            shown=f"{goodput.requests_per_second:.4g} a second",
            note=f"{goodput.share:.1%} of the requests within {targets}")  # fmt: skip


def _simulated_latencies(report: SimulationReport) -> Table:
    planned = {"TTFT": report.plan.ttft_s, "TPOT": report.plan.tpot_s}
    rows = [
        (name, format_seconds(planned[name]) if name in planned else "", *_spread(spread))
        for name, spread in _latencies(report).items()
        if spread is not None
    ]
    names = ("", "planned", *_PERCENTILES)
    return Table(title="What users feel", section="Latencies", columns=columns(*names), rows=tuple(rows))


class _Latencies(Protocol):
    """Latencies of requests, simulated or measured."""

    @property
    def ttft_s(self) -> Spread | None:
        """Time to first token."""

    @property
    def tpot_s(self) -> Spread | None:
        """Time per output token."""

    @property
    def itl_s(self) -> Spread | None:
        """Time between two tokens."""

    @property
    def e2e_s(self) -> Spread | None:
        """Time to last token."""


def _latencies(figures: _Latencies) -> dict[str, Spread | None]:
    """Latencies by their labels. Clients do not measure the worst ITL of each request."""
    worst = {"worst ITL": figures.worst_itl_s} if isinstance(figures, SimulationReport) else {}
    return {
        "TTFT": figures.ttft_s, "TPOT": figures.tpot_s, "ITL": figures.itl_s, **worst, "end to end": figures.e2e_s
    }  # fmt: skip


_PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")


def _spread(spread: Spread) -> tuple[str, ...]:
    """The mean, the percentiles and the maximum."""
    return tuple(map(format_seconds, (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.max)))


def _mean(values: Iterable[float]) -> float:
    every = list(values)
    return sum(every) / len(every)


def _shares(every: Sequence[Utilisation]) -> dict[str, float]:
    """Means of the shares of time that servers spend on steps of each kind."""
    return {
        "busy": _mean(one.busy for one in every), "prefill": _mean(one.prefill for one in every),
        "generate": _mean(one.generate for one in every), "mixed": _mean(one.mixed for one in every),
    }  # fmt: skip


def _server_table(report: SimulationReport) -> Table:
    """Servers of a role together: means over them, and the most of any."""
    rows = []
    for role in dict.fromkeys(server.role for server in report.servers):
        servers = [server for server in report.servers if server.role == role]
        shares = _shares([server.utilisation for server in servers])
        rows.append(
            (
                f"{len(servers)}" + ("" if role == "both" else f" {role}"),
                *(f"{share:.1%}" if share else "" for share in shares.values()),
                "" if role == "prefill" else f"{_mean(server.mean_batch for server in servers):.1f}",
                f"{_mean(server.kv.mean_occupancy for server in servers):.1%}",
                f"{max(server.kv.max_occupancy for server in servers):.1%}",
                f"{max(server.max_waiting for server in servers)}",
            )
        )
    names = ("servers", "busy", "prefill", "generate", "mixed", "batch", "KV used", "KV most", "queue most")
    return Table(
        title="What servers do (means of a role)", section="Servers", columns=columns(*names), rows=tuple(rows)
    )


def _busy_bars(report: SimulationReport) -> Bars:
    """The share of time of each role that its servers spend on what."""
    bars = []
    for role in dict.fromkeys(server.role for server in report.servers):
        shares = _shares([server.utilisation for server in report.servers if server.role == role])
        parts = tuple((name, share) for name, share in shares.items() if name != "busy")
        bars.append(Bar("servers" if role == "both" else role, parts))
    return Bars(title="Time of a server", about="Means over the servers of a role.", unit="%", bars=tuple(bars))


def _targets(goodput: Goodput) -> str:
    """The targets of goodput in words, '' without any."""
    targets = (("TTFT", goodput.ttft_target_s), ("TPOT", goodput.tpot_target_s))
    return " and ".join(f"{name} {format_seconds(target)}" for name, target in targets if target is not None)


def server(answer: ServingBenchRecord) -> Document:
    """The latencies that clients of a server saw, next to those that the simulator predicts."""
    return Document(
        title=f"{answer.model} at {answer.url}",
        verdict=ShownVerdict(
            subject=f"{answer.model} at {answer.url}, rooftop {answer.rooftop_version}, {answer.date}",
            details=tuple(_measured_requests(answer.measured, answer.trace.clients)),
        ),
        charts=(_measured_latencies(answer), prose("\n".join(_measured_notes(answer)))),
    )


def _measured_requests(measured: ReplayMetrics, clients: int | None) -> Iterator[str]:
    requests, tokens, goodput = measured.requests, measured.tokens, measured.goodput
    yield (
        f"{requests.finished:,} of {requests.offered:,} requests"
        + ("" if clients is None else f" of {clients:,} clients")
        + f" in {format_seconds(measured.duration_s)}, "
        f"{requests.per_second:.4g} a second; {format_count(tokens.generated, 'tok')} generated, "
        f"{tokens.generated_per_second:,.0f} tok/s"
    )
    if requests.finished < requests.offered:
        yield f"{requests.refused:,} were refused and {requests.failed:,} failed, such as: {requests.why}"
    targets = _targets(goodput)
    if targets:
        rate = f"{goodput.requests_per_second:.4g} a second"
        yield f"goodput: {rate}, {goodput.share:.1%} of the requests within {targets}"


def _measured_latencies(answer: ServingBenchRecord) -> Chart:
    predicted = {} if answer.predicted is None else _latencies(answer.predicted)
    rows = []
    for name, measured in _latencies(answer.measured).items():
        sides = {"measured": measured, "predicted": predicted.get(name)}
        for at, (kind, spread) in enumerate(sides.items()):
            if spread is not None:
                rows.append(("" if at else name, kind, *_spread(spread)))
    return Table(title="", columns=columns("", "", *_PERCENTILES, text=2), rows=tuple(rows))


def _measured_notes(answer: ServingBenchRecord) -> Iterator[str]:
    how = "predicted: simulated with" if answer.predicted is not None else "no prediction:"
    yield f"{how} {answer.predicted_by}"
    if (outside := answer.outside_engine_ttft_s) is not None:
        yield f"TTFT outside the engine (HTTP, the client), which is not simulated: {format_seconds(outside)}, mean"
    if (lag := answer.measured.worst_lag_s) > _LAG_S:
        yield f"The client fell behind by up to {format_seconds(lag)}: it is too slow for this."
