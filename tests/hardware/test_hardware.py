"""The catalogue and the geometry of slices, against the book's problems and its rules of wraparound."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import tomllib
from importlib import resources

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.core.quantities import DTYPE_BYTES
from rooftop.hardware import Chip, Slice, catalogue, chip
from rooftop.hardware.chips import UNITS

CHIPS = list(catalogue().values())
TPUS = [spec for spec in CHIPS if spec.kind == "tpu"]
GIB = 2**30


def offered(spec: Chip) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes that the chip comes in, axes in any order, whole cubes up to a pod among them."""
    if spec.kind == "gpu":
        return st.tuples(st.sampled_from([part for (part,) in spec.slice_shapes]), st.integers(1, 4096))
    shapes = st.sampled_from(spec.slice_shapes)
    if spec.wrap == "cube":
        pod = math.prod(spec.pod_shape)
        sides = st.integers(1, 36).map(lambda side: 4 * side)
        cubes = st.tuples(sides, sides, sides).filter(lambda shape: math.prod(shape) <= pod)
        shapes = st.one_of(shapes, cubes)
    return shapes.flatmap(lambda shape: st.permutations(shape).map(tuple))


@st.composite
def slices(draw: st.DrawFn, specs: list[Chip] = CHIPS) -> Slice:
    spec = draw(st.sampled_from(specs))
    shape = draw(offered(spec))
    return Slice(spec, shape, draw(st.integers(1, 64)) if spec.kind == "tpu" else 1)


# The catalogue


def test_catalogue_holds_the_chips_of_the_design():
    tpus = ["v3", "v4", "v5e", "v5p", "v6e", "tpu7x"]
    hopper = ["h100", "h100-96gb", "h100-96gb-500w", "h800", "h200"]
    assert list(catalogue()) == [*tpus, "a100", *hopper, "gb200", "gb300", "b200", "b300"]


def test_a_name_that_is_part_of_anothers_stands_after_it():
    """Programs take the first GPU whose name is part of their device's: an 'NVIDIA GB200' is no B200."""
    names = [spec.name for spec in CHIPS if spec.kind == "gpu"]
    for device, name in (("NVIDIA GB200", "gb200"), ("NVIDIA B200", "b200"), ("NVIDIA H100 80GB HBM3", "h100")):
        assert next(known for known in names if known in device.lower()) == name


@pytest.mark.parametrize("spec", CHIPS, ids=lambda spec: spec.name)
def test_every_figure_has_a_source_and_a_date(spec):
    data = tomllib.loads(resources.files("rooftop.hardware").joinpath("catalogue.toml").read_text(encoding="utf-8"))
    figures = spec.figures
    absent = {name for name in UNITS if getattr(spec, name) is None and name not in spec.sources}
    # A vendor's hosts of GPUs differ in memory.
    assert absent <= {"core_bytes_per_s"} | ({"sharp_gain", "power_w"} if spec.kind == "tpu" else {"host_bytes"})
    assert {name.partition(".")[0] for name in figures} == set(UNITS) - absent
    titles = {source["title"]: source["date"] for source in data["sources"].values()}
    for name, figure in figures.items():
        cited = [title for title in titles if figure.source == title or figure.source.startswith(f"{title} (")]
        assert cited, name
        assert figure.date in {titles[title] for title in cited}, name


def test_every_source_is_cited_and_complete():
    data = tomllib.loads(resources.files("rooftop.hardware").joinpath("catalogue.toml").read_text(encoding="utf-8"))
    cited = set()
    for entry in data["chips"].values():
        figures = {**entry, **entry.get("flops_per_s", {})}
        names = ("aliases", "flops_per_s", "title", "kind", "like")
        cited |= {figure[1] for name, figure in figures.items() if name not in names}
    assert cited == set(data["sources"])
    for source in data["sources"].values():
        assert set(source) == {"title", "date", "where"}
        assert ", " not in source["date"]


