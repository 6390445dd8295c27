"""The document of a training plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from rooftop.arrays.rules import COLUMN_AXES, STAGE_AXES, ways
from rooftop.core.ledger import Ledger, Row
from rooftop.core.quantities import counted, format_bytes, format_count, format_seconds
from rooftop.core.timelines import Lanes
from rooftop.frameworks.answers import FrameworkOffer, PricedRecipe, StatedConfiguration
from rooftop.frameworks.framework import FRAMEWORKS, PlannedFramework
from rooftop.frameworks.remat import policy_text
from rooftop.frameworks.words.configurations import short_words
from rooftop.frameworks.words.table import FrameworkConfiguration
from rooftop.frameworks.xla import pinned_release
from rooftop.plan.training.answer import OtherBatch, TrainingAnswerDocument
from rooftop.plan.training.comparison import ComparisonDocument, OfferDocument
from rooftop.plan.training.compiled import CompiledPlans
from rooftop.plan.training.plan import Padding, PlannedAdapters, PlannedMemory, PlanSummary
from rooftop.plan.training.workload import Workload
from rooftop.present.document import (
    Chart,
    ChartAxis,
    ChartSeries,
    Document,
    Item,
    Items,
    Level,
    Lines,
    Listing,
    ShownFigure,
    ShownVerdict,
    Table,
    TableColumn,
)
from rooftop.present.documents.parts import (
    bound_text,
    busy,
    calibrated_by,
    evidence_figure,
    exposed_text,
    interval_text,
    layout_text,
    ledger_bars,
    ledger_lines,
    ledger_table,
    level_of,
    memory_bars,
    mesh_text,
    microbatches_text,
    milliseconds,
    obstacles,
    pipeline_text,
    price_text,
    prices_text,
    reasons,
    rooflines,
    roofs_of_slice,
    sentence,
    stored_figures,
    version_note,
)
from rooftop.simulate.planned import step_lanes

_PHASES = ("forward", "recompute", "backward", "update")


def training_plan(plan: TrainingAnswerDocument) -> Document:
    """A training plan: the step and its money, where the step goes, why, alternatives, what would change it."""
    where, memory, dtypes = plan.slice.name, plan.memory, plan.dtypes
    lines = ledger_lines({"planned": plan.ledger})
    layout, classes = layout_text(where, plan.mesh), _classes(memory)
    remat = policy_text(plan.framework.name, plan.remat.name)
    return Document(
        title=f"{plan.model.name} on {where}: a training plan",
        verdict=ShownVerdict(
            subject=f"{plan.model.name} on {where}: {mesh_text(plan.mesh.axes)}"
            + calibrated_by(plan.slice)
            + _too_long(plan),
            no=_refusal(plan),
            details=(
                *framework_texts(plan.framework),
                *_adapters(plan.adapters),
                *_best_known(plan),
                *_stated(plan.stated),
                *recipe_texts(plan.recipe, plan.stated),
                f"laid out as {layout}; remat {remat}; {microbatches_text(plan.microbatches)}"
                + pipeline_text(plan.summary.schedule, plan.schedule.chunks)
                + (
                    "; collective matmuls over tensor"
                    if plan.collective_matmuls and ways(plan.mesh.axes, *COLUMN_AXES) > 1
                    else ""
                )
                + ("; whole experts over tensor" if plan.experts_over_tensor else "")
                + ("" if dtypes.matmul == dtypes.compute else f"; {dtypes.matmul} matmuls in the layers"),
                *_confirmed(plan.compiled),
                *_tight(plan),
                *_rounded(plan.workload),
                *_batch(plan),
            ),
        ),
        figures=tuple(_figures(plan, classes)),
        charts=(
            *_comparison(plan),
            *_frameworks(plan),
            *_compiled(plan.compiled),
            *obstacles(plan.obstacles, *(_nearest(plan) if memory.fits else ())),
            _where(plan.ledger, plan.step.expected_s),
            ledger_bars(plan.ledger),
            ledger_table(lines, "The ledger", about="Per device and step, counts applied."),
            *rooflines(lines, roofs_of_slice(where, dtype=dtypes.matmul), section="Roofline"),
            memory_bars({"planned": classes}, memory.capacity),
            reasons(plan.reasons),
            *_alternatives(plan),
            *_unused(plan.stated),
            *_changes(plan),
            *configuration_listings(plan.configuration),
        ),
        sources=version_note(plan.rooftop_version),
    )


def framework_texts(framework: PlannedFramework) -> Iterator[str]:
    """The framework that the plan is of, and the settings that are priced; of rooftop a release that is not pinned."""
    if framework.name == FRAMEWORKS[0] and framework.release not in (None, pinned_release()):
        yield f"planned for libtpu {framework.release}"
    if framework.name != FRAMEWORKS[0]:
        release = "" if framework.release is None else f" {framework.release}"
        settings = ", ".join(f"{name} {value}" for name, value in framework.applied.items())
        yield f"planned for {framework.title}{release}" + (f": {settings}" if settings else "")


def _adapters(adapters: PlannedAdapters | None) -> Iterator[str]:
    """The adapters that are trained, and the format of what is frozen."""
    if adapters is not None:
        yield (
            f"LoRA of rank {adapters.rank} on {', '.join(adapters.targets)}: {format_count(adapters.parameters)} "
            f"parameters trained; all others frozen, matrices of layers in {adapters.base}"
        )


def _best_known(plan: TrainingAnswerDocument) -> Iterator[str]:
    """The best plan of another framework, next to rooftop's own."""
    if len(plan.frameworks) == 1 and (offer := plan.frameworks[0]).name != plan.framework.name:
        interval = "" if offer.interval_s is None else f", {_span(offer.interval_s)}"
        words = short_words(offer.name, offer.mesh, offer.chunks)
        yield f"{offer.title} would take {format_seconds(offer.step_s)}{interval} ({words}); rooftop's own program " + (
            format_seconds(plan.step.expected_s)
        )


