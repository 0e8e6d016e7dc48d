"""Options out of range, names that do not exist, and combinations that cannot work."""

from helpers.hostile import CHAR_LM, COPYING, GNMT, Case, evaluation, generation, training

# For fairseq-train of a translation model.
ON_TRAINING = """
--lr -1 | --lr 0 | --lr nan | --lr inf | --lr text | --lr 0.1,nan | --lr 1e400
--clip-norm nan | --clip-norm -1 | --clip-norm inf
--label-smoothing 2 | --label-smoothing -0.1 | --label-smoothing nan | --label-smoothing 1
--max-tokens 0 | --max-tokens -5 | --batch-size 0 --max-tokens 100 | --batch-size -3 | --max-tokens-valid 0
--batch-size-valid -1 | --required-batch-size-multiple 0 | --required-batch-size-multiple -8
--seed -1 | --seed 99999999999999999999 | --seed 4294967296
--num-workers 500 | --num-workers -1 | --data-buffer-size -1
--max-epoch -1 | --max-update -1 | --stop-time-hours -1 | --stop-time-hours nan | --stop-min-lr nan
--stop-min-lr 1 | --update-freq 0 | --update-freq -1 | --update-freq 1,0 | --update-freq a
--log-interval 0 | --log-interval -1 | --save-interval 0 | --save-interval -1
--save-interval-updates -1 | --validate-interval 0 | --validate-interval -1 | --validate-interval-updates -1
--validate-after-updates -1 | --keep-interval-updates -2 | --keep-last-epochs -2
--keep-best-checkpoints -2
--disable-validation --patience 3 | --disable-validation --keep-best-checkpoints 1
--disable-validation --lr-scheduler reduce_lr_on_plateau
--patience 0 | --patience -2 | --curriculum -1 | --max-valid-steps 0 | --max-valid-steps -1
--adam-betas (0.9,2) | --adam-betas (0.9) | --adam-betas text | --adam-betas (nan,0.9) | --adam-eps -1
--adam-eps nan | --weight-decay nan | --weight-decay -1 | --adam-betas __import__('os').mkdir('executed')
--dropout 1.5 | --dropout -0.1 | --dropout nan | --hidden-size 0 | --hidden-size -4
--hidden-size 1000000000
--hidden-size 200000 | --layers 0 | --layers 1000000000 | --embed-dim 0 | --embed-dim 1000000000
--h-detach 2
--h-detach nan | --recompute-steps -1 | --source-lang xx | --target-lang xx
--source-lang en --target-lang en
--max-source-positions 0 | --max-source-positions 2 | --max-target-positions -1
--train-subset nope | --valid-subset nope | --valid-subset valid,nope | --valid-subset=
--length-penalty bogus | --length-penalty gnmt:nan | --coverage-penalty nan | --coverage-penalty -1
--beam-size-threshold nan | --beam-size-threshold -1
--subword-sampling nan | --subword-sampling -1 | --subword-nbest 1 | --subword-nbest 513
--arch lstm_gnmt_smal | --task gnmt_translatoin | --criterion label_smoothed_cross_entrop | --optimizer adm
--lr-scheduler fixd | --archh lstm | --hiden-size 8 | --arch | --fp16 --bf16
--arch char_lm | --arch lstm_copying | --task char_lm | --task synthetic
--criterion problem_loss | --criterion mixture_density | --arch handwriting
--lr-scheduler inverse_sqrt --warmup-updates -1 | --lr-scheduler inverse_sqrt --warmup-updates 0
--lr-scheduler cosine --max-update 0 | --lr-scheduler polynomial_decay --total-num-update 0
--lr-scheduler reduce_lr_on_plateau --lr-patience -1 | --lr-shrink nan --lr-scheduler reduce_lr_on_plateau
--lr-shrink -1 --lr-scheduler reduce_lr_on_plateau | --force-anneal -1 --lr-scheduler fixed
--lr-shrink 0 --force-anneal 1 --lr-scheduler fixed
--best-checkpoint-metric nope | --finetune-from-model nope.pt | --restore-file nope.pt
--optimizer-overrides text | --optimizer-overrides {'lr':} | --log-format xml
--tensorboard-logdir /dev/null/x
--save-dir /dev/null/x | --save-dir /proc/x | --save-dir /dev/full | --save-dir /proc/self/exe/x
--log-file /nowhere/log | --user-dir nowhere
--distributed-world-size 2 | --max-tokens 1 --batch-size 4
--distributed-world-size 0 | --distributed-world-size -1 | --num-shards 0 | --upsample-primary 0
--fp16-init-scale 0 | --ema-decay 2 --store-ema | --ema-decay nan --store-ema | --dataset-impl bogus
--ema-decay 0.9 | --ema-fp32 | --attention-score general --attention-size 8
--attention-score general --attention-normalised
--dataset-impl raw | --num-batch-buckets -1 | --clip-norm-type bogus | --ddp-backend bogus
--eval-bleu --eval-bleu-args text | --eval-bleu --eval-bleu-args {"beam":-1}
--reset-optimizer --finetune-from-model x.pt
--empty-cache-freq -1 | --fixed-validation-seed -1 | --keep-interval-updates-pattern -5
--attention nope | --cell nope | --num-shards 2 | --criterion nat_loss
--valid-subset valid,test --combine-valid-subsets | --checkpoint-suffix _a --keep-best-checkpoints 1
--lr-scheduler triangular
"""

