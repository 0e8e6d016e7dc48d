"""A comparison as data and as a page; every trial is in the data."""

import statistics
from collections.abc import Sequence

from experiments.study import RANDOM_TRIALS, Budget, Trial
from experiments.systems import System

HEADS = (
    "system",
    "parameters",
    "ms per update",
    "symbols read",
    "trials (failed)",
    "valid, best",
    "valid, median",
    "valid, other seeds",
    "test",
    "options of the best",
)


def entry_of(system: System, trials: Sequence[Trial], repeats: Sequence[dict]) -> dict:
    """Returns one system's trials and repeated trainings as plain data."""
    return {"system": system.name, "trials": [trial.__dict__ for trial in trials], "repeats": list(repeats)}


def render(results: dict) -> str:
    """Returns the page of a comparison.

    Args:
        results: what ``tune.run`` stores: ``corpus``, ``budget``, ``seed``, ``machine``, ``versions``,
            ``commit``, ``day``, ``command``, and in ``systems`` the ``entry_of`` every system.
    """
    budget = Budget(**results["budget"])
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    equal, each = "time", f"{budget.seconds:g} s of processor time for their updates"
    if budget.symbols is not None:
        equal, each = "text", f"{budget.symbols:,} symbols"
    lines = [
        f"# Systems at {budget.parameters:,} parameters and equal {equal}",
        "",
        f"{results['corpus']}. Every system has at most {budget.parameters:,} parameters, and "
        f"{budget.trials} trials of {each}. The first trial has the starting values; those up to the "
        f"{RANDOM_TRIALS}th are drawn at random, the others by Optuna's TPE (seed {results['seed']}). The "
        "width follows from the parameters. Bits per character of the valid split, protocol carry:32. The "
        "figures of other seeds, and those of the test split, are of the best trial's options. No system has "
        "converged: the table compares what a short training gives.",
        "",
        f"| {' | '.join(HEADS)} |",
        "|---" * len(HEADS) + "|",
        *(_line(entry, budget) for entry in sorted(results["systems"], key=_best)),
        "",
        f"{results['machine']}; {versions}; commit {results['commit']}; {results['day']}; "
        f"`{results['command']}`. Every trial is in the JSON file beside this page.",
        "",
    ]
    return "\n".join(lines)


def _best(entry: dict) -> float:
    return min((t["bpc"] for t in entry["trials"] if t["bpc"] is not None), default=float("inf"))


def _line(entry: dict, budget: Budget) -> str:
    good = [trial for trial in entry["trials"] if trial["bpc"] is not None]
    count = f"{len(entry['trials'])} ({len(entry['trials']) - len(good)})"
    if not good:
        problem = entry["trials"][-1]["problem"].replace("|", "\\|")
        return f"| {entry['system']} | | | | {count} | | | | | {problem} |"
    best = min(good, key=lambda trial: trial["bpc"])
    options = {name: value for name, value in best["options"].items() if name != "cell"}
    shown = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in options.values())
    cells = [
        entry["system"],
        f"{best['parameters']:,}",
        f"{1e3 * best['seconds_per_update']:.0f}",
        f"{best['updates'] * best['options']['batch_size'] * budget.length:,}",
        count,
        f"{best['bpc']:.4f}",
        f"{statistics.median(trial['bpc'] for trial in good):.4f}",
        *(_spread([r[name] for r in entry["repeats"] if name in r]) for name in ("valid", "test")),
        ", ".join(f"{name.replace('_', ' ')} {text}" for name, text in zip(options, shown, strict=True)),
    ]
    return f"| {' | '.join(cells)} |"


def _spread(values: list[float]) -> str:
    if len(values) < 2:
        return "".join(f"{value:.4f}" for value in values)
    return f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"
