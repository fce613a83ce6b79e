"""Decode steps of the CUDA builds on the null GPU: no synchronisation, blocking copy or allocation beside vanilla's."""

import json
import os
from pathlib import Path

import pytest

from null_gpu import judge, report
from null_gpu.cases import CASES
from null_gpu.conftest import ENGINES, RESULTS
from null_gpu.plants import PLANTS, line_of
from null_gpu.situations import kernels_of_drafts

TWO_RANKS = [name for name, case in CASES.items() if case.num_ranks > 1]
RUN = [name for name, case in CASES.items() if not case.is_planted]
# Those with a vanilla counterpart in the same mode.
OURS = [name for name in RUN if CASES[name].most_launches]
# Of a prompt's video: 8 frames, of which the processor takes 4, in pairs of 64 patches; 2 bytes a value.
PIXEL_BYTES = 2 * 64 * 1176 * 2
GIB = 2**30


@pytest.fixture(scope="session")
def measured(request):
    """Return measurements by case: all that the selected tests need, and the vanilla cases beside them."""
    plugins = request.config.pluginmanager
    with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
        rows = request.config.stash[ENGINES].wait(plugins.get_plugin("terminalreporter").write_line)
    timed = {row["name"]: row for row in rows if not row["error"] and row["host_ms"]}
    beside = {name: timed.get(CASES[name].vanilla if CASES[name].spec is not None else name) for name in timed}
    found = [report.summary(row, beside[name]) for name, row in timed.items() if beside[name] is not None]
    request.config.stash[RESULTS] = found
    if target := os.environ.get("NULL_GPU_RESULTS"):
        write_results(Path(target), found, [row for row in rows if not row["error"]])
    return {row["name"]: row for row in rows}


def write_results(path, rows, ran):
    """Write the table's rows and what ran, with provenance; other cases keep what an earlier run has written."""
    from vllm_vidspec.tools.provenance import provenance

    origin = provenance() | {"argv": ["make", "test-cuda-host"], "device": "null GPU"}
    old, names = json.loads(path.read_text()) if path.exists() else {}, {row["name"] for row in rows}
    rows = [row for row in old.get("rows", []) if row["name"] not in names] + rows
    ran = old.get("ran", {}) | {row["name"]: report.what_ran(row) for row in ran}
    path.write_text(json.dumps({"provenance": origin, "rows": rows, "ran": ran}, indent=1) + "\n")


@pytest.fixture
def row(measured, name):
    """Return a case's measurements; the case must have run."""
    assert not measured[name]["error"], measured[name]["error"]
    return measured[name]


@pytest.mark.parametrize("name", RUN)
def test_it_runs_without_fault(row):
    """Start, profile, capture, prefill of a video, decoding, abort: a device would have refused nothing."""
    assert judge.faults(row) == []
    assert row["tokens"] >= len(row["steps"])
    assert not [name for name, number in row["extra"]["counted"].items() if name.startswith("skipped_") and number]


@pytest.mark.parametrize("name", OURS)
def test_steps_wait_no_more_than_vanillas(measured, row, name):
    vanilla = measured[CASES[name].vanilla]
    complaints = judge.extra_waits(row, vanilla, CASES[name].allowed)
    assert not complaints, f"{name}, beside {vanilla['name']}:\n" + "\n".join(complaints)


@pytest.mark.parametrize("name", OURS)
def test_host_device_transfers_are_known(row, name):
    assert judge.unknown_transfers(row, CASES[name].transfers) == []


@pytest.mark.parametrize("name", OURS)
def test_launches_stay_in_the_budget(row, name):
    assert judge.per_step(row, "launch") <= CASES[name].most_launches
    # Timed steps are not emulated; they must launch the same, but for steps that add a block.
    per_step = judge.per_step(row, "launch")
    assert row["timed"]["launch"] / len(row["host_ms"]) == pytest.approx(per_step, rel=0.05, abs=2)


@pytest.mark.parametrize("name", [name for name in OURS if CASES[name].has_whole_graphs])
def test_the_target_is_one_graph(row, name):
    """In padded batches too. Catches: trees that fall back to pieces, or to no graph."""
    assert judge.replays(row, "execute_model") == len(row["steps"]), judge.callers(row, "cudaGraphLaunch")


@pytest.mark.parametrize("name", TWO_RANKS)
def test_ranks_do_the_same(row, name):
    launches = row["extra"]["launches_by_rank"]
    assert len(launches) == CASES[name].num_ranks and len(set(launches)) == 1


@pytest.mark.parametrize("name", ["all paused", "auto graphs"])
def test_any_change_of_what_is_drafted_ends_no_engine(row, name):
    """Chains of two lengths; trees of three shapes, chains and nothing. Catches: a step taken for a paused one whose
    rows are there for drafts that nobody made, as on an H100; one tree's graph replayed for another's.
    """
    assert row["extra"]["by_chance"] == [24] * 4 * CASES[name].batch


@pytest.mark.parametrize("name", ["eight clips", "eight clips mapped"])
def test_eight_clips_stay_within_the_profiled_peak(row):
    memory = row["extra"]
    assert 0 < memory["peak"] <= memory["profiled"], memory


@pytest.mark.parametrize("name", [name for name in OURS if CASES[name].is_whole])
def test_whole_models_have_their_memory_on_the_device_alone(measured, row, name):
    """Catches: weights written on the host, models that are not whole; memory of ours that is not accounted for."""
    memory, vanilla = row["extra"]["memory"], measured[CASES[name].vanilla]["extra"]["memory"]
    assert memory["host"] < 8 * GIB < 50 * GIB < memory["allocated"], memory
    assert memory["target"] == vanilla["target"] > 15 * GIB and memory["draft"] > 3 * GIB
    assert memory["kv_cache"] > 0 < memory["draft_pool"] and memory["vision"] > 0
    assert 0 < memory["others"] < vanilla["others"] + 1.25 * GIB, memory


