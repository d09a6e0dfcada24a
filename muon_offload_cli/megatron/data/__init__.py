"""Training tokens: where they come from, how they reach Megatron's data sets and its loss."""
