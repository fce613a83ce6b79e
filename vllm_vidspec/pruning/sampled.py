"""Which video tokens are left where the target itself prunes videos (`--video-pruning-rate`). Pure torch.

vLLM does not report it; but every kept token has the rope position of its place in the video.
"""

import torch

from vllm_vidspec.pruning.grid import TokenGrid


def kept_places(positions: torch.Tensor, grid: TokenGrid, ticks_per_frame: float) -> torch.Tensor | None:
    """Return the places `[m]` int64 in the whole video of the tokens that were kept, ascending; None for other tokens.

    `positions` are the `[3, m]` int64 rope positions (time, row, column) of the kept tokens, in their order: vLLM keeps
    the first frame whole, so the least of each is where the video begins. `ticks_per_frame` are those from a frame to
    the next; vLLM cuts each frame's to an integer, so a place may be that of an earlier frame of the same tick.
    """
    if positions.shape[0] != 3 or not positions.shape[1]:
        return None
    ticks, rows, columns = (axis - axis.min() for axis in positions)
    if int(rows.max()) >= grid.height or int(columns.max()) >= grid.width:
        return None
    tick_of_frame = [int(frame * ticks_per_frame) for frame in range(grid.num_frames)]
    places: list[int] = []
    frame, last = 0, -1
    for tick, spot in zip(ticks.tolist(), (rows * grid.width + columns).tolist(), strict=True):
        frame += spot <= last  # inside a frame tokens ascend
        while frame < grid.num_frames and tick_of_frame[frame] < tick:
            frame += 1
        if frame >= grid.num_frames or tick_of_frame[frame] != tick:
            return None
        places.append(frame * grid.tokens_per_frame + spot)
        last = spot
    return torch.tensor(places)