def _frameworks(plan: TrainingAnswerDocument) -> Iterator[Chart]:
    """The best plan of each framework, the recommended one first."""
    if len(plan.frameworks) < 2:
        return
    rows = [
        (
            f"{offer.title} {offer.release or ''}".strip(),
            format_seconds(offer.step_s) if offer.step_s else "",
            "" if offer.interval_s is None else _span(offer.interval_s),
            str(offer.runs or ""),
            f"{offer.mfu:.1%}" if offer.mfu else "",
            format_bytes(offer.memory_bytes) if offer.memory_bytes else "",
            "" if offer.days is None else f"{offer.days:.1f}",
            "" if offer.cost_usd is None else format_count(offer.cost_usd),
            f"not run: {offer.obstacle}" if offer.obstacle else _strategy(offer),
        )
        for offer in plan.frameworks
    ]
    names = ("framework", "step", "90%", "runs", "MFU", "memory", "days", "dollars", "strategy")
    shown = [at for at, name in enumerate(names) if name not in ("days", "dollars") or any(row[at] for row in rows)]
    drops = {"runs": 2, "MFU": 1}
    yield Table(
        title="Frameworks compared, the likeliest to be fastest first",
        section="Frameworks",
        about="The best plan that each program runs, by the middle of its interval (90%); runs: published runs that it "
        "rests on.",
        columns=tuple(
            TableColumn(name, "text" if name in ("framework", "strategy") else "number", wrap=name == "strategy",
                        drop=drops.get(name, 0))
            for name in (names[at] for at in shown)
        ),
        rows=tuple(tuple(row[at] for at in shown) for row in rows),
    )  # fmt: skip


def _span(interval_s: tuple[float, float]) -> str:
    low, high = interval_s
    return f"{format_seconds(low)} to {format_seconds(high)}"


def _strategy(offer: FrameworkOffer) -> str:
    return f"{short_words(offer.name, offer.mesh, offer.chunks)}; remat {policy_text(offer.name, offer.remat)}"


def _stated(stated: StatedConfiguration | None) -> Iterator[str]:
    """The configuration that the plan is of, and settings whose price is not known."""
    if stated is None:
        return
    yield f"as {stated.file} configures it" + "".join(f"; {note}" for note in stated.notes)
    if stated.unpriced:
        yield f"without a price: {', '.join(stated.unpriced)}"


