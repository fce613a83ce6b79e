"""Dense labels of shape world, which large models need not be told: what each video token shows."""

import numpy as np

from vllm_vidspec.shapeworld import world

LABELS = dict(color=9, shape=7, size=3, direction=6, background=6, pattern=3, x=15, y=15, turned=3, faded=2)
"""Token-level training labels and their numbers of classes; class 0 of the object labels means "no object here"."""
MIN_VISIBLE_AREA = 100  # pixels of a shape's bounding box in a cell, below which the cell does not count as showing it


def labels_of(sample: world.Sample) -> dict[str, np.ndarray]:
    """Return int64 [NUM_FRAMES, GRID_SIZE**2] per key of `LABELS`: of each cell the object that covers most of it."""
    labels = {name: np.zeros((world.NUM_FRAMES, world.GRID_SIZE**2), np.int64) for name in LABELS}
    for scene_idx, scene in enumerate(sample.facts):
        labels["background"][sample.scene_of_frame == scene_idx] = list(world.BACKGROUNDS).index(scene.background)
        labels["pattern"][sample.scene_of_frame == scene_idx] = world.PATTERNS.index(scene.pattern)
    covered = np.zeros((world.NUM_FRAMES, world.GRID_SIZE**2))
    for track in sample.tracks:
        shown = slice(track.start, track.start + len(track.path))
        _fill_labels({name: array[shown] for name, array in labels.items()}, covered[shown], track)
    return labels


def _fill_labels(labels: dict[str, np.ndarray], covered: np.ndarray, track: world.Track) -> None:
    """Label the cells that an object covers more than any earlier object does; both are written in place."""
    fact, path, colors, ending = track.fact, track.path, track.colors, track.ending
    radius, edges = world.SIZES[fact.size], np.arange(world.GRID_SIZE) * world.CELL_SIZE
    wide, tall = (  # [visible, world.GRID_SIZE]
        np.clip(np.minimum(p + radius, edges + world.CELL_SIZE) - np.maximum(p - radius, edges), 0, None)
        for p in (path[:, :1], path[:, 1:])
    )
    area = (tall[:, :, None] * wide[:, None, :]).reshape(len(path), -1)
    mine = (area > MIN_VISIBLE_AREA) & (area > covered)
    covered[mine] = area[mine]
    step = np.diff(path, axis=0, append=2 * path[-1:] - path[-2:-1])  # [visible, 2]
    along, ways = (step[:, 0], [1, 2]) if fact.motion in world.SIDEWAYS else (step[:, 1], [3, 4])
    values = {
        "color": np.array([list(world.COLORS).index(color) + 1 for color in colors]),
        "shape": np.full(len(path), world.SHAPES.index(fact.shape) + 1),
        "size": np.full(len(path), list(world.SIZES).index(fact.size) + 1),
        "direction": np.select([along < 0, along > 0], ways, 5),
        "x": path[:, 0] // 8 + 1,
        "y": path[:, 1] // 8 + 1,
        "turned": np.array([1 if color == fact.color else 2 for color in colors]),
        "faded": (np.arange(len(path)) >= ending) & (fact.event == "vanishes"),
    }
    for name, value in values.items():
        labels[name][mine] = np.broadcast_to(value[:, None], mine.shape)[mine]
