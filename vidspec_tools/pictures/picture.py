"""What a picture is of: one video of a pair, and the file that it goes to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.subject import Subject
from vllm_vidspec.tools.user_files import check_output


@dataclass(frozen=True)
class Picture(Subject):
    """One video of a pair, and the file that a picture of it goes to.

    Attributes:
        video: A file; None: the bundled one.
        out: The file to write.
    """

    video: str | None = None
    out: str = ""

    @property
    def path(self) -> Path:
        """The video's file."""
        return pairs.sample_video() if self.video is None else Path(self.video)

    @property
    def source(self) -> dict[str, Any]:
        """The video."""
        return {"videos": [str(self.path)]}

    def check_files(self, suffixes: tuple[str, ...]) -> None:
        """Refuse a pair, a video or a file to write that would not do; as `Subject.check` and `check_output`."""
        self.check()
        check_output(self.out, suffixes=suffixes)
