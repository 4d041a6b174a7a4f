"""Training: corpus, tokenizer, losses, the loop, and how well the heads draft. `train`, `evaluate_heads`."""