@pytest.mark.parametrize(("name", "mib"), [("a100", 81920), ("h100", 81559), ("h200", 143771), ("b200", 183359)])
def test_drivers_of_gpus_report_more_than_jax_takes(name, mib):
    """As nvidia-smi prints memory.total."""
    assert chip(name).driver_hbm_bytes == pytest.approx(mib * 2**20, rel=1e-4)


@pytest.mark.parametrize("spec", CHIPS, ids=lambda spec: spec.name)
def test_figures_are_consistent(spec):
    assert set(spec.flops_per_s) <= set(DTYPE_BYTES)
    assert len(spec.pod_shape) == len(spec.host_shape) == spec.ici_axes
    assert spec.cores % spec.devices == 0
    # The nominal figure is in powers of ten of a capacity in powers of two: a device may hold up to 7.4 % more.
    # JAX leaves 5 % of a GPU's memory to others.
    least = 0.94 if spec.kind == "gpu" else 0.95
    assert least < spec.devices * spec.hbm_usable_bytes / spec.hbm_bytes < 1.075
    assert spec.hbm_bytes_per_s < spec.vmem_bytes_per_s
    assert spec.dcn_bytes_per_s < spec.ici_bytes_per_s < spec.hbm_bytes_per_s
    assert spec.vector_flops_per_s < spec.flops_per_s["bf16"]
    assert (spec.core_bytes_per_s is None) or spec.devices > 1


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("v4p", "v4"),
        ("v5litepod", "v5e"),
        ("Trillium", "v6e"),
        ("IRONWOOD", "tpu7x"),
        ("v7x", "tpu7x"),
        (" H100 ", "h100"),
    ],
)
def test_aliases_in_any_case(alias, name):
    assert chip(alias) is catalogue()[name]


def test_a_chip_like_another_has_its_figures_and_their_sources():
    h100, h800, capped = chip("h100"), chip("h800"), chip("h100-96gb-500w")
    assert h800.sources["hbm_bytes_per_s"] == h100.sources["hbm_bytes_per_s"]
    assert (h800.ici_bytes_per_s, h800.flops_per_s) == (2e11, h100.flops_per_s)
    # A variant of a variant.
    assert (capped.hbm_bytes_per_s, capped.power_w, h100.power_w) == (2.4e12, 500, 700)
    # Prices are of a chip, not of its likes.
    assert (h800.price_usd_per_hour, chip("gb300").price_usd_per_hour) == (None, None)
    # Blackwell Ultra has dtypes of its own speed: more in 4 bits, far less in int8.
    b200, b300 = chip("b200").flops_per_s, chip("b300").flops_per_s
    assert b300["f4_e2m1"] > b200["f4_e2m1"] == 4 * b200["bf16"]
    assert b300["int8"] < b300["bf16"] == b200["bf16"]


def test_nvlink_domains():
    """The GPU chapter's table: GPUs of a node, and the egress of a GPU and of a node."""
    for name, size, egress, node_egress in (("h100", 8, 450e9, 400e9), ("b200", 8, 900e9, 400e9)):
        spec = chip(name)
        assert (spec.pod_shape, spec.ici_bytes_per_s) == ((size,), egress)
        assert size * spec.dcn_bytes_per_s == node_egress
    rack = Slice.parse("gb200:72x4")
    assert (rack.chips, rack.hosts, rack.name) == (288, 72, "gb200:72x4")
    assert 72 * rack.chip.dcn_bytes_per_s == 3600e9
    assert [axis.size for axis in rack.physical_axes] == [72, 4]
    assert [Slice.parse(f"gb200:{part}").hosts for part in (1, 2, 4, 8, 36, 72)] == [1, 1, 1, 2, 9, 18]
    # Switches sum from Hopper on.
    assert [Slice.parse(f"{name}:8").physical_axes[0].reduces for name in ("a100", "h100", "gb200")] == [
        False,
        True,
        True,
    ]


