"""`vidspec studio`."""

from typing import Annotated, Any

import typer

from vllm_vidspec.cli import options, running


def studio(
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="A running `vllm serve`. Default: the bundled pair is served.")
    ] = None,
    vanilla: Annotated[str | None, typer.Option(metavar="URL", help="One without vidspec, to compare with.")] = None,
    family: options.Family = "qwen2.5-vl",
    draft_shape: Annotated[
        str, typer.Option(help="Of the bundled pair: chain, tree-static, tree-adaptive; auto: the page may change it.")
    ] = "chain",
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Of the bundled pair: draft tokens per verify step.")
    ] = None,
    frames: Annotated[
        int | None, typer.Option(min=1, help="Frames of a video that the page shows before an answer. Default: 32.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page; 0: a free one.")] = 8010,
    log_dir: Annotated[str | None, typer.Option(help="Folder for the server's log.")] = None,
    json_path: options.Json = None,
) -> None:
    """Watch drafts on a local page: which tokens were drafted, what the draft saw of the video, how fast it is.

    With a server of your own, VIDSPEC_ADMIN_KEY lets the page change its knobs, and "request_records": true in its
    speculative configuration lets it colour tokens. The result is the page's address, once it is served.
    """
    given = locals()
    from vllm_vidspec.tools import studio as page

    out = running.console(stderr=json_path == "-")
    said = {
        "server": lambda of: out.print("Starting the bundled pair…"),
        "ready": lambda of: out.print(f"The server is ready after {of['seconds']:.0f} s."),
        "page": lambda of: out.print(f"Open [bold]{of['url']}[/bold] in a browser; Ctrl-C ends it."),
    }
    with running.console(stderr=True).status("starting") as shown:

        def tell(what: str, of: dict[str, Any]) -> None:
            shown.stop()
            said[what](of)
            if what == "server":
                shown.start()
            elif what == "page":
                running.write_json(json_path, of)

        page.run(options.pick(page.Show, given), tell)
