"""Settings: a file and what `dump` made of it are equal; every mistake is one sentence that says what to do."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lordo.suggest import SHOWN, nearest, unknown
from lordo.trainer.config import BatchConfig, RunConfig
from lordo.trainer.data_config import DataConfig, MixConfig
from lordo.trainer.method_config import MethodConfig, PhaseConfig
from lordo.trainer.model_config import ModelConfig
from lordo.trainer.recipe import dump, dumps, load
from lordo.trainer.settings import ConfigError
from lordo.trainer.train_config import TrainConfig

RECIPES = Path(__file__).parent.parent / "recipes"

RUN = """
name = "trial"
seed = 3

[model.config]
model_type = "llama"
hidden_size = 32

[data]
source = "stdlib"

[method]
lr = 6e-3
rank = 16

[train]
steps = 400
warmup_steps = 20
"""


def written(folder: Path, text: str = RUN, name: str = "trial.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def complaint(folder: Path, text: str, overrides: dict[str, object] | None = None) -> str:
    """What `load` says of a file, without the path it begins with."""
    path = written(folder, text)
    with pytest.raises(ConfigError) as caught:
        load(path, overrides or {})
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path)).removeprefix(": ")


# ---- reading


def test_what_is_read(tmp_path):
    config = load(written(tmp_path))
    assert (config.name, config.seed, config.workers, config.output) == ("trial", 3, 4, "runs")
    assert config.model.config == {"model_type": "llama", "hidden_size": 32}
    assert config.data == DataConfig(source="stdlib")
    assert config.batch == BatchConfig()
    assert config.method.settings() == {"rank": 16}
    assert (config.train.steps, config.train.clip) == (400, 1.0)


def test_a_method_tells_only_the_options_that_were_set():
    method = MethodConfig(lr=1.0, betas=(0.9, 0.99), error_feedback=False, weight_decay=0.0)
    assert method.settings() == {"betas": (0.9, 0.99), "error_feedback": False, "weight_decay": 0.0}


def test_overrides_replace_by_dotted_name(tmp_path):
    path = written(tmp_path)
    changed = {"workers": 2, "method.lr": 1e-3, "method.rank": None, "batch.per_worker_sequences": 3, "model.config.hidden_size": 64}
    config = load(path, changed)
    assert (config.workers, config.method.lr, config.method.rank) == (2, 1e-3, None)
    assert (config.batch.per_worker_sequences, config.model.config["hidden_size"]) == (3, 64)
    assert load(path).workers == 4  # the file and the defaults are as they were


def test_settings_do_not_change(tmp_path):
    config = load(written(tmp_path))
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 4


def test_whole_numbers_are_numbers_but_not_the_other_way(tmp_path):
    assert load(written(tmp_path, RUN.replace("6e-3", "1"))).method.lr == 1.0
    assert "should be a valid integer" in complaint(tmp_path, RUN.replace("seed = 3", "seed = 3.0"))
    assert "should be a valid integer" in complaint(tmp_path, RUN.replace("seed = 3", "seed = true"))


def test_every_setting_has_a_docstring():
    tables = [RunConfig, ModelConfig, DataConfig, MixConfig, BatchConfig, MethodConfig, PhaseConfig, TrainConfig]
    assert [f"{table.__name__}.{name}" for table in tables for name, field in table.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.name)
def test_the_recipes_are_read(path):
    assert load(path).name == path.stem


# ---- the sentences


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("rank =", "rnak =", "[method] has no setting 'rnak'; did you mean 'rank'?"),
        ("lr =", "lrr =", "[method] has no setting 'lrr'; did you mean 'lr'?"),
        ("seed =", "sede =", "there is no setting 'sede'; did you mean 'seed'?"),
        ("[method]", "[methods]", "there is no setting 'methods'; did you mean 'method'?"),
        ("steps = 400", "steps = 400\nlr = 1.0", "[train] has no setting 'lr'; it belongs to [method]"),
        ("rank = 16", "seed = 1", "[method] has no setting 'seed'; it belongs above the first table"),
        ('source = "stdlib"', 'source = "stdlib"\nxyz = 1', "[data] has no setting 'xyz'; the settings are: corpus, max_bytes, "),
        ("lr = 6e-3", "", "[method] lacks the setting 'lr'; add it: Peak learning rate of the local step."),
        ('name = "trial"', "", "it lacks the setting 'name'; add it: Name of the run"),
        ('[data]\nsource = "stdlib"', "", "the table [data] is missing; add it, with some of: corpus, "),
        ("lr = 6e-3", "lr = -1", "[method] lr = -1, but it should be greater than 0"),
        ("lr = 6e-3", "lr = nan", "[method] lr = nan, but it should be a finite number"),
        ("lr = 6e-3", 'lr = "6e-3"', '[method] lr = "6e-3", but it should be a valid number'),
        ("rank = 16", "rank = 0", "[method] rank = 0, but it should be at least 1"),
        ("rank = 16", "sync_every = 0", "[method] sync_every = 0, but it should be at least 1"),
        ("rank = 16", "omega = 1.5", "[method] omega = 1.5, but it should be at most 1"),
        ("rank = 16", "omega = -0.5", "[method] omega = -0.5, but it should be at least 0"),
        ("rank = 16", "betas = [0.9, 1.0]", "[method] betas[1] = 1.0, but it should be less than 1"),
        ("rank = 16", "betas = [0.9]", "[method] betas = [0.9], but it should be two numbers, such as [0.9, 0.999]"),
        ("rank = 16", 'outer = "sgd"', "[method] outer = \"sgd\", but it should be 'none' or 'nesterov'"),
        ("rank = 16", 'basis = "qr"', "[method] basis = \"qr\", but it should be 'auto', 'svd' or 'subspace'"),
        ("[train]", "[[phase]]\nfrom_step = 5\nomgea = 1.0\n[train]", "[phase[0]] has no setting 'omgea'; did you mean 'omega'?"),
        ("[train]", "[[phase]]\nomega = 1.0\n[train]", "[phase[0]] lacks the setting 'from_step'; add it: First step, counted from 1"),
        ("[train]", "[[phase]]\nfrom_step = 1\nomega = 1.0\n[train]", "[phase[0]] from_step = 1, but it should be at least 2"),
        ("[train]", "[[phase]]\nfrom_step = 5\n[train]", "phase[0] changes nothing: give it a setting of [method], or leave it out"),
        ("[train]", "[[phase]]\nfrom_step = 401\nlr = 1.0\n[train]", "phase[0].from_step = 401 is after the last step, 400: lower it"),
        (
            "[train]",
            "[[phase]]\nfrom_step = 5\nlr = 1.0\n[[phase]]\nfrom_step = 5\nlr = 1.0\n[train]",
            "phase[1].from_step = 5 does not come after 5: put the phases in order",
        ),
        (
            "[train]",
            "[batch]\nglobal_tokens = 1000\n[train]",
            "batch.global_tokens = 1000 is not a multiple of workers × data.sequence_length",
        ),
        (
            "[train]",
            "[batch]\nglobal_tokens = 1024\nper_worker_sequences = 2\n[train]",
            "[batch] per_worker_sequences and global_tokens say the same thing twice: leave one of them out",
        ),
        ("[train]", "[batch]\naccumulate = 3\n[train]", "batch.accumulate = 3 does not divide the 8 sequences of a worker"),
        ("steps = 400", "steps = 400\ndecay_steps = 9", '[train] decay_steps = 9, but schedule = "constant" never falls: take "linear" or'),
        (
            "steps = 400",
            'steps = 400\nschedule = "linear"\ndecay_steps = 390',
            "[train] warmup_steps = 20 and decay_steps = 390 are more than steps = 400 together",
        ),
        ("steps = 400", "steps = 0", "[train] steps = 0, but it should be at least 1"),
        ("steps = 400", "steps = 10", "[train] warmup_steps = 20 is more than steps = 10: lower warmup_steps or train for more"),
        ('source = "stdlib"', 'corpus = "c"\n[[data.mix]]\nsorce = "x"', "[data.mix[0]] has no setting 'sorce'; did you mean 'source'?"),
        ('source = "stdlib"', 'corpus = "c"\n[[data.mix]]\nsource = "x"\nweight = 0', "[data.mix[0]] weight = 0, but it should be greater"),
        ('source = "stdlib"', '[[data.mix]]\nsource = "x"', "[data] [[data.mix]] needs corpus, the folder for its tokens"),
        ('"stdlib"', "7", "[data] source = 7, but it should be 'stdlib' or a valid list"),
        ('"stdlib"', '["a", 7]', "[data] source[1] = 7, but it should be a valid string"),
        ('"stdlib"', "[]", "[data] source = [], but it should be 'stdlib' or should have at least 1 item, not 0"),
        ('"stdlib"', '"stdlib"\nvalidation_fraction = 1.0', "[data] validation_fraction = 1.0, but it should be less than 1"),
        ("= 32", "= [32]", "[model.config] hidden_size = [32], but it should be a valid boolean or a valid integer or"),
        ("= 32", "= {a = 1}", "[model.config] hidden_size = {'a': 1}, but it should be a valid boolean or a valid integer or"),
        ("[model.config]", "[model]\nconfig = 3\n[model.x]", "[model] has no setting 'x'"),
        ("[model.config]", "[model]\nconfig = 3\n#", "[model] "),
        ('"trial"', '"a/b"', 'name = "a/b", but it should be letters, digits, and `_`, `.` or `-` after the first'),
        ("seed = 3", f"output = {['x' * 90]}", f'output = ["{"x" * 58}..., but it should be a valid string'),
        ("rank = 16", "rank = 1979-05-27", "[method] rank = datetime.date(1979, 5, 27), but it should be a valid integer"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(tmp_path, old, new, sentence):
    assert old in RUN
    assert complaint(tmp_path, RUN.replace(old, new, 1)).startswith(sentence)


def test_a_table_that_is_no_table(tmp_path):
    assert complaint(tmp_path, "method = 3\n" + RUN.replace("[method]\nlr = 6e-3\nrank = 16", "")) == (
        "method = 3, but it should be a valid table"
    )


def test_a_mistake_in_an_override_names_the_override(tmp_path):
    assert (
        complaint(tmp_path, RUN, {"method.rnak": 3}) == " (with method.rnak changed): [method] has no setting 'rnak'; did you mean 'rank'?"
    )
    assert complaint(tmp_path, RUN, {"method.lr.x": 3}) == "cannot set 'method.lr.x', because 'lr' is a setting, not a table"
    assert complaint(tmp_path, RUN, {"train.steps": None}).endswith("[train] steps = None, but it should be a valid integer")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('name = "a"\nseed =\n', ", line 2: not TOML: Invalid value"),
        ('name = "a"\n[data\n', ", line 2: not TOML: Expected ']' at the end of a table declaration"),
        ('name = "a"\n\nseed = """', ", line 3: not TOML: "),
    ],
)
def test_bad_toml_is_told_with_its_line(tmp_path, text, sentence):
    assert complaint(tmp_path, text).startswith(sentence)


