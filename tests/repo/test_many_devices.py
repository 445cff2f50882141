"""The scripts that `docs/many-devices.md` links compute the same on two processes as on one."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fastrl
from tests.integrations.packages import needed
from tests.ops.ranks.gloo_ranks import on_ranks

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "many-devices.md").read_text()
#: The scripts that the page links: one for TRL, and whole loops.
SCRIPTS = {
    name: (ROOT / "docs" / name).read_text() for name in re.findall(r"\]\((\w+\.py)\)", TEXT)
}
TRL = SCRIPTS.pop("trl_ranks.py")
#: How a test starts the page's script for TRL: as it is, but FSDP2 on a CPU.
STARTED = """
import sys
from tests.integrations.trl.ranks import choose_cpu

choose_cpu(sys.argv[1])
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
    pytest.mark.skipif(sys.platform != "linux", reason="the loopback device is named as on Linux"),
]


def printed(code, world, directory, *arguments, **environment):
    """The numbers that a script prints on the first of `world` ranks, by line."""
    path = directory / f"on{world}.py"
    path.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world), str(path), *arguments]
    place = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for _ in range(2):
        done = subprocess.run(
            command, cwd=directory, env={**os.environ, **place, **environment},
            capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        # seldom a thread of torch's is still there when a process ends, which aborts it
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    return torch.tensor([[float(word) for word in line] for line in lines], dtype=torch.float64)


def test_trl_trains_on_two_processes(tmp_path):
    """Steps, norms of gradients, rewards and lengths are the same under DDP and FSDP2."""
    needed("trl")
    ddp = printed(TRL, 2, tmp_path, ACCELERATE_USE_CPU="1")
    fsdp2 = printed(STARTED + TRL, 2, tmp_path, "fsdp2", CUDA_VISIBLE_DEVICES="")
    assert ddp[:, 0].tolist() == [1, 2, 3]
    assert ddp[:, 1].min() > 0.1
    torch.testing.assert_close(fsdp2, ddp, rtol=1e-4, atol=1e-6)


def test_trl_trains_without_a_launcher(tmp_path):
    """One process has no process group, which the script must not expect at its end."""
    needed("trl")
    path = tmp_path / "alone.py"
    path.write_text(TRL)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line[:1] for line in done.stdout.splitlines() if line[:1].isdigit()] == ["1", "2", "3"]


def test_there_are_two_short_scripts():
    assert list(SCRIPTS) == ["fsdp.py", "tensor_parallel.py"]
    assert max(len(code.splitlines()) for code in SCRIPTS.values()) <= 63
    for name in SCRIPTS:
        assert SCRIPTS[name].startswith(f"# torchrun --standalone --nproc-per-node 2 {name}\n")


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_processes_print_what_one_does(name, tmp_path):
    """Losses, metrics and norms of gradients of three optimizer steps."""
    if "transformers" in SCRIPTS[name]:
        needed("transformers")
    one, two = (printed(SCRIPTS[name], world, tmp_path) for world in (1, 2))
    assert one[:, 0].tolist() == [0, 1, 2]
    assert one[:, 1:].abs().max() > 1e-3
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)


def test_every_function_with_a_group_is_in_the_table():
    for argument in ("process_group", "vocab_group"):
        rows = [line for line in TEXT.splitlines() if f"| `{argument}` |" in line]
        named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
        functions = {name: getattr(fastrl, name) for name in fastrl.__all__}
        assert named == {
            name
            for name, function in functions.items()
            if inspect.isfunction(function) and argument in inspect.signature(function).parameters
        }


def gathered_positions():
    """Gradients of the head's rows and of all hidden states, of which a rank has a part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    hidden, weight = torch.randn(2, 6, 8), torch.randn(11, 8)
    ids, scores, mask = torch.randint(11, (2, 6)), torch.randn(2), torch.ones(2, 6)
    states = distribute_tensor(hidden, mesh, [Shard(1)]).requires_grad_()
    head = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    for vector in (hidden, weight):
        vector.requires_grad_()
    fastrl.linear_policy_loss(hidden, weight, ids, scores, mask).loss.backward()
    whole = states.full_tensor(grad_placements=[Partial()])
    loss = fastrl.linear_policy_loss(whole, head, ids, scores, mask, reduce_hidden_gradient=False)
    loss.loss.backward()
    assert states.grad.placements == (Shard(1),)
    return [hidden.grad, weight.grad], [states.grad.full_tensor(), head.grad.full_tensor()]


def test_gathered_positions_get_the_whole_gradient():
    """As the text says of sequence parallelism, and of a head without `vocab_group`."""
    for expected, found in on_ranks(2, gathered_positions):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
