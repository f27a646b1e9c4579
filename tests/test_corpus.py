"""`lordo prepare`: documents to tokens on disk, every one of them once, resumable, and read by training as they are."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import AutoTokenizer

import lordo.cli
import lordo.trainer.sources
import lordo.trainer.tokenize
from lordo.trainer.corpus import load_corpus, read_record
from lordo.trainer.data_config import DataConfig, MixConfig
from lordo.trainer.prepare_command import prepare
from lordo.trainer.recipe import load, override
from lordo.trainer.sources import Position, open_sources
from lordo.trainer.terminal import wide_console
from lordo.trainer.tokenizer import Encoder, open_tokenizer, train_tokenizer
from test_train import Run, micro_recipe

WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "that",
    "was",
    "his",
    "he",
    "it",
    "with",
    "is",
    "for",
    "as",
    "had",
    "you",
    "not",
    "be",
    "her",
    "on",
)


def documents(num: int, seed: int = 0) -> list[str]:
    """Texts of 20 to 60 words, no two alike."""
    draw = np.random.default_rng(seed)
    return [f"{seed}-{i} " + " ".join(draw.choice(WORDS, 20 + i % 41)) + " é\n" for i in range(num)]


def write(path: Path, texts: list[str], column: str = "text") -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"id": list(range(len(texts))), column: texts}), path, row_group_size=40)
    else:
        path.write_text("".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)))
    return path


@pytest.fixture
def texts(tmp_path) -> dict[str, list[str]]:
    """Three sources on disk, one of each kind: a.jsonl, b.parquet, and the folder c."""
    made = {"a": documents(300, 1), "b": documents(100, 2), "c": documents(40, 3)}
    write(tmp_path / "a.jsonl", made["a"])
    write(tmp_path / "b.parquet", made["b"])
    (tmp_path / "c").mkdir()
    for i, text in enumerate(made["c"]):
        (tmp_path / "c" / f"{i:03}.txt").write_text(text)
    return made


@pytest.fixture
def config(tmp_path, texts):
    """The micro recipe on a mixture of them, in bytes."""
    mix = [
        {"source": str(tmp_path / "a.jsonl"), "name": "a", "weight": 0.7},
        {"source": str(tmp_path / "b.parquet"), "name": "b", "weight": 0.2},
        {"source": str(tmp_path / "c"), "weight": 0.1},
    ]
    data = {"data.source": None, "data.mix": mix, "data.corpus": str(tmp_path / "corpus"), "train.steps": 4, "train.warmup_steps": 0}
    return override(load(micro_recipe(tmp_path)), data)


def prepared(config, **asked) -> Path:
    prepare(config, asked.get("max_tokens"), asked.get("vocabulary"), wide_console())
    return Path(config.data.corpus)


def side(corpus: Path, source: str, side: str, dtype=np.uint16) -> list[list[int]]:
    """The documents of one side, as tokens; 0 is the end of text."""
    tokens = np.fromfile(corpus / source / f"{side}.bin", dtype=dtype).tolist()
    assert tokens[-1] == 0
    return [[int(token) for token in each] for each in _split(tokens)]


def _split(tokens: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token in tokens:
        found[-1].append(token)
        found += [[]] if token == 0 else []
    return [each[:-1] for each in found[:-1]]


# ---- what is written


def test_every_document_is_there_once_whole_and_in_order(config, texts):
    corpus = prepared(config)
    for name, given in texts.items():
        both = [bytes(each).decode() for each in side(corpus, name, "train") + side(corpus, name, "validation")]
        assert sorted(both) == sorted(given)
        kept = {bytes(each).decode() for each in side(corpus, name, "validation")}
        assert [text for text in given if text not in kept] == [bytes(each).decode() for each in side(corpus, name, "train")]
        assert given[0] in kept
        record = read_record(corpus / name)
        assert record.train.documents + record.validation.documents == len(given)
        assert record.train.bytes + record.validation.bytes == sum(len(text.encode()) for text in given)
        assert record.tokens == sum(len(text.encode()) + 1 for text in given)
        assert record.exhausted
    shares = [len(side(corpus, name, "validation")) / len(given) for name, given in texts.items()]
    assert 0.02 < min(shares) <= max(shares) < 0.25


def test_training_reads_the_blocks_of_the_files_and_validation_is_mixed_by_weight(config, tmp_path):
    corpus = prepared(config)
    splits = load_corpus(config.data)
    for name, part in zip("abc", splits.train, strict=True):
        tokens = np.fromfile(corpus / name / "train.bin", dtype=np.uint16)
        assert part.blocks.flatten().tolist() == tokens[: len(tokens) // 32 * 32].tolist()
        assert part.name == name
    assert splits.vocabulary == 256
    counts = dict.fromkeys("abc", 0)
    streams = {name: np.fromfile(corpus / name / "validation.bin", dtype=np.uint16).tobytes() for name in "abc"}
    for block in splits.validation:
        (name,) = [name for name, stream in streams.items() if block.numpy().astype(np.uint16).tobytes() in stream]
        counts[name] += 1
    assert counts["a"] == pytest.approx(3.5 * counts["b"], abs=4)
    assert counts["b"] == pytest.approx(2 * counts["c"], abs=2)


def test_a_validation_document_is_recognised_by_its_text(tmp_path, config):
    """Copies of a text, wherever they stand, are on one side (but for the first document of all)."""
    write(tmp_path / "a.jsonl", documents(200, 5) * 3)
    corpus = prepared(config)
    train, kept = ({bytes(each) for each in side(corpus, "a", which)} for which in ("train", "validation"))
    assert len(train & kept) <= 1


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [4, 9])
def test_interrupted_and_resumed_is_uninterrupted(config, tmp_path, monkeypatch, after):
    monkeypatch.setattr(lordo.trainer.tokenize, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(lordo.trainer.tokenize, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(lordo.trainer.sources, "CHECKPOINT_DOCUMENTS", 17)
    whole = prepared(override(config, {"data.corpus": str(tmp_path / "whole")}))

    left = after
    advanced = lordo.trainer.prepare_command.Watch.advanced

    def interrupted(self, source, record):
        nonlocal left
        left -= 1
        if left < 0:
            left = after
            raise Stop
        advanced(self, source, record)

    monkeypatch.setattr(lordo.trainer.prepare_command.Watch, "advanced", interrupted)
    for attempt in range(200):
        try:
            corpus = prepared(config)
            break
        except Stop:
            if attempt == 0:
                with pytest.raises(ValueError, match="run lordo prepare with this recipe"):
                    load_corpus(config.data)
    assert attempt > 1
    for name in "abc":
        for which in ("train.bin", "validation.bin", "source.json"):
            if which == "source.json":
                first, second = read_record(whole / name), read_record(corpus / name)
                assert (first.train, first.validation) == (second.train, second.validation)
            else:
                assert (corpus / name / which).read_bytes() == (whole / name / which).read_bytes(), (name, which)


def test_a_limit_by_weight_and_more_later(config, tmp_path, texts):
    corpus = prepared(config, max_tokens=10_000)
    largest = max(len(text.encode()) + 1 for texts in texts.values() for text in texts)
    for name, share in (("a", 7000), ("b", 2000), ("c", 1000)):
        assert share <= read_record(corpus / name).tokens < share + largest
    few = load_corpus(config.data)
    prepared(config, max_tokens=30_000)
    more = load_corpus(config.data)
    assert len(more.train[0].blocks) > len(few.train[0].blocks)
    assert torch.equal(more.train[0].blocks[: len(few.train[0].blocks)], few.train[0].blocks)

    at_once = prepared(override(config, {"data.corpus": str(tmp_path / "at-once")}), max_tokens=30_000)
    for name in "abc":
        assert (at_once / name / "train.bin").read_bytes() == (corpus / name / "train.bin").read_bytes()


@pytest.mark.parametrize("name", ["a.jsonl", "b.parquet", "c"])
def test_a_stream_goes_on_behind_any_document(tmp_path, texts, monkeypatch, name):
    monkeypatch.setattr(lordo.trainer.sources, "CHECKPOINT_DOCUMENTS", 7)
    (source,) = open_sources([MixConfig(source=str(tmp_path / name))])
    found = list(source.documents(Position()))
    assert [text for text, _ in found] == texts[name[0]]
    for behind in (0, 6, 7, 8, 39):
        again = [text for text, _ in source.documents(json_copy(found[behind][1]))]
        assert again == texts[name[0]][behind + 1 :], behind


def json_copy(position: Position) -> Position:
    return Position(**json.loads(json.dumps({"state": position.state, "skip": position.skip})))


# ---- tokenizers


def test_a_tokenizer_trained_on_the_mixture(config, tmp_path, capsys):
    folder = tmp_path / "tokenizers" / "mine"
    config = override(config, {"data.tokenizer": str(folder), "model.config.vocab_size": 320})
    corpus = prepared(config, vocabulary=300)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 300
    assert tokenizer.eos_token_id == 0
    train = side(corpus, "c", "train")
    assert all(tokenizer.decode(each).startswith("3-") for each in train)
    record = read_record(corpus / "c")
    assert record.tokens < record.train.bytes + record.validation.bytes  # it joins bytes
    assert open_tokenizer(str(corpus / "tokenizer")).get_vocab() == tokenizer.get_vocab()

    with pytest.raises(ValueError, match="exists already; leave the option out to use it"):
        prepared(config, vocabulary=300)
    assert load_corpus(config.data).vocabulary == 300


def test_training_a_tokenizer_repeats(tmp_path):
    for name in ("first", "second"):
        train_tokenizer(documents(100), 290, tmp_path / name)
    first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("first", "second"))
    assert first == second


def test_text_that_spells_a_special_token_does_not_end_a_document(tmp_path):
    train_tokenizer(documents(50), 280, tmp_path / "t")
    encoder = Encoder(open_tokenizer(str(tmp_path / "t")), is_bytes=False)
    (tokens,) = encoder.encode(["a <|endoftext|> b"])
    assert tokens.tolist().count(encoder.end) == 1
    assert encoder.tokenizer.decode(tokens[:-1]) == "a <|endoftext|> b"


def test_bytes_never_hold_the_separator():
    encoder = Encoder(open_tokenizer("bytes"), is_bytes=True)
    first, second = encoder.encode(["a\0b", "\ud800é"])
    assert first.tolist() == [97, 98, 0]
    assert bytes(second.tolist()) == "?é\0".encode()


# ---- the command, and training on its result


def test_prepare_then_train_then_evaluate(config, tmp_path, capsys):
    """A BPE on a mixture, through the commands; the run's own folder holds the tokenizer."""
    from lordo.trainer.recipe import dump

    recipe = tmp_path / "mix.toml"
    tokenizer = {"data.tokenizer": str(tmp_path / "bpe"), "model.config.vocab_size": 300}
    dump(override(config, {**tokenizer, "data.sequence_length": 16}), recipe)
    assert lordo.cli.main(["train", str(recipe)]) == 2
    assert "is not there yet: run lordo prepare with this recipe first" in capsys.readouterr().err
    assert lordo.cli.main(["prepare", str(recipe), "--train-tokenizer", "300"]) == 0
    assert "300 different tokens, about" in capsys.readouterr().out
    assert lordo.cli.main(["train", str(recipe)]) == 0
    printed = capsys.readouterr().out
    run = Run(recipe, Path(printed.strip().splitlines()[-1].removeprefix("everything is in ").removesuffix("/")), printed)
    assert "epochs in this run" in printed
    assert len(AutoTokenizer.from_pretrained(run.folder / "model")) == 300
    assert lordo.cli.main(["eval", str(run.folder)]) == 0
    evaluated = json.loads((run.folder / "evaluations.json").read_text())["validation"]
    assert evaluated["loss"] == pytest.approx(run.summary["validation_loss"], rel=1e-5)
    assert evaluated["num_bytes"] > evaluated["num_tokens"]

    text = tmp_path / "text.txt"
    text.write_text("the and é <|endoftext|> of\n", encoding="utf-8")
    assert lordo.cli.main(["eval", str(run.folder), str(text)]) == 0
    assert json.loads((run.folder / "evaluations.json").read_text())[str(text)]["num_bytes"] == text.stat().st_size
    assert lordo.cli.main(["generate", str(run.folder), "the", "--max-tokens", "5"]) == 0
    assert lordo.cli.main(["export", str(run.folder), str(tmp_path / "out")]) == 0
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported("the and é")["input_ids"] == AutoTokenizer.from_pretrained(run.folder / "model")("the and é")["input_ids"]


