"""The numbers of a step beside the progress bar, short enough for its line."""

from collections.abc import Mapping

#: The key in the log, its name on the bar, its digits; the most important first.
_SHOWN = (
    ("reward", "reward", 3),
    ("held_out_reward", "held_out", 3),
    ("loss", "loss", 3),
    ("accuracy", "accuracy", 3),
    ("held_out_accuracy", "held_out", 3),
    ("kl", "kl", 2),
    ("kl_old", "kl_old", 2),
    ("entropy", "entropy", 2),
    ("clip_fraction", "clip", 2),
    ("tokens_per_second", "tok/s", 3),
)


def on_bar(row: Mapping[str, float]) -> dict[str, str]:
    """What the bar shows of a row of the log.

    Besides losses and rewards: the phase that takes the longest, with its share of all phases, and
    the largest of their memory peaks in GB (1e9 bytes).
    """
    hidden = "kl_old" if "kl" in row else "kl"
    shown = {
        name: _short(row[key], digits)
        for key, name, digits in _SHOWN
        if key in row and key != hidden
    }
    seconds = {key: value for key, value in row.items() if key.startswith("seconds_")}
    if total := sum(seconds.values()):
        longest = max(seconds, key=lambda key: seconds[key])
        shown[longest.removeprefix("seconds_")] = f"{seconds[longest] / total:.0%}"
    peaks = [value for key, value in row.items() if key.startswith("peak_gb_")]
    if peaks:
        shown["GB"] = _short(max(peaks), 3)
    return shown


def _short(value: float, digits: int) -> str:
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.{digits}g}"
