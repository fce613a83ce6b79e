"""tree_attention: a prefix that something else has computed, and planted mistakes in its source."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.kernels.attention_case import (
    MIXED,
    NAN,
    SENTINEL,
    TOLERANCES,
    Case,
    check,
    external_prefix,
    module,
    requests_of,
    run,
)  # fmt: skip
from vidspec_kernels.tree_attention import reference
from vidspec_kernels.tree_attention import triton as kernel_file

IMPLS = ["triton", "torch"]

# ---- a prefix that something else has computed ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("block_size", [16, 128])
def test_external_prefix(device, impl, dtype, block_size):
    """With the prefix's output and LSE given, the result is that of the whole; the prefix's KV entries are not read."""
    case = Case(device, requests_of(*MIXED, (3, 127), (4, 128)), dtype=dtype, block_size=block_size)
    prefix = external_prefix(case)
    check(case, impl, prefix=prefix)
    for i, request in enumerate(case.requests):
        for entry in range(request.prefix_len if request.words else 0):
            block = case.table[case.rows[i], entry // block_size].long()
            case.keys[block, entry % block_size] = NAN
            case.values[block, entry % block_size] = NAN
    check(case, impl, prefix=prefix)


def test_external_prefix_in_place(device, impl):
    """The prefix's output and LSE may be the outputs themselves: each row is read and written by one program."""
    case = Case(device, requests_of((65, 37), (3, 20)), num_heads=2, num_kv_heads=1)
    prefix = external_prefix(case)
    expected, expected_lse = run(case, impl, prefix=prefix)
    out, lse = (tensor.clone() for tensor in prefix)
    run(case, impl, prefix=(out, lse), out=out, lse=lse)
    written = expected[:, 0, 0] != SENTINEL
    assert torch.equal(out[written], expected[written]) and torch.equal(lse[:, written], expected_lse[:, written])


def test_external_prefix_of_any_strides(device, impl):
    """A transposed LSE and a sliced output give what dense ones give."""
    case = Case(device, requests_of(*MIXED))
    out, lse = external_prefix(case)
    fused = torch.full((out.shape[0], out.shape[1] + 2, out.shape[2] + 5), NAN, device=device)
    fused[:, 1:-1, 2:-3] = out
    check(case, impl, prefix=(fused[:, 1:-1, 2:-3], lse.T.contiguous().T))


def test_parts_add_up(device, impl):
    """The prefix alone, given as external prefix to a call for the nodes alone, makes the whole."""
    case = Case(device, requests_of((5, 37), (3, 20)))
    prefix = run(case, impl, masks=torch.zeros_like(case.words))
    check(case, impl, prefix=prefix)
    torch.testing.assert_close(run(case, impl, prefix=prefix), run(case, impl), rtol=1e-5, atol=1e-5)


# ---- mutations -----------------------------------------------------------------------------------------------------


def mutant(tmp_path, monkeypatch, impl, edits):
    """Return `tree_attention` with some text of the kernel's or the reference's module replaced, every occurrence."""
    source = Path((kernel_file if impl == "triton" else reference).__file__).read_text()
    for old, new in edits:
        assert old in source, f"the mutation no longer applies: {old}"
        source = source.replace(old, new)
    path = tmp_path / f"mutant_{impl}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    name = "_tree_attention_kernel" if impl == "triton" else "tree_attention_reference"
    monkeypatch.setattr(module, name, getattr(changed, name))
    monkeypatch.setattr(module, "MIN_UNITS", 1)
    return module.tree_attention


MUTATIONS = {
    "nothing changed": {"triton": [], "torch": []},
    "a sibling's bit leaks into the mask": {
        "triton": [("(word[:, None] >> node[None, :]) & 1", "(word[:, None] >> node[None, :]) & 3")],
        "torch": [("& _BITS[:num_nodes].to(rows.device)", "& (_BITS | _BITS << 1)[:num_nodes].to(rows.device)")],
    },
    "a prefix one entry short": {
        "triton": [("entry_mask = entries < num_keys", "entry_mask = entries < num_keys - 1")],
        "torch": [("entry < prefix_end", "entry < prefix_end - 1")],
    },
    "a prefix one entry long": {
        "triton": [("entry_mask = entries < num_keys", "entry_mask = entries < num_keys + 1")],
        "torch": [("valid[:, 0])[:, None].to(torch.int64)", "valid[:, 0])[:, None].to(torch.int64) + 1")],
    },
    "parts averaged, not weighted by their LSE": {
        "triton": [
            ("weights = tl.exp2(part_lse - shift)", "weights = tl.where(part_lse == float('-inf'), 0.0, 1.0)"),
            ("correction = tl.exp2(top - shift)", "correction = tl.full([MERGE_ROWS], 1.0, tl.float32)"),
            ('row_max = tl.where(row_max == float("inf"), float("-inf"), row_max)', "row_max = tl.zeros_like(row_max)"),
        ],
        "torch": [("return out * weight + prefix_out * prefix_weight", "return out * 0.5 + prefix_out * 0.5")],
    },
    "heads of a group spread over the KV heads": {
        "triton": [
            ("first_head = kv_head * GROUP", "first_head = kv_head"),
            ("head = row % GROUP", "head = row % GROUP * 2"),
        ],
        "torch": [(
            "view(num_reqs, max_queries, num_kv_heads, -1, head_size).permute(0, 2, 3, 1, 4)",
            "view(num_reqs, max_queries, -1, num_kv_heads, head_size).permute(0, 3, 2, 1, 4)",
        )],
    },
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(device, impl, mutation, tmp_path, monkeypatch):
    """`check`, which every test above rests on, fails for each of these changes of kernel and reference, and only then.

    The module's source is changed and run: a sibling's bit leaking into the mask (shift & 3), a prefix off by one
    (either way), an LSE merge without weights (a plain average of splits, and of external prefix and nodes), heads of a
    GQA group taken with a stride (head h on KV head h % num_kv_heads).
    """
    attention = mutant(tmp_path, monkeypatch, impl, MUTATIONS[mutation][impl])
    case = Case(device, requests_of((5, 150), (6, 20)), num_heads=6, num_kv_heads=2, poison=1.0)
    external: dict = {"prefix": external_prefix(case)}
    if mutation == "nothing changed":
        check(case, impl, attention)
        check(case, impl, attention, **external)
        return
    # Only the kernel merges parts; both merge an external prefix.
    merges = [external] if impl == "torch" else [{}, external]
    for changes in merges if "LSE" in mutation else [{}]:
        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            check(case, impl, attention, **changes)
