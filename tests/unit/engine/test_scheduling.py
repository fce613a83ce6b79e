"""What sits beside the scheduler: the switch, the breaker, the table of tokens, and who is given which pruner."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_vidspec.adapt import StepKind
from vllm_vidspec.config import METHOD, parse_config
from vllm_vidspec.engine import scheduling
from vllm_vidspec.engine.compat import scheduler as compat
from vllm_vidspec.engine.scheduling import SchedulerSide, way_of
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import MetricsFile, path_for
from vllm_vidspec.names import CLASS_LABELS
from vllm_vidspec.scoring.choices import WAY

K = 6


class World:
    """A scheduler without an engine: requests come, steps put out tokens, a clock stands still until it is moved."""

    def __init__(self, monkeypatch, tmp_path, data_parallel=1, table=None, **knobs):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        self.now = 100.0
        monkeypatch.setattr(scheduling.time, "monotonic", lambda: self.now)
        self.file = MetricsFile.create(path_for("it", 0))
        config, _ = parse_config({"model": "draft", "num_speculative_tokens": K, "adaptive_tokens": False, **knobs})
        self.scheduler = SimpleNamespace(
            requests={}, running=[], dynamic_sd_lookup=table, scheduler_config=SimpleNamespace(max_num_seqs=8)
        )
        vllm_config = SimpleNamespace(
            additional_config={METHOD: config.model_dump()},
            instance_id="it",
            parallel_config=SimpleNamespace(data_parallel_index=0, data_parallel_size=data_parallel),
        )
        self.side = SchedulerSide(self.scheduler, vllm_config)
        self.sampling_params = SimpleNamespace(extra_args={"a": 1})

    def add(self, req_id: str, num_visual: int = 100) -> SimpleNamespace:
        """Let a request come whose parameters are those of all; return it."""
        feature = SimpleNamespace(mm_position=SimpleNamespace(length=num_visual), modality="video")
        request = SimpleNamespace(
            request_id=req_id, mm_features=[feature] if num_visual else [], sampling_params=self.sampling_params,
            num_tokens=num_visual + 9, num_computed_tokens=0, max_tokens=99,
        )  # fmt: skip
        self.side.add(request)
        self.scheduler.requests[req_id] = request
        return request

    def retune(self, **knobs) -> dict:
        """Change knobs; return those that are left for the workers."""
        with self.side.retuned(knobs) as left:
            return left

    def step(self, accepted: dict[str, int], num_drafts: int = K, seconds: float = 0.1) -> None:
        self.now += seconds
        ids = list(accepted)
        drafts = {req_id: [0] * num_drafts for req_id in ids} if num_drafts else {}
        self.side.observe(
            SimpleNamespace(
                num_scheduled_tokens=dict.fromkeys(ids, 1 + num_drafts),
                total_num_scheduled_tokens=(1 + num_drafts) * len(ids),
                scheduled_spec_decode_tokens=drafts,
                scheduled_new_reqs=[],
            ),
            SimpleNamespace(
                req_id_to_index={req_id: i for i, req_id in enumerate(ids)},
                sampled_token_ids=[[7] * (1 + count) for count in accepted.values()],
            ),
        )


@pytest.fixture
def world(monkeypatch, tmp_path):
    return lambda **knobs: World(monkeypatch, tmp_path, **knobs)


@pytest.mark.parametrize("table", [None, [0, 6, 6, 3, 3, 0, 0, 0, 0]])
def test_speculation_is_switched_off_and_on(world, table):
    """Catches: vLLM's own table lost, or exceeded; a gauge that says otherwise; None taken for 0."""
    it = world(table=table)
    assert it.scheduler.dynamic_sd_lookup is it.side._table and it.file.value("speculation_on") == 1
    for most in (0, 2, K):
        assert it.retune(num_speculative_tokens=most, prune_ratio=0.5) == {"prune_ratio": 0.5}
        assert it.scheduler.dynamic_sd_lookup == [min(most, number) for number in table or [K] * 9]
        assert it.file.value("speculation_on") == (most > 0)
        assert it.side.in_force["num_speculative_tokens"] == most
    it.retune(num_speculative_tokens=None)
    assert it.scheduler.dynamic_sd_lookup == table
    with pytest.raises(ValueError, match="no"), it.side.retuned({"num_speculative_tokens": 0}):
        raise ValueError("no")
    assert it.scheduler.dynamic_sd_lookup == table, "what the workers refuse changes nothing"


@pytest.mark.parametrize("most", [-1, K + 1, 1.5, "3", True, [1], 0])
def test_wrong_numbers_are_refused(world, most):
    """Zero is wrong where several data-parallel engines must keep one number."""
    it, line = world(data_parallel=1 if most else 2), f"between 0 and {K} while" if most else "data-parallel"
    with pytest.raises(VidSpecError, match=line), it.side.retuned({"num_speculative_tokens": most}):
        pytest.fail("it was entered")


