"""Of every tensor of a call, or of buffers, another dtype, device or shape is refused by name, before a kernel runs."""

import dataclasses
import functools

import pytest
import torch

from tests.kernels import sampling_case, step_case
from tests.kernels.agreement import tensors_in
from tests.kernels.attention_case import make_scratch
from tests.kernels.operations import OPERATIONS
from tests.kernels.test_draft_tree import make_leaves, make_template
from vidspec_kernels import LevelBuffers, StepBuffers, StepTables, storage_scale, store_states

OTHER = {torch.int64: torch.int32, torch.int32: torch.int64, torch.bool: torch.int8}
# Checked once, as launches check only what changes from step to step; where a case has some.
BUFFERS = {
    "StepTables": (StepTables, step_case.begin_case, "tables"),
    "StepBuffers": (StepBuffers, step_case.begin_case, "out"),
    "LevelBuffers": (LevelBuffers, step_case.level_case, "out"),
}  # fmt: skip
NAMES = [name for name in OPERATIONS if name not in ("accept", "next_level", "tree_attention")] + [*BUFFERS]
# What may be shorter, narrower or of any strides or dtype than it is in the case, or is unpacked before it is checked.
ALLOWED = {
    "LevelBuffers": "logical_pos short, positions stride, positions narrow, seq_lens short, masks narrow",
    "StepBuffers": "rows short, batch_table narrow, positions stride, positions narrow, path narrow",
    "StepTables": "text narrow, block_table short, block_table narrow, path narrow",
    "accept of trees": "has_draft short, path narrow",
    "begin_step": "batch_rows short, picked short",
    "candidates": "ids short, log_probs short, logits axis, logits short, pos short, seeds short, "
                  "temperature short",
    "copy_committed_suffix": "num_tokens short, out narrow, text narrow",
    "draw": "logits short, out_ids short, out_tokens narrow, out_tokens short, pos short, seeds short, "
            "temperature short",
    "gather_draft_windows": "text narrow, tokens narrow",
    "guidance_scores": "block_table narrow, block_table short, key_cache short, key_cache stride, out narrow, "
                       "out short, out_row dtype, query axis, query stride",
    "kv_compact": "block_table narrow, block_table short, path narrow",
    "loosen": "logits dtype, logits narrow, parents narrow",
    "merge_relevance": "partials device, partials narrow, partials short",
    "next_level of trees": "ancestors narrow, ancestors short, fed short, tokens short",
    "path_penalties": "logits axis, logits narrow, logits short, parents narrow, parents short, prompt_bits narrow, "
                      "repetition short",
    "place_trees": "idx_mapping short, out_positions narrow, positions narrow, query_start_loc short",
    "tree_attention of a prefix": "block_table narrow, block_table short, key_cache stride, lse stride, masks narrow, "
                                  "query axis, rows short, value_cache stride",
    "tree_finish": "log_probs axis, next_free short",
    "tree_place": "token_ids narrow",
    "tree_plan": "log_probs narrow",
    "visual_relevance": "num_blocks short, store short, queries axis, block_table narrow, queries short",
}  # fmt: skip


def forms(tensor):
    """Return wrong forms of a tensor, by what is wrong."""
    found = {"dtype": tensor.to(OTHER.get(tensor.dtype, torch.float64)), "device": tensor.to("meta")}
    found |= {"axis": tensor[None], "short": tensor[:-1]}
    if tensor.shape[-1] > 1:
        found["stride"] = torch.stack((tensor, tensor), dim=-1)[..., 0]
    if tensor.ndim > 1:
        found["narrow"] = tensor[..., :-1].contiguous()
    return found


