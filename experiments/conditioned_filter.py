"""A resonant low-pass filter whose knob turns while it runs: who reads the knob, the input or a hypernetwork?

The network hears white noise and gives the filter's output. The filter is a state-variable filter of two
poles with quality factor 10; the knob moves its cutoff from 200 to 6,400 Hz at 16,000 samples a second, to
a new random place every 40 samples. The LSTM and the GRU read the knob as a second input; the hypernetworks
alone read it as ``context``. Every system has the same learning rates to choose from, by the validation
error of all seeds. The error is the energy of the difference, divided by that of the filter's output.

``python -m experiments.conditioned_filter`` trains what the record lacks, then prints the table;
``--picture FILE`` trains each system once more, at its best rate with the first seed, and draws it.
"""

import argparse
import json
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import nn

from rhhn_fairseq.files import replace_file
from rhhn_fairseq.inspection.plotting import colour_of, encode, new_figure, styled
from rhhn_fairseq.nn import GRU, LSTM, HyperLSTM

SAMPLE_RATE, QUALITY, LOWEST, HIGHEST, TURN = 16_000, 10.0, 200.0, 6_400.0, 40
UNSCORED = 50  # samples at the start, when the filter has hardly begun
SYSTEMS = {
    "LSTM": lambda: LSTM(2, 24),
    "GRU": lambda: GRU(2, 28),
    "HyperLSTM": lambda: HyperLSTM(1, 16, hyper_size=8, hyper_embed_size=2, context_size=1),
}
RATES, SEEDS = (0.01, 0.03, 0.1), (1, 2, 3)
RECORD = Path(__file__).parent / "records" / "conditioned_filter.json"