# For fairseq-train of a character language model.
ON_CHAR_LM = """
--cell nope | --cell lst | --tokens-per-sample 0 | --tokens-per-sample 1000000000 | --batching nope
--valid-protocol nope | --valid-protocol carry:0 | --zoneout 2 | --zoneout nan | --forget-bias nan
--batch-size 100000 | --batch-size 1000000000000 | --valid-subset nope | --train-subset nope
--task language_modeling
--arch lstm_gnmt_small | --hidden-size 1000000000 | --output-dropout 1.5 | --output-init nope
--criterion cross_entropi
--arch ln_hyperlstm_ptp | --num-workers 500 | --lr -1 | --update-freq 0 | --embed-dim -3
--optimizer nag --momentum nan
--optimizer sgd --momentum 2 | --optimizer adam_l1 --lr nan | --max-epoch -1
--criterion mixture_density
"""

ON_COPYING = """
--problem nope | --length 0 | --length -1 | --epoch-updates 0 | --valid-examples 0 | --length 1000000000000
--h-detach 2 | --batch-size 0 | --hidden-size nan | --criterion char_cross_entropy | --arch lstm_addin
--arch lstm_gnmt_small | --problem mnist
"""

# For fairseq-generate and, where their name says so, fairseq-interactive.
ON_GENERATION = """
--beam 0 | --beam -1 | --beam 1000000000 | --nbest 0 | --nbest 5 | --max-len-a -1 | --max-len-a nan
--max-len-b 0 | --max-len-b -5 | --min-len -1 | --min-len 500 | --lenpen nan | --lenpen 1e5 | --lenpen text
--unkpen nan | --temperature 0 | --temperature -1 | --temperature nan | --sampling-topk -5
--sampling-topk 5
--sampling --sampling-topp 2 | --sampling --sampling-topp nan | --sampling --sampling-topk 0
--length-penalty bogus | --length-penalty gnmt:nan | --coverage-penalty nan | --coverage-penalty -1
--beam-size-threshold nan | --beam-size-threshold -2 | --max-tokens 0 | --batch-size 0 | --batch-size -1
--gen-subset nope | --gen-subset tset | --seed -1 | --num-workers 500 | --num-shards 0
--num-shards 2 --shard-id 5
--shard-id -1 | --prefix-size -1 | --no-repeat-ngram-size -1 | --model-overrides text
--model-overrides {'hidden_size':12} | --model-overrides 5 | --model-overrides {1:2} | --task translatoin
--diverse-beam-groups 0 | --diverse-beam-groups 3 --beam 2 | --diversity-rate nan | --source-lang xx
--target-lang xx | --path a.pt:b.pt | --path= | --scoring bleuu | --post-process nope | --remove-bpe nope
--results-path /dev/null/x | --replace-unk nowhere | --lm-path nowhere.pt | --lm-weight nan
--skip-invalid-size-inputs-valid-test --max-source-positions 0 | --checkpoint-shard-count 0 | --beeam 3
--iter-decode-max-iter -1 | --constraints nope | --dataset-impl bogus
"""

