"""Short runs of TRL's trainers whose loss is of given completions: SFT, DPO, KTO, CPO, ORPO, ..."""

import importlib

import datasets

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


def completions(first):
    return [" " + words(first + i, 2 + (first + i) % 5) for i in range(12)]


#: The columns of each trainer's data, besides prompts.
DATA = {
    "SFT": {"completion": completions(3)},
    "DPO": {"chosen": completions(3), "rejected": completions(11)},
    "KTO": {"completion": completions(3), "label": [i % 3 > 0 for i in range(12)]},
}


def make_answering(model, kind, output_dir="unused", peft_config=None, data=None, **options):
    """A trainer of completions that are given.

    A reference model is wider than the policy: their log-probabilities differ from the first step.
    """
    trl = needed("trl")
    if kind in EXPERIMENTAL:
        trl = importlib.import_module(f"trl.experimental.{EXPERIMENTAL[kind]}")
    config = getattr(trl, f"{kind}Config")(
        **{**OPTIONS, "output_dir": output_dir, "max_length": 32, **options}
    )
    columns = {"prompt": prompts(), **DATA[kind], **(data or {})}
    more = {}
    if kind in ("DPO", "KTO") and peft_config is None:
        more["ref_model"] = make_model(hidden_size=32)
    return getattr(trl, f"{kind}Trainer")(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=make_tokenizer(),
        peft_config=peft_config,
        **more,
    )
