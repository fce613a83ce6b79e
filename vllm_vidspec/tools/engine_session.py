"""A conversation with one engine in a subprocess, the parent's side: commands go in, one answer each comes out."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.processes import end_group, last_error_line


class EngineSession:
    """One engine: `with EngineSession(job) as session: session.ask({"command": "measure", ...})`.

    Attributes:
        job: What `session_job` reads first.
        ready: What the engine said when it had loaded: `num_layers` and `default_uv_layer` of the target.
        folder: A folder that both sides can use while the session lasts.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        """Prepare; nothing starts yet."""
        self.job = job
        self.ready: dict[str, Any] = {}

    def __enter__(self) -> "EngineSession":
        """Start the engine and wait until it has loaded.

        Raises:
            VidSpecError: It did not load; one line with the reason.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="vidspec-engine-")
        self.folder = Path(self._folder.name)
        read_end, write_end = os.pipe()
        with (self.folder / "engine.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm_vidspec.tools.session_job", str(write_end)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                env=pairs.engine_env(),
                start_new_session=True,
                text=True,
            )
        os.close(write_end)
        self._events: TextIO = open(read_end)
        try:
            self.ready = self.ask(self.job)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the engine, whatever happened."""
        self._end()

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send one command and wait for its answer.

        Raises:
            VidSpecError: The engine stopped; one line with the reason.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # if it has stopped, what it said last follows
            print(json.dumps(command), file=self._process.stdin, flush=True)
        line = self._events.readline()
        answer = json.loads(line) if line else {"event": "error", "message": self._reason()}
        if answer.pop("event") == "error":
            raise VidSpecError(f"the engine stopped: {answer['message']}")
        return answer

    def _reason(self) -> str:
        return last_error_line((self.folder / "engine.log").read_text(errors="replace"))

    def _end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        end_group(self._process)
        self._events.close()
        self._folder.cleanup()
