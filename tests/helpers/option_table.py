"""How every option of fairseq's programs ends with a model of this project.

``PYTHONPATH=tests python -m helpers.option_table > docs/options.md`` writes the page.
``test_options.py`` compares it with this table and tries every option.
"""

from helpers.option_values import VALUES

WORKS, REFUSED, MEANINGLESS = "works", "refused", "no meaning"

GPU = "for GPUs; no effect on a CPU"
FSDP = "for fairscale's sharding, which --ddp-backend fully_sharded asks for"
STAGES = "for models cut into stages, which no model here can be"
TRAINING = "goes with a training's --h-detach or --c-detach"

# Refused by every program that has the option; the reason in a few words.
REFUSALS = {
    "--tpu": "needs torch_xla",
    "--fp16": "trains on a GPU only",
    "--memory-efficient-fp16": "trains on a GPU only",
    "--profile": "is CUDA's profiler",
    "--use-plasma-view": "pyarrow has no plasma any more",
    "--quantization-config-path": "quantises transformers",
    "--pipeline-model-parallel": "no model here can be cut into stages",
    "--zero-sharding": "needs fairscale",
    "--cpu-offload": "goes with --ddp-backend fully_sharded",
    "--fp16-adam-stats": "needs apex",
    "--write-checkpoints-asynchronously": "needs iopath",
}
# Refused by some programs.
REFUSED_BY = {
    ("generate", "--replace-unk"): "needs --dataset-impl raw; fairseq-interactive takes it",
    ("generate", "--constraints"): "are part of fairseq-interactive's input",
    ("interactive", "--score-reference"): "the input has no references",
    ("generate", "--lm-path"): "a character model knows no pieces; for fairseq's own language models",
    ("generate", "--print-step"): "for models that are not autoregressive",
    ("generate", "--retain-iter-history"): "for models that are not autoregressive",
    ("eval_lm", "--post-process"): "characters are not joined",
    ("eval_lm", "--num-shards"): "a text is evaluated by one process",
}
REFUSED_BY |= {
    ("train", "--num-shards"): "torchrun divides the data",
    ("validate", "--num-shards"): "torchrun divides the data",
    ("interactive", "--num-shards"): "the input is translated by one process",
}
DETACHING = ("--h-detach-final", "--c-detach-final", "--detach-anneal-updates", "--detach-until")
OF_A_PROBLEM = ("--problem", "--copying-input", "--mnist-dir", "--mnist-split", "--permutation-seed")
REFUSED_BY |= {
    (program, option): TRAINING for program in ("generate", "interactive", "validate") for option in DETACHING
}
REFUSED_BY |= {("validate", option): "the problem is the checkpoint's" for option in OF_A_PROBLEM}
REFUSED_BY |= {
    (program, option): "not alone: give both languages or neither"
    for program in ("train", "validate", "generate", "interactive")
    for option in ("--source-lang", "--target-lang")
}
# These programs take the option although it is refused in training.
IN_TRAINING = (
    "--fp16",
    "--memory-efficient-fp16",
    "--quantization-config-path",
)
TAKEN_BY = {
    (program, option)
    for program in ("eval_lm", "generate", "interactive", "validate")
    for option in IN_TRAINING
}
# Taken, and without an effect on any of these models.
NO_MEANING = {
    "--amp": GPU,
    "--amp-batch-retries": GPU,
    "--amp-init-scale": GPU,
    "--amp-scale-window": GPU,
    "--bucket-cap-mb": "for several workers",
    "--all-gather-list-size": "the lists have any size here",
    "--ddp-comm-hook": "for several workers",
    "--context-window": "--protocol says what a symbol's context is",
    "--device-id": "set by torchrun",
    "--empty-cache-freq": GPU,
    "--fast-stat-sync": "obsolete in fairseq",
    "--find-unused-parameters": "for several workers",
    "--fix-batches-to-gpus": "for several workers",
    "--fp16-init-scale": GPU,
    "--fp16-no-flatten-grads": GPU,
    "--fp16-scale-tolerance": GPU,
    "--fp16-scale-window": GPU,
    "--fp32-reduce-scatter": FSDP,
    "--gradient-as-bucket-view": "for several workers",
    "--broadcast-buffers": "for several workers",
    "--heartbeat-timeout": "for several workers",
    "--localsgd-frequency": "for --ddp-backend slowmo",
    "--min-loss-scale": GPU,
    "--model-parallel-size": "for Megatron's models",
    "--no-reshard-after-forward": FSDP,
    "--not-fsdp-flatten-parameters": FSDP,
    "--nprocs-per-node": "set by torchrun",
    "--on-cpu-convert-precision": GPU,
    "--pipeline-balance": STAGES,
    "--pipeline-checkpoint": STAGES,
    "--pipeline-chunks": STAGES,
    "--pipeline-decoder-balance": STAGES,
    "--pipeline-decoder-devices": STAGES,
    "--pipeline-devices": STAGES,
    "--pipeline-encoder-balance": STAGES,
    "--pipeline-encoder-devices": STAGES,
    "--plasma-path": "for --use-plasma-view",
    "--slowmo-base-algorithm": "for --ddp-backend slowmo",
    "--slowmo-momentum": "for --ddp-backend slowmo",
    "--threshold-loss-scale": GPU,
    "--use-bmuf": "for several workers",
    "--use-sharded-state": FSDP,
    "--beam-mt": "for speech",
    "--lenpen-mt": "for speech",
    "--max-len-a-mt": "for speech",
    "--max-len-b-mt": "for speech",
    "--eos-token": "for speech",
    "--decoding-format": "for models that are not autoregressive",
    "--iter-decode-eos-penalty": "for models that are not autoregressive",
    "--iter-decode-force-max-iter": "for models that are not autoregressive",
    "--iter-decode-max-iter": "for models that are not autoregressive",
    "--iter-decode-with-beam": "for models that are not autoregressive",
    "--iter-decode-with-external-reranker": "for models that are not autoregressive",
    "--retain-iter-history": "for models that are not autoregressive",
    "--no-beamable-mm": "obsolete in fairseq",
    "--print-step": "for models that are not autoregressive",
    "--pad": "fairseq's own number of a symbol",
    "--eos": "fairseq's own number of a symbol",
    "--unk": "fairseq's own number of a symbol",
}
# The corpus of a character model and the examples of a problem are cut by their tasks, in a fixed order.
FIXED_BATCHES = (
    "--required-batch-size-multiple",
    "--required-seq-len-multiple",
    "--skip-invalid-size-inputs-valid-test",
    "--dataset-impl",
    "--grouped-shuffling",
    "--update-epoch-batch-itr",
    "--update-ordered-indices-seed",
    "--curriculum",
)
NOTES = dict.fromkeys(FIXED_BATCHES, "no meaning for char_lm and synthetic, which cut their own batches")
NOTES |= {
    "--max-tokens": "rows of --tokens-per-sample, or of a problem's steps, with char_lm and synthetic",
    "--memory-efficient-bf16": "with --optimizer adam; adam_l1 and fused_adam refuse it",
    "--sentence-avg": "in translation; the losses of the other tasks ignore it",
    "--diverse-beam-groups": "--beam must be a multiple",
    "--store-ema": "`rhhn average --ema` writes the averages as a checkpoint",
    "--bpe": "sentencepiece; those that fairseq cannot configure are refused",
    "--task": "without it, evaluation takes the checkpoint's",
}


