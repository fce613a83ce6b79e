"""Loose verification: what it may change, what it must not, and how both are known.

The check needs none of our own arithmetic: the Hugging Face model, in float64, reads the emitted text back. Given the
tokens before it, every token must be the target's most likely one, but for those that the engine itself says it
loosened or shifted; and the relevance that decided it must be that model's. A token emitted in place of the one whose
KV stands would make the target's later choices those of another text, and be seen.
"""

import pytest
import torch

from tests.engine import harness, loose_reference
from tests.engine.conftest import SCENARIOS
from tests.engine.harness import CHUNK_SIZES, LLAVA, NO_CACHE, QWEN, assert_same_answers, token_ids
from tests.engine.seams import rules, state_store, visual_states
from vidspec_kernels import LooseTables
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.scoring import rules as scorers
from vllm_vidspec.tools import pairs

pytestmark = pytest.mark.engine

ALL = ["strict", "loose", "fly", "fly-entropy", "random"]
OPEN = {"scorer": "loose", "request_scorers": ALL, "lambda_max": 1.0, "num_speculative_tokens": 10, "prune_ratio": 0.95}


def asking(scorer: str | None = None, share: float | None = None) -> dict:
    """Return the SamplingParams arguments of a request that chooses."""
    chosen = {"vidspec_scorer": scorer, "vidspec_lambda": share}
    return {"extra_args": {key: value for key, value in chosen.items() if value is not None}}


def shown(count: int) -> list[list]:
    """Return what each of `harness.videos` shows."""
    return [[frames] for frames in harness.shown(count)]


def forget_states(engine: harness.Engine) -> None:
    """Let what earlier prompts left be computed again."""
    store = engine.visual.store
    assert not any(item.users for item in store._items.values())
    store.clear()


def check(engine: harness.Engine, num_videos: int = 4, **sampling) -> dict:
    """Caption videos and let the reference read them back; return the counters."""
    engine.idle()
    forget_states(engine)
    with engine.watched("watch_scores") as records:
        outputs, counted = engine.measured(harness.videos(engine.family, num_videos, max_tokens=80, **sampling))
    assert counted["loosened_tokens"] + counted["shifted_tokens"] > 0
    kinds = [kind for record in records for kind in record["kinds"]]
    for kind, name in ((1, "exact_tokens"), (2, "loosened_tokens"), (3, "shifted_tokens")):
        assert counted[name] == kinds.count(kind)
    assert loose_reference.check(engine.family, outputs, shown(num_videos), records) > 0
    return counted


@pytest.fixture(scope="module", params=[QWEN, pytest.param(LLAVA, marks=pytest.mark.slow)])
def engine(request, reference):
    reference(request.param, "mixed")  # before our engine: one at a time
    with harness.engine(request.param, "draft", **OPEN, overrides=NO_CACHE) as running:
        yield running


# ---- what it must not change ----------------------------------------------------------------------------------------


def test_nothing_loose_is_lossless(engine, reference):
    """lambda = 0 without shift: twenty mixed requests are vanilla's, byte for byte."""
    with engine.retuned(lambda_loose=0.0, position_shift=False):
        outputs, counted = engine.measured(SCENARIOS["mixed"](engine.family))
    assert_same_answers(reference(engine.family, "mixed"), outputs)
    assert counted["accepted_tokens"] == counted["exact_tokens"] > 0
    assert counted["loosened_tokens"] == counted["shifted_tokens"] == 0


def test_strict_requests_among_loose_ones_are_lossless(engine, reference):
    """Every second request asks for strict, in one continuous batch with requests that accept almost everything.

    Catches: a rule taken from another row, a rule that outlives its request.
    """
    mixed = SCENARIOS["mixed"](engine.family)
    requests = [
        (prompt, {**sampling, **asking(*(("strict",) if i % 2 else ("loose", 1.0)))})
        for i, (prompt, sampling) in enumerate(mixed)
    ]
    outputs, counted = engine.measured(requests)
    assert counted["loosened_tokens"] > 0
    assert_same_answers(reference(engine.family, "mixed")[1::2], outputs[1::2])


