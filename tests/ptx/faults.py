"""Faults put by hand into the PTX of the real kernels, each with a call that must find it."""

import ctypes
import dataclasses
import functools
import re

import numpy as np
import torch

import fastrl
from tests.ptx.machine import machine


def one_pass(backend, V, rows=(2, 12)):
    logits = torch.randn(*rows, V, requires_grad=True)
    given = torch.randint(V, rows), torch.randn(rows[0]), torch.ones(rows)
    loss = fastrl.logits_policy_loss(logits * 1, *given, backend=backend).loss
    return [loss, *torch.autograd.grad(loss, logits)]


def logprobs(backend, V, rows=(2, 3), **options):
    logits = torch.randn(*rows, V, requires_grad=True)
    found = fastrl.token_logprobs(logits * 1, torch.randint(V, rows), backend=backend, **options)
    return [found, *torch.autograd.grad(found.sum(), logits)]


def far_rows(backend, V=1001):
    """Two rows 4 GiB apart; what lies between them is no tensor, and its pages are not touched."""
    stride = 2**30 + 64
    memory = np.zeros(stride + V, np.float32)
    places = [ctypes.c_uint64(memory.ctypes.data + 4 * at) for at in (0, stride)]
    logits = torch.from_numpy(memory).as_strided((1, 2, V), (0, stride, 1))
    logits[:] = torch.linspace(-3, 3, V)
    for place in places:
        machine().library.ptx_tensor(place, ctypes.c_uint64(4 * V))
    try:
        return [fastrl.token_logprobs(logits, torch.tensor([[3, 5]]), backend=backend)]
    finally:
        for place in places:
            machine().library.ptx_forget(place)


def policy_loss(backend, B=4, T=3000, **options):
    given = torch.randn(B), torch.ones(B, T)
    logprobs = torch.randn(B, T, requires_grad=True)
    options |= {"old_logprobs": torch.randn(B, T), "backend": backend}
    loss = fastrl.policy_loss(logprobs, *given, **options).loss
    return [loss, *torch.autograd.grad(loss, logprobs)]


def gae(backend, B=2, T=9000):
    return [*fastrl.gae(torch.randn(B, T), torch.randn(B, T), torch.ones(B, T), backend=backend)]


@dataclasses.dataclass
class Fault:
    """`pattern` is replaced where it first matches behind `after`, or wherever it does."""

    kernel: str  # a part of its name
    call: functools.partial
    message: str  # empty: it shows in the values alone
    after: str
    pattern: str
    replacement: str = ""
    everywhere: bool = False

    def put_into(self, ptx, name):
        """Return the text of the kernel with this fault, and the names of its files."""
        begin = ptx.index(f".entry {name}(")
        body = ptx[begin : ptx.index("\n}\n", begin) + 3]
        at = re.search(self.after, body, re.S).end()
        count = 0 if self.everywhere else 1
        edited, found = re.subn(self.pattern, self.replacement, body[at:], count=count, flags=re.S)
        assert found > 0, self.pattern
        return "\n".join([*re.findall(r"^\s*\.file.*$", ptx, re.M), body[:at] + edited])


call = functools.partial
#: Two blocks share a row; only what is not aligned is also copied by threads, and needs the fence.
ROWS, ALIGNED_ROWS = call(one_pass, "cuda", 1003), call(one_pass, "cuda", 1008)
CHUNKS, TOKENS = call(gae, "cuda"), call(policy_loss, "cuda")
ONE_PASS, ALIGNED = "one_pass_cluster_kernelIfLb0ELb0E", "one_pass_cluster_kernelIfLb1ELb0E"
STATS, STATS_BACKWARD = "token_stats_kernelIfLb0ELb0E", "token_stats_backward_kernelIfLb1ELb0E"
SYNC, SYNC_WARP = r"bar\.sync\s+0;", r"bar\.warp\.sync\s+-1;"
SYNC_CLUSTER = r"barrier\.cluster\.arrive\.release;\s*barrier\.cluster\.wait\.acquire;"
EXPECT = r"mbarrier\.arrive\.expect_tx\S+ _, \[%r\d+\], (%r\d+);"
SEND = r"st\.async\.\S+v4\.b32 \[(%r\d+)\], \{[^}]*\}, \[(%r\d+)\];"
RANKS = r"(mapa\S+ %r\d+, %r\d+, )(%r\d+)(;[^;]*mapa\S+ %r\d+, %r\d+, )\2(;[^;]*st\.async)"
AGAIN = r"\{\s*\.reg \.pred done;\s*again:\s*mbarrier\.try_wait\.parity"
WAIT, WAIT_CLUSTER = (
    rf"{AGAIN}\.{scope}shared\S+ done, \[%r\d+\], (%r\d+);" for scope in ("", r"acquire\.cluster\.")
)
FLIP = r"xor.b32 \1, \1, 1;\n\g<0>"
SHUFFLE = r"shfl\.sync\.bfly[^;]*;"
STUCK = "nothing moves any more|deadlock"


