"""Requests for programs that are compiled: to compile, to check and to tune them; and for traces to explain."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rooftop.core.errors import RooftopError, refuse
from rooftop.requests.kinds import (
    COUNT,
    COUNT_OR_ZERO,
    FILE,
    FLAG,
    GROWTH,
    PATH,
    QUANTITY,
    QUANTITY_OR_ZERO,
    SLICE,
    TIME,
    TOP,
    Assigned,
    Kind,
    Listed,
    Location,
    Name,
    plain,
)
from rooftop.requests.request import NotInJson, Request, setting
from rooftop.requests.words import HARDWARE, PARALLELISM, RUN, WORKLOAD

if TYPE_CHECKING:
    from rooftop.arrays import Mesh
    from rooftop.requests.likes import (
        AxesLike,
        CalibrationLike,
        ChipLike,
        CountLike,
        OptionsLike,
        PlanLike,
        ProgramLike,
        SliceLike,
        TimeLike,
        VaryLike,
    )

#: Forms of a program: a plan or a module in a file, 'module:function', the words of a script, or an object.
Form = Literal["file", "function", "script", "object"]


#: What accepts checks.
ONLY_EMBEDDINGS = "nothing but with a plan of embeddings: its programs run on SparseCores"


class Program(Kind):
    """A path, 'module:function', or the words of a script: left as they are. In JSON a plan may be its object."""

    json_types = (str, list, dict)
    json_words = "a text, a list of words, or a plan's object,"

    def __init__(self) -> None:
        super().__init__("program")

    def read(self, value: Any, field: str) -> Any:
        """The text, the words as a tuple, or the object as it is."""
        if not isinstance(value, list):
            return value
        if not all(isinstance(word, str) for word in value):
            raise RooftopError(field, value, "a list of words")
        return tuple(value)

    def plain(self, value: Any, field: str) -> Any:
        """The text, the words, or the object of a plan. Raises NotInJson for functions and compiled programs."""
        if isinstance(value, (str, Path)):
            return str(value)
        if isinstance(value, Sequence):
            return [str(word) for word in value]
        plan = getattr(value, "plan", value)
        data = plain(plan)
        if not isinstance(data, Mapping) or data.get("kind") not in ("train", "embed", "serve"):
            accepted = "a plan, 'module:function', a path or a script's words; an object of this process is not JSON"
            raise NotInJson(field, getattr(value, "__name__", type(value).__name__), accepted)
        return data


class ArrayText(Kind):
    """An array in the notation. In JSON other arguments of a function have no place."""

    def plain(self, value: Any, field: str) -> str:
        """The text. Raises NotInJson for an object."""
        if not isinstance(value, str):
            accepted = "arrays as texts, 'bf16[8192_X, D_Y]'; an object of this process is not JSON"
            raise NotInJson(field, type(value).__name__, accepted)
        return value


class XlaOptions(Assigned):
    """Options of XLA, each typed as NAME=VALUE: truths, whole numbers or texts."""

    def read(self, value: Any, field: str) -> Any:
        """The options, or the text of one. Raises RooftopError for a value of another type."""
        for name, option in value.items() if isinstance(value, Mapping) else ():
            if not isinstance(option, (bool, int, str)):
                raise RooftopError(f"{field} {name}", option, "true, false, a whole number or a text")
        return value

    def gather(self, entries: Sequence[Any]) -> dict[str, bool | int | str] | None:
        """The options by name; None without one."""
        options: dict[str, bool | int | str] = {}
        for entry in entries:
            name, equals, value = entry.partition("=")
            if not equals or not name:
                accepted = "NAME=VALUE, such as xla_tpu_enable_async_collective_fusion=true"
                raise RooftopError("compiler-option", entry, accepted)
            number = int(value) if value.lstrip("-").isdecimal() else value
            options[name] = {"true": True, "false": False}.get(value.lower(), number)
        return options or None


class SettingValues(Assigned):
    """Values of settings by name, each typed as NAME=A,B; the first is the baseline's."""

    def read(self, value: Any, field: str) -> Any:
        """The values, or the text of one setting. Raises RooftopError for fewer than two."""
        return value if isinstance(value, str) else settings_of(value)

    def gather(self, entries: Sequence[Any]) -> dict[str, str] | None:
        """The texts by name; None without one."""
        texts: dict[str, str] = {}
        for entry in entries:
            name, equals, values = entry.partition("=")
            if not equals or not name or name in texts:
                raise RooftopError("vary", entry, "NAME=A,B,... once for each name, such as block=512,1024")
            texts[name] = values
        return texts or None


