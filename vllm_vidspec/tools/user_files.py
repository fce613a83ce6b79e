"""Files that a user names: videos that must exist, results that must be writable; checked before an engine starts."""

import contextlib
import importlib.util
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from vllm_vidspec.errors import VidSpecError


def check_video(path: str | os.PathLike[str], is_decoded: bool = True) -> None:
    """Refuse a video that is not there, or, where its frames are read here, that nothing can decode."""
    if is_decoded and importlib.util.find_spec("cv2") is None:
        raise VidSpecError("reading videos needs opencv: pip install opencv-python-headless")
    if not Path(path).is_file():
        raise VidSpecError(f"no such video: {path}")


def check_output(path: str | os.PathLike[str], option: str = "--out", suffixes: Collection[str] = ()) -> None:
    """Refuse a path that cannot be written, or ends in none of `suffixes`."""
    path = Path(path)
    if path.is_dir():
        raise VidSpecError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise VidSpecError(f"cannot write {path}: no such folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise VidSpecError(f"cannot write {path}: permission denied")
    if suffixes and path.suffix.lower() not in suffixes:
        raise VidSpecError(f"{option}: {path} must end in {' or '.join(suffixes)}")


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Say in one line why a file could not be written after all."""
    try:
        yield
    except OSError as error:
        raise VidSpecError(f"cannot write {path}: {error.strerror}") from None


# Families whose frames vLLM takes at the beginnings of equal parts, as transformers' processor of Qwen2-VL does; and
# those of which two frames are a step of the grid.
_BY_PARTS = ("qwen2-vl", "qwen2.5-vl", "qwen2.5-omni", "qwen3-omni", "hyperclovax")
_IN_TWOS = (*_BY_PARTS, "qwen3-vl", "glm-v")


def frames_of(steps: int, family: str) -> int:
    """Return how many frames a family's token grid of so many steps is of."""
    return steps * (2 if family in _IN_TWOS else 1)


def sampled(total: int, num_frames: int, family: str = "") -> list[int]:
    """Return which of a video's frames vLLM's loader of a family takes where it takes so many; others spread evenly."""
    if family in _BY_PARTS:
        import torch

        step = total / max(2, num_frames // 2 * 2)
        return torch.arange(0, total, step).int().clamp(max=total - 1).tolist()  # in float32, as theirs
    even = np.linspace(0, total - 1, num_frames)
    return (even.round() if family == "qwen3-vl" else even).astype(int).tolist()


def read_video(path: str | os.PathLike[str], num_frames: int | None = None, family: str = "") -> np.ndarray:
    """Decode the frames that vLLM's loader samples, `[<= num_frames, height, width, 3]` uint8, RGB; all for None."""
    import cv2

    check_video(path)
    capture = cv2.VideoCapture(str(path))
    try:
        total = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        num_frames = min(total, num_frames or total)
        wanted = sampled(total, num_frames, family) if total > 0 else []
        among, frames = set(wanted), {}
        for index in range(max(wanted, default=-1) + 1):
            if not capture.grab():
                break  # the header promised more
            if index in among:
                good, frame = capture.retrieve()
                if good:
                    frames[index] = cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
    finally:
        capture.release()
    if not frames:
        raise VidSpecError(f"{path}: no frame can be decoded")
    return np.stack([frames[index] for index in wanted if index in frames])
