"""Transfers of a layer in XLA's order on TPU7x: hand-made layers, and their exposed seconds by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rooftop.arrays import Mesh
from rooftop.arrays.rules import COLUMN_AXES, GATHER_AXES
from rooftop.core.ledger import CollectiveKind
from rooftop.core.scopes import Phase
from rooftop.frameworks.habits import Asynchronous
from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.plan.layouts import from_mesh
from rooftop.plan.parts import LayerParts, group
from rooftop.plan.pricing import Hiding, Transfer, Work
from rooftop.plan.training.answer import plan_training
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.strategies import Strategies
from rooftop.plan.training.workload import Workload

#: Scope, phase, seconds of computation, and transfers: kind, assumption, pieces, seconds.
_Line = tuple[str, Phase, float, list[tuple[CollectiveKind, Hiding, float, float]]]

_LAYER: list[_Line] = [
    ("layers/attn/qkv", "forward", 3.0, [("all_gather", "weight_gather", 3, 3.0)]),
    ("layers/attn/qkv", "recompute", 0.0, [("all_gather", "weight_gather", 3, 3.0)]),
    ("layers/attn/qkv", "backward", 6.0, [("reduce_scatter", "gradient_scatter", 3, 3.0)]),
    ("layers/attn/core", "forward", 5.0, []),
    ("layers/attn/core", "backward", 10.0, []),
    ("layers/attn/out", "forward", 1.0, [("all_gather", "weight_gather", 1, 1.0)]),
    ("layers/attn/out", "recompute", 0.0, [("all_gather", "weight_gather", 1, 1.0)]),
    ("layers/attn/out", "backward", 2.0, [("reduce_scatter", "gradient_scatter", 1, 1.0)]),
    ("layers/mlp/up", "forward", 4.0, [("all_gather", "weight_gather", 2, 8.0)]),
    ("layers/mlp/up", "recompute", 0.0, [("all_gather", "weight_gather", 2, 8.0)]),
    ("layers/mlp/up", "backward", 8.0, [("reduce_scatter", "gradient_scatter", 2, 8.0)]),
    ("layers/mlp/down", "forward", 2.0, [("all_gather", "weight_gather", 1, 4.0)]),
    ("layers/mlp/down", "recompute", 0.0, [("all_gather", "weight_gather", 1, 4.0)]),
    ("layers/mlp/down", "backward", 4.0, [("reduce_scatter", "gradient_scatter", 1, 4.0)]),
]
#: Activations over tensor, one second each.
_TENSOR: list[_Line] = [
    (scope, phase, 0.0, [(kind, "tensor", 1, 1.0)])
    for scope, inside, ends in (
        ("layers/attn/qkv", "all_gather", "reduce_scatter"),
        ("layers/attn/out", "reduce_scatter", "all_gather"),
        ("layers/mlp/up", "all_gather", "reduce_scatter"),
        ("layers/mlp/down", "reduce_scatter", "all_gather"),
    )
    for phase, kind in (("forward", inside), ("backward", ends), *([("recompute", inside)] * (inside == "all_gather")))
]  # type: ignore[misc]

#: A norm that is computed again, as with all remat policies but one that keeps everything.
_AGAIN: list[_Line] = [("layers/attn/norm", "recompute", 1.0, [])]


def _exposed(
    lines: list[_Line],
    asynchronous: Asynchronous = "all",
    *,
    crosses: bool = False,
    ahead: bool = False,
    shared: bool = False,
    period: int = 1,
) -> dict[tuple[tuple[str, str], str], float]:
    """Seconds that nothing hides; gathers that cross slices are between them alone."""
    parts = LayerParts(asynchronous, crosses=np.asarray(crosses), ahead=np.asarray(ahead), shared=np.asarray(shared))
    for scope, phase, compute_s, transfers in lines:
        item = Work(scope=scope, phase=phase, count=1.0, formula="", matmul_s=compute_s, period=period)
        priced = [
            (Transfer(kind, ("fsdp",), 0.0, hides, pieces=n), s, s if crosses else 0.0)
            for kind, hides, n, s in transfers
        ]
        parts.add(item, compute_s, priced)
    return {key: float(seconds) for key, seconds in parts.exposed().items()}


def test_a_part_waits_for_its_first_gathers_and_a_layer_for_its_last_scatters() -> None:
    exposed = _exposed(_LAYER + _TENSOR + _AGAIN)
    # The gather of activations takes as long as that of the first of three arrays; matmuls of a second hide the others.
    assert exposed[("forward", "attn"), "weight_gather"] == 0.0
    # 12 s are gathered from the sum of attention's outputs on, and the last matmul needs the last of them. Before that
    # are two transfers over tensor and 4 s of matmuls.
    assert exposed[("forward", "mlp"), "weight_gather"] == 12.0 - 4.0 - 2.0
    # Backwards the first matmul is down's: then 4 s, and half of up's, are left to hide up's 8 s, one transfer before.
    assert exposed[("backward", "mlp"), "weight_gather"] == 12.0 - 2.0 - 2.0 - 1.0
    # The first gradient takes 2 s; 16 s of scatters follow, next to 10 - 2 s of matmuls.
    assert exposed[("backward", "layers"), "gradient_scatter"] == 2.0 + 16.0 - 10.0
    assert exposed[("backward", "attn"), "input_gather"] == exposed[("backward", "mlp"), "input_gather"] == 0.0
    assert exposed[("backward", "attn"), "stream_scatter"] == 1.0


def test_without_scatters_gradients_hide_the_layers_last_sum() -> None:
    lines = [(*line[:3], []) if line[1] == "backward" else line for line in _LAYER]
    assert _exposed(lines + _TENSOR)[("backward", "attn"), "stream_scatter"] == 0.0


def test_gradients_of_a_trip_of_two_layers_hide_its_last_sum() -> None:
    exposed = _exposed(_LAYER + _TENSOR + _AGAIN, period=2)
    # The first gradient takes 2 s; 32 s of scatters follow, next to 20 - 2 s of matmuls: in a trip, of two layers.
    assert exposed[("backward", "layers"), "gradient_scatter"] == (2.0 + 32.0 - 20.0) / 2
    assert exposed[("backward", "attn"), "stream_scatter"] == 0.5


def test_where_nothing_is_repeated_gradients_are_scattered_next_to_attention() -> None:
    exposed = _exposed(_LAYER + _TENSOR)
    # 16 s of scatters have room next to 10 s of the kernel, 8 s of attention's matmuls and 4 s of up's gradient, less
    # 2 s in which attention's weights are still gathered.
    assert exposed[("backward", "layers"), "gradient_scatter"] == 0.0
    assert exposed[("backward", "attn"), "stream_scatter"] == 1.0
    short = [(*line[:2], 1.0, line[3]) if line[:2] == ("layers/attn/core", "backward") else line for line in _LAYER]
    exposed = _exposed(short + _TENSOR)
    assert exposed[("backward", "layers"), "gradient_scatter"] == 16.0 + 2.0 - (1.0 + 8.0 + 4.0)
    # The layer's last sum is over other links.
    assert exposed[("backward", "attn"), "stream_scatter"] == 0.0


def test_transfers_over_common_links_hide_none_of_each_other() -> None:
    """As in the tests before, but for the transfers over tensor before a part's first matmul."""
    exposed = _exposed(_LAYER + _TENSOR + _AGAIN, shared=True)
    assert exposed[("forward", "attn"), "weight_gather"] == 1.0
    assert exposed[("forward", "mlp"), "weight_gather"] == 12.0 - 4.0
    assert exposed[("backward", "mlp"), "weight_gather"] == 12.0 - 2.0 - 2.0
    # Without tensor there is nothing to wait for.
    assert _exposed(_LAYER + _AGAIN, shared=True) == _exposed(_LAYER + _AGAIN)