def test_unknown_chip_suggests_near_names():
    with pytest.raises(
        RooftopError, match=r"^chip: got 'trilium'; accepted: did you mean trillium\? `rooftop chips` lists"
    ):
        chip("trilium")


def test_unknown_chip_without_a_near_name_says_what_lists_all():
    with pytest.raises(RooftopError, match=r"^chip: got 'zzzzzz'; accepted: `rooftop chips` lists all \d+$"):
        chip("zzzzzz")


@pytest.mark.parametrize(
    ("name", "gib"), [("v3", 15.48), ("v4", 30.75), ("v5e", 15.75), ("v5p", 95.74), ("v6e", 31.25), ("tpu7x", 94.75)]
)
def test_usable_hbm_of_a_device(name, gib):
    assert chip(name).hbm_usable_bytes == pytest.approx(gib * GIB, rel=1e-9)


def test_figures_of_later_editions():
    """DCN per chip, list prices and TPU7x, as the later editions of the book have them."""
    assert [chip(name).dcn_bytes_per_s for name in ("v5e", "v5p", "v6e", "tpu7x")] == [3.125e9, 6.25e9, 12.5e9, 12.5e9]
    assert [chip(name).price_usd_per_hour for name in ("h100", "v5p", "v5e")] == [10.8, 4.2, 1.2]
    tpu7x = chip("tpu7x")
    assert (tpu7x.flops_per_s["bf16"], tpu7x.flops_per_s["f8_e4m3"]) == (2.30e15, 4.61e15)
    assert (tpu7x.hbm_bytes, tpu7x.hbm_bytes_per_s, tpu7x.ici_bytes_per_s) == (192e9, 7.4e12, 9e10)
    assert (math.prod(tpu7x.pod_shape), tpu7x.host_shape) == (9216, (2, 2, 1))


# The book's problems


def test_problem_t1_streaming_weights():
    pod = Slice.parse("v4p:2x4x4")
    assert 200e9 * 2 / (pod.chips * pod.device_hbm_bytes_per_s) == pytest.approx(10.1626e-3, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "hosts", "cores", "flops_per_s", "hbm_bytes"),
    [("v5e:16x16", 32, 256, 5.0432e16, 4.096e12), ("v5p:16x20x28", 2240, 17920, 4.11264e18, 8.6016e14)],
)
def test_problems_t2_and_t3_whole_pods(text, hosts, cores, flops_per_s, hbm_bytes):
    pod = Slice.parse(text)
    assert (pod.hosts, pod.cores) == (hosts, cores)
    assert pod.flops_per_s("bf16") == pytest.approx(flops_per_s, rel=1e-12)
    assert pod.hbm_bytes == pytest.approx(hbm_bytes, rel=1e-12)


def test_problem_t4_weights_over_pcie():
    v6e = chip("v6e").replace(pcie_bytes_per_s=1.5e10)
    assert v6e.flops_per_s["bf16"] / v6e.pcie_bytes_per_s == pytest.approx(61333, rel=1e-5)


@pytest.mark.parametrize(("memory", "tokens"), [("hbm_bytes_per_s", 262.71), ("vmem_bytes_per_s", 11.09)])
def test_problems_t5_and_t6_int8_matmul(memory, tokens):
    v5e = chip("v5e").replace(hbm_bytes_per_s=8.1e11, vmem_bytes_per_s=22 * 8.1e11)
    dim, hidden, rate = 4096, 16384, getattr(v5e, memory)
    seconds_per_token = 2 * dim * hidden / v5e.flops_per_s["int8"] - (dim + hidden) / rate
    assert dim * hidden / rate / seconds_per_token == pytest.approx(tokens, rel=1e-3)


def test_problem_t9_vector_peak():
    assert chip("v5p").vector_flops_per_s == pytest.approx(1.4336e13, rel=1e-12)


