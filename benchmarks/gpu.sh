#!/usr/bin/env bash
# All checks that need one large GPU, with torch and transformers but without vLLM: at most 8 minutes.
# Usage: benchmarks/gpu.sh [folder for the results]
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-${OUT:-out/gpu}}
python=${PYTHON:-python3}
export PYTHONPATH=. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4 HF_HUB_OFFLINE=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
mkdir -p "$out"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader | tee "$out/gpu.txt"
timeout 450 "$python" benchmarks/gpu_profile.py --device cuda --limit-s 400 --out "$out" 2>&1 | tee "$out/log.txt"
