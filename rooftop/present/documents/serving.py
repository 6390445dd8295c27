"""The documents of serving: a plan with its fleet, a front of servers, a simulation, and a measured server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rooftop.arrays.rules import SEQUENCE_AXES, ways
from rooftop.core.ledger import Ledger
from rooftop.core.quantities import counted, format_bytes, format_count, format_seconds
from rooftop.hardware import GIVEN
from rooftop.present.document import (
    Bar,
    Bars,
    Chart,
    Document,
    ShownFigure,
    ShownVerdict,
    Table,
    TableColumn,
    columns,
)
from rooftop.present.documents.parts import (
    bound_text,
    busy,
    calibrated_text,
    evidence_figure,
    front_chart,
    interval_text,
    layout_text,
    ledger_bars,
    ledger_table,
    level_of,
    memory_bars,
    obstacles,
    of_ledgers,
    price_text,
    prices_text,
    prose,
    reasons,
    rooflines,
    roofs_of_slice,
    sentence,
    stored_figures,
    written_by,
)

#: Points of a front that are printed; the data has all.
_POINTS = 12
_CLASSES = ("weights", "scales", "kv", "activations")
#: Latencies: their label, their key, and the key of the planned one.
_LATENCIES = (
    ("TTFT", "ttft_s", "ttft_s"),
    ("TPOT", "tpot_s", "tpot_s"),
    ("ITL", "itl_s", None),
    ("worst ITL", "worst_itl_s", None),
    ("end to end", "e2e_s", None),
)
#: Kinds of a server's steps.
_SHARES = ("busy", "prefill", "generate", "mixed")
#: Seconds that a request may be sent late before a note says so.
_LAG_S = 0.05
_PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")


def serving_plan(data: Mapping[str, Any]) -> Document:
    """A serving plan: the fleet, a step and its latencies, both ledgers, why, and the front of batches."""
    where, generate, prefill = data["slice"]["name"], data["generate"], data["prefill"]
    memory, fleet = data["memory"]["per_device"], data.get("recommendation")
    subject = f"{data['model']['name']} on {where}: batch {generate['batch']}, {data['mode']}"
    subject += f"{calibrated_text(data['slice'])}{_too_long(data)}"
    return Document(
        title=f"{data['model']['name']} on {where}: a serving plan",
        verdict=ShownVerdict(
            subject=subject
            if fleet is None
            else f"{_recommended(data)}: {fleet['best']['name']}{calibrated_text(data['slice'])}",
            no=_no(data),
            details=(*_fleet(data), *_other_engine(data), *(() if fleet is None else (subject,)), *_layouts(data)),
        ),
        figures=tuple(_figures(data)),
        charts=(
            *_others(fleet),
            *(obstacles(data, *_nearest(data)) if data["assumptions"]["engine"] is None else ()),
            _where(generate["ledger"], "Where a generate step goes (ms on one device)", "Generate"),
            *_pictures(generate["ledger"], where, "a generate step", ""),
            _where(prefill["ledger"], "Where a prefill goes (ms on one device)", "Prefill"),
            *_pictures(prefill["ledger"], prefill["slice"], "a prefill", " of a prefill"),
            memory_bars({"planned": {name: memory[name] for name in _CLASSES}}, memory["capacity"]),
            reasons(data),
            front_chart(data["pareto"], generate),
            _front(data["pareto"], _front_title(data)),
        ),
        sources=written_by(data),
    )


def front(data: Mapping[str, Any]) -> Document:
    """A front of servers."""
    return Document(
        title=f"{data['model']}: latency and throughput of generation",
        verdict=ShownVerdict(subject=f"{data['model']}: the front of batches over servers"),
        charts=(front_chart(data["pareto"]), _front(data["pareto"], "Nothing generates both faster and cheaper")),
    )


def _no(data: Mapping[str, Any]) -> str:
    """The reason why the plan cannot be, with the nearest that can; empty if it can."""
    memory = data["memory"]["per_device"]
    if not data["memory"]["fits"]:
        reason = f"does not fit: {format_bytes(memory['total'])} of {format_bytes(memory['capacity'])} a device"
    elif missed := list(_missed(data)):
        return f"misses {' and '.join(missed)}; nearest is with batch {data['generate']['batch']}"
    elif _is_refused(data):
        reason = f"not executable: {data['obstacles'][0]}"
    else:
        return ""
    near = [_near(data, item) for item in data["nearest"]]
    return reason + (f"; nearest: {', or '.join(near)}" if near else "; no slice of this chip has a plan that runs")


def _is_refused(data: Mapping[str, Any]) -> bool:
    """True if our engine has to run the plan and cannot: not of another engine's, nor of the book's arithmetic."""
    assumptions = data["assumptions"]
    return bool(data["obstacles"]) and assumptions["bounds"] != "book" and assumptions["engine"] is None


def _too_long(data: Mapping[str, Any]) -> str:
    """A warning if the front has contexts that are longer than those for which the model was made."""
    longest = data["model"]["config"]["max_seq_len"]
    most = max((point["context"] for point in data["pareto"]), default=0)
    if most <= max(longest, data["generate"]["context"]):
        return ""
    return f"; contexts of {most:,.0f}, the model was made for {longest:,}"


def _missed(data: Mapping[str, Any]) -> Iterator[str]:
    """Targets that the plan of one slice misses, with what it reaches."""
    if data.get("recommendation") is not None:
        return
    for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")):
        target = data["workload"][key]
        if target is not None and data[key] > target:
            yield f"its {name} of {format_seconds(target)} with {format_seconds(data[key])}"


def _weights(dtypes: Mapping[str, Any]) -> str:
    """The format of weights: 'int4 in groups of 32'."""
    group = dtypes["weight_group"]
    return str(dtypes["weights"]) if group is None else f"{dtypes['weights']} in groups of {group}"


def _near(data: Mapping[str, Any], near: Mapping[str, Any]) -> str:
    """The nearest plan, by its batch and all else in which it differs from the one asked for."""
    work, dtypes = data["workload"], data["dtypes"]
    parts = [f"batch {near['batch']} on {near['slice']}"]
    if near["prompt"] != work["prompt"] or near["generate"] != work["generate"]:
        parts.append(f"{near['prompt']} + {near['generate']} tokens")
    if _weights(near) != _weights(dtypes):
        parts.append(f"weights in {_weights(near)}")
    if near["kv"] != dtypes["kv"]:
        parts.append(f"{near['kv']} KV")
    if near["matmul"] != dtypes["flops"]:
        parts.append(f"{near['matmul']} matmuls")
    if near["mode"] != data["mode"]:
        parts.append(near["mode"])
    return " with ".join((parts[0], " and ".join(parts[1:]))) if parts[1:] else parts[0]


def _nearest(data: Mapping[str, Any]) -> Iterator[str]:
    """A line on each of the nearest plans that run."""
    for near in data["nearest"]:
        mesh = ",".join(f"{name}={size}" for name, size in near["mesh"].items())
        latency = format_seconds(near["tpot_s"])
        yield f"nearest that runs: {_near(data, near)}, as {mesh or 'one device'}: TPOT {latency}"


def _recommended(data: Mapping[str, Any]) -> str:
    return "Cheapest, but no program runs it" if _is_refused(data) else "Recommended"


def _other_engine(data: Mapping[str, Any]) -> Iterator[str]:
    """The engine that runs the plan, if it is not ours."""
    if data["assumptions"]["engine"] is not None:
        yield sentence(data["obstacles"][0])


def _fleet(data: Mapping[str, Any]) -> Iterator[str]:
    """The chips, dollars and latencies of the recommended fleet."""
    if (fleet := data.get("recommendation")) is None:
        return
    best = fleet["best"]
    at = "at the given price" if best.get("price_source") == GIVEN else "at list prices"
    money = (
        f", no list price: --price {best['chip']}=USD"
        if best["usd_per_hour"] is None
        else f", ${best['usd_per_hour']:,.2f} an hour {at}"
    )
    per_request = " for each request a second" if data["workload"]["requests_per_second"] is None else ""
    yield (
        f"  {counted(best['chips'], 'chip')}{money}{per_request}; TTFT {format_seconds(best['ttft_s'])} with its "
        f"queue, TPOT {format_seconds(best['tpot_s'])}"
    )


def _layouts(data: Mapping[str, Any]) -> Iterator[str]:
    """The layouts of generation and prefill on their slices."""
    split = ""
    if ways(data["mesh"]["axes"], *SEQUENCE_AXES) > 1:
        split = f"; context splits the cache's {'sequences' if data['kv_split'] == 'batch' else 'tokens'}"
    yield f"generate as {layout_text(data['slice']['name'], data['mesh'])}{split}"
    where = data["prefill"]["slice"]
    yield f"prefill on {where} as {layout_text(where, data['prefill']['mesh'])}"


def _others(fleet: Mapping[str, Any] | None) -> tuple[Chart, ...]:
    """The recommended fleet next to the best of each other chip, and of each mode."""
    if fleet is None or not (fleet["others"] or fleet.get("left_out")):
        return ()
    best = fleet["best"]
    seen = {(best["chip"], best["mode"])}
    others = []
    for other in fleet["others"]:
        # Fleets of one chip and mode differ in their number formats: the best of them stands for all.
        if (kind := (other["chip"], other["mode"])) not in seen:
            seen.add(kind)
            others.append(other)
    figure = "chips" if fleet["objective"] == "chips" else "usd_per_hour"

    def row(one: Mapping[str, Any]) -> tuple[str, ...]:
        usd, prices = one["usd_per_hour"], one.get("token_prices")
        more = one is not best and one[figure] is not None and best[figure] is not None
        return (
            one["name"].rpartition(", batch")[0],
            f"{one['chips']:,.4g}",
            f"no price (--price {one['chip']}=USD)" if usd is None else f"{usd:,.2f}",
            f"{one[figure] / best[figure] - 1:+.0%}" if more else "",
            "" if prices is None else f"{prices['input']:.3g}",
            "" if prices is None else f"{prices['output']:.3g}",
            format_seconds(one["ttft_s"]),
            format_seconds(one["tpot_s"]),
            str(one["batch"]),
            counted(one["evidence_runs"], "run") if one.get("evidence_runs") else "none",
            "" if one.get("executable", True) else "no program",
        )

    names = ("fleet", "chips", "$/h", "more", "$/M in", "$/M out", "TTFT", "TPOT", "batch", "evidence", "")
    rows = [row(best), *map(row, others)]
    rows += [(f"{lost['chip']}: {lost['why']}", *[""] * 10) for lost in fleet.get("left_out", ())]
    shown = [at for at, name in enumerate(names) if name == "fleet" or any(line[at] for line in rows)]
    drops = {"batch": 4, "chips": 3, "$/M in": 2}
    cited = prices_text((best, *others))
    first = {"cost": "cheapest", "chips": "fewest chips"}[fleet["objective"]]
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


def _figures(data: Mapping[str, Any]) -> Iterator[ShownFigure]:
    generate, memory, draft = data["generate"], data["memory"], data["draft"]
    step, evidence = generate["step_s"], data["evidence"]
    decode, prefill = (level_of(evidence[phase]["level"]) for phase in ("decode", "prefill"))
    parts = {name.removesuffix("_s"): format_seconds(seconds) for name, seconds in generate["breakdown"].items()}
    overlapped = f"{format_seconds(step['lower_s'])} if everything overlaps"
    if decode == "bound":
        overlapped = "a bound"
    yield ShownFigure("step_s", "step", step["expected_s"], "s", decode,
        note=f"{overlapped} ({bound_text(generate['bound'])}); at peak rates: "
        f"weights {parts['weights']}, KV {parts['kv']}, FLOPs {parts['flops']}, ICI {parts['ici']}")  # fmt: skip
    if draft is not None:
        yield ShownFigure("speculation", "speculation", draft["gain"], "%", "expected",
            shown=f"{draft['gain']:+.0%} tok/s",
            note=f"{draft['tokens_per_round']:.2f} tokens a round: {draft['length']} guesses of {draft['model']} in "
            f"{format_seconds(draft['guess_s'])}, checked in {format_seconds(draft['check_s'])}")  # fmt: skip
    yield ShownFigure("tokens_per_s", "rate", generate["tokens_per_s"], "tok/s", decode,
        note=f"{generate['tokens_per_s_per_chip']:.4g} tok/s per chip")  # fmt: skip
    both = "" if draft is None else " by both models"
    yield ShownFigure("ttft_s", "TTFT", data["ttft_s"], "s", prefill, formula=data["definitions"]["ttft_s"],
        note=f"{interval_text(evidence['prefill'], evidence['ttft_s'])}; "
        f"one prefill of {data['workload']['prompt']} tokens{both}, no queue")  # fmt: skip
    why = "with the prefills of others between" if data["mode"] == "interleaved" else "with the KV's transfer"
    step_text = "a step" if data["assumptions"]["bounds"] == "book" else f"a step, {why}"
    yield ShownFigure("tpot_s", "TPOT", data["tpot_s"], "s", decode,
        note=f"{interval_text(evidence['decode'], evidence['tpot_s'])}; {step_text}")  # fmt: skip
    yield evidence_figure(evidence["decode"])
    yield evidence_figure(evidence["prefill"], "ttft_evidence")
    classes = ", ".join(f"{name} {format_bytes(memory[name])}" for name in _CLASSES)
    yield ShownFigure("memory_bytes", "memory", memory["total"], "B", "expected",
        note=f"of {format_bytes(memory['capacity'])}: {classes}")  # fmt: skip
    weights = _weights(data["dtypes"]) + (", all else bf16" if data["dtypes"]["only_experts"] else "")
    yield from stored_figures(data["model"], f"planned and served as {weights}")
    yield from _batches(data)
    transfer = data["kv_transfer"]
    yield ShownFigure("prefill_per_generate", "prefill", data["prefill_per_generate"], level="expected",
        shown=counted(float(f"{data['prefill_per_generate']:.3g}"), "server"),
        note=f"for each generate server; a prompt's KV of {format_bytes(transfer['bytes'])} moves in "
        f"{format_seconds(transfer['ici_s'])} over ICI, {format_seconds(transfer['dcn_s'])} over DCN")  # fmt: skip
    cost = data["cost_per_million_tokens"]
    if cost["input"] is not None:
        fleet = data.get("recommendation")
        prices = None if fleet is None else fleet["best"].get("token_prices")
        load = "at full load"
        if prices is not None:
            load = f"at {data['workload']['requests_per_second']:g} requests/s; at full load ${cost['output']:.3g} and "
            load += f"${cost['input']:.3g}"
            cost = prices
        cited = f"; {price_text(data['slice'])}" if data["slice"].get("price_source") else ""
        yield ShownFigure("usd_per_million_tokens", "cost", cost["output"], level=decode,
            shown=f"${cost['output']:.3g}",
            note=f"per million output tokens, ${cost['input']:.3g} per million input, {load}{cited}")  # fmt: skip
    cache = data["prefix_cache"]
    if cache["hit_rate"]:
        host_text = (
            "" if cache["prompts_held"] is None else f"; host memory holds {cache['prompts_held']:,} prompts' KV"
        )
        yield ShownFigure("prefix_cache", "prefix cache", cache["speedup"], level="expected",
            shown=f"{cache['speedup']:.2f}x",
            note=f"faster prefill at {cache['hit_rate']:.0%} hits{host_text}")  # fmt: skip


def _batches(data: Mapping[str, Any]) -> Iterator[ShownFigure]:
    """The batch, how it was chosen, and the smallest and the largest of the search next to it."""
    rules = {
        "knee": "the knee: the largest whose last doubling raised tokens/s by more than TPOT",
        "target": f"the most tokens/s within TPOT {format_seconds(data['workload']['tpot_s'] or 0.0)}",
    }
    if (rule := rules.get(data["batch_rule"])) is not None and data["memory"]["fits"]:
        beside = [
            f"batch {point['batch']} has a TPOT of {format_seconds(point['tpot_s'])} and "
            f"{point['tokens_per_s_per_chip']:.4g} tok/s a chip"
            for point in (data["smallest_batch"], data["largest_batch"])
            if point["batch"] != data["generate"]["batch"]
        ]
        yield ShownFigure("batch", "batch", data["generate"]["batch"], shown=str(data["generate"]["batch"]),
            note="; ".join((rule, *beside)))  # fmt: skip
    smallest = data["smallest_slice"]
    holds = "no slice holds this batch" if smallest is None else f"smallest slice for this batch: {smallest}"
    yield ShownFigure("max_batch", "largest batch", data["max_batch"], shown=str(data["max_batch"]),
        note=f"on this mesh; {holds}")  # fmt: skip


def _front_title(data: Mapping[str, Any]) -> str:
    """The title of the front, with a warning on contexts for which the model was not made."""
    reason = next(item for item in data["reasons"] if item["source"] == "the model's config")
    if all(point["context"] <= reason["value"] for point in data["pareto"]):
        return "Batches worth having"
    return f"Batches worth having (the model was made for contexts up to {reason['value']:,.0f})"


def _where(ledger: Sequence[Mapping[str, Any]], title: str, section: str) -> Table:
    """Milliseconds by scope."""
    priced = Ledger.from_json(ledger)
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


def _pictures(ledger: list[Mapping[str, Any]], where: str, what: str, of: str) -> tuple[Chart, ...]:
    lines = of_ledgers({"planned": ledger})
    bars = ledger_bars(Ledger.from_json(ledger), title="Where the step goes" if not of else "Where a prefill goes")
    table = ledger_table(lines, f"The ledger{of}", about=f"Per device and {what}, counts applied.")
    return (bars, table, *rooflines(lines, roofs_of_slice(where), f"Roofline of {what}"))


def _front(points: Sequence[Mapping[str, Any]], title: str) -> Table:
    many = bool(points) and "slice" in points[0]
    names = (*(("slice", "weights", "kv") if many else ()), "context", "batch", "step", "tok/s per chip", "$/M tokens")
    stride = 1 if many else max(1, len(points) // _POINTS)
    rows = []
    for point in points[::stride]:
        cost = point["usd_per_million_tokens"]
        rows.append(
            (
                *((point["slice"], point["weights"], point["kv"]) if many else ()),
                f"{point['context']:,.0f}",
                str(point["batch"]),
                format_seconds(point["step_s"]),
                f"{point['tokens_per_s_per_chip']:.4g}",
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


def simulation(data: Mapping[str, Any]) -> Document:
    """A simulation of requests to the servers of a plan."""
    requests, tokens = data["requests"], data["tokens"]
    return Document(
        title=f"{data['plan']['model']}: a simulation",
        verdict=ShownVerdict(
            subject=_simulated_servers(data),
            says=f"{requests['finished']:,} of {requests['offered']:,} requests finished, "
            f"{format_count(tokens['generated_per_second'], 'tok/s')}.",
        ),
        figures=tuple(_simulated_figures(data)),
        charts=(_simulated_latencies(data), _server_table(data), _busy_bars(data)),
        sources=written_by(data),
    )


def _simulated_servers(data: Mapping[str, Any]) -> str:
    plan, deployment = data["plan"], data["deployment"]
    servers = f"{deployment['replicas']} x {plan['slice']}"
    if deployment["prefill_servers"]:
        servers = f"{deployment['prefill_servers']} x {plan['prefill_slice']} for prefill and {servers} to generate"
    text = f"{plan['model']} on {servers}: {deployment['batching']}"
    if plan.get("calibrated_by"):
        text += f", calibrated by {plan['calibrated_by']}"
    if deployment["chunk_tokens"] is not None:
        text += f", prefill in chunks of {deployment['chunk_tokens']} tokens a step"
    text += f", batches up to {deployment['max_batch']}"
    longest, most = data["trace"]["longest_tokens"], plan["max_seq_len"]
    return text if longest <= most else f"{text}; requests of {longest:,} tokens, the model was made for {most:,}"


def _simulated_figures(data: Mapping[str, Any]) -> Iterator[ShownFigure]:
    requests, tokens, goodput = data["requests"], data["tokens"], data["goodput"]
    note = f"{requests['per_second']:.4g} a second over {format_seconds(data['duration_s'])}"
    if requests["refused"]:
        note += f"; {requests['refused']:,} refused, such as: {requests['refused_why']}"
    yield ShownFigure("finished", "requests", requests["finished"], shown=f"{requests['finished']:,}", note=note,
        level="simulated")  # fmt: skip
    yield ShownFigure("generated", "generated", tokens["generated"], "tok", "simulated",
        note=f"{tokens['generated_per_second']:,.0f} tok/s in all")  # fmt: skip
    share = tokens["cached"] / tokens["prompt"] if tokens["prompt"] else 0.0
    note = f"{share:.1%} of the prompts' tokens were cached" if data["deployment"]["prefix_cache"] else ""
    yield ShownFigure("prefilled", "prefilled", tokens["prefilled"], "tok", "simulated", note=note)
    if data["preemptions"]:
        yield ShownFigure("preemptions", "preemptions", data["preemptions"], shown=f"{data['preemptions']:,}",
            level="simulated", note=f"{format_count(tokens['recomputed'], 'tok')} computed again")  # fmt: skip
    targets = _targets(goodput)
    if targets:
        yield ShownFigure("goodput", "goodput", goodput["requests_per_second"], level="simulated",
            shown=f"{goodput['requests_per_second']:.4g} a second",
            note=f"{goodput['share']:.1%} of the requests within {targets}")  # fmt: skip


def _simulated_latencies(data: Mapping[str, Any]) -> Table:
    rows = []
    for name, key, planned in _LATENCIES:
        percentiles = data[key]
        if percentiles is not None:
            plan = "" if planned is None else format_seconds(data["plan"][planned])
            rows.append((name, plan, *(format_seconds(seconds) for seconds in percentiles.values())))
    names = ("", "planned", "mean", "p50", "p90", "p95", "p99", "max")
    return Table(title="What users feel", section="Latencies", columns=columns(*names), rows=tuple(rows))


def _server_table(data: Mapping[str, Any]) -> Table:
    """Servers of a role together: means over them, and the most of any."""
    rows = []
    for role in dict.fromkeys(server["role"] for server in data["servers"]):
        servers = [server for server in data["servers"] if server["role"] == role]
        shares = [sum(s["utilisation"][name] for s in servers) / len(servers) for name in _SHARES]
        rows.append(
            (
                f"{len(servers)}" + ("" if role == "both" else f" {role}"),
                *(f"{share:.1%}" if share else "" for share in shares),
                "" if role == "prefill" else f"{sum(s['mean_batch'] for s in servers) / len(servers):.1f}",
                f"{sum(s['kv']['mean_occupancy'] for s in servers) / len(servers):.1%}",
                f"{max(s['kv']['max_occupancy'] for s in servers):.1%}",
                f"{max(s['max_waiting'] for s in servers)}",
            )
        )
    names = ("servers", "busy", "prefill", "generate", "mixed", "batch", "KV used", "KV most", "queue most")
    return Table(
        title="What servers do (means of a role)", section="Servers", columns=columns(*names), rows=tuple(rows)
    )


def _busy_bars(data: Mapping[str, Any]) -> Bars:
    """The share of time of each role that its servers spend on what."""
    bars = []
    for role in dict.fromkeys(server["role"] for server in data["servers"]):
        servers = [server for server in data["servers"] if server["role"] == role]
        parts = tuple(
            (name, sum(s["utilisation"][name] for s in servers) / len(servers)) for name in _SHARES if name != "busy"
        )
        bars.append(Bar("servers" if role == "both" else role, parts))
    return Bars(title="Time of a server", about="Means over the servers of a role.", unit="%", bars=tuple(bars))


def _targets(goodput: Mapping[str, Any]) -> str:
    """The targets of goodput in words, '' without any."""
    names = (("TTFT", "ttft_target_s"), ("TPOT", "tpot_target_s"))
    return " and ".join(f"{name} {format_seconds(goodput[key])}" for name, key in names if goodput[key] is not None)


def server(data: Mapping[str, Any]) -> Document:
    """The latencies that clients of a server saw, next to those that the simulator predicts."""
    return Document(
        title=f"{data['model']} at {data['url']}",
        verdict=ShownVerdict(
            subject=f"{data['model']} at {data['url']}, rooftop {data['rooftop_version']}, {data['date']}",
            details=tuple(_measured_requests(data["measured"], data["trace"]["clients"])),
        ),
        charts=(_measured_latencies(data), prose("\n".join(_measured_notes(data)))),
    )


def _measured_requests(measured: Mapping[str, Any], clients: int | None) -> Iterator[str]:
    requests, tokens, goodput = measured["requests"], measured["tokens"], measured["goodput"]
    yield (
        f"{requests['finished']:,} of {requests['offered']:,} requests"
        + ("" if clients is None else f" of {clients:,} clients")
        + f" in {format_seconds(measured['duration_s'])}, "
        f"{requests['per_second']:.4g} a second; {format_count(tokens['generated'], 'tok')} generated, "
        f"{tokens['generated_per_second']:,.0f} tok/s"
    )
    if requests["finished"] < requests["offered"]:
        yield f"{requests['refused']:,} were refused and {requests['failed']:,} failed, such as: {requests['why']}"
    targets = _targets(goodput)
    if targets:
        rate = f"{goodput['requests_per_second']:.4g} a second"
        yield f"goodput: {rate}, {goodput['share']:.1%} of the requests within {targets}"


def _measured_latencies(data: Mapping[str, Any]) -> Chart:
    measured, predicted = data["measured"], data["predicted"]
    rows = []
    for name, key, _ in _LATENCIES:
        if key not in measured:
            continue
        sides = {"measured": measured[key], "predicted": None if predicted is None else predicted[key]}
        for at, (kind, values) in enumerate(sides.items()):
            if values is not None:
                rows.append(("" if at else name, kind, *(format_seconds(values[column]) for column in _PERCENTILES)))
    return Table(title="", columns=columns("", "", *_PERCENTILES, text=2), rows=tuple(rows))


def _measured_notes(data: Mapping[str, Any]) -> Iterator[str]:
    how = "predicted: simulated with" if data["predicted"] is not None else "no prediction:"
    yield f"{how} {data['predicted_by']}"
    if (outside := data["outside_engine_ttft_s"]) is not None:
        yield f"TTFT outside the engine (HTTP, the client), which is not simulated: {format_seconds(outside)}, mean"
    if (lag := data["measured"]["worst_lag_s"]) > _LAG_S:
        yield f"The client fell behind by up to {format_seconds(lag)}: it is too slow for this."
