"""What sits beside the scheduler: every bound on draft tokens, the breaker, and which request is given which pruner."""

from types import SimpleNamespace

import pytest

from tests.unit.engine.simulated import measured, memory_bound
from vllm_vidspec.config import METHOD, parse_config
from vllm_vidspec.engine import scheduling
from vllm_vidspec.engine.compat.scheduler import _DECISION, Attached, StepReport, attach
from vllm_vidspec.engine.policy import Decision, Policy
from vllm_vidspec.engine.scheduling import SchedulerSide
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import MetricsFile, path_for
from vllm_vidspec.scoring.choices import PRUNE_VARIANT, prune_variant_of

K = 6


class World:
    """A scheduler without an engine: requests come, steps put out tokens, a clock stands still until it is moved."""

    def __init__(self, monkeypatch, tmp_path, data_parallel=1, **knobs):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        self.now = 100.0
        monkeypatch.setattr(scheduling.time, "monotonic", lambda: self.now)
        self.file = MetricsFile.create(path_for("it", 0))
        config, _ = parse_config({"model": "draft", "num_speculative_tokens": K, "adaptive_tokens": False, **knobs})
        self.scheduler = SimpleNamespace(requests={}, running=[], scheduler_config=SimpleNamespace(max_num_seqs=8))
        vllm_config = SimpleNamespace(
            additional_config={METHOD: config.model_dump()},
            instance_id="it",
            parallel_config=SimpleNamespace(data_parallel_index=0, data_parallel_size=data_parallel),
        )
        self.side = SchedulerSide(self.scheduler, vllm_config)
        if self.side.options:
            self.side._policy = Policy(self.side.options, measured(memory_bound, self.side.options), 16, False)
        self.sampling_params = SimpleNamespace(extra_args={"a": 1})

    def add(self, req_id: str, num_visual: int = 100) -> SimpleNamespace:
        """Let a request come whose parameters are those of all; return it."""
        feature = SimpleNamespace(mm_position=SimpleNamespace(length=num_visual), modality="video")
        request = SimpleNamespace(
            request_id=req_id, mm_features=[feature] if num_visual else [], sampling_params=self.sampling_params,
            num_tokens=num_visual + 9, num_computed_tokens=0, max_tokens=99, num_output_tokens=4,
        )  # fmt: skip
        self.side.add(request)
        self.scheduler.requests[req_id] = request
        return request

    def retune(self, **knobs) -> dict:
        """Change knobs; return those that are left for the workers."""
        with self.side.retuned(knobs) as left:
            return left

    def plan(self, *req_ids: str, ended: tuple[str, ...] = ()) -> Decision:
        """Return what a step of these requests drafts."""
        return self.side.plan(SimpleNamespace(num_scheduled_tokens=dict.fromkeys(req_ids, 1), finished_req_ids=ended))

    def step(self, accepted: dict[str, int], num_drafts: int = K, seconds: float = 0.1) -> None:
        """Let requests be planned for, and put out a token and as many drafts as were accepted of each."""
        self.now += seconds
        ids = list(accepted)
        drafts = {req_id: [0] * num_drafts for req_id in ids} if num_drafts else {}
        step = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(ids, 1 + num_drafts),
            total_num_scheduled_tokens=(1 + num_drafts) * len(ids),
            scheduled_spec_decode_tokens=drafts,
            scheduled_new_reqs=[],
            finished_req_ids=(),
        )
        setattr(step, _DECISION, self.side.plan(step))
        output = SimpleNamespace(
            req_ids=ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(ids)},
            sampled_token_ids=[[7] * (1 + count) for count in accepted.values()],
        )
        attach(output, Attached(StepReport(frozenset(ids if num_drafts else ()))))
        self.side.observe(step, output)


@pytest.fixture
def world(monkeypatch, tmp_path):
    return lambda **knobs: World(monkeypatch, tmp_path, **knobs)