def test_text_of_another_encoding(tmp_path):
    path = tmp_path / "trial.toml"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match=r"trial.toml is not UTF-8 text \(byte 8\)"):
        load(path)


def test_a_missing_file_suggests_the_nearest_recipe(tmp_path):
    written(tmp_path, name="tiny.toml")
    written(tmp_path, name="large.toml")
    for missing in ("tinny.toml", "tiny", "TINY"):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path / missing)
        there = f"({tmp_path} has: large.toml, tiny.toml)"
        assert str(caught.value) == f"{tmp_path / missing} does not exist; did you mean '{tmp_path / 'tiny.toml'}'? {there}"


def test_a_missing_file_with_nothing_like_it(tmp_path):
    with pytest.raises(ConfigError, match=r"tiny.toml does not exist; there is no .toml file in "):
        load(tmp_path / "tiny.toml")
    written(tmp_path, name="tiny.toml")
    with pytest.raises(ConfigError, match=r"qqq does not exist; .* has: tiny.toml$"):
        load(tmp_path / "qqq")
    with pytest.raises(ConfigError, match=r"is a folder, not a recipe; .* has: tiny.toml$"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"does not exist; neither does the folder .*nowhere$"):
        load(tmp_path / "nowhere" / "tiny.toml")


# ---- writing