ON_INTERACTIVE = """
--beam 0 | --buffer-size -1 | --input nowhere.txt | --input . | --nbest 9 | --lenpen nan
--batch-size 0 | --path nope.pt | --max-len-b -5 | --temperature nan | --source-lang xx
--buffer-size 1 --batch-size 2 | --print-alignment soft | --num-shards 2
"""

ON_EVALUATION = """
--protocol nope | --protocol carry:0 | --protocol window:5/9 | --gen-subset nope | --batch-size 0
--batch-size -1
--tokens-per-sample 0 | --context-window -1 | --context-window 5000 | --num-shards 2 | --num-shards 0
--seed -1
--num-workers 500 | --model-overrides text | --max-tokens 0 | --softmax-batch 0 | --softmax-batch -1
--task translation | --task language_modeling | --path nope.pt | --model-overrides {'hidden_size':12}
"""


def _rows(text: str) -> list[list[str]]:
    return [row.split() for line in text.split("\n") for row in line.split("|") if row.strip()]


COMMANDS = {
    "train": ("train", ON_TRAINING, lambda s, row: training(s, *row, model=GNMT), ""),
    "train char_lm": ("train", ON_CHAR_LM, lambda s, row: training(s, *row, model=CHAR_LM), ""),
    "train copying": ("train", ON_COPYING, lambda s, row: training(s, *row, model=COPYING), ""),
    "generate": ("generate", ON_GENERATION, lambda s, row: generation(s, *row), ""),
    "interactive": ("interactive", ON_INTERACTIVE, lambda s, row: generation(s, *row), "▁one\n"),
    "eval_lm": ("eval_lm", ON_EVALUATION, lambda s, row: evaluation(s, *row), ""),
}

HYDRA = """
common: {{user_dir: {user_dir}, cpu: true, log_format: none}}
task: {{_name: char_lm, data: {data}, tokens_per_sample: 20}}
dataset: {{batch_size: 2}}
model: {{_name: char_lm, cell: lstm, hidden_size: 8}}
criterion: {{_name: char_cross_entropy}}
optimizer: {{_name: adam}}
lr_scheduler: {{_name: fixed}}
optimization: {{lr: [0.01], max_update: 2}}
checkpoint: {{save_dir: {here}/saved}}
hydra: {{job: {{chdir: false}}, run: {{dir: .}}, output_subdir: null}}
"""
HYDRA_ROWS = """
task.data=???; optimization.lr=[-1]; optimization.lr=[nan]; optimization.clip_norm=nan
dataset.num_workers=500
optimization.max_epoch=-1; common.seed=-1; task._name=char_lmm; model._name=char_lmn; criterion._name=nope
optimizer._name=adm; lr_scheduler._name=fixd; dataset.batch_size=0; dataset.batch_size=null
task.data=nowhere
model.hidden_size=0; +model.hiden_size=8; +task.batching=nope; dataset.valid_subset=nope
common.log_interval=0
task.dta=x; tsk.data=x; optimization.max_updat=2; model=nope; task.data=[; --config-name
+optimizer.adam_betas=[0.9,2]; checkpoint.save_interval=-1; optimization.update_freq=[0]
"""


def _hydra(row: str):
    """The arguments of fairseq-hydra-train with a whole configuration, and one value of it overridden."""

    def arguments(scene) -> list:
        text = HYDRA.format(user_dir=scene.user_dir, data=scene.chars, here=scene.here)
        (scene.here / "hostile.yaml").write_text(text)
        name = "hostil" if row == "--config-name" else "hostile"
        given = ["--config-dir", scene.here, "--config-name", name]
        return given if row.startswith("--") else [*given, row]

    return arguments


def option_cases() -> list[Case]:
    """Every row, for its program."""
    cases = []
    for name, (program, rows, command, stdin) in COMMANDS.items():
        for row in _rows(rows):
            made = lambda scene, row=row, command=command: command(scene, row)  # noqa: E731
            cases.append(Case(f"option/{name}/{' '.join(row)}", program, made, stdin=stdin))
    rows = [row.strip() for row in HYDRA_ROWS.replace("\n", ";").split(";") if row.strip()]
    cases += [Case(f"option/hydra/{row}", "hydra_train", _hydra(row)) for row in rows]
    control = Case("control/hydra", "hydra_train", _hydra("common.cpu=true"), harmless=True)
    return [control, *cases]