def settings_of(vary: VaryLike) -> dict[str, tuple[Any, ...]]:
    """Values of settings by name: numbers, true, false, or text. Raises RooftopError for fewer than two."""
    settings = {}
    for name, values in vary.items():
        if not name.isidentifier():
            raise RooftopError("vary", name, "NAME=VALUE,VALUE with the name of a keyword")
        if not isinstance(values, (str, list, tuple)):
            raise RooftopError("vary", f"{name}={values}", "two different values or more")
        every = tuple(map(_value, values.split(","))) if isinstance(values, str) else tuple(values)
        if len(every) < 2 or len(set(map(repr, every))) < len(every):
            raise RooftopError("vary", f"{name}={','.join(map(str, every))}", "two different values or more")
        settings[name] = every
    return settings


def _value(text: str) -> Any:
    text = text.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (int, float)) else text


@dataclass(frozen=True)
class ProgramRequest(Request):
    """Base of requests for a program: a plan, a function, a script, or one that was compiled before."""

    program: ProgramLike = setting(kind=Program())
    """A plan, a function, a script, or a program that was compiled before."""
    _: KW_ONLY
    on: SliceLike | None = setting(None, kind=SLICE)
    """The slice to compile a script or a function for, such as v5e:4x4."""
    args: Sequence[str] = setting((), kind=ArrayText("ARRAY..."), group=WORKLOAD, several=True)
    """Arrays of a function: bf16[8192_X, D_Y]."""
    dims: Mapping[str, int] | str | None = None
    """Sizes of the dims that arrays name: D=4096,F=16Ki."""
    mesh: AxesLike | Mesh | None = None
    """Mesh axes and their sizes: X=4,Y=4."""
    layout: str | None = None
    """Pin axes to the torus: X=x,Y=y[1:2]+z."""
    auto: bool = setting(False, kind=FLAG, group=PARALLELISM)
    """Leave axes to the partitioner: not JAX's explicit mode."""
    compiler_options: OptionsLike | None = setting(
        None, kind=XlaOptions(), group=RUN, option="compiler-option", several=True
    )
    """Set an option of XLA for a function: xla_tpu_enable_latency_hiding_scheduler=false."""
    steps: CountLike | None = setting(None, kind=COUNT_OR_ZERO)
    """The last step of a script, in calls of one program; 0 runs it to its end. [default: 3]"""
    min_flops: float | str | None = setting(None, kind=QUANTITY_OR_ZERO, group=RUN)
    """Compile jits of a script from so many matmul FLOPs on, over all devices; 0 compiles every one. [default: 100M,
    and your own jits whose arguments are split or large]"""
    cache: bool = setting(True, kind=FLAG, group=RUN)
    """Take the answer of an equal compilation from the cache."""

    @property
    def form(self) -> Form:
        """The form of the program. Raises RooftopError without one."""
        program = self.program
        if isinstance(program, Path):
            return "file"
        if isinstance(program, str):
            is_file = program.endswith(".json") or ":" not in program or Path(program).exists()
            return "file" if is_file else "function"
        return "script" if isinstance(program, (list, tuple)) else "object"

    @property
    def name(self) -> str:
        """The program as it was named; 'program' for an object."""
        program = self.program
        if isinstance(program, (list, tuple)):
            return shlex.join(program)
        return str(program) if isinstance(program, (str, Path)) else "program"

    def required_slice(self) -> SliceLike:
        """The slice to compile for. Raises RooftopError without one."""
        if self.on is None:
            raise RooftopError("on", None, "a slice, such as v5e:4x4")
        return self.on

    def refuse_unused(self) -> None:
        """Raise RooftopError for a field that means nothing with a program of this form."""
        if self.form == "script":
            refuse(self._of_function, "nothing with a script, which has its own")
            return
        # 0 is a value too.
        numbers = {"steps": self.steps, "min-flops": self.min_flops}
        refuse(
            {
                name: f"{value:g}" if isinstance(value, float) else str(value)
                for name, value in numbers.items()
                if value is not None
            },
            "nothing but with a script: -- python SCRIPT",
        )

    @property
    def _of_function(self) -> dict[str, object]:
        """Fields of a function, by the names of their options."""
        return {
            "args": self.args,
            "dims": self.dims,
            "mesh": self.mesh,
            "layout": self.layout,
            "auto": self.auto,
            "compiler-option": self.compiler_options,
        }