def test_the_shape_changes_among_those_that_the_engine_drafts(world):
    """Catches: a shape that nothing was captured for, longer chains than it drafts, a shape that stays after `auto`."""
    it = world(draft_shape="auto", adaptive_tokens=True, num_speculative_tokens=25)
    every = it.side._control._controller.options
    for shapes in ({"chain"}, {"tree-static"}, {"auto", "chain", "tree-static"}):
        assert it.retune(draft_shape=min(shapes), prune_ratio=0.5) == {"prune_ratio": 0.5}
        expected = tuple(option for option in every if option.shape in shapes | {"none"})
        assert it.side._control._controller.options == expected
        assert (
            it.side.in_force["draft_shape"] == min(shapes) and it.side.in_force["configured"]["draft_shape"] == "auto"
        )
    for other, shape, line in (
        (it, "tree-adaptive", "draft_shape: auto, chain, tree-static while"),
        (it, [1], "draft_shape: auto, chain, tree-static while"),
        (world(), "chain", "start it with auto"),
        (world(draft_shape="auto", adaptive_tokens=True, data_parallel=2), "chain", "data-parallel"),
    ):
        with pytest.raises(VidSpecError, match=line), other.side.retuned({"draft_shape": shape}):
            pytest.fail("it was entered")


@pytest.mark.parametrize("most", [0, None])
def test_workers_are_asked_for_drafts_where_there_are_any(most, world):
    """Catches: a call of all workers after each step at rest; drafts that nobody takes."""
    it, asked = world(adaptive_tokens=True), []
    it.retune(num_speculative_tokens=most)
    it.scheduler._vidspec_side = it.side
    step = SimpleNamespace(num_scheduled_tokens={"a": 1}, finished_req_ids=set(), scheduled_new_reqs=[])
    for _ in range(scheduling._UNDER_WAY + 1):
        assert it.side.has_drafts, "of a step that may be under way"
        it.side.plan(step)
    compat._Patches.post_step(
        lambda core, executed: asked.append(executed), SimpleNamespace(scheduler=it.scheduler), True
    )
    assert asked == [most is None]


def test_a_change_of_shape_loses_no_count(world):
    """Catches: steps of requests that run, or have just ended, that no counter gets."""
    it = world(draft_shape="auto", adaptive_tokens=True, num_speculative_tokens=25)
    controller, reqs = it.side._control._controller, ["ends", "runs"]
    for req_id in reqs:
        controller.add(req_id, 1, (), 300, 60, 128)
    controller.observe(StepKind(controller.decide(reqs), reqs, np.array([5, 5])), np.array([4, 2]), 0.01)
    controller.remove({"ends": 4})
    it.retune(draft_shape="chain")
    assert [it.file.value(f"{name}_{CLASS_LABELS[1]}") for name in ("steps", "tokens")] == [2, 6]


def test_a_draft_that_fails_too_often_rests(world):
    """Three failures within a minute: off for a minute, then on, and three more; the operator's wish stays."""
    it = world(max_draft_failures=3)

    def table_after(failures: int, seconds: float, num_drafts: int = K) -> list[int] | None:
        it.file.add("draft_failures", failures)
        it.step({"a": 1}, num_drafts, seconds)
        return it.scheduler.dynamic_sd_lookup

    assert table_after(2, seconds=1) is table_after(0, seconds=61) is None
    assert table_after(2, seconds=1) is None, "two of the four were too long ago"
    assert table_after(1, seconds=1) == [0] * 9
    assert (it.file.value("cooldowns"), it.file.value("speculation_on")) == (1, 0)
    assert it.file.value("cooling_down") == 1
    assert it.side.in_force == {
        "speculation": "cool-down",
        "num_speculative_tokens": K,
        "draft_shape": "chain",
        "configured": {"num_speculative_tokens": K, "draft_shape": "chain"},
    }
    it.retune(num_speculative_tokens=0)
    assert (it.file.value("cooling_down"), it.side.in_force["speculation"]) == (0, "operator"), "which lasts longer"
    it.retune(num_speculative_tokens=None)
    assert table_after(5, seconds=59, num_drafts=0) == [0] * 9
    assert table_after(0, seconds=2, num_drafts=0) is None and it.file.value("speculation_on") == 1
    assert table_after(2, seconds=1) is None
    it.retune(num_speculative_tokens=2)
    assert table_after(1, seconds=1) == [0] * 9 and it.file.value("cooldowns") == 2
    assert table_after(0, seconds=61, num_drafts=0) == [2] * 9


