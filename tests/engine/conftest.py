"""Vanilla references: each scenario is answered once for all workers that share a test run."""

import pickle
from collections.abc import Callable

import pytest
import torch
from filelock import FileLock

pytest.register_assert_rewrite("tests.engine.harness")  # it asserts for many tests: a failure says what differs

from tests.engine import harness  # noqa: E402

# A question so long that it fills a prompt of 10 * 32 + 1 tokens.
QUESTION = (
    "describe the video . what happens in this clip ? tell me about color and shape and move " * 2 + "color " * 22
)
SCENARIOS: dict[str, Callable[[str], list]] = {
    "videos": lambda family: harness.videos(family, 8),
    "mixed": harness.mixed_batch,
    # T = 1 with the most likely token of every position: what a greedy draft should have proposed there.
    "sampled": lambda family: harness.videos(family, 6, temperature=1.0, logprobs=1),
    # As long as any test needs; shorter answers are their beginnings.
    "endless": lambda family: harness.videos(family, 5, max_tokens=200, ignore_eos=True),
    "endless sampled": lambda family: harness.videos(
        family, 6, temperature=1.0, logprobs=1, ignore_eos=True, max_tokens=40
    ),
    "sparse": harness.sparse_videos,
    "videos and texts": harness.videos_and_texts,
}


@pytest.fixture(scope="session", autouse=True)
def without_amx():
    """Let vLLM choose the kernels that every CPU has: with AMX those of eight bits refuse float32, in which answers are
    compared, and those of bf16 round otherwise by the number of rows.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        yield


@pytest.fixture(scope="session")
def reference(tmp_path_factory, worker_id):
    """`reference(family, scenario)` -> vanilla vLLM's outputs; not while another engine runs."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder if worker_id == "master" else folder.parent
    answers: dict[tuple[str, str], list] = {}

    def answer(family: str, scenario: str) -> list:
        path = folder / f"vanilla {family} {scenario}"
        with FileLock(f"{path}.lock"):
            if (family, scenario) not in answers and path.exists():
                answers[family, scenario] = pickle.loads(path.read_bytes())
            if (family, scenario) not in answers:
                with harness.engine(family) as engine:
                    answers[family, scenario] = engine.generate(SCENARIOS[scenario](family))
                path.write_bytes(pickle.dumps(answers[family, scenario]))
        return answers[family, scenario]

    return answer