def test_where_nothing_is_repeated_the_end_of_a_layer_over_common_links_is_one_queue() -> None:
    short = [(*line[:2], 1.0, line[3]) if line[:2] == ("layers/attn/core", "backward") else line for line in _LAYER]
    exposed = _exposed(short + _TENSOR, shared=True)
    # 4 s of attention's weights and the gather of its gradient have the 2 s of down's gradient next to them.
    assert exposed[("backward", "attn"), "weight_gather"] == 0.0
    assert exposed[("backward", "attn"), "gradient_gather"] == 1.0
    # Then 16 s of scatters, two inputs that are gathered again and the stream's scatter; computed are 13 s.
    assert exposed[("backward", "layers"), "gradient_scatter"] == 16.0 + 2.0 + 1.0 - (1.0 + 8.0 + 4.0)
    assert exposed[("backward", "attn"), "stream_scatter"] == 0.0
    assert exposed[("backward", "attn"), "input_gather"] == exposed[("backward", "mlp"), "input_gather"] == 0.0


def test_a_repeated_matmul_waits_for_its_input() -> None:
    again: list[_Line] = [("layers/attn/qkv", "recompute", 3.0, []), ("layers/mlp/up", "recompute", 4.0, [])]
    exposed = _exposed(_LAYER + _TENSOR + again)
    assert exposed[("backward", "attn"), "input_gather"] == 1.0
    # The gradient of down's input needs nothing that is repeated: 2 s next to 1 s.
    assert exposed[("backward", "mlp"), "input_gather"] == 0.0
    # Gradients of weights can wait until attention's gradient is gathered.
    assert exposed[("backward", "attn"), "gradient_gather"] == 0.0
    assert _exposed(_LAYER + _TENSOR)[("backward", "attn"), "gradient_gather"] == 1.0


