"""Short runs of TRL's trainers that `make_trainer` does not make: SFT, DPO, CPO, ..."""

import importlib

from tests.integrations.packages import needed
from tests.integrations.trl.runs import OPTIONS, make_model, make_tokenizer, prompts, words

#: Where TRL has the trainers that `trl` itself has not.
EXPERIMENTAL = {
    "CPO": "cpo",
    "ORPO": "orpo",
    "TPO": "tpo",
    "A2PO": "a2po",
    "OnlineDPO": "online_dpo",
}


#: Those that generate, instead of reading completions.
GENERATE = {
    "A2PO": {"max_completion_length": 7, "max_prompt_length": 32, "num_value_samples": 2},
    "OnlineDPO": {"max_new_tokens": 7, "max_length": 32},
}


def reward_first(completions, **_):
    """1 for completions of an even length, else 0."""
    return [float(len(text.split()) % 2 == 0) for text in completions]


def completions(first):
    return [" " + words(first + i, 2 + (first + i) % 5) for i in range(12)]


#: The columns of each trainer's data, besides prompts.
DATA = {
    "SFT": {"completion": completions(3)},
    "DPO": {"chosen": completions(3), "rejected": completions(11)},
    "CPO": {"chosen": completions(3), "rejected": completions(11)},
    "ORPO": {"chosen": completions(3), "rejected": completions(11)},
    "TPO": {n: completions(i) for n, i in (("chosen", 3), ("rejected", 11), ("reference", 5))},
    "A2PO": {},
    "OnlineDPO": {},
    "KTO": {"completion": completions(3), "label": [i % 3 > 0 for i in range(12)]},
}


def make_answering(model, kind, output_dir="unused", peft_config=None, data=None, **options):
    """A trainer of completions that are given, or of those that it generates.

    A reference model is wider than the policy: their log-probabilities differ from the first step.
    """
    trl, datasets = needed("trl"), needed("datasets")
    if kind in EXPERIMENTAL:
        trl = importlib.import_module(f"trl.experimental.{EXPERIMENTAL[kind]}")
    lengths = GENERATE.get(kind, {"max_length": 32})
    config = getattr(trl, f"{kind}Config")(
        **{**OPTIONS, "output_dir": output_dir, **lengths, **options}
    )
    columns = {"prompt": prompts(), **DATA[kind], **(data or {})}
    more = {} if kind == "A2PO" else {"peft_config": peft_config}
    if kind in GENERATE:
        more["reward_funcs"] = reward_first
    if kind in ("DPO", "KTO") and peft_config is None:
        more["ref_model"] = make_model(hidden_size=32)
    return getattr(trl, f"{kind}Trainer")(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=make_tokenizer(),
        **more,
    )