@pytest.mark.parametrize("schedule", [None, [(1, 2, 6), (3, 4, 3), (5, 8, 0)]])
@pytest.mark.parametrize("adaptive", [False, True])
def test_every_bound_meets_in_one_plan(world, schedule, adaptive):
    """Configuration by batch size, operator and breaker. Catches: one of them exceeded or lost; a gauge that says
    otherwise; None taken for 0."""
    it = world(num_speculative_tokens_per_batch_size=schedule, adaptive_tokens=adaptive, max_draft_failures=1)
    reqs = [it.add(f"r{i}").request_id for i in range(8)]

    def planned(num_reqs: int) -> int:
        return it.plan(*reqs[:num_reqs]).option.num_tokens

    assert it.file.value("speculation_on") == 1
    for most in (0, 2, K, None):
        assert it.retune(num_speculative_tokens=most, prune_ratio=0.5) == {"prune_ratio": 0.5}
        for num_reqs in (1, 4, 8):
            configured = K if schedule is None else next(row[2] for row in schedule if num_reqs <= row[1])
            bound = min(configured, K if most is None else most)
            found = planned(num_reqs)
            assert found <= bound if adaptive else found == bound
            assert (found > 0) == (bound > 0), "requests of which nothing is known are drafted for"
        assert it.file.value("speculation_on") == (most != 0)
        assert it.side.in_force["num_speculative_tokens"] == (K if most is None else most)
    with pytest.raises(ValueError, match="no"), it.side.retuned({"num_speculative_tokens": 0}):
        raise ValueError("no")
    assert planned(1) > 0, "what the workers refuse changes nothing"
    it.file.add("draft_failures")
    it.step({reqs[0]: 1}, 0, 1.0)
    assert planned(1) == 0


@pytest.mark.parametrize("most", [-1, K + 1, 1.5, "3", True, [1], 0])
def test_wrong_numbers_are_refused(world, most):
    """Zero is wrong where several data-parallel engines must keep one number."""
    it, line = world(data_parallel=1 if most else 2), f"between 0 and {K} while" if most else "data-parallel"
    with pytest.raises(VidSpecError, match=line), it.side.retuned({"num_speculative_tokens": most}):
        pytest.fail("it was entered")


def test_the_shape_changes_among_those_that_the_engine_drafts(world):
    """Catches: a shape that nothing was captured for, longer chains than it drafts, a shape that stays after `auto`."""
    it = world(draft_shape="auto", adaptive_tokens=True, num_speculative_tokens=25)
    it.add("a")
    trees = {"tree-2", "tree-3", "tree-4"}
    for shapes in ({"chain"}, *({tree} for tree in sorted(trees)), {"auto", "chain", *trees}):
        assert it.retune(draft_shape=min(shapes), prune_ratio=0.5) == {"prune_ratio": 0.5}
        option = it.plan("a").option
        assert option.shape in shapes and option.num_tokens <= (5 if option.shape == "chain" else 25)
        assert (
            it.side.in_force["draft_shape"] == min(shapes) and it.side.in_force["configured"]["draft_shape"] == "auto"
        )
    for other, shape, line in (
        (it, "tree-adaptive", "draft_shape: auto, chain, tree-2, tree-3, tree-4 while"),
        (it, [1], "draft_shape: auto, chain, tree-2, tree-3, tree-4 while"),
        (world(), "chain", "start it with auto"),
        (world(draft_shape="auto", adaptive_tokens=True, data_parallel=2), "chain", "data-parallel"),
    ):
        with pytest.raises(VidSpecError, match=line), other.side.retuned({"draft_shape": shape}):
            pytest.fail("it was entered")


