"""What is done with a finished run: `lordo export`, `lordo generate`, `lordo eval`; each held against transformers or a sum by hand."""

import json
import math
import shutil
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import lordo.cli
import lordo.trainer.export
from lordo.trainer.byte_tokenizer import byte_tokenizer
from lordo.trainer.evaluate import BATCH_SEQUENCES, sequences_at_once
from lordo.trainer.finished import open_run
from lordo.trainer.generate import continuation
from lordo.trainer.score import Score, sliding_windows, summed_nats, token_bytes
from lordo.trainer.tokenizer import Encoder, open_tokenizer, train_tokenizer
from test_train import Run, micro_recipe, train


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A finished run of the micro recipe; what is written into its folder is `evaluations.json` alone."""
    return train(micro_recipe(tmp_path_factory.mktemp("micro")))


@pytest.fixture(scope="module")
def opened(run):
    return open_run(str(run.folder))


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    target = tmp_path_factory.mktemp("exported") / "deep" / "model"
    assert lordo.cli.main(["export", str(run.folder), str(target)]) == 0
    return target


def refused(capsys, *arguments) -> str:
    """The one sentence with which a command is refused."""
    assert lordo.cli.main([str(each) for each in arguments]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1, errors
    return errors


# ---- the tokenizer of bytes


@pytest.fixture(scope="module")
def tokenizers(exported):
    """The tokenizer as built, and as opened from an exported folder."""
    return byte_tokenizer(), AutoTokenizer.from_pretrained(exported)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_ids_are_the_bytes_of_the_text(tokenizers, text):
    for tokenizer in tokenizers:
        assert tokenizer(text)["input_ids"] == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text


def test_the_byte_0_ends_a_document(tokenizers):
    for tokenizer in tokenizers:
        assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 0, 0)
        assert tokenizer.decode([65, 0, 66], skip_special_tokens=True) == "AB"
        assert tokenizer("Ā")["input_ids"] == [196, 128]  # the letter that byte-level tokenizers write for the byte 0
        assert token_bytes(tokenizer).tolist() == [0, *[1] * 255]


# ---- export


def test_an_exported_model_has_the_logits_of_the_run(run, exported):
    text = "def main(arguments):\n    return"
    tokens = AutoTokenizer.from_pretrained(exported)(text, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(run.folder / "model")
    with torch.no_grad():
        logits, expected = model(**tokens).logits, theirs(input_ids=torch.tensor([list(text.encode())])).logits
    assert torch.allclose(logits, expected, rtol=0, atol=1e-5)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 0
    assert not list(exported.parent.glob(".*"))


def test_export_overwrites_nothing_and_leaves_nothing_half_written(run, exported, tmp_path, capsys, monkeypatch):
    assert "exists already" in refused(capsys, "export", run.folder, exported)
    (tmp_path / "file").write_text("mine")
    assert "exists already" in refused(capsys, "export", run.folder, tmp_path / "file")

    def disk_full(model, tokenizer, folder):
        (folder / "half").write_text("")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lordo.trainer.export, "save", disk_full)
    assert "No space left on device" in refused(capsys, "export", run.folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---- generate


def test_a_continuation_repeats_with_its_seed_and_is_the_likeliest_at_temperature_0(opened):
    drawn = [continuation(opened, "def ", num_tokens=60, temperature=0.8, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    likeliest = list(b"def ")
    for _ in range(20):
        with torch.no_grad():
            likeliest.append(int(opened.model(input_ids=torch.tensor([likeliest])).logits[0, -1].argmax()))
    assert continuation(opened, "def ", num_tokens=20, temperature=0, seed=0) == bytes(likeliest[4:]).decode("utf-8", "replace")


def test_the_model_never_sees_more_than_it_was_trained_on(opened, monkeypatch):
    seen = []
    forward = type(opened.model).forward

    def watched(model, *args, **kwargs):
        seen.append(kwargs["attention_mask"].shape[1])
        return forward(model, *args, **kwargs)

    monkeypatch.setattr(type(opened.model), "forward", watched)
    tokens = byte_tokenizer()(continuation(opened, "x" * 100, num_tokens=90, temperature=0, seed=0))["input_ids"]
    assert len(tokens) >= 90  # bytes that are no UTF-8 come back as three
    assert max(seen) <= opened.context == 32


def test_generate_prints_text_and_continuation(run, capsys):
    assert lordo.cli.main(["generate", str(run.folder), "import ", "--max-tokens", "10", "--seed", "3"]) == 0
    assert capsys.readouterr().out.startswith("import ")
    assert "at least 1" in refused(capsys, "generate", run.folder, "x", "--max-tokens", "0")
    assert "--temperature -1" in refused(capsys, "generate", run.folder, "x", "--temperature", "-1")
    assert "required: TEXT" in refused(capsys, "generate", run.folder)


# ---- eval


@given(st.integers(1, 200), st.integers(2, 40), st.data())
def test_a_window_that_slides_counts_every_token_once_with_context_before_it(num_tokens, context, data):
    stride = data.draw(st.integers(1, context - 1))
    counted = []
    for start, end, first in sliding_windows(num_tokens, context=context, stride=stride):
        assert 0 <= start < first <= end <= num_tokens
        assert end - start <= context
        for place in range(first, end):
            assert place - start >= min(place, context - stride)
        counted += range(first, end)
    assert counted == list(range(1, num_tokens))


def test_windows_read_at_once_are_those_read_one_by_one(opened, monkeypatch):
    tokens = torch.tensor(list(b"class Stack:\n    def push(self, item):\n        self.items.append(item)\n" * 3))
    windows = list(sliding_windows(len(tokens), context=20, stride=7))
    by_hand = 0.0
    for start, end, first in windows:
        with torch.no_grad():
            logits = opened.model(input_ids=tokens[None, start:end]).logits[0]
        by_hand += cross_entropy(logits[first - start - 1 : -1], tokens[first:end], reduction="sum").item()
    assert summed_nats(opened.model, tokens, windows) == pytest.approx(by_hand, rel=1e-5)


def test_a_large_vocabulary_is_evaluated_in_smaller_batches(opened, monkeypatch):
    """The logits of 32 sequences of 2,048 tokens, each one of 49,152, would take 13 GB."""
    assert sequences_at_once(opened.model, 32) > BATCH_SEQUENCES
    monkeypatch.setattr(opened.model.config, "vocab_size", 49152)
    assert [sequences_at_once(opened.model, length) for length in (32, 128, 2048)] == [10, 2, 1]


def test_validation_gives_what_the_run_itself_told(run, capsys):
    assert lordo.cli.main(["eval", str(run.folder)]) == 0
    kept = json.loads((run.folder / "evaluations.json").read_text())["validation"]
    assert kept["loss"] == pytest.approx(run.summary["validation_loss"], rel=1e-5)
    assert kept["perplexity"] == pytest.approx(run.summary["perplexity"], rel=1e-5)
    # a block's first token is not counted; separators are tokens, but no bytes of text
    assert kept["num_tokens"] - 5 <= kept["num_bytes"] <= kept["num_tokens"]
    assert kept["bits_per_byte"] == pytest.approx(kept["loss"] / math.log(2) * kept["num_tokens"] / kept["num_bytes"])
    assert f"{kept['bits_per_byte']:.4f}" in capsys.readouterr().out

    assert lordo.cli.main(["eval", str(run.folder), "--max-tokens", "64"]) == 0
    assert json.loads((run.folder / "evaluations.json").read_text())["validation"]["num_tokens"] == 2 * 31


def test_a_text_file_is_scored_from_its_first_byte_on(run, opened, tmp_path, capsys):
    text = "if ä: return 1\n"
    (tmp_path / "short.txt").write_text(text, encoding="utf-8")
    assert lordo.cli.main(["eval", str(run.folder), str(tmp_path / "short.txt")]) == 0
    kept = json.loads((run.folder / "evaluations.json").read_text())[str(tmp_path / "short.txt")]
    tokens = torch.tensor([0, *text.encode()])
    with torch.no_grad():
        nats = cross_entropy(opened.model(input_ids=tokens[None]).logits[0, :-1], tokens[1:], reduction="sum").item()
    assert kept["num_tokens"] == kept["num_bytes"] == len(text.encode())
    assert kept["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-5)
    capsys.readouterr()


def test_the_bytes_of_the_tokens_add_up_to_those_of_the_text(tmp_path):
    train_tokenizer(["def f(x):\n    return x é\n" * 20, "class A:\n    pass\n" * 20], 275, tmp_path / "bpe")
    tokenizer = open_tokenizer(str(tmp_path / "bpe"))
    tokenizer.add_tokens(["    "])  # written as it is, and not in letters of bytes
    encoder, sizes = Encoder(tokenizer, is_bytes=False), token_bytes(tokenizer)
    for text in ("def f(é):\n    return 𝄞\n", "<|endoftext|> spelled out", " "):
        tokens = encoder.encode([text])[0]
        assert sizes[tokens].sum() == len(text.encode())  # the end of text stands for none
        assert len(tokens) <= len(text.encode()) + 1


def test_bits_per_byte_do_not_depend_on_how_the_text_was_cut_into_tokens():
    assert Score(nats=10.0, num_tokens=4, num_bytes=16).bits_per_byte == Score(nats=10.0, num_tokens=9, num_bytes=16).bits_per_byte


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "is empty"), (b"a\0b", "is not text"), (None, "cannot be read: No such file or directory")]
)
def test_a_text_that_cannot_be_scored(run, tmp_path, capsys, content, words):
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    assert words in refused(capsys, "eval", run.folder, file)


def test_other_bad_arguments(run, tmp_path, capsys):
    assert "max_position_embeddings = 32" in refused(capsys, "eval", run.folder, "--context", "33")
    assert "--max-tokens 1" in refused(capsys, "eval", run.folder, "--max-tokens", "1")
    for command in (["eval"], ["generate", "x"], ["export", tmp_path / "out"]):
        name, *rest = command
        assert "did you mean" in refused(capsys, name, f"{run.folder}x", *rest)
        assert "no config.toml" in refused(capsys, name, tmp_path, *rest)
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run.folder, unfinished, ignore=shutil.ignore_patterns("model"))
    assert "belongs to a comparison" in refused(capsys, "export", unfinished, tmp_path / "out")
    (unfinished / "summary.json").unlink()
    assert "not finished and has no checkpoint yet" in refused(capsys, "eval", unfinished)
    for worker in range(2):
        part = unfinished / "checkpoints" / "step-00000007" / f"worker-{worker}"
        part.mkdir(parents=True)
        (part / "facts.json").write_text(json.dumps({"worker": worker, "workers": 2, "shard": 0, "shards": 1}))
    assert "step 7 of" in refused(capsys, "generate", unfinished, "x")
    shutil.copytree(run.folder / "model", unfinished / "model")
    (unfinished / "model" / "model.safetensors").write_bytes(b"half")
    assert "cannot be opened" in refused(capsys, "eval", unfinished)


# ---- tasks of lm-eval

QUESTIONS = [
    ("Question: What ends a loop early?", ["break", "while"]),
    ("Question: Which word starts a function?\n", ["class", "def", "import"]),
    ("Question: What is not a keyword?", ["pass", "print", "return"]),
    ("Question: What is empty?", ["''", "None", "[1]"]),
    ("Question: ?", ["self.assertEqual(a)", "b"]),
]


def by_hand(model, question: str, answers: list[str], context: int) -> list[float]:
    """Log-probability of each answer, from the last `context` tokens."""
    found = []
    for answer in answers:
        tokens = torch.tensor(list(f"{question.strip()}\nAnswer: {answer}".encode())[-(context + 1) :])
        with torch.no_grad():
            chosen = model(input_ids=tokens[None, :-1]).logits[0].log_softmax(-1).gather(1, tokens[1:, None])
        found.append(float(chosen[-len(f" {answer}".encode()) :].sum()))
    return found


@pytest.mark.slow
def test_lm_eval_gives_the_score_computed_by_hand(run, opened, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)  # lm-eval asks git which commit this is, and here is none
    logs = [by_hand(opened.model, question, answers, opened.context) for question, answers in QUESTIONS]
    likeliest = [each.index(max(each)) for each in logs]
    # the right answer is what the model takes to be likeliest in all questions but the second and the last one
    gold = [best if i not in (1, 4) else (best + 1) % len(logs[i]) for i, best in enumerate(likeliest)]
    per_letter = [[log / len(a) for log, a in zip(each, answers, strict=True)] for each, (_, answers) in zip(logs, QUESTIONS, strict=True)]
    acc_norm = sum(each.index(max(each)) == right for each, right in zip(per_letter, gold, strict=True)) / len(QUESTIONS)
    lines = [{"query": q, "choices": answers, "gold": right} for (q, answers), right in zip(QUESTIONS, gold, strict=True)]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert lordo.cli.main(["eval", str(run.folder), "--tasks", "words", "--task-data", str(tmp_path)]) == 0
    told = capfd.readouterr()
    kept = json.loads((run.folder / "evaluations.json").read_text())["words"]
    assert kept["metrics"] == pytest.approx({"acc": 3 / 5, "acc_norm": acc_norm})
    assert kept["stderr"]["acc"] == pytest.approx(math.sqrt(0.6 * 0.4 / 4))
    assert (kept["num_questions"], kept["num_pairs"], kept["num_cut"]) == (5, 13, 12)  # "?" with "b" fits, and nothing else
    assert "0.6000" in told.out
    assert told.err == ""


@pytest.mark.slow
def test_tasks_that_cannot_be_scored(run, tmp_path, capsys, monkeypatch):
    long_answer = {"query": "Question: ?", "choices": ["x" * 40, "y"], "gold": 0}
    (tmp_path / "long.jsonl").write_text(json.dumps(long_answer))
    (tmp_path / "wrong.jsonl").write_text(json.dumps({**long_answer, "gold": 2}))
    (tmp_path / "empty.jsonl").write_text("")
    local = ("--task-data", tmp_path)
    assert "longer than the 32 tokens" in refused(capsys, "eval", run.folder, "--tasks", "long", *local)
    assert "wrong.jsonl, line 1: not a question" in refused(capsys, "eval", run.folder, "--tasks", "wrong", *local)
    assert "is empty" in refused(capsys, "eval", run.folder, "--tasks", "empty", *local)
    assert "did you mean 'long'?" in refused(capsys, "eval", run.folder, "--tasks", "lonng", *local)
    assert "is not a folder" in refused(capsys, "eval", run.folder, "--tasks", "long", "--task-data", tmp_path / "nowhere")
    assert "without --tasks" in refused(capsys, "eval", run.folder, *local)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)  # whatever the machine can reach
    assert "give --task-data FOLDER" in refused(capsys, "eval", run.folder, "--tasks", "piqa")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install 'lordo[eval]'" in refused(capsys, "eval", run.folder, "--tasks", "long", *local)
