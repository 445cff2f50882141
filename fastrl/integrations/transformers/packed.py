"""The forward of a backbone on a padded batch, computed without the padding.

    module.forward = packed_forward(module, module.forward)

The tokens of all sequences lie in one row ``[1, L]``, in which equal prefixes of sequences are
computed once. The hidden states come back in the padded layout ``[B, T, H]``, so callers notice
nothing. Positions begin at 0 in each sequence.

With sdpa, the layers hand the layout of the row to the attention as the keyword ``sequences``.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from fastrl.integrations.transformers.by_sequence import (
    Layout,
    Span,
    attend_by_sequence,
    make_layout,
)
from fastrl.integrations.transformers.hooks import runtime_hooks_only
from fastrl.integrations.transformers.packing import Unit, ranges, rows_of, shared_prefixes
from fastrl.integrations.transformers.random_rows import evaluating

#: Attention that finds the sequences of a row by the positions.
_BY_POSITIONS = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
#: Arguments of a call that can be packed; any other must be None.
_KNOWN = {"input_ids", "attention_mask", "use_cache", "output_router_logits", "return_dict"}
_OFF = ("output_hidden_states", "output_attentions")


class Sequences:
    """The layout of a row, which a compiled graph does not look into."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans
        self._layouts: dict[torch.device, Layout] = {}

    def on(self, device: torch.device) -> Layout:
        """Return the layout on a device: the layers may lie on several."""
        if device not in self._layouts:
            self._layouts[device] = make_layout(self._spans, device)
        return self._layouts[device]


