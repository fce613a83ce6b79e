"""A conversation with one engine in a subprocess, the parent's side: commands go in, one answer each comes out."""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools.processes import LoggedProcess

_ADDR_NO_RANDOMIZE = 0x0040000  # of Linux's personality(2)


class EngineSession:
    """One engine: `with EngineSession(job) as session: session.ask(answer_command(max_tokens=8))`.

    `program` is what Python runs in the subprocess, `job` what that reads first; `ready` is what the engine said when
    it had loaded (`num_layers` and `default_uv_layer` of the target, `scheduling`); both sides can use `folder`.
    """

    program: ClassVar[tuple[str, ...]] = ("-m", "vllm_vidspec.tools.session_job")

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.ready: dict[str, Any] = {}
        if "cpus" in job:
            # By chance of their hashes and addresses two engines that do the same differed by 17 % on our path of
            # Python.
            os.environ.setdefault("PYTHONHASHSEED", "0")
            ctypes.CDLL(None).personality(_ADDR_NO_RANDOMIZE)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vidspec-engine-")))
            read_end, write_end = os.pipe()
            self._events = stack.enter_context(open(read_end))
            self._engine = LoggedProcess(self.folder / "engine.log")
            command = [sys.executable, *self.program, str(write_end)]
            try:
                process = self._engine.start(command, stdin=subprocess.PIPE, pass_fds=(write_end,), text=True)
            finally:
                os.close(write_end)
            assert process.stdin is not None
            self._commands = process.stdin
            stack.callback(self._end)
            self.ready = self.ask(self.job)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        with contextlib.suppress(BrokenPipeError):  # if it has stopped, what it said last follows
            print(json.dumps(command), file=self._commands, flush=True)
        line = self._events.readline()
        message = json.loads(line) if line else {"event": "error", "message": self._engine.reason()}
        if message.pop("event") == "error":
            raise VidSpecError(f"the engine stopped: {message['message']}")
        return message

    def _end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()
        self._engine.end()


def answer_command(knobs: dict[str, Any] | None = None, *, seed: int | None = None, **sampling: Any) -> dict[str, Any]:
    """Return the command to answer every prompt once, in one batch; `knobs` of VidSpecConfig hold from here on.

    It is answered with `seconds`, `texts` and `token_ids` (one of each per prompt), and `metrics` (our counters' gain;
    None for vanilla). Request i samples with `seed` + i, by `sampling`, at temperature 0 by default.
    """
    return {"command": "answer", "knobs": knobs, "seed": seed, "sampling": sampling}
