"""The forward of a backbone on a padded batch, computed without the padding.

    module.forward = packed_forward(module, module.forward)

The tokens of all sequences lie in one row ``[1, L]``, in which equal prefixes of sequences are
computed once. The hidden states come back in the padded layout ``[B, T, H]``, so callers notice
nothing. Positions begin at 0 in each sequence.

With sdpa, the layers hand the layout of the row to the attention as the keyword ``sequences``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastrl.integrations.transformers.by_sequence import Span, attend_by_sequence, make_layout
from fastrl.integrations.transformers.hooks import has_own_hooks, has_row_hooks, runtime_hooks_only
from fastrl.integrations.transformers.packing import Unit, ranges, rows_of, shared_prefixes
from fastrl.integrations.transformers.random_rows import evaluating

#: Attention that finds the sequences of a row by the positions.
_BY_POSITIONS = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_OUTPUTS = {"output_hidden_states": False, "output_attentions": False, "return_dict": True}
_PASSED_ON = ("output_router_logits", "return_dict")
#: Of the head and the loss; a backbone ignores them.
_IGNORED = ("logits_to_keep", "num_items_in_batch")
#: Arguments of a call that can be packed; any other must be None.
_KNOWN = {"input_ids", "attention_mask", "use_cache", *_PASSED_ON, *_OUTPUTS, *_IGNORED}


class Sequences:
    """The layout of a row on each layer's device. A compiled graph does not look into it."""

    def __init__(self, spans: list[Span]) -> None:
        self.on = functools.cache(functools.partial(make_layout, spans))


#: The shape of the mask of a row, which transformers passes on as it is and nothing looks at.
_STAND_IN = (1, 1, 1, 1)
_sdpa: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]


def _attend(
    module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
) -> Any:
    """Return sdpa's attention, by sequence in a packed row."""
    if isinstance(options.get("sequences"), Sequences):
        return _attend_packed(module, query, key, value, **options)
    if getattr(attention_mask, "shape", None) == _STAND_IN and query.shape[2] > 1:
        raise ValueError("packed rows need layers that pass keywords on to the attention")
    return _sdpa(module, query, key, value, attention_mask, **options)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_packed(
    module: nn.Module, query: Any, key: Any, value: Any, sequences: Sequences, **options: Any
) -> Any:
    causal = options.pop("is_causal", None)
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError("attention must be causal in packed rows")
    if options.get("dropout"):
        raise ValueError("attention must be without dropout in packed rows")
    layout = sequences.on(query.device)
    out, _ = attend_by_sequence(module, query, key, value, None, sequences=layout, **options)
    return out.contiguous(), None  # the same strides every time, for a compiled graph


AttentionInterface.register("sdpa", _attend)


class _Plan(NamedTuple):
    """A padded batch as rows of L tokens in all, of which n places in the batch take results."""

    rows: list[dict[str, Any]]  # inputs of the backbone
    shape: tuple[int, int]  # B, T
    tokens: Tensor | None  # [n], places in the rows; None: all L in order
    places: Tensor  # [n], the place of each in the B T places of the batch

    def padded(self, values: Tensor) -> Tensor:
        """Return values ``[L, ...]`` of the rows as ``[B T, ...]``, 0 at padding."""
        if self.tokens is not None:
            values = values[self.tokens.to(values.device)]
        batch, width = self.shape
        zeros = values.new_zeros(batch * width, *values.shape[1:])
        return zeros.index_copy_(0, self.places.to(values.device), values)


