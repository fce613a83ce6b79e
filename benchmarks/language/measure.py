"""What a trained model knows: facts of held-out videos, captions of its own, and whether it kept its English.

    python -m benchmarks.language.measure SMOLLM2 CHECKPOINT --videos 48 --captions 20 --json FILE

Its plain English is three books' openings, in the public domain, and a paragraph written for this.
"""

import argparse
import json
from pathlib import Path

import torch

from benchmarks.language import model as models
from benchmarks.language import world
from benchmarks.language.train import facts_right

PLAIN = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, "
    "this truth is so well fixed in the minds of the surrounding families, that he is considered the rightful "
    "property of some one or other of their daughters.",
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or "
    "twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, and "
    "what is the use of a book, thought Alice, without pictures or conversations? So she was considering in her own "
    "mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the pleasure of "
    "making a daisy chain would be worth the trouble of getting up and picking the daisies.",
    "When on board H.M.S. Beagle, as naturalist, I was much struck with certain facts in the distribution of the "
    "inhabitants of South America, and in the geological relations of the present to the past inhabitants of that "
    "continent. These facts seemed to me to throw some light on the origin of species, that mystery of mysteries, as "
    "it has been called by one of our greatest philosophers.",
    "The moon is the nearest of the heavenly bodies. It goes round the earth in a little less than a month, and "
    "always turns the same side to us. On a clear night one can see with the naked eye that its face is not of one "
    "brightness: the dark parts were once taken for seas, and they are called so to this day, although there is no "
    "water in them.",
)


@torch.no_grad()
def perplexity(language: torch.nn.Module, head: torch.nn.Module, tokens, texts=PLAIN) -> float:
    """Of a language model that returns hidden states, and its head, over all tokens but each text's first."""
    losses = []
    for text in texts:
        ids = torch.tensor([tokens.encode(text, add_special_tokens=False)])
        logits = head(language(input_ids=ids).last_hidden_state)[0, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
    return torch.cat(losses).mean().exp().item()


@torch.no_grad()
def answer(model: torch.nn.Module, tokens, frames, question: str, max_tokens: int = 160) -> str:
    """The model's likeliest answer to a question about a video, word by word."""
    before, after = (
        tokens.encode(text, add_special_tokens=False) for text in (models.BEFORE, models.ASKED.format(question))
    )
    video = [model.config.video_token_index] * (models.TOKENS_PER_FRAME * len(frames) + 1)
    ids = torch.tensor([[*before, *video, *after]])
    found = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values_videos=models.pixels(frames).to(model.dtype),
        max_new_tokens=max_tokens, do_sample=False,
    )  # fmt: skip
    return tokens.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("language", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--videos", type=int, default=48)
    parser.add_argument("--captions", type=int, default=20)
    parser.add_argument("--frames", type=int, nargs="+", default=[16], help="sixteen tokens each")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokens = models.tokenizer(args.language)
    plain = transformers.AutoModelForCausalLM.from_pretrained(args.language, dtype=torch.bfloat16)
    found = {"perplexity_before": perplexity(plain.model, plain.lm_head, tokens)}
    model = transformers.AutoModelForImageTextToText.from_pretrained(args.checkpoint, dtype=torch.bfloat16)
    found["perplexity"] = perplexity(model.model.language_model, model.lm_head, tokens)
    found["right"] = {16 * num: facts_right(model, tokens, args.videos, num) for num in args.frames}
    found["captions"], true = [], []
    for i in range(args.captions):
        frames, scenes, rng = world.held_out(i)
        asked = world.caption(rng, scenes)
        told = answer(model, tokens, frames, asked.question)
        true += world.claims(told, scenes)
        found["captions"].append({"question": asked.question, "told": told, "by hand": asked.answer})
    found["true"] = sum(true) / max(1, len(true))
    print(text := json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(text)


if __name__ == "__main__":
    main()