text = st.text(st.characters(codec="utf-8"))
counts = st.integers(1, 2**62)
positive = st.floats(0, 1e300, exclude_min=True)
fractions = st.floats(0, 1)
decays = st.floats(0, 1, exclude_max=True)
scalars = st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | text | st.none()


def maybe(values):
    return st.none() | values


methods = st.builds(
    MethodConfig,
    name=text,
    lr=positive,
    rank=maybe(counts),
    sync_error_every=maybe(counts),
    betas=maybe(st.tuples(decays, decays)),
    omega=maybe(fractions),
    error_feedback=maybe(st.booleans()),
    fullrank_signal=maybe(st.sampled_from(["gradient", "gradient+error"])),
    outer=maybe(st.sampled_from(["none", "nesterov"])),
)
trains = st.integers(99, 2**62).flatmap(
    lambda steps: st.builds(
        TrainConfig, steps=st.just(steps), clip=maybe(positive), warmup_steps=st.integers(0, steps), final_lr_fraction=fractions
    )
)


mixes = st.builds(MixConfig, source=text.filter(bool), subset=maybe(text), weight=positive)


def phases(first_steps: list[int]):
    """Phases that begin at these steps, each changing something."""
    changes = st.fixed_dictionaries({"omega": fractions}, optional={"betas": st.tuples(decays, decays), "lr": positive})
    return st.tuples(*(changes.map(lambda change, step=step: PhaseConfig(from_step=step, **change)) for step in first_steps)).map(list)


