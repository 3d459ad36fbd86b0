#!/usr/bin/env bash
# Train a small Mixture-of-Experts model on four CPU processes with expert parallelism, reload it
# with stock transformers and print a report. This needs no GPU and no network, and takes about five
# minutes on 2 cores.
#
#   bash examples/run_demo.sh           writes the results to out/demo
#   bash examples/run_demo.sh --check   also trains in one stock process and compares both runs
set -euo pipefail
cd "$(dirname "$0")/.."

check=false
logging_steps=4
case "${1:-}" in
    "") ;;
    --check) check=true; logging_steps=1 ;;
    *) echo "usage: $0 [--check]" >&2; exit 2 ;;
esac

export OMP_NUM_THREADS=1  # four processes share the cores
export HF_HUB_OFFLINE=1
export TOKENIZERS_PARALLELISM=false
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

out=out/demo
rm -rf "$out"
mkdir -p "$out"

# The length of the documentation depends on the Python version. --eval_multiple 32 evaluates only
# whole batches of 4 processes x 8 blocks.
data=(--block_size 128 --eval_blocks 160 --eval_multiple 32)
training=(
    --model "$out/start" "${data[@]}" --use_cpu
    --max_steps 160 --learning_rate 6e-3 --warmup_steps 20 --lr_scheduler_type cosine
    --weight_decay 0.1 --adam_beta2 0.95
    --dataloader_drop_last --logging_steps $logging_steps --eval_strategy steps --eval_steps 40
    --save_strategy no --report_to none
)

echo "== 1/3 Make a small untrained model"
python examples/make_small_model.py "$out/start"

echo "== 2/3 Train on 4 processes, with the experts split over 2"
accelerate launch --config_file examples/accelerate/cpu_4.yaml examples/finetune_text.py \
    "${training[@]}" --ep_size 2 --output_dir "$out/trained" \
    --per_device_train_batch_size 4 --per_device_eval_batch_size 8

report=(--start "$out/start" --run "$out/trained" "${data[@]}")
if $check; then
    # Accelerate gives batches to ranks in turn, so one batch of 16 equals 4 batches of 4 blocks.
    echo "== Train in one stock process for comparison"
    python examples/finetune_text.py \
        "${training[@]}" --ep_size 0 --output_dir "$out/one_process" \
        --per_device_train_batch_size 16 --per_device_eval_batch_size 32
    report+=(--one_process "$out/one_process")
fi

echo "== 3/3 Report of a stock process"
python examples/demo_report.py "${report[@]}"
echo "The trained model, in hub layout: $out/trained"