def test_some_requests_are_never_loosened(engine, reference):
    """Log-probabilities, a grammar, stop strings, and no video at all: vanilla's answer, counted by reason."""
    text = pairs.media_prompt(engine.family, "describe the video")
    (video, _), *_ = harness.videos(engine.family, 1)
    plain = {"temperature": 0.0, **asking("loose", 1.0)}
    from vllm.sampling_params import StructuredOutputsParams

    requests = [
        (video, {**plain, "logprobs": 1}),
        (video, {**plain, "stop": ["."]}),
        (text, plain),
        (video, {**plain, "structured_outputs": StructuredOutputsParams(choice=["red", "green"])}),
    ]
    outputs, counted = engine.measured(requests)
    assert counted["loosened_tokens"] == counted["shifted_tokens"] == 0
    for reason in ("logprobs", "stop_strings", "structured"):
        assert counted[f"strict_{reason}"] == 1
    assert outputs[3].outputs[0].text.strip() in ("red", "green")
    by_stop = reference(engine.family, "mixed")[14]
    assert outputs[1].outputs[0].text == by_stop.outputs[0].text and outputs[1].outputs[0].stop_reason == "."


# ---- what it changes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["token", "prediction"])
def test_every_other_token_is_the_targets(engine, rows):
    """Greedy captions read back; see the module. With "prediction", relevance is another row's: only kinds count."""
    with engine.retuned(relevance_rows=rows):
        if rows == "token":
            counted = check(engine)
            assert counted["relevance_prompts"] == 4 and counted["relevance_tokens"] == counted["visual_tokens_full"]
            return
        with engine.watched("watch_scores") as records:
            outputs = engine.generate(harness.videos(engine.family, 4, max_tokens=80))
    for output, record in zip(outputs, sorted(records, key=lambda r: int(r["req_id"].split("-")[0])), strict=True):
        tokens = list(output.outputs[0].token_ids)
        video = shown(4)[outputs.index(output)]
        likely, relevance = loose_reference.read_back(engine.family, list(output.prompt_token_ids), tokens, video)
        is_own = [kind < 2 for kind in record["kinds"][: len(tokens)]]
        assert (likely == torch.tensor(tokens)).tolist() == is_own
        earlier = torch.tensor(record["relevance"][1 : len(tokens)], dtype=torch.float64)
        assert float((earlier - relevance[:-1]).abs().max()) <= 1e-4


def test_a_batch_decides_as_one_request_does(engine):
    """Batches of 1 and of 8: the same tokens, for the same reasons. Catches: relevance against another's video."""
    requests = harness.videos(engine.family, 8, max_tokens=60)
    together, counted = engine.measured(requests)
    alone = [engine.measured([request]) for request in requests]
    assert token_ids(together) == [token_ids(outputs)[0] for outputs, _ in alone]
    for name in ("exact_tokens", "loosened_tokens", "shifted_tokens", "drafts"):
        assert counted[name] == sum(gained[name] for _, gained in alone)
    assert counted["loosened_tokens"] > 0


def test_lambda_one_accepts_everything(engine):
    """Until the end of the text, which is protected: every draft stands, every step accepts K."""
    requests = harness.videos(engine.family, 4, max_tokens=45, **asking("loose", 1.0))
    _, counted = engine.measured(requests)
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0 and counted["loosened_tokens"] > 0
    assert counted["draft_tokens"] == 10 * counted["drafts"]


def protected_words_kept(engine: harness.Engine) -> None:
    """With lambda = 1, no mismatch puts a protected word in or leaves one out; nor ends the text, nor runs past it."""
    words = ["red", "small", "left", "."]
    with engine.retuned(protected_tokens=words), engine.watched("watch_scores") as records:
        outputs, counted = engine.measured(
            harness.videos(engine.family, 8, max_tokens=200, temperature=1.0, **asking("loose", 1.0))
        )
    assert counted["loosened_tokens"] > 0 and counted["accepted_tokens"] < counted["draft_tokens"]
    tokenizer = engine.llm.get_tokenizer()
    protected = {*tokenizer.convert_tokens_to_ids(words), *tokenizer.all_special_ids}
    ends = [output.outputs[0].finish_reason for output in outputs]
    for record in records:
        for token, kind in zip(record["tokens"], record["kinds"], strict=True):
            assert kind < 2 or token not in protected, tokenizer.decode([token])
    assert ends == ["stop"] * 8


def test_protected_tokens_are_neither_gained_nor_lost(engine):
    """Sampled captions at lambda = 1; see `protected_words_kept`."""
    protected_words_kept(engine)


