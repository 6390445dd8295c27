"""Types of fields: objects, or the strings that the command line takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from rooftop.hardware import Calibrated, Chip, Slice
    from rooftop.models import ModelConfig
    from rooftop.models.embedding_tables.limits import Limits
    from rooftop.models.embedding_tables.tables import Tables
    from rooftop.plan.embedding.plan import EmbedPlan
    from rooftop.plan.serving.plan import ServingPlan
    from rooftop.plan.training.plan import TrainingPlan
    from rooftop.simulate.serving.traces import Lengths, RequestTrace


class OnSlice(Protocol):
    """A result or plan that has a slice."""

    @property
    def slice(self) -> Slice:
        """The slice."""


class OfChip(Protocol):
    """A slice, or a result, that has a chip."""

    @property
    def chip(self) -> Chip:
        """The chip."""


class OfModel(Protocol):
    """A result that has a model."""

    @property
    def config(self) -> ModelConfig:
        """The model."""


class OfPlan(Protocol):
    """A result that has a plan."""

    @property
    def plan(self) -> TrainingPlan | EmbedPlan:
        """The plan."""


class OfReport(Protocol):
    """A compiled program, or a script that compiled some, with its report."""

    @property
    def report(self) -> object:
        """The report."""


class OfTrainingPlan(Protocol):
    """A result that has a training plan."""

    @property
    def plan(self) -> TrainingPlan:
        """The plan."""


class OfFractions(Protocol):
    """A result that has measured fractions of a chip."""

    @property
    def fractions(self) -> Calibrated | None:
        """The fractions; None for devices of no chip in the catalogue."""


class OfServingPlan(Protocol):
    """A result that has a serving plan."""

    @property
    def plan(self) -> ServingPlan:
        """The plan."""


#: A slice, its record in JSON, or its text: CHIP:SHAPE[@SLICES].
SliceLike: TypeAlias = "Slice | OnSlice | Mapping[str, object] | str"
#: A chip, its record in JSON, its name, or a slice of it.
ChipLike: TypeAlias = "Chip | OfChip | Mapping[str, object] | str"
#: A model, its record in JSON, a preset, or the path of a config.json or of its folder.
ModelLike: TypeAlias = "ModelConfig | OfModel | Mapping[str, object] | str | Path"
#: A plan, a result that has one, the content of a plan.json, or its path.
PlanLike: TypeAlias = "TrainingPlan | EmbedPlan | OfPlan | Mapping[str, object] | str | Path"
#: A plan; 'module:function'; the words of a script; a path; or what compiled a program.
ProgramLike: TypeAlias = "PlanLike | Sequence[str] | OfReport | Callable[..., object]"
#: Options of XLA by name, as ``jax.jit`` takes them.
OptionsLike: TypeAlias = Mapping[str, bool | int | str]
#: Values of settings by name: a list, or 'a,b,c'; the first is that of the baseline.
VaryLike: TypeAlias = "Mapping[str, Sequence[object] | str]"
#: Measured fractions of a chip, their record in JSON, the result of ``calibrate``, or the path of its file.
CalibrationLike: TypeAlias = "Calibrated | OfFractions | Mapping[str, object] | Path | str"
#: Mesh axes and their sizes: a mapping, or 'fsdp=4,tensor=2'.
AxesLike: TypeAlias = Mapping[str, int] | str
SettingsLike: TypeAlias = Mapping[str, str] | str
#: Seconds, or a time with its unit: '500ms'.
TimeLike: TypeAlias = float | str
#: Dollars per chip-hour: of the chip that is asked for, or by chip: 'h100=2.5,v5p=3'.
PriceLike: TypeAlias = float | str | Mapping[str, float | str]
#: A whole number, or its text: '4Mi'.
CountLike: TypeAlias = int | str
#: A slice or several, or chips whose size is searched; or their text: 'v5p,v6e:16x16@8'.
SlicesLike: TypeAlias = "SliceLike | Chip | Sequence[SliceLike | Chip]"
#: A server's slice, or chips that are searched: 'v5e:4x4', 'v5e,v6e', or a list of chips.
ServersLike: TypeAlias = "Slice | OnSlice | Chip | str | Sequence[Chip | str]"
#: A dtype, or several that are searched: 'int8,bf16' or a list.
DtypesLike: TypeAlias = str | Sequence[str]
#: Tables, their record in JSON, or the path of a TOML file of them.
TablesLike: TypeAlias = "Tables | Mapping[str, object] | Path | str"
#: Limits by stack, or the path of a limits file.
LimitsLike: TypeAlias = "Limits | Path | str"
#: A serving plan, a result that has one, the content of a plan.json, or its path.
ServingPlanLike: TypeAlias = "ServingPlan | OfServingPlan | Mapping[str, object] | Path | str"
#: Requests, or the path of a JSONL or CSV file of them.
TraceLike: TypeAlias = "RequestTrace | Path | str"
#: Tokens of a request: a number, or LOW:HIGH to draw from.
LengthsLike: TypeAlias = "Lengths | CountLike"
#: A request in JSON, in an answer: its class reads it.
RequestJson: TypeAlias = Mapping[str, Any]
