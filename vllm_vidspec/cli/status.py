"""`vidspec status`."""

from typing import Annotated

import typer

from vllm_vidspec.cli import options, running
from vllm_vidspec.errors import VidSpecError


def status(
    server: Annotated[str, typer.Option(metavar="URL", help="A running `vllm serve`.")] = "http://127.0.0.1:8000",
    watch: Annotated[
        float | None, typer.Option(min=0.1, metavar="SECONDS", help="Read again and again, until Ctrl-C.")
    ] = None,
    json_path: options.Json = None,
) -> None:
    """Show how a running server drafts, and what to change; it reads the server's /metrics.

    Exit status 1 if something should be changed, 2 if there is nothing to read. With --watch and --json - each reading
    is one line of JSON.
    """
    import json

    from vllm_vidspec.tools import status as reading
    from vllm_vidspec.tools import views

    if watch is not None and json_path not in (None, "-"):
        raise VidSpecError("--json: with --watch only '-', standard output")
    console, result = running.console(), {}
    for now, gained in reading.readings(server, watch):
        result = reading.result(server, now, gained)
        if watch is not None and json_path == "-":
            print(json.dumps(result), flush=True)
            continue
        running.write_json(json_path, result)
        if json_path != "-":
            views.show_status(result, console)
    if any(advice["level"] == "warn" for advice in result["advice"]):
        raise typer.Exit(1)