def test_what_a_request_forbids_stays_forbidden(engine):
    """Allowed ids, bad words and a logit bias of -100: no draft that they rule out stands, whatever lambda."""
    ids = list(range(3, 60))
    forbidden = {"allowed_token_ids": ids}, {"bad_words": ["a"]}
    requests = [
        (prompt, {**sampling, **asking("loose", 1.0), **rule, "temperature": 1.0, "ignore_eos": True})
        for (prompt, sampling), rule in zip(harness.videos(engine.family, 2), forbidden, strict=True)
    ]
    outputs = engine.generate(requests)
    assert set(outputs[0].outputs[0].token_ids) <= set(ids)
    assert "a" not in outputs[1].outputs[0].text.split()


@pytest.mark.parametrize("scorer", ALL[1:])
def test_every_scorer_loosens_by_the_seed(engine, scorer):
    """All loosen and repeat themselves for the same seed; FLy and the random baseline need no states of the video.

    Catches: a window that is not looked at (`fly` would loosen as much as `fly-entropy`).
    """
    asked = asking(scorer, 0.7 if scorer == "random" else None)
    requests = [r for heat in (0.0, 1.0) for r in harness.videos(engine.family, 3, temperature=heat, **asked)]
    with engine.retuned(fly_entropy=0.001, fly_window=1):
        outputs, counted = engine.measured(requests)
        again, _ = engine.measured(requests)
    assert token_ids(outputs) == token_ids(again)
    assert counted["loosened_tokens"] > 0
    assert counted["shifted_tokens"] == 0 or scorer == "loose"
    assert counted["relevance_prompts"] == (6 if scorer == "loose" else 0)


# ---- planted bugs ---------------------------------------------------------------------------------------------------


def rows_of_the_position_before(patch):
    measure = visual_states.VisualStates.relevance

    def shifted(self, *args):
        return measure(self, *args).roll(1)

    patch.setattr(visual_states.VisualStates, "relevance", shifted)


def rows_not_normalised(patch):
    def store(states, source, slots, pool):
        pool.view(-1, pool.shape[2])[slots] = states[source].to(pool.dtype)

    patch.setattr(state_store, "store_states", store)


def the_targets_token_over_the_drafts_kv(patch):
    original = scorers.accept

    def accept(target_tokens, *args):
        sampled, num_sampled, path, kinds = original(target_tokens, *args)
        bounds = args[1].long()
        for i in range(len(num_sampled)):
            own = target_tokens[bounds[i] : bounds[i] + int(num_sampled[i])]
            sampled[i, : len(own)] = torch.where(kinds[i, : len(own)] > 1, own, sampled[i, : len(own)])
        return sampled, num_sampled, path, kinds

    patch.setattr(scorers, "accept", accept)


@pytest.mark.parametrize(
    "plant", [rows_of_the_position_before, rows_not_normalised, the_targets_token_over_the_drafts_kv]
)
def test_planted_bug_is_caught(engine, plant):
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError):
            check(engine)