def recipe_texts(recipe: PricedRecipe | None, stated: StatedConfiguration | None = None) -> Iterator[str]:
    """The kind of recipe that a plan is priced as, and the published one that it equals, unless it is ``stated``."""
    if recipe is None:
        return
    named = recipe.name is not None and (stated is None or recipe.name != stated.file)
    kind = f"as recipe {recipe.name} of {recipe.publisher}" if named else f"priced as a {recipe.kind} recipe"
    kind += f", a {recipe.kind}" if named else ""
    unpriced = f"; without a price: {', '.join(recipe.unpriced)}" if recipe.unpriced else ""
    yield f"{kind}: {', '.join(recipe.habits)}{unpriced}"


def _unused(stated: StatedConfiguration | None) -> Iterator[Chart]:
    """Settings that the configuration leaves unused, with their gains."""
    if stated is not None and stated.unused:
        items = tuple(
            Item(f" {change.about}: {', '.join(_setting(*entry) for entry in change.settings.items())}",
                 mark=f"{change.gain:+.1%}")
            for change in stated.unused
        )  # fmt: skip
        yield Items(title=f"What {stated.file} leaves unused (tokens/s)", section="Unused", items=items)


def _setting(key: str, values: tuple[str | None, str | None]) -> str:
    """A changed setting in words: '--tensor-model-parallel-size 4 (was 8)'."""
    value, before = values
    if value is None:
        return f"no {key}"
    text = f"{key} {value}".rstrip()
    return f"{text} (was {before})" if before else text


def configuration_listings(configuration: FrameworkConfiguration | None) -> Iterator[Chart]:
    """The files of a framework's configuration, and the command that reads them."""
    if configuration is None:
        return
    section = "Configuration"
    for name, text in configuration.files.items():
        about = sentence("; ".join(configuration.notes))
        yield Listing(title=f"Configuration: {name}", about=about, section=section, text=text.rstrip())
    if not configuration.command.startswith("bash "):
        yield Listing(title="Command", section=section, text=configuration.command)


def training_lanes(plan: TrainingAnswerDocument) -> Iterator[Lanes]:
    """The timeline of a plan that follows from its ledger. That of a pipeline needs the plan itself."""
    if ways(plan.mesh.axes, *STAGE_AXES) == 1:
        title = f"planned: {plan.model.name} on {plan.slice.name}"
        yield step_lanes(Ledger(plan.ledger), title=title, microbatches=plan.microbatches)


def _classes(memory: PlannedMemory) -> dict[str, float]:
    """Bytes of a device by class."""
    return {
        "weights": memory.weights,
        "optimizer": memory.optimizer,
        "gradients": memory.gradients,
        "activations": memory.activations,
        "workspace": memory.workspace,
    }


def _rounded(workload: Workload) -> Iterator[str]:
    """The batch, if it is not the one that was asked for."""
    if workload.asked_tokens is not None:
        yield (
            f"{workload.asked_tokens:,} tokens a step are rounded to {counted(workload.batch_seqs, 'sequence')} of "
            f"{workload.seq_len:,}: {workload.batch_tokens:,} tokens"
        )


def _batch(plan: TrainingAnswerDocument) -> Iterator[str]:
    """The batch that was not given, and the figures of half and twice of it."""
    if not plan.other_batches:
        return
    work = plan.workload
    own = OtherBatch(
        batch_tokens=work.batch_tokens,
        step_s=plan.step.expected_s,
        mfu=plan.mfu,
        days=plan.days,
        cost_usd=plan.cost_usd,
    )

    def figures(batch: OtherBatch) -> str:
        parts = [format_seconds(batch.step_s) + " a step"] if batch.days is None else [f"{batch.days:,.1f} days"]
        parts += [] if batch.cost_usd is None else [f"${format_count(batch.cost_usd)}"]
        return ", ".join((*parts, f"MFU {batch.mfu:.1%}"))

    yield f"batch {counted(work.batch_seqs, 'sequence')} of {work.seq_len:,} tokens, " + (
        f"chosen as none was given: {figures(own)}"
    )
    for other in plan.other_batches:
        share = "half of it" if other.batch_tokens < work.batch_tokens else "twice as many"
        yield f"  with {share} (--batch-tokens {other.batch_tokens}): {figures(other)}"


