"""Readers of the words in a table of runs: chips, slices, models, meshes, dtypes and remat policies.

``data/readings.toml`` settles what the columns leave open, with a source for each reading. Every reader returns its
answer and the assumptions it had to make.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.core.quantities import DTYPE_BYTES, format_bytes, parse_count, parse_quantity
from rooftop.frameworks.framework import FRAMEWORKS, framework_of, parse_settings
from rooftop.hardware import Chip, Slice, published_chip
from rooftop.models import ModelConfig, MoE, count_params, load_model
from rooftop.models.activations import CHECKPOINTS
from rooftop.plan.serving.workload import ServingNumerics
from rooftop.validation.names import family_facts, published_model, readings, remat_word
from rooftop.validation.table import TableRow

#: Architecture columns that a model cannot be built without.
_ARCHITECTURE = ("layers", "d_model", "d_ff", "heads", "kv_heads", "d_head", "vocab")
_MESH_COLUMNS = {"pp": "stage", "dp": "data", "fsdp": "fsdp", "tp": "tensor"}
_REMAT_WORDS = ("full", "minimal", "selective", "none")
#: Keys of a recipe that say which rows it is about.
_MATCHED = ("source", "releases", "model", "chip", "dtype", "pp", "num_chips", "seq_len")


class Gap(Exception):
    """A row says too little to be used; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Remat:
    """A remat policy as it was published, and what of it could be read.

    ``policy`` is 'full', 'minimal', 'selective', 'none' or 'custom'; None: not stated. ``offloaded`` holds the
    published names of what goes to the host ('layer_input', 'qkv', 'out_proj'). ``capacity``: slots of an expert over
    its even share of tokens, where those above are dropped.
    """

    published: str | None
    policy: str | None
    offloaded: tuple[str, ...] = ()
    capacity: float | None = None


def source_facts(name: str) -> Mapping[str, Any]:
    """Facts about a source: 'flops', 'dp', 'gigabyte', 'dtype', 'recompute', 'assumed'; {} if it is not listed."""
    sources: Mapping[str, Mapping[str, Any]] = readings()["source"]
    # Releases of one source differ in their last word, its tables in all but the first.
    names = (name, name.rpartition(" ")[0], name.partition(" ")[0])
    return next((sources[part] for part in names if part in sources), {})


def run_facts(row: TableRow) -> Mapping[str, Any]:
    """Facts about a run: its source's, and those of each [[recipe]] whose ``source``, ``model``... are the row's.

    ``program`` is the framework, by a column or the source, ``settings`` those that were set beyond its defaults,
    ``mesh`` the devices by axis where the columns do not say. ``strategy`` has fields of a run which the columns say
    otherwise.
    """
    facts = dict(source_facts(row.required("source")))
    settings = dict(facts.get("settings", {}))
    for recipe in readings()["recipe"]:
        if _matches(recipe, row):
            settings |= recipe.get("settings", {})
            assumed = (*facts.get("assumed", ()), *recipe.get("assumed", ()))
            facts |= {name: value for name, value in recipe.items() if name not in _MATCHED} | {"assumed": assumed}
    return facts | {"settings": settings} | _named_program(row)


def _named_program(row: TableRow) -> dict[str, Any]:
    """The facts of the optional columns 'framework', 'release' and 'settings', which say more than a source does."""
    name = row.cells.get("framework")
    if not name:
        return {}
    if name not in FRAMEWORKS:
        raise row.error("framework", ", ".join(FRAMEWORKS))
    chip = read_chip(row)[0]
    try:
        settings = parse_settings(row.cells.get("settings") or None)
        program = framework_of(name, chip=chip, release=row.cells.get("release") or None)
    except RooftopError as error:
        raise row.error(error.field if error.field in row.cells else "framework", error.accepted) from None
    return {"program": name, "framework": program.title, "release": program.release, "settings": settings}


def _matches(recipe: Mapping[str, Any], row: TableRow) -> bool:
    """True if a row is one that a recipe is about: its cells begin with the recipe's words, each whole."""
    name, _, release = row.required("source").rpartition(" ")
    if recipe["source"] not in (name, row.required("source")) or release not in recipe.get("releases", (release,)):
        return False
    begins = (
        re.match(rf"{re.escape(recipe[column])}(?:\b|(?!\w))", row.cells[column])
        for column in _MATCHED[2:]
        if column in recipe
    )
    return all(begins)


