"""Steps that only generate, one after another: their time in closed form."""

from __future__ import annotations

import math

from rooftop.scheduling.serving import Step
from rooftop.scheduling.serving_times import StepTimes


def joint_steps(times: StepTimes, step: Step, most: int) -> tuple[int, float, float]:
    """How many steps to take at once, at most ``most``; the time of the first and what each takes more than the last.

    Times are convex or concave in the context: where the second of three points lies on the line through the others,
    they are on a line all the way.
    """
    batch, context, grown = step.batch, step.context_tokens, step.growth
    first = times.generate_s(batch, context)
    if most == 1:
        return 1, first, 0.0
    growth = times.generate_s(batch, context + grown) - first
    while most > 2:
        last = times.generate_s(batch, context + (most - 1) * grown)
        if abs(first + (most - 1) * growth - last) <= 1e-9 * last:
            return most, first, (last - first) / (most - 1)
        most = (most + 1) // 2
    return most, first, growth


def run_seconds(steps: int, first: float, growth: float) -> float:
    """Time of ``steps`` steps, the first taking ``first`` and each ``growth`` more than the last."""
    return steps * first + growth * (steps * (steps - 1) / 2)


def steps_by(elapsed: float, first: float, growth: float, most: int) -> int:
    """The fewest steps (1 to ``most``) whose time is ``elapsed`` or more."""
    if growth:
        half = first - growth / 2
        root = half * half + 2 * growth * elapsed
        guess = (math.sqrt(max(root, 0.0)) - half) / growth
    else:
        guess = elapsed / first if first else 1.0
    steps = min(max(1, math.ceil(guess)), most)
    while steps > 1 and run_seconds(steps - 1, first, growth) >= elapsed:
        steps -= 1
    while steps < most and run_seconds(steps, first, growth) < elapsed:
        steps += 1
    return steps
