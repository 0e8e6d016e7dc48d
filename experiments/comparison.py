"""The comparison as data and as a page."""

import statistics
from collections.abc import Sequence

from experiments.study import RANDOM_TRIALS, Budget, Trial
from experiments.systems import SPACE, System

# Options that the page shows separately.
_APART = ("cell", "hidden_size")


def entry_of(system: System, trials: Sequence[Trial], repeats: Sequence[dict]) -> dict:
    """Returns one system's trials and repeated trainings as plain data."""
    trials_data = [trial.__dict__ for trial in trials]
    return {"system": system.name, "trials": trials_data, "repeats": list(repeats)}


def render(results: dict) -> str:
    """Returns the page of a comparison.

    Args:
        results: what ``program.run`` stores: ``corpus``, ``budget``, ``seed``, ``machine``, ``versions``,
            ``commit``, ``day``, ``command``, and in ``systems`` the ``entry_of`` every system.
    """
    budget = Budget(**results["budget"])
    entries = sorted(results["systems"], key=_best)
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    equal, each = "time", f"{budget.seconds:g} s of processor time for their updates"
    if budget.symbols is not None:
        equal, each = "text", f"{budget.symbols:,} symbols"
    lines = [
        f"# Systems at {budget.parameters:,} parameters and equal {equal}",
        "",
        f"{results['corpus']}. Every system has at most {budget.parameters:,} parameters, and "
        f"{budget.trials} trials of {each}. The first trial has the starting values; "
        f"{_search(budget.trials)} (seed {results['seed']}). The width follows from the parameters. Adam; "
        "the rate falls linearly to zero within the trial unless a system says otherwise. Bits per character "
        "of the valid split, protocol carry:32. The figures of other seeds, and those of the test split, are "
        "of the best trial's options. No system has converged: the table compares what a short training "
        "gives.",
        "",
        *_table(entries, budget),
        "",
        *_space(),
        "",
        "## Trials",
        "",
        *_trials(entries),
        "",
        f"{results['machine']}; {versions}; commit {results['commit']}; {results['day']}; "
        f"`{results['command']}`",
        "",
    ]
    return "\n".join(lines)


def _search(trials: int) -> str:
    if trials <= RANDOM_TRIALS:
        return "the others are drawn at random"
    return f"those up to the {RANDOM_TRIALS}th are drawn at random, the others by Optuna's TPE"


def _best(entry: dict) -> float:
    return min((t["bpc"] for t in entry["trials"] if t["bpc"] is not None), default=float("inf"))


def _table(entries: list[dict], budget: Budget) -> list[str]:
    heads = (
        "system | parameters | ms per update | symbols read | trials (failed) | valid, best | valid, median"
    )
    heads += " | valid, other seeds | test | options of the best"
    lines = [f"| {heads} |", "|---" * 10 + "|"]
    for entry in entries:
        good = [trial for trial in entry["trials"] if trial["bpc"] is not None]
        failed = len(entry["trials"]) - len(good)
        if not good:
            lines.append(f"| {entry['system']} | | | | {len(entry['trials'])} ({failed}) | | | | | |")
            continue
        best = min(good, key=lambda trial: trial["bpc"])
        read = best["updates"] * best["options"]["batch_size"] * budget.length
        cells = [
            entry["system"],
            f"{best['parameters']:,}",
            f"{1e3 * best['seconds_per_update']:.0f}",
            f"{read:,}",
            f"{len(entry['trials'])} ({failed})",
            f"{best['bpc']:.4f}",
            f"{statistics.median(trial['bpc'] for trial in good):.4f}",
            *(_spread(entry["repeats"], name) for name in ("valid", "test")),
            _options(best["options"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _spread(repeats: list[dict], name: str) -> str:
    values = [repeat[name] for repeat in repeats if name in repeat]
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def _options(options: dict) -> str:
    shown = {name: value for name, value in options.items() if name not in _APART}
    words = [f"hidden {options.get('hidden_size', '?')}"]
    words += [
        f"{name.replace('_', ' ')} {value:.3g}"
        if isinstance(value, float)
        else f"{name.replace('_', ' ')} {value}"
        for name, value in shown.items()
    ]
    return ", ".join(words)


def _space() -> list[str]:
    lines = ["| searched | range | first trial |", "|---|---|---|"]
    return lines + [f"| {name.replace('_', ' ')} | {axis} | {axis.start:g} |" for name, axis in SPACE.items()]


def _trials(entries: list[dict]) -> list[str]:
    lines = ["| system | valid | updates | options |", "|---|---|---|---|"]
    for entry in entries:
        for trial in entry["trials"]:
            figure = f"failed: {trial['problem']}" if trial["bpc"] is None else f"{trial['bpc']:.4f}"
            lines.append(
                f"| {entry['system']} | {figure} | {trial['updates']:,} | {_options(trial['options'])} |"
            )
    return lines
