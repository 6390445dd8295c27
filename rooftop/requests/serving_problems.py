"""Problems of serving plans: what a request asks for, read and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rooftop.arrays import AXES
from rooftop.capabilities import KV_SPLITS, published_weights
from rooftop.core.errors import RooftopError, one_of
from rooftop.core.quantities import parse_bytes, parse_count, parse_dtype, parse_share
from rooftop.frameworks.engines import Engine, engine_of
from rooftop.frameworks.framework import ENGINES, parse_settings
from rooftop.hardware import Chip, Slice, is_slice
from rooftop.models import ModelConfig
from rooftop.models.stored import MXFP4_GROUP, KeptWeights
from rooftop.plan.pricing import BOUNDS
from rooftop.plan.serving.assumptions import ServingAssumptions
from rooftop.plan.serving.fleet import candidate_slices
from rooftop.plan.serving.problem import LINKS, MODES, Mode, ServingProblem
from rooftop.plan.serving.workload import ClientLoad, DraftModel, ServingNumerics, ServingWorkload
from rooftop.requests.inputs import (
    axes_of,
    calibrated_places,
    chip_of,
    model_of,
    priced_places,
    rate_of,
    seconds_of,
    slice_of,
)
from rooftop.requests.planning import PlanServing

if TYPE_CHECKING:
    from rooftop.requests.likes import CountLike, DtypesLike, ServersLike

#: Tokens of a prompt by default, of models made for as many and an answer.
PROMPT = 8192
#: Number formats that a search over chips tries by default.
_SEARCHED_OF_ENGINES = ("bf16", "f8_e4m3")
_SEARCHED = ("int8", "bf16")
#: Bytes of the scale of a group of weights, which our engine keeps in bf16.
_GROUP_SCALE_BYTES = 2.0
#: Requests of a client by default.
_REQUESTS = 10


@dataclass(frozen=True, kw_only=True)
class ServingQuestion:
    """A problem, and the slices, number formats and batchings that are searched for it."""

    problem: ServingProblem
    places: Mapping[str, Sequence[Slice]]
    numerics: Sequence[ServingNumerics]
    modes: list[Mode]
    searching: bool


def serving_question(request: PlanServing) -> ServingQuestion:
    """The problem, with everything read and checked. Raises RooftopError naming the field that is wrong."""
    places, searching = _servers(request.on)
    places = calibrated_places(priced_places(places, request.price), request.calibration)
    for name in ("mesh", "prefill_mesh", "prefill_on"):
        if searching and (value := getattr(request, name)) is not None:
            raise RooftopError(name.replace("_", "-"), value, "this with one slice, such as --on v5e:4x4")
    for name in ("draft_length", "acceptance"):
        if request.draft is None and name in request.changed():
            raise RooftopError(name.replace("_", "-"), getattr(request, name), "this with --draft MODEL, which guesses")
    first, config = next(iter(places.values()))[0], model_of(request.model)
    engine = _engine(request, first.chip, config)
    numerics = _numerics(request, config, first.chip, engine, searching=searching)
    batching, kv_split, host_dram = request.batching, request.kv_split, request.host_dram
    modes: list[Mode] = list(MODES if searching else MODES[:1])
    if batching is not None or request.concurrency is not None:
        modes = [one_of("batching", batching or "interleaved", MODES)]
    mfu = None if request.mfu is None else parse_share(request.mfu, "mfu")
    assumptions = ServingAssumptions(mfu=mfu)
    if engine is not None:
        assumptions = replace(assumptions, engine=engine.name, release=request.release, settings=engine.asked)
    elif request.concurrency is not None:
        accepted = f"this with --engine {' or '.join(ENGINES[1:])}; `rooftop simulate --concurrency` has our own"
        raise RooftopError("concurrency", request.concurrency, accepted)
    with _published_by(config, asked=request.weights_dtype is not None):
        problem = ServingProblem(
            model=config,
            slice=first,
            workload=_workload(request, config),
            numerics=numerics[0],
            assumptions=assumptions if request.assume is None else assumptions.with_shares(request.assume),
            mode=modes[0],
            bounds=one_of("bounds", request.bounds, BOUNDS),
            axes=None if request.mesh is None else axes_of(request.mesh, AXES),
            prefill_axes=None if request.prefill_mesh is None else axes_of(request.prefill_mesh, AXES),
            kv_split=None if kv_split is None else one_of("kv-split", kv_split, KV_SPLITS),
            link=one_of("link", request.link, LINKS),
            draft=_draft(request),
            host_bytes=None if host_dram is None else float(parse_bytes(host_dram, "host-dram")),
            prefill_slice=_prefill_slice(request, first),
        )
    capacity, cached = problem.workload.held_tokens, problem.workload.context
    if not problem.book and cached is not None and cached > capacity:
        raise RooftopError("context", cached, f"at most {capacity:,}: the prompt and its answer")
    return ServingQuestion(problem=problem, places=places, numerics=numerics, modes=modes, searching=searching)


def _engine(request: PlanServing, chip: Chip, model: ModelConfig, weights: str = "bf16") -> Engine | None:
    """The engine that is asked for; None: rooftop's own. Raises RooftopError."""
    return engine_of(
        one_of("engine", request.engine, ENGINES), chip=chip, model=model, weights=weights, release=request.release,
        settings=parse_settings(request.engine_settings),
    )  # fmt: skip