def identity(row: TableRow, words: Sequence[str], taken: set[str]) -> str:
    """A run's name: source, model, ``words``. No other row changes it, but for a '#2' where two agree in all of it."""
    plain = [re.sub(r"[^a-z0-9.]+", "-", row.required(column).lower()).strip("-") for column in ("source", "model")]
    base = name = "/".join((*plain, *words))
    serial = 2
    while name in taken:
        name = f"{base}#{serial}"
        serial += 1
    return name


def read_chip(row: TableRow) -> tuple[Chip, tuple[str, ...]]:
    """The catalogue's chip of a row, with the figures that the published product has instead."""
    name = row.required("chip")
    facts = dict(readings()["chip"].get(name, {"catalogue": name}))
    assumed = tuple(facts.pop("assumed", ()))
    try:
        known = published_chip(facts.pop("catalogue"))
    except RooftopError as error:
        raise row.error("chip", error.accepted) from None
    return (known.replace(**facts) if facts else known), assumed


def read_slice(row: TableRow) -> tuple[Slice, tuple[str, ...]]:
    """The slice of a row: its optional column `slice`, or the standard shape of so many chips.

    Raises Gap if no standard shape has that many chips.
    """
    known, assumed = read_chip(row)
    chips = row.required_count("num_chips")
    if row.cells.get("slice"):
        try:
            stated = Slice.parse(row.cells["slice"])
        except RooftopError as error:
            raise row.error("slice", error.accepted) from None
        if stated.chip.name != known.name or stated.chips != chips:
            raise row.error("slice", f"a slice of {chips} {known.name} chips")
        return Slice(known, stated.shape, stated.num_slices), assumed
    if known.kind == "gpu":
        # Several racks of 72 are used as 64 each.
        fits = [math.prod(shape) for shape in known.slice_shapes if chips % math.prod(shape) == 0]
        per_node = max(fits, default=0)
        if not per_node or (chips > per_node and 9 * per_node < 8 * math.prod(known.pod_shape)):
            raise Gap(f"{chips} GPUs are not whole nodes of {math.prod(known.pod_shape)}, nor a part of one")
        return Slice(known, (per_node, chips // per_node)), (*assumed, f"{per_node} GPUs in a node")
    shapes = {math.prod(shape): shape for shape in _standard_shapes(known)}
    num_slices = 1
    if source_facts(row.required("source")).get("dp") == "slices":
        num_slices = row.count("dp") or 1
    elif chips not in shapes and chips % max(shapes) == 0:
        num_slices = chips // max(shapes)
    if chips % num_slices or chips // num_slices not in shapes:
        of = f" in {num_slices} slices" if num_slices > 1 else ""
        raise Gap(f"no standard slice of {chips} {known.name} chips{of}: name it in a column `slice`")
    shape = shapes[chips // num_slices]
    size = f"{chips // num_slices} {known.name} chips"
    assumed = (*assumed, f"the slice is the standard one of {size}, {'x'.join(map(str, shape))}")
    return Slice(known, shape, num_slices), assumed


def _standard_shapes(known: Chip) -> list[tuple[int, ...]]:
    cubes = readings()["slice"]["cubes"] if known.wrap == "cube" else ()
    return [*known.slice_shapes, *(tuple(int(size) for size in text.split("x")) for text in cubes)]


def read_model(row: TableRow, seq_len: int) -> tuple[ModelConfig, tuple[str, ...]]:
    """The model of a row: built from its columns, or the preset of its name where columns are empty.

    ``seq_len`` becomes the longest sequence of a model built from columns. Raises Gap if neither is enough.
    """
    name = row.required("model")
    facts = dict(family_facts(name))
    preset = facts.pop("preset", None) or published_model(name).preset or name
    empty = [column for column in _ARCHITECTURE if row.text(column) is None]
    if empty:
        try:
            config = load_model(preset)
        except RooftopError:
            known = f"a preset (`rooftop model` lists them), or a table that states {', '.join(empty)}"
            raise row.error("model", known) from None
        for column in _ARCHITECTURE:
            accepted = [None, getattr(config, column)]
            if column == "d_ff" and config.moe is not None:
                accepted.append(config.moe.d_ff)
            if row.count(column) not in accepted:
                raise row.error(column, f"{getattr(config, column)}, as in the preset {preset}, or every size stated")
        return config, (f"architecture of the preset {preset}",)
    if (named := _preset_with_sizes(row, preset)) is not None:
        return named, ()
    assumed = []
    matrices = row.count("mlp_matrices")
    tied = row.choice("tied_embeddings", {"yes": True, "no": False})
    if matrices is None or tied is None:
        facts = {"mlp_matrices": 3, "tied_embeddings": False} | facts
        assumed.append(f"{facts['mlp_matrices']} MLP matrices, tied embeddings {facts['tied_embeddings']}: its family")
    if matrices is not None:
        facts["mlp_matrices"] = matrices
    if tied is not None:
        facts["tied_embeddings"] = tied
    fields: dict[str, Any] = {"name": name, "family": "llama", "max_seq_len": seq_len}
    fields |= {column: row.required_count(column) for column in _ARCHITECTURE} | facts
    experts, active = row.count("experts"), row.count("active_experts")
    if (experts is None) != (active is None):
        raise Gap("experts and active_experts are not both stated")
    try:
        if experts is not None and active is not None:
            fields["moe"] = MoE(experts=experts, active=active, d_ff=fields["d_ff"])
            assumed.append("d_ff is each expert's, in every layer")
        return ModelConfig(**fields), tuple(assumed)
    except RooftopError as error:
        raise RooftopError(row.field(error.field), error.given, error.accepted) from None


def _preset_with_sizes(row: TableRow, name: str) -> ModelConfig | None:
    """The preset ``name`` if it has every size that the row states; None if there is none."""
    try:
        config = load_model(name)
    except RooftopError:
        return None
    moe = config.moe
    sizes = {column: getattr(config, column) for column in _ARCHITECTURE}
    sizes |= {"mlp_matrices": config.mlp_matrices}
    if moe is not None:
        sizes |= {"d_ff": moe.d_ff, "experts": moe.experts, "active_experts": moe.active}
    stated = {column: row.count(column) for column in (*_ARCHITECTURE, "mlp_matrices", "experts", "active_experts")}
    tied = row.choice("tied_embeddings", {"yes": True, "no": False})
    # Published logs count attention in full, also for models whose layers have windows.
    differs = bool(config.layer_windows) or any(
        count is not None and count != sizes.get(column) for column, count in stated.items()
    )
    return None if differs or tied not in (None, config.tied_embeddings) else config


def require_room(row: TableRow, column: str, model: ModelConfig, numerics: ServingNumerics, on: Slice) -> None:
    """Raise RooftopError for a server whose memory the weights alone overfill: it is not what ran."""
    weights, room = count_params(model).total * numerics.weight_bytes, on.chips * on.chip.hbm_bytes
    if weights > room:
        raise row.error(
            column,
            f"servers that have room for the weights: {format_bytes(weights)} in {numerics.weights}, and {on.name} has "
            f"{format_bytes(room)}",
        )


def read_mesh(row: TableRow, devices: int) -> tuple[Mapping[str, int] | None, tuple[str, ...]]:
    """The stated mesh axes greater than 1, outermost first (stage, data, fsdp, context, tensor); None: not stated.

    Context and expert parallelism are read from columns cp and ep, or from 'cp=N' and 'EP=N' in where_found; experts
    are split over devices that hold copies otherwise. Raises RooftopError if all axes are stated and do not multiply to
    ``devices``.
    """
    stated = {axis: row.count(column) for column, axis in _MESH_COLUMNS.items()}
    noted = {word: re.search(rf"\b{word}=(\d+)", row.cells["where_found"], re.I) for word in ("cp", "ep")}
    context, expert = (
        row.count(word)
        if row.cells.get(word)
        else parse_count(note[1], row.field("where_found"))
        if (note := noted[word])
        else None
        for word in ("cp", "ep")
    )  # fmt: skip
    sizes = {axis: size or 1 for axis, size in stated.items()} | {"context": context or 1}
    if math.prod(sizes.values()) == devices and any(stated.values()):
        sizes["expert"] = math.gcd(expert, sizes["data"]) if expert else 1
        sizes["data"] //= sizes["expert"]
        order = ("stage", "data", "fsdp", "expert", "context", "tensor")
        notes: tuple[str, ...] = ()
        if expert and expert != sizes["expert"]:
            notes = (f"experts split {sizes['expert']} ways, not {expert}: over the axis data alone",)
        return {axis: sizes[axis] for axis in order if sizes[axis] > 1}, notes
    if (mesh := run_facts(row).get("mesh")) is not None and math.prod(mesh.values()) == devices:
        return mesh, ()
    if all(size is not None for size in stated.values()):
        published = " x ".join(f"{column} {row.cells[column]}" for column in _MESH_COLUMNS)
        raise RooftopError(f"{row.table} line {row.number} mesh", published, f"axes that multiply to {devices} devices")
    return None, ("mesh not stated: it is searched",)


def read_microbatch(row: TableRow) -> int | None:
    """Sequences per microbatch and replica: a number, or 'N per device'; None: not stated."""
    per_device = re.fullmatch(r"(\d+) per device", row.cells["microbatch"])
    return row.count("microbatch") if per_device is None else parse_count(per_device[1], row.field("microbatch"))


def read_dtype(row: TableRow) -> str:
    """The dtype of the matmuls, a name of quantities.DTYPE_BYTES. Raises Gap if it is neither stated nor known."""
    word = (
        row.text("dtype")
        or published_model(row.required("model")).dtype
        or source_facts(row.required("source")).get("dtype")
    )
    if word is None:
        raise Gap("dtype not stated")
    first = re.split(r"[ +/,]", word.lower())[0]
    dtype: str = readings()["dtype"].get(first, first)
    if dtype not in DTYPE_BYTES:
        raise row.error("dtype", f"a text that begins with one of {', '.join(readings()['dtype'])}")
    return dtype


def read_remat(row: TableRow) -> tuple[Remat, tuple[str, ...]]:
    """The remat policy: a word of MaxText, Megatron or JAX, 'custom(a+b offload)' or 'custom(a+b save, c offload)'."""
    word, recipe = row.text("recompute"), run_facts(row).get("recompute")
    if word is not None:
        word = remat_word(word)
    if word is None or (word.startswith("custom/full") and recipe is not None):
        word = recipe
    if word is None:
        return Remat(published=None, policy=None), ("remat policy not stated",)
    if word in _REMAT_WORDS:
        return Remat(published=word, policy=word), ()
    if word in readings()["remat"]:
        facts = readings()["remat"][word]
        return Remat(published=word, policy=facts.get("policy", "custom"), offloaded=tuple(facts["offloaded"])), ()
    if word.startswith("custom/full"):
        return Remat(published=word, policy=None), ("remat policy not stated",)
    if (policy := _read_actions(word)) is not None:
        return Remat(published=word, policy=policy), ()
    custom = re.fullmatch(r"custom\((.*?)\s*offload\)(?:, dropped cf([\d.]+))?", word)
    if custom is None:
        accepted = f"{', '.join(_REMAT_WORDS)}, custom(a+b offload), custom/full, or nothing"
        raise row.error("recompute", accepted)
    offloaded = tuple(name.strip() for name in re.split(r"[+,]", custom[1]) if name.strip())
    assumed = () if offloaded else ("what is offloaded is not stated",)
    capacity = parse_quantity(custom[2], row.field("recompute")) if custom[2] else None
    if capacity is not None:
        assumed = (*assumed, f"an expert has slots for {custom[2]} times its share of tokens, full or not")
    return Remat(published=word, policy="custom", offloaded=offloaded, capacity=capacity), assumed


def _read_actions(word: str) -> str | None:
    """Our policy of a custom list with saved tensors, by MaxText's names or ours; None for other words."""
    custom = re.fullmatch(r"custom\((.*)\)", word)
    if custom is None or not re.search(r"\b(?:save|device)\b", custom[1]):
        return None
    names = readings()["checkpoint"]
    changes: dict[str, str] = {}
    for part in re.split(r"[,;]", custom[1]):
        entry = re.fullmatch(r"\s*([\w+\- ]+?)[ =:]+(save|device|offload|remat|recompute)\s*", part)
        if entry is None:
            return None
        action = {"device": "save", "remat": "recompute"}.get(entry[2], entry[2])
        for name in (name.strip() for name in entry[1].split("+")):
            checkpoint = names.get(name, name)
            if checkpoint not in CHECKPOINTS:
                return None
            if not (checkpoint == "layer_input" and action != "offload"):
                changes[checkpoint] = action
    return ",".join(["block", *(f"{name}={action}" for name, action in changes.items())])
