"""What every test starts from: one torch thread, examples that do not depend on chance or the clock; and a watch on torch's generator."""

import pytest
import torch
from hypothesis import HealthCheck, settings

# on a busy machine an example may take any time (hypothesis allows 200 ms), and every run must see the same ones
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def one_thread():
    """Tests share few cores; one that wants more threads asks for them, and leaves none behind."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def rng_untouched():
    """Fails a test during which torch's global generator was advanced: by the library, since these tests draw from their own."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state()), "torch's global random state was changed"