def _tight(plan: TrainingAnswerDocument) -> Iterator[str]:
    """The plan leaves the compiler no room in HBM; the nearest that does."""
    if not plan.step.leaves_room:
        yield (
            f"its time is an estimate, and too short: at {plan.memory.total / plan.memory.capacity:.0%} of HBM the "
            "compiler repeats work, which is not priced"
        )
        if (near := plan.nearest_with_room) is not None:
            yield (
                f"nearest with room: {near.slice} as {mesh_text(near.mesh)}, remat {near.remat}, "
                f"{microbatches_text(near.microbatches)}"
                f"{pipeline_text(near.schedule, near.chunks)}: {format_seconds(near.expected_s)} a step"
            )


def padding_figure(padding: Padding | None, seq_len: int, label: str = "padding") -> Iterator[ShownFigure]:
    """The padding of a batch that the mesh splits unevenly, if there is any."""
    if padding is None or not padding.share:
        return
    parts = []
    if empty := padding.empty_sequences:
        parts.append(f"{counted(empty, 'empty sequence')} next to {padding.sequences - empty:,}")
    if padding.sequence_tokens:
        parts.append(f"{padding.sequence_tokens:,} tokens after the {seq_len:,} of a sequence")
    note = f"of all positions: {', '.join(parts)}; they take time, and count in no rate"
    yield ShownFigure("padding", label, padding.share, "%", note=note)


def _refusal(plan: TrainingAnswerDocument) -> str:
    """The reason why a plan does not fit or meet the limits, and the nearest that does; empty if it does."""
    if not plan.memory.fits:
        return "; ".join((_shortfall(plan.memory), *_nearest(plan)))
    if plan.obstacles:
        chip = plan.slice.name.partition(":")[0]
        near, reason = plan.nearest_executable, f"not executable: {plan.obstacles[0]}"
        if near is None:
            return f"{reason}; no plan runs in its place"
        if near.slice.partition(":")[0] != chip:
            reason += f"; no mesh of {chip} runs it"
        return "; ".join((reason, *_nearest(plan)))
    if plan.compiled is not None and plan.compiled.best is None:
        return f"{plan.compiled.verdict}; {plan.compiled.nearest_text}"
    if plan.comparison is None or plan.comparison.best.meets:
        return ""
    best = plan.comparison.best
    return f"no slice meets the limits; nearest is {best.slice}: {best.why}"


def _confirmed(compiled: CompiledPlans | None) -> Iterator[str]:
    """The effect of compiling the best plans on their order."""
    if compiled is not None and compiled.best is not None:
        yield compiled.verdict


def _compiled(compiled: CompiledPlans | None) -> tuple[Chart, ...]:
    """The best plans by the planner next to their compiled programs, the fastest compiled one first."""
    if compiled is None:
        return ()
    ordered = sorted(compiled.candidates, key=lambda candidate: candidate.rank or len(compiled.candidates) + 1)
    rows = [
        (
            "" if candidate.rank is None else str(candidate.rank),
            str(candidate.planned_rank),
            candidate.name,
            format_seconds(candidate.plan.expected_s),
            "" if candidate.compiled_s is None else format_seconds(candidate.compiled_s),
            "" if candidate.exposed_s is None else format_seconds(candidate.exposed_s),
            "" if candidate.peak_bytes is None else format_bytes(candidate.peak_bytes),
            "yes" if candidate.fits else "" if candidate.peak_bytes is None else "no",
            candidate.reason if candidate.peak_bytes is None else "",
        )
        for candidate in ordered
    ]
    columns = (
        TableColumn("rank"),
        TableColumn("planner's"),
        TableColumn("plan", "text", wrap=True),
        TableColumn("planned"),
        TableColumn("compiled"),
        TableColumn("waits", drop=1),
        TableColumn("memory"),
        TableColumn("fits", "text"),
        TableColumn("", "text", wrap=True),
    )
    shown = range(len(columns) if any(row[-1] for row in rows) else len(columns) - 1)
    versions = ", ".join(f"{name} {version}" for name, version in compiled.versions.items())
    run = (
        f"{counted(compiled.compiled, 'compilation')} in {compiled.seconds / 60:.1f} minutes"
        if compiled.compiled
        else "all compiled earlier: nothing was compiled"
    )
    return (
        Table(
            title="The best plans, compiled",
            section="Compiled",
            about=f"A step as planned, and of the schedule that XLA made ({versions}): its waits for collectives, and "
            f"memory at its peak, of {format_bytes(compiled.capacity_bytes)} a device. {sentence(run)}",
            columns=tuple(columns[at] for at in shown),
            rows=tuple(tuple(row[at] for at in shown) for row in rows),
        ),
    )