@pytest.mark.cases("sleep")
@pytest.mark.parametrize("level", ["1", "2"])
def test_sleep_gives_memory_back(measured, level):
    """Level 2 is level 1 here, because nothing reloads the draft's weights."""
    awake, asleep, again = measured["sleep"]["extra"]["free"][level]
    assert asleep > again >= awake


@pytest.mark.cases("chain", "vanilla")
def test_pixels_go_to_the_device_once(measured):
    """A prefill uploads hardly more than vanilla's. Catches: a second copy of the video."""
    ours, vanilla = (
        sum(measured[name]["prefill"].get(f"copy.h2d_{kind}_bytes", 0) for kind in ("pinned", "pageable"))
        for name in ("chain", "vanilla")
    )
    assert vanilla > PIXEL_BYTES and ours - vanilla < PIXEL_BYTES / 50, (ours, vanilla)


@pytest.mark.cases("chain")
def test_guidance_gets_the_log_sum_exps_of_the_layers_own_attention(measured):
    """Catches: a second pass over all keys of a layer."""
    told = measured["chain"]["extra"]["told"]
    assert told and all(shape is not None and shape[:2] == shape[2:] for shape in told), told


@pytest.mark.cases("chain", "chain FlashInfer")
def test_guidance_looks_at_every_layer_of_flashinfer(measured):
    """Catches: a block table that its metadata does not say; an exception there, which costs guidance alone."""
    told = measured["chain FlashInfer"]["extra"]["told"]
    assert told == [None] * len(measured["chain"]["extra"]["told"])


@pytest.mark.cases("chain graphs FA2", "chain graphs batch")
def test_chains_take_tree_attention_where_keys_are_not_split(measured):
    """In the target's graph of a verify step and in the draft's for the two tokens fed first; version 3 stays."""
    found = measured["chain graphs FA2"]["extra"]
    num_target, num_draft = found["layers"]
    assert found["kernels"].count("_tree_attention_kernel") == num_target + num_draft
    # FlashAttention keeps the draft's levels after the first, of single rows.
    own = [kernel for kernel in found["kernels"] if "flash_fwd" in kernel]
    assert len(own) % num_draft == 0 and len(own) >= num_draft, own
    assert "_tree_attention_kernel" not in measured["chain graphs batch"]["extra"]["kernels"]


@pytest.mark.cases("planted")
@pytest.mark.parametrize("plant", [name for name, (_, counters) in PLANTS.items() if counters])
def test_a_planted_defect_is_seen_by_its_line(measured, plant):
    assert not measured["planted"]["error"], measured["planted"]["error"]
    complaints = judge.extra_waits(measured["planted"]["extra"][plant], measured["vanilla"])
    assert {complaint.split(":")[0] for complaint in complaints} >= set(PLANTS[plant][1])
    assert all(f"{line_of(plant)} <" in complaint for complaint in complaints), complaints


def test_a_wait_of_our_thread_may_be_a_step_late():
    """Catches: a thread's wait for the step before counted as one too many; the same leave for the main thread."""

    def waits(times, caller):
        line = f"engine/parallel/commits.py:148 _write_down < {caller}"
        steps = [{"sync": 0}] * 9 + [{"sync": times}]
        row = {"steps": steps, "lines": {f"cudaEventSynchronize|{line}": [times, 0]}}
        return judge.extra_waits(row, {"steps": [{"sync": 0}] * 10, "lines": {}}, ["commits.py _write_down"])

    thread, loop = "lib/python3.11/threading.py:1045 _bootstrap_inner", "engine/runner.py:1 sample_tokens"
    assert waits(11, thread) == [] == waits(10, loop)
    assert waits(12, thread) and waits(11, loop)


@pytest.mark.cases("planted")
def test_a_planted_transfer_is_seen(measured):
    """Pinned copies do not block, but each costs a launch."""
    (found,) = judge.unknown_transfers(measured["planted"]["extra"]["pinned upload"], CASES["planted"].transfers)
    assert line_of("pinned upload") in found


@pytest.mark.cases("planted")
def test_launches_past_the_budget_are_seen(measured):
    budget, planted = CASES["chain"].most_launches, measured["planted"]
    assert judge.per_step(planted, "launch") <= budget < judge.per_step(planted["extra"]["launches"], "launch")


@pytest.mark.cases("planted")
def test_without_the_plants_it_is_clean(measured):
    assert judge.extra_waits(measured["planted"], measured["vanilla"]) == []


@pytest.mark.cases("planted capture")
def test_an_allocation_under_capture_is_seen(measured):
    assert "operation failed due to a previous error during capture" in measured["planted capture"]["error"]


@pytest.mark.parametrize("name", [case.name for case in CASES.values() if case.after is kernels_of_drafts])
def test_graphs_hold_the_kernels_of_the_same_step_without_them(measured, name):
    """The same kernels in the same order, launched one by one and replayed."""
    launched, replayed = (measured[name]["extra"][how] for how in ("launched", "replayed"))
    assert len(launched) > 50 and launched == replayed


@pytest.mark.cases("static graphs")
def test_flash_attention_is_scheduled_once_a_forward(measured):
    """For a draft's level, by vLLM. Catches: one more for the prefix that trees share, which is short in a draft."""
    kernels = measured["static graphs"]["extra"]["replayed"]
    num_levels = kernels.count("_next_level_kernel")
    assert num_levels == 4 and kernels.count("_tree_attention_kernel") > num_levels
    assert sum("prepare_varlen_num_blocks" in kernel for kernel in kernels) == 1 + num_levels
