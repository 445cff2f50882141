"""The ranks of a run: which one this is, and how they exchange results and errors.

Every rank has the same random state and sees the whole batch of a step; only the work on it is
divided. Between exchanges a rank runs the same code as a single process would. Without a process
group there is one rank, and nothing is exchanged.
"""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

#: How long a rank with an error waits for the others to have one.
SECONDS_FOR_OTHERS = 10.0

_exchange: dist.ProcessGroup | None = None
_store: Any = None
_alone = False
_GONE = "gone"


class RankError(OSError):
    """Another rank has failed or is gone."""


class _Failure(NamedTuple):
    rank: int
    error: Exception


def count() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if _is_group() else 1


def index() -> int:
    """Which rank this is."""
    return dist.get_rank() if _is_group() else 0


def is_first() -> bool:
    """Whether this is the rank that writes files, locks, logs and prints."""
    return index() == 0


def together(compute: Callable[[], T]) -> list[T]:
    """Compute something on each rank; return the results of all ranks, by rank.

    Nothing in ``compute`` may wait for another rank.

    Raises:
        Exception: What ``compute`` raised on the first rank where it failed, on all ranks. If an
            exception cannot be sent, it is a `RuntimeError` on the others.
    """
    if count() == 1:
        return [compute()]
    try:
        mine: Any = compute()
    except Exception as error:  # must reach all ranks, whatever it is
        mine = _Failure(index(), error)
    results: list[Any] = [None] * count()
    dist.all_gather_object(results, _sendable(mine), group=_group())
    for result in results:
        if isinstance(result, _Failure):
            failure: Any = mine.error if result.rank == index() else result.error
            failure.on_all_ranks = True
            raise failure
    results[index()] = mine
    return results


def agreed(compute: Callable[[], T]) -> T:
    """Compute something on each rank, and raise its error on all; the results are not sent."""
    kept: list[T] = []
    together(lambda: kept.append(compute()))
    return kept[0]


def from_first(compute: Callable[[], T]) -> T:
    """Compute something on the first rank alone; return it, or raise its error, on all ranks."""
    return together(lambda: compute() if is_first() else None)[0]  # type: ignore[return-value]


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is true on any rank."""
    return any(together(lambda: flag))


def add_up(tensor: Tensor) -> Tensor:
    """Add a tensor up over the ranks, in place; its bits are then the same on all of them."""
    if count() > 1:
        dist.all_reduce(tensor)
    return tensor


def on_all_ranks(error: Any) -> bool:
    """Whether the other ranks have an error as well, so that they can still work together.

    If this rank alone has it, the others wait for this one in the middle of their work.
    """
    if not hasattr(error, "on_all_ranks"):
        error.on_all_ranks = _all_arrive(SECONDS_FOR_OTHERS)
    return bool(error.on_all_ranks)


def explained(error: Exception) -> Exception:
    """The error, or a `RankError` if it is the consequence of another rank's."""
    if count() == 1 or isinstance(error, RankError) or on_all_ranks(error):
        return error
    if not is_of_exchange(error):  # its own, which the others wait for
        return error
    announced = _announced()
    if announced:
        why = "another rank has failed, and its message tells why"
    elif announced is None:
        why = "the first rank has ended; its message tells why, unless the system killed it"
    else:
        why = (
            "another rank has ended without a message (the system may have killed it for lack of "
            "memory), or did not answer in time"
        )
    consequence: Any = RankError(why)
    consequence.on_all_ranks = False
    return consequence  # type: ignore[no-any-return]


@contextmanager
def explaining() -> Iterator[None]:
    """Raise what `explained` makes of an error."""
    try:
        yield
    except Exception as raised:
        error = explained(raised)
        if error is raised:
            raise
        raise error from raised


def is_of_exchange(error: BaseException) -> bool:
    """Whether an exchange with other ranks failed; gloo's errors have no type of their own."""
    return isinstance(error, (RankError, dist.DistError)) or (
        isinstance(error, RuntimeError) and "/gloo/transport/" in str(error)
    )


def go_on_alone() -> None:
    """Take this rank for the only one from now on: the others have failed."""
    global _alone
    _alone = True


def use_for_exchange(group: dist.ProcessGroup | None, store: Any) -> None:
    """Exchange results and errors over this group of all ranks, and look for them in the store.

    Args:
        group: Must be gloo's.
        store: Of torch.distributed, which must have no keys.
    """
    global _exchange, _store, _alone
    _exchange, _store, _alone = group, store, False


def _is_group() -> bool:
    return dist.is_available() and dist.is_initialized() and not _alone


def _all_arrive(seconds: float) -> bool:
    if count() == 1:
        return True
    if _announced() is not False:
        return False
    try:  # not monitored_barrier: only its first rank has a timeout
        for stage in ("arrived", "stayed"):
            _store.set(f"{stage}/{index()}", "")
            keys = [f"{stage}/{rank}" for rank in range(count())]
            _store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError:
        with suppress(RuntimeError):
            _store.set(_GONE, str(index()))
        return False
    return True


def _announced() -> bool | None:
    """Whether another rank has failed and said so; None if the first is gone, with the store."""
    try:
        return bool(_store.check([_GONE])) and _store.get(_GONE) != str(index()).encode()
    except RuntimeError:
        return None


def _group() -> dist.ProcessGroup:
    if _exchange is None:
        raise RuntimeError(
            "torch.distributed is initialized, but not by fastrl.train.distributed.process_group"
        )
    return _exchange


def _sendable(result: Any) -> Any:
    if not isinstance(result, _Failure):
        return result
    error = result.error
    try:
        pickle.loads(pickle.dumps(error))  # some raise only when they are loaded
    except Exception:
        return result._replace(error=RuntimeError(f"{type(error).__name__}: {error}"))
    return result