_FIRST = {"cost": "fewest dollars", "time": "fastest", "chips": "fewest chips"}


def _comparison(plan: TrainingAnswerDocument) -> tuple[Chart, ...]:
    """The slices that were compared, the recommended one first."""
    if (compared := plan.comparison) is None:
        return ()
    offers = (compared.best, *compared.others)
    rows = [_offer(offer, compared) for offer in offers]
    rows += [(entry.name, *[""] * 5, entry.why, *[""] * 5) for entry in compared.left_out]
    drops = {"MFU": 1, "chips": 3, "mesh": 2, "tok/s": 5, "bound": 4}
    money = ("days", "90% of days", "dollars", "90% of dollars")
    names = ("slice", *money, "runs", "", "MFU", "mesh", "chips", "tok/s", "bound")
    # Without tokens there are no days, and without a price no dollars.
    shown = [at for at, name in enumerate(names) if name not in money or any(row[at] for row in rows)]
    text = ("slice", "mesh", "bound", "")
    prices = prices_text(offer for offer in offers if offer.cost_usd is not None)
    return (
        Table(
            title=f"Slices compared: {_FIRST[compared.aim]} first ({compared.planned} planned)",
            section="Slices",
            about=f"Each with {counted(plan.workload.batch_seqs, 'sequence')} of {plan.workload.seq_len:,} "
            f"tokens a step, on its best mesh that fits and that {plan.framework.title} can run. 90%: the interval; "
            "runs: published runs that it rests on; not distinguishable: one figure is within the other's interval; "
            "intervals overlap: only the intervals share values."
            + (f" Dollars a chip-hour: {prices}." if prices else ""),
            columns=tuple(
                TableColumn(
                    name, "text" if name in text else "number", wrap=name in ("mesh", ""), drop=drops.get(name, 0)
                )
                for name in (names[at] for at in shown)
            ),
            rows=tuple(tuple(row[at] for at in shown) for row in rows),
        ),
    )


def _offer(offer: OfferDocument, compared: ComparisonDocument) -> tuple[str, ...]:
    """The row of a slice that was compared."""
    rank = "" if offer is not compared.best else "recommended" if offer.meets else "nearest"

    def interval(ends: Sequence[float] | None, text: Callable[[float], str]) -> str:
        return "" if ends is None else "-".join(map(text, ends))

    return (
        offer.slice,
        "" if offer.days is None else f"{offer.days:,.1f}",
        interval(offer.interval_days, lambda days: f"{days:,.1f}"),
        "" if offer.cost_usd is None else format_count(offer.cost_usd),
        interval(offer.interval_usd, format_count),
        str(offer.evidence_runs or "none"),
        "; ".join(filter(None, (rank, offer.why))),
        f"{offer.mfu:.1%}",
        mesh_text(offer.mesh),
        f"{offer.chips:,}",
        format_count(offer.tokens_per_s),
        offer.bound,
    )


def _shortfall(memory: PlannedMemory) -> str:
    over = memory.total - memory.capacity
    return (
        f"does not fit: {format_bytes(memory.total)} of {format_bytes(memory.capacity)} a device, "
        f"{format_bytes(over)} too much"
    )


