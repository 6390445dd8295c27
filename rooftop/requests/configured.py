"""Requests for plans of configurations: their fields are those that the configuration states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rooftop.core.errors import RooftopError
from rooftop.core.files import read_text
from rooftop.frameworks.framework import FRAMEWORKS, parse_settings
from rooftop.frameworks.recipes import recipes
from rooftop.frameworks.words.configurations import frameworks_of, stated_recipe, stated_step
from rooftop.frameworks.words.step import StatedStep
from rooftop.hardware import Slice
from rooftop.requests.inputs import model_of
from rooftop.requests.planning import PlanTraining

#: The largest configuration in bytes.
_MOST_BYTES = 1 << 20
_FORMS = {
    "megatron": "a script or its --options",
    "maxtext": "YAML, or a command with key=value",
    "torchtitan": "the TOML of release 0.2.2",
}


def configured_request(request: PlanTraining, slice_: Slice) -> tuple[PlanTraining, StatedStep]:
    """The request for the plan of a configuration on a slice, and what the configuration states.

    Fields that the request has already stay: they change the configuration. Raises RooftopError for a file that cannot
    be read, and for what the framework refuses.
    """
    path = Path(str(request.configuration))
    if request.framework == FRAMEWORKS[0]:
        others = " or ".join(FRAMEWORKS[1:])
        raise RooftopError("from", str(path), f"this with the framework that it configures: --framework {others}")
    model = None if request.model is None else model_of(request.model)
    is_recipe = path.name in recipes(request.framework) or not path.suffix
    if not path.exists() and is_recipe and len(path.parts) == 1:
        return _changed(request, stated_recipe(request.framework, path.name, slice_, model))
    try:
        text = read_text(path, most=_MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise RooftopError("from", str(path), f"a configuration that can be read ({reason})") from None
    _require_words(request.framework, text, path)
    return _changed(request, stated_step(request.framework, text, slice_, model))


def _require_words(framework: str, text: str, path: Path) -> None:
    """Raise RooftopError if a file has no words of a framework, with the frameworks whose words it has."""
    known = frameworks_of(text)
    if framework in known:
        return
    others = f"; these are words of --framework {' or '.join(known)}" if known else ""
    raise RooftopError("from", str(path), f"a configuration of {framework}: {_FORMS[framework]}{others}")


def _changed(request: PlanTraining, stated: StatedStep) -> tuple[PlanTraining, StatedStep]:
    """The request with the fields of a configuration, unless it has them itself."""
    usual = PlanTraining(model="", on="")
    fields = dict(stated.fields)
    if request.mesh is not None or request.layout is not None:
        del fields["mesh"]
    if request.schedule is not None or request.chunks != usual.chunks:
        # They go together.
        fields |= {"schedule": None, "chunks": None}
    if request.batch_tokens is not None:
        fields.pop("batch_seqs", None)
    settings = fields.pop("framework_settings")
    assert isinstance(settings, dict)
    changes = {
        name: value
        for name, value in fields.items()
        if value is not None and getattr(request, name) == getattr(usual, name)
    }
    asked = settings | parse_settings(request.framework_settings)
    return (
        replace(request, configuration=None, model=stated.model, framework_settings=asked, **changes),  # type: ignore[arg-type]
        stated,
    )