# ---- what cannot be


def test_the_hub_out_of_reach_is_one_sentence(config, capsys, tmp_path):
    changed = override(config, {"data.mix": [{"source": "no-such-owner/no-such-dataset"}]})
    with pytest.raises(ValueError, match=r"data.mix\[0\]: the dataset 'no-such-owner/no-such-dataset' cannot be read from the Hugging"):
        prepared(changed)
    assert not Path(config.data.corpus).exists()
    changed = override(config, {"data.tokenizer": "no-such-owner/no-such-tokenizer"})
    with pytest.raises(ValueError, match=r"data.tokenizer = 'no-such-owner/no-such-tokenizer': there is no such folder here, and on the"):
        prepared(changed)
    assert not Path(config.data.corpus).exists()


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"source": "nowhere.jsonl"}, r"data.mix\[0\]: 'nowhere.jsonl' does not exist; give a file or folder, as seen from"),
        ({"source": "/no/where"}, "does not exist"),
        ({"source": "a.jsonl", "text_column": "content"}, r"there is no column 'content'; text_column may be one of: id, text"),
        ({"source": "b.parquet", "text_column": "content"}, r"there is no column 'content'; text_column may be one of: id, text"),
        ({"source": "a.jsonl", "text_column": "id"}, "the column 'id' holds int, not text"),
        ({"source": "empty.txt"}, "the file '.*empty.txt' is empty; leave it out"),
        ({"source": "empty.jsonl"}, "the file '.*empty.jsonl' is empty; leave it out"),
        ({"source": "binary.txt"}, "binary.txt is not text, for it has a zero byte"),
        ({"source": "binary.jsonl"}, "binary.jsonl cannot be read as json"),
        ({"source": "binary.parquet"}, "binary.parquet cannot be read as parquet"),
        ({"source": "c", "text_column": "content"}, "text files have no column 'content'"),
        ({"source": "c", "subset": "x"}, "subset and split are for datasets on the hub"),
        ({"source": "."}, r"has files of several kinds \(parquet, json, text\): make an entry for each"),
        ({"source": "nothing"}, "the folder '.*nothing' has no text; it needs non-empty files in one of .parquet, .jsonl"),
    ],
)
def test_a_source_that_cannot_be_read(config, tmp_path, monkeypatch, entry, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing").mkdir()
    for name in ("empty.txt", "empty.jsonl"):
        (tmp_path / name).touch()
    for name in ("binary.txt", "binary.jsonl", "binary.parquet"):
        (tmp_path / name).write_bytes(bytes(range(256)) * 20)
    with pytest.raises(ValueError, match=sentence) as caught:
        prepared(override(config, {"data.mix": [entry]}))
    assert "\n" not in str(caught.value)
    assert not Path(config.data.corpus).exists()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"data.validation_fraction": 0.2}, "was made with data.validation_fraction = 0.1, but the recipe says 0.2"),
        ({"data.sequence_length": 30}, None),  # cut when it is read
        ({"data.mix": [{"source": "a.jsonl", "name": "d"}]}, "has no source 'd' yet: run lordo prepare with this recipe"),
        ({"data.sequence_length": 32_000, "model.config.max_position_embeddings": 32_000}, "fewer than one block of data.sequence_length"),
    ],
)
def test_a_corpus_that_does_not_serve(config, changed, sentence):
    prepared(config)
    if sentence is None:
        assert load_corpus(override(config, changed).data).validation.shape[1] == 30
        return
    with pytest.raises(ValueError, match=sentence):
        load_corpus(override(config, changed).data)


