#!/bin/sh
# Trains the MTP layer of this folder: recipe.sh MODEL FOLDER
#
# MODEL is SmolLM2-135M-Instruct without an MTP layer (mtp-jax pull smollm2-135m --without-head). FOLDER has prompts.jsonl
# (mtp_jax.train.prompts), judged.txt (what no training text may share eight words in a row with), and humaneval.jsonl and
# spec_bench.jsonl, the request lines that the layer is judged by. It receives the texts (rows.npz, judged-*.npz), the
# layer (head/) and the run's log (head.work/log.jsonl). The sizes below are those of one NVIDIA H200.
set -eu
model=$1 folder=$2
: "${PYTHON:=python}" "${QUESTIONS:=36864}" "${LIMIT:=10000}" "${SAMPLED_AT_ONCE:=2048}" "${MAX_TOKENS:=224}" "${QUESTION_TOKENS:=96}"
: "${STEPS:=3300}" "${BATCH_SIZE:=96}" "${PEAK_RATE:=2e-3}" "${DISTILLATION:=0.8}"

"$PYTHON" -m mtp_jax.train.rollouts --model "$model" --dtype bfloat16 --prompts "$folder/prompts.jsonl" \
    --limit "$LIMIT" --questions "$QUESTIONS" --question-tokens "$QUESTION_TOKENS" --not-in "$folder/judged.txt" \
    --judged "$folder/humaneval.jsonl" --judged "$folder/spec_bench.jsonl" --batch-size "$SAMPLED_AT_ONCE" \
    --max-tokens "$MAX_TOKENS" --out "$folder"
"$PYTHON" -m mtp_jax.cli train heads --model "$model" --new-mtp-layers 1 --data "$folder/rows.npz" \
    --held-out "$folder/judged-humaneval.npz" --held-out "$folder/judged-spec_bench.npz" \
    --steps "$STEPS" --batch-size "$BATCH_SIZE" --peak-rate "$PEAK_RATE" --warmup-steps $((STEPS / 20)) \
    --distillation "$DISTILLATION" --compute-dtype bfloat16 --save-every $((STEPS / 4 + 1)) \
    --evaluate-every $((STEPS / 4 + 1)) --out "$folder/head" --head-only
