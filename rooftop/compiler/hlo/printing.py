"""The text of XLA's modules. Its reader and printer of modules are private in jaxlib: they are used only here.

jaxlib is imported when a module is read: what has the text already needs none.
"""

from __future__ import annotations

import math
import re
from typing import Any

#: A constant whose elements the text leaves out.
_ELIDED = re.compile(r"= (\w+)\[([\d,]*)\]\S* constant\(\{\.\.\.\}\)")
#: Elements of all such constants of a module that are written; a weight may be a constant too.
_WRITTEN = 2**22


def written(module: Any) -> str:
    """The text of a module of jaxlib, as ``compiled.as_text()`` writes it, with the tables that Pallas kernels read.

    These are constants of integers, such as the block masks of sparse attention; other large constants are elided.
    """
    text = str(module.to_string())
    elided = [math.prod(int(dim) for dim in dims.split(",") if dim) for _, dims in _ELIDED.findall(text)]
    if "tpu_custom_call" not in text or not elided or sum(elided) > _WRITTEN:
        return text
    from jaxlib import _hlo  # type: ignore[attr-defined]

    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    lines, whole = text.split("\n"), str(module.to_string(options)).split("\n")
    if len(lines) != len(whole):
        return text
    return "\n".join(
        full if (match := _ELIDED.search(line)) and match.group(1)[0] in "sup" else line
        for line, full in zip(lines, whole, strict=True)
    )


def compiled_text(compiled: Any) -> str:
    """The text of a ``jax.stages.Compiled``."""
    return written(compiled.runtime_executable().hlo_modules()[0])


def module_text(proto: bytes) -> str:
    """The text of a serialized HloModuleProto."""
    from jaxlib import _hlo  # type: ignore[attr-defined]

    return written(_hlo.HloModule.from_serialized_hlo_module_proto(proto))


def hlo_proto_of(text: str) -> bytes:
    """A module's text as a serialized HloModuleProto."""
    from jaxlib import _hlo  # type: ignore[attr-defined]

    return bytes(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