@dataclass(frozen=True)
class Compile(ProgramRequest):
    """A program to compile ahead of time with XLA:TPU or XLA:GPU, without a TPU or a GPU."""

    verb: ClassVar[str] = "compile"

    program: ProgramLike = setting(kind=Program(), metavar="PLAN.json|MODULE:FUNCTION|-- python SCRIPT")
    """A plan, 'module:function', or the words of a command line: ['python', 'train.py']."""
    _: KW_ONLY
    calibration: CalibrationLike | None = None
    """Price a plan by the fractions that rooftop calibrate measured (JSON)."""
    check: str | None = setting(None, kind=Kind("NAMES"), group=RUN)
    """Build checks into a plan of embeddings: nan, bounds, buffers."""
    timeout: TimeLike | None = None
    """Give up after this time: 90s, 10m."""
    save: bool = setting(False, kind=FLAG, group=RUN, typed=False)
    """Keep the executable in the result."""

    def refuse_unused(self) -> None:
        """Raise RooftopError for a field that means nothing with a program of this form."""
        super().refuse_unused()
        if self.form == "script":
            refuse({"check": self.check}, "nothing with a script, which has its own")
            refuse({"calibration": self.calibration}, "nothing with a script, which has no plan")
            refuse({"save": self.save}, "nothing with a script: it has many programs")
            self.required_slice()
        elif self.form == "function":
            refuse({"calibration": self.calibration}, "nothing with a function, which has no plan")
            refuse({"check": self.check}, ONLY_EMBEDDINGS)
            self.required_slice()
        else:
            if isinstance(self.program, str) and not self.program.endswith(".json"):
                raise RooftopError("program", self.program, "a plan.json written by rooftop plan, or module:function")
            refuse(self._of_function | {"on": self.on}, "nothing with a plan, which says all that is needed")


#: Programs that ``check`` takes.
_CHECKED = "module:function, a module of HLO, a folder of --xla_dump_to, a saved report, or -- python SCRIPT"


@dataclass(frozen=True)
class CheckProgram(ProgramRequest):
    """A compiled program to check: what it wastes, at which line, and what that is worth."""

    verb: ClassVar[str] = "check"

    program: ProgramLike = setting(
        kind=Program(), metavar="MODULE:FUNCTION|MODULE.hlo|FOLDER|REPORT.json|-- python SCRIPT"
    )
    """A function, a script's words, a module of HLO or a folder of --xla_dump_to, a saved report (JSON of check,
    compile or a script), or what ``compile``, ``inspect`` or ``compile_script`` returned. Of a script it is the
    costliest program that fits."""
    _: KW_ONLY
    on: SliceLike | ChipLike | None = setting(None, kind=SLICE)  # type: ignore[assignment]  # a module's, too
    """The slice, or for a module the kind of chip, that the program is compiled for."""
    timeout: TimeLike | None = None
    """Give up after this time: 90s, 10m."""
    tokens: float | str | None = None
    """Tokens of a step on all devices, for tokens a second."""
    against: Path | str | None = setting(None, kind=FILE, group=RUN)
    """An earlier ledger to compare with, of --save or compile -o."""
    max_time: float | str | None = setting(None, kind=GROWTH, group=RUN)
    """Share by which a step may take longer than before: +2%."""
    max_memory: float | str | None = setting(None, kind=GROWTH, group=RUN)
    """Share by which the peak of memory may grow: +1%."""
    fail_on: TimeLike | None = setting(None, kind=TIME, group=RUN)
    """Fail if one finding is worth more than this time: 5ms."""

    @property
    def is_saved(self) -> bool:
        """True for a saved report."""
        return self.form == "file" and str(self.program).endswith(".json")

    def refuse_unused(self) -> None:
        """Raise RooftopError for a field that means nothing with a program of this form."""
        form = self.form
        if form == "file" and not self.is_saved and not Path(str(self.program)).exists():
            raise RooftopError("program", str(self.program), f"{_CHECKED}; there is no such path")
        super().refuse_unused()
        if form == "file":
            refuse(self._of_function | {"mesh": None}, "nothing but with module:function")
        if self.is_saved:
            refuse({"on": self.on, "mesh": self.mesh}, "nothing with a saved report, which says it")
        elif form != "object":
            self.required_slice()
        for field, value in (("max-time", self.max_time), ("max-memory", self.max_memory)):
            if value is not None and self.against is None:
                raise RooftopError(field, value, "a ledger to compare with: --against FILE")