def test_requests_are_given_ways(world, tmp_path):
    """Catches: a way written into parameters that several requests share, a text given a pruner, another's tokens, an
    abort not learned from."""
    path = tmp_path / "learned.json"
    it = world(pruner="auto", auto_pruners=["uniform", "uv"], auto_file=str(path))
    assert it.add("text", num_visual=0).sampling_params is it.sampling_params
    ways = {}
    for i in range(40):
        request = it.add(f"r{i}")
        ways[f"r{i}"] = way_of(request.sampling_params)
        assert request.sampling_params.extra_args["a"] == 1 and it.sampling_params.extra_args == {"a": 1}
        for _ in range(10):  # uniform stands, uv does not
            it.step({"other": 6, f"r{i}": 5 if ways[f"r{i}"] == 0 else 1})
        del it.scheduler.requests[f"r{i}"]
    assert list(ways.values())[:6] == [0, 1] * 3 and list(ways.values())[-20:] == [0] * 20
    it.side.close()
    learned = json.loads(path.read_text())
    assert learned["config"] == {"pruner": "uniform", "prune_ratio": 0.9}
    assert [arm["num_requests"] for arm in learned["learned"]] == [37, 3]
    assert it.file.value("auto_requests_uniform") == 37 and it.file.value("auto_requests_uv") == 3
    assert it.file.value("auto_tokens_uniform") == 37 * 10 * 6 and it.file.value("auto_verify_steps_uv") == 30
    assert not it.side._ways._running
    later = world(pruner="auto", auto_pruners=["uv", "uniform"], auto_file=str(path))
    assert later.side._ways._bandit.best() == 1 and later.side._ways._bandit.arms[1].num_requests == 37


@pytest.mark.parametrize("text", ["", "[]", "{", '{"learned": 3}', "[" * 100_000])
def test_a_file_that_tells_nothing_is_a_line_in_the_log(world, tmp_path, text, warned):
    path = tmp_path / "learned.json"
    path.write_text(text)
    it = world(pruner="auto", auto_file=str(path))
    assert len(warned) == 1 and "pruners are tried anew" in warned[0]
    assert way_of(it.add("a").sampling_params) == 0


def test_a_folder_that_takes_no_file_costs_the_file_alone(world, tmp_path, warned):
    it = world(pruner="auto", auto_file=str(tmp_path / "nowhere" / "learned.json"))
    it.add("a")
    it.side.close()
    assert "is not written" in warned[-1]


def test_a_fixed_pruner_teaches_nothing(world):
    """Catches: what one pruner brings, taken for what another has brought that would have been chosen."""
    it = world(pruner="auto")
    it.retune(pruner="uniform")
    request = it.add("a")
    assert request.sampling_params.extra_args == {"a": 1} and not it.side._ways._running
    it.retune(pruner="auto")
    it.sampling_params.extra_args = None
    assert "_vidspec_way" in it.add("b").sampling_params.extra_args


def test_ratios_cost(world):
    """Of two ratios with the same acceptance the draft that reads less is better; bytes are those of the gauges."""
    it = world(pruner="auto", auto_pruners=["uniform"], auto_ratios=[0.0, 0.9])
    assert it.side._ways._costs() is None, "before anything is loaded"
    for name, value in (("target_load_bytes", 1000), ("draft_load_bytes", 100), ("draft_kv_bytes_per_token", 2)):
        it.file.set(name, value)
    it.add("a", num_visual=100)
    assert it.side._ways._costs() == pytest.approx([1 + K * 0.3, 1 + K * 0.12])


@pytest.mark.parametrize("knobs", [{}, {"pruner": "auto", "auto_pruners": ["uniform", "uv"]}])
def test_a_client_gives_itself_no_way(world, knobs):
    """Catches: a class of its own for each number that a client makes up, a pruner that it picks."""
    it, ways = world(adaptive_tokens=True, **knobs), set()
    for i in range(400):
        it.sampling_params = SimpleNamespace(extra_args={"a": 1, WAY: i}, temperature=0.0)
        request = it.add(f"r{i}", num_visual=100 * (i % 2))
        assert it.sampling_params.extra_args == {"a": 1, WAY: i}, "of other answers, too"
        assert request.sampling_params.extra_args["a"] == 1
        ways.add(way_of(request.sampling_params))
        it.side.is_shown(request)
        del it.scheduler.requests[f"r{i}"]
    assert ways == set(range(len(knobs.get("auto_pruners", "1"))))
    assert len(it.side._control._controller.classes) == 1 + len(ways)  # texts, and videos by way


@pytest.mark.parametrize("args", [None, {}, {"_vidspec_way": "1"}, {"_vidspec_way": None}])
def test_what_is_no_way_is_the_first(args):
    assert way_of(SimpleNamespace(extra_args=args)) == 0 == way_of(None)