def parts(arguments):
    """Return the tensors of a call by name, and what replaces each; those of tuples and dataclasses too."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield name, value, lambda new, name=name: arguments | {name: new}
            continue
        replace = getattr(value, "_replace", None)
        fields = () if replace is None else value._fields
        if name in ("places", "leaves"):
            fields, replace = value.__dataclass_fields__, functools.partial(dataclasses.replace, value)
        for field in fields:
            if isinstance(part := getattr(value, field), torch.Tensor):
                change = functools.partial(lambda replace, field, new: replace(**{field: new}), replace, field)
                yield field, part, lambda new, name=name, change=change: arguments | {name: change(new)}


def call_of(name, device):
    """Return a wrapper or a kind of buffers, and its arguments."""
    if name in OPERATIONS:
        return OPERATIONS[name](device)
    kind, case, argument = BUFFERS[name]
    _, arguments = case(device, **({} if kind is LevelBuffers else {"in_trees": True}))
    return kind, {path.removeprefix("."): tensor for path, tensor in tensors_in(arguments[argument]).items()}


@pytest.mark.parametrize("name", NAMES)
def test_wrong_tensors(device, name):
    wrapper, arguments = call_of(name, device)
    allowed = ALLOWED.get(name, "").split(", ")
    wrongs = [(part, form, functools.partial(replaced, wrong)) for part, tensor, replaced in parts(arguments)
              for form, wrong in forms(tensor).items() if f"{part} {form}" not in allowed]  # fmt: skip
    assert wrongs
    for part, form, call in wrongs:
        with pytest.raises(AssertionError) as refusal:
            wrapper(**call())
        # Of two shapes that do not fit either may be named.
        assert form not in ("dtype", "stride") or part in str(refusal.value), (part, form)


# Numbers, and tensors that are wrong beside others.
SPECIAL = [
    *(("accept of trees", "max_drafts", value) for value in (-1, 65)),
    ("accept of trees", "trees", lambda trees: trees._replace(depths=torch.cat((trees.depths,) * 2, 1)[:, :11])),
    *(("begin_step", "size", value) for value in (1, 99)),
    ("candidates", "temperature", None), ("candidates", "seeds", None),
    ("candidates", "ids", lambda ids: ids.new_zeros(6, 65)),
    ("candidates", "scratch", lambda s: sampling_case.SamplingCase(4, 300, s.device).scratch(2)),
    ("candidates", "scratch", lambda s: sampling_case.SamplingCase(1, 300, s.device).scratch(4)),
    *(("draw", "level", value) for value in (4, -1)), ("draw", "level", lambda level: level.float()),
    ("draw", "scratch", lambda s: sampling_case.SamplingCase(5, 9, s.device).scratch()),
    ("draw", "scratch", lambda s: sampling_case.SamplingCase(5, 2100, s.device).scratch(use_fp64=True)),
    ("gather_draft_windows", "streams", lambda t: t[:, :-1].contiguous()),
    *(("guidance_scores", "key_cache", change) for change in (lambda t: t[..., :8], lambda t: t[:, :, [0, 0]])),
    ("LevelBuffers", "input_ids", None), ("LevelBuffers", "masks", None),
    ("next_level of trees", "size", 99), ("next_level of trees", "level", 0), ("next_level of trees", "nodes", None),
    *(("place_trees", "size", value) for value in (4, 99)),
    ("tree_attention", "max_queries", -1), ("tree_attention", "lse", lambda lse: lse.T),
    ("tree_attention", "scratch", lambda s: make_scratch(16, s.part_out.device)),
    ("tree_attention", "key_cache", lambda t: t[..., :8]), ("tree_attention", "value_cache", lambda t: t[:, :8]),
    ("tree_attention of a prefix", "prefix", lambda t: (t[0].half(), t[1])),
    ("tree_attention of a prefix", "prefix", lambda t: (t[0], t[1].T)),
    ("tree_begin", "num_reqs", 5), ("tree_begin", "rows", None),
    ("tree_begin", "template", lambda t: make_template(4, "cpu")),
    ("tree_finish", "num_reqs", 1), ("tree_finish", "num_reqs", 9), ("tree_finish", "max_nodes", 99),
    ("tree_finish", "rows", None), ("tree_finish", "leaves", lambda leaves: make_leaves(1, 3, 5, "cpu")),
    *(("tree_grow", name, value) for name, value in (
        ("level", 4), ("level", -1), ("budget", 65), ("first_parent", 25), ("num_next", 5), ("num_next", 0))),
    ("tree_place", "num_reqs", 9), ("tree_plan", "log_probs", lambda t: t[:, :4].contiguous()),
    ("visual_relevance", "store", lambda t: t[:, :12].contiguous()), ("visual_relevance", "max_blocks", 9),
    *(("visual_relevance", name, value) for name, value in (("max_queries", 129), ("top_n", 0), ("top_n", 129))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "argument", "change"), SPECIAL)
def test_wrong_numbers(device, name, argument, change):
    wrapper, arguments = call_of(name, device)
    wrong = change(arguments[argument]) if callable(change) else change
    with pytest.raises(AssertionError):
        wrapper(**arguments | {argument: wrong})


def test_storage_refuses(device):
    states, index = torch.ones(2, 8, device=device), torch.arange(2, device=device)
    store = torch.zeros(2, 4, 8, device=device)
    for arguments in (
        (index, index, store.transpose(0, 1)), (index, index, store[..., :4].contiguous()), (index, index[:1], store),
        (index.int(), index, store),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=r"store|slots|source"):
            store_states(states, *arguments)
    for dtype, size, message in ((torch.float64, 8, "float64"), (torch.float8_e4m3fn, 2**18, "hidden_size")):
        with pytest.raises(AssertionError, match=message):
            storage_scale(dtype, size)