@dataclass(frozen=True)
class Tune(ProgramRequest):
    """A search of options of XLA, and changes of a plan, that make a step faster: by compiling it again and again."""

    verb: ClassVar[str] = "tune"

    program: ProgramLike = setting(kind=Program(), metavar="PLAN.json|MODULE:FUNCTION|-- python SCRIPT")
    """A training plan, 'module:function', or the words of a command line: ['python', 'train.py']."""
    _: KW_ONLY
    vary: VaryLike | None = setting(None, kind=SettingValues(), group=WORKLOAD, several=True, metavar="NAME=A,B,...")
    """Values of a function's keyword, or of {NAME} in a script's command; the first is the baseline."""
    search: Sequence[str] | str | None = setting(None, kind=Listed("NAMES"), group=RUN)
    """Parts of a plan to vary: options, remat, microbatches, layout, mesh, switches, attention (not by default)."""
    minutes: float | str = setting("10", kind=QUANTITY, group=RUN)
    """Time of the search."""
    jobs: CountLike | None = setting(None, group=RUN, kind=COUNT)
    """Compilations at a time. [default: one for two processors]"""
    layers: CountLike | Literal["all"] | None = setting(None, kind=TOP, group=RUN, metavar="N|all")
    """Layers of proxies of a plan. [default: all, or the fewest if few compilations fit into the time]"""
    estimates: str = setting("rooftop", kind=Name("rooftop", "xla"), group=RUN)
    """Price computation by rooftop's curves, or by XLA's own cycles."""
    results: Path | str | None = setting(None, kind=FILE, group=RUN)
    """File of the trials. [default: one in the user's cache]"""
    fresh: bool = setting(False, kind=FLAG, group=RUN)
    """Try all again; by default the same search goes on."""

    @property
    def is_plan(self) -> bool:
        """True for a plan."""
        return self.form in ("file", "object")

    def refuse_unused(self) -> None:
        """Raise RooftopError for a field that means nothing with a program of this form."""
        if isinstance(self.program, str) and not (self.program.endswith(".json") or ":" in self.program):
            accepted = "a plan.json written by rooftop plan train, or module:function"
            raise RooftopError("program", self.program, accepted)
        super().refuse_unused()
        if self.is_plan:
            refuse(
                self._of_function | {"on": self.on, "vary": self.vary},
                "nothing with a plan, which says all that is needed",
            )


@dataclass(frozen=True)
class Explain(Request):
    """A run, a trace, a module of HLO or some of its instructions to explain."""

    verb: ClassVar[str] = "explain"

    path: Path | str | None = setting(None, kind=PATH, metavar="[RUN|TRACE|MODULE]")
    """A run of ``rooftop train --profile``, a trace of JAX's profiler, or a compiled module."""
    _: KW_ONLY
    on: ChipLike | None = setting(None, kind=SLICE)
    """The chip, or a slice of it, whose roofs count. [default: the trace's own]"""
    figures: Mapping[str, float | str] | None = None
    """Override a figure of the chip."""
    plan: PlanLike | None = setting(None, kind=Location("path", object_too=True), group=HARDWARE, metavar="FILE")
    """The plan to compare with. [default: the run's own]"""
    mesh: AxesLike | None = None
    """Mesh axes in the order of device ids: X=2,Y=4. [default: the run's own]"""
    hlo: Sequence[Path | str] = setting((), kind=PATH, group=RUN, several=True, metavar="FILE")
    """A compiled module, for a trace without its own."""
    op: Sequence[str] = setting((), kind=Kind("HLO"), group=RUN, several=True)
    """Explain an HLO instruction, or several."""
