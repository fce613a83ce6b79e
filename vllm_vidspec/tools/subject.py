"""What the tools ask an engine: a pair of models, videos and a question; the same words for all of them; no engine."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_vidspec.config import METHOD, SELF, VidSpecConfig, parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.user_files import check_video


@dataclass(frozen=True)
class Subject:
    """A pair, and what is asked about videos."""

    family: str = "qwen2.5-vl"  # The bundled pair, unless `target` is given
    target: str | None = None  # A target of the user's own
    draft: str | None = None  # Its draft, or "self"; None: the bundled draft of `family`
    question: str = pairs.DEFAULT_QUESTION  # What is asked about each video; guidance depends on it
    prune_ratio: float = 0.9  # Share of the video tokens that the draft does not see
    num_speculative_tokens: int = 5  # Draft tokens per verify step
    engine_args: dict[str, Any] = field(default_factory=dict)  # `LLM` arguments that replace ours

    @property
    def source(self) -> dict[str, Any]:
        """The videos: `videos` (files) or `held_out` (indices of shape-world videos)."""
        raise NotImplementedError

    @property
    def pair(self) -> dict[str, str | None]:
        """The target and the draft as results name them."""
        if self.target is not None:
            return {"target": self.target, "draft": self.draft}
        return {"target": f"{self.family}/target", "draft": self.draft or f"{self.family}/draft"}

    def llm_kwargs(self, **spec: Any) -> dict[str, Any]:
        """Return the arguments of the engine; `spec` adds knobs of VidSpecConfig."""
        spec = {"prune_ratio": self.prune_ratio, "num_speculative_tokens": self.num_speculative_tokens} | spec
        # A measurement without drafts would say nothing, and what is measured is one setting.
        fixed: dict[str, Any] = {"on_draft_error": "raise", "adaptive_tokens": False}
        spec = fixed | spec
        if self.target is None:
            draft = {None: "draft", SELF: "target"}.get(self.draft, self.draft)
            return pairs.llm_kwargs(self.family, draft, overrides=self.engine_args, **spec)
        return {
            "model": self.target,
            "limit_mm_per_prompt": {"video": 1},
            "seed": 0,
            "speculative_config": {"method": METHOD, "model": self.draft, **spec},
            **self.engine_args,
        }

    def job(self, **spec: Any) -> dict[str, Any]:
        """Return what `session_job` reads first; `spec` as in `llm_kwargs`."""
        prompts = {"family": None if self.target else self.family, "question": self.question}
        return {"llm": self.llm_kwargs(**spec), "prompts": prompts | self.source}

    def config(self, **spec: Any) -> VidSpecConfig:
        """Return the validated knobs of the engine."""
        return parse_config(self.llm_kwargs(**spec)["speculative_config"])[0]

    def check(self) -> None:
        """Refuse a pair or videos that are not there, or engine arguments that have options of their own."""
        if self.target is not None and self.draft is None:
            raise VidSpecError("--target needs --draft, a checkpoint or 'self'")
        if self.target is None:
            pairs.pair_for(self.family)
        for role, path in (("target", self.target), ("draft", self.draft)):
            if path is not None and path.startswith(("/", ".")) and not Path(path).exists():
                raise VidSpecError(f"--{role}: no such checkpoint: {path}")
        if fixed := sorted({"model", "speculative_config"} & set(self.engine_args)):
            raise VidSpecError(f"--engine-args: {fixed[0]} has options of its own")
        for video in self.source.get("videos", ()):
            check_video(video)


def reasons(counters: dict[str, int], prefix: str) -> str:
    """Return which of the counters that begin with `prefix` have counted, by the rest of their names: "pool_full"."""
    return ", ".join(name.removeprefix(prefix) for name, value in counters.items() if name.startswith(prefix) and value)