def test_a_draft_that_fails_too_often_is_paused(world):
    """Three failures within a minute: off for a minute, then on, and three more; the operator's wish stays."""
    it = world(max_draft_failures=3)

    def planned_after(failures: int, seconds: float, num_drafts: int = K) -> int:
        it.file.add("draft_failures", failures)
        it.step({"a": 1}, num_drafts, seconds)
        return it.plan("a").option.num_tokens

    assert planned_after(2, seconds=1) == planned_after(0, seconds=61) == K
    assert planned_after(2, seconds=1) == K, "two of the four were too long ago"
    assert planned_after(1, seconds=1) == 0
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
    assert planned_after(5, seconds=59, num_drafts=0) == 0
    assert planned_after(0, seconds=2, num_drafts=0) == K and it.file.value("speculation_on") == 1
    assert planned_after(2, seconds=1) == K
    it.retune(num_speculative_tokens=2)
    assert planned_after(1, seconds=1) == 0 and it.file.value("cooldowns") == 2
    assert planned_after(0, seconds=61, num_drafts=0) == 2


def test_requests_are_given_pruners(world):
    """Catches: a variant written into parameters that several requests share, a text given a pruner, another's
    tokens, an abort not learned from."""
    it = world(pruner="auto", auto_pruners=["uniform", "uv"])
    assert it.add("text", num_visual=0).sampling_params is it.sampling_params
    variants = {}
    for i in range(40):
        request = it.add(f"r{i}")
        variants[f"r{i}"] = prune_variant_of(request.sampling_params)
        assert request.sampling_params.extra_args["a"] == 1 and it.sampling_params.extra_args == {"a": 1}
        for _ in range(10):  # uniform stands, uv does not
            it.step({"other": 6, f"r{i}": 5 if variants[f"r{i}"] == 0 else 1})
        del it.scheduler.requests[f"r{i}"]
    assert list(variants.values())[:6] == [0, 1] * 3 and list(variants.values())[-20:] == [0] * 20
    it.side.close()
    assert [arm.num_requests for arm in it.side._pruners._bandit.arms] == [37, 3]
    assert it.file.value("auto_requests_uniform") == 37 and it.file.value("auto_requests_uv") == 3
    assert it.file.value("auto_tokens_uniform") == 37 * 10 * 6 and it.file.value("auto_verify_steps_uv") == 30
    assert not it.side._pruners._running


def test_a_fixed_pruner_teaches_nothing(world):
    """Catches: what one pruner brings, taken for what another has brought that would have been chosen."""
    it = world(pruner="auto")
    it.retune(pruner="uniform")
    request = it.add("a")
    assert request.sampling_params.extra_args == {"a": 1} and not it.side._pruners._running
    it.retune(pruner="auto")
    it.sampling_params.extra_args = None
    assert PRUNE_VARIANT in it.add("b").sampling_params.extra_args


@pytest.mark.parametrize("knobs", [{}, {"pruner": "auto", "auto_pruners": ["uniform", "uv"]}])
def test_a_client_gives_itself_no_variant(world, knobs):
    """Catches: a class of its own for each number that a client makes up, a pruner that it picks."""
    it, variants = world(adaptive_tokens=True, **knobs), set()
    for i in range(400):
        it.sampling_params = SimpleNamespace(extra_args={"a": 1, PRUNE_VARIANT: i}, temperature=0.0)
        request = it.add(f"r{i}", num_visual=100 * (i % 2))
        assert it.sampling_params.extra_args == {"a": 1, PRUNE_VARIANT: i}, "of other answers, too"
        assert request.sampling_params.extra_args["a"] == 1
        variants.add(prune_variant_of(request.sampling_params))
        it.side.admits(request)
        del it.scheduler.requests[f"r{i}"]
    assert variants == set(range(len(knobs.get("auto_pruners", "1"))))
    assert len(it.side._policy.classes) == 1 + len(variants)  # texts, and videos by variant


@pytest.mark.parametrize("args", [None, {}, {PRUNE_VARIANT: "1"}, {PRUNE_VARIANT: None}])
def test_what_is_no_variant_is_the_first(args):
    assert prune_variant_of(SimpleNamespace(extra_args=args)) == 0 == prune_variant_of(None)