def expected(program: str, option: str) -> str:
    """WORKS, REFUSED or MEANINGLESS."""
    if (program, option) in REFUSED_BY or (option in REFUSALS and (program, option) not in TAKEN_BY):
        return REFUSED
    return MEANINGLESS if option in NO_MEANING else WORKS


def reason(program: str, option: str) -> str:
    """A few words beside the outcome; "" for none."""
    known = REFUSED_BY.get((program, option)) or NO_MEANING.get(option) or NOTES.get(option, "")
    return REFUSALS.get(option, known) if expected(program, option) == REFUSED else known


NAMES = {
    "train": "fairseq-train",
    "eval_lm": "fairseq-eval-lm",
    "generate": "fairseq-generate",
    "interactive": "fairseq-interactive",
    "validate": "fairseq-validate",
}

HEAD = """# fairseq's options

The table lists every option in `--help` of fairseq's programs (with `--arch` or `--task`). Each was tried on
a CPU, with a tiny model of every task that the program is for.

- "works": the program accepts the option and finishes without an error.
- "refused": the program ends in one line that says why.
- "no meaning": the program accepts the option, but it has no effect.

Options of a scheduler, optimizer or criterion that has to be selected first are not listed.
`pytest --slow tests/tasks/test_options.py` tries all options.

| option | outcome | programs, and remarks |
|---|---|---|
"""


def page(programs_of: dict[str, list[str]]) -> str:
    """The table in Markdown. ``programs_of`` has the programs of every option, in the order of the table."""
    lines = []
    for option, programs in programs_of.items():
        outcomes = {}
        for program in programs:
            outcomes.setdefault((expected(program, option), reason(program, option)), []).append(program)
        example = " ".join(text for text in (option, _quoted(VALUES[option])) if text)
        for (outcome, why), same in outcomes.items():
            scope = "" if len(outcomes) == 1 else ", ".join(NAMES[name] for name in same)
            note = ": ".join(text for text in (scope, why) if text)
            lines.append(f"| `{example}` | {outcome} | {note} |\n")
    return HEAD + "".join(lines)


def _quoted(value: str) -> str:
    words = {"PATH", "CHECKPOINT", "AVERAGES", "PIECES", "USER_DIR", "DATA", "INPUT", "LM", "MNIST"}
    if value in words or value in ("ARCH", "TASK", "CRITERION"):
        return value
    return f"'{value}'" if set(value) & set(" {([<") else value


if __name__ == "__main__":
    from helpers.option_walk import programs_of_options

    print(page(programs_of_options()), end="")
