"""`lordo generate`: a finished run's model goes on with a text, so that a person can look at what was learnt."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

from lordo.trainer.finished import FinishedRun, open_run
from lordo.trainer.options import Parser
from lordo.trainer.prepared import pick_device
from lordo.trainer.settings import UsageError


def main(arguments: list[str]) -> int:
    """Print the text and its continuation.

    Raises:
        UsageError, ConfigError: what was asked for cannot work.
    """
    asked = parser().parse_args(arguments)
    if asked.max_tokens < 1:
        raise UsageError(f"--max-tokens {asked.max_tokens}: ask for at least 1 token")
    if asked.temperature < 0:
        raise UsageError(f"--temperature {asked.temperature:g}: it is at least 0, where 0 always takes the likeliest token")
    try:
        device = pick_device(asked.device)
    except ValueError as error:
        raise UsageError(str(error)) from error
    run = open_run(asked.run, device)
    prompt = asked.prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # the shell hands on any bytes
    print(prompt + continuation(run, prompt, num_tokens=asked.max_tokens, temperature=asked.temperature, seed=asked.seed))
    return 0


def continuation(run: FinishedRun, prompt: str, *, num_tokens: int, temperature: float, seed: int) -> str:
    """Continue a text by at most `num_tokens` tokens; it ends earlier where the model ends the document.

    The model looks back on as many tokens as it was trained on. Where they are used up, it goes on from the last half of them.

    Args:
        temperature: divides the logits; 0 always takes the likeliest token. seed: of torch's global generator, which draws the tokens.
    """
    end = run.tokenizer.eos_token_id
    tokens: list[int] = run.tokenizer(prompt, add_special_tokens=False)["input_ids"] or [end]
    given = len(tokens)
    torch.manual_seed(seed)
    while len(tokens) < given + num_tokens and (len(tokens) == given or tokens[-1] != end):
        seen = tokens if len(tokens) < run.context else tokens[-(run.context // 2) :]
        room = min(run.context - len(seen), given + num_tokens - len(tokens))
        tokens += _next(run, seen, room, temperature)
    return str(run.tokenizer.decode(tokens[given:], skip_special_tokens=True))


def _next(run: FinishedRun, tokens: list[int], num: int, temperature: float) -> list[int]:
    """At most `num` tokens that follow some others, all within the model's context."""
    end = run.tokenizer.eos_token_id
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    settings = GenerationConfig(max_new_tokens=num, eos_token_id=end, pad_token_id=end, **sampling)
    given = torch.tensor([tokens], device=run.model.device)
    made = run.model.generate(given, attention_mask=torch.ones_like(given), generation_config=settings)  # type: ignore[operator]
    new: list[int] = made[0, len(tokens) :].tolist()
    return new


def parser() -> Parser:
    """The arguments of `generate`."""
    p = Parser(prog="lordo generate", description="Print a text and how a finished run's model goes on with it.")
    p.add_argument("run", metavar="RUN", help="folder of a finished run, such as runs/tiny")
    p.add_argument("prompt", metavar="TEXT", help="text to go on with; an empty one starts a document")
    p.add_argument("--max-tokens", type=int, default=200, metavar="N", help="most tokens to add (default: 200)")
    p.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 always takes the likeliest token (default: 0.8)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="another seed draws another text (default: 0)")
    p.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute (default: auto)")
    return p
