"""``rooftop calibrate``: the devices that are here, or the steps of a run, measured for plans."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.options import (
    FILE,
    FOLDER,
    OUTPUT,
    QUANTITY,
    RUN,
    VerbCommand,
    devices_option,
    json_option,
    on_option,
    option,
)
from rooftop.cli.output import progress_bar, show


@click.command(
    name="calibrate",
    cls=VerbCommand,
    examples=(
        "rooftop calibrate -o v5e.json",
        "rooftop calibrate run1 -o run1.json",
        "rooftop plan train llama3-8b --on v5e:4x4 --batch-seqs 16 --calibration v5e.json",
    ),
)
@click.argument("run", metavar="[RUN]", type=FOLDER, required=False)
@on_option(help="The slice that the devices are. [default: by their kind and number]")
@option("--minutes", group=RUN, default="10", type=QUANTITY, help="Time after which measurements end.")
@devices_option()
@option(
    "-o", "--output", group=OUTPUT, default="calibration.json", type=FILE, help="The calibration file; goes on with it."
)
@json_option
def command(
    *, run: Path | None, on: str | None, minutes: float, devices: int | None, output: Path, as_json: bool
) -> int:
    """Measure the devices that are here: matmuls, attention, HBM, collectives, calls. Plans take --calibration FILE.

    The file is written after each measurement: the same command goes on where a killed one stopped. With RUN, the
    folder of `rooftop train plan.json`, compare three or more measured steps with their plan: which term is off
    (compute, HBM, collectives, host gaps), and what the next plan changes.
    """
    from rooftop.library.calibrating import calibrate

    with progress_bar(shown=not as_json) as on_progress:
        result = calibrate(run, output=output, on=on, minutes=minutes, devices=devices, on_progress=on_progress)
    show(result.to_json(), {"calibration": output}, as_json=as_json)
    return 0
