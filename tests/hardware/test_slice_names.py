"""Slices and chips by the names of clouds and schedulers."""

from __future__ import annotations

import math
import tomllib
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice, canonical, catalogue, is_slice, named_chip, renamed, slice_names
from rooftop.hardware.names import machines, tpu_names

#: Names of slices -> the slices that they are.
SLICES = {
    "v6e-256": "v6e:16x16",
    "V6E-8": "v6e:2x4",
    "v6e-1": "v6e:1x1",
    "v6e-128@4": "v6e:8x16@4",
    "v5litepod-16": "v5e:4x4",
    "v5e-16": "v5e:4x4",
    "v5lite-4": "v5e:2x2",
    "v3-8": "v3:2x2",
    "v3-2048": "v3:32x32",
    "v4-8": "v4:2x2x1",
    "v4-256": "v4:4x4x8",
    "v4-384": "v4:4x4x12",
    "v5p-8": "v5p:2x2x1",
    "v5p-64": "v5p:2x4x4",
    "v5p-512": "v5p:4x8x8",
    "v5p-12288": "v5p:16x16x24",
    "v5p-1024@2": "v5p:8x8x8@2",
    "tpu7x-2": "tpu7x:1x1x1",
    "tpu7x-64": "tpu7x:2x4x4",
    "v7x-512": "tpu7x:4x8x8",
    "tpu7x-18432": "tpu7x:16x24x24",
    "tpu7x-4x4x4": "tpu7x:4x4x4",
    "v6e-4x8": "v6e:4x8",
    "tpu-v6e-slice:4x4": "v6e:4x4",
    "tpu-v6e-slice 4x4": "v6e:4x4",
    "tpu-v5-lite-podslice:2x4": "v5e:2x4",
    "tpu-v5p-slice:2x2x4": "v5p:2x2x4",
    "tpu-v4-podslice:4x4x4": "v4:4x4x4",
    "ct4p-hightpu-4t": "v4:2x2x1",
    "ct5lp-hightpu-4t": "v5e:2x2",
    "ct5p-hightpu-4t": "v5p:2x2x1",
    "ct6e-standard-4t": "v6e:2x2",
    "ct6e-standard-8t": "v6e:2x4",
    "ct6e-standard-4t:8x8": "v6e:8x8",
    "tpu7x-standard-4t": "tpu7x:2x2x1",
    "tpu7x-standard-4t:4x4x4@2": "tpu7x:4x4x4@2",
    "a3-highgpu-8g": "h100:8",
    "a3-highgpu-8g@16": "h100:8x16",
    "a3-megagpu-8g": "h100:8",
    "a3-ultragpu-8g": "h200:8",
    "a4-highgpu-8g": "b200:8",
    "a4x-highgpu-4g": "gb200:4",
    "a2-ultragpu-8g": "a100:8",
    "p4de.24xlarge": "a100:8",
    "p5.48xlarge": "h100:8",
    "4xP5.48xlarge": "h100:8x4",
    "ml.p5.48xlarge": "h100:8",
    "p5.48xlarge x 4": "h100:8x4",
    "p5e.48xlarge": "h200:8",
    "p5en.48xlarge": "h200:8",
    "p6-b200.48xlarge": "b200:8",
    "p6-b300.48xlarge": "b300:8",
    "Standard_ND96isr_H100_v5": "h100:8",
    "Standard_ND96isr_H200_v5": "h200:8",
    "Standard_ND96amsr_A100_v4": "a100:8",
    "BM.GPU.H100.8": "h100:8",
    "8xH100": "h100:8",
    "8 x H100": "h100:8",
    "h100x8": "h100:8",
    "h100-8": "h100:8",
    "h200-141gb-8": "h200:8",
    "h100:16": "h100:8x2",
    "64xb200": "b200:8x8",
    "H100-SXM:4": "h100:4",
    "NVIDIA-H100-80GB-HBM3:8x4": "h100:8x4",
    "gb200x72": "gb200:72",
    "gb200:144": "gb200:72x2",
}
CHIPS = {
    "H100-SXM": "h100",
    "NVIDIA H100 80GB HBM3": "h100",
    "nvidia-h100-mega-80gb": "h100",
    "A100-80GB": "a100",
    "tpu-v6e-slice": "v6e",
    "TPU v5 lite": "v5e",
    "v5p-64": "v5p",
    "p5.48xlarge": "h100",
}
REFUSED = {
    "v6e-250": r"did you mean v6e-256 \(16x16\) or v6e-128 \(8x16\)\? v6e-N counts chips",
    "v5litepod-12": r"did you mean v5litepod-16 \(4x4\)",
    "v4-9": r"did you mean v4-8 \(2x2x1\) .* counts TensorCores, two a chip",
    "v5p-1": r"did you mean v5p-8 \(2x2x1\)",
    "v6e-0": r"did you mean v6e-1 \(1x1\)",
    "v2-8": r".* v2-8 has v2 chips, which the catalogue lacks",
    "a3-highgpu-8": r"did you mean a3-highgpu-8g \(h100:8\)\?",
    "12xH100": r"did you mean 8xh100 \(h100:8\) or 16xh100 \(h100:8x2\)\?",
    "0xh100": r"did you mean 8xh100 \(h100:8\)\?",
    "2xct6e-standard-4t": r"one machine of TPUs, or a topology of several: tpu-v6e-slice:",
    "v6e-4x16": r"1x1, 2x2, .*; nearest: v6e:",
}