def sounds(generator: np.random.Generator, T: int, B: int) -> list[torch.Tensor]:
    """Returns noise, the knob from -1 to 1 and the filtered noise, each [T, B, 1]."""
    x, places = generator.standard_normal((T, B)), generator.random((2 + T // TURN, B))
    position = np.arange(T) / TURN
    place, share = position.astype(int), (position % 1)[:, None]
    share = share**2 * (3 - 2 * share)
    knob = places[place] * (1 - share) + places[place + 1] * share
    g = np.tan(np.pi * LOWEST * (HIGHEST / LOWEST) ** knob / SAMPLE_RATE)
    a = 1 / (1 + g * (g + 1 / QUALITY))
    band, low, y = np.zeros(B), np.zeros(B), np.empty((T, B))
    # The trapezoidal rule (Zavalishin 2012): stable for a cutoff that changes at every sample.
    for t in range(T):
        difference = x[t] - low
        v = a[t] * (band + g[t] * difference)
        y[t] = low + g[t] * v
        band, low = 2 * v - band, 2 * y[t] - low
    values = np.stack([x / 3, 2 * knob - 1, y / 3])
    return list(torch.tensor(values, dtype=torch.float32).unsqueeze(-1))


class Filter(nn.Module):
    """A recurrent layer and a linear output; the layer reads the knob as its context if it takes one."""

    def __init__(self, system: str):
        super().__init__()
        self.layer, self.output = (layer := SYSTEMS[system]()), nn.Linear(layer.hidden_size, 1)

    def forward(self, x, knob):
        if not self.layer.context_size:
            return self.output(self.layer(torch.cat([x, knob], dim=-1))[0])
        return self.output(self.layer(x, context=knob)[0])


def error(model: Filter, x, knob, y) -> float:
    with torch.no_grad():
        return float((model(x, knob) - y)[UNSCORED:].square().sum() / y[UNSCORED:].square().sum())


def train(system: str, rate: float, seed: int, updates: int) -> tuple[Filter, dict]:
    """Trains on fresh sounds, 16 of 128 samples an update; validates and tests on 32 of 1,000."""
    torch.manual_seed(seed)
    model, generator = Filter(system), np.random.default_rng(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    for _ in range(updates):
        x, knob, y = sounds(generator, 128, 16)
        loss = (model(x, knob) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    valid, test = (error(model, *sounds(np.random.default_rng(10**6 + n), 1000, 32)) for n in (1, 2))
    run = {"system": system, "parameters": sum(weight.numel() for weight in model.parameters())}
    return model, run | {"rate": rate, "seed": seed, "updates": updates, "valid": valid, "test": test}


def best_runs(runs: list[dict]) -> dict[str, list[dict]]:
    """Returns by system the runs at the rate with the lowest mean validation error."""
    best = {}
    for system in dict.fromkeys(run["system"] for run in runs):
        by_rate = [[run for run in runs if (run["system"], run["rate"]) == (system, rate)] for rate in RATES]
        best[system] = min(filter(None, by_rate), key=lambda group: np.mean([run["valid"] for run in group]))
    return best


@styled()
def draw(runs: list[dict]):
    """Returns a figure: a sound, the knob and what a HyperLSTM makes of it; and errors by the cutoff."""
    x, knob, y = sounds(np.random.default_rng(10**6 + 2), 1000, 32)
    cutoff = LOWEST * (HIGHEST / LOWEST) ** (0.5 + 0.5 * knob)
    bins = np.geomspace(LOWEST, HIGHEST, 6)
    figure = new_figure(4.2, 10.0)
    (sound, by_cutoff), shown = figure.subplots(1, 2), slice(300, 500)
    sound.plot(range(200), y[shown, 0, 0], color="black", label="filter")
    for number, (system, best) in enumerate(best_runs(runs).items()):
        model, _ = train(system, best[0]["rate"], best[0]["seed"], best[0]["updates"])
        with torch.no_grad():
            given = model(x, knob)
        if system == "HyperLSTM":
            sound.plot(range(200), given[shown, 0, 0], "--", color=colour_of(number), label=system)
        errors = []
        for low, high in zip(bins[:-1], bins[1:], strict=True):
            here = (cutoff >= low) & (cutoff <= high) & (torch.arange(1000)[:, None, None] >= UNSCORED)
            errors.append(100 * float((given - y)[here].square().sum() / y[here].square().sum()))
        by_cutoff.plot(errors, "o-", color=colour_of(number), label=system)
    turned = sound.twinx()
    turned.plot(range(200), cutoff[shown, 0, 0], color="0.6", lw=1)
    turned.set(yscale="log", ylabel="cutoff of the filter, Hz (grey)")
    turned.set_yticks((ticks := [400, 800, 1600, 3200]), ticks, minor=False)
    turned.minorticks_off()
    turned.grid(False)
    sound.set(title="A filter whose knob turns", xlabel="sample", ylabel="filtered noise")
    by_cutoff.set(title="Error by the place of the knob", xlabel="cutoff, Hz", ylim=(0, None))
    by_cutoff.set_ylabel("energy of the error, % of the sound")
    names = [f"{low:.0f} to {high:.0f}" for low, high in zip(bins[:-1], bins[1:], strict=True)]
    by_cutoff.set_xticks(range(len(names)), names, fontsize=8)
    sound.legend(loc="lower right")
    by_cutoff.legend()
    return figure


def table(runs: list[dict]) -> str:
    """Returns for each system the test errors at its best rate."""
    lines = ["| system | parameters | rate | test error of each seed | mean |", "|---|---|---|---|---|"]
    for system, best in best_runs(runs).items():
        errors = [run["test"] for run in best]
        shown = [", ".join(f"{100 * value:.2f} %" for value in each) for each in (errors, [np.mean(errors)])]
        lines.append(f"| {system} | {best[0]['parameters']:,} | {best[0]['rate']} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.conditioned_filter", description=__doc__)
    parser.add_argument("--record", type=Path, default=RECORD, help="JSON of all trainings, extended")
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the trained systems there, PNG")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    runs = json.loads(args.record.read_text()) if args.record.exists() else []
    for wanted in product(SYSTEMS, RATES, SEEDS, [args.updates]):
        if wanted not in [tuple(run[key] for key in ("system", "rate", "seed", "updates")) for run in runs]:
            runs.append(train(*wanted)[1])
            with replace_file(args.record) as file:
                file.write((json.dumps(runs, indent=1) + "\n").encode())
    print(table(runs))
    if args.picture:
        with replace_file(args.picture) as file:
            file.write(encode(draw(runs), "png"))


if __name__ == "__main__":
    main()
