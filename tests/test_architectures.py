"""Models of several families: what is low-rank in them and why, and that all of it trains."""

import pytest
import torch

import lordo
from lordo.trainer.model_config import ModelConfig
from lordo.trainer.models import build_model

BODY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 4}
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
# Model type, its own settings, the last parts of the low-rank weights' names, whether the head is tied to the embedding.
FAMILIES = {
    "llama": ({**GROUPED, "tie_word_embeddings": False}, (*ATTENTION, *MLP), False),
    "gemma3_text": ({**GROUPED, "sliding_window": 8}, (*ATTENTION, *MLP), True),
    "qwen3": (GROUPED | {"tie_word_embeddings": True}, (*ATTENTION, *MLP), True),
    "gpt2": ({"num_key_value_heads": None, "intermediate_size": None, "n_inner": 24}, ("c_attn", "c_proj", "c_fc"), True),
    "gpt_neox": ({}, ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"), False),
    "mixtral": (GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, ATTENTION, False),
    "qwen3_moe": (
        {"num_key_value_heads": 2, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1},
        ATTENTION,
        False,
    ),
}


def config(model_type: str) -> ModelConfig:
    own = FAMILIES[model_type][0]
    return ModelConfig(config={"model_type": model_type, **BODY, **own})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_matrices_of_the_layers_are_low_rank_and_the_rest_is_not(model_type):
    _, expected, tied = FAMILIES[model_type]
    with torch.device("meta"):
        groups = lordo.param_groups(build_model(config(model_type), seed=0), rank=4)
    lowrank = {route.name.split(".")[-2] for route in groups.routes if route.rank}
    assert lowrank == set(expected)
    for route in groups.routes:
        if route.rank:
            assert len(route.shape) == 2
            assert min(route.shape) > 4
    why = {route.reason for route in groups.routes if not route.rank}
    assert ("full-rank: embedding tied to the output head" in why) == tied
    assert ("full-rank: output head" in why) == (not tied)
    experts = [route for route in groups.routes if "experts" in route.name and len(route.shape) == 3]
    assert bool(experts) == (model_type in ("mixtral", "qwen3_moe"))
    assert {route.reason for route in experts} <= {"full-rank: 3-D tensor (such as stacked experts): only a matrix has a basis"}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_it_trains_on_two_workers(model_type):
    """Two rounds on one text: finite, lower, and the same weights on both workers after the synchronisation."""
    tokens = torch.arange(64).reshape(4, 16)

    def one_worker(workers):
        model = build_model(config(model_type), seed=0)
        optimizer = lordo.LoRDO(lordo.param_groups(model, rank=4), lr=2e-2, sync_every=3, workers=workers)
        losses = []
        for _ in range(6):
            mine = tokens[workers.rank :: 2]
            loss = model(input_ids=mine, labels=mine, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [p.detach() for _, p, _ in optimizer.named_members()]

    (first, weights), (second, others) = lordo.simulate(one_worker, 2)
    for losses in (first, second):
        assert losses[-1] < 0.9 * losses[0]
    for p, q in zip(weights, others, strict=True):
        assert p.isfinite().all()
        assert torch.equal(p, q)