_sdpa: Any = AttentionInterface()["sdpa"]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return sdpa's attention, by sequence in a packed row."""
    if not isinstance(options.get("sequences"), Sequences):
        return _sdpa(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    return _attend_packed(module, query, key, value, **options)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sequences: Sequences,
    **options: Any,
) -> tuple[Tensor, None]:
    causal = options.pop("is_causal", None)
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError("attention must be causal in packed rows")
    layout = sequences.on(query.device)
    return attend_by_sequence(module, query, key, value, None, sequences=layout, **options)


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
        tokens: The most tokens per row. With several rows, each one's activations are recomputed in
            the backward, so that the memory is that of one row. By default there is one row.

    Returns:
        A function with the arguments of `run`.
    """
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    longest = _longest(module.config.get_text_config())  # type: ignore[union-attr, operator]

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(*args: Any, **inputs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | inputs
        plan = None
        if _is_known(given, module.config) and given["input_ids"].shape[1] <= longest:
            shares = shares_prefixes(module)
            plan = _plan(given["input_ids"], given.get("attention_mask"), tokens, shares)
        if plan is None:
            return run(*args, **inputs)
        names_of_options = ("output_router_logits", "return_dict")
        options = {name: given[name] for name in names_of_options if given.get(name) is not None}
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

    return forward


def why_not_packed(module: nn.Module) -> str | None:
    """Return why packed rows would give wrong results, or None if they are right.

    A trial compares three short sequences in a row with each alone. If the parameters are sharded,
    it must run inside the forward of the wrappers, on all ranks: see `is_whole`.

    Args:
        module: The backbone of a `transformers` causal language model.
    """
    config: Any = module.config.get_text_config()  # type: ignore[union-attr, operator]
    attention = config._attn_implementation
    if attention != "sdpa" and attention not in _BY_POSITIONS:
        return f"its attention is {attention}, not one of sdpa, {', '.join(_BY_POSITIONS)}"
    other = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if other:
        return f"it has layers of {', '.join(sorted(other))}"
    if getattr(config, "attention_chunk_size", None):
        return "it has attention in chunks"
    if getattr(config, "is_causal", True) is False:
        return "its attention is bidirectional"
    if attention == "sdpa" and _has_attention_dropout(module):
        return "its attention has dropout"
    try:
        error = _trial_error(module)
    except Exception as error:
        return f"a trial raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if error <= 1:
        return None
    return f"sequences in a row have other results than each alone, {error:.2g} times what rounds"


def shares_prefixes(module: nn.Module) -> bool:
    """Return whether equal prefixes are computed once: only with sdpa."""
    config: Any = module.config.get_text_config()  # type: ignore[union-attr, operator]
    return bool(config._attn_implementation == "sdpa")


def is_whole(module: nn.Module) -> bool:
    """Return whether `why_not_packed` can run now: FSDP and ZeRO-3 shard no parameter."""
    parameters = list(module.parameters())
    marks = ("full_tensor", "ds_id", "_fsdp_flattened")
    sharded = any(hasattr(p, mark) or p.is_meta for p in parameters for mark in marks)
    return bool(parameters) and not sharded


def _is_known(given: dict[str, Any], config: Any) -> bool:
    """Return whether a call has only token ids and a 2-D mask, and asks for nothing else."""
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if ids is None or ids.ndim != 2 or not (mask is None or isinstance(mask, Tensor)):
        return False
    wanted = (given.get(name) for name in _OFF)
    outputs = [getattr(config, n, False) if w is None else w for n, w in zip(_OFF, wanted)]
    as_tuple = given.get("return_dict")
    if as_tuple is None:
        as_tuple = getattr(config, "return_dict", True)
    others = [name for name, x in given.items() if x is not None and name not in (*_KNOWN, *_OFF)]
    fits = mask is None or mask.shape == ids.shape
    return fits and as_tuple is not False and not any(outputs) and not others


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
            found[part.sequence] = done + torch.cat(
                [torch.arange(*part.prefix), torch.arange(*part.own)]
            )
        first, places, counts = torch.tensor(pieces).unbind(1)
        inputs: dict[str, Any] = {
            "input_ids": ids.flatten()[ranges(places, counts)][None].to(device),
            "position_ids": ranges(first, counts)[None].to(device),
        }
        if shares:
            # transformers passes on a mask of four dimensions; `_attend` does not look at it
            inputs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
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
    limits = [math.inf]
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if part.get("rope_type") in ("dynamic", "longrope"):
            own = (config, "original_max_position_embeddings", math.inf)
            limits += [
                config.max_position_embeddings,
                part.get(own[1]) or getattr(*own) or math.inf,
            ]
    return min(limits)


def _has_attention_dropout(module: nn.Module) -> bool:
    for part in module.modules():
        if "attention" in type(part).__name__.lower():
            for name, value in (*vars(part).items(), *part.named_children()):
                p = value.p if isinstance(value, nn.Dropout) else value
                others = any(word in name for word in ("resid", "hidden"))
                if "drop" in name and not others and isinstance(p, float) and p > 0:
                    return True
    return False


@torch.no_grad()
def _trial_error(module: nn.Module) -> float:
    """Return the largest error of a packed batch, relative to what its dtype allows.

    Windows are made short, so that they matter.
    """
    config: Any = module.config.get_text_config()  # type: ignore[union-attr, operator]
    device = module.get_input_embeddings().weight.device  # type: ignore[operator]
    ids = torch.randint(config.vocab_size, (3, 9), generator=torch.Generator().manual_seed(0))
    ids[2, 2:6] = ids[0, :4]  # sequence 2 begins at 2
    mask = torch.ones_like(ids)
    mask[0, 8:] = mask[1, :4] = mask[2, :2] = 0
    ids, mask, was_packed = ids.to(device), mask.to(device), False

    def run(**inputs: Any) -> Any:
        nonlocal was_packed
        was_packed = "position_ids" in inputs
        return module.forward(**inputs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluating(module))
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(_short_windows(module))
        for part in module.modules():
            stack.enter_context(runtime_hooks_only(part))
        together = packed_forward(module, run)(input_ids=ids, attention_mask=mask)
        packed = together.last_hidden_state
        if not was_packed:
            raise ValueError("the configuration asks for all hidden states or attentions")
        error = largest = 0.0
        for row, real, found in zip(ids, mask == 1, packed, strict=True):
            out = module.forward(input_ids=row[real][None], use_cache=False).last_hidden_state[0]
            error = max(error, float((out - found[real]).abs().max().nan_to_num(math.inf)))
            largest = max(largest, float(out.abs().max()))
    return error / (largest * math.sqrt(torch.finfo(packed.dtype).eps))


@contextlib.contextmanager
def _short_windows(module: nn.Module) -> Iterator[None]:
    """Give sliding windows in the module and its configuration 3 tokens."""
    owners = [*module.modules(), *(x.config for x in module.modules() if hasattr(x, "config"))]
    own = [(vars(x), vars(x)["sliding_window"]) for x in owners if "sliding_window" in vars(x)]
    own = [(attributes, window) for attributes, window in own if isinstance(window, int)]
    try:
        for attributes, _ in own:
            attributes["sliding_window"] = 3
        yield
    finally:
        for attributes, window in reversed(own):
            attributes["sliding_window"] = window