@pytest.mark.parametrize(("name", "slice_"), SLICES.items())
def test_a_cloud_s_name_is_a_slice(name, slice_):
    assert Slice.parse(name).name == slice_
    assert is_slice(name)
    assert renamed(name) == f"{name} is {slice_}"


@pytest.mark.parametrize(("name", "chip"), CHIPS.items())
def test_a_published_name_is_a_chip(name, chip):
    assert named_chip(name).name == chip


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_a_near_miss_names_the_meant_form_and_its_shape(name, message):
    with pytest.raises(RooftopError, match=rf"^slice: got '[^']*'; accepted: {message}") as error:
        Slice.parse(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["h100-pcie", "h100-nvl", "a100-40gb-sxm", "gpu", "x", "8x", "-", "4x4"])
def test_other_products_and_parts_of_names_are_not_taken_for_a_chip(name):
    with pytest.raises(RooftopError):
        named_chip(name)


def test_every_machine_is_a_slice_or_says_which_chip_it_has():
    for name, machine in machines().items():
        if machine.chip in catalogue():
            spec = Slice.parse(name)
            assert spec.chip.name == machine.chip
            assert spec.chips == math.prod(int(side) for side in machine.shape.split("x"))
        else:
            with pytest.raises(RooftopError, match=rf"{name} has .*{machine.chip}.*, which the catalogue lacks"):
                Slice.parse(name)


def test_every_topology_of_the_table_is_a_slice_with_as_many_chips_as_its_name_counts():
    for names in tpu_names().values():
        if names.chip not in catalogue():
            continue
        for chips, topology in names.topologies.items():
            for prefix in names.prefixes:
                assert Slice.parse(f"{prefix}-{chips * names.per_chip}").name == f"{names.chip}:{topology}"
            assert Slice.parse(f"{names.chip}:{topology}").chips == chips


def test_every_row_of_the_table_has_a_source():
    data = tomllib.loads((resources.files("rooftop.hardware") / "names.toml").read_text(encoding="utf-8"))
    sources = {row["source"] for row in data["tpu"].values()} | {row[2] for row in data["machines"].values()}
    assert sources == set(data["sources"])
    assert all({"title", "date", "where"} == set(source) for source in data["sources"].values())


@given(spec=st.sampled_from(list(catalogue().values())), data=st.data())
def test_rooftop_s_own_names_stay_as_they_are(spec, data):
    shape = data.draw(st.sampled_from(spec.slice_shapes))
    name = Slice(spec, shape).name
    assert canonical(name) == name and renamed(name) is None
    assert canonical(spec.name) == spec.name and not is_slice(spec.name)
    for other in slice_names(spec):
        assert canonical(canonical(other)) == canonical(other)


@given(gpus=st.integers(1, 10_000), chip=st.sampled_from(["h100", "b200", "gb200"]))
def test_a_number_of_gpus_is_that_many_or_refused(gpus, chip):
    try:
        slices = [Slice.parse(text) for text in (f"{gpus}x{chip}", f"{chip}x{gpus}", f"{chip.upper()}-{gpus}")]
    except RooftopError:
        assert (gpus,) not in catalogue()[chip].slice_shapes and gpus % math.prod(catalogue()[chip].pod_shape)
        return
    assert {spec.chips for spec in slices} == {gpus} and len(set(slices)) == 1


@given(st.text(max_size=30) | st.from_regex(r"[a-z0-9.:@x-]{1,24}", fullmatch=True))
def test_any_text_is_read_or_refused_in_one_line(text):
    try:
        assert isinstance(canonical(text), str)
        named_chip(text)
    except RooftopError as error:
        assert "\n" not in str(error)
