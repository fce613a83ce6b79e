"""A rank of the drafter's process: loads the draft, then serves the target until that is gone.

    python -m vllm_vidspec.engine.parallel.process PLAN

It is started by the target's first rank, and ends when that process says so, closes its socket or is gone.
"""

import ctypes
import json
import os
import signal
import socket
import sys

from vllm_vidspec.engine.parallel import launch

_PR_SET_PDEATHSIG = 1


def main(plan: launch.Plan) -> None:
    vllm_config, config = launch.unpack_config(plan.config)
    if cores := launch.cores_of(config, plan.parent):
        os.sched_setaffinity(0, cores)

    import torch
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    from vllm_vidspec.engine.parallel.channel import Channel
    from vllm_vidspec.engine.parallel.lead import DrafterLead
    from vllm_vidspec.engine.parallel.messages import Failed, Ready, Stop, ToDrafter
    from vllm_vidspec.engine.parallel.rank import Ranks
    from vllm_vidspec.engine.parallel.start import build

    tables = launch.map_tables(plan.tables, launch.Sizes(**plan.sizes))
    channel = None if plan.channel is None else Channel(socket.socket(fileno=plan.channel), ToDrafter)
    try:
        ranks = Ranks(build(plan, vllm_config, config, tables))
        with torch.inference_mode():
            if channel is None:
                ranks.follow()
                return
            channel.send(Ready())
            DrafterLead(ranks.do, tables, channel, vllm_config.scheduler_config.max_num_seqs).run()
            ranks.do(Stop())
    except Exception as error:
        if channel is not None:
            channel.send(Failed(_one_line(error)))
        raise


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def end_with_parent(plan: launch.Plan) -> None:
    """Be killed when the process that started this one is gone, also while it is loading."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != plan.parent:
        sys.exit(1)


if __name__ == "__main__":
    plan = launch.Plan(**json.loads(sys.argv[1]))
    end_with_parent(plan)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is the server's to handle: it ends us
    main(plan)
