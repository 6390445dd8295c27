"""``rooftop ui``: the same answers in a browser, with sliders."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.options import PATH, VerbCommand, json_option, option
from rooftop.cli.output import emit_json, show_document
from rooftop.core.errors import RooftopError
from rooftop.core.extras import require
from rooftop.requests.words import OUTPUT, SERVER


@click.command(
    cls=VerbCommand, examples=("rooftop ui", "rooftop ui plan.json report.json --port 0", "rooftop ui --list --json")
)
@click.argument("files", nargs=-1, type=PATH)
@option("--host", group=SERVER, default="127.0.0.1", metavar="ADDRESS", help="Where to listen.")
@option(
    "--port", group=SERVER, default=8080, metavar="N", type=click.IntRange(0, 65535),
    help="Where to listen; 0: a free port.",
)  # fmt: skip
@option("--no-open", group=SERVER, is_flag=True, help="Open no browser.")
@option("--demo", group=OUTPUT, is_flag=True, help="Use the recorded run that comes with rooftop.")
@option("--list", "listed", group=OUTPUT, is_flag=True, help="List the explorers and exit.")
@json_option
def command(
    *, files: tuple[Path, ...], host: str, port: int, no_open: bool, demo: bool, listed: bool, as_json: bool
) -> int:
    """Open a local page with explorers: rooflines, shardings, collectives, training, serving, pipelines, embeddings.

    FILES open in it too: plans, reports of 'rooftop compile --json' and 'rooftop explain --json', folders of runs. The
    page loads nothing from other machines. Ctrl-C ends it.
    """
    from rooftop.present.documents.catalogue import explorers
    from rooftop.ui.explorers import EXPLORERS, explorer

    if listed:
        forms = [explorer(name).form for name in EXPLORERS]
        if as_json:
            emit_json({"kind": "ui", "explorers": [form.to_json() for form in forms]})
            return 0
        show_document(explorers((form.name, form.title, [control.name for control in form.controls]) for form in forms))
        return 0
    if as_json:
        raise RooftopError("json", "--json", "--json with --list: the page has no JSON")
    require("ui")
    from rooftop.ui.server import address, application, bind, serve

    if demo:
        from rooftop.explain.demo import demo_run

        files = (*files, demo_run())
    app = application(host=host, files=files)
    listening = bind(host, port)
    url = address(listening)
    click.echo(f"rooftop ui on {url} (Ctrl-C ends it)")
    if not no_open:
        import webbrowser

        webbrowser.open(url)
    serve(app, listening)
    return 0