def _figures(plan: TrainingAnswerDocument, classes: Mapping[str, float]) -> Iterator[ShownFigure]:
    step, memory, where = plan.step, plan.memory, plan.slice
    tight, evidence = not step.leaves_room, "estimate" if plan.evidence is None else plan.evidence.level
    level: Level = "estimate" if tight else level_of(evidence)
    interval = "an estimate, and too short" if tight else interval_text(evidence, step.interval_s)
    yield ShownFigure("expected_s", "step", step.expected_s, "s", level,
        note=f"{interval}; {format_seconds(step.lower_s)} if everything overlaps ({bound_text(step.bound)}), "
        f"{format_seconds(step.upper_s)} if nothing does")  # fmt: skip
    if plan.evidence is not None:
        yield evidence_figure(plan.evidence)
    if plan.compiled is not None and (best := plan.compiled.best) is not None and best.compiled_s is not None:
        peak = "" if best.peak_bytes is None else f"; peak memory {format_bytes(best.peak_bytes)}"
        yield ShownFigure("compiled_s", "compiled", best.compiled_s, "s", "estimate",
            note=f"a step of the schedule that XLA made{peak}")  # fmt: skip
    yield ShownFigure("mfu", "MFU", plan.mfu, "%", level, formula=plan.flops.convention,
        note="causal attention and unembedding counted, recomputation not")  # fmt: skip
    yield ShownFigure("tokens_per_s", "rate", plan.tokens_per_s, "tok/s", level,
        note=f"{plan.tokens_per_s / where.chips:.0f} tok/s per chip")  # fmt: skip
    if plan.days is not None:
        cost = f"no list price: --price {where.name.partition(':')[0]}=USD"
        if plan.cost_usd is not None:
            # Plans of earlier releases do not name the price.
            price = where.price_usd_per_hour
            if price is None:
                price = plan.cost_usd / (plan.days * 24 * where.chips)
            cost = f"${plan.cost_usd:,.0f} at {price_text(price, where.price_source)}"
        yield ShownFigure("days", "budget", plan.days * 86400, "s", level, shown=f"{plan.days:.1f} days",
            note=f"for {format_count(plan.workload.tokens or 0.0)} tokens; {cost}")  # fmt: skip
    classes_text = ", ".join(f"{name} {format_bytes(size)}" for name, size in classes.items())
    of_host = f"; and {format_bytes(memory.host)} of its host" if memory.host else ""
    yield ShownFigure("memory_bytes", "memory", memory.total, "B", "expected",
        note=f"of {format_bytes(memory.capacity)} a device: {classes_text}{of_host}")  # fmt: skip
    use = f"trained as {plan.dtypes.weights}" if plan.adapters is None else f"frozen as {plan.adapters.base}"
    yield from stored_figures(plan.model.stored, use)
    yield from padding_figure(plan.padding, plan.workload.seq_len)
    exposed = {name: seconds for name, seconds in step.exposed_s.items() if seconds > 0}
    yield ShownFigure("exposed_s", "not hidden", sum(exposed.values()), "s", "expected",
        note=exposed_text(exposed, step.expected_s) or "no collectives")  # fmt: skip
    if (pipeline := plan.pipeline) is not None:
        yield ShownFigure("bubble", "bubble", pipeline.bubble, "%", "simulated",
            note=f"of the passes, {pipeline.schedule} simulated; {pipeline.bubble_closed_form:.1%} in closed "
            f"form; {pipeline.in_flight:g} microbatches held at most")  # fmt: skip


def _too_long(plan: TrainingAnswerDocument) -> str:
    """A warning if sequences are longer than those for which the model was made."""
    longest, tokens = plan.model.config.max_seq_len, plan.workload.seq_len
    return f"; sequences of {tokens:,}, the model was made for {longest:,}" if tokens > longest else ""


def _nearest(plan: TrainingAnswerDocument) -> Iterator[str]:
    """The nearest plan that runs."""
    if (near := plan.nearest_executable) is not None:
        other = "" if near.matmul == plan.dtypes.matmul else f" with {near.matmul} matmuls"
        if near.optimizer != plan.optimizer:
            other += f" with {near.optimizer}"
        if near.batch_tokens != plan.workload.batch_tokens:
            other += f" with {counted(near.batch_seqs, 'sequence')}"
        verb = "runs" if plan.memory.fits else "does"
        yield (
            f"nearest that {verb}: {near.slice} as {mesh_text(near.mesh)}{other}, remat {near.remat}, "
            f"{microbatches_text(near.microbatches)}"
            f"{pipeline_text(near.schedule, near.chunks)}: {format_seconds(near.expected_s)} a step"
        )


def _where(ledger: Iterable[Row], step_s: float) -> Table:
    """Milliseconds by scope and phase."""
    scopes: dict[str, list[Row]] = {}
    for row in ledger:
        scopes.setdefault(row.scope, []).append(row)
    rows = []
    for scope, members in scopes.items():
        phases = {name: sum(float(r.count * r.expected_s) for r in members if r.phase == name) for name in _PHASES}
        exposed = sum(float(r.count * moved.exposed_s) for r in members for moved in r.collectives)
        seconds = busy(members)
        bound = max(seconds, key=lambda name: seconds[name], default="")
        rows.append(
            (
                scope,
                *(milliseconds(phases[name]) for name in _PHASES),
                f"{sum(phases.values()) / step_s:.1%}",
                milliseconds(exposed),
                milliseconds(seconds.get(bound, 0.0)),
                bound or "idle",
            )
        )
    return Table(
        title="Where the step goes (ms per step on one device)",
        section="Ledger",
        columns=(
            TableColumn("scope", "text"),
            *(TableColumn(name, drop=2 if name == "recompute" else 1) for name in _PHASES),
            TableColumn("share"),
            TableColumn("exposed"),
            TableColumn("at peak", drop=3),
            TableColumn("bound", "text"),
        ),
        rows=tuple(rows),
    )