def test_problems_r2_to_r7_critical_batches():
    v5e, h100 = chip("v5e"), chip("h100")
    older = v5e.replace(hbm_bytes_per_s=8.1e11)
    assert v5e.flops_per_s["bf16"] / v5e.hbm_bytes_per_s == pytest.approx(240.24, abs=0.005)
    assert 2 * v5e.flops_per_s["bf16"] / v5e.ici_bytes_per_s == pytest.approx(8755.6, abs=0.05)
    assert older.flops_per_s["int8"] / older.hbm_bytes_per_s / 2 == pytest.approx(243.21, abs=0.005)
    assert v5e.flops_per_s["bf16"] / v5e.hbm_bytes_per_s / 2 == pytest.approx(120.12, abs=0.005)
    rounded = h100.replace(flops_per_s={"bf16": 1e15})
    assert rounded.flops_per_s["bf16"] / rounded.hbm_bytes_per_s == pytest.approx(298.51, abs=0.005)


def test_problems_p2_and_p7_tokens_per_chip():
    v5p = chip("v5p")
    assert v5p.flops_per_s["bf16"] / (2 * v5p.ici_bytes_per_s) == pytest.approx(2550)
    assert v5p.flops_per_s["bf16"] / v5p.dcn_bytes_per_s == pytest.approx(73440)
    assert math.prod(v5p.host_shape) * v5p.dcn_bytes_per_s == 2.5e10


# Overrides


def test_replace_changes_only_what_it_is_given():
    v5e = chip("v5e")
    other = v5e.replace(hbm_bytes_per_s=np.float64(8.1e11), flops_per_s={"bf16": 2e14}, price_usd_per_hour=None)
    assert (other.hbm_bytes_per_s, other.flops_per_s["bf16"], other.price_usd_per_hour) == (8.1e11, 2e14, None)
    assert other.flops_per_s["int8"] == v5e.flops_per_s["int8"]
    assert {name for name, source in other.sources.items() if source == "given"} == {
        "hbm_bytes_per_s",
        "flops_per_s.bf16",
        "price_usd_per_hour",
    }
    assert (other.figures["hbm_bytes_per_s"].source, other.figures["hbm_bytes_per_s"].date) == ("given", "")
    assert v5e == catalogue()["v5e"]
    assert other != v5e


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"hbm_byte_per_s": 1.0}, r"^figure: got 'hbm_byte_per_s'; accepted: did you mean hbm_bytes_per_s"),
        ({"wrap": "32"}, r"^figure: got 'wrap'; accepted: "),
        ({"hbm_bytes": 0}, r"^hbm_bytes: got 0; accepted: a positive number of B$"),
        ({"hbm_bytes": -1e9}, r"^hbm_bytes: got -1000000000.0; accepted: a positive"),
        ({"hbm_bytes": math.nan}, r"^hbm_bytes: got nan; accepted: a positive"),
        ({"hbm_bytes": math.inf}, r"^hbm_bytes: got inf; accepted: a positive"),
        ({"hbm_bytes": "16 GB"}, r"^hbm_bytes: got '16 GB'; accepted: a positive"),
        ({"hbm_bytes": True}, r"^hbm_bytes: got True; accepted: a positive"),
        ({"hbm_bytes": None}, r"^hbm_bytes: got nothing; accepted: a positive"),
        ({"cores": 1.5}, r"^cores: got 1.5; accepted: a positive whole number$"),
        ({"sparse_cores": -1}, r"^sparse_cores: got -1; accepted: a positive whole number$"),
        ({"host_shape": (4, 2, 1)}, r"^host_shape: got \(4, 2, 1\); accepted: 2 positive whole numbers$"),
        ({"flops_per_s": 2e14}, r"^flops_per_s: got 200000000000000.0; accepted: a mapping"),
        ({"flops_per_s": {"bf17": 2e14}}, r"^flops_per_s: got 'bf17'; accepted: did you mean bf16"),
        ({"flops_per_s": {"bf16": 0}}, r"^flops_per_s.bf16: got 0; accepted: a positive number$"),
    ],
)
def test_replace_refuses_what_is_no_figure(figures, message):
    with pytest.raises(RooftopError, match=message):
        chip("v5e").replace(**figures)


