"""Maps between towers: what a fit finds again, what a file keeps, what each level of embeddings is mapped by."""

import pytest
import torch

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.visual_map import Fit, Shape, VisualMap
from vllm_vidspec.visual_map.maps import read_about

IN, OUT, LEVELS = 12, 6, 2
CPU = torch.device("cpu")


def truth(seed: int = 0, num_hidden: int = 0, levels_in: int = LEVELS) -> VisualMap:
    """Return a map of random weights; `linear` never initialises so, so that nothing is right by chance."""
    torch.manual_seed(seed)
    made = VisualMap(Shape(IN, OUT, levels_in, LEVELS, num_hidden)).requires_grad_(False)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def fitted_to(wanted: VisualMap, num_videos: int = 8, noise: float = 0.0) -> Fit:
    fit = Fit(wanted.shape, CPU)
    for video in range(num_videos):
        torch.manual_seed(100 + video)
        x = torch.randn(200, wanted.shape.levels_in * IN) * 3 + 1
        y = wanted(x)
        fit.add(x, y + noise * torch.randn_like(y), is_held_out=video % 4 == 0)
    return fit


@pytest.mark.parametrize("levels_in", [LEVELS, LEVELS + 1])
def test_a_linear_map_is_found_again(levels_in):
    """Level by level, or each of all; constant included, and videos that are held out are in no sum."""
    wanted = truth(levels_in=levels_in)
    fit = fitted_to(wanted)
    found = fit.linear()
    assert found.r2 > 0.9999 and fit.num_rows == 6 * 200
    x = torch.randn(50, levels_in * IN)
    torch.testing.assert_close(found.map(x), wanted(x), rtol=1e-3, atol=2e-2)


def test_a_hidden_layer_gains_where_lines_do_not_do_and_never_loses():
    """Catches: a training that leaves less than it began with, as on targets that are noise."""
    fit = fitted_to(truth(num_hidden=4), num_videos=12)
    linear = fit.linear()
    assert fit.with_hidden_layer(linear.map, 16).r2 > linear.r2 + 0.02
    noisy = fitted_to(truth(), noise=50.0)
    linear = noisy.linear()
    assert noisy.with_hidden_layer(linear.map, 16).r2 >= linear.r2


def test_levels_have_maps_of_their_own_and_what_comes_behind_is_passed_over():
    """Catches: a level that is mapped by another's weights; positions behind the levels that reach the draft."""
    made, x = truth(), torch.randn(5, LEVELS * IN)
    changed = x.clone()
    changed[:, IN:] += 1
    before, after = made(x), made(torch.cat((changed, torch.full((5, 4), 1e6)), dim=1))
    assert torch.equal(before[:, :OUT], after[:, :OUT]) and not torch.equal(before[:, OUT:], after[:, OUT:])
    alone = made.levels[1](x[:, IN:])
    torch.testing.assert_close(before[:, OUT:], alone)


@pytest.mark.parametrize("num_hidden", [0, 3])
def test_a_file_holds_the_map_and_what_it_is_of(tmp_path, num_hidden):
    made, path = truth(num_hidden=num_hidden), tmp_path / "map.safetensors"
    made.save(path, {"towers": ["one", "other"]})
    assert read_about(path)["towers"] == ["one", "other"]
    x = torch.randn(4, LEVELS * IN)
    assert torch.equal(VisualMap.load(path, torch.float32, CPU)(x), made(x))
    assert VisualMap.load(path, torch.bfloat16, CPU).levels[0].linear.weight.dtype == torch.bfloat16


def test_another_file_is_refused_in_a_line(tmp_path):
    (tmp_path / "text").write_text("{}")
    for path, words in ((tmp_path / "text", "is not a visual map"), (tmp_path / "none", "no such file")):
        with pytest.raises(VidSpecError, match=words):
            read_about(path)
