"""Models from a config: equal bits for equal seeds, no setting ignored, and a loss that is what its name says."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from lordo.trainer.evaluate import validation_loss
from lordo.trainer.model_config import ModelConfig
from lordo.trainer.models import build_model, check_fits
from lordo.trainer.recipe import load

RECIPES = Path(__file__).parent.parent / "recipes"

SMALL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def small(**changes):
    return ModelConfig(config={**SMALL, **changes})


def same_bits(a, b) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- building


def test_equal_seeds_give_equal_bits_whatever_was_drawn_before():
    first = build_model(small(), seed=3)
    torch.rand(7)
    assert same_bits(first, build_model(small(), seed=3))
    assert not same_bits(first, build_model(small(), seed=4))


def test_global_random_numbers_are_untouched():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    build_model(small(), seed=3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])


def test_the_settings_are_taken():
    model = build_model(small(tie_word_embeddings=True, rope_theta=5000.0), seed=0)
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.model.layers[1].mlp.down_proj.weight.shape == (16, 24)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rope_parameters["rope_theta"] == 5000.0


def test_float32_whatever_the_default_is():
    try:
        torch.set_default_dtype(torch.float64)
        assert {p.dtype for p in build_model(small(), seed=0).parameters()} == {torch.float32}
    finally:
        torch.set_default_dtype(torch.float32)


def test_another_family_with_names_of_its_own():
    config = {"model_type": "gpt2", "vocab_size": 256, "hidden_size": 16, "n_head": 2, "n_layer": 1, "n_positions": 32}
    model = build_model(ModelConfig(config={**config, "bos_token_id": 0, "eos_token_id": 0}), seed=0)
    assert model.transformer.wpe.weight.shape == (32, 16)
    with pytest.raises(ValueError, match="max_position_embeddings = 32"):
        check_fits(model, vocabulary=256, sequence_length=33)


def test_the_tiny_recipe_has_one_to_one_and_a_half_million_parameters():
    config = load(RECIPES / "tiny.toml")
    model = build_model(config.model, seed=config.seed)
    check_fits(model, vocabulary=256, sequence_length=config.data.sequence_length)
    assert 1.0e6 < sum(p.numel() for p in model.parameters()) < 1.5e6


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "lama"}, "model.config: unknown model_type 'lama'; did you mean 'llama'?"),
        ({"model_type": None}, "model.config lacks model_type; add one"),
        ({"hiden_size": 8}, r"model.config: unknown llama setting 'hiden_size'; did you mean 'hidden_size'\? \(choices: "),
        ({"n_embd": 8}, r"model.config: unknown llama setting 'n_embd' \(choices: "),
        ({"hidden_size": "8"}, "model.config: transformers refuses it: .*Field 'hidden_size' expected int, got str"),
        ({"num_attention_heads": 3}, "model.config: transformers refuses it: .*not a multiple of the number of attention heads"),
        ({"num_attention_heads": 0}, "model.config: transformers refuses it: ZeroDivisionError"),
        ({"hidden_act": "sillu"}, "model.config: transformers cannot build this model: KeyError: 'sillu'"),
        ({"dtype": "bfloat16"}, "model.config: dtype = 'torch.bfloat16', but train.precision decides that here; leave dtype out"),
        ({"torch_dtype": "bfloat16"}, "model.config: dtype = 'torch.bfloat16', but train.precision decides that here; leave dtype out"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        build_model(small(**changes), seed=0)
    assert "\n" not in str(caught.value)


def test_a_failed_build_leaves_the_random_numbers_too():
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="cannot build"):
        build_model(small(hidden_act="sillu"), seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_fits():
    model = build_model(small(), seed=0)
    check_fits(model, vocabulary=256, sequence_length=32)
    with pytest.raises(ValueError, match=r"data.sequence_length = 33 is more than the model's max_position_embeddings = 32; lower"):
        check_fits(model, vocabulary=256, sequence_length=33)
    with pytest.raises(ValueError, match=r"model.config: vocab_size = 256 is less than the 257 tokens of the data; raise"):
        check_fits(model, vocabulary=257, sequence_length=32)


# ---- presets, other configs, weights


@pytest.mark.parametrize(("preset", "num_parameters"), [("16m", 15_993_088), ("125m", 122_702_592), ("720m", 717_277_184)])
def test_presets_have_the_papers_dimensions(preset, num_parameters):
    """By hand: V·d + L (4 d² + 3 d·f + 2 d) + d, with V = 49152 and (L, d, f) from the paper's table."""
    with torch.device("meta"):
        model = build_model(ModelConfig(preset=preset), seed=0)
    assert sum(p.numel() for p in model.parameters()) == num_parameters
    assert model.config.num_attention_heads == {"16m": 4, "125m": 12, "720m": 16}[preset]


def test_a_preset_with_another_vocabulary():
    with torch.device("meta"):
        model = build_model(ModelConfig(preset="16m", config={"vocab_size": 8192}), seed=0)
    assert sum(p.numel() for p in model.parameters()) == 15_993_088 - (49152 - 8192) * 256


