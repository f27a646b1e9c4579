"""Two tasks for `lordo eval --tasks` from a run's own validation text: what did the author write after these 40 words?

    python experiments/2026-12-01-novels/questions.py RUN FOLDER [--questions 1000]

Writes two files into FOLDER. Each question is 40 words of a validation document; the choices are the 8 words that follow, as they are and
in three other orders: any in `word_order.jsonl`; in `swapped_words.jsonl` those in which two neighbours have changed places. All choices
have the same words, so that neither their length nor their frequency tells them apart. Chance is 25 %.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from transformers import AutoTokenizer

from lordo.trainer.finished import run_config
from lordo.trainer.text import load_text

BEFORE, AFTER, CHOICES = 40, 8, 4


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", metavar="RUN", help="folder of a run, whose recipe says which text is kept for validation")
    parser.add_argument("folder", metavar="FOLDER", help="where to write")
    parser.add_argument("--questions", type=int, default=1000)
    options = parser.parse_args()
    config = run_config(Path(options.run))
    tokenizer = AutoTokenizer.from_pretrained(Path(config.data.corpus) / "tokenizer")
    blocks = load_text(config.data, config.seed).validation

    draw = random.Random(0)
    places = torch.linspace(0, len(blocks) - 1, options.questions).long().tolist()  # at even distances through all documents
    orders, swaps = [], []
    for place in places:
        words = tokenizer.decode(blocks[place].tolist()).split()[1:]  # the first may be the end of a word
        query, following = words[:BEFORE], words[BEFORE : BEFORE + AFTER]
        orders.append(question(query, following, other_orders(following, draw), draw))
        swaps.append(question(query, following, swapped(following, draw), draw))
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, questions in (("word_order", orders), ("swapped_words", swaps)):
        lines = "".join(json.dumps(each) + "\n" for each in questions)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def other_orders(words: list[str], draw: random.Random) -> list[list[str]]:
    """The same words in other orders."""
    found: list[list[str]] = []
    while len(found) < CHOICES - 1:
        order = draw.sample(words, len(words))
        if order not in (words, *found):
            found.append(order)
    return found


def swapped(words: list[str], draw: random.Random) -> list[list[str]]:
    """The same words, two neighbours having changed places."""
    pairs = [i for i in range(len(words) - 1) if words[i] != words[i + 1]]
    return [[*words[:i], words[i + 1], words[i], *words[i + 2 :]] for i in draw.sample(pairs, CHOICES - 1)]


def question(query: list[str], right: list[str], wrong: list[list[str]], draw: random.Random) -> dict:
    """One question, its right answer at a random place."""
    choices = [right, *wrong]
    draw.shuffle(choices)
    return {"query": " ".join(query), "choices": [" ".join(choice) for choice in choices], "gold": choices.index(right)}


if __name__ == "__main__":
    main()
