"""Which weights are low-rank, and why."""

import pytest
import torch
from torch import nn

import lordo
from lordo.optim.routing import clean_name, is_lowrank, param_groups

pytestmark = pytest.mark.usefixtures("rng_untouched")


def on_meta(build) -> nn.Module:
    """Modules without memory, and without drawing random numbers."""
    with torch.device("meta"):
        return build()


class Decoder(nn.Module):
    """Grouped-query attention, an MLP, norms, embeddings; the head tied or not."""

    def __init__(self, *, width=32, vocabulary=500, positions=None, mlp=96, layers=2, tied=True, bias=False):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        if positions:
            self.positions = nn.Embedding(positions, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "q": nn.Linear(width, width, bias=bias),
                    "k": nn.Linear(width, width // 4, bias=bias),
                    "up": nn.Linear(width, mlp, bias=bias),
                    "down": nn.Linear(mlp, width, bias=bias),
                    "norm": nn.LayerNorm(width, bias=bias),
                }
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


def lowrank_names(groups: lordo.optim.ParamGroups) -> set[str]:
    return {route.name for route in groups.routes if route.rank is not None}


def layer_names(model: Decoder, *kinds: str) -> set[str]:
    return {f"layers.{i}.{kind}.weight" for i in range(len(model.layers)) for kind in kinds}


def reasons(groups: lordo.optim.ParamGroups) -> dict[str, str]:
    return {route.name: route.reason for route in groups.routes}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_matrices_of_layers_are_low_rank_and_nothing_else(tied, bias):
    model = on_meta(lambda: Decoder(tied=tied, bias=bias))
    groups = param_groups(model, rank=4)
    assert lowrank_names(groups) == layer_names(model, "q", "k", "up", "down")
    why = reasons(groups)
    assert why["tokens.weight"] == ("full-rank: embedding tied to the output head" if tied else "full-rank: embedding")
    assert tied or why["head.weight"] == "full-rank: output head"
    assert why["layers.0.norm.weight"] == "full-rank: vector"


def test_every_trainable_parameter_is_in_exactly_one_group_with_its_name():
    model = on_meta(Decoder)
    model.layers[0]["q"].weight.requires_grad_(False)
    groups = param_groups(model, rank=4)
    placed = [(name, id(p)) for group in groups for name, p in group["params"]]
    assert sorted(placed) == sorted((name, id(p)) for name, p in model.named_parameters() if p.requires_grad)
    assert [group["rank"] for group in groups] == [4, None]


def test_a_smaller_side_of_at_most_the_rank_is_full_rank():
    """k is 8 × 32: at rank 8 it is its own subspace."""
    model = on_meta(Decoder)
    groups = param_groups(model, rank=8)
    assert lowrank_names(groups) == layer_names(model, "q", "up", "down")
    assert reasons(groups)["layers.1.k.weight"] == "full-rank: smaller side 8 <= rank 8"
    assert lowrank_names(param_groups(model, rank=7)) == layer_names(model, "q", "k", "up", "down")


def test_without_rank_everything_is_full_rank():
    groups = param_groups(on_meta(Decoder), rank=None)
    assert len(groups) == 1
    assert groups[0]["rank"] is None
    assert lowrank_names(groups) == set()
    assert reasons(groups)["layers.0.q.weight"] == "full-rank: rank is None"


@pytest.mark.parametrize("layers", [1, 2])
def test_a_layer_as_wide_as_the_position_table_is_no_head(layers):
    """GPT-2 style: 256 positions of width 64, MLP 64 -> 256. A table of positions is not a vocabulary that a head speaks."""
    model = on_meta(lambda: Decoder(width=64, positions=256, mlp=256, layers=layers))
    assert layer_names(model, "up", "down") <= lowrank_names(param_groups(model, rank=4))


@pytest.mark.parametrize("tied", [True, False])
def test_a_layer_as_wide_as_the_vocabulary_is_no_head_where_there_is_one(tied):
    """Byte-level: 256 tokens, width 64, MLP 64 -> 256 in every layer; only the last linear layer is the head."""
    model = on_meta(lambda: Decoder(width=64, vocabulary=256, mlp=256, tied=tied))
    groups = param_groups(model, rank=4)
    assert layer_names(model, "up", "down") <= lowrank_names(groups)
    assert "head.weight" not in lowrank_names(groups)


def test_a_model_that_knows_its_head_is_believed():
    """transformers: get_output_embeddings."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.body, self.speak = nn.Embedding(11, 16), nn.Linear(16, 16), nn.Linear(16, 16)

        def get_output_embeddings(self):
            return self.speak

    groups = param_groups(on_meta(Model), rank=4)
    assert lowrank_names(groups) == {"body.weight"}
    assert reasons(groups)["speak.weight"] == "full-rank: output head"


def test_a_model_without_vocabulary_has_no_head():
    groups = param_groups(on_meta(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))), rank=4)
    assert lowrank_names(groups) == {"0.weight", "2.weight"}


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((), "scalar"),
        ((5,), "vector"),
        ((4, 3, 2), "3-D tensor (such as stacked experts): only a matrix has a basis"),
        ((2, 3, 2, 2), "4-D tensor"),
    ],
)
def test_only_matrices_are_low_rank(shape, kind):
    groups = param_groups(nn.ParameterList([nn.Parameter(torch.zeros(shape))]), rank=1)
    assert reasons(groups) == {"0": f"full-rank: {kind}"}


@pytest.mark.parametrize(
    ("shape", "rank", "expected"),
    [
        ((6, 9), 5, True),
        ((6, 9), 6, False),
        ((9, 6), 5, True),
        ((6, 6), 5, True),
        ((0, 5), 1, False),
        ((1, 5), 1, False),
        ((6, 9), None, False),
    ],
)
def test_is_lowrank(shape, rank, expected):
    assert is_lowrank(shape, rank) is expected
    assert is_lowrank(torch.Size(shape), rank) is expected


def test_wrappers_change_neither_names_nor_routes():
    model = on_meta(Decoder)
    plain = param_groups(model, rank=4)

    class Wrapper(nn.Module):
        def __init__(self, inner, name):
            super().__init__()
            self.add_module(name, inner)

    for wrapped in (
        torch.compile(model),
        Wrapper(model, "module"),
        Wrapper(torch.compile(model), "module"),
        torch.compile(Wrapper(model, "module")),
    ):
        assert reasons(param_groups(wrapped, rank=4)) == reasons(plain)


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("layers.0.q.weight", "layers.0.q.weight"),
        ("_orig_mod.layers.0.q.weight", "layers.0.q.weight"),
        ("module._orig_mod.layers.0.q.weight", "layers.0.q.weight"),
        ("_orig_mod.module.layers.0.q.weight", "layers.0.q.weight"),
        ("layers.0._orig_mod.q.weight", "layers.0.q.weight"),
        ("submodule.q.weight", "submodule.q.weight"),
        ("q.module", "q.module"),
    ],
)
def test_clean_name(name, clean):
    assert clean_name(name) == clean


def test_two_parameters_do_not_come_to_the_same_name():
    """A model with a submodule called "module" is not a wrapper: names stay apart, for collectives go by name."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.weight = nn.Linear(8, 16, bias=False), nn.Parameter(torch.zeros(16, 8))

    names = [name for name, _, _ in lordo.LoRDO(param_groups(on_meta(Model), rank=2)).named_members()]
    assert len(set(names)) == 2


def test_the_table_says_what_goes_where_and_why():
    text = str(param_groups(on_meta(Decoder), rank=4))
    lines = text.splitlines()
    assert lines[0].split() == ["parameter", "count", "shape", "rank", "why"]
    assert len(lines) == 1 + 6, "layers of the same kind share a line"
    (line,) = (line for line in lines if "layers.*.up.weight" in line)
    assert line.split() == ["layers.*.up.weight", "2", "96×32", "4", "matrix"]
    assert any("embedding tied to the output head" in line for line in lines)


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="no parameter with requires_grad=True: nothing to optimize"):
        param_groups(on_meta(Decoder).requires_grad_(False), rank=4)


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_below_one_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank must be at least 1, or None for full-rank only; got {rank}"):
        param_groups(on_meta(Decoder), rank=rank)


@pytest.mark.parametrize("rank", [2.0, "4", True])
def test_a_rank_that_is_no_whole_number_is_refused(rank):
    with pytest.raises(TypeError, match="rank must be a whole number"):
        param_groups(on_meta(Decoder), rank=rank)


def test_frozen_weights_are_listed_but_not_optimized():
    model = on_meta(Decoder)
    model.tokens.weight.requires_grad_(False)
    groups = param_groups(model, rank=4)
    assert reasons(groups)["tokens.weight"] == "frozen"
    assert all("tokens" not in name for group in groups for name, _ in group["params"])
