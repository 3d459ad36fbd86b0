#!/usr/bin/env bash
# Train a small vision-language Mixture-of-Experts model to read scanned digits, on four CPU
# processes with expert and sequence parallelism. Half of the samples are only text. Then reload the
# model with stock transformers and print a report. This needs no GPU and no network, and takes
# about four minutes on 2 cores.
#
#   bash examples/run_vision_demo.sh           writes the results to out/demo_vision
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# -gt 0 ]; then
    echo "usage: $0" >&2
    exit 2
fi

export OMP_NUM_THREADS=1  # four processes share the cores
export HF_HUB_OFFLINE=1
export TOKENIZERS_PARALLELISM=false
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

out=out/demo_vision
rm -rf "$out"
mkdir -p "$out"

echo "== 1/3 Make a small untrained model"
python examples/make_small_vision_model.py "$out/start"

echo "== 2/3 Train on 4 processes, with experts, sequences and pictures split over 2"
# The 320 held-out samples are 5 whole batches of 32 on each of the 2 data-parallel ranks.
accelerate launch --config_file examples/accelerate/cpu_4.yaml examples/finetune_vision.py \
    --model "$out/start" --output_dir "$out/trained" --use_cpu --ep_size 2 --sp_size 2 \
    --per_device_train_batch_size 8 --per_device_eval_batch_size 32 \
    --max_steps 160 --learning_rate 3e-3 --warmup_steps 20 --lr_scheduler_type cosine \
    --weight_decay 0.1 --adam_beta2 0.95 \
    --logging_steps 8 --eval_strategy steps --eval_steps 80 --save_strategy no --report_to none

echo "== 3/3 Report of a stock process"
python examples/vision_report.py --start "$out/start" --run "$out/trained" --plot "$out/digits.png"
echo "The trained model: $out/trained"
