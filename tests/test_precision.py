"""Precision and batch: what is computed in bfloat16 and what is not, and a batch cut into parts."""

import pytest
import torch
import torch.distributed as dist

import lordo
from lordo.trainer.prepared import prepare
from lordo.trainer.recipe import load, override
from lordo.trainer.terminal import batch_derivation
from test_processes import in_processes
from test_train import micro_recipe, train, train_worker


@pytest.fixture
def config(tmp_path):
    return override(
        load(micro_recipe(tmp_path)), {"train.steps": 10, "train.warmup_steps": 2, "workers": 2, "batch.per_worker_sequences": 8}
    )


def trained(prepared, workers, folder):
    outcome = train_worker(prepared, workers, folder)
    return {name: p.detach() for name, p in outcome.model.named_parameters()}, outcome, workers.bytes_sent()


# ---- accumulation


@pytest.mark.parametrize("method", ["lordo", "ddp-adamw"])
def test_four_parts_are_one_batch(config, method, tmp_path):
    """To rounding, over two rounds: what is sent shows that K counts optimizer steps."""
    own = {"method.name": method, **({"method.rank": None, "method.sync_every": None} if method == "ddp-adamw" else {})}
    config = override(config, own)
    whole, parts = (prepare(override(config, {"batch.accumulate": num})) for num in (1, 4))
    (first, one, sent), *_ = lordo.simulate(lambda workers: trained(whole, workers, tmp_path), 2)
    (second, four, sent_too), *_ = lordo.simulate(lambda workers: trained(parts, workers, tmp_path), 2)
    for name, p in first.items():
        torch.testing.assert_close(second[name], p, rtol=0, atol=1e-6, msg=name)
    assert four.evaluation.loss == pytest.approx(one.evaluation.loss, abs=1e-6)
    assert sent_too == sent


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo")
def test_parts_are_the_same_on_processes(config, tmp_path):
    prepared = prepare(override(config, {"batch.accumulate": 4}))
    (threads, _, sent), _ = lordo.simulate(lambda workers: trained(prepared, workers, tmp_path), 2)

    def work(rank, size):
        weights, _, sent = trained(prepared, lordo.sync.as_comm(dist.group.WORLD), tmp_path)
        return {"weights": weights, "sent": sent}

    processes = in_processes(work, 2, tmp_path)
    assert processes[0]["sent"] == sent
    for name, p in threads.items():
        torch.testing.assert_close(processes[0]["weights"][name], p, rtol=0, atol=1e-6, msg=name)


# ---- the batch


def test_global_tokens_and_sequences_are_two_ways_to_say_one_thing(config):
    by_tokens = override(config, {"batch.per_worker_sequences": None, "batch.global_tokens": 2 * 8 * 32})
    assert by_tokens.sequences_per_worker == config.sequences_per_worker == 8
    assert by_tokens.tokens_per_step == config.tokens_per_step == 512
    assert batch_derivation(by_tokens) == "512 tokens per step of all workers / (2 workers × 32 tokens) = 8 sequences each"
    told = batch_derivation(override(config, {"batch.accumulate": 4}))
    assert told == "2 workers × 8 sequences × 32 tokens = 512 tokens per step of all workers, computed 2 at a time"


# ---- precision


@pytest.mark.parametrize("precision", ["bfloat16-autocast", "bfloat16"])
def test_bfloat16_trains_close_to_float32_and_repeats_to_the_bit(tmp_path, precision):
    recipe = micro_recipe(tmp_path)
    steps = ("--train.steps", "20")
    exact = train(recipe, *steps)
    first, second = (train(recipe, *steps, "--train.precision", precision) for _ in range(2))

    assert first.summary["validation_loss"] == second.summary["validation_loss"]
    assert [line["loss"] for line in first.lines] == [line["loss"] for line in second.lines]
    assert first.summary["validation_loss"] != exact.summary["validation_loss"]
    assert first.summary["validation_loss"] == pytest.approx(exact.summary["validation_loss"], rel=0.03)
    assert first.summary["bytes_sent"] == first.summary["bytes_predicted"]
    assert first.summary["state_bytes"] == first.summary["state_predicted"]
    assert f"parameters, {precision}" in first.printed


@pytest.mark.parametrize(("precision", "weights"), [("bfloat16-autocast", torch.float32), ("bfloat16", torch.bfloat16)])
def test_what_is_kept_in_which_precision(config, precision, weights, tmp_path):
    prepared = prepare(override(config, {"train.precision": precision, "train.steps": 5}))
    products = set()

    def one(workers):
        hook = torch.nn.modules.module.register_module_forward_hook(
            lambda module, inputs, output: products.add(output.dtype) if isinstance(module, torch.nn.Linear) else None
        )
        try:
            return train_worker(prepared, workers, tmp_path)
        finally:
            hook.remove()

    outcome = lordo.simulate(one, 2)[0]
    assert {p.dtype for p in outcome.model.parameters()} == {weights}
    assert products == {torch.bfloat16}
    for state in outcome.optimizer.state.values():
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
