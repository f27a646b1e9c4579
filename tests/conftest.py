"""What every test starts from: one torch thread; and a fixture that watches torch's global generator."""

import pytest
import torch


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