def test_synchronous_transfers_hide_no_gathers() -> None:
    exposed = _exposed(_LAYER + _TENSOR, "gathers")
    assert exposed[("forward", "attn"), "weight_gather"] == 1.0
    # The matmul of attention's output takes 1 s; the MLP's gathers are 12 s, the matmuls before the last of them 4 s.
    assert exposed[("forward", "mlp"), "weight_gather"] == 12.0 - 4.0 - 1.0
    assert exposed[("backward", "attn"), "weight_gather"] == 0.0
    assert exposed[("backward", "mlp"), "weight_gather"] == 12.0 - 2.0 - 2.0
    again: list[_Line] = [("layers/attn/qkv", "recompute", 3.0, []), ("layers/mlp/up", "recompute", 4.0, [])]
    repeated = _exposed(_LAYER + _TENSOR + again, "gathers")
    for part in ("attn", "mlp"):
        assert repeated[("backward", part), "weight_gather"] == exposed[("forward", part), "weight_gather"]


def test_gathers_between_slices_begin_with_their_layer() -> None:
    """They take 3, 1, 8 and 4 s; the matmuls that need them 3, 1, 4 and 2 s, and attention 5 s."""
    key = ("forward", "layers"), "weight_gather"
    # The last one is there after 16 s, and 13 s are computed before its matmul.
    assert _exposed(_LAYER, "none", crosses=True)[key] == 16.0 - 13.0
    # Gathered within the slice next to the matmul before, it has to be there 2 s earlier.
    assert _exposed(_LAYER, "none", crosses=True, ahead=True)[key] == 16.0 - 11.0
    # Without anything to repeat, the backward pass begins with down's matmul.
    assert _exposed(_LAYER, "none", crosses=True)[("backward", "layers"), "weight_gather"] == 4.0
    again: list[_Line] = [(*line[:1], "recompute", line[2], []) for line in _LAYER if line[1] == "forward"]
    repeated = _exposed(_LAYER + again, "none", crosses=True)
    assert repeated[("backward", "layers"), "weight_gather"] == 16.0 - 13.0


def test_gathers_over_a_whole_slice_hide_behind_the_matmul_before() -> None:
    """Nothing is before the first of three arrays; up's two are next to 1 s and 2 s, and down's is next to 2 s."""
    exposed = _exposed(_LAYER, "none", ahead=True)[("forward", "layers"), "weight_gather"]
    assert exposed == 1.0 + (4.0 - 1.0) + (4.0 - 2.0) + (4.0 - 2.0)
    assert not _exposed(_LAYER, "none")


def test_only_transfers_of_layers_have_groups() -> None:
    gather = Transfer("all_gather", ("fsdp",), 1.0, "weight_gather")
    assert group(Work(scope="unembed", phase="forward", count=1.0, formula=""), gather, "all") is None
    experts = Work(scope="layers/moe/experts", phase="recompute", count=1.0, formula="")
    assert group(experts, gather, "all") == (("backward", "moe"), "weight_gather")
    scatter = Transfer("reduce_scatter", ("fsdp",), 1.0, "gradient_scatter")
    assert group(experts, gather, "gathers") == group(experts, gather, "all")
    assert group(experts, scatter, "gathers") is None
    assert group(experts, gather, "none") is None


@pytest.mark.parametrize(
    ("layout", "shared"),
    [("fsdp=x+z[2:2]+core,tensor=y+z[1:2]", True), ("fsdp=x+y+core,tensor=z", False), ("fsdp=x+y+z+core", False)],
)
def test_axes_share_links_where_both_have_devices_along_a_physical_axis(layout: str, shared: bool) -> None:
    strategies = Strategies(from_mesh(Mesh.from_layout(Slice.parse("tpu7x:2x2x4"), layout)), ())
    assert strategies.share_links(GATHER_AXES, COLUMN_AXES).tolist() == [[shared]]


def test_assumed_shares_bound_what_parts_hide() -> None:
    def plan(**hidden: float) -> TrainingPlan:
        asked = Problem(
            model=load_model("llama2-7b"),
            slice=Slice.parse("tpu7x:2x2x2"),
            workload=Workload(batch_tokens=8 * 4096, seq_len=4096),
            axes={"fsdp": 8, "tensor": 2},
            remat="matmuls",
            microbatches=1,
        )
        assumed = replace(asked, assumptions=Assumptions(hidden=hidden))
        return plan_training(assumed, alternatives=0).plan

    by_schedule = plan()
    for kind in ("weight_gather", "gradient_scatter"):
        assert plan(**{kind: 0.0}).expected_s > by_schedule.expected_s
        assert plan(**{kind: 1.0}).expected_s == pytest.approx(by_schedule.expected_s)
    assert plan(tensor=1.0).expected_s < by_schedule.expected_s