def test_slices_are_keys_and_travel_between_processes():
    """Searches cache on slices and spread over processes."""
    spec = Slice.parse("tpu7x:4x4x4@2")
    assert len({spec, Slice.parse("ironwood:4x4x4@2"), Slice(spec.chip.replace(hop_s=2e-6), spec.shape, 2)}) == 2
    assert pickle.loads(pickle.dumps(spec)) == spec


# Geometry


@pytest.mark.parametrize(
    ("text", "name", "shape", "num_slices"),
    [
        ("v5e:4x4", "v5e:4x4", (4, 4), 1),
        ("v5p:16x20x28", "v5p:16x20x28", (16, 20, 28), 1),
        ("v5e:16x16@4", "v5e:16x16@4", (16, 16), 4),
        ("v4p:4x4x4", "v4:4x4x4", (4, 4, 4), 1),
        (" V5LitePod : 8X4 @ 1 ", "v5e:8x4", (8, 4), 1),
        ("h100:8x128", "h100:8x128", (8, 128), 1),
        ("h100:8", "h100:8", (8, 1), 1),
        ("h100:4", "h100:4", (4, 1), 1),
    ],
)
def test_parse(text, name, shape, num_slices):
    spec = Slice.parse(text)
    assert (spec.name, spec.shape, spec.num_slices) == (name, shape, num_slices)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "v5e:17x16",
            r"at most a pod of 16x16, 256 chips \(more are several slices .* with @\); nearest: v5e:16x16 or ",
        ),
        ("v5e:32x16", r"at most a pod of 16x16, 256 chips .*; nearest: v5e:16x16 or "),
        ("v5e:4x16", r"1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16; nearest: v5e:4x8 or v5e:8x16 or "),
        ("v5e:3x3", r"1x1, 2x2, .*; nearest: v5e:4x4 or "),
        ("v5e:0x4", r"1x1, 2x2, .*; nearest: v5e:"),
        ("v5p:16x16", r"3 axes for v5p; nearest: v5p:4x8x8 or "),
        ("v5e:4x4x4", r"2 axes for v5e; nearest: v5e:8x8 or "),
        ("v5p:16x20x29", r"at most a pod of 16x20x28, 8960 chips .*; nearest: v5p:16x20x28 or "),
        ("v5p:16x20x32", r"at most a pod of 16x20x28, 8960 chips .*; nearest: v5p:16x20x28 or "),
        ("v5p:2x4x8", r".*2x4x4, or every axis a multiple of 4; nearest: v5p:2x4x4 or "),
        ("v5p:4x4x6", r".*2x4x4, or every axis a multiple of 4; nearest: v5p:4x4x"),
        ("v5e:4x4@0", r"one slice or more after the @"),
        ("h100:8x4@2", r"no @, which joins TPU slices over DCN: nodes of GPUs are h100:8x8"),
        ("h100:128x8", r"1, 2, 4, 8 GPUs of a node, times nodes \(h100:8x16\); nearest: h100:8x128 or "),
        ("h100:12", r"1, 2, 4, 8 GPUs .*; nearest: h100:8x2 or "),
        ("h100:3", r"1, 2, 4, 8 GPUs .*; nearest: h100:4 or "),
        ("h100:8x0", r"1, 2, 4, 8 GPUs .*; nearest: h100:"),
        ("h100:8x2x2", r"1, 2, 4, 8 GPUs .*; nearest: h100:8x4 or "),
    ],
)
def test_impossible_slices_name_the_nearest_ones(text, message):
    with pytest.raises(RooftopError, match=rf"^slice: got '{text}'; accepted: {message}") as error:
        Slice.parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "v5e",
        "v5e:",
        ":4x4",
        "v5e:4xx4",
        "v5e:4x4@",
        "v5e:-4x4",
        "v5e:4.0x4",
        "v5e:4x4@2@2",
        "4x4",
        "v5e:4x4\n4",
    ],
)
def test_text_that_is_no_slice(text):
    with pytest.raises(RooftopError, match=r"accepted: CHIP:SHAPE\[@SLICES\], such as v5e:4x4"):
        Slice.parse(text)


