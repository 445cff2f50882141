"""Sampling: what ends a completion, the state of the model, errors, the correction."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")


from fastrl.train.attention import BY_SEQUENCE
from fastrl.train.config import GrpoConfig
from fastrl.train.model.loading import load
from fastrl.train.sampling import make_sampler, rollout_correction
from fastrl.train.sampling.endings import Endings
from tests.support.sampled import (
    PIECES,
    model_logprobs,
    pieces_model,
    pieces_tokenizer,
    prompts_of,
    sample,
    tiny,
)


@pytest.fixture(scope="module")
def llama():
    return tiny()


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("engine", ["transformers", "continuous"])
def test_any_of_several_end_tokens_ends_a_completion(llama, engine):
    model, tokenizer = llama
    ids = {text: tokenizer.get_vocab()[text] for text in "abcdef"}
    model.generation_config.eos_token_id = [1, ids["a"], ids["b"]]
    try:
        torch.manual_seed(0)
        rollout, _ = sample(
            model,
            tokenizer,
            64,
            temperature=3.0,
            end_tokens=("c", "d", "e", "f"),
            sampler=engine,
        )
    finally:
        model.generation_config.eos_token_id = 1
    ends = torch.tensor([1, *ids.values()])
    lengths = rollout.mask.sum(1)
    last = rollout.token_ids.gather(1, lengths[:, None] - 1)[:, 0]
    assert torch.equal(rollout.truncated, ~torch.isin(last, ends))
    assert len(last[~rollout.truncated].unique()) >= 3
    assert (torch.isin(rollout.token_ids, ends) & rollout.mask).sum(1).max() == 1


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
@pytest.mark.parametrize("engine", ["transformers", "continuous"])
def test_a_stop_string_ends_each_completion_where_it_is_completed(engine, pad):
    tokenizer = pieces_tokenizer(PIECES, pad_token=pad)
    model = pieces_model(tokenizer, tokenizer.pad_token_id)
    torch.manual_seed(0)
    rollout, texts = sample(
        model,
        tokenizer,
        200,
        ("a", "b st"),
        max_new_tokens=8,
        stop_strings=("stop", "xx"),
        sampler=engine,
    )
    lengths = rollout.mask.sum(1)
    stopped = 0
    rows = zip(rollout.token_ids, lengths.tolist(), rollout.truncated, texts, strict=True)
    for ids, n, truncated, text in rows:
        assert text == tokenizer.decode(ids[:n], skip_special_tokens=True)
        written = "".join(tokenizer.convert_ids_to_tokens(ids[:n].tolist()))
        before = "".join(tokenizer.convert_ids_to_tokens(ids[: n - 1].tolist()))
        assert "stop" not in before
        assert "xx" not in before
        by_string = "stop" in written or "xx" in written
        stopped += by_string
        assert truncated == (not by_string and ids[n - 1].item() != 1)
        assert n == 8 or not truncated
        assert (ids[n:] == tokenizer.pad_token_id).all()
    assert stopped > 50
    assert len({n for n, text in zip(lengths.tolist(), texts, strict=True) if "stop" in text}) > 3
    expected = model_logprobs(model, rollout)
    torch.testing.assert_close(rollout.logprobs, expected, rtol=0, atol=1e-5)


def test_a_stop_string_does_not_begin_in_the_prompt():
    tokenizer = pieces_tokenizer(PIECES)
    model = pieces_model(tokenizer, 0)
    endings = Endings(model, tokenizer, GrpoConfig(stop_strings=("stop",)))
    op, st = (tokenizer.get_vocab()[piece] for piece in ("op", "st"))
    assert endings.length(torch.tensor([op, op])) == (2, False)
    assert endings.length(torch.tensor([op, st, op, op])) == (3, True)
    torch.manual_seed(0)
    rollout, _ = sample(model, tokenizer, 200, ("st",), max_new_tokens=2, stop_strings=("stop",))
    assert (rollout.mask[rollout.token_ids[:, 0] == op].sum(1) == 2).all()


# ---------------------------------------------------------------- the model's state


@pytest.mark.parametrize("engine", ["transformers", "continuous"])
def test_the_model_is_left_as_it_was(engine):
    """Also its attention, which knows packed rows alone, and also after an error."""
    model, tokenizer = tiny()

    model.set_attn_implementation(BY_SEQUENCE)
    model.train()
    model.model.layers[1].eval()
    model.gradient_checkpointing_enable()
    modes = [module.training for module in model.modules()]
    config = GrpoConfig(max_new_tokens=6, sampler=engine)
    sampler = make_sampler(model, tokenizer, config)
    prompts = prompts_of(tokenizer)

    def check():
        assert [module.training for module in model.modules()] == modes
        assert model.config._attn_implementation == "by_sequence"
        assert torch.is_grad_enabled()
        assert all(parameter.requires_grad for parameter in model.parameters())

    sampler.sample(prompts, 2)
    check()
    sampler.greedy(prompts)
    check()
    hook = model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises((ZeroDivisionError, RuntimeError), match="division by zero"):
        sampler.sample(prompts, 2)
    check()
    hook.remove()


def test_checkpointing_does_not_disable_the_cache(llama, monkeypatch, caplog):
    model, tokenizer = tiny()
    model.gradient_checkpointing_enable()
    model.train()
    lengths = []
    model.model.embed_tokens.register_forward_hook(lambda _, x, __: lengths.append(x[0].shape[1]))
    sample(model, tokenizer, temperature=0.01)
    assert len(lengths) > 2
    assert set(lengths[1:]) == {1}
    assert not caplog.records


def test_bfloat16_is_sampled_in_the_precision_of_the_trainer(llama):
    model, tokenizer = llama
    seen = set()
    hook = model.model.layers[0].mlp.register_forward_hook(lambda _, __, y: seen.add(y.dtype))
    try:
        rollout, _ = sample(model, tokenizer, precision="bfloat16")
    finally:
        hook.remove()
    assert seen == {torch.bfloat16}
    assert rollout.logprobs.dtype == torch.float32


def test_an_adapter_is_sampled_from():
    peft = pytest.importorskip("peft")
    model, tokenizer = tiny()
    adapter = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    wrapped = peft.get_peft_model(model, adapter)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    for engine in ("transformers", "continuous"):
        torch.manual_seed(0)
        rollout, _ = sample(wrapped, tokenizer, sampler=engine)
        expected = model_logprobs(wrapped, rollout)
        torch.testing.assert_close(rollout.logprobs, expected, rtol=0, atol=1e-5)
        with wrapped.disable_adapter():
            without = model_logprobs(wrapped, rollout)
        assert (without - expected).abs().max() > 0.1


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("engine", ["transformers", "continuous"])
@pytest.mark.parametrize("wrong", ["nan", "inf"])
def test_logits_that_are_not_finite_are_an_error(engine, wrong):
    model, tokenizer = tiny()
    with torch.no_grad():
        model.lm_head.weight[9] = float(wrong)
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        sample(model, tokenizer, sampler=engine)
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        make_sampler(model, tokenizer, GrpoConfig(sampler=engine)).greedy(prompts_of(tokenizer))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"end_tokens": ("ab",)}, r"end_tokens must each be one token, got 'ab'"),
        ({"end_tokens": ("",)}, "end_tokens must each be one token, got ''"),
        ({"end_tokens": ("é",)}, "end_tokens: 'é' cannot be tokenized|one token, got 'é'"),
        ({"stop_strings": ("",)}, "stop_strings must not be empty"),
        ({"stop_strings": ("a", "é")}, "stop_strings: no token can complete 'é'"),
    ],
)
@pytest.mark.parametrize("engine", ["transformers", "continuous"])
def test_settings_that_do_not_fit_the_tokenizer_are_refused_at_the_start(
    llama, engine, options, message
):
    with pytest.raises(ValueError, match=message):
        make_sampler(*llama, GrpoConfig(sampler=engine, **options))


def test_generation_settings_of_the_model_are_refused():
    model, tokenizer = tiny()
    model.generation_config.repetition_penalty = 1.2
    with pytest.raises(ValueError, match=r"no generation settings .*repetition_penalty"):
        make_sampler(model, tokenizer, GrpoConfig())


def test_a_model_of_the_loops_has_no_generation_settings():
    make_sampler(*load(None, "cpu"), GrpoConfig())


def test_continuous_batching_is_refused_where_it_cannot_run(llama, monkeypatch):
    model, tokenizer = llama
    config = GrpoConfig(sampler="continuous", attention="flex_attention")
    with pytest.raises(ValueError, match='attention must not be "flex_attention"'):
        make_sampler(model, tokenizer, config)
    older = SimpleNamespace(__version__="4.56.0")
    monkeypatch.setattr("fastrl.train.sampling.continuous_sampler.transformers", older)
    with pytest.raises(ValueError, match="ContinuousBatchingConfig, got version"):
        make_sampler(model, tokenizer, GrpoConfig(sampler="continuous"))
    older.ContinuousBatchingConfig = lambda block_size, num_blocks, max_batch_tokens, seed: None
    with pytest.raises(ValueError, match="has no return_logprobs in ContinuousBatchingConfig"):
        make_sampler(model, tokenizer, GrpoConfig(sampler="continuous"))


def test_pages_of_an_older_transformers_are_blocks(llama, monkeypatch):
    def engine(*, block_size, num_blocks, max_batch_tokens, return_logprobs, seed):
        return {"block_size": block_size, "num_blocks": num_blocks}

    older = SimpleNamespace(__version__="5.17.0", ContinuousBatchingConfig=engine)
    monkeypatch.setattr("fastrl.train.sampling.continuous_sampler.transformers", older)
    config = GrpoConfig(sampler="continuous", max_new_tokens=20)
    sampler = make_sampler(*llama, config)
    # 12 tokens and 20 more fill two blocks of 16
    assert sampler._cache_config([[1] * 12], seed=0) == {"block_size": 16, "num_blocks": 2}


def test_a_request_that_continuous_batching_loses_is_an_error(llama, monkeypatch):
    model, tokenizer = llama
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    def die(self):
        raise MemoryError("no room for the cache")

    monkeypatch.setattr(ContinuousBatchingManager, "_create_batch_processor", die)
    monkeypatch.setattr(ContinuousBatchingManager, "warmup", lambda self: None)
    with pytest.raises(RuntimeError, match="no room for the cache"):
        sample(model, tokenizer, sampler="continuous")


def test_vllm_names_its_package(llama):
    with pytest.raises(ValueError, match=r"pip install .*vllm"):
        make_sampler(*llama, GrpoConfig(sampler="vllm"))


# ---------------------------------------------------------------- the correction


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, None),
        ({"precision": "bfloat16"}, "truncate"),
        ({"weights": "bfloat16"}, "truncate"),
        ({"sampler": "continuous"}, "truncate"),
        ({"sampler": "vllm"}, "truncate"),
        ({"rollout_correction": "mask"}, "mask"),
        ({"rollout_correction": "truncate"}, "truncate"),
        ({"rollout_correction": "none", "precision": "bfloat16"}, None),
    ],
)
def test_the_correction_is_on_where_sampler_and_trainer_can_differ(options, kind):
    correction = rollout_correction(GrpoConfig(**options))
    if kind is None:
        assert correction is None
    else:
        assert (correction.kind, correction.level, correction.high) == (kind, "token", 2.0)
