"""Heavy libraries (ray, torch, vllm) are imported in here and nowhere else."""
