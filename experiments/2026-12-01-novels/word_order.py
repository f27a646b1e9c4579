"""A task for `lordo eval --tasks` from a run's own validation text: which of four orders of eight words is the author's?

    python experiments/2026-12-01-novels/word_order.py RUN FOLDER [--questions 300]

Writes FOLDER/word_order.jsonl. Each question is 40 words of a validation document; the choices are the 8 words that follow, as they are and
in three other orders. All choices have the same words, so that neither their length nor their frequency tells them apart. Chance is 25 %.
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
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", metavar="RUN", help="folder of a run, whose recipe says which text is kept for validation")
    parser.add_argument("folder", metavar="FOLDER", help="where to write")
    parser.add_argument("--questions", type=int, default=300)
    options = parser.parse_args()
    data, seed = run_config(Path(options.run)).data, 0
    tokenizer = AutoTokenizer.from_pretrained(Path(data.corpus) / "tokenizer")
    blocks = load_text(data, seed).validation
    draw = random.Random(seed)
    lines = []
    for place in torch.linspace(0, len(blocks) - 1, options.questions).long().tolist():  # at even distances through all documents
        words = tokenizer.decode(blocks[place].tolist()).split()[1:]  # the first may be the end of a word
        lines.append(json.dumps(question(words, draw)) + "\n")
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "word_order.jsonl").write_text("".join(lines), encoding="utf-8")


def question(words: list[str], draw: random.Random) -> dict:
    """One question, its right answer at a random place."""
    following = words[BEFORE : BEFORE + AFTER]
    orders = [following]
    while len(orders) < CHOICES:
        order = draw.sample(following, AFTER)
        if order not in orders:
            orders.append(order)
    draw.shuffle(orders)
    return {"query": " ".join(words[:BEFORE]), "choices": [" ".join(order) for order in orders], "gold": orders.index(following)}


if __name__ == "__main__":
    main()
