"""Reward functions of short runs, and a rollout in which a tool writes."""

import os
import random
import time

import numpy as np
import torch

from fastrl.train.rollout import Completion

calls = 0  # of `fails_later`


def noise(prompts, completions, records):
    return [random.random() + np.random.rand() for _ in prompts]  # noqa: NPY002


def digits(prompts, completions, records):
    return [sum(c in "0123456789" for c in text) / 2 for text in completions]


def by_record(prompts, completions, records):
    assert prompts == [record["prompt"] for record in records]
    answers = [int(record["answer"]) for record in records]
    return [sum(map(ord, text)) * n % 7 for text, n in zip(completions, answers, strict=True)]


def constant(prompts, completions, records):
    return [0.5] * len(prompts)


def fails_later(prompts, completions, records):
    global calls
    calls += 1
    return [float("nan") if calls > 5 else 0.5] * len(prompts)


def breaks(prompts, completions, records):
    return [1 / int(record["answer"] != "4") for record in records]


def faulty(prompts, completions, records):
    records[0]["answer"] = prompts[0] = "changed"
    if "raise" in completions:
        raise KeyError("no such test")
    if "exit" in completions:
        raise SystemExit(3)
    if "die" in completions:
        os._exit(4)
    if "hang" in completions:
        time.sleep(600)
    return [os.getpid() if text == "process" else len(text) for text in completions]


def two_turns(prompts, group_size, complete, tokenizer):
    """What the policy answers, what a tool adds, and what the policy answers then."""
    asked = [prompt.token_ids for prompt in prompts for _ in range(group_size)]
    tool = tokenizer("=5")["input_ids"]
    answers = complete(asked)
    begun = [ids + one.token_ids.tolist() + tool for ids, one in zip(asked, answers, strict=True)]
    return [
        Completion(
            torch.cat([one.token_ids, torch.tensor(tool), two.token_ids]),
            torch.cat([one.logprobs, torch.full((2,), torch.nan), two.logprobs]),
            two.ended,
            torch.tensor([True] * len(one.token_ids) + [False] * 2 + [True] * len(two.token_ids)),
        )
        for one, two in zip(answers, complete(begun), strict=True)
    ]
