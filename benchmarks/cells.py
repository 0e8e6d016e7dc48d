"""Forward and backward of every cell on every backend in every dtype, compared with torch.nn.LSTM."""

import numpy as np
import torch

from benchmarks.contenders import (
    BASELINE,
    SizesConfig,
    batch_for,
    build_layer,
    check_contenders,
    contenders_of,
)
from benchmarks.floors import Floor, products_of
from benchmarks.machine import DTYPES, measuring
from benchmarks.report import make_report, start
from benchmarks.timing import interleave, rows_of, time_pass

Config = SizesConfig
SMOKE = dict(hidden=8, input=5, batch=3, length=4, hyper_size=4, hyper_embed_size=2, rhn_depth=2, repeats=2)


def run(config: Config) -> dict:
    """Checks and times all contenders; the rows begin with the baseline.

    Raises:
        UsageError: a cell gives wrong results, or its sizes cannot work.
    """
    with measuring(config):
        contenders, errors, products = [], {}, {}
        for name in (BASELINE, *config.cells):
            layers = contenders_of(name, config)
            errors |= check_contenders(layers, config)
            contenders += layers
            with torch.device("meta"):
                # The baseline has the products of the LSTM's cell.
                layer = build_layer("lstm" if name == BASELINE else name, config)
            products[name] = products_of(layer, config.batch)
        floors = {
            (name, dtype): Floor(products[name], config.length, config.device, DTYPES[dtype])
            for name in products
            for dtype in config.dtype
        }
        batches = {dtype: batch_for(config, dtype) for dtype in config.dtype}
        by_key = {contender.key: contender for contender in contenders}

        def measure(key):
            if key in floors:
                return floors[key].time()
            with by_key[key].running() as module:
                return time_pass(module, *batches[by_key[key].dtype])

        seconds = interleave([*by_key, *floors], config.repeats, measure)
        tokens = config.length * config.batch
        rows = rows_of(contenders, errors, {key: seconds[key] for key in by_key}, tokens)
        for contender, row in zip(contenders, rows, strict=True):
            name, _, dtype = contender.key
            flop = sum(product.flop(config.length) for product in products[name])
            own = seconds[contender.key].sum(axis=1)
            row["GFLOP"], row["GFLOP/s"] = flop / 1e9, flop / 1e9 / float(np.median(own))
            row["% of floor"] = float(100 * np.median(seconds[name, dtype].sum(axis=1) / own))
        return make_report("cells", config, rows)


if __name__ == "__main__":
    start(__name__)
