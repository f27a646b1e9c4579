"""The pieces of a local step, by hand."""

import pytest
import torch

from lordo.updates import default_omega, denominator, fullrank_scale, lowrank_direction, update_moments_

pytestmark = pytest.mark.usefixtures("rng_untouched")


@pytest.mark.parametrize(("sync_every", "omega"), [(1, 0.9), (10, 0.9), (16, 0.9375), (32, 0.96875), (1000, 0.999)])
def test_omega_follows_from_the_period(sync_every, omega):
    assert default_omega(sync_every) == pytest.approx(omega)


def test_moments_direction_and_denominator_at_the_first_step():
    """û = g and v̂ = g² whatever the decay: the direction is the sign of the gradient, up to ε."""
    for betas in ((0.9, 0.99), (0.0, 0.0), (0.9999, 0.9999)):
        g = torch.tensor([[3.0, -4.0], [0.5, -1e-3]])
        u, v = torch.zeros_like(g), torch.zeros_like(g)
        update_moments_(u, v, g, betas=betas)
        D = denominator(v, beta2=betas[1], eps=0.0, step=1)
        torch.testing.assert_close(D, g.abs(), rtol=1e-4, atol=0)
        torch.testing.assert_close(lowrank_direction(u, D, beta1=betas[0], step=1), g.sign(), rtol=1e-4, atol=0)


def test_moments_by_hand():
    u, v = torch.tensor([1.0]), torch.tensor([2.0])
    update_moments_(u, v, torch.tensor([3.0]), betas=(0.5, 0.75))
    assert u.item() == 0.5 * 1 + 0.5 * 3
    assert v.item() == 0.75 * 2 + 0.25 * 9


def test_the_denominator_is_a_new_tensor():
    v = torch.tensor([4.0])
    assert denominator(v, beta2=0.75, eps=1.0, step=1).item() == 4 + 1
    assert v.item() == 4


def test_the_fullrank_scale_is_one_mean_or_one_for_each_column():
    D = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    assert fullrank_scale(D, over="mean").item() == 3
    assert torch.equal(fullrank_scale(D, over="channel"), torch.tensor([[2.0, 4.0]]))