def test_files_that_changed_are_not_added_to(config, tmp_path):
    prepared(config, max_tokens=5000)
    write(tmp_path / "a.jsonl", documents(10, 9))
    with pytest.raises(ValueError, match=r"corpus/a was made from other files than the recipe names now: remove it, or choose another"):
        prepared(config)


def test_a_model_with_fewer_tokens_than_the_tokenizer(config, tmp_path):
    train_tokenizer(documents(100), 290, tmp_path / "t")
    with pytest.raises(ValueError, match=r"vocab_size = 256 is less than the 290 tokens of the data; raise it to 290"):
        prepared(override(config, {"data.tokenizer": str(tmp_path / "t")}))
    assert not Path(config.data.corpus).exists()


def test_two_sources_of_one_name(tmp_path, texts):
    entry = MixConfig(source=str(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match=r"data.mix\[1\] is called 'a.jsonl', as data.mix\[0\] is: give one of them a name of its own"):
        open_sources([entry, entry])


def test_no_room_on_the_disk_is_told_before(config, monkeypatch):
    usage = lordo.trainer.tokenize.shutil.disk_usage("/")
    monkeypatch.setattr(lordo.trainer.tokenize.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"needs about [\d.]+ kB, but 1 kB are free there: choose another folder, or limit it by --max"):
        prepared(config)
    assert not Path(config.data.corpus).exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "data.source needs no preparation"),
        (["--max-tokens", "many"], "invalid number value"),
    ],
)
def test_the_command_refuses_in_one_sentence(tmp_path, capsys, arguments, sentence):
    assert lordo.cli.main(["prepare", str(micro_recipe(tmp_path)), *arguments]) == 2
    errors = capsys.readouterr().err
    assert sentence in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "give either source"),
        ({"source": "stdlib", "mix": [MixConfig(source="x")], "corpus": "c"}, "give either source"),
        ({"mix": [MixConfig(source="x")]}, "needs corpus"),
        ({"mix": [MixConfig(source="x")], "corpus": "c", "max_bytes": 5}, "max_bytes limits source"),
        ({"source": "stdlib", "tokenizer": "t"}, "tokenizer and corpus need"),
    ],
)
def test_settings_that_exclude_each_other(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        DataConfig(**settings)
