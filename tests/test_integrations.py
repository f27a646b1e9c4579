"""LoRDO in the trainers of transformers and Lightning, the real libraries: the same weights as in a loop of one's own, on two processes."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lordo
from common import randn
from lordo.integrations.local_steps import LocalSteps, check
from test_processes import in_processes

NUM_WORKERS, STEPS, LOOKED_AT, BATCH = 2, 10, 6, 2  # K = 4: step 6 is in the middle of a round
OPTIONS = {"lr": 0.02, "sync_every": 4}
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")]


class Toy(nn.Module):
    """A regression, in the form that a transformers Trainer takes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 12, bias=False), nn.Linear(12, 1)
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(0.3 * randn(*p.shape, seed=i))

    def forward(self, inputs, labels):
        return {"loss": (self.second(self.first(inputs).tanh()).squeeze(-1) - labels).square().mean()}


def rows(num: int, seed: int) -> list[dict]:
    return [{"inputs": x, "labels": x.sum()} for x in randn(num, 6, seed=seed)]


TRAINING, HELD_OUT = rows(NUM_WORKERS * STEPS * BATCH, 100), rows(8, 200)


def batch(chosen: list[dict]) -> dict:
    return {name: torch.stack([row[name] for row in chosen]) for name in chosen[0]}


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def loss_on_held_out(flat: torch.Tensor) -> float:
    model = Toy()
    nn.utils.vector_to_parameters(flat, model.parameters())
    with torch.no_grad():
        return float(model(**batch(HELD_OUT))["loss"])


def own_loop(batches_of) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of the weights after step LOOKED_AT and after the last one, in a loop of one's own."""

    def work(workers):
        model = Toy()
        optimizer = lordo.LoRDO(lordo.param_groups(model, rank=2), workers=workers, **OPTIONS)
        for step, chosen in enumerate(batches_of(workers.rank), start=1):
            model(**batch(chosen))["loss"].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step == LOOKED_AT:
                middle = weights(model)
        optimizer.average_parameters()
        return middle, weights(model)

    results = lordo.simulate(work, NUM_WORKERS)
    assert not torch.allclose(results[0][0], results[1][0], atol=1e-3)  # gradients are local
    return torch.stack([middle for middle, _ in results]).mean(0), results[0][1]