def _alternatives(plan: TrainingAnswerDocument) -> tuple[Chart, ...]:
    """The runners-up of a search as a table, and with the plan as points."""
    others = plan.alternatives
    if not others:
        return ()
    rows = [
        (
            " x ".join(f"{name} {size}" for name, size in other.mesh.items()),
            policy_text(plan.framework.name, other.remat),
            f"{other.microbatches}{pipeline_text(other.schedule, other.chunks)}",
            format_seconds(other.expected_s),
            f"{other.mfu:.1%}",
            format_bytes(other.memory_bytes),
            "" if other.fits else "does not fit",
        )
        for other in others
    ]
    columns = tuple(
        TableColumn(name, "text" if name in ("mesh", "remat", "") else "number", wrap=name in ("mesh", "remat"))
        for name in ("mesh", "remat", "microbatches", "step", "MFU", "memory", "")
    )
    return (
        Table(
            title=f"Alternatives ({counted(plan.searched, 'candidate')} searched)",
            section="Alternatives",
            columns=columns,
            rows=tuple(rows),
        ),
        Lines(
            title="Alternatives",
            about="The time of a step over the memory of a device, each mesh at its best.",
            x=ChartAxis("memory of a device", "B"),
            y=ChartAxis("step", "s"),
            series=(_series("this plan", "point", [plan.summary]), _series("alternatives", "dots", others)),
        ),
    )


def _series(name: str, style: Literal["point", "dots"], plans: Sequence[PlanSummary]) -> ChartSeries:
    return ChartSeries(
        name,
        tuple((float(plan.memory_bytes), float(plan.expected_s)) for plan in plans),
        style,
        names=tuple(mesh_text(plan.mesh) for plan in plans),
        notes=tuple(map(_note, plans)),
    )


def _note(plan: PlanSummary) -> str:
    return (
        f"remat: {plan.remat}\nmicrobatches: {plan.microbatches}{pipeline_text(plan.schedule, plan.chunks)}\n"
        f"step: {format_seconds(plan.expected_s)}\nMFU: {plan.mfu:.1%}\n"
        f"memory: {format_bytes(plan.memory_bytes)}"
    )


def _changes(plan: TrainingAnswerDocument) -> tuple[Chart, ...]:
    """The changes that would help, with their gains; those that no program runs apart, with what is missing."""
    possible = tuple(change for change in plan.what_if if change.obstacle is None)
    missing = tuple(change for change in plan.what_if if change.obstacle is not None)
    section = "What would change it"
    charts = []
    if possible:
        items = tuple(Item(f" {change.change}", mark=f"{change.gain:+.1%}") for change in possible)
        charts.append(Items(title="What would change it (tokens/s)", section=section, items=items))
    if plan.levers:
        name = plan.framework.name
        items = tuple(
            Item(
                f" {lever.lever}: {policy_text(name, lever.chosen)}, not {policy_text(name, lever.other)}"
                if lever.lever == "remat"
                else f" {lever.lever}: {lever.chosen}, not {lever.other}",
                mark=f"{lever.gain:+.1%}",
            )
            for lever in sorted(plan.levers, key=lambda lever: -lever.gain)
        )
        charts.append(
            Items(title="What the search tried, and what its choice gains (tokens/s)", section=section, items=items)
        )
    if missing:
        ours = plan.framework.name == FRAMEWORKS[0]
        program = "rooftop's program" if ours else plan.framework.title
        items = tuple(Item(f" {change.change}: {change.obstacle}", mark=f"{change.gain:+.1%}") for change in missing)
        charts.append(Items(title=f"What {program} does not run (tokens/s if it did)", section=section, items=items))
    return tuple(charts)
