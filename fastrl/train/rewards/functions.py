"""Ready reward functions that compare a completion with the record's answer as text."""

from fastrl.train.data.prompts import Record


def exact_match(prompts: list[str], completions: list[str], records: list[Record]) -> list[float]:
    """1 if the completion equals the record's ``"answer"`` up to surrounding space, else 0.

    Raises:
        ValueError: A record has no text as its answer.
    """
    for prompt, record in zip(prompts, records, strict=True):
        if not isinstance(record.get("answer"), str):
            raise ValueError(  # noqa: TRY004
                f'"answer" must be a string, got {record.get("answer")!r} for prompt {prompt!r}'
            )
    return [
        float(completion.strip() == record["answer"].strip())
        for completion, record in zip(completions, records, strict=True)
    ]