def test_loosening_the_end_of_the_text_is_caught(engine):
    """The planted bug: nothing is protected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            rules, "LooseTables", lambda *tables: LooseTables(*(0 * table for table in tables[:2]), *tables[2:])
        )
        with pytest.raises(AssertionError):
            protected_words_kept(engine)


# ---- situations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [QWEN, pytest.param(LLAVA, marks=pytest.mark.slow)])
def test_chunked_prefill(family):
    """States heard over many chunks are the same states: the same tokens for the same reasons as in one."""
    found = []
    for chunk in ({}, {"max_num_batched_tokens": CHUNK_SIZES[family]}):
        with (
            harness.engine(family, "draft", **OPEN, overrides=NO_CACHE | chunk) as running,
            running.watched("watch_scores") as records,
        ):
            outputs, counted = running.measured(harness.videos(family, 3, max_tokens=40))
        names = ("drafts", "exact_tokens", "loosened_tokens", "shifted_tokens")
        found.append((token_ids(outputs), [counted[name] for name in names]))
    loose_reference.check(family, outputs, shown(3), records)
    assert found[0] == found[1] and counted["loosened_tokens"] > 0


@pytest.mark.parametrize(("family", "shape"), [(QWEN, "two-branches"), (LLAVA, "tree-adaptive")])
def test_trees(family, shape):
    """LVSpec's two branches of ten, and SAGE's trees: what stands is a path, and its KV is what the text says.

    Catches: a mismatch's KV left behind by the compaction, branches ranked together.
    """
    spec = {**OPEN, "drafting": "tree-adaptive", "num_speculative_tokens": 24}
    if shape == "two-branches":
        paths = [[rank] + [0] * depth for depth in range(10) for rank in (0, 1)]
        spec = {**OPEN, "drafting": "tree-static", "tree_paths": paths, "num_speculative_tokens": 20}
    with harness.engine(family, "draft", **spec, overrides=NO_CACHE) as running:
        counted = check(running)
        assert counted["relevance_prompts"] == 4


def test_async_scheduling_and_preemption():
    """A step is planned before the last one's acceptance is known, and requests are thrown out and come back.

    Their states are found again by what they depend on; loosened text is read back as any other.
    """
    overrides = {**NO_CACHE, "num_gpu_blocks_override": 12, "max_model_len": 512}
    with (
        harness.async_scheduling(),
        harness.engine(QWEN, "draft", **OPEN, overrides=overrides) as running,
        running.preemptions() as preempted,
        running.watched("watch_scores") as records,
    ):
        outputs, counted = running.measured(harness.videos(QWEN, 5, max_tokens=130, ignore_eos=True))
    assert preempted and counted["loosened_tokens"] > 0 and counted["relevance_prompts"] == 5 + len(preempted)
    assert not any(value for name, value in counted.items() if name.startswith("strict_"))
    # A request that comes back has a step or two without drafts.
    loose_reference.check(QWEN, outputs, shown(5), records, max_unmeasured=8)


def relevance_error(engine: harness.Engine) -> float:
    """Return the largest error of any token's relevance in a caption of two videos."""
    videos = harness.shown(2)
    prompt = pairs.media_prompt(engine.family, "describe the video", videos=videos)
    with engine.watched("watch_scores") as records:
        outputs, counted = engine.measured([(prompt, {"temperature": 0.0})])
    assert counted["relevance_tokens"] == counted["visual_tokens_full"]
    tokens = list(outputs[0].outputs[0].token_ids)
    _, expected = loose_reference.read_back(engine.family, list(outputs[0].prompt_token_ids), tokens, videos)
    ours = torch.tensor(records[0]["relevance"][: len(tokens) - 1], dtype=torch.float64)
    return float((ours - expected[:-1]).abs().max())


def test_relevance_is_against_all_videos_of_a_prompt(engine):
    assert relevance_error(engine) <= 1e-4


def test_states_in_one_byte():
    """A quarter of fp32's memory; cosines are a few per cent off, no more."""
    with harness.engine(LLAVA, "draft", **OPEN, relevance_dtype="fp8", overrides=NO_CACHE) as running:
        assert 0 < relevance_error(running) <= 0.03
        store = running.visual.store.pool
        assert running.counters()["relevance_bytes_per_token"] == store.shape[2] and store.element_size() == 1


def test_cached_prefix():
    """A second question about a video finds its states; when they are gone, it is answered strictly, and counted.

    A strict request's states are kept too, for the loose one that asks next.
    """
    question = "describe the video please , what happens in this clip ?"
    (frames,) = harness.shown(1)
    first = (pairs.video_prompt(QWEN, frames), {"temperature": 0.0, **asking("strict")})
    second = (pairs.video_prompt(QWEN, frames, question), {"temperature": 0.0})
    with harness.engine(QWEN, "draft", **OPEN) as running:
        _, counted = running.measured([first])
        assert counted["relevance_prompts"] == 0
        with running.watched("watch_scores") as records:
            outputs, counted = running.measured([second])
        assert outputs[0].num_cached_tokens > 200
        assert counted["relevance_prompts"] == counted["relevance_reused"] == 1
        assert loose_reference.check(QWEN, outputs, [[frames]], records) >= 0
        visual = running.visual
        assert len(visual.store._items) == 1
        running.idle()
        assert not visual._holders  # vLLM tells of the end of a request with its next step
        forget_states(running)
        _, counted = running.measured([second])
        assert counted["strict_cached"] == 1 and counted["loosened_tokens"] == counted["relevance_prompts"] == 0