@given(st.text(max_size=20) | st.from_regex(r"(v5e|v5p|h100):[0-9x@]{0,12}", fullmatch=True))
def test_any_text_is_a_slice_or_one_line(text):
    try:
        spec = Slice.parse(text)
    except RooftopError as error:
        assert "\n" not in str(error)
    else:
        assert Slice.parse(spec.name) == spec


@given(st.sampled_from(TPUS), st.lists(st.integers(1, 600), min_size=1, max_size=4).map(tuple))
def test_the_nearest_shapes_exist(spec, shape):
    try:
        Slice(spec, shape)
    except RooftopError as error:
        near = str(error).partition("nearest: ")[2].split(" or ")
        assert len({Slice.parse(text).name for text in near}) == 3


@given(slices())
def test_counts(spec):
    assert spec.chips == math.prod(spec.shape) * spec.num_slices
    assert spec.devices == spec.chips * spec.chip.devices
    assert math.prod(axis.size for axis in spec.physical_axes) == spec.devices
    assert spec.hosts * math.prod(spec.chip.host_shape) >= spec.chips
    assert spec.chips >= spec.num_slices
    assert Slice.parse(spec.name) == spec


@given(slices())
def test_devices_add_up_to_totals(spec):
    for dtype in spec.chip.flops_per_s:
        assert spec.devices * spec.device_flops_per_s(dtype) == pytest.approx(spec.flops_per_s(dtype))
    assert spec.devices * spec.device_hbm_bytes_per_s == pytest.approx(spec.chips * spec.chip.hbm_bytes_per_s)
    assert spec.devices * spec.device_hbm_usable_bytes == pytest.approx(spec.hbm_usable_bytes)
    price = spec.chip.price_usd_per_hour
    assert spec.price_usd_per_hour == (None if price is None else price * spec.chips)


@given(slices(TPUS))
def test_wraparound(spec):
    """16 wraps on v5e and v6e, 32 on v3; on chips made of cubes all axes wrap or none does."""
    ring = {"v3": 32, "v5e": 16, "v6e": 16}.get(spec.chip.name)
    expected = [size == ring if ring else all(other % 4 == 0 for other in spec.shape) for size in spec.shape]
    assert list(spec.wraparound) == expected
    assert [axis.wrapped for axis in spec.physical_axes if axis.kind == "torus"] == expected


@pytest.mark.parametrize(
    ("text", "wraparound"),
    [
        ("v5e:8x16", (False, True)),
        ("v5e:4x4", (False, False)),
        ("v6e:16x16", (True, True)),
        ("v3:16x16", (False, False)),
        ("v3:16x32", (False, True)),
        ("v5p:2x2x4", (False, False, False)),
        ("v4:2x4x4", (False, False, False)),
        ("v4:4x4x4", (True, True, True)),
        ("tpu7x:4x4x8", (True, True, True)),
    ],
)
def test_wraparound_as_the_book_says(text, wraparound):
    assert Slice.parse(text).wraparound == wraparound


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("v5e:1x1", 1),
        ("v5e:2x2", 1),
        ("v5e:4x4", 2),
        ("v5p:1x1x1", 1),
        ("v5e:1x1@3", 3),
        ("h100:4", 1),
        ("h100:8x128", 128),
        ("gb300:72x4", 72),
    ],
)
def test_hosts(text, hosts):
    assert Slice.parse(text).hosts == hosts


# The network