def test_a_config_and_weights_from_a_folder(tmp_path):
    first = build_model(small(), seed=3)
    first.save_pretrained(tmp_path / "model")
    assert same_bits(build_model(ModelConfig(weights=str(tmp_path / "model")), seed=0), first)
    again = build_model(ModelConfig(config=str(tmp_path / "model")), seed=3)
    assert same_bits(again, first)  # random weights of the same seed
    with torch.device("meta"):  # shapes alone: no weights are read
        (tmp_path / "model" / "model.safetensors").unlink()
        shapes = build_model(ModelConfig(weights=str(tmp_path / "model")), seed=0, pretrained=False)
    assert [p.shape for p in shapes.parameters()] == [p.shape for p in first.parameters()]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"config": "no-such-owner/no-such-model"},
            "model.config = 'no-such-owner/no-such-model' cannot be opened: .*; give the",
        ),
        ({"weights": "no-such-owner/no-such-model"}, "model.weights = 'no-such-owner/no-such-model' cannot be opened: "),
        ({"config": "{folder}"}, "model.config = '.*' cannot be opened: "),
    ],
)
def test_a_model_that_cannot_be_opened(tmp_path, settings, sentence):
    settings = {name: value.format(folder=tmp_path) for name, value in settings.items()}
    with pytest.raises(ValueError, match=sentence) as caught:
        build_model(ModelConfig(**settings), seed=0)
    assert "\n" not in str(caught.value)


def test_weights_that_lack_some_are_refused(tmp_path):
    model = build_model(small(), seed=0)
    model.save_pretrained(tmp_path, state_dict={name: p for name, p in model.state_dict().items() if "layers.1.mlp.up" not in name})
    with pytest.raises(ValueError, match=r"lacks model.layers.1.mlp.up_proj.weight: it is not, or not all of, such a model"):
        build_model(ModelConfig(weights=str(tmp_path)), seed=0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "give preset"),
        ({"preset": "16m", "config": "somewhere"}, "preset and config name two models"),
        ({"preset": "16m", "weights": "somewhere"}, "weights bring their own config"),
    ],
)
def test_settings_that_exclude_each_other(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModelConfig(**settings)


def gradients(model, blocks) -> list[torch.Tensor]:
    model(input_ids=blocks, labels=blocks, use_cache=False).loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"attention": "eager"}])
def test_memory_and_speed_change_no_gradient(changes):
    blocks = some_blocks().long()
    plain = build_model(small(), seed=0)
    other = build_model(ModelConfig(config=small().config, **changes), seed=0)
    assert any(getattr(m, "gradient_checkpointing", False) for m in other.modules()) == changes.get("gradient_checkpointing", False)
    assert other.config._attn_implementation == changes.get("attention", "sdpa")
    before = torch.get_rng_state()
    for expected, found in zip(gradients(plain, blocks), gradients(other, blocks), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    assert torch.equal(torch.get_rng_state(), before)


# ---- the loss


def some_blocks(num: int = 7, length: int = 12) -> torch.Tensor:
    return torch.randint(1, 256, (num, length), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def test_the_loss_is_the_mean_negative_log_likelihood_of_the_next_tokens():
    model, blocks = build_model(small(), seed=0), some_blocks()
    with torch.no_grad():
        logp = model(input_ids=blocks.long()).logits.double().log_softmax(-1)
    terms = [logp[b, t, int(blocks[b, t + 1])] for b in range(7) for t in range(11)]
    assert validation_loss(model, blocks, 3) == pytest.approx(-torch.stack(terms).mean().item(), rel=1e-6)


def test_the_loss_is_that_of_transformers():
    model, blocks = build_model(small(), seed=0), some_blocks()
    theirs = model(input_ids=blocks.long(), labels=blocks.long()).loss.item()
    assert validation_loss(model, blocks, 7) == pytest.approx(theirs, rel=1e-6)


def test_the_batch_size_changes_nothing_but_rounding():
    model, blocks = build_model(small(), seed=0), some_blocks()
    losses = [validation_loss(model, blocks, size) for size in (1, 2, 7, 100)]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)


def test_a_model_that_knows_nothing_has_the_loss_of_a_guess():
    model = build_model(small(), seed=0)
    torch.nn.init.zeros_(model.lm_head.weight)
    assert validation_loss(model, some_blocks(), 4) == pytest.approx(np.log(256), rel=1e-6)


def test_the_model_is_left_as_it_was():
    model = build_model(small(attention_dropout=0.5), seed=0)
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    rng = torch.get_rng_state()
    first, second = (validation_loss(model, some_blocks(), 4) for _ in range(2))
    assert first == second  # no dropout
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), rng)


def test_the_model_is_left_as_it_was_after_a_failure_too():
    model = build_model(small(vocab_size=16), seed=0)
    with pytest.raises(IndexError):
        validation_loss(model, some_blocks(), 4)
    assert model.training


@pytest.mark.parametrize(
    ("blocks", "batch_size", "sentence"),
    [
        (some_blocks()[:0], 4, r"blocks of shape \(0, 12\) have no token to predict"),
        (some_blocks()[:, :1], 4, r"blocks of shape \(7, 1\) have no token to predict"),
        (some_blocks(), 0, "batch_size = 0 reads nothing; give at least 1"),
    ],
)
def test_nothing_to_evaluate(blocks, batch_size, sentence):
    with pytest.raises(ValueError, match=sentence):
        validation_loss(build_model(small(), seed=0), blocks, batch_size)
