"""Inputs of tests: logits, masks, per-token tensors."""

import torch

MASKS = ("all", "none", "random", "one-row-masked", "ragged")
#: Values that a masked position may have without changing a result.
POISONS = (float("nan"), float("inf"), float("-inf"), 1e30, -1e30)
#: The sequences whose micro-batch splits must agree.
LENGTHS = (1, 3, 7, 50, 2, 9, 100, 11)


def make_logits(*shape, dtype=torch.float32, std=3.0, token_ids=None, raised=5.0):
    """Random logits `[..., V]`; those of `token_ids` are raised, as in a trained model."""
    logits = torch.randn(*shape) * std
    if token_ids is not None:
        lift = torch.full_like(token_ids, raised, dtype=logits.dtype)[..., None]
        logits.scatter_add_(-1, token_ids[..., None], lift)
    return logits.to(dtype)


def make_mask(kind, B, T):
    """A bool mask `[B, T]` of one of the kinds in MASKS."""
    mask = torch.ones(B, T, dtype=torch.bool)
    if kind == "none":
        mask[:] = False
    elif kind == "random":
        mask = torch.rand(B, T) < 0.6
    elif kind == "one-row-masked":
        mask[B // 2 : B // 2 + 1] = False  # none where there are no rows
    elif kind == "ragged":
        mask = torch.arange(T) < torch.randint(T + 1, (B, 1))
    return mask


def make_logprobs(*shape, dtype=torch.float64):
    return (-torch.rand(shape, dtype=torch.float64) * 3 - 0.01).to(dtype)


def packed(x, lengths):
    """The first `lengths[b]` tokens of each row of `x` `[B, T]`, one after the other: `[N]`."""
    return torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])


def cu_seqlens(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def widest(backend):
    """The widest dtype that a backend takes."""
    return torch.float64 if backend == "reference" else torch.float32


VOCABULARY, WIDTH = 23, 4
TEACHER_WEIGHT = torch.randn(VOCABULARY, 5, generator=torch.Generator().manual_seed(0))

# --- what is drawn for each kind of function, `mask` last


def normal(*shape, dtype):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def draw_mask(B, T):
    mask = make_mask("random", B, T)
    mask[B // 2 : B // 2 + 1] = False
    return {"mask": mask}


def beside(o, logprobs):
    """What an objective needs besides log-probabilities."""
    names = ["old_logprobs", "policy_weights", "advantages"]
    names += ["ref_logprobs"] * bool(o.kl_coef) + ["rollout_logprobs"] * bool(o.rollout_correction)
    B, T = logprobs.shape
    given = {
        name: logprobs + 0.3 * normal(B, T, dtype=logprobs.dtype)
        for name in names
        if name.endswith("logprobs")
    }
    if o.score_centering:
        del given["old_logprobs"]
    given["policy_weights"] = normal(B, T, dtype=logprobs.dtype).abs()
    by_token = o.aggregation in ("token-mean", "prompt-mean")
    given["advantages"] = normal(*((B, T) if by_token else (B,)), dtype=logprobs.dtype)
    return given | draw_mask(B, T)


def from_logprobs(o):
    def draw(B, T, dtype):
        given = {"logprobs": make_logprobs(B, T, dtype=dtype)}
        given["entropy"] = normal(B, T, dtype=dtype).abs()
        return given | beside(o, given["logprobs"])

    return draw


def draw_teacher(kind, B, T, dtype):
    if kind == "logits":
        return {"teacher_logits": 2 * normal(B, T, VOCABULARY, dtype=dtype)}
    if kind == "hidden":
        return {"teacher_hidden": normal(B, T, TEACHER_WEIGHT.shape[1], dtype=dtype)}
    ids = torch.rand(B, T, VOCABULARY).argsort(-1)[..., :5]
    logprobs = (2 * normal(B, T, VOCABULARY, dtype=dtype)).log_softmax(-1)[..., :5]
    return {"teacher_ids": ids, "teacher_logprobs": logprobs}


def compared(form, kind):
    """The inputs of a divergence: of `rows` without tokens."""

    def draw(B, T, dtype):
        drawn = rows(form, scored=None)(B, T, dtype)
        mask = drawn.pop("mask")
        del drawn["token_ids"]
        return {**drawn, **draw_teacher(kind, B, T, dtype), "mask": mask}

    return draw


def rows(form, *, scored, kept=False, teacher=None):
    """Logits, or hidden states and weight, with token ids and log-probabilities of these."""

    def draw(B, T, dtype):
        ids = torch.randint(VOCABULARY, (B, T))
        if form == "logits":
            given = {"logits": 2 * normal(B, T, VOCABULARY, dtype=dtype)}
            logits = given["logits"]
        else:
            given = {"hidden": normal(B, T, WIDTH, dtype=dtype)}
            given["weight"] = normal(VOCABULARY, WIDTH, dtype=dtype)
            logits = given["hidden"] @ given["weight"].T
        given["token_ids"] = ids
        if kept:  # up to 7 tokens, most with their own; none is the whole vocabulary
            tokens = torch.rand(B, T, VOCABULARY).argsort(-1)[..., :7]
            tokens[..., 0] = torch.where(torch.rand(B, T) < 0.2, tokens[..., 0], ids)
            tokens[..., 1:][tokens[..., 1:] == tokens[..., :1]] = -1
            counts = torch.randint(8, (B, T, 1))
            given["kept"] = torch.where(torch.arange(7) < counts, tokens, -1)
        if teacher is not None:
            given |= draw_teacher(teacher, B, T, dtype)
        if scored is None:
            temperature = normal(B, T, dtype=torch.float32).abs() + 0.5
            return {**given, "temperature": temperature} | draw_mask(B, T)
        logprobs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        given = given | beside(scored, logprobs)
        del given["policy_weights"]
        if scored.score_centering:  # of a sampler near the policy, in half of the rows fewer
            log_q = (logits + 0.3 * normal(B, T, VOCABULARY, dtype=dtype)).log_softmax(-1)
            values, tokens = log_q.topk(4, -1)
            tokens[:, ::2, 3:] = -1
            given |= {"sampler_ids": tokens, "sampler_logprobs": values, "mask": given.pop("mask")}
        return given

    return draw


def draw_values(B, T, dtype):
    names = ("values", "returns", "old_values")
    return {name: 2 * normal(B, T, dtype=dtype) for name in names} | draw_mask(B, T)


def draw_gae(bootstrap):
    def draw(B, T, dtype):
        given = {name: normal(B, T, dtype=dtype) for name in ("rewards", "values")}
        given["bootstrap_values"] = normal(*((B,) if bootstrap else (B, T)), dtype=dtype)
        flags = {name: torch.rand(B, T) < 0.15 for name in ("terminated", "truncated")}
        return given | flags | draw_mask(B, T)

    return draw


def draw_returns(B, T, dtype):
    given = draw_gae(True)(B, T, dtype)
    del given["values"]
    return given


def draw_x(B, T, dtype):
    return {"x": 3 * normal(B, T, dtype=dtype) + 5} | draw_mask(B, T)


def draw_pair(B, T, dtype):
    return {name: make_logprobs(B, T, dtype=dtype) for name in ("logprobs", "ref_logprobs")}
