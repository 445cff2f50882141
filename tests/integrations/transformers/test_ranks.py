"""`inside_forward` on models that are split over ranks equals one process on all batches."""

import functools
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import fastrl
from tests.integrations.packages import needed
from tests.integrations.trl.runs import VOCABULARY, make_model
from tests.ops.ranks.gloo_ranks import on_ranks

transformers = needed("transformers")
needed("peft")
from fastrl.integrations.transformers import inside_forward  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo"),
]

WORLD = 2
ROUNDED = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16
)


def plain(kind="LlamaConfig", **changes):
    return make_model(kind, num_hidden_layers=2, **changes)


def adapted():
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    torch.manual_seed(3)
    return peft.get_peft_model(plain(), config)


def causal(model):
    return model.get_base_model() if hasattr(model, "peft_config") else model


def fsdp2(units=lambda model: [], **options):
    """How FSDP2 shards each layer, some more units, and the rest."""

    def shard(model, mesh):
        for unit in [*causal(model).model.layers, *units(causal(model)), model]:
            fully_shard(unit, mesh=mesh, **options)
        return model

    return shard


def head_alone(model):
    return [model.lm_head]


def layers_of_head(model):
    return [part for part in model.lm_head.modules() if isinstance(part, torch.nn.Linear)]


def fsdp1(model, mesh):
    return FullyShardedDataParallel(
        model, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True
    )


def fsdp1_of_head(model, mesh):
    model.lm_head = fsdp1(model.lm_head, mesh)
    return fsdp1(model, mesh)


TIED = functools.partial(plain, "Qwen3Config", tie_word_embeddings=True)
CAPPED = functools.partial(plain, "Gemma2Config", final_logit_softcapping=3.0)
#: name -> (the model, how it is sharded)
CASES = {
    "FSDP2": (plain, fsdp2()),
    "FSDP2, the head by itself": (plain, fsdp2(head_alone, reshard_after_forward=True)),
    "FSDP2, norm and head": (plain, fsdp2(lambda m: [[m.model.norm, m.lm_head]])),
    "FSDP2, a tied head": (TIED, fsdp2(reshard_after_forward=True)),
    "FSDP2, a softcap": (CAPPED, fsdp2()),
    "FSDP2, bfloat16": (plain, fsdp2(mp_policy=ROUNDED)),
    "FSDP2, bfloat16, the head by itself": (plain, fsdp2(head_alone, mp_policy=ROUNDED)),
    "FSDP2, LoRA on the head": (adapted, fsdp2()),
    "FSDP2, LoRA, each layer by itself": (adapted, fsdp2(layers_of_head)),
    "FSDP1": (plain, fsdp1),
    "FSDP1, the head by itself": (plain, fsdp1_of_head),
    "DDP": (plain, lambda model, mesh: torch.nn.parallel.DistributedDataParallel(model)),
}


def batches(rank, parts):
    """The rank's micro-batches."""
    generator = torch.Generator().manual_seed(11 + rank)
    for _ in range(parts):
        ids = torch.randint(4, VOCABULARY, (2, 7), generator=generator)
        mask = torch.ones(2, 6)
        mask[rank, 4:] = 0
        yield ids, mask, torch.randn(2, generator=generator)


def scored(ids, mask, advantages, hidden, head):
    """Loss and log-probabilities; the mean over both ranks has the same denominator."""
    result = fastrl.linear_policy_loss(
        hidden[:, :-1],
        token_ids=ids[:, 1:],
        advantages=advantages,
        mask=mask,
        normalizer=10.0,
        **head.arguments(),
    )
    return {"loss": result.loss, "logprobs": result.logprobs}


def losses_of(model, rank, parts):
    """The losses of the rank's micro-batches, whose gradients are added and then reduced."""
    losses = []
    synchronize = getattr(model, "set_requires_gradient_sync", lambda _: None)
    for part, batch in enumerate(batches(rank, parts)):
        synchronize(part == parts - 1)
        out = inside_forward(model, functools.partial(scored, *batch), input_ids=batch[0])
        assert out["loss"].dtype == out["logprobs"].dtype == torch.float32
        losses.append(out["loss"].item())
        out["loss"].backward()
    return losses


def gradients(model):
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {
                name.replace("_fsdp_wrapped_module.", ""): p.grad.clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
    return {
        name.removeprefix("module."): getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def of_all_cases():
    """Losses and gradients of all cases on this rank."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
    found = {}
    for name, (make, shard) in CASES.items():
        for parts in (1, 2):
            model = shard(make(), mesh)
            found[name, parts] = losses_of(model, dist.get_rank(), parts), gradients(model)
    return found


@pytest.fixture(scope="module")
def found():
    return on_ranks(WORLD, of_all_cases)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_sharded_models_equal_one_process(name, parts, found):
    model = CASES[name][0]()
    losses = [losses_of(model, rank, parts) for rank in range(WORLD)]
    grads = {key: grad / WORLD for key, grad in gradients(model).items()}
    # bfloat16 keeps 8 bits: 2^-8 of each operand of a few layers
    relative, absolute = (0.1, 2e-2) if "bfloat16" in name else (1e-4, 1e-6)
    for rank in range(WORLD):
        got_losses, got_grads = found[rank][name, parts]
        assert got_losses == pytest.approx(losses[rank], rel=relative, abs=absolute)
        assert got_grads.keys() == grads.keys()
        for parameter, grad in got_grads.items():
            largest = grads[parameter].abs().amax().item()
            torch.testing.assert_close(
                grad, grads[parameter], rtol=relative, atol=max(absolute, relative * largest)
            )


def compared_in_parts(path):
    """The largest difference of log-probabilities and, relative to their sizes, of gradients."""
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())}
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    load = transformers.AutoModelForCausalLM.from_pretrained
    whole = load(path, dtype=torch.float32)
    split = load(path, dtype=torch.float32, tp_plan="auto")
    assert type(split.get_output_embeddings().weight).__name__ == "DTensor"
    ids = torch.randint(whole.config.vocab_size, (3, 9))

    def logprobs(hidden, head):
        return fastrl.linear_token_logprobs(
            hidden[:, :-1], token_ids=ids[:, 1:], **head.arguments()
        )

    found = inside_forward(split, logprobs, input_ids=ids)
    expected = fastrl.token_logprobs(whole(ids).logits[:, :-1].contiguous(), ids[:, 1:])
    found.sum().backward()
    expected.sum().backward()
    errors, of_split = [(found - expected).abs().amax()], gradients(split)
    for name, x in whole.named_parameters():
        errors.append((of_split[name] - x.grad).abs().amax() / x.grad.abs().amax())
    return float(torch.stack(errors).amax())


@pytest.mark.parametrize(("vocabulary", "tied"), [(50, False), (51, False), (50, True)])
def test_a_model_split_by_transformers_equals_a_whole_one(vocabulary, tied, tmp_path):
    """`tp_plan="auto"` splits the head, too."""
    changes = {"num_key_value_heads": 2, "tie_word_embeddings": tied}
    plain(vocab_size=vocabulary, **changes).save_pretrained(tmp_path)
    for worst in on_ranks(WORLD, compared_in_parts, str(tmp_path)):
        assert worst <= 1e-5