def _load(request: PlanServing) -> ClientLoad | None:
    """The clients that wait for their answers. Raises RooftopError for their options without them, and for others."""
    changed = request.changed()
    if request.concurrency is None:
        for name in ("requests", "shortest", "replicas", "prefill_servers"):
            if name in changed:
                raise RooftopError(name.replace("_", "-"), changed[name], "this with --concurrency")
        return None
    for name in ("batch_seqs", "context", "requests_per_second", "draft", "hit_rate", "contexts"):
        if name in changed:
            raise RooftopError(name.replace("_", "-"), changed[name], "this without --concurrency")
    clients = parse_count(request.concurrency, "concurrency")
    return ClientLoad(
        concurrency=clients,
        requests=_REQUESTS * clients if request.requests is None else parse_count(request.requests, "requests"),
        shortest=parse_share(request.shortest, "shortest"),
        replicas=parse_count(request.replicas, "replicas"),
        prefill_servers=parse_count(request.prefill_servers, "prefill-servers"),
    )


def _workload(request: PlanServing, config: ModelConfig) -> ServingWorkload:
    """Lengths, batch and targets. Raises RooftopError."""
    generate, prompt = parse_count(request.generate, "generate"), request.prompt
    longest_prompt = max(1, config.max_seq_len - generate)
    return ServingWorkload(
        prompt=min(PROMPT, longest_prompt) if prompt is None else parse_count(prompt, "prompt"),
        generate=generate,
        batch_seqs=None if request.batch_seqs is None else parse_count(request.batch_seqs, "batch-seqs"),
        context=None if request.context is None else parse_count(request.context, "context"),
        requests_per_second=rate_of(request.requests_per_second),
        ttft_s=None if request.ttft is None else seconds_of(request.ttft, "ttft"),
        tpot_s=None if request.tpot is None else seconds_of(request.tpot, "tpot"),
        hit_rate=parse_share(request.hit_rate, "hit-rate"),
        load=_load(request),
    )


