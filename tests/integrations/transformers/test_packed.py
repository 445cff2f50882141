"""Padded batches without their padding: as each sequence alone, or refused."""

import copy
import itertools

import pytest
import torch

from tests.integrations.packages import needed

transformers = needed("transformers")
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # noqa: E402

from fastrl.integrations.transformers import backbone, packed  # noqa: E402
from fastrl.integrations.transformers import packing as packs  # noqa: E402
from fastrl.integrations.transformers.packed import packed_forward, why_not_packed  # noqa: E402
from fastrl.integrations.transformers.packing import Unit, rows_of  # noqa: E402

SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SMALL |= {"initializer_range": 0.3, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= {"initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 1}
QWEN2 = {"use_sliding_window": True, "max_window_layers": 1}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
BLOOM = {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}
HEADS = {**SMALL, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
# the type of model, its settings, and why it cannot be packed
MODELS = [
    ("llama", SMALL, None),
    ("qwen2", SMALL, None),
    ("qwen2", {**SMALL, "sliding_window": 5, **QWEN2}, None),
    ("qwen3", HEADS, None),
    ("mistral", {**SMALL, "sliding_window": 5}, None),
    ("gemma", HEADS, None),
    ("gemma2", HEADS, "its attention is eager"),
    ("gemma3_text", {**HEADS, **WINDOWS}, None),
    ("phi3", SMALL, None),
    ("cohere", SMALL, None),
    ("cohere2", {**SMALL, **WINDOWS}, None),
    ("smollm3", SMALL, None),
    ("olmo2", SMALL, None),
    ("granite", SMALL, None),
    ("starcoder2", {**SMALL, "residual_dropout": 0.0, "embedding_dropout": 0.0}, None),
    ("mixtral", {**SMALL, "num_local_experts": 4}, None),
    ("qwen3_moe", {**HEADS, **EXPERTS, "moe_intermediate_size": 16}, None),
    ("gpt2", {**GPT2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, None),
    ("gpt2", GPT2, "attention must be without dropout"),
    ("gpt_neox", SMALL, None),
    ("opt", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}, None),
    ("stablelm", SMALL, "packed rows need layers that pass keywords on"),
    ("falcon", SMALL, "layers may not pass keywords on"),
    ("bloom", BLOOM, "attention is eager"),
    ("gpt_oss", {**HEADS, "num_local_experts": 4}, "its attention is eager"),
    ("llama4_text", {**HEADS, "intermediate_size_mlp": 48}, "it has layers of chunked_attention"),
    ("qwen3_next", {**HEADS, **EXPERTS, "moe_intermediate_size": 16}, "layers of linear_attention"),
    ("mamba", {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}, "attention is eager"),
]
PLACES = [(3, 20), (3, 24), (0, 17), (8, 9), (3, 20), (6, 15), (0, 0)]
#: The first and fifth are equal; 6 tokens of the third begin the sixth.
SHORTEST = 17 + 21 + 17 + 3 + 1


def make_model(kind="llama", **settings):
    """The backbone in training mode, in float64 if its operations exist there."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(settings or SMALL))
    experts = getattr(config, "num_local_experts", getattr(config, "num_experts", None))
    dtype = torch.float32 if experts else torch.float64
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return backbone(model).train()


def make_batch():
    """Padded on both sides, with an empty sequence and a pair of equal ones."""
    ids = torch.randint(2, 61, (len(PLACES), 24), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros_like(ids)
    for row, (start, end) in enumerate(PLACES):
        mask[row, start:end] = 1
    ids[1, 3:11], ids[4], ids[5, 6:12] = ids[0, 3:11], ids[0], ids[2, :6]
    return ids.where(mask == 1, 0), mask


IDS, MASK = make_batch()
BATCH = {"input_ids": IDS, "attention_mask": MASK}


class Run:
    """The backbone's own forward, which counts the tokens of its calls."""

    def __init__(self, model):
        self.model, self.calls = model, []

    def __call__(self, *args, **inputs):
        ids = inputs.get("input_ids", args[0] if args else None)
        self.calls.append(0 if ids is None else ids.numel())
        return type(self.model).forward(self.model, *args, **inputs)


def alone(model, ids=IDS, mask=MASK):
    """Hidden states of each sequence alone, 0 at padding."""
    weight = model.get_input_embeddings().weight
    states = []
    for row, real in zip(ids, mask == 1, strict=True):
        zeros = weight.new_zeros(len(row), model.config.hidden_size)
        if real.any():
            out = type(model).forward(model, input_ids=row[real][None], use_cache=False)
            zeros = zeros.index_copy(0, real.nonzero()[:, 0], out.last_hidden_state[0])
        states.append(zeros)
    return torch.stack(states)


def outcome(model, states):
    """Hidden states, and the gradients of a random functional of those that are not padding."""
    model.zero_grad()
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(2))
    (states * weights * MASK[..., None]).sum().backward()
    return [states.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_equal(one, other, tolerance=1e-5):
    """Compare states and gradients relative to the largest; norms compute in float32: 2^-23."""
    assert len(one) == len(other) > 2
    for some, more in ((one[:1], other[:1]), (one[1:], other[1:])):
        scale = max(float(x.abs().max()) for x in some)
        for a, b in zip(some, more, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"), MODELS, ids=[f"{i}-{m[0]}" for i, m in enumerate(MODELS)]
)
def test_a_model_gives_what_each_sequence_gives_alone_or_is_refused(kind, settings, reason):
    model = make_model(kind, **copy.deepcopy(settings))
    found = why_not_packed(model)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found
    if reason is None:
        truth = outcome(model, alone(model))
        for tokens in (None, 25):
            run = Run(model)
            states = packed_forward(model, run, tokens)(**BATCH).last_hidden_state
            assert sum(run.calls) == SHORTEST if tokens is None else max(run.calls) <= tokens
            assert_equal(truth, outcome(model, states))


def test_a_trial_is_without_trace():
    model, fired = make_model("gemma3_text", **HEADS, **WINDOWS), []
    model.layers[0].register_forward_hook(lambda *_: fired.append(1))
    model.layers[1].eval()
    before = torch.get_rng_state()
    assert why_not_packed(model) is None
    assert not fired
    assert torch.equal(before, torch.get_rng_state())
    assert (model.training, model.layers[1].training) == (True, False)
    assert model.config.sliding_window == model.layers[0].self_attn.sliding_window == 5
    packed_forward(model, Run(model))(**BATCH)
    assert len(fired) == 1
    model.forward, run = None, Run(model)  # replaced
    assert why_not_packed(model, run) is None
    assert len(run.calls) == 4


def test_a_trial_notices_what_only_long_sequences_or_other_sequences_show(monkeypatch):
    model = make_model("mistral", **SMALL, sliding_window=1000)
    right = packed.attend_by_sequence

    def without_window(*args, sliding_window, **options):
        return right(*args, **options)

    monkeypatch.setattr(packed, "attend_by_sequence", without_window)
    assert "affect each other" in why_not_packed(model)
    monkeypatch.undo()
    model.config.output_hidden_states = True
    assert "the configuration asks for hidden states" in why_not_packed(model)


def test_the_models_padded_call_is_wrong_for_absolute_positions_only():
    """So the test above can fail: left padding moves the positions of GPT-2."""
    for kind, settings in (("llama", SMALL), ("gpt2", {**GPT2, "attn_pdrop": 0.0})):
        model = make_model(kind, **settings).eval()
        one, two = alone(model), model(**BATCH).last_hidden_state * MASK[..., None]
        assert bool((one - two).abs().max() > 0.1) == (kind == "gpt2")


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("tokens", [None, 25])
def test_recomputed_layers_and_adapters(reentrant, tokens):
    peft = needed("peft")
    model = make_model()
    peft.inject_adapter_in_model(
        peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False), model
    )
    model.get_input_embeddings().weight.requires_grad_(True)
    truth = outcome(model, alone(model))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    run = Run(model)
    states = packed_forward(model, run, tokens)(**BATCH).last_hidden_state
    forward = len(run.calls)
    assert_equal(truth, outcome(model, states))
    assert len(run.calls) == (2 * forward if tokens else 1)  # rows are recomputed


def test_several_rows_keep_the_activations_of_none():
    model, kept = make_model(), []
    for tokens in (None, 25):
        kept.append(0)

        def keep(tensor):
            kept[-1] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            packed_forward(model, Run(model), tokens)(**BATCH)
    assert kept[1] < 2 * IDS.numel() * 32 < kept[0] / 5  # the states, and the indices of results


@pytest.mark.parametrize("tokens", [None, 25])
@pytest.mark.parametrize("with_mask", [True, False])
def test_router_logits_give_the_loss_of_the_padded_call(tokens, with_mask):
    model = make_model("mixtral", **SMALL, num_local_experts=4)
    ids, mask = (IDS, MASK) if with_mask else (IDS[[0, 0, 1]], None)
    inputs = {"input_ids": ids, "attention_mask": mask, "output_router_logits": True}
    found = []
    for forward in (Run(model), packed_forward(model, Run(model), tokens)):
        model.zero_grad()
        logits = forward(**inputs).router_logits
        assert [x.shape for x in logits] == [(ids.numel(), 4)] * 2
        loss = load_balancing_loss_func(logits, 4, 2, mask)
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([loss.detach(), *gradients])
    assert_equal(*found, tolerance=1e-4)


def test_bfloat16_autocast_rounds_no_more_than_that_of_each_sequence_alone():
    model = make_model().float()
    truth = outcome(model, alone(model))
    errors = []
    for forward in (alone, lambda m: packed_forward(m, Run(m), 25)(**BATCH).last_hidden_state):
        with torch.autocast("cpu", torch.bfloat16):
            states = forward(model)
        found = outcome(model, states)
        errors.append(
            [(a - b).abs().max() / a.abs().max() for a, b in zip(truth, found, strict=True)]
        )
    own, ours = (float(torch.stack(error).max()) for error in errors)
    assert own > 1e-3
    assert ours < 2 * own


def test_padding_is_not_computed():
    model = make_model()
    truth = alone(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = torch.nan
    states = packed_forward(model, Run(model))(IDS, MASK.bool()).last_hidden_state
    assert_equal([truth.detach()] * 3, [states.detach()] * 3)
    assert not states[MASK == 0].any()
    one = packed_forward(model, Run(model))(IDS[1:2], MASK[1:2]).last_hidden_state
    torch.testing.assert_close(one, truth[1:2], rtol=0, atol=1e-5)


def test_compiled_rows_are_not_compiled_for_each_length():
    model, graphs = make_model(), []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda **inputs: type(model).forward(model, **inputs), backend=backend)
    forward, known = packed_forward(model, compiled), []
    for length in range(12, 25, 2):
        ids, mask = IDS[:, :length], MASK[:, :length]
        states = forward(input_ids=ids, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(states, alone(model, ids, mask), rtol=0, atol=1e-5)
        known.append(len(graphs))
    assert 0 < known[1] == known[-1]


GAP, FULL = MASK.clone(), torch.ones_like(MASK)
GAP[0, 10] = 0
PASSED_ON = {
    "embeddings": {"inputs_embeds": torch.randn(7, 24, 32).double(), "attention_mask": MASK},
    "a mask of four dimensions": {"input_ids": IDS, "attention_mask": torch.ones(7, 1, 24, 24) > 0},
    "positions": {**BATCH, "position_ids": torch.arange(24)[None]},
    "a gap": {"input_ids": IDS, "attention_mask": GAP},
    "a cache": {**BATCH, "use_cache": True},
    "hidden states": {**BATCH, "output_hidden_states": True},
    "a tuple": {**BATCH, "return_dict": False},
    "something else": {**BATCH, "token_type_ids": IDS},
    "no padding": {"input_ids": torch.arange(72).view(3, 24) % 61, "attention_mask": FULL[:3]},
    "only padding": {"input_ids": IDS, "attention_mask": 0 * MASK},
}


@pytest.mark.parametrize("inputs", PASSED_ON.values(), ids=PASSED_ON)
def test_other_calls_reach_the_model_as_they_are(inputs):
    reached, result = [], object()

    def run(*args, **given):
        reached.append((args, given))
        return result

    assert packed_forward(make_model(), run)(**inputs) is result
    ((args, given),) = reached
    assert not args
    assert given.keys() == inputs.keys()
    assert all(given[name] is inputs[name] for name in inputs)


def test_long_batches_of_models_with_rotary_embeddings_by_length_are_passed_on():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for most, tokens in ((24, SHORTEST), (23, IDS.numel())):
        changes = {"max_position_embeddings": most, "rope_parameters": rope}
        model = make_model("llama", **{**SMALL, **changes})
        run = Run(model)
        packed_forward(model, run)(**BATCH)
        assert run.calls == [tokens]


def test_attention_by_positions_shares_no_prefix():
    model = make_model()
    assert packed.shares_prefixes(model)
    model.config._attn_implementation = "flex_attention"
    assert not packed.shares_prefixes(model)
    reached = []
    with pytest.raises(ZeroDivisionError):
        packed_forward(model, lambda **given: reached.append(given) or 1 / 0)(**BATCH)
    (given,) = reached
    assert given.keys() == {"input_ids", "position_ids", "use_cache"}
    ends = [end - start for start, end in PLACES if end > start]
    starts = (given["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    assert sorted(b - a for a, b in zip(starts, [*starts[1:], sum(ends)], strict=True)) == sorted(
        ends
    )


def test_whole_parameters():
    model = make_model()
    assert packed.is_whole(model)
    model.layers[0].mlp.up_proj.weight.ds_id = 3
    assert not packed.is_whole(model)
    with torch.device("meta"):
        assert not packed.is_whole(torch.nn.Linear(2, 2))


def units_of(*sequences):
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    return packs.shared_prefixes(tokens, [len(sequence) for sequence in sequences])


def test_prefixes_that_save_most_are_shared():
    """1 2 3 4 5 by two saves more than 1 2 by three; 1 alone is too little of 99."""
    units = units_of([1, 2, 3, 4, 5, 6], [], [1, 2, 9], [1, 2, 3, 4, 5], [1, 2, 9], [7], [1] * 99)
    assert sorted(units) == sorted(
        [
            Unit((3, 0), 5, (0, 1)),
            Unit((2, 4), 3, (0, 0)),
            Unit((5,), 0, (1,)),
            Unit((6,), 0, (99,)),
        ]
    )


def test_no_division_of_sorted_sequences_has_fewer_tokens():
    generator = torch.Generator().manual_seed(4)
    for _ in range(30):
        sizes = torch.randint(1, 9, (7,), generator=generator).tolist()
        sequences = sorted(torch.randint(2, (n,), generator=generator).tolist() for n in sizes)
        possible = []
        for cuts in itertools.product([False, True], repeat=6):
            edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), 7]
            groups = [sequences[a:b] for a, b in itertools.pairwise(edges)]
            saved = 0
            for group in groups:
                same = [len(set(column)) == 1 for column in zip(*group, strict=False)]
                saved += [*same, False].index(False) * (len(group) - 1)
            possible.append(sum(sizes) - saved)
        assert sum(unit.tokens for unit in units_of(*sequences)) == min(possible)


def test_rows_hold_units_or_their_parts():
    units = [Unit((0, 1, 2, 3), 6, (2, 3, 4, 0)), Unit((4,), 0, (9,)), Unit((5,), 0, (1,))]
    (row,) = rows_of(units)
    assert row.tokens == sum(span.end - span.start for span in row.spans) == 25
    rows = rows_of(units, 11)
    assert [row.tokens for row in rows] == [11, 11, 9]
    assert sorted(part.sequence for row in rows for part in row.parts) == list(range(6))
    assert [row.parts[0].prefix for row in rows if row.parts[0].leads] == [(0, 6), (0, 6), (0, 0)]
    assert packs.ranges(torch.tensor([5, 1]), torch.tensor([2, 3])).tolist() == [5, 6, 1, 2, 3]