def test_memory_bound():
    """Where one video fits of two, the other request is strict and counted; afterwards all of the pool is free or idle.

    Catches: a block leaked by a request that was refused half-way, a pool larger than its bound.
    """
    row_bytes = 256 * 4
    with harness.engine(QWEN, "draft", **OPEN, relevance_bytes=5 * 64 * row_bytes, overrides=NO_CACHE) as running:
        _, counted = running.measured(harness.videos(QWEN, 2, max_tokens=40))
        visual, store = running.visual, running.visual.store
        assert counted["relevance_pool_bytes"] == store.pool.nbytes == 5 * 64 * row_bytes
        with pytest.raises(VidSpecError, match="leaves nothing"):
            visual.reserve(store.pool.nbytes)
        assert counted["strict_memory"] == 1 and counted["relevance_prompts"] == 1
        running.idle()
        idle = sum(len(item.blocks) for item in store._items.values() if item.users == 0)
        assert len(store._free) + idle == 5 and not visual._holders
        _, counted = running.measured(harness.videos(QWEN, 3, max_tokens=40)[2:])
        assert counted["strict_memory"] == 0 and counted["relevance_prompts"] == 1
        running.begin(harness.videos(QWEN, 4, max_tokens=50)[3:], steps=1)
        running.abort()
        running.generate(harness.videos(QWEN, 1, max_tokens=20))
        # What an ended request held is nobody's to measure against.
        assert torch.equal(store.num_blocks > 0, torch.from_numpy(store.num_blocks_np > 0))
        running.idle()
        idle = sum(len(item.blocks) for item in store._items.values() if item.users == 0)
        assert len(store._free) + idle == 5


def test_a_bound_that_cannot_be_is_one_line():
    """Catches: a server that starts with a pool of nothing, or one that leaves the target no cache."""
    with (
        pytest.raises(VidSpecError, match="1000 bytes hold nothing"),
        harness.engine(LLAVA, "draft", **OPEN, relevance_bytes=1000),
    ):
        pass


def test_a_fault_is_strictness():
    """States that cannot be kept, and relevance that cannot be measured, cost looseness, never an answer."""

    def fail(*args):
        raise RuntimeError("planted")

    with harness.engine(LLAVA, "draft", **OPEN, on_draft_error="skip") as running:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state_store, "store_states", fail)
            unkept = running.measured(harness.videos(LLAVA, 2, max_tokens=20, temperature=1.0))
        running.llm.reset_prefix_cache()  # what the target has cached has no states any more
        strict = running.generate(harness.videos(LLAVA, 2, max_tokens=20, temperature=1.0, **asking("strict")))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state_store, "visual_relevance", fail)
            unmeasured = running.measured(harness.videos(LLAVA, 2, max_tokens=20, temperature=1.0))
        _, healed = running.measured(harness.videos(LLAVA, 2, max_tokens=20, temperature=1.0))
    for outputs, counted in (unkept, unmeasured):
        assert counted["strict_error"] == 2 and counted["loosened_tokens"] == 0 < counted["exact_tokens"]
        assert token_ids(outputs) == token_ids(strict)
    assert healed["strict_error"] == 0 < healed["loosened_tokens"]


def test_requests_out_of_bounds_are_refused_and_metrics_tell(reference):
    """Wrong wishes are the client's error, at the door; a response says what was loosened in it."""
    from vllm.exceptions import VLLMValidationError

    spec = {"scorer": "loose", "num_speculative_tokens": 10, "prune_ratio": 0.95}
    overrides = {"per_request_spec_decode_metrics": "summary"}
    with harness.engine(LLAVA, "draft", **spec, overrides=overrides) as running:
        for wrong in (asking("loos"), asking("fly"), asking(share=0.9), {"extra_args": {"vidspec_lamda": 0.5}}):
            with pytest.raises(VLLMValidationError, match="vidspec_"):
                running.generate([(pairs.media_prompt(LLAVA, "describe the video"), wrong)])
        with pytest.raises(VidSpecError, match="num_speculative_tokens cannot change"):
            running.runner.retune({"num_speculative_tokens": 2})
        outputs, counted = running.measured(harness.videos(LLAVA, 4, max_tokens=100))
        told = [output.outputs[0].spec_decode_metrics.to_dict() for output in outputs]
    for kind in ("exact", "loosened", "shifted"):
        assert sum(one[f"num_{kind}_draft_tokens"] for one in told) == counted[f"{kind}_tokens"]
    assert counted["loosened_tokens"] > 0
    assert all(sum(one[f"num_{k}_draft_tokens"] for k in ("exact", "loosened", "shifted")) >= 1 for one in told)
