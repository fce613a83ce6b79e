"""A task of lmms-eval on held-out videos of shape world: how much of what a caption tells is right."""

import sys
from pathlib import Path

import vllm_vidspec
from vllm_vidspec.shapeworld import world

sys.path.append(str(Path(vllm_vidspec.__file__).parents[1]))  # of the clone: lmms-eval runs a copy of this file
from benchmarks import captions


def doc_to_visual(doc):
    return [doc["video"]]


def doc_to_text(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]


def doc_to_messages(doc, lmms_eval_specific_kwargs=None):
    content = [{"type": "video", "url": doc["video"]}, {"type": "text", "text": doc["question"]}]
    return [{"role": "user", "content": content}]


def process_results(doc, results):
    return {"attributes_right": (results[0], world.held_out(doc["index"]).facts)}


def pooled(items):
    said, facts = zip(*items, strict=True)
    return captions.accuracy(captions.count_right(said, facts))