def where(condition, instruction):
    """Return the instruction, and what follows in the text, for some lanes only."""
    return f"{{ .reg .pred some;\nsetp.{condition};\n@some {instruction}\n\t}}"


FAULTS = {
    "mbarrier not initialised": Fault(ONE_PASS, ROWS, "mbarrier that was not initialised",
        "fence.mbarrier_init", r"mbarrier\.init\S+ \[%r\d+\], 1;"),
    "mbarrier initialised behind the barrier": Fault(ONE_PASS, ROWS,
        "signals an mbarrier initialised by block",
        "fence.mbarrier_init", rf"(mbarrier\.init\S+ \[%r\d+\], 1;)(.*?{SYNC_CLUSTER})",
        r"\2\n" + where("lt.u32 some, %tid.x, 2", r"\1")),
    "no barrier of the cluster": Fault(ONE_PASS, ROWS, "block that may not run yet",
        "", SYNC_CLUSTER),
    "no barrier before stores to another block": Fault(STATS, call(logprobs, "cuda", 1003),
        "block that may not run yet", "", SYNC_CLUSTER),
    "return while others send": Fault(ONE_PASS, ROWS, "exit",
        "", SYNC_CLUSTER, r"\g<0>\n" + where("ne.u32 some, %cluster_ctarank, 0", "ret;")),
    "no barrier before the next sum": Fault("policy_loss_of_sequences",
        call(policy_loss, "cuda", 2, 5000, objective="gspo"), "stores over what was loaded by",
        rf"st\.shared::cluster.*?{SYNC_CLUSTER}", SYNC_CLUSTER),
    "no barrier behind the sums of warps": Fault(ONE_PASS, ROWS, "race|nobody has written",
        r"st\.shared\.f32[^;]*\+8\], %f", SYNC),
    "no barrier behind the terms": Fault(ONE_PASS, ROWS, "race|nobody has written",
        r"try_wait\.parity\.acquire", SYNC),
    "no barrier before a stage is filled again": Fault(ALIGNED, ALIGNED_ROWS,
        "copy overwrites what was loaded by", rf"try_wait\.parity\.acquire.*?{SYNC}", SYNC),
    "no barrier of the warp behind inputs": Fault(ALIGNED, ALIGNED_ROWS, "race", "", SYNC_WARP),
    "no barrier of the warp behind staged vectors": Fault("gae_scan", CHUNKS, "race",
        "", SYNC_WARP),
    "no fence of the proxies": Fault(ONE_PASS, ROWS, "without fence.proxy.async",
        "", r"fence\.proxy\.async\S*;"),
    "parity for a stage": Fault(ONE_PASS, ROWS, f"parity is wrong|{STUCK}", "", WAIT, FLIP),
    "parity for other blocks": Fault(ONE_PASS, ROWS, f"parity is wrong|{STUCK}",
        "", WAIT_CLUSTER, FLIP),
    "16 bytes too few expected": Fault(ONE_PASS, ROWS, "race|nobody has written|" + STUCK,
        "try_wait", EXPECT, r"sub.s32 \1, \1, 16;\n\g<0>"),
    "4 bytes too many expected": Fault(ONE_PASS, ROWS, STUCK,
        "try_wait", EXPECT, r"add.s32 \1, \1, 4;\n\g<0>"),
    "16 bytes too few copied": Fault(ONE_PASS, ROWS, STUCK,
        "", EXPECT, r"\g<0>\nsub.s32 \1, \1, 16;"),
    "scope of the wait": Fault(ONE_PASS, ROWS, "loads what was stored by an asynchronous copy",
        "", r"parity\.acquire\.cluster\.", "parity."),
    "mbarrier of another block": Fault(ONE_PASS, ROWS, "to one block that signals another",
        "", RANKS, r"\1\2\g<3>0\4"),
    "all to block 0": Fault(ONE_PASS, ROWS, "overwrites what was stored by an asynchronous copy",
        "", RANKS, r"\g<1>0\g<3>0\4"),
    "mbarrier of the other stage": Fault(ONE_PASS, ROWS, STUCK,
        "", SEND, r"xor.b32 \2, \2, 8;\n\g<0>"),
    "a report 16 bytes too far": Fault(ONE_PASS, ROWS, "race|nobody has written",
        "", SEND, r"add.s32 \1, \1, 16;\n\g<0>"),
    "mask of half a warp": Fault(ONE_PASS, ROWS, "lane takes part that its mask leaves out",
        "", r"(shfl\.sync\.bfly[^;]*), %r\d+;", r"\1, 0xffff;"),
    "shuffle without lane 0": Fault(ONE_PASS, ROWS, "not all lanes of the mask come here",
        "", SHUFFLE, where("ne.u32 some, %laneid, 0", r"\g<0>")),
    "shuffle with lanes that returned": Fault(ONE_PASS, ROWS, "reads lane 16, which does not take",
        "", SHUFFLE, where("gt.u32 some, %laneid, 15", "ret;") + r"\n\g<0>"),
    "return before a barrier": Fault(ONE_PASS, ROWS, "race|nobody has written|exited",
        "", WAIT_CLUSTER, where("ne.u32 some, %cluster_ctarank, 0", "ret;") + r"\n\g<0>"),
    "no guard of a load": Fault(ONE_PASS, call(one_pass, "cuda", 1003, (1, 1)),
        "load outside of any tensor", r"cp\.async",
        r"@%p\d+ bra[^;]*;(?=[^@]*ld\.global\.f32[^@]*st\.shared\.f32)"),
    "no guard of a store": Fault("token_stats_bwd_kernel", call(logprobs, "triton", 1001, (1, 1)),
        "store outside of any tensor",
        r"(@%p\d+ st\.global\S*\.v4.*?){7}", r"@%p\d+ (?=st\.global)"),
    "vector at 4 bytes": Fault("gae_scan", CHUNKS, "misaligned access of 16 bytes",
        "", r"(st\.global\.cs\.v4\.u32 \[%rd\d+)\]", r"\1+4]"),
    "store before the row's loads": Fault(STATS_BACKWARD,
        call(logprobs, "cuda", 2048, inplace_backward=True), "stores over what was loaded by",
        "", SYNC),
    "index in 32 bits": Fault(STATS, call(far_rows, "cuda"), "load outside of any tensor",
        r"mul\.lo\.s64", r"mul\.lo\.s64\s+(%rd\d+), [^;]*;",
        r"\g<0>\nand.b64 \1, \1, 0xffffffff;"),
    "shared memory not initialised": Fault("gae_scan", CHUNKS, "nobody has written",
        r"atom\.global\.add", r"st\.shared\.u32[^;]*;"),
    "flag read without acquire": Fault("gae_scan", CHUNKS, "race: loads what was stored by",
        "", r"ld\.acquire", "ld.relaxed", everywhere=True),
    "flag set in a block's scope": Fault("gae_scan", CHUNKS, "race: loads what was stored by",
        "", r"st\.release\.gpu", "st.release.cta"),
    "flag set without release": Fault("gae_scan", CHUNKS, "race: loads what was stored by",
        "", r"st\.release", "st.relaxed"),
    "count of blocks relaxed": Fault("policy_loss_of_tokens", TOKENS,
        "race: loads what was stored by", "", r"atom\.add\.acq_rel", "atom.add.relaxed"),
    "count of programs relaxed": Fault("policy_loss_kernel", call(policy_loss, "triton"),
        "race: loads what was stored by", "", "acq_rel", "relaxed"),
    "no barrier of Triton": Fault("gae_kernel", call(gae, "triton", 2, 100), "race", "", SYNC),
    "exponential in half precision": Fault(STATS, call(logprobs, "cuda", 1001), "",
        "", r"ex2\.approx\.ftz\.f32 (%f\d+), %f\d+;", r"\g<0>\n{ .reg .b16 half;\n"
        r"cvt.rn.f16.f32 half, \1;\ncvt.f32.f16 \1, half;\n\t}", everywhere=True),
}  # fmt: skip