def packed_forward(
    module: nn.Module, run: Callable[..., Any], tokens: int | None = None
) -> Callable[..., Any]:
    """Return a forward that computes padded batches without their padding.

    Calls that cannot be packed, or for which it would save nothing, go to `run` as they are: those
    with inputs other than token ids and a mask, with a mask that has gaps in a sequence, or with
    all hidden states or attentions as output.

    Args:
        module: The backbone of a `transformers` causal language model; `why_not_packed` tells
            whether it can be packed.
        run: Its own forward, possibly compiled.
        tokens: The most tokens per row, or None for one row. With several rows, each one's
            activations are recomputed in the backward, so only one row's exist at a time. Ranks
            may have different numbers of rows, so it must be None if parameters are sharded.

    Returns:
        A function with the arguments of `run`.
    """
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    longest = _longest(_config(module))

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(*args: Any, **inputs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | inputs
        given = {name: value for name, value in given.items() if value is not None}
        plan = None
        usable = why_padded_now(module) is None and _is_known(given, module.config)
        if usable and given["input_ids"].shape[1] <= longest:
            shares = shares_prefixes(module)
            plan = _plan(given["input_ids"], given.get("attention_mask"), tokens, shares)
        if plan is None:
            return run(*args, **inputs)
        options = {name: given[name] for name in _PASSED_ON if name in given}
        kinds: list[Any] = []

        @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
        def of_row(row: dict[str, Any]) -> tuple[Tensor, ...]:
            out = run(**row, **options, use_cache=False)
            kinds.append(type(out))
            routers = getattr(out, "router_logits", None) or ()
            return out.last_hidden_state[0], *(x.reshape(-1, x.shape[-1]) for x in routers)

        if len(plan.rows) > 1 and torch.is_grad_enabled():
            outs = [checkpoint(of_row, row, use_reentrant=False) for row in plan.rows]
        else:
            outs = [of_row(row) for row in plan.rows]
        states, *routers = (plan.padded(torch.cat(parts)) for parts in zip(*outs, strict=True))
        more = {"router_logits": tuple(routers)} if routers else {}
        return kinds[0](last_hidden_state=states.view(*plan.shape, -1), **more)

    return forward  # type: ignore[no-any-return]


def why_not_packed(module: nn.Module, run: Callable[..., Any] | None = None) -> str | None:
    """Return why packed rows would give wrong results, or None if they are right.

    A trial compares three short sequences in a row with each alone. If the parameters are sharded,
    it must run inside the forward of the wrappers, on all ranks: see `is_whole`.

    Args:
        module: The backbone of a `transformers` causal language model.
        run: Its own forward, if another one has replaced that.
    """
    config = _config(module)
    if (reason := _why_not_its_attention(module)) is not None:
        return reason
    other = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if other or getattr(config, "attention_chunk_size", None):
        return f"it has layers of {', '.join(sorted(other)) or 'attention in chunks'}"
    try:
        times = _trial_error(module, run or module.forward)
    except Exception as error:
        return f"a trial raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if times <= 1:
        return None
    return (
        f"sequences in one row affect each other {times:.2g} times as much as rounding: layers may "
        "not pass keywords on to the attention"
    )


def why_padded_now(module: nn.Module, inputs: dict[str, Any] | None = None) -> str | None:
    """Return why a packed forward leaves a call as it is, or None; this may change between calls.

    Hooks on parts of the backbone, such as NEFTune's, would see packed rows.

    Args:
        module: The backbone of a `transformers` causal language model.
        inputs: Keyword arguments of the call, or None for any.
    """
    if has_own_hooks(None):
        return "there are hooks on all modules, which would see packed rows"
    parts = (part for part in module.modules() if part is not module and has_row_hooks(part))
    if hooked := dict.fromkeys(type(part).__name__ for part in parts):
        return f"it has hooks on {', '.join(hooked)}, which would see packed rows"
    given = {name for name, value in (inputs or {}).items() if value is not None}
    if unknown := sorted(given - _KNOWN):
        return f"its inputs have {', '.join(unknown)}"
    return _why_not_its_attention(module)


def shares_prefixes(module: nn.Module) -> bool:
    """Return whether equal prefixes are computed once: only with sdpa."""
    return bool(_config(module)._attn_implementation == "sdpa")


def is_whole(module: nn.Module) -> bool:
    """Return whether `why_not_packed` can run now: FSDP and ZeRO-3 shard no parameter."""
    parameters = list(module.parameters())
    marks = ("full_tensor", "ds_id", "_fsdp_flattened")
    sharded = any(hasattr(p, mark) or p.is_meta for p in parameters for mark in marks)
    return bool(parameters) and not sharded


def _config(module: nn.Module) -> Any:
    return module.config.get_text_config()  # type: ignore[union-attr, operator]


def _why_not_its_attention(module: nn.Module) -> str | None:
    attention = _config(module)._attn_implementation
    if attention == "sdpa" and ALL_ATTENTION_FUNCTIONS["sdpa"] is not _attend:
        return "another function has replaced fastrl's as sdpa"
    if attention in ("sdpa", *_BY_POSITIONS):
        return None
    return f"its attention is {attention}, not one of sdpa, {', '.join(_BY_POSITIONS)}"


def _is_known(given: dict[str, Any], config: Any) -> bool:
    """Return whether a call has only token ids and a 2-D mask, and asks for nothing else."""
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if ids is None or ids.ndim != 2 or getattr(mask, "shape", ids.shape) != ids.shape:
        return False
    wanted = {name: given.get(name, getattr(config, name, off)) for name, off in _OUTPUTS.items()}
    return wanted == _OUTPUTS and not given.get("use_cache") and not given.keys() - _KNOWN


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _plan(ids: Tensor, mask: Tensor | None, tokens: int | None, shares: bool) -> _Plan | None:
    """Return the rows of a padded batch, or None if they are not of use."""
    device, (batch, width) = ids.device, ids.shape
    ids = ids.cpu()
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.cpu() != 0
    lengths, starts, at = real.sum(1), real.int().argmax(1), torch.arange(width)
    if not torch.equal(real, (at >= starts[:, None]) & (at < (starts + lengths)[:, None])):
        return None
    sizes = lengths.tolist()
    units = [Unit((i,), 0, (size,)) for i, size in enumerate(sizes) if size]
    if shares:
        units = shared_prefixes(ids[real], sizes)
    packed = rows_of(units, tokens)
    total = sum(row.tokens for row in packed)
    if total == 0 or (total == ids.numel() and len(packed) == 1):
        return None
    rows, done = [], 0
    found: list[Tensor] = [torch.empty(0, dtype=torch.long)] * batch
    for row in packed:
        pieces: list[tuple[int, int, int]] = []  # first position, place in the batch, tokens
        for part in row.parts:
            start = part.sequence * width + int(starts[part.sequence])
            prefix, own = part.prefix[1] - part.prefix[0], part.own[1] - part.own[0]
            pieces += [(0, start, prefix)] if part.leads else []
            pieces += [(prefix, start + prefix, own)]
            own_places = torch.arange(*part.prefix), torch.arange(*part.own)
            found[part.sequence] = done + torch.cat(own_places)
        first, places, counts = torch.tensor(pieces).unbind(1)
        inputs: dict[str, Any] = {
            "input_ids": ids.flatten()[ranges(places, counts)][None].to(device),
            "position_ids": ranges(first, counts)[None].to(device),
        }
        if shares:
            inputs["attention_mask"] = torch.ones(_STAND_IN, dtype=torch.bool, device=device)
            inputs["sequences"] = Sequences(row.spans)
        rows.append(inputs)
        done += row.tokens
    source, places = torch.cat(found), real.flatten().nonzero()[:, 0]
    if total == len(places):  # nothing is shared
        return _Plan(rows, (batch, width), None, places[source.argsort()].to(device))
    return _Plan(rows, (batch, width), source.to(device), places.to(device))


def _longest(config: Any) -> float:
    """Return up to which length of a batch rotary embeddings do not depend on this length."""
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if part.get("rope_type") in ("dynamic", "longrope"):
            name = "original_max_position_embeddings"
            given = (part.get(name), getattr(config, name, None), config.max_position_embeddings)
            return float(min(length for length in given if length))
    return math.inf


@torch.no_grad()
def _trial_error(module: nn.Module, run: Callable[..., Any]) -> float:
    """Return the largest error of a token in a packed batch, relative to what its dtype allows.

    Windows are made short, so that they matter, and attention shows its dropout.
    """
    device = module.get_input_embeddings().weight.device  # type: ignore[operator]
    generator, vocabulary = torch.Generator().manual_seed(0), _config(module).vocab_size
    ids = torch.randint(vocabulary, (3, 9), generator=generator)
    ids[2, 2:6] = ids[0, :4]  # where it begins
    mask = torch.ones_like(ids)
    mask[0, 8:] = mask[1, :4] = mask[2, :2] = 0
    ids, mask, was_packed = ids.to(device), mask.to(device), False

    def watched(**inputs: Any) -> Any:
        nonlocal was_packed
        was_packed = "position_ids" in inputs
        return run(**inputs)

    with contextlib.ExitStack() as stack:
        gpus = [device] if device.type == "cuda" else []
        for context in (
            evaluating(module),
            torch.random.fork_rng(gpus),
            _short_windows(module),
            *map(runtime_hooks_only, (None, *module.modules())),
        ):
            stack.enter_context(context)
        for part in module.modules() if shares_prefixes(module) else ():
            part.training = "attention" in type(part).__name__.lower()  # not the modules in it
        packed = packed_forward(module, watched)(
            input_ids=ids, attention_mask=mask
        ).last_hidden_state
        if not was_packed:
            raise ValueError("the configuration asks for hidden states, attentions or a tuple")
        eps = max(torch.finfo(dtype).eps for dtype in (packed.dtype, torch.float32))
        times = 0.0
        for row, real, found in zip(ids, mask == 1, packed, strict=True):
            out = run(input_ids=row[real][None], use_cache=False).last_hidden_state[0].float()
            error = (out - found[real]).norm(dim=1)
            # a feature that is large in all tokens would hide an error if norms alone counted
            apart = (out - out.sort(0).values[len(out) // 2]).norm(dim=1)
            allowed = math.sqrt(eps) * apart + 2 * eps * out.norm(dim=1)
            ratio = torch.where(error == 0, 0.0, error / allowed).nan_to_num(math.inf)
            times = max(times, float(ratio.max()))
    return times


@contextlib.contextmanager
def _short_windows(module: nn.Module) -> Iterator[None]:
    """Give sliding windows in the module and its configuration 3 tokens."""
    owners = [*module.modules(), *(x.config for x in module.modules() if hasattr(x, "config"))]
    found = [(vars(owner), vars(owner).get("sliding_window")) for owner in owners]
    own = [(attributes, window) for attributes, window in found if isinstance(window, int)]
    if not own and "sliding_attention" in (getattr(_config(module), "layer_types", None) or ()):
        raise ValueError("no attribute sliding_window holds the length of its windows")
    try:
        for attributes, _ in own:
            attributes["sliding_window"] = 3
        yield
    finally:
        for attributes, window in reversed(own):
            attributes["sliding_window"] = window