def network(text: str) -> list[tuple[str, int, str, float, float, str]]:
    axes = Slice.parse(text).physical_axes
    return [(axis.name, axis.size, axis.kind, axis.bytes_per_s, axis.hop_s, axis.resource) for axis in axes]


def test_network_of_a_torus():
    assert network("v5e:4x8@2") == [
        ("x", 4, "torus", 4.5e10, 1e-6, "ici"),
        ("y", 8, "torus", 4.5e10, 1e-6, "ici"),
        ("dcn", 2, "dcn", 3.125e9, 0.0, "dcn"),
    ]


def test_two_devices_of_a_chip_share_its_links():
    assert network("tpu7x:2x2x1@2") == [
        ("x", 2, "torus", 4.5e10, 1e-6, "ici"),
        ("y", 2, "torus", 4.5e10, 1e-6, "ici"),
        ("z", 1, "torus", 4.5e10, 1e-6, "ici"),
        ("core", 2, "core", 5.4e11, 0.0, "ici"),
        ("dcn", 2, "dcn", 6.25e9, 0.0, "dcn"),
    ]
    # No figure is published for v3: memory bounds what its two devices can exchange.
    assert network("v3:2x2")[-1] == ("core", 2, "core", 4.5e11, 0.0, "ici")


def test_network_of_gpus():
    assert network("h100:8x128") == [
        ("node", 8, "switch", 4.5e11, 6e-7, "ici"),
        ("network", 128, "dcn", 5e10, 0.0, "dcn"),
    ]
    assert network("h100:4") == [("node", 4, "switch", 4.5e11, 6e-7, "ici")]


def test_a_dtype_without_a_peak_is_refused():
    with pytest.raises(RooftopError, match=r"^dtype of v5e: got 'f16'; accepted: .*bf16, f32, int4, int8$"):
        Slice.parse("v5e:4x4").flops_per_s("f16")


# The verb


def test_chips_json_lists_all(rooftop):
    answer = rooftop("chips", "--json")
    assert (answer.status, answer.err) == (0, "")
    assert [entry["name"] for entry in answer.json["chips"]] == list(catalogue())


def test_chips_json_of_one_chip(rooftop):
    answer = rooftop("chips", "v4p", "--json").json
    assert answer["name"] == "v4"
    assert answer["figures"]["hbm_bytes_per_s"] == {
        "value": 1.23e12,
        "unit": "B/s",
        "source": "Scaling Book, ch. 2 (problem 1; its table rounds to 1.2e12)",
        "date": "2025-02-04",
    }
    assert answer["figures"]["price_usd_per_hour"]["value"] is None


def test_chips_json_of_a_slice(rooftop):
    answer = rooftop("chips", "tpu7x:4x4x4@2", "--json").json
    assert (answer["name"], answer["chips"], answer["devices"], answer["hosts"]) == ("tpu7x:4x4x4@2", 128, 256, 32)
    assert answer["wraparound"] == [True, True, True]
    assert [axis["name"] for axis in answer["physical_axes"]] == ["x", "y", "z", "core", "dcn"]


@pytest.mark.parametrize("spec", CHIPS, ids=lambda spec: spec.name)
def test_tables_show_every_figure(rooftop, spec):
    lines = rooftop("chips", spec.name).out.splitlines()
    for name in spec.figures:
        assert any(line.startswith(f"{name} ") for line in lines), name
    assert f"\n{spec.name} " in rooftop("chips").out


def test_table_of_a_slice(rooftop):
    out = rooftop("chips", "v5e:8x16@2").out
    assert "256" in out
    assert [line.split()[3] for line in out.splitlines() if line.startswith(("x ", "y "))] == ["no", "yes"]


@pytest.mark.parametrize("argument", ["v5q", "v5e:17x16", "h100:8@2"])
def test_bad_input_is_one_line(rooftop, argument):
    answer = rooftop("chips", argument)
    assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)


def test_import_is_light():
    report = "import sys, rooftop.hardware as h; h.catalogue(); print({'numpy', 'rich', 'click'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