runs = st.builds(
    RunConfig,
    name=st.from_regex(r"\A\w[\w.-]*\Z"),
    seed=st.integers(0, 2**62),
    workers=counts,
    output=text.filter(bool),
    model=st.builds(ModelConfig, config=st.dictionaries(text, scalars)),
    data=st.builds(DataConfig, source=st.just("stdlib") | st.lists(text, min_size=1), max_bytes=maybe(counts))
    | st.builds(DataConfig, mix=st.lists(mixes, min_size=1, max_size=3), corpus=text.filter(bool), tokenizer=text),
    batch=st.builds(BatchConfig, per_worker_sequences=counts),
    method=methods,
    phase=st.just([]) | st.lists(st.integers(2, 99), min_size=1, unique=True).map(sorted).flatmap(phases),
    train=trains,
)


@given(config=runs)
def test_what_is_dumped_is_read_back_equal(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "dumped.toml"
    dump(config, path)
    again = load(path)
    assert again == config
    assert dumps(again) == dumps(config)


def test_types_survive_in_the_model_config(tmp_path):
    given = {"a": True, "b": 1, "c": 1.0, "d": "1", "e": 1e-6, "f": 1e16, "g": 'q"\\\n\x7f\x00é😀', "h.i j": 0}
    config = load(written(tmp_path), {"model.config": given})
    dump(config, tmp_path / "again.toml")
    again = load(tmp_path / "again.toml").model.config
    assert again == given
    assert [type(value) for value in again.values()] == [type(value) for value in given.values()]


def test_no_clipping_is_written_as_a_word(tmp_path):
    config = load(written(tmp_path, RUN.replace("steps = 400", 'steps = 400\nclip = "none"')))
    assert config.train.clip is None
    assert 'clip = "none"\n' in dumps(config)
    assert "but it should be a valid number" in complaint(tmp_path, RUN.replace("steps = 400", 'steps = 400\nclip = "off"'))


def test_none_in_the_model_config_means_left_out():
    assert ModelConfig(config={"a": None, "b": 1}).config == {"b": 1}


def test_defaults_are_written_too(tmp_path):
    text = dumps(load(written(tmp_path)))
    assert 'output = "runs"\n' in text
    assert "[batch]\naccumulate = 1\n" in text
    assert "sync_every" not in text  # None: the method's own


# ---- names


def test_the_nearest_name():
    assert nearest("rnak", ["rank", "lr"]) == "rank"
    assert nearest("LORDO", ["lordo", "galore"]) == "lordo"
    assert nearest("xyz", ["rank", "lr"]) is None
    assert nearest("rank", []) is None


def test_the_sentence_about_an_unknown_name():
    assert unknown("method", "lordoo", ["lordo", "adamw"]) == "unknown method 'lordoo'; did you mean 'lordo'? (choices: adamw, lordo)"
    assert unknown("method", "xyz", ["lordo", "adamw"]) == "unknown method 'xyz' (choices: adamw, lordo)"


def test_a_long_list_of_choices_is_cut():
    choices = [f"name{i:03}" for i in range(SHOWN + 7)]
    assert unknown("thing", "zzz", choices).endswith(f"name{SHOWN - 1:03} and 7 more)")