def _numerics(
    request: PlanServing, config: ModelConfig, chip: Chip, engine: Engine | None, *, searching: bool
) -> list[ServingNumerics]:
    """The number formats that are asked for: of the weights, times those of the KV cache. Raises RooftopError."""
    matmul, embeddings = request.matmul_dtype, request.embeddings_dtype
    is_free = request.weights_dtype is None and request.bounds != "book"
    published = published_weights(config) if is_free else None
    searched = _SEARCHED if engine is None else _SEARCHED_OF_ENGINES
    if published is None:
        dtypes = _dtypes(request.weights_dtype, "weights-dtype", searched if searching else None)
        formats = _formats(dtypes or ["bf16"], request.weight_group)
    elif request.weight_group is None:
        formats = [published]
    else:
        raise RooftopError("weight-group", request.weight_group, "this with --weights-dtype")
    caches = _dtypes(request.kv_dtype, "kv-dtype", searched if searching else None)
    numerics = []
    for weights in formats:
        served_by = None if engine is None else _engine(request, chip, config, weights.dtype)
        group, scale_bytes = weights.group, _GROUP_SCALE_BYTES
        if (
            served_by is not None
            and served_by.scale_bytes is not None
            and weights.group in (None, served_by.weight_group)
        ):
            group, scale_bytes = served_by.weight_group, served_by.scale_bytes
        elif group is None and weights.dtype == "f4_e2m1":
            group = MXFP4_GROUP
        numerics += [
            ServingNumerics(
                weights=weights.dtype,
                kv=kv,
                flops=weights.dtype if served_by and matmul == "bf16" else parse_dtype(matmul, "matmul-dtype"),
                embeddings="bf16" if embeddings is None else parse_dtype(embeddings, "embeddings-dtype"),
                weight_group=group,
                only_experts=weights.only_experts,
                kv_sharing=parse_count(request.kv_sharing, "kv-sharing"),
                group_scale_bytes=scale_bytes,
            )
            for kv in caches or ["bf16" if served_by is None else served_by.habits.kv]
        ]
    return numerics


def _draft(request: PlanServing) -> DraftModel | None:
    if request.draft is None:
        return None
    return DraftModel(
        model=model_of(request.draft),
        length=parse_count(request.draft_length, "draft-length"),
        acceptance=parse_share(request.acceptance, "acceptance"),
    )


def _prefill_slice(request: PlanServing, first: Slice) -> Slice | None:
    """The slice of a prefill server. Of the same chip, with the price that is given."""
    if request.prefill_on is None:
        return None
    slice_ = slice_of(request.prefill_on)
    return Slice(first.chip, slice_.shape, slice_.num_slices) if slice_.chip.name == first.chip.name else slice_


@contextmanager
def _published_by(model: ModelConfig, *, asked: bool) -> Iterator[None]:
    """Say of weights that an engine does not have, and that nobody ``asked`` for, where they come from."""
    try:
        yield
    except RooftopError as error:
        if asked or not error.field.startswith("weights-dtype"):
            raise
        choice = error.accepted.partition(",")[0]
        value, accepted = f"{error.given}, as {model.name} is published", f"{error.accepted}: --weights-dtype {choice}"
        raise RooftopError(error.field, value, accepted) from None


def _servers(on: ServersLike) -> tuple[dict[str, list[Slice]], bool]:
    """Slices that servers may be, by chip, and whether chips are searched. Raises RooftopError."""
    if isinstance(on, str):
        texts = [name.strip() for name in on.split(",")]
        names: Sequence[Chip | str] = texts
        has_slice = any(is_slice(text) for text in texts)
        if has_slice and len(names) > 1:
            raise RooftopError("on", on, "one slice, such as v5e:4x4, or chips without shapes, such as v5e,v6e")
        if has_slice:
            slice_ = slice_of(on)
            return {slice_.chip.name: [slice_]}, False
    elif isinstance(on, Chip):
        names = [on]
    elif isinstance(on, Sequence):
        names = on
    else:
        slice_ = slice_of(on)
        return {slice_.chip.name: [slice_]}, False
    result = {}
    for name in names:
        spec = chip_of(name)
        result[spec.name] = candidate_slices(Slice(spec, spec.slice_shapes[0]))
    return result, True


def _dtypes(dtypes: DtypesLike | None, field: str, searched: Sequence[str] | None) -> list[str]:
    """The dtypes that are asked for, or those that are ``searched``; empty without either. Raises RooftopError."""
    if dtypes is None:
        return list(searched or ())
    names = dtypes.split(",") if isinstance(dtypes, str) else dtypes
    if len(names) > 1 and searched is None:
        raise RooftopError(field, ",".join(names), "one dtype each on one slice; lists where chips are searched")
    return [parse_dtype(name, field) for name in names]


def _formats(dtypes: Sequence[str], group: CountLike | None) -> list[KeptWeights]:
    """Formats of the weights of all layers; without a group as many inputs as usual have a scale."""
    size = None if group is None else parse_count(group, "weight-group")
    return [KeptWeights(dtype=dtype, group=size) for dtype in dtypes]