def as_launched(rank: int, size: int) -> None:
    """What torchrun tells a process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}


def in_transformers(folder):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from lordo.integrations.transformers import attach

    def work(rank, size):
        as_launched(rank, size)
        args = transformers.TrainingArguments(
            output_dir=str(folder / "out"),
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=OPTIONS["lr"],
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            eval_strategy="steps",
            eval_steps=LOOKED_AT,
            save_steps=LOOKED_AT,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            remove_unused_columns=False,
            prediction_loss_only=True,
        )
        assert args.world_size == size
        model = Toy()
        optimizer = lordo.LoRDO(lordo.param_groups(model, rank=2), workers=dist.group.WORLD, **OPTIONS)
        trainer = transformers.Trainer(model=model, args=args, optimizers=(optimizer, None), train_dataset=TRAINING, eval_dataset=HELD_OUT)
        attach(trainer)
        trainer.train()
        log = trainer.state.log_history
        return {
            "weights": weights(model),
            "looked at": next(line["eval_loss"] for line in log if "eval_loss" in line),
            "told": [line["lordo/bytes_sent"] for line in log if "loss" in line],
            "sent": optimizer.workers.bytes_sent() - optimizer.workers.bytes_sent("evaluation"),
        }

    return work


def test_transformers_trains_as_a_loop_of_ones_own(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")

    def batches_of(rank):
        """accelerate deals batches out in turn."""
        return [TRAINING[i : i + BATCH] for i in range(rank * BATCH, len(TRAINING), NUM_WORKERS * BATCH)]

    middle, last = own_loop(batches_of)
    results = in_processes(in_transformers(tmp_path), NUM_WORKERS, tmp_path, seconds=300)
    for result in results:
        assert torch.allclose(result["weights"], last, rtol=1e-4, atol=1e-5)
        assert result["looked at"] == pytest.approx(loss_on_held_out(middle), rel=1e-4)
        assert result["told"] == sorted(result["told"])
        assert 0 < result["told"][-1] <= result["sent"]
    saved = safetensors.load_file(tmp_path / "out" / f"checkpoint-{LOOKED_AT}" / "model.safetensors")
    assert torch.allclose(torch.cat([saved[name].flatten() for name, _ in Toy().named_parameters()]), middle, rtol=1e-4, atol=1e-5)


def in_lightning(folder):
    lightning = pytest.importorskip("lightning.pytorch")
    from lordo.integrations.lightning import LoRDOCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.toy = Toy()
            self.looked_at = []

        def training_step(self, rows, _):
            return self.toy(**rows)["loss"]

        def validation_step(self, rows, _):
            if not self.trainer.sanity_checking:
                self.looked_at.append(loss_on_held_out(weights(self.toy)))

        def configure_optimizers(self):
            return lordo.LoRDO(lordo.param_groups(self, rank=2), workers=dist.group.WORLD, **OPTIONS)

    def work(rank, size):
        as_launched(rank, size)
        module = Module()
        trainer = lightning.Trainer(
            default_root_dir=folder,
            accelerator="cpu",
            devices=size,
            strategy="ddp",
            max_steps=STEPS,
            val_check_interval=LOOKED_AT,
            gradient_clip_val=1.0,
            use_distributed_sampler=False,  # it would shuffle
            callbacks=[LoRDOCallback(), lightning.callbacks.ModelCheckpoint(folder / "out", every_n_train_steps=LOOKED_AT, filename="at")],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loaders = [torch.utils.data.DataLoader(rows, batch_size=BATCH) for rows in (TRAINING[rank::size], HELD_OUT)]
        trainer.fit(module, *loaders)
        told = float(trainer.callback_metrics["lordo/bytes_sent"])
        workers = trainer.optimizers[0].workers
        sent = workers.bytes_sent() - workers.bytes_sent("evaluation")
        return {"weights": weights(module), "looked at": module.looked_at[0], "told": told, "sent": sent}

    return work


def test_lightning_trains_as_a_loop_of_ones_own(tmp_path):
    def batches_of(rank):
        own = TRAINING[rank::NUM_WORKERS]
        return [own[i : i + BATCH] for i in range(0, len(own), BATCH)]

    middle, last = own_loop(batches_of)
    results = in_processes(in_lightning(tmp_path), NUM_WORKERS, tmp_path, seconds=300)
    for result in results:
        assert torch.allclose(result["weights"], last, rtol=1e-4, atol=1e-5)
        assert result["looked at"] == pytest.approx(loss_on_held_out(middle), rel=1e-4)
        assert 0 < result["told"] <= result["sent"]
    saved = torch.load(tmp_path / "out" / "at.ckpt", weights_only=False)["state_dict"]
    assert torch.allclose(torch.cat([saved[f"toy.{name}"].flatten() for name, _ in Toy().named_parameters()]), middle, rtol=1e-4, atol=1e-5)


def test_optimizers_that_do_not_fit_a_trainer_are_refused():
    model = Toy()
    alone = lordo.LoRDO(lordo.param_groups(model, rank=2), **OPTIONS)
    assert check(alone, num_processes=1) is alone
    with pytest.raises(ValueError, match=r"runs in 2 processes, but the optimizer has 1 workers: .*group\.WORLD"):
        check(alone, num_processes=2)
    with pytest.raises(TypeError, match="got AdamW"):
        check(torch.optim.AdamW(model.parameters()), num_processes=1)

    def averages(workers):
        optimizer = lordo.DistributedOptimizer(lordo.param_groups(Toy(), rank=None), "ddp-adamw", workers=workers, lr=0.1)
        with pytest.raises(ValueError, match="which the trainer does already: build it with workers=None"):
            check(optimizer, num_processes=2)

    lordo.simulate(averages, 2)


def test_what_was_loaded_over_the_mean_stays_at_the_end():
    """A Trainer that loads its best checkpoint does so between the last evaluation and the end."""
    model = Toy()
    steps = LocalSteps(lordo.LoRDO(lordo.param_groups(model, rank=2), **OPTIONS))
    steps.show_mean()
    with torch.no_grad():
        model.second.bias.fill_(7.0)
    steps.end()
    assert model.second.bias.item() == 7.0
