"""Knowledge distillation inside Megatron-Core: offline top-K targets and a fused, chunked KL loss."""
