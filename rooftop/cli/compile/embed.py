"""``rooftop compile`` of a plan of embedding tables: the compiler's high-water marks beside the planned ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftop.cli.output import emit_json, show
from rooftop.cli.process import uninterrupted

if TYPE_CHECKING:
    from rooftop.explain.embedding.compiled import EmbedRefusal, EmbedReport


def compiled_tables(data: Mapping[str, Any], check: str | None, how: Mapping[str, Any]) -> EmbedReport | EmbedRefusal:
    """Compile the plan in ``data``. Raises RooftopError for what is no such plan."""
    from rooftop.plan.embedding.plan import EmbedPlan

    with uninterrupted():
        from rooftop.compiler.compiling import require_compiler

    plan = EmbedPlan.from_json(data)
    require_compiler()
    from rooftop.compiler.sparsecore import parse_checks
    from rooftop.explain.embedding.compiled import compile_embed_plan
    from rooftop.explain.embedding.programs import Compilation

    return compile_embed_plan(plan, Compilation(checks=parse_checks(check), **how))


def give(answer: EmbedReport | EmbedRefusal, *, top: int, as_json: bool, output: Path | None) -> int:
    """Write and print the answer. Raises Infeasible where that is no."""
    from rooftop.core.files import write_text
    from rooftop.explain.embedding.compiled import EmbedRefusal

    data = answer.to_json(top=top)
    if output is not None:
        write_text(output, json.dumps(data, indent=1, allow_nan=False) + "\n")
    if as_json:
        emit_json(data)
    else:
        show(data, {"report": output}, plan=answer.plan.to_json())
    if isinstance(answer, EmbedRefusal):
        raise answer.infeasible
    return 0
