"""Transfers of a layer that nothing hides where XLA runs them asynchronously.

On TPU7x SparseCores run all collectives, next to computation. What hides one is then decided by XLA's order, which is
the same in all programs that were read (docs/evidence/accuracy.md):

- A layer has two parts, attention and MLP. XLA issues the gathers of a part's weights when the part begins, one array
  after the other. Nothing but the part's own transfers over ``tensor`` hides the first one; matmuls hide the rest.
- Gradients of weights are computed last, and each is scattered when it is there: the matmuls of the others hide that,
  and nothing hides the last one. The loop over layers does a period of them in one trip, of which this is the end:
  where a model alternates kinds of layers, the last sum over ``tensor`` of a trip overlaps the gradients of all.
- Inputs that are gathered over ``tensor`` again only for gradients of weights are not waited for. Where a part repeats
  its first matmul, the matmul of the gradient before it can hide them.

Without ``tensor`` there are no transfers between the matmuls of a pass, and any matmul of the layer hides a transfer.

Where the axes of weights and ``tensor`` have links in common, a transfer over one waits for those over the other that
were issued before. Then no transfer hides another one. Where no matmul is repeated, all that is issued with the
gradients of the MLP's last weights, to the end of the layer's backward pass, is one queue next to the computation.

On v5e AllGathers are asynchronous, and nothing else is: synchronous transfers hide nothing, so that the first gather of
the MLP's weights has only the matmul of attention's output before it, and scatters are paid elsewhere. Attention's
weights are gathered for the backward pass next to the MLP. Where the MLP is repeated, gradients of its weights hide the
gather of attention's gradient.

On chips but TPU7x gathers are asynchronous where weights are gathered between slices, and where they are gathered over
a whole slice with options of the compiler that make it so (``rooftop.compiler.options``). Between slices the
gathers of all weights of a layer are issued when the layer begins, forward and in the backward pass, and go over DCN
one after the other. Over a whole slice each is next to the matmul before it. Gradients are summed last, and the first
gather of the next layer waits behind their sums between slices: nothing hides those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rooftop.core.ledger import CollectiveKind, Number
from rooftop.core.scopes import Phase
from rooftop.frameworks.habits import Asynchronous
from rooftop.plan.pricing import StagePart, Transfer, Work

#: A pass with the part of its work, and a kind of transfers in it: their time is exposed by one share.
Group = tuple[tuple[str, str], str]

#: The phase in which a pass gathers its weights.
_GATHERED: Mapping[str, Phase] = {"forward": "forward", "backward": "recompute"}
_QKV, _CORE, _OUT = "layers/attn/qkv", "layers/attn/core", "layers/attn/out"


def group(item: Work, transfer: Transfer, asynchronous: Asynchronous) -> Group | None:
    """The group of a transfer whose exposed time ``LayerParts`` knows; None of others.

    ``asynchronous``: the collectives that XLA runs next to computation wherever there is any.
    """
    if not item.scope.startswith("layers/") or asynchronous == "none":
        return None
    window = "forward" if item.phase == "forward" else "backward", _part(item.scope)
    if transfer.hides == "tensor" and item.phase == "recompute" and transfer.kind == "all_gather":
        return window, "input_gather"
    if transfer.hides == "weight_gather":
        return window, "weight_gather"
    if asynchronous == "gathers":
        late = transfer.hides == "tensor" and item.phase == "backward" and item.scope == _OUT
        return (window, "gradient_gather") if late else None
    if transfer.hides == "gradient_scatter":
        return ("backward", "layers"), "gradient_scatter"
    if transfer.hides == "tensor" and item.phase == "backward" and item.scope == _QKV:
        return window, "stream_scatter"
    return None


def _part(scope: str) -> str:
    """The part of a layer: 'attn', or 'mlp' and 'moe' for the two kinds of layers."""
    part = scope.split("/")[1]
    return part if part in ("attn", "moe") else "mlp"


@dataclass(frozen=True)
class LayerParts:
    """Seconds of a step's layers, counts applied: computation, and each kind of transfer."""

    asynchronous: Asynchronous = "all"
    crosses: npt.NDArray[np.bool_] | bool = False
    """True where weights are gathered between slices, too."""
    ahead: npt.NDArray[np.bool_] | bool = False
    """True where they are gathered asynchronously within slices."""
    shared: npt.NDArray[np.bool_] | bool = False
    """True where the axes of weights and ``tensor`` have links in common."""
    least: bool = False
    """True for lower bounds: prices are the least of several layouts."""
    compute: dict[tuple[str, Phase], Number] = field(default_factory=dict)
    gathers: dict[tuple[str, Phase], Number] = field(default_factory=dict)
    scatters: dict[str, Number] = field(default_factory=dict)
    tensor: dict[tuple[str, Phase, str], Number] = field(default_factory=dict)
    between: dict[tuple[str, Phase], Number] = field(default_factory=dict)
    """Of the gathers that part which is between slices."""
    arrays: dict[str, Number] = field(default_factory=dict)
    """Gathers in all executions, by scope."""
    periods: dict[str, int] = field(default_factory=dict)
    """Layers in one trip of the loop over layers, by part."""
    repeated: dict[str, Number] = field(default_factory=dict)
    """Seconds of matmuls that are repeated for the backward pass, by scope."""
    counts: dict[str, dict[StagePart, Number]] = field(default_factory=dict)
    """Layers in all executions, by part, and by the pipeline stage's part: not all layers are shared by stages."""

    def add(self, item: Work, compute_s: Number, transfers: Iterable[tuple[Transfer, Number, Number]]) -> None:
        """Count a piece of work, with the seconds of all its executions: of transfers, and of them between slices."""
        scope, phase = item.scope, item.phase
        if not scope.startswith("layers/"):
            return
        _add(self.compute, (scope, phase), compute_s)
        self.periods[_part(scope)] = item.period
        if phase == "recompute":
            _add(self.repeated, scope, item.count * item.matmul_s)
        for transfer, seconds, between in transfers:
            if transfer.hides == "weight_gather":
                _add(self.gathers, (scope, phase), seconds)
                _add(self.between, (scope, phase), between)
                if phase == "forward":
                    self.counts.setdefault(_part(scope), {}).setdefault(item.part, item.count)
                    _add(self.arrays, scope, item.count * transfer.pieces * transfer.when)
            elif transfer.hides == "gradient_scatter":
                _add(self.scatters, scope, seconds)
            elif transfer.hides == "tensor":
                _add(self.tensor, (scope, phase, transfer.kind), seconds)

    def exposed(self) -> dict[Group, Number]:
        """Seconds of each group that nothing hides."""
        seconds: dict[Group, Number] = {}
        if self.asynchronous == "none":
            if np.any(self.gathers_hide):
                for window in _GATHERED:
                    waited = np.where(self.gathers_hide, self._waited_s(window), self._gathered_s(window))
                    seconds[(window, "layers"), "weight_gather"] = waited
            return seconds
        for part, _, repeated in self._inputs():
            waits = [
                np.maximum(self._first_gathers_s(window, part) - self._before_s(window, part), 0.0)
                for window in ("forward", "backward")
            ]
            if self.asynchronous == "gathers":
                # What is repeated begins as it does forward; attention's weights are gathered next to the MLP.
                waits[1] = np.where(repeated > 0, waits[0], 0.0 if part == "attn" else waits[1])
            for window, wait in zip(("forward", "backward"), waits, strict=True):
                if np.any(self.crosses):
                    every = self._gathered_s(window)
                    share = self._gathered_s(window, part) / np.where(every > 0, every, 1.0)
                    wait = np.where(self.crosses, share * self._waited_s(window), wait)
                seconds[(window, part), "weight_gather"] = wait
            seconds[("backward", part), "input_gather"] = self._input_gathers_s(part)
        seconds[("backward", "layers"), "gradient_scatter"] = self._last_scatters_s
        seconds[("backward", "attn"), "stream_scatter"] = self._stream_scatter_s
        seconds[("backward", "attn"), "gradient_gather"] = self._gradient_gather_s
        return seconds

    @property
    def gathers_hide(self) -> npt.NDArray[np.bool_]:
        """True where gathers hide more than the chip's other programs let them."""
        hide: npt.NDArray[np.bool_] = np.asarray(self.crosses) | (
            np.asarray(self.ahead) & (self.asynchronous == "none")
        )
        return hide

    def _gathered_s(self, window: str, *parts: str) -> Number:
        """Seconds of a pass's gathers of weights, of some parts or of all."""
        own = [(_part(scope), one) for (scope, phase), one in self.gathers.items() if phase == _GATHERED[window]]
        return sum((one for part, one in own if not parts or part in parts), np.float64(0.0))

    def _waited_s(self, window: str) -> Number:
        """Seconds in which layers wait for their weights, where these are gathered asynchronously."""
        scopes = [scope for part in ("attn", "mlp", "moe") if part in self.counts for scope in self._scopes(part)]
        if window == "forward":
            return self._waited_in_order_s(scopes, "forward")
        repeated = sum((needed for part, _, needed in self._inputs() if part != "attn"), 0.0)
        again = self._waited_in_order_s(scopes, "recompute")
        once = self._waited_in_order_s(scopes[::-1], "recompute", "backward")
        return np.where(np.asarray(repeated) > 0, again, once)

    def _waited_in_order_s(self, scopes: Iterable[str], phase: Phase, *more: Phase) -> Number:
        """Seconds in which scopes in order wait for the weights that are gathered in a phase."""
        late: Number = 0.0  # Of gathers between slices, which all begin with the first one.
        inside: Number = 0.0  # Of gathers within slices.
        arrived: Number = 0.0
        computed: Number = 0.0
        before: Number = 0.0  # The last matmul with weights.
        for scope in scopes:
            compute = sum((self._of(scope, one) for one in (phase, *more)), 0.0)
            if scope not in self.arrays:
                computed = computed + compute
                continue
            arrays, between = self._pieces(scope), self.between.get((scope, phase), 0.0)
            gathered = self.gathers.get((scope, phase), 0.0) - between
            # What is gathered asynchronously within slices too has to arrive one matmul earlier, next to which it is.
            one = compute / arrays + np.where(np.asarray(self.ahead) | self.least, 0.0, gathered / arrays)
            first = arrived + between / arrays - computed + np.where(self.ahead, before, 0.0)
            last = arrived + between - computed - np.maximum(arrays - np.where(self.ahead, 2, 1), 0.0) * one
            late = np.maximum(late, np.maximum(first, np.where(np.asarray(arrays) > 1, last, first)))
            shown = np.maximum(gathered / arrays - before, 0.0)
            shown = shown + (arrays - 1) * np.maximum(gathered / arrays - one, 0.0)
            inside = inside + np.where(self.ahead, shown, gathered)
            before, computed, arrived = one, computed + arrays * one, arrived + between
        # Of a lower bound the seconds within slices and between them may be those of different layouts.
        return late + np.where(np.asarray(self.crosses) & self.least, 0.0, inside)

    def _scopes(self, part: str) -> list[str]:
        """Scopes of a part in the order of the forward pass."""
        return list(dict.fromkeys(scope for scope, _ in self.compute if _part(scope) == part))

    def _matmuls(self, part: str) -> list[str]:
        """Those of them that have weights."""
        return [scope for scope in self._scopes(part) if scope in self.arrays]

    def _of(self, scope: str, phase: Phase) -> Number:
        return self.compute.get((scope, phase), 0.0)

    def _gradient_s(self, scope: str) -> Number:
        """Seconds of the gradients of a scope's weights: inputs' and weights' gradients are matmuls of equal FLOPs."""
        return self._of(scope, "backward") / 2

    @cached_property
    def _layers(self) -> dict[str, Number]:
        """Layers in all executions, by part."""
        return {part: sum(counts.values(), 0.0) for part, counts in self.counts.items()}

    def _pieces(self, scope: str) -> Number:
        """Arrays of a scope in one layer."""
        if scope not in self.arrays:
            return 1.0
        return np.maximum(self.arrays[scope] / np.maximum(self._layers[_part(scope)], 1e-9), 1.0)

    def _over_tensor_s(self, scopes: Iterable[str], phase: Phase, kind: CollectiveKind) -> Number:
        return sum((self.tensor.get((scope, phase, kind), 0.0) for scope in scopes), 0.0)

    @cached_property
    def _alone(self) -> Number:
        """True where no transfers over tensor stand between a pass's matmuls."""
        return sum(self.tensor.values(), 0.0) == 0

    def _first_gathers_s(self, window: str, part: str) -> Number:
        """Seconds in which a part waits for its weights, which are gathered one after the other from its beginning."""
        scopes = self._scopes(part)
        forward = window == "forward"
        waited: Number = 0.0
        gathered: Number = 0.0
        computed: Number = 0.0
        for scope in scopes if forward else reversed(scopes):
            gather = self.gathers.get((scope, "forward" if forward else "recompute"), 0.0)
            if forward:
                compute = self._of(scope, "forward")
            else:
                compute = self._of(scope, "recompute") + self._of(scope, "backward")
                compute = compute - (self._gradient_s(scope) if scope in self.arrays else 0.0)
            arrays = self._pieces(scope)
            here = np.maximum(gather / arrays, gather - compute * (1 - 1 / arrays))
            waited = np.maximum(waited, gathered - computed + here)
            gathered, computed = gathered + gather, computed + compute
        return waited

    def _before_s(self, window: str, part: str) -> Number:
        """Seconds of what stands between the issue of a part's first gather and the matmul that needs it."""
        if self.asynchronous == "gathers":
            # Synchronous transfers hide nothing.
            return self._of(_OUT, "forward") if window == "forward" and part != "attn" else 0.0
        waits = np.asarray(self.shared) & ~np.asarray(self._alone)
        before = np.where(waits, 0.0, self._before_apart_s(window, part))
        if window == "backward" and part == "attn":
            # They come before the gather of attention's gradient, which waits for them.
            before = np.where(self._queued, self._gathered_s(window, part), before)
        return before

    @property
    def _queued(self) -> npt.NDArray[np.bool_]:
        """True where the transfers at the end of a layer's backward pass are one queue."""
        queued: npt.NDArray[np.bool_] = np.asarray(self.shared) & self._early
        return queued

    def _before_apart_s(self, window: str, part: str) -> Number:
        """``_before_s`` where transfers over different axes do not wait for each other."""
        own, others = self._scopes(part), [scope for name in ("mlp", "moe") for scope in self._scopes(name)]
        if window == "forward":
            gather = self._over_tensor_s(own, "forward", "all_gather")
            if part == "attn":
                return gather
            before = gather + self._over_tensor_s([_OUT], "forward", "reduce_scatter")
            return np.where(self._alone, self._of(_OUT, "forward"), before)
        if part == "attn":
            before = self._over_tensor_s(others, "backward", "reduce_scatter")
            before = before + self._over_tensor_s([_OUT], "backward", "all_gather")
            return np.where(self._alone, sum((self._of(scope, "backward") for scope in others), 0.0), before)
        before = self._over_tensor_s(own, "backward", "all_gather")
        return np.where(self._alone, self._gradient_s(self._matmuls(part)[-1]), before)

    @property
    def _last_scatters_s(self) -> Number:
        """Seconds of scatters beyond the matmuls of gradients that are still to be computed."""
        others = [scope for scope in self.scatters if _part(scope) != "attn"][::-1]
        order = [*others[:1], _OUT, *others[1:], _QKV]
        share = np.where(self._alone, 2.0, 1.0)
        steps = [
            (share * self._gradient_s(scope), self.scatters.get(scope, 0.0), self._pieces(scope)) for scope in order
        ]
        longest: Number = 0.0
        computed: Number = 0.0
        steps, period = steps * self._period, self._period
        left = sum((scatter for _, scatter, _ in steps), 0.0)
        for gradient, scatter, arrays in steps:
            first = computed + gradient / arrays + left
            last = computed + gradient + scatter / arrays + left - scatter
            longest = np.maximum(longest, np.maximum(first, last))
            computed, left = computed + gradient, left - scatter
        return np.where(self._early, self._early_scatters_s, np.maximum(longest - computed, 0.0) / period)

    @property
    def _early(self) -> npt.NDArray[np.bool_]:
        """True where gradients of a dense MLP's weights are computed next to attention: nothing is computed again."""
        nothing_again = np.asarray(self._of("layers/attn/norm", "recompute")) == 0
        plain = self._period == 1 and "moe" not in self.counts
        early: npt.NDArray[np.bool_] = nothing_again & ~np.asarray(self._alone) & plain
        return early

    @property
    def _early_scatters_s(self) -> Number:
        """Seconds of scatters that begin with attention's backward pass, after the gathers of its weights."""
        scatters = [scope for scope in self.scatters if _part(scope) != "attn"]
        first = sum((self._gradient_s(scope) for scope in scatters[-1:]), 0.0)
        gathers = self._gathered_s("backward", "attn")
        room = self._of(_CORE, "backward") + sum((self._gradient_s(scope) for scope in scatters), 0.0) - first
        room = room + sum((self._of(scope, "backward") for scope in (_OUT, _QKV)), 0.0)
        scattered = sum(self.scatters.values(), 0.0)
        apart = np.maximum(scattered + np.maximum(gathers - first, 0.0) - room, 0.0)
        queue = scattered + self._free_inputs_s + self._over_tensor_s([_QKV], "backward", "reduce_scatter")
        return np.where(self._queued, np.maximum(queue - room, 0.0), apart)

    @property
    def _period(self) -> int:
        """Layers in one trip of the loop over layers; the gradients of their weights are computed at its end."""
        return max(self.periods.values(), default=1)

    def _inputs(self) -> Iterator[tuple[str, Number, Number]]:
        """Each part's inputs that are gathered again, and 1 where they are needed at once: a matmul is repeated."""
        for part in self.counts:
            scopes = self._matmuls(part)
            seconds = self._over_tensor_s(scopes, "recompute", "all_gather")
            again = sum((self.repeated.get(scope, 0.0) for scope in scopes[:1]), 0.0)
            yield part, seconds, np.where(np.asarray(again) > 0, 1.0, 0.0)

    @cached_property
    def _free_inputs_s(self) -> Number:
        """Seconds of inputs that only gradients of weights wait for."""
        return sum(((1 - needed) * seconds for _, seconds, needed in self._inputs()), 0.0)

    @cached_property
    def _gradients_s(self) -> Number:
        """Seconds of gradients of weights, but for the last ones, which hide nothing."""
        return sum((self._gradient_s(scope) for scope in self.arrays if scope != _QKV), 0.0)

    def _input_gathers_s(self, part: str) -> Number:
        for name, seconds, needed in self._inputs():
            if name == part:
                free = self._free_inputs_s
                room = self._of(_CORE, "backward") + self._gradients_s
                share = 1 - np.minimum(free, room) / np.where(free > 0, free, 1.0)
                before = 0.0 if part == "attn" else self._gradient_s(self._matmuls(part)[-1])
                waited = np.where(needed > 0, np.maximum(seconds - before, 0.0), share * seconds)
                return np.where(self._queued, 0.0, waited)
        return 0.0

    @property
    def _stream_scatter_s(self) -> Number:
        """Seconds of the scatter that ends a layer's backward pass; gradients of weights that stay whole hide it.

        Where a trip has several layers, the gradients of all of them hide that of the last one.
        """
        seconds = self._over_tensor_s([_QKV], "backward", "reduce_scatter")
        room = self._gradients_s - np.maximum(self._free_inputs_s - self._of(_CORE, "backward"), 0.0)
        scattered = sum(self.scatters.values(), 0.0)
        last = 0.0 if self._period == 1 else np.minimum(seconds / self._period, self._gradients_s)
        last = np.where(self._early, np.minimum(seconds, self._last_scatters_s), last)
        return seconds - np.where(scattered > 0, last, np.clip(room, 0.0, seconds))

    @property
    def _gradient_gather_s(self) -> Number:
        """Seconds of the gather of attention's gradient; where the MLP is repeated, its weights' gradients hide it."""
        seconds = self._over_tensor_s([_OUT], "backward", "all_gather")
        mlps = [(name, needed) for name, _, needed in self._inputs() if name != "attn"]
        room = sum((needed * self._gradient_s(scope) for name, needed in mlps for scope in self._matmuls(name)), 0.0)
        gathers = self._gathered_s("backward", "attn")
        queue = gathers + seconds - sum((self._gradient_s(self._matmuls(name)[-1]) for name, _ in mlps), 0.0)
        return np.where(self._queued, np.clip(queue, 0.0, seconds), np.maximum(seconds - room, 0.0))


_Key = TypeVar("_Key")


def _add(sums: dict[_Key, Number], key: _Key, seconds: Number) -> None:
    sums[key] = sums.get(key, 0.0) + seconds
